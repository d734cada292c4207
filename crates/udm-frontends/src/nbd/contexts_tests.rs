//! Queries for metadata contexts and their block status.

use super::*;
use std::any::Any;
use std::sync::{Arc, Weak};
use udm_core::errno::EOPNOTSUPP;
use udm_core::{Cx, DeviceControlError, DeviceId, Lane, Limits};

/// A device with checkpoints of these names. The first one still exists.
struct CheckpointDevice {
    names: Vec<String>,
    key: Arc<dyn Any + Send + Sync>,
}

impl CheckpointDevice {
    fn new(names: impl IntoIterator<Item = String>) -> CheckpointDevice {
        CheckpointDevice { names: names.into_iter().collect(), key: Arc::new(()) }
    }

    fn few(names: &[&str]) -> CheckpointDevice {
        CheckpointDevice::new(names.iter().map(|name| (*name).to_owned()))
    }

    fn names(&self, queries: &[&str], list: bool) -> Result<Vec<String>, &'static str> {
        let queries: Vec<String> = queries.iter().map(|q| (*q).to_owned()).collect();
        Ok(match_contexts(self, &queries, list)?.iter().map(MetaContext::name).collect())
    }
}

impl Device for CheckpointDevice {
    fn id(&self) -> DeviceId {
        DeviceId::new()
    }
    fn open(&self, _: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Err(DeviceControlError::new(EOPNOTSUPP, "nobody does I/O here"))
    }
    fn limits(&self) -> Limits {
        Limits::new(Sectors(100))
    }
    fn checkpoints(&self) -> Vec<ChangeTrackingCheckpoint> {
        let none: Weak<()> = Weak::new();
        let key = |i| if i == 0 { Arc::downgrade(&self.key) } else { none.clone() };
        let names = self.names.iter().enumerate();
        names.map(|(i, name)| ChangeTrackingCheckpoint { name: name.clone(), key: key(i) }).collect()
    }
    fn changed(
        &self,
        since: &ChangeTrackingCheckpoint,
        from: Sector,
        len: Sectors,
        out: &mut Extents<RangeChangeStatus>,
    ) {
        match since.key.upgrade() {
            Some(_) => (from.0..from.0 + len.0).for_each(|at| {
                out.push(
                    Sectors(1),
                    if at % 4 == 3 { RangeChangeStatus::Changed } else { RangeChangeStatus::Same },
                );
            }),
            None => out.push(len, RangeChangeStatus::Changed),
        }
    }
}

#[test]
fn queries() {
    let device = CheckpointDevice::few(&["a", "b:c", "ä \n"]);
    let all = ["base:allocation", "qemu:dirty-bitmap:a", "qemu:dirty-bitmap:b:c", "qemu:dirty-bitmap:ä \n"];
    let listed = |queries: &[&str]| device.names(queries, true).unwrap();
    let chosen = |queries: &[&str]| device.names(queries, false).unwrap();
    assert_eq!(listed(&[]), all);
    assert_eq!(listed(&["base:", "qemu:"]), all);
    for space in ["qemu:", "qemu:dirty-bitmap:"] {
        assert_eq!(listed(&[space]), all[1..]);
        assert!(chosen(&[space]).is_empty(), "a choice has no wildcards");
    }
    assert_eq!(listed(&["base:", "base:allocation", "qemu:dirty-bitmap:a"]), all[..2]);
    let strange = ["base", "", "qemu", "base:allocation2", "qemu:dirty-bitmap", "qemu:allocation-depth"];
    assert!(listed(&strange).is_empty() && chosen(&strange).is_empty());
    assert!(chosen(&[]).is_empty() && chosen(&["base:"]).is_empty());
    for name in all {
        assert_eq!(chosen(&[name, name]), [name], "{name}");
    }
    // A name that is also a namespace lists the contexts in it.
    assert_eq!(listed(&["qemu:dirty-bitmap:b:"]), [""; 0]);
}

#[test]
fn nobody_has_too_many() {
    let names = |count: usize| CheckpointDevice::new((0..count).map(|i| format!("s{i}")));
    assert_eq!(names(LISTED_MAX - 1).names(&[], true).map(|all| all.len()), Ok(LISTED_MAX));
    assert!(names(LISTED_MAX).names(&[], true).is_err());
    let device = names(2000);
    assert_eq!(device.names(&["qemu:dirty-bitmap:s1999"], true).map(|all| all.len()), Ok(1));
    let queries: Vec<String> = (0..2000).map(|i| format!("qemu:dirty-bitmap:s{i}")).collect();
    let some =
        |count| device.names(&queries.iter().map(String::as_str).take(count).collect::<Vec<_>>(), false);
    assert_eq!(some(CHOSEN_MAX).map(|all| all.len()), Ok(CHOSEN_MAX));
    assert!(some(CHOSEN_MAX + 1).is_err());
}

#[test]
fn what_is_not_known_is_dirty() {
    let device = CheckpointDevice::few(&["a", "gone"]);
    let queries: Vec<String> = ["qemu:dirty-bitmap:a", "qemu:dirty-bitmap:gone"].map(str::to_owned).into();
    let contexts = match_contexts(&device, &queries, false).unwrap();
    assert_eq!(contexts.iter().map(|c| c.id).collect::<Vec<_>>(), [1, 2]);
    let ask = |i: usize, from, len, max| contexts[i].ask(&device, Sector(from), Sectors(len), max);
    assert_eq!(ask(0, 2, 4, 10), [(Sectors(1), 0), (Sectors(1), 1), (Sectors(2), 0)]);
    assert_eq!(ask(0, 2, 4, 1), [(Sectors(1), 0)]);
    assert_eq!(ask(1, 2, 4, 10), [(Sectors(4), 1)]);
    assert_eq!((contexts[0].unknown(), contexts[1].unknown()), (1, 1));
}
