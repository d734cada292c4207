//! The permitted changes of the registry, and the rules that hold at any time.

use super::backends::SimDiskOpener;
use super::file::ConfigFileModel;
use super::generator::{NAMES, UUIDS};
use super::observation::{
    ListedDevice, ListedDevices, ObservedTables, PreviousDeviceNames, format_device_number,
};
use super::verb_jobs::{ControlVerb, ControlVerbJob, VerbOutcome, VerbProgress};
use crate::model::Violation;
use std::collections::BTreeMap;
use udm_control::DeviceRegistry;
use udm_control::registry::OPENED_MAJOR;
use udm_core::DeviceId;
use udm_core::errno::{EBUSY, ENXIO};

/// A device that exists and is not found, because it is being created or removed.
#[derive(Clone, Debug)]
pub(super) struct UnlistedDevice {
    pub(super) name: String,
    pub(super) uuid: Option<String>,
    pub(super) minor: u32,
    /// Id of a device that is being removed.
    id: Option<DeviceId>,
}

impl UnlistedDevice {
    /// A device that is being created.
    pub(super) fn new(name: &str, uuid: Option<&String>, minor: u32) -> UnlistedDevice {
        UnlistedDevice { name: name.into(), uuid: uuid.cloned(), minor, id: None }
    }

    /// True if the device is being removed.
    pub(super) fn is_leaving(&self) -> bool {
        self.id.is_some()
    }

    /// True if this is the device `id`, which is being removed.
    pub(super) fn is(&self, id: DeviceId) -> bool {
        self.id == Some(id)
    }

    pub(super) fn is_called(&self, word: &str) -> bool {
        self.name == word || self.uuid.as_deref() == Some(word) || format_device_number(self.minor) == word
    }
}

/// The part of the world that has just run.
pub(super) enum LastRegistryActor<'a> {
    /// A verb, with its result if it has ended.
    ControlVerb(&'a mut ControlVerbJob, Option<&'a VerbOutcome>),
    /// The task of deferred removals.
    Deferred,
    /// The running reconfigure.
    Reconfigure,
    /// A part that may not change the registry.
    Other,
}

/// The model of the registry.
#[derive(Default)]
pub(super) struct RegistryModel {
    pub(super) tables: ObservedTables,
    pub(super) view: ListedDevices,
    pub(super) hidden: Vec<UnlistedDevice>,
    /// Last state of removed devices.
    pub(super) gone: BTreeMap<DeviceId, ListedDevice>,
    /// Name and disk of each device number that tables opened.
    pub(super) numbers: BTreeMap<u32, (String, usize)>,
    /// Number of inspections.
    pub(super) looks: u64,
    pub(super) names: PreviousDeviceNames,
    pub(super) config: ConfigFileModel,
    /// Number of tables checked.
    looked: usize,
    /// Kind of each device, which its first table determines: true for multipath.
    kinds: BTreeMap<DeviceId, bool>,
    /// The verb that suspended each device.
    suspended_by: BTreeMap<DeviceId, u64>,
    /// Number of deferred removals that were performed.
    pub(super) deferred: u64,
}

impl LastRegistryActor<'_> {
    fn began(&self) -> Option<&VerbProgress> {
        match self {
            LastRegistryActor::ControlVerb(job, _) => job.began.as_ref(),
            _ => None,
        }
    }

    fn is_about(&self, id: DeviceId) -> bool {
        self.began().is_some_and(|began| began.targets.contains(&id))
    }

    fn verb(&self) -> Option<&ControlVerb> {
        match self {
            LastRegistryActor::ControlVerb(job, _) => Some(&job.verb),
            _ => None,
        }
    }

    fn removes(&self, seen: &ListedDevice) -> bool {
        match self {
            LastRegistryActor::Deferred => seen.deferred,
            _ => matches!(self.verb(), Some(ControlVerb::Remove { .. })) && self.is_about(seen.id),
        }
    }

    /// Returns the new name or uuid of the device `id`, and true for a uuid.
    fn renames(&self, id: DeviceId) -> Option<(&str, bool)> {
        match self {
            LastRegistryActor::ControlVerb(
                ControlVerbJob { verb: ControlVerb::Rename { to, uuid, .. }, .. },
                Some(Ok(_)),
            ) if self.is_about(id) => Some((to, *uuid)),
            _ => None,
        }
    }

    fn forces(&self) -> bool {
        matches!(self.verb(), Some(ControlVerb::Remove { how, .. }) if how.force)
    }

    /// Describes the actor, for a person.
    fn name(&self) -> String {
        match self {
            LastRegistryActor::ControlVerb(job, _) => format!("{:?}", job.verb),
            LastRegistryActor::Deferred => "a removal that was deferred".into(),
            LastRegistryActor::Reconfigure => "a reconfigure".into(),
            LastRegistryActor::Other => "nobody".into(),
        }
    }
}

