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
//! pause between 3 and 4 ([`Changes::pause_at_rest`]). What fails or is called off before that
//! instant leaves every device active, with the table that was live; a device that was suspended
//! before a *suspend* stays so.
//!
//! Tables that come or go can have *partners* ([`Target::partners`]), which are renewed in the same
//! change and so belong to the set. Who locks devices asks for them first
//! ([`Changes::renewed_by_resume`]), and says which are locked ([`Changes::resume_among`]): there
//! may be others by now, and a change that would need them is outrun ([`Changes::outrun`]).
//!
//! One change at a time and device holds for the set: if one of them is under change already, none
//! is begun.
//!
//! [`Target::preresume`]: crate::Target::preresume
//! [`Target::partners`]: crate::Target::partners

use super::change::{Change, places};
use super::device::{MappedDevice, Wake};
use super::partners::{Partner, besides, by_leaving, by_resume, others};
use super::phase::Stage;
use crate::error::TargetError;
use crate::table::Table;
use crate::target::Below;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use udm_core::bugs::{self, Bug};
use udm_core::errno::{EBUSY, EINTR};
use udm_core::{Cores, Device, DeviceId, Limits};

/// What was wrong, and with which device: its place in the list that was given.
pub type Refused = (usize, TargetError);

/// A suspend, resume or removal of several devices under way. Dropped before its end it leaves them
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
    outrun: bool,
    pause: Pause,
}

/// Whether a change pauses while its devices stand still.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pause {
    /// It does not, or has.
    No,
    /// It will.
    Asked,
    /// It does, until it is told to go on.
    Reached,
}

