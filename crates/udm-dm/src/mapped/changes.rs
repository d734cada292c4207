//! Suspend and resume of several devices, in step: all of them or none.
//!
//! Three stages, each reached by all before one goes on:
//!
//! 1. *Prepared*, from the bottom of the stack to its top: whatever can fail has not, on any core
//!    of any device, and everything still runs. A table takes the limits of the tables that become
//!    live below it in the same change.
//! 2. *Still*, from the top to the bottom: a device comes to rest only while those below it still
//!    serve what it has in flight.
//! 3. *Over*, from the bottom to the top, which nothing stops.
//!
//! Between 2 and 3 none of the devices has a request in flight: what lies below them is one instant
//! of all of them. What fails or is called off before that instant leaves every device active, with
//! the table that was live; a device that was suspended before a *suspend* stays so.
//!
//! One change at a time and device holds for the set: if one of them is under change already, none
//! is begun.

use super::change::{Change, Stage};
use super::device::{MappedDevice, Wake};
use crate::bugs::{self, Bug};
use crate::error::TargetError;
use crate::table::Table;
use crate::target::Below;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use udm_core::errno::EINTR;
use udm_core::{Cores, Device, DeviceId, Limits};

/// What was wrong, and with which device: its place in the list that was given.
pub type Refused = (usize, TargetError);

/// A suspend or resume of several devices under way. Dropped before its end it leaves them
/// suspended or as they were; a resume mends that.
#[must_use = "nothing happens until it is stepped"]
pub struct Changes {
    /// By their place in the stack, top first: nothing lies on anything of its own level or a later
    /// one.
    levels: Vec<Vec<Part>>,
    stage: Stage,
    /// How many levels have reached it.
    level: usize,
    /// What devices of the levels that are prepared change to.
    coming: HashMap<DeviceId, Limits>,
    result: Result<(), Refused>,
}

struct Part {
    place: usize,
    change: Change,
    /// It has come to its end.
    over: bool,
}

impl Changes {
    /// As [`MappedDevice::suspend`], of all `devices`; one that is named twice counts once.
    ///
    /// # Errors
    /// EBUSY while one of them is under change.
    pub fn suspend(devices: &[Arc<MappedDevice>], noflush: bool, wake: &Wake) -> Result<Changes, Refused> {
        Changes::begin(devices, |device| device.suspend(noflush, Arc::clone(wake)))
    }

    /// As [`MappedDevice::resume_with`], of all `devices`. Where one is suspended already it is
    /// `noflush` for all: what it holds for those above would keep them from coming to rest, and it
    /// goes on only when they have.
    ///
    /// # Errors
    /// EBUSY while one of them is under change.
    pub fn resume(devices: &[Arc<MappedDevice>], noflush: bool, wake: &Wake) -> Result<Changes, Refused> {
        let mut changes = Changes::begin(devices, |device| device.resume_with(noflush, Arc::clone(wake)))?;
        if devices.iter().any(|device| device.is_suspended()) && !bugs::on(Bug::SetWaitsForItself) {
            changes.levels.iter_mut().flatten().for_each(|part| part.change.hand_back());
        }
        Ok(changes)
    }

    fn begin(
        devices: &[Arc<MappedDevice>],
        how: impl Fn(&Arc<MappedDevice>) -> Result<Change, TargetError>,
    ) -> Result<Changes, Refused> {
        let mut levels: Vec<Vec<Part>> = Vec::new();
        let mut known = HashSet::new();
        let order = order(devices);
        for (place, device) in devices.iter().enumerate().filter(|(_, device)| known.insert(device.id())) {
            let change = how(device).map_err(|error| (place, error))?;
            let level = order.get(&device.id()).copied().unwrap_or(0);
            levels.resize_with(levels.len().max(level + 1), Vec::new);
            levels[level].push(Part { place, change, over: false });
        }
        Ok(Changes { levels, stage: Stage::Prepared, level: 0, coming: HashMap::new(), result: Ok(()) })
    }

    /// Goes as far as it can. `None`: the cores have yet to answer; call again after the wake.
    /// `Some`: over, with its outcome.
    pub fn step(&mut self, cores: &dyn Cores) -> Option<Result<(), Refused>> {
        while self.level < self.levels.len() {
            let upwards = self.stage != Stage::Still;
            let level = if upwards { self.levels.len() - 1 - self.level } else { self.level };
            let mut all = true;
            let mut refused = None;
            for part in self.levels[level].iter_mut().filter(|part| !part.over) {
                match part.change.step_to(self.stage, Below(Some(&self.coming)), cores) {
                    None => all = false,
                    Some(outcome) => {
                        part.over = self.stage == Stage::Over;
                        refused = refused.or_else(|| outcome.err().map(|error| (part.place, error)));
                    }
                }
            }
            if let Some(refused) = refused.filter(|_| self.result.is_ok()) {
                self.call_off(refused, cores);
                continue;
            }
            let in_step = !(bugs::on(Bug::SetNotInStep) && self.stage == Stage::Still);
            if !all && in_step {
                return None;
            }
            if self.stage == Stage::Prepared && !bugs::on(Bug::LimitsToComeIgnored) {
                self.coming.extend(self.levels[level].iter().filter_map(|part| part.change.limits_to_come()));
            }
            self.level += 1;
            if self.level == self.levels.len() && self.stage != Stage::Over {
                self.level = 0;
                self.stage = if self.stage == Stage::Prepared { Stage::Still } else { Stage::Over };
            }
        }
        Some(self.result.clone())
    }

    /// Calls off a change that waits: the devices go on with the tables that are live. Step it to
    /// its end, which is EINTR. False where it was too late for that: the end is what it would have
    /// been.
    pub fn cancel(&mut self, cores: &dyn Cores) -> bool {
        let in_time = self.stage != Stage::Over;
        if in_time {
            self.call_off((0, TargetError::errno(EINTR).because("called off")), cores);
        }
        in_time
    }

    fn call_off(&mut self, refused: Refused, cores: &dyn Cores) {
        self.result = Err(refused);
        let parts = self.levels.iter_mut().flatten();
        let some = if bugs::on(Bug::SetHalfCalledOff) { 1 } else { usize::MAX };
        parts.take(some).for_each(|part| part.change.cancel(cores));
        (self.stage, self.level) = (Stage::Over, 0);
    }

    /// The tables that no core uses any more, of a change that is over. Who drops them closes what
    /// they had open.
    #[must_use]
    pub fn take_let_go(&mut self) -> Vec<Arc<Table>> {
        self.levels.iter_mut().flatten().flat_map(|part| part.change.take_let_go()).collect()
    }
}

/// How many of `devices` lie on each of them, in the longest line that leads up from it.
fn order(devices: &[Arc<MappedDevice>]) -> HashMap<DeviceId, usize> {
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
    let mut order: HashMap<DeviceId, usize> = HashMap::new();
    for (id, found) in sorted {
        let level = *order.entry(*id).or_default();
        for lower in found {
            let at = order.entry(*lower).or_default();
            *at = (*at).max(level + 1);
        }
    }
    order
}
