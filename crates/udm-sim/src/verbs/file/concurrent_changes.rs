//! The permitted steps of a reconfigure, and the effects of other verbs on it.

use super::{DeclaredDevice, ReconfigureAction};
use crate::model::Violation;
use crate::verbs::expected_results::text_matches_requested_table;
use crate::verbs::model::{RegistryModel, UnlistedDevice};
use crate::verbs::observation::{ListedDevice, ListedDevices};
use crate::verbs::verb_jobs::{ControlVerb, ControlVerbJob};
use udm_control::DeviceRegistry;
use udm_core::DeviceId;
use udm_core::errno::{EBUSY, EINTR};

impl RegistryModel {
    /// Records that a verb begins during a reconfigure. Returns the error with which the verb may
    /// end because of it.
    pub(in crate::verbs) fn beside_file(&mut self, verb: &ControlVerb, targets: &[DeviceId]) -> Option<i32> {
        let under = self.config.under.as_mut()?;
        if matches!(verb, ControlVerb::Remove { .. }) {
            under.leaving.extend(targets);
        }
        targets.iter().any(|id| under.is_to_go(*id)).then_some(EINTR)
    }

    /// Records changes by others that may prevent a step of the reconfigure.
    pub(in crate::verbs) fn note(&mut self, before: &ListedDevices) {
        let Some(under) = &mut self.config.under else { return };
        for seen in &self.view.0 {
            under.taken.insert(seen.name.clone());
            under.taken.extend(seen.uuid.clone());
            let own = under.loaded.get(&seen.id).copied();
            let rests = seen.suspended && !under.resting.contains(&seen.id);
            if rests || seen.inactive.is_some() && seen.inactive != own {
                under.occupied.insert(seen.id);
            }
            if seen.open > 0 {
                under.open.insert(seen.id);
            }
            if seen.deferred {
                under.leaving.insert(seen.id);
            }
            let was_live = before.get(seen.id).and_then(|was| was.live);
            let put_to_use = |live: &usize| under.own.contains(&(seen.id, *live)) && was_live != Some(*live);
            if seen.live.as_ref().is_some_and(put_to_use) && !under.swapped.contains_key(&seen.id) {
                // Another verb made the table live before it was dropped.
                under.put_to_use(seen);
            }
            let waited = before.get(seen.id).and_then(|was| was.inactive);
            if own.is_some() && waited == own && seen.inactive != own {
                // Another verb made the table live, or cleared it.
                under.loaded.remove(&seen.id);
                under.occupied.insert(seen.id);
                if seen.live == own {
                    under.put_to_use(seen);
                }
            }
        }
        for hidden in &self.hidden {
            if under.making.as_ref() != Some(&hidden.name) {
                under.taken.insert(hidden.name.clone());
                under.taken.extend(hidden.uuid.clone());
            }
        }
    }

    /// Returns true, and records the removal, if the running reconfigure may remove the device
    /// `id`.
    pub(in crate::verbs) fn file_removes(&mut self, id: DeviceId) -> bool {
        let Some(under) = self.config.under.as_mut().filter(|under| under.is_to_go(id)) else { return false };
        under.removed.insert(id)
    }

    /// Returns true, and undoes the record, if a failed removal may restore the device `id`.
    pub(in crate::verbs) fn file_brings_back(&mut self, id: DeviceId) -> bool {
        self.config.under.as_mut().is_some_and(|under| under.removed.remove(&id))
    }

    /// Checks a change of a device from `was` to `is` by a reconfigure.
    pub(in crate::verbs) fn file_changes(
        &mut self,
        was: &ListedDevice,
        is: &ListedDevice,
        first_new: usize,
    ) -> Result<(), Violation> {
        let sure = |fine: bool, what: &str| if fine { Ok(()) } else { Err(what.to_owned()) };
        sure((&is.name, &is.uuid, is.minor) == (&was.name, &was.uuid, was.minor), "it is another")?;
        sure(is.events >= was.events, "events were lost")?;
        if let Some(under) = self.config.under.as_mut().filter(|_| is.suspended != was.suspended) {
            let may = if is.suspended {
                under.wants(is, &self.names).next().is_some() && under.resting.insert(is.id)
            } else {
                under.resting.remove(&is.id)
            };
            sure(may, "its state")?;
        }
        sure(is.deferred == was.deferred, "whether its removal is deferred")?;
        if (is.live, is.inactive) == (was.live, was.inactive) {
            return Ok(());
        }
        let under = self.config.under.as_ref().ok_or("no reconfigure has read the file")?;
        let own = under.loaded.get(&is.id).copied();
        let is_new = |slot: Option<usize>, wanted: &DeclaredDevice| {
            slot.is_some_and(|t| {
                (t >= first_new || under.own.contains(&(is.id, t)))
                    && text_matches_requested_table(
                        Some(&wanted.table),
                        &self.tables.all[t].text,
                        under.look,
                        self,
                    )
            })
        };
        let swaps = is.live != was.live;
        let leaves = if own.is_some() && was.inactive == own { None } else { was.inactive };
        let loads = !swaps && is.inactive != leaves;
        sure(!loads || leaves.is_none(), "its inactive table")?;
        sure(!swaps || is.inactive == leaves, "its inactive table")?;
        let slot = if swaps { is.live } else { is.inactive };
        let wanted = under.wants(is, &self.names).filter(|wanted| !swaps && !loads || is_new(slot, wanted));
        let names: Vec<_> = wanted.map(|wanted| wanted.name.clone()).collect();
        sure(!names.is_empty(), "the file does not want that")?;
        let under = self.config.under.as_mut().ok_or("no reconfigure has read the file")?;
        under.loaded.remove(&is.id);
        under.given.insert(is.id, names.clone());
        if let Some(table) = is.inactive.filter(|_| loads) {
            under.loaded.insert(is.id, table);
            under.own.insert((is.id, table));
        }
        if swaps {
            under.swapped.insert(is.id, names);
        }
        Ok(())
    }

