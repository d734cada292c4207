//! Suspend and resume of several devices together: all of them or none.
//!
//! All devices reach one stage before any device goes on to the next:
//!
//! 1. *Asked*: the targets of the coming tables agree ([`Target::preresume`]).
//! 2. *Prepared*, from the bottom of the stack to its top: all steps that can fail are done on all
//!    cores, and every device still runs. A table takes the limits of the tables that become live
//!    below it in the same change.
//! 3. *Quiesced*, from the top to the bottom: a device can stop only while the devices below
//!    complete its bios in flight.
//! 4. *Swapped*: the tables are swapped, and the hooks of the old tables have run.
//! 5. *HooksRun*: the live tables got their hooks.
//! 6. *Finished*, from the bottom to the top; nothing cancels this step.
//!
//! From stage 3 to stage 6, no device of the set has a request in flight. So the devices below show
//! one common instant. A caller that must inspect this instant, and may block, pauses the change
//! between 3 and 4 ([`DeviceSetTransition::pause_when_quiesced`]). If the change fails or is
//! cancelled before the swap, every device is active with its live table. A device that was
//! suspended before a *suspend* stays suspended.
//!
//! Tables that become live or are retired can have *partners* ([`Target::partners`]). Partners
//! are renewed in the same change, so they belong to the set. A caller that locks devices first
//! asks for the partners ([`DeviceSetTransition::partners_of_resume`]). It then says which
//! devices are locked ([`DeviceSetTransition::resume_filtered`]). If a new partner has appeared
//! meanwhile, the change must be retried ([`DeviceSetTransition::must_retry`]).
//!
//! Each device allows one change at a time. If one device of the set is already changing, no change
//! begins.
//!
//! [`Target::preresume`]: crate::Target::preresume
//! [`Target::partners`]: crate::Target::partners

use super::device::{MappedDevice, TransitionWakeFn};
use super::partners::{
    IndexedPartner, collect_partners_outside_set, collect_removal_partners, collect_resume_partners,
    wrap_partner_error,
};
use super::phase::TransitionSyncPoint;
use super::transition::{DeviceTransition, lock_table_swap};
use crate::device_ref::LowerLimits;
use crate::error::TargetError;
use crate::table::Table;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use udm_core::errno::{EBUSY, EINTR};
use udm_core::{CoreCommandSender, Device, DeviceId, Limits};

/// An error, and the index of its device in the caller's list.
pub type IndexedDeviceError = (usize, TargetError);

/// A suspend, resume or removal of several devices that is running. If it is dropped before its
/// end, the devices stay suspended or as they were; a resume repairs this.
#[must_use = "nothing happens until it is stepped"]
pub struct DeviceSetTransition {
    /// The devices by level of the stack, top first. A device is never above a device of its own or
    /// an earlier level.
    levels: Vec<Vec<DeviceSetTransitionMember>>,
    stage: TransitionSyncPoint,
    /// How many levels have reached `stage`.
    level: usize,
    /// Coming limits of the devices in the levels that are prepared.
    coming: HashMap<DeviceId, Limits>,
    result: Result<(), IndexedDeviceError>,
    must_retry: bool,
    pause: TransitionPauseState,
}

/// Whether a change pauses while its devices are quiesced.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TransitionPauseState {
    /// No pause is requested, or it is over.
    No,
    /// The change will pause.
    Requested,
    /// The change is paused until [`DeviceSetTransition::continue_after_pause`].
    Reached,
}

struct DeviceSetTransitionMember {
    /// Index in the caller's list. For a partner, the index of the device that requires it.
    place: usize,
    is_partner: bool,
    change: DeviceTransition,
    /// The change of this device is finished.
    over: bool,
}

impl DeviceSetTransition {
    /// As [`MappedDevice::suspend`], for all `devices`. A device that is listed twice counts once.
    ///
    /// # Errors
    /// EBUSY if one of the devices is changing.
    pub fn suspend(
        devices: &[Arc<MappedDevice>],
        noflush: bool,
        wake: &TransitionWakeFn,
    ) -> Result<DeviceSetTransition, IndexedDeviceError> {
        DeviceSetTransition::begin(devices, &[], |device| device.suspend(noflush, Arc::clone(wake)), wake)
    }

