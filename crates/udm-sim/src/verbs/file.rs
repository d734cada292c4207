//! Model of the configuration file, of the devices applied from it, and of its rereading.
//!
//! The model derives the necessary changes itself, from the file and the devices applied so far. A
//! reconfigure may make these changes and no others, and must report the result for each device.

mod concurrent_changes;
mod finish_check;

use super::model::RegistryModel;
use super::observation::{ListedDevice, ListedDevices, PreviousDeviceNames};
use super::verb_jobs::{ControlVerb, ControlVerbJob, RefusalReasonCounts};
use std::collections::{BTreeMap, BTreeSet};
use udm_core::DeviceId;
use udm_core::errno::EINTR;

/// A device declared in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DeclaredDevice {
    pub(super) name: String,
    pub(super) uuid: Option<String>,
    pub(super) table: String,
    pub(super) read_only: bool,
}

impl DeclaredDevice {
    fn words(&self) -> Vec<&str> {
        self.table.split_whitespace().collect()
    }

    fn uses(&self, name: &str) -> bool {
        self.words().iter().any(|word| word.strip_prefix('@') == Some(name))
    }
}

/// A device that was created or taken over for the file.
#[derive(Clone, Debug)]
struct AppliedDevice {
    wanted: DeclaredDevice,
    id: DeviceId,
}

/// A change of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ReconfigureAction {
    Create,
    Remove,
    Reload,
    Uuid,
    ReadOnly,
}

impl ReconfigureAction {
    fn of(word: &str) -> Option<ReconfigureAction> {
        Some(match word {
            "create" | "take-over" => ReconfigureAction::Create,
            "remove" => ReconfigureAction::Remove,
            "reload" => ReconfigureAction::Reload,
            "uuid" => ReconfigureAction::Uuid,
            "readonly" => ReconfigureAction::ReadOnly,
            _ => return None,
        })
    }
}

/// The configuration file, and the devices applied from it.
#[derive(Default)]
pub(super) struct ConfigFileModel {
    pub(super) file: Vec<DeclaredDevice>,
    pub(super) is_broken: bool,
    applied: Vec<AppliedDevice>,
    /// Devices that clients may not write.
    pub(super) read_only: BTreeSet<DeviceId>,
    /// Verbs that only report the necessary changes.
    pub(super) dry: BTreeSet<u64>,
    /// The reconfigure that has read the file and is in progress.
    pub(super) under: Option<RunningReconfigure>,
}

/// A reconfigure in progress.
#[derive(Default)]
pub(super) struct RunningReconfigure {
    pub(super) job: u64,
    dry: bool,
    /// True if the reconfigure must be refused.
    refused: bool,
    pub(super) wish: Vec<DeclaredDevice>,
    was: Vec<AppliedDevice>,
    plan: Vec<(String, ReconfigureAction)>,
    unchanged: usize,
    /// Number of the inspection at which it read the file; `trouble` has the disturbances up to
    /// then.
    pub(super) look: u64,
    trouble: RefusalReasonCounts,
    /// Name of the device that it is creating.
    making: Option<String>,
    /// Devices that it created. `swapped` has those with a new table and their possible names in
    /// the file, `removed` those that it removed.
    created: BTreeMap<String, DeviceId>,
    swapped: BTreeMap<DeviceId, Vec<String>>,
    removed: BTreeSet<DeviceId>,
    /// Devices whose new table another verb has made live.
    by_others: BTreeSet<DeviceId>,
    /// Devices that it has suspended for a moment.
    resting: BTreeSet<DeviceId>,
    /// Its tables in inactive slots.
    loaded: BTreeMap<DeviceId, usize>,
    /// All tables that it has loaded; `given` has the possible names of their devices in the file.
    own: BTreeSet<(DeviceId, usize)>,
    given: BTreeMap<DeviceId, Vec<String>>,
    /// Names and uuids that others use. The next fields have the devices that others suspended or
    /// loaded, opened, and remove.
    taken: BTreeSet<String>,
    occupied: BTreeSet<DeviceId>,
    open: BTreeSet<DeviceId>,
    leaving: BTreeSet<DeviceId>,
    /// Number of changes made when its client disconnected.
    hung_up: Option<usize>,
}

impl RunningReconfigure {
    fn plans(&self, name: &str, change: ReconfigureAction) -> bool {
        !self.dry && self.plan.iter().any(|(planned, what)| planned == name && *what == change)
    }

    /// Returns the declared devices that `seen` may be for this reconfigure, regardless of its
    /// present name.
    fn wants(
        &self,
        seen: &ListedDevice,
        names: &PreviousDeviceNames,
    ) -> impl Iterator<Item = &DeclaredDevice> {
        let was = self.was.iter().find(|one| one.id == seen.id);
        let is_it = move |wanted: &&DeclaredDevice| match was {
            Some(one) => {
                one.wanted.name == wanted.name && self.plans(&wanted.name, ReconfigureAction::Reload)
            }
            None => {
                names.was(seen, &wanted.name, self.look)
                    && self.plans(&wanted.name, ReconfigureAction::Create)
            }
        };
        self.wish.iter().filter(is_it)
    }

