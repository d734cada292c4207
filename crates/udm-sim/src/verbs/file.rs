//! The file of the server: what it says, what of it is applied, and what comes of reading it again.
//!
//! What is to be done is worked out here anew, from what the file says and what was applied of it:
//! a reconfigure may do that and nothing else, and says of each device whether it has.

mod beside;
mod finish_check;

use super::ask::{ControlVerb, ControlVerbJob, DisturbanceCounts};
use super::look::{ListedDevice, NameHistory, RegistryView};
use super::model::RegistryModel;
use std::collections::{BTreeMap, BTreeSet};
use udm_core::DeviceId;
use udm_core::errno::EINTR;

/// A device that the file has.
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

/// A device that the file made, or took over.
#[derive(Clone, Debug)]
struct AppliedDevice {
    wanted: DeclaredDevice,
    id: DeviceId,
}

/// What is to be done with a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ConfigChange {
    Create,
    Remove,
    Reload,
    Uuid,
    ReadOnly,
}

impl ConfigChange {
    fn of(word: &str) -> Option<ConfigChange> {
        Some(match word {
            "create" | "take-over" => ConfigChange::Create,
            "remove" => ConfigChange::Remove,
            "reload" => ConfigChange::Reload,
            "uuid" => ConfigChange::Uuid,
            "readonly" => ConfigChange::ReadOnly,
            _ => return None,
        })
    }
}

/// The file, and what of it is applied.
#[derive(Default)]
pub(super) struct ConfigFileModel {
    pub(super) file: Vec<DeclaredDevice>,
    pub(super) is_broken: bool,
    applied: Vec<AppliedDevice>,
    /// The devices whose clients may not write.
    pub(super) read_only: BTreeSet<DeviceId>,
    /// Who only asks what there is to do.
    pub(super) dry: BTreeSet<u64>,
    /// The one that has read the file, and is not done.
    pub(super) under: Option<RunningReconfigure>,
}

/// A reconfigure under way.
#[derive(Default)]
pub(super) struct RunningReconfigure {
    pub(super) job: u64,
    dry: bool,
    /// It must be refused.
    refused: bool,
    pub(super) wish: Vec<DeclaredDevice>,
    was: Vec<AppliedDevice>,
    plan: Vec<(String, ConfigChange)>,
    unchanged: usize,
    /// The look at which it read the file, and the trouble by then.
    pub(super) look: u64,
    trouble: DisturbanceCounts,
    /// The name of the device that it makes just now.
    making: Option<String>,
    /// What it has done: devices that it made, gave another table (and what they may be called in
    /// the file), took away.
    created: BTreeMap<String, DeviceId>,
    swapped: BTreeMap<DeviceId, Vec<String>>,
    removed: BTreeSet<DeviceId>,
    /// Those whose new table somebody else has put to use.
    by_others: BTreeSet<DeviceId>,
    /// The devices that it has at rest for a moment.
    resting: BTreeSet<DeviceId>,
    /// The tables of its own that wait in inactive slots.
    loaded: BTreeMap<DeviceId, usize>,
    /// All that it has loaded, and what the devices may be called in the file.
    own: BTreeSet<(DeviceId, usize)>,
    given: BTreeMap<DeviceId, Vec<String>>,
    /// What others did meanwhile: names and uuids that they have, devices that they suspended or
    /// loaded, have open, remove.
    taken: BTreeSet<String>,
    occupied: BTreeSet<DeviceId>,
    open: BTreeSet<DeviceId>,
    leaving: BTreeSet<DeviceId>,
    /// How much it had done when its client hung up.
    hung_up: Option<usize>,
}

impl RunningReconfigure {
    fn plans(&self, name: &str, change: ConfigChange) -> bool {
        !self.dry && self.plan.iter().any(|(planned, what)| planned == name && *what == change)
    }

    /// What the device `seen` is to become, whatever it is called by now.
    fn wants(&self, seen: &ListedDevice, names: &NameHistory) -> impl Iterator<Item = &DeclaredDevice> {
        let was = self.was.iter().find(|one| one.id == seen.id);
        let is_it = move |wanted: &&DeclaredDevice| match was {
            Some(one) => one.wanted.name == wanted.name && self.plans(&wanted.name, ConfigChange::Reload),
            None => {
                names.was(seen, &wanted.name, self.look) && self.plans(&wanted.name, ConfigChange::Create)
            }
        };
        self.wish.iter().filter(is_it)
    }

    fn is_to_go(&self, id: DeviceId) -> bool {
        self.was.iter().any(|one| one.id == id && self.plans(&one.wanted.name, ConfigChange::Remove))
    }

    /// Does it have the device `id` at rest?
    pub(super) fn rests(&self, id: DeviceId) -> bool {
        self.resting.contains(&id)
    }

    /// How much it has done by itself.
    fn done(&self) -> usize {
        let swapped = self.swapped.keys().filter(|id| !self.by_others.contains(id));
        self.created.len() + swapped.count() + self.removed.len()
    }

    /// Somebody else has put a table of its own to use in `seen`.
    fn put_to_use(&mut self, seen: &ListedDevice) {
        self.by_others.insert(seen.id);
        let names = self.given.get(&seen.id).cloned();
        self.swapped.insert(seen.id, names.unwrap_or_else(|| vec![seen.name.clone()]));
    }

    /// `seen` is used by the table of something that is wanted.
    pub(super) fn may_hold(&self, seen: &ListedDevice, names: &NameHistory) -> bool {
        self.wish.iter().any(|wanted| seen.stands_in(&wanted.table, self.look, names))
    }
}

/// Does one of `list` lie on itself?
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
    /// The reconfigure `job` reads the file, beside `others`.
    pub(super) fn read_file(
        &mut self,
        job: u64,
        trouble: DisturbanceCounts,
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
        // Who has the name of another in the file by now is the file's device of that name.
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
                None => ConfigChange::Create,
                Some(was) if was.uuid != wanted.uuid => ConfigChange::Uuid,
                Some(was) if was.read_only != wanted.read_only => ConfigChange::ReadOnly,
                Some(was) if was.words() != wanted.words() => ConfigChange::Reload,
                Some(_) => {
                    under.unchanged += 1;
                    continue;
                }
            };
            under.plan.push((wanted.name.clone(), change));
        }
        let gone = config.applied.iter().filter(|one| wish.iter().all(|w| w.name != one.wanted.name));
        under.plan.extend(gone.map(|one| (one.wanted.name.clone(), ConfigChange::Remove)));
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
        self.note(&RegistryView::default());
        Ok(wish)
    }
}