struct Part {
    /// In the list that was given; of a partner, that of a device whose partner it is.
    place: usize,
    is_partner: bool,
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
        Changes::begin(devices, &[], |device| device.suspend(noflush, Arc::clone(wake)), wake)
    }

    /// As [`MappedDevice::resume_with`], of all `devices`, with their partners. Where one is
    /// suspended already it is `noflush` for all: what it holds for those above would keep them
    /// from coming to rest, and it goes on only when they have.
    ///
    /// # Errors
    /// EBUSY while one of them is under change.
    pub fn resume(devices: &[Arc<MappedDevice>], noflush: bool, wake: &Wake) -> Result<Changes, Refused> {
        Changes::resume_among(devices, noflush, wake, |_| true)
    }

    /// As [`Changes::resume`], with partners that `may` be changed. It is outrun if there are
    /// others.
    ///
    /// # Errors
    /// As there.
    pub fn resume_among(
        devices: &[Arc<MappedDevice>],
        noflush: bool,
        wake: &Wake,
        may: impl Fn(&Arc<MappedDevice>) -> bool,
    ) -> Result<Changes, Refused> {
        let mut partners = by_resume(devices);
        partners.retain(|(_, partner)| may(partner));
        let how = |device: &Arc<MappedDevice>| device.resume_with(noflush, Arc::clone(wake));
        let mut changes = Changes::begin(devices, &partners, how, wake)?;
        let rests = changes.parts().any(|part| part.change.device().is_suspended());
        if rests && !bugs::on(Bug::SetWaitsForItself) {
            changes.levels.iter_mut().flatten().for_each(|part| part.change.hand_back());
        }
        Ok(changes)
    }

    /// Has `devices` come to rest for good, for their removal, and renews the partners that they
    /// leave. Nothing that they hold fails.
    ///
    /// # Errors
    /// EBUSY while one of them is under change.
    pub fn leave(devices: &[Arc<MappedDevice>], wake: &Wake) -> Result<Changes, Refused> {
        Changes::leave_among(devices, wake, |_| true)
    }

    /// As [`Changes::leave`], with partners that `may` be changed. It is outrun if there are
    /// others.
    ///
    /// # Errors
    /// As there.
    pub fn leave_among(
        devices: &[Arc<MappedDevice>],
        wake: &Wake,
        may: impl Fn(&Arc<MappedDevice>) -> bool,
    ) -> Result<Changes, Refused> {
        let mut partners = by_leaving(devices);
        partners.retain(|(_, partner)| may(partner));
        Changes::begin(devices, &partners, |device| Change::leave(device, Arc::clone(wake)), wake)
    }

    /// The devices that a resume of `devices` would renew besides, as of now.
    #[must_use]
    pub fn renewed_by_resume(devices: &[Arc<MappedDevice>]) -> Vec<Arc<MappedDevice>> {
        others(devices, by_resume(devices))
    }

    /// The devices that a removal of `devices` would renew, as of now.
    #[must_use]
    pub fn renewed_by_leaving(devices: &[Arc<MappedDevice>]) -> Vec<Arc<MappedDevice>> {
        others(devices, by_leaving(devices))
    }

    /// `how` begins the change of each of `devices`.
    fn begin(
        devices: &[Arc<MappedDevice>],
        partners: &[Partner],
        how: impl Fn(&Arc<MappedDevice>) -> Result<Change, TargetError>,
        wake: &Wake,
    ) -> Result<Changes, Refused> {
        let partner_ids: HashSet<DeviceId> = partners.iter().map(|(_, partner)| partner.id()).collect();
        let given = devices.iter().enumerate().map(|(place, device)| (place, device, false));
        let others = partners.iter().map(|(place, partner)| (*place, partner, true));
        let mut known = HashSet::new();
        let mut parts = Vec::with_capacity(devices.len());
        for (place, device, is_partner) in given.chain(others).filter(|part| known.insert(part.1.id())) {
            let change = match is_partner {
                true => Change::renew(device, Arc::clone(wake)).map_err(|e| besides(device, e)),
                false => how(device),
            };
            let mut change = change.map_err(|error| (place, error))?;
            if !is_partner && partner_ids.contains(&device.id()) {
                change.renew_too();
            }
            parts.push(Part { place, is_partner, change, over: false });
        }
        let all: Vec<_> = parts.iter().map(|part| Arc::clone(part.change.device())).collect();
        let order = order(&all);
        let mut levels: Vec<Vec<Part>> = Vec::new();
        for part in parts {
            let level = order.get(&part.change.device().id()).copied().unwrap_or(0);
            levels.resize_with(levels.len().max(level + 1), Vec::new);
            levels[level].push(part);
        }
        let (coming, result) = (HashMap::new(), Ok(()));
        let (stage, pause) = (Stage::Asked, Pause::No);
        Ok(Changes { levels, stage, level: 0, coming, result, outrun: false, pause })
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        self.levels.iter().flatten()
    }

    /// True when it failed because a partner came between, with nothing changed: begin again.
    #[must_use]
    pub fn outrun(&self) -> bool {
        self.outrun
    }

    /// Has it pause when all devices stand still and no table has changed places, until
    /// [`Changes::go_on`].
    pub fn pause_at_rest(&mut self) {
        self.pause = Pause::Asked;
    }

    /// True while it pauses.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.pause == Pause::Reached
    }

    /// Ends the pause: the tables change places, or the devices go on with those that are live
    /// where `checked` is an error. Step it to its end.
    pub fn go_on(&mut self, checked: Result<(), Refused>, cores: &dyn Cores) {
        if std::mem::replace(&mut self.pause, Pause::No) == Pause::Reached
            && let Err(refused) = checked
        {
            self.call_off(refused, cores);
        }
    }

    /// Goes as far as it can. `None`: the cores have yet to answer, or it is paused; call again
    /// after the wake, or when it has been told to go on. `Some`: over, with its outcome.
    pub fn step(&mut self, cores: &dyn Cores) -> Option<Result<(), Refused>> {
        while self.level < self.levels.len() {
            if self.is_paused() {
                return None;
            }
            let upwards = self.stage != Stage::Still;
            let level = if upwards { self.levels.len() - 1 - self.level } else { self.level };
            let mut all = true;
            let mut refused = None;
            for part in self.levels[level].iter_mut().filter(|part| !part.over) {
                match part.change.step_to(self.stage, Below(Some(&self.coming)), cores) {
                    None => all = false,
                    Some(outcome) => {
                        part.over = self.stage == Stage::Over;
                        refused = refused.or_else(|| Some((part.place, part.blame(outcome.err()?))));
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
                match self.stage {
                    Stage::Asked => self.asked(cores),
                    Stage::Prepared => self.stage = Stage::Still,
                    Stage::Still if self.pause == Pause::Asked => self.pause = Pause::Reached,
                    _ => self.change_places(cores),
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
            None => self.stage = Stage::Prepared,
            Some(late) => self.is_outrun(late, cores),
        }
    }

    /// All stand still, and change places in one go: lanes that begin behind it see what is live
    /// now. A partner that has become live since it was looked for may have some that began before.
    fn change_places(&mut self, cores: &dyn Cores) {
        // Dropped behind the lock: it may be the last hold on a device.
        let late;
        let _places = places();
        late = self.late();
        if let Some(late) = late.iter().find(|(_, partner)| partner.live().is_some()) {
            return self.is_outrun(late, cores);
        }
        for stage in [Stage::Swapped, Stage::Told] {
            for part in self.levels.iter_mut().rev().flatten() {
                let _ = part.change.step_to(stage, Below(Some(&self.coming)), cores);
            }
        }
        self.stage = Stage::Over;
    }

    /// Partners that are not of the set.
    fn late(&self) -> Vec<Partner> {
        let known: HashSet<DeviceId> = self.parts().map(|part| part.change.device().id()).collect();
        let all = self
            .parts()
            .flat_map(|part| part.change.partners().into_iter().map(move |partner| (part.place, partner)));
        all.filter(|(_, partner)| !known.contains(&partner.id())).collect()
    }

    fn is_outrun(&mut self, (place, late): &Partner, cores: &dyn Cores) {
        self.outrun = true;
        let error = TargetError::errno(EBUSY).because("it came between");
        self.call_off((*place, besides(late, error)), cores);
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
        (self.stage, self.level, self.pause) = (Stage::Over, 0, Pause::No);
    }

    /// The tables that no core uses any more, of a change that is over. Who drops them closes what
    /// they had open.
    #[must_use]
    pub fn take_let_go(&mut self) -> Vec<Arc<Table>> {
        self.levels.iter_mut().flatten().flat_map(|part| part.change.take_let_go()).collect()
    }
}

impl Part {
    /// Says of which device `error` is, if that is not one that was given.
    fn blame(&self, error: TargetError) -> TargetError {
        if self.is_partner { besides(self.change.device(), error) } else { error }
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