impl RegistryModel {
    /// Inspects the registry after only `actor` has run. Returns the devices that were removed.
    ///
    /// # Errors
    /// A change that is not permitted.
    pub(super) fn judge(
        &mut self,
        registry: &DeviceRegistry,
        outside: &SimDiskOpener,
        mut actor: LastRegistryActor<'_>,
    ) -> Result<Vec<DeviceId>, Violation> {
        self.looks += 1;
        let first_new = self.tables.all.len();
        let after = ListedDevices::take(registry, &mut self.tables)?;
        let before = std::mem::replace(&mut self.view, after);
        self.check_numbers(outside)?;
        for seen in &self.view.0 {
            if let Some(table) = seen.inactive.or(seen.live) {
                let multipath = self.tables.all[table].text.contains("multipath");
                self.kinds.entry(seen.id).or_insert(multipath);
            }
        }
        let mut gone = Vec::new();
        let mut all = true;
        let mut some = false;
        for was in &before.0 {
            let Some(is) = self.view.get(was.id) else {
                let removes = match actor {
                    LastRegistryActor::Reconfigure => self.file_removes(was.id),
                    _ => actor.removes(was),
                };
                if !removes {
                    return Err(format!("{} took {} away", actor.name(), was.name));
                }
                self.deferred += u64::from(matches!(actor, LastRegistryActor::Deferred));
                gone.push(was.id);
                self.gone.insert(was.id, was.clone());
                let ListedDevice { name, uuid, minor, id, .. } = was.clone();
                self.hidden.push(UnlistedDevice { name, uuid, minor, id: Some(id) });
                continue;
            };
            let is = &is.clone();
            let changed = match actor {
                LastRegistryActor::Reconfigure => self.file_changes(was, is, first_new),
                _ => self.changed(was, is, &actor, first_new),
            };
            changed
                .map_err(|what| format!("{} changed {}: {what}; {was:?} to {is:?}", actor.name(), is.name))?;
            if is.name != was.name {
                self.names.renamed(self.looks, was);
            }
            let swapped = is.live != was.live;
            if let (true, Some(ControlVerb::Resume { .. })) = (actor.is_about(was.id), actor.verb()) {
                some |= swapped;
                let sure = was.inactive.is_some()
                    && actor.began().is_some_and(|began| began.saw(was.id, was.inactive, true));
                all &= swapped || !sure;
            }
            if is.suspended && !was.suspended {
                if let LastRegistryActor::ControlVerb(job, _) = &actor {
                    self.suspended_by.insert(is.id, job.id);
                }
            } else if !is.suspended {
                self.suspended_by.remove(&is.id);
            }
            if let LastRegistryActor::ControlVerb(ControlVerbJob { began: Some(began), .. }, _) = &mut actor {
                began.swapped |= swapped;
                began.loaded |= is.inactive != was.inactive && is.inactive.is_some();
            }
        }
        if some && !all {
            return Err(format!(
                "{} swapped the tables of some of its devices, and not of others",
                actor.name()
            ));
        }
        self.come(&before, &actor)?;
        if matches!(actor, LastRegistryActor::Reconfigure) {
            self.file_made(registry);
        }
        self.leave(registry, &actor);
        if matches!(actor, LastRegistryActor::Reconfigure) {
            self.file_begins(registry);
        }
        self.note(&before);
        if let LastRegistryActor::ControlVerb(ControlVerbJob { began: Some(began), .. }, _) = &mut actor {
            for id in began.targets.clone() {
                // The inactive table may have been loaded since.
                let rests = |is: &ListedDevice| is.inactive.is_some() && began.saw(id, is.inactive, true);
                let there =
                    self.view.get(id).is_some_and(|is| !is.suspended && (began.swapped || !rests(is)));
                if there && !began.reached.contains(&id) {
                    began.reached.push(id);
                }
            }
        }
        self.check_names(registry)?;
        Ok(gone)
    }