    /// Checks a device that a reconfigure has created.
    pub(in crate::verbs) fn file_makes(&mut self, is: &ListedDevice) -> Result<(), Violation> {
        let text = is.live.map_or("", |table| self.tables.all[table].text.as_str());
        let under = self.config.under.as_ref().ok_or("no reconfigure has read the file")?;
        let wanted = under.wants(is, &self.names).find(|wanted| {
            wanted.uuid == is.uuid
                && is.inactive.is_none()
                && !is.suspended
                && text_matches_requested_table(Some(&wanted.table), text, under.look, self)
        });
        let Some(wanted) = wanted else {
            return Err(format!("a reconfigure made {is:?}, {text:?}, of {:?}", under.wish));
        };
        if wanted.read_only {
            self.config.read_only.insert(is.id);
        }
        let under = self.config.under.as_mut().ok_or("no reconfigure has read the file")?;
        match under.created.insert(is.name.clone(), is.id) {
            None => Ok(()),
            Some(_) => Err(format!("a reconfigure made {} twice", is.name)),
        }
    }

    /// Records that the creation of a device by a reconfigure has ended.
    pub(in crate::verbs) fn file_made(&mut self, registry: &DeviceRegistry) {
        let Some(under) = &mut self.config.under else { return };
        let waits = |name: &str| registry.find(name).is_err_and(|e| e.error.errno == EBUSY);
        if let Some(name) = under.making.take_if(|name| !waits(name)) {
            self.hidden.retain(|hidden| hidden.is_leaving() || hidden.name != name);
        }
    }

    /// Records that a reconfigure has started to create a device.
    pub(in crate::verbs) fn file_begins(&mut self, registry: &DeviceRegistry) {
        let minor = self.free();
        let Some(under) = &mut self.config.under else { return };
        let waits = |name: &str| registry.find(name).is_err_and(|e| e.error.errno == EBUSY);
        let is_known = |name: &str| {
            self.view.0.iter().any(|seen| seen.name == name)
                || self.hidden.iter().any(|hidden| hidden.name == name)
        };
        let begins = |wanted: &&DeclaredDevice| {
            under.plans(&wanted.name, ReconfigureAction::Create)
                && !is_known(&wanted.name)
                && waits(&wanted.name)
        };
        if under.making.is_none()
            && let Some(wanted) = under.wish.iter().find(begins).cloned()
        {
            under.making = Some(wanted.name.clone());
            self.hidden.push(UnlistedDevice::new(&wanted.name, wanted.uuid.as_ref(), minor));
        }
    }

    /// Records the present number of changes if the client of `job` has disconnected. A change in
    /// progress may complete.
    pub(in crate::verbs) fn note_hang_up(&mut self, job: &ControlVerbJob) {
        let under = self.config.under.as_mut().filter(|under| under.job == job.id && job.hung_up);
        if let Some(under) = under {
            let done = under.done();
            under.hung_up.get_or_insert(done);
        }
    }

    /// Checks that a reconfigure without a client has started no further change.
    pub(in crate::verbs) fn check_hang_up(&mut self, job: &ControlVerbJob) -> Result<(), Violation> {
        let under = self.config.under.as_mut().filter(|under| under.job == job.id && job.hung_up);
        let Some(under) = under else { return Ok(()) };
        let done = under.done();
        if done > *under.hung_up.get_or_insert(0) + 1 {
            return Err("the client of a reconfigure hung up, and it goes on to the next device".into());
        }
        Ok(())
    }
}
