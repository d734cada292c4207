//! Suspend and resume of several devices, in step: all of them or none.
//!
//! The stages, each reached by all before one goes on:
//!
//! 1. *Asked*: the targets that are to go on have nothing against it ([`Target::preresume`]).
//! 2. *Prepared*, from the bottom of the stack to its top: whatever can fail has not, on any core
//!    of any device, and everything still runs. A table takes the limits of the tables that become
//!    live below it in the same change.
//! 3. *Still*, from the top to the bottom: a device comes to rest only while those below it still
//!    serve what it has in flight.
//! 4. *Swapped*: the tables have changed places, and those that are gone know.
//! 5. *Told*: those that are live know.
//! 6. *Over*, from the bottom to the top, which nothing stops.
//!
//! From 3 on until 6 none of the devices has a request in flight: what lies below them is one
//! instant of all of them. Who has to look at that instant, and may block on it, has the change
//! pause between 3 and 4 ([`DeviceSetTransition::pause_when_quiesced`]). What fails or is called off before that
//! instant leaves every device active, with the table that was live; a device that was suspended
//! before a *suspend* stays so.
//!
//! Tables that come or go can have *partners* ([`Target::dependents`]), which are renewed in the same
//! change and so belong to the set. Who locks devices asks for them first
//! ([`DeviceSetTransition::dependents_of_resume`]), and says which are locked ([`DeviceSetTransition::resume_filtered`]): there
//! may be others by now, and a change that would need them is outrun ([`DeviceSetTransition::must_retry`]).
//!
//! One change at a time and device holds for the set: if one of them is under change already, none
//! is begun.
//!
//! [`Target::preresume`]: crate::Target::preresume
//! [`Target::dependents`]: crate::Target::dependents

use super::dependents::{
    Dependent, collect_removal_dependents, collect_resume_dependents, dependent_error, distinct_dependents,
};
use super::device::{MappedDevice, WakeFn};
use super::phase::SyncPoint;
use super::transition::{DeviceTransition, lock_table_swap};
use crate::error::TargetError;
use crate::table::Table;
use crate::target::LowerLimits;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use udm_core::bugs::{self, Bug};
use udm_core::errno::{EBUSY, EINTR};
use udm_core::{Cores, Device, DeviceId, Limits};

/// What was wrong, and with which device: its place in the list that was given.
pub type IndexedTargetError = (usize, TargetError);

/// A suspend, resume or removal of several devices under way. Dropped before its end it leaves them
/// suspended or as they were; a resume mends that.
#[must_use = "nothing happens until it is stepped"]
pub struct DeviceSetTransition {
    /// By their place in the stack, top first: nothing lies on anything of its own level or a later
    /// one.
    levels: Vec<Vec<SetMember>>,
    stage: SyncPoint,
    /// How many levels have reached it.
    level: usize,
    /// What devices of the levels that are prepared change to.
    coming: HashMap<DeviceId, Limits>,
    result: Result<(), IndexedTargetError>,
    must_retry: bool,
    pause: PauseState,
}

/// Whether a change pauses while its devices stand still.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PauseState {
    /// It does not, or has.
    No,
    /// It will.
    Asked,
    /// It does, until it is told to go on.
    Reached,
}

struct SetMember {
    /// In the list that was given; of a partner, that of a device whose partner it is.
    place: usize,
    is_dependent: bool,
    change: DeviceTransition,
    /// It has come to its end.
    over: bool,
}

impl DeviceSetTransition {
    /// As [`MappedDevice::suspend`], of all `devices`; one that is named twice counts once.
    ///
    /// # Errors
    /// EBUSY while one of them is under change.
    pub fn suspend(
        devices: &[Arc<MappedDevice>],
        noflush: bool,
        wake: &WakeFn,
    ) -> Result<DeviceSetTransition, IndexedTargetError> {
        DeviceSetTransition::begin(devices, &[], |device| device.suspend(noflush, Arc::clone(wake)), wake)
    }