    /// Checks a change of a device from `was` to `is`.
    fn changed(
        &self,
        was: &ListedDevice,
        is: &ListedDevice,
        actor: &LastRegistryActor<'_>,
        first_new: usize,
    ) -> Result<(), Violation> {
        let may =
            |verbs: &dyn Fn(&ControlVerb) -> bool| actor.is_about(is.id) && actor.verb().is_some_and(verbs);
        let sure = |fine: bool, what: &str| if fine { Ok(()) } else { Err(what.to_owned()) };
        let renames = actor.renames(is.id);
        let name = renames.filter(|(_, uuid)| !uuid).map_or(was.name.as_str(), |(name, _)| name);
        let uuid = renames.filter(|(_, uuid)| *uuid).map(|(uuid, _)| uuid).or(was.uuid.as_deref());
        sure((name, uuid, was.minor) == (&is.name, is.uuid.as_deref(), is.minor), "it is another")?;
        let raised = u32::from(renames.is_some() && was.live.is_some());
        sure(is.events >= was.events + raised, "events were lost")?;
        let forces = actor.forces() && actor.is_about(is.id);
        let moves = may(&|verb| matches!(verb, ControlVerb::Suspend { .. } | ControlVerb::Resume { .. }));
        sure(is.suspended == was.suspended || moves || forces, "its state")?;
        let errors = |slot: Option<usize>| slot.is_some_and(|t| self.tables.all[t].text.contains("error"));
        if is.live != was.live {
            let waited = is.live.is_some() && actor.began().is_some_and(|b| b.saw(is.id, is.live, false));
            let resumes = forces || may(&|verb| matches!(verb, ControlVerb::Resume { .. }));
            sure(is.inactive.is_none() || is.inactive == was.inactive, "its inactive table")?;
            sure(is.inactive != is.live, "it has one table twice")?;
            sure(resumes && waited || forces && errors(is.live), "its live table")?;
        } else if is.inactive != was.inactive {
            let new = is.inactive.is_some_and(|table| table >= first_new);
            let ended = matches!(actor, LastRegistryActor::ControlVerb(_, Some(Ok(_))));
            let loads = may(&|verb| matches!(verb, ControlVerb::Load { .. })) && new && ended;
            let clears = may(&|verb| matches!(verb, ControlVerb::Clear { .. })) && is.inactive.is_none();
            let fails = forces && is.inactive.is_none_or(|table| errors(Some(table)));
            sure(loads || clears || fails, "its inactive table")?;
        }
        let defers = may(&|verb| matches!(verb, ControlVerb::Remove { how, .. } if how.deferred));
        let keeps = may(&|verb| matches!(verb, ControlVerb::Message { .. })) && !is.deferred;
        sure(is.deferred == was.deferred || defers || keeps, "whether its removal is deferred")
    }

    /// Checks the devices that are new in the registry.
    fn come(&mut self, before: &ListedDevices, actor: &LastRegistryActor<'_>) -> Result<(), Violation> {
        let made = match actor {
            LastRegistryActor::ControlVerb(ControlVerbJob { verb, began: Some(began), .. }, Some(ended)) => {
                verb.makes().map(|(name, uuid)| (name, uuid, began.minor, ended.is_ok()))
            }
            _ => None,
        };
        for is in &self.view.0.clone() {
            if before.get(is.id).is_some() {
                continue;
            }
            if let Some(at) = self.hidden.iter().position(|hidden| hidden.id == Some(is.id)) {
                // The removal has failed.
                let removes = match actor {
                    LastRegistryActor::Reconfigure => self.file_brings_back(is.id),
                    _ => actor.removes(is),
                };
                if !removes {
                    return Err(format!("{} restored {}", actor.name(), is.name));
                }
                self.hidden.remove(at);
                continue;
            }
            if matches!(actor, LastRegistryActor::Reconfigure) {
                self.file_makes(is)?;
                continue;
            }
            if made != Some((&is.name, &is.uuid, Some(is.minor), true)) {
                return Err(format!("{} made {is:?}", actor.name()));
            }
        }
        if let Some((name, ..)) = made.filter(|(_, _, minor, _)| minor.is_some()) {
            self.hidden.retain(|hidden| hidden.id.is_some() || hidden.name != *name);
        }
        Ok(())
    }

    /// Updates the devices that were removed completely.
    fn leave(&mut self, registry: &DeviceRegistry, actor: &LastRegistryActor<'_>) {
        let removes = matches!(actor, LastRegistryActor::Deferred | LastRegistryActor::Reconfigure)
            || matches!(actor.verb(), Some(ControlVerb::Remove { .. }));
        if removes {
            let waits = |hidden: &UnlistedDevice| match registry.find(&format_device_number(hidden.minor)) {
                Err(e) => e.error.errno == EBUSY,
                Ok(_) => true,
            };
            self.hidden.retain(|hidden| hidden.id.is_none() || waits(hidden));
        }
    }