    fn is_to_go(&self, id: DeviceId) -> bool {
        self.was.iter().any(|one| one.id == id && self.plans(&one.wanted.name, ReconfigureAction::Remove))
    }

    /// True if it has suspended the device `id`.
    pub(super) fn rests(&self, id: DeviceId) -> bool {
        self.resting.contains(&id)
    }

    /// Number of changes that it made itself.
    fn done(&self) -> usize {
        let swapped = self.swapped.keys().filter(|id| !self.by_others.contains(id));
        self.created.len() + swapped.count() + self.removed.len()
    }

    /// Records that another verb made its table live in `seen`.
    fn put_to_use(&mut self, seen: &ListedDevice) {
        self.by_others.insert(seen.id);
        let names = self.given.get(&seen.id).cloned();
        self.swapped.insert(seen.id, names.unwrap_or_else(|| vec![seen.name.clone()]));
    }

    /// True if the table of a declared device uses `seen`.
    pub(super) fn may_hold(&self, seen: &ListedDevice, names: &PreviousDeviceNames) -> bool {
        self.wish.iter().any(|wanted| seen.stands_in(&wanted.table, self.look, names))
    }
}

/// True if devices of the list form a cycle.
fn has_cycle(all: &[DeclaredDevice]) -> bool {
    let mut left: Vec<&DeclaredDevice> = all.iter().collect();
    loop {
        let before = left.len();
        let names: Vec<String> = left.iter().map(|wanted| wanted.name.clone()).collect();
        left.retain(|wanted| names.iter().any(|name| wanted.uses(name)));
        if left.len() == before {
            return before > 0;
        }
    }
}

impl RegistryModel {
    /// Models the reading of the file by the reconfigure `job`, while `others` are in progress.
    pub(super) fn read_file(
        &mut self,
        job: u64,
        trouble: RefusalReasonCounts,
        others: &mut [ControlVerbJob],
    ) -> Result<Vec<DeclaredDevice>, String> {
        let RegistryModel { config, view, looks, .. } = self;
        let mut under = RunningReconfigure {
            job,
            dry: config.dry.contains(&job),
            look: *looks,
            trouble,
            ..RunningReconfigure::default()
        };
        if config.is_broken || config.file.iter().any(|wanted| wanted.table.contains("nonsense")) {
            under.refused = true;
            config.under = Some(under);
            return Err("the file is broken".into());
        }
        let wish = config.file.clone();
        let name = |id| view.get(id).map(|seen| seen.name.clone());
        config.applied.retain(|one| name(one.id).is_some());
        for one in &mut config.applied {
            let called = name(one.id).filter(|name| wish.iter().any(|wanted| wanted.name == *name));
            one.wanted.name = called.unwrap_or(one.wanted.name.clone());
        }
        // A device that now has another device's name in the file is the file's device of that
        // name.
        let named: Vec<_> = config.applied.iter().map(|one| (one.wanted.name.clone(), one.id)).collect();
        let own = |one: &AppliedDevice, id| name(id).as_ref() == Some(&one.wanted.name);
        config.applied.retain(|one| {
            let mut rivals = named.iter().filter(|(name, id)| *name == one.wanted.name && *id != one.id);
            !rivals.any(|(_, id)| own(one, *id))
        });
        under.refused = has_cycle(&wish);
        let applied = |name: &str| config.applied.iter().find(|one| one.wanted.name == name);
        for wanted in &wish {
            let change = match applied(&wanted.name).map(|one| &one.wanted) {
                None => ReconfigureAction::Create,
                Some(was) if was.uuid != wanted.uuid => ReconfigureAction::Uuid,
                Some(was) if was.read_only != wanted.read_only => ReconfigureAction::ReadOnly,
                Some(was) if was.words() != wanted.words() => ReconfigureAction::Reload,
                Some(_) => {
                    under.unchanged += 1;
                    continue;
                }
            };
            under.plan.push((wanted.name.clone(), change));
        }
        let gone = config.applied.iter().filter(|one| wish.iter().all(|w| w.name != one.wanted.name));
        under.plan.extend(gone.map(|one| (one.wanted.name.clone(), ReconfigureAction::Remove)));
        if under.refused {
            under.plan.clear();
        }
        (under.was, under.wish) = (config.applied.clone(), wish.clone());
        for other in others {
            let Some(began) = &mut other.began else { continue };
            if matches!(other.verb, ControlVerb::Remove { .. }) {
                under.leaving.extend(&began.targets);
            }
            if began.targets.iter().any(|id| under.is_to_go(*id)) {
                began.may.push(EINTR);
            }
        }
        config.under = Some(under);
        self.note(&ListedDevices::default());
        Ok(wish)
    }
}