    /// As [`MappedDevice::resume_with`], of all `devices`, with their partners. Where one is
    /// suspended already it is `noflush` for all: what it holds for those above would keep them
    /// from coming to rest, and it goes on only when they have.
    ///
    /// # Errors
    /// EBUSY while one of them is under change.
    pub fn resume(
        devices: &[Arc<MappedDevice>],
        noflush: bool,
        wake: &WakeFn,
    ) -> Result<DeviceSetTransition, IndexedTargetError> {
        DeviceSetTransition::resume_filtered(devices, noflush, wake, |_| true)
    }

    /// As [`DeviceSetTransition::resume`], with partners that `may` be changed. It is outrun if there are
    /// others.
    ///
    /// # Errors
    /// As there.
    pub fn resume_filtered(
        devices: &[Arc<MappedDevice>],
        noflush: bool,
        wake: &WakeFn,
        may: impl Fn(&Arc<MappedDevice>) -> bool,
    ) -> Result<DeviceSetTransition, IndexedTargetError> {
        let mut dependents = collect_resume_dependents(devices);
        dependents.retain(|(_, dependent)| may(dependent));
        let how = |device: &Arc<MappedDevice>| device.resume_with(noflush, Arc::clone(wake));
        let mut changes = DeviceSetTransition::begin(devices, &dependents, how, wake)?;
        let rests = changes.parts().any(|part| part.change.device().is_suspended());
        if rests && !bugs::on(Bug::SetWaitsForItself) {
            changes.levels.iter_mut().flatten().for_each(|part| part.change.force_noflush());
        }
        Ok(changes)
    }

    /// Has `devices` come to rest for good, for their removal, and renews the partners that they
    /// leave. Nothing that they hold fails.
    ///
    /// # Errors
    /// EBUSY while one of them is under change.
    pub fn remove(
        devices: &[Arc<MappedDevice>],
        wake: &WakeFn,
    ) -> Result<DeviceSetTransition, IndexedTargetError> {
        DeviceSetTransition::remove_filtered(devices, wake, |_| true)
    }

    /// As [`DeviceSetTransition::remove`], with partners that `may` be changed. It is outrun if there are
    /// others.
    ///
    /// # Errors
    /// As there.
    pub fn remove_filtered(
        devices: &[Arc<MappedDevice>],
        wake: &WakeFn,
        may: impl Fn(&Arc<MappedDevice>) -> bool,
    ) -> Result<DeviceSetTransition, IndexedTargetError> {
        let mut dependents = collect_removal_dependents(devices);
        dependents.retain(|(_, dependent)| may(dependent));
        DeviceSetTransition::begin(
            devices,
            &dependents,
            |device| DeviceTransition::remove(device, Arc::clone(wake)),
            wake,
        )
    }

    /// The devices that a resume of `devices` would renew besides, as of now.
    #[must_use]
    pub fn dependents_of_resume(devices: &[Arc<MappedDevice>]) -> Vec<Arc<MappedDevice>> {
        distinct_dependents(devices, collect_resume_dependents(devices))
    }

    /// The devices that a removal of `devices` would renew, as of now.
    #[must_use]
    pub fn dependents_of_removal(devices: &[Arc<MappedDevice>]) -> Vec<Arc<MappedDevice>> {
        distinct_dependents(devices, collect_removal_dependents(devices))
    }

    /// `how` begins the change of each of `devices`.
    fn begin(
        devices: &[Arc<MappedDevice>],
        dependents: &[Dependent],
        how: impl Fn(&Arc<MappedDevice>) -> Result<DeviceTransition, TargetError>,
        wake: &WakeFn,
    ) -> Result<DeviceSetTransition, IndexedTargetError> {
        let dependent_ids: HashSet<DeviceId> =
            dependents.iter().map(|(_, dependent)| dependent.id()).collect();
        let given = devices.iter().enumerate().map(|(place, device)| (place, device, false));
        let distinct_dependents = dependents.iter().map(|(place, dependent)| (*place, dependent, true));
        let mut known = HashSet::new();
        let mut parts = Vec::with_capacity(devices.len());
        for (place, device, is_dependent) in
            given.chain(distinct_dependents).filter(|part| known.insert(part.1.id()))
        {
            let change = match is_dependent {
                true => DeviceTransition::reopen_lanes(device, Arc::clone(wake))
                    .map_err(|e| dependent_error(device, e)),
                false => how(device),
            };
            let mut change = change.map_err(|error| (place, error))?;
            if !is_dependent && dependent_ids.contains(&device.id()) {
                change.also_reopen_lanes();
            }
            parts.push(SetMember { place, is_dependent, change, over: false });
        }
        let all: Vec<_> = parts.iter().map(|part| Arc::clone(part.change.device())).collect();
        let stack_levels = stack_levels(&all);
        let mut levels: Vec<Vec<SetMember>> = Vec::new();
        for part in parts {
            let level = stack_levels.get(&part.change.device().id()).copied().unwrap_or(0);
            levels.resize_with(levels.len().max(level + 1), Vec::new);
            levels[level].push(part);
        }
        let (coming, result) = (HashMap::new(), Ok(()));
        let (stage, pause) = (SyncPoint::Asked, PauseState::No);
        Ok(DeviceSetTransition { levels, stage, level: 0, coming, result, must_retry: false, pause })
    }