    /// Checks that every name, uuid and number leads to the right device.
    fn check_names(&self, registry: &DeviceRegistry) -> Result<(), Violation> {
        let numbers = (0..8).map(format_device_number);
        let words = NAMES.into_iter().chain(UUIDS).map(String::from).chain(numbers);
        for word in words {
            let found = registry.find(&word);
            let says =
                found.as_ref().map(|mapped| udm_core::Device::id(&*mapped.device)).map_err(|e| e.error.errno);
            let must = match self.view.meant(&word) {
                Some(seen) => Ok(seen.id),
                None if self.hidden.iter().any(|hidden| hidden.is_called(&word)) => Err(EBUSY),
                None => Err(ENXIO),
            };
            if says != must {
                return Err(format!("the registry returns {says:?} for {word}, expected {must:?}"));
            }
        }
        Ok(())
    }

    /// Checks that each device number always has the same name and disk, and that each disk is open
    /// at most once.
    fn check_numbers(&mut self, outside: &SimDiskOpener) -> Result<(), Violation> {
        let world = outside.world();
        for known in &self.tables.all[self.looked..] {
            for (number, id) in known.devices() {
                if number.major != OPENED_MAJOR {
                    continue;
                }
                let Some(disk) = world.opened.iter().find(|disk| disk.id == id) else {
                    return Err(format!("{number} was never opened"));
                };
                let is = (disk.uri.clone(), disk.disk);
                let known = self.numbers.entry(number.minor).or_insert_with(|| is.clone()).clone();
                if known != is || self.numbers.values().filter(|other| **other == is).count() != 1 {
                    return Err(format!("{number} is disk {} by {}, and was {known:?}", is.1, is.0));
                }
            }
        }
        self.looked = self.tables.all.len();
        let open: Vec<_> = world.opened.iter().filter(|disk| disk.device.strong_count() > 0).collect();
        for (i, disk) in open.iter().enumerate() {
            if open[..i].iter().any(|other| (&other.uri, other.disk) == (&disk.uri, disk.disk)) {
                return Err(format!("{} is open twice", disk.uri));
            }
        }
        Ok(())
    }

    /// True if the device `id` cannot take a table like `text`, because of its kind.
    pub(super) fn is_of_another_kind(&self, id: DeviceId, text: &str) -> bool {
        self.kinds.get(&id).is_some_and(|multipath| *multipath != text.contains("multipath"))
    }

    /// Returns the verb that suspended `id`, if it still is suspended.
    pub(super) fn suspended_by(&self, id: DeviceId) -> Option<u64> {
        self.suspended_by.get(&id).copied()
    }

    /// Returns the lowest free minor number.
    pub(super) fn free(&self) -> u32 {
        let taken = |minor: u32| {
            self.view.0.iter().any(|seen| seen.minor == minor)
                || self.hidden.iter().any(|hidden| hidden.minor == minor)
        };
        (0..).find(|minor| !taken(*minor)).unwrap_or(u32::MAX)
    }

    /// Records that a device is being created.
    pub(super) fn making(&mut self, name: &str, uuid: Option<&String>, minor: u32) {
        self.hidden.push(UnlistedDevice::new(name, uuid, minor));
    }

    /// Checks the open count of each device against the tables and `clients` that use it. Tables of
    /// devices that are being created may also use it.
    pub(super) fn check_counts(
        &mut self,
        clients: &dyn Fn(DeviceId) -> u64,
        unseen: &dyn Fn(&ListedDevice) -> u64,
    ) -> Result<(), Violation> {
        self.tables.alive();
        for seen in &self.view.0 {
            let (tables, clients) = (self.tables.users(seen.id), clients(seen.id));
            let most = tables + clients + unseen(seen) + self.tables.leaving(seen.id);
            if !(tables + clients..=most).contains(&seen.open) {
                let (name, open) = (&seen.name, seen.open);
                return Err(format!("{name} is open {open} times, by {tables} tables and {clients} clients"));
            }
            for table in [seen.live, seen.inactive].into_iter().flatten() {
                if self.tables.all[table].uses.iter().any(|id| self.view.get(*id).is_none()) {
                    return Err(format!("a table of {} uses a device that is not listed", seen.name));
                }
            }
        }
        Ok(())
    }
}