    /// As [`MappedDevice::resume_with`], for all `devices` and their partners. If one device is
    /// already suspended, `noflush` is used for all. The suspended device holds bios of the devices
    /// above; they could not complete, and it continues only when those above have stopped.
    ///
    /// # Errors
    /// EBUSY if one of the devices is changing.
    pub fn resume(
        devices: &[Arc<MappedDevice>],
        noflush: bool,
        wake: &TransitionWakeFn,
    ) -> Result<DeviceSetTransition, IndexedDeviceError> {
        DeviceSetTransition::resume_filtered(devices, noflush, wake, |_| true)
    }

    /// As [`DeviceSetTransition::resume`], but only with partners for which `may` is true. If there
    /// are other partners, the change must be retried.
    ///
    /// # Errors
    /// As [`DeviceSetTransition::resume`].
    pub fn resume_filtered(
        devices: &[Arc<MappedDevice>],
        noflush: bool,
        wake: &TransitionWakeFn,
        may: impl Fn(&Arc<MappedDevice>) -> bool,
    ) -> Result<DeviceSetTransition, IndexedDeviceError> {
        let mut partners = collect_resume_partners(devices);
        partners.retain(|(_, partner)| may(partner));
        let how = |device: &Arc<MappedDevice>| device.resume_with(noflush, Arc::clone(wake));
        let mut changes = DeviceSetTransition::begin(devices, &partners, how, wake)?;
        let rests = changes.parts().any(|part| part.change.device().is_suspended());
        if rests {
            changes.levels.iter_mut().flatten().for_each(|part| part.change.force_noflush());
        }
        Ok(changes)
    }

    /// Stops `devices` for their removal, and renews the partners that remain. No held bio fails.
    ///
    /// # Errors
    /// EBUSY if one of the devices is changing.
    pub fn remove(
        devices: &[Arc<MappedDevice>],
        wake: &TransitionWakeFn,
    ) -> Result<DeviceSetTransition, IndexedDeviceError> {
        DeviceSetTransition::remove_filtered(devices, wake, |_| true)
    }

    /// As [`DeviceSetTransition::remove`], but only with partners for which `may` is true. If there
    /// are other partners, the change must be retried.
    ///
    /// # Errors
    /// As [`DeviceSetTransition::remove`].
    pub fn remove_filtered(
        devices: &[Arc<MappedDevice>],
        wake: &TransitionWakeFn,
        may: impl Fn(&Arc<MappedDevice>) -> bool,
    ) -> Result<DeviceSetTransition, IndexedDeviceError> {
        let mut partners = collect_removal_partners(devices);
        partners.retain(|(_, partner)| may(partner));
        DeviceSetTransition::begin(
            devices,
            &partners,
            |device| DeviceTransition::remove(device, Arc::clone(wake)),
            wake,
        )
    }

    /// The partners that a resume of `devices` would renew now.
    #[must_use]
    pub fn partners_of_resume(devices: &[Arc<MappedDevice>]) -> Vec<Arc<MappedDevice>> {
        collect_partners_outside_set(devices, collect_resume_partners(devices))
    }

    /// The partners that a removal of `devices` would renew now.
    #[must_use]
    pub fn partners_of_removal(devices: &[Arc<MappedDevice>]) -> Vec<Arc<MappedDevice>> {
        collect_partners_outside_set(devices, collect_removal_partners(devices))
    }

    /// Creates the change; `how` begins the change of each device.
    fn begin(
        devices: &[Arc<MappedDevice>],
        partners: &[IndexedPartner],
        how: impl Fn(&Arc<MappedDevice>) -> Result<DeviceTransition, TargetError>,
        wake: &TransitionWakeFn,
    ) -> Result<DeviceSetTransition, IndexedDeviceError> {
        let dependent_ids: HashSet<DeviceId> = partners.iter().map(|(_, partner)| partner.id()).collect();
        let given = devices.iter().enumerate().map(|(place, device)| (place, device, false));
        let renewals = partners.iter().map(|(place, partner)| (*place, partner, true));
        let mut known = HashSet::new();
        let mut parts = Vec::with_capacity(devices.len());
        for (place, device, is_partner) in given.chain(renewals).filter(|part| known.insert(part.1.id())) {
            let change = match is_partner {
                true => DeviceTransition::reopen_lanes(device, Arc::clone(wake))
                    .map_err(|e| wrap_partner_error(device, e)),
                false => how(device),
            };
            let mut change = change.map_err(|error| (place, error))?;
            if !is_partner && dependent_ids.contains(&device.id()) {
                change.also_reopen_lanes();
            }
            parts.push(DeviceSetTransitionMember { place, is_partner, change, over: false });
        }
        let all: Vec<_> = parts.iter().map(|part| Arc::clone(part.change.device())).collect();
        let level_of = assign_device_stack_levels(&all);
        let mut levels: Vec<Vec<DeviceSetTransitionMember>> = Vec::new();
        for part in parts {
            let level = level_of.get(&part.change.device().id()).copied().unwrap_or(0);
            levels.resize_with(levels.len().max(level + 1), Vec::new);
            levels[level].push(part);
        }
        let (coming, result) = (HashMap::new(), Ok(()));
        let (stage, pause) = (TransitionSyncPoint::Preresumed, TransitionPauseState::No);
        Ok(DeviceSetTransition { levels, stage, level: 0, coming, result, must_retry: false, pause })
    }