    fn parts(&self) -> impl Iterator<Item = &SetMember> {
        self.levels.iter().flatten()
    }

    /// True when it failed because a partner came between, with nothing changed: begin again.
    #[must_use]
    pub fn must_retry(&self) -> bool {
        self.must_retry
    }

    /// Has it pause when all devices stand still and no table has changed places, until
    /// [`DeviceSetTransition::go_on`].
    pub fn pause_when_quiesced(&mut self) {
        self.pause = PauseState::Asked;
    }

    /// True while it pauses.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.pause == PauseState::Reached
    }

    /// Ends the pause: the tables change places, or the devices go on with those that are live
    /// where `checked` is an error. Step it to its end.
    pub fn go_on(&mut self, checked: Result<(), IndexedTargetError>, cores: &dyn Cores) {
        if std::mem::replace(&mut self.pause, PauseState::No) == PauseState::Reached
            && let Err(refused) = checked
        {
            self.abort(refused, cores);
        }
    }

    /// Goes as far as it can. `None`: the cores have yet to answer, or it is paused; call again
    /// after the wake, or when it has been told to go on. `Some`: over, with its outcome.
    pub fn step(&mut self, cores: &dyn Cores) -> Option<Result<(), IndexedTargetError>> {
        while self.level < self.levels.len() {
            if self.is_paused() {
                return None;
            }
            let upwards = self.stage != SyncPoint::Quiesced;
            let level = if upwards { self.levels.len() - 1 - self.level } else { self.level };
            let mut all = true;
            let mut refused = None;
            for part in self.levels[level].iter_mut().filter(|part| !part.over) {
                match part.change.step_to(self.stage, LowerLimits(Some(&self.coming)), cores) {
                    None => all = false,
                    Some(outcome) => {
                        part.over = self.stage == SyncPoint::Finished;
                        refused = refused.or_else(|| Some((part.place, part.blame(outcome.err()?))));
                    }
                }
            }
            if let Some(refused) = refused.filter(|_| self.result.is_ok()) {
                self.abort(refused, cores);
                continue;
            }
            let in_step = !(bugs::on(Bug::SetNotInStep) && self.stage == SyncPoint::Quiesced);
            if !all && in_step {
                return None;
            }
            if self.stage == SyncPoint::Prepared && !bugs::on(Bug::LimitsToComeIgnored) {
                self.coming.extend(self.levels[level].iter().filter_map(|part| part.change.limits_to_come()));
            }
            self.level += 1;
            if self.level == self.levels.len() && self.stage != SyncPoint::Finished {
                self.level = 0;
                match self.stage {
                    SyncPoint::Asked => self.asked(cores),
                    SyncPoint::Prepared => self.stage = SyncPoint::Quiesced,
                    SyncPoint::Quiesced if self.pause == PauseState::Asked => {
                        self.pause = PauseState::Reached
                    }
                    _ => self.swap_tables(cores),
                }
            }
        }
        Some(self.result.clone())
    }

    /// The targets have been asked: lanes that are opened from now on see them. A partner that may
    /// have opened some before must be of the set.
    fn asked(&mut self, cores: &dyn Cores) {
        let late = self.late();
        match late.first() {
            None => self.stage = SyncPoint::Prepared,
            Some(late) => self.require_retry(late, cores),
        }
    }

    /// All stand still, and change places in one go: lanes that begin behind it see what is live
    /// now. A partner that has become live since it was looked for may have some that began before.
    fn swap_tables(&mut self, cores: &dyn Cores) {
        // Dropped behind the lock: it may be the last hold on a device.
        let late;
        let _places = lock_table_swap();
        late = self.late();
        if let Some(late) = late.iter().find(|(_, dependent)| dependent.live().is_some()) {
            return self.require_retry(late, cores);
        }
        for stage in [SyncPoint::Swapped, SyncPoint::HooksRun] {
            for part in self.levels.iter_mut().rev().flatten() {
                let _ = part.change.step_to(stage, LowerLimits(Some(&self.coming)), cores);
            }
        }
        self.stage = SyncPoint::Finished;
    }

    /// Partners that are not of the set.
    fn late(&self) -> Vec<Dependent> {
        let known: HashSet<DeviceId> = self.parts().map(|part| part.change.device().id()).collect();
        let all = self.parts().flat_map(|part| {
            part.change.dependents().into_iter().map(move |dependent| (part.place, dependent))
        });
        all.filter(|(_, dependent)| !known.contains(&dependent.id())).collect()
    }

    fn require_retry(&mut self, (place, late): &Dependent, cores: &dyn Cores) {
        self.must_retry = true;
        let error = TargetError::errno(EBUSY).because("it came between");
        self.abort((*place, dependent_error(late, error)), cores);
    }

    /// Calls off a change that waits: the devices go on with the tables that are live. Step it to
    /// its end, which is EINTR. False where it was too late for that: the end is what it would have
    /// been.
    pub fn cancel(&mut self, cores: &dyn Cores) -> bool {
        let in_time = self.stage != SyncPoint::Finished;
        if in_time {
            self.abort((0, TargetError::errno(EINTR).because("called off")), cores);
        }
        in_time
    }

    fn abort(&mut self, refused: IndexedTargetError, cores: &dyn Cores) {
        self.result = Err(refused);
        let parts = self.levels.iter_mut().flatten();
        let some = if bugs::on(Bug::SetHalfCalledOff) { 1 } else { usize::MAX };
        parts.take(some).for_each(|part| part.change.cancel(cores));
        (self.stage, self.level, self.pause) = (SyncPoint::Finished, 0, PauseState::No);
    }

    /// The tables that no core uses any more, of a change that is over. Who drops them closes what
    /// they had open.
    #[must_use]
    pub fn take_released(&mut self) -> Vec<Arc<Table>> {
        self.levels.iter_mut().flatten().flat_map(|part| part.change.take_released()).collect()
    }
}