    fn parts(&self) -> impl Iterator<Item = &DeviceSetTransitionMember> {
        self.levels.iter().flatten()
    }

    /// True if the change failed because a new partner appeared. Nothing has changed; the caller
    /// retries.
    #[must_use]
    pub fn must_retry(&self) -> bool {
        self.must_retry
    }

    /// Requests a pause when all devices are quiesced and no table is swapped yet.
    /// [`DeviceSetTransition::continue_after_pause`] ends the pause.
    pub fn pause_when_quiesced(&mut self) {
        self.pause = TransitionPauseState::Requested;
    }

    /// True while the change is paused.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.pause == TransitionPauseState::Reached
    }

    /// Ends the pause. If `checked` is `Ok`, the tables are swapped. If it is an error, the devices
    /// continue with their live tables. The caller must step the change to its end.
    pub fn continue_after_pause(
        &mut self,
        checked: Result<(), IndexedDeviceError>,
        cores: &dyn CoreCommandSender,
    ) {
        if std::mem::replace(&mut self.pause, TransitionPauseState::No) == TransitionPauseState::Reached
            && let Err(refused) = checked
        {
            self.abort(refused, cores);
        }
    }

    /// Does all steps that are possible now. Returns `None` if cores have not answered yet or the
    /// change is paused; call again after the wake or after `continue_after_pause`. Returns the
    /// outcome if the change is finished.
    pub fn step(&mut self, cores: &dyn CoreCommandSender) -> Option<Result<(), IndexedDeviceError>> {
        while self.level < self.levels.len() {
            if self.is_paused() {
                return None;
            }
            let upwards = self.stage != TransitionSyncPoint::Quiesced;
            let level = if upwards { self.levels.len() - 1 - self.level } else { self.level };
            let mut all = true;
            let mut refused = None;
            for part in self.levels[level].iter_mut().filter(|part| !part.over) {
                match part.change.step_to(self.stage, LowerLimits(Some(&self.coming)), cores) {
                    None => all = false,
                    Some(outcome) => {
                        part.over = self.stage == TransitionSyncPoint::Finished;
                        refused = refused.or_else(|| Some((part.place, part.blame(outcome.err()?))));
                    }
                }
            }
            if let Some(refused) = refused.filter(|_| self.result.is_ok()) {
                self.abort(refused, cores);
                continue;
            }
            if !all {
                return None;
            }
            if self.stage == TransitionSyncPoint::Prepared {
                self.coming.extend(self.levels[level].iter().filter_map(|part| part.change.limits_to_come()));
            }
            self.level += 1;
            if self.level == self.levels.len() && self.stage != TransitionSyncPoint::Finished {
                self.level = 0;
                match self.stage {
                    TransitionSyncPoint::Preresumed => self.end_preresume(cores),
                    TransitionSyncPoint::Prepared => self.stage = TransitionSyncPoint::Quiesced,
                    TransitionSyncPoint::Quiesced if self.pause == TransitionPauseState::Requested => {
                        self.pause = TransitionPauseState::Reached;
                    }
                    _ => self.swap_tables(cores),
                }
            }
        }
        Some(self.result.clone())
    }

    /// All targets agreed; lanes that open from now on know the new tables. A partner outside of
    /// the set may have opened lanes before, so the change must be retried.
    fn end_preresume(&mut self, cores: &dyn CoreCommandSender) {
        let late = self.late();
        match late.first() {
            None => self.stage = TransitionSyncPoint::Prepared,
            Some(late) => self.require_retry(late, cores),
        }
    }

    /// Swaps all tables at once; lanes that begin later see the new live tables. A partner that
    /// became live during the change may have lanes that began before.
    fn swap_tables(&mut self, cores: &dyn CoreCommandSender) {
        // Dropped after the lock, because this may be the last reference to a device.
        let late;
        let _places = lock_table_swap();
        late = self.late();
        if let Some(late) = late.iter().find(|(_, partner)| partner.live().is_some()) {
            return self.require_retry(late, cores);
        }
        for stage in [TransitionSyncPoint::Swapped, TransitionSyncPoint::HooksRun] {
            for part in self.levels.iter_mut().rev().flatten() {
                let _ = part.change.step_to(stage, LowerLimits(Some(&self.coming)), cores);
            }
        }
        self.stage = TransitionSyncPoint::Finished;
    }

    /// The partners that are not in the set.
    fn late(&self) -> Vec<IndexedPartner> {
        let known: HashSet<DeviceId> = self.parts().map(|part| part.change.device().id()).collect();
        let all = self
            .parts()
            .flat_map(|part| part.change.partners().into_iter().map(move |partner| (part.place, partner)));
        all.filter(|(_, partner)| !known.contains(&partner.id())).collect()
    }

    fn require_retry(&mut self, (place, late): &IndexedPartner, cores: &dyn CoreCommandSender) {
        self.must_retry = true;
        let error = TargetError::errno(EBUSY).because("it became a partner during the change");
        self.abort((*place, wrap_partner_error(late, error)), cores);
    }

    /// Cancels the change: the devices continue with their live tables. The caller must step the
    /// change to its end, which is EINTR. Returns false if it is too late to cancel; the outcome is
    /// then unchanged.
    pub fn cancel(&mut self, cores: &dyn CoreCommandSender) -> bool {
        let in_time = self.stage != TransitionSyncPoint::Finished;
        if in_time {
            self.abort((0, TargetError::errno(EINTR).because("cancelled")), cores);
        }
        in_time
    }

    fn abort(&mut self, refused: IndexedDeviceError, cores: &dyn CoreCommandSender) {
        self.result = Err(refused);
        let parts = self.levels.iter_mut().flatten();
        parts.for_each(|part| part.change.cancel(cores));
        (self.stage, self.level, self.pause) = (TransitionSyncPoint::Finished, 0, TransitionPauseState::No);
    }

    /// Takes the tables that no core uses any more, after the change is finished. The thread that
    /// drops them closes their devices.
    #[must_use]
    pub fn take_released(&mut self) -> Vec<Arc<Table>> {
        self.levels.iter_mut().flatten().flat_map(|part| part.change.take_released()).collect()
    }
}