impl SetMember {
    /// Says of which device `error` is, if that is not one that was given.
    fn blame(&self, error: TargetError) -> TargetError {
        if self.is_dependent { dependent_error(self.change.device(), error) } else { error }
    }
}

/// How many of `devices` lie on each of them, in the longest line that leads up from it.
fn stack_levels(devices: &[Arc<MappedDevice>]) -> HashMap<DeviceId, usize> {
    if devices.len() < 2 {
        return HashMap::new();
    }
    let given: HashSet<DeviceId> = devices.iter().map(|device| device.id()).collect();
    // What lies below each, directly or through devices that were not given.
    let below = |device: &Arc<MappedDevice>| {
        let mut found = HashSet::new();
        let mut seen = HashSet::new();
        let mut look: Vec<Arc<dyn Device>> = vec![Arc::clone(device) as Arc<dyn Device>];
        while let Some(next) = look.pop() {
            for next in next.stacked().map(|stacked| stacked.below()).unwrap_or_default() {
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
    // All that lies below a device has fewer below itself: who has most comes first.
    let mut sorted: Vec<_> = below.iter().collect();
    sorted.sort_by_key(|(_, found)| std::cmp::Reverse(found.len()));
    let mut stack_levels: HashMap<DeviceId, usize> = HashMap::new();
    for (id, found) in sorted {
        let level = *stack_levels.entry(*id).or_default();
        for lower in found {
            let at = stack_levels.entry(*lower).or_default();
            *at = (*at).max(level + 1);
        }
    }
    stack_levels
}