impl DeviceSetTransitionMember {
    /// Adds the name of the device to `error` if it is a partner.
    fn blame(&self, error: TargetError) -> TargetError {
        if self.is_partner { wrap_partner_error(self.change.device(), error) } else { error }
    }
}

/// The level of each device: the length of the longest path to it from above, within `devices`.
fn assign_device_stack_levels(devices: &[Arc<MappedDevice>]) -> HashMap<DeviceId, usize> {
    if devices.len() < 2 {
        return HashMap::new();
    }
    let given: HashSet<DeviceId> = devices.iter().map(|device| device.id()).collect();
    // The given devices below a device, directly or through devices that are not in the list.
    let below = |device: &Arc<MappedDevice>| {
        let mut found = HashSet::new();
        let mut seen = HashSet::new();
        let mut look: Vec<Arc<dyn Device>> = vec![Arc::clone(device) as Arc<dyn Device>];
        while let Some(next) = look.pop() {
            for next in next.stacked().map(|stacked| stacked.children()).unwrap_or_default() {
                if given.contains(&next.id()) {
                    found.insert(next.id());
                }
                if seen.insert(next.id()) {
                    look.push(next);
                }
            }
        }
        found
    };
    let below: Vec<(DeviceId, HashSet<DeviceId>)> = devices.iter().map(|d| (d.id(), below(d))).collect();
    // A device has more devices below it than any device under it, so sorting puts it first.
    let mut sorted: Vec<_> = below.iter().collect();
    sorted.sort_by_key(|(_, found)| std::cmp::Reverse(found.len()));
    let mut levels: HashMap<DeviceId, usize> = HashMap::new();
    for (id, found) in sorted {
        let level = *levels.entry(*id).or_default();
        for lower in found {
            let at = levels.entry(*lower).or_default();
            *at = (*at).max(level + 1);
        }
    }
    levels
}
