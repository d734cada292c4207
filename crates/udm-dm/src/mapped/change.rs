//! Suspend and resume: a change that all cores take part in, one step at a time.
//!
//! A resume with a new table: every core opens its lanes of it (*prepare*), while the old one
//! serves; only when all could, the device is suspended (if it is not already), the tables change
//! places, and the cores go on with the lanes that they have. What can fail is over before anything
//! stops, so a resume that cannot work is refused with the old table live and running, even if the
//! device was suspended before.
//!
//! A table that is let go, the old one or one that was not to be, is held until every core has
//! dropped its lanes, and then by the [`Change`]: who drops that closes files, and no core does.
//!
//! A [`Change`] blocks nobody: [`Change::step`] does what can be done now, and its `wake` is called
//! when there is more. One change at a time and device. Hooks of targets run in the kernel's order:
//! presuspend, (cores stop), postsuspend, (swap), resume, (cores go on).

use super::device::{MappedDevice, Slot, Wake};
use crate::bugs::{self, Bug};
use crate::error::TargetError;
use crate::table::Table;
use crate::target::{Below, Target};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use udm_core::errno::{EBUSY, EINTR};
use udm_core::{Ack, Cores, Device, DeviceId, Drain, Failure, LaneCommand, Limits};

/// What to do at the next step, once the cores have answered the last one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Check the new table and have the cores open it.
    Prepare,
    /// The cores have tried.
    Prepared,
    /// Have the cores stop.
    Suspend,
    /// They have stopped.
    Suspended,
    /// The device stands still, and is to stay so.
    Still,
    /// It stands still, for the tables to change places.
    Swap,
    /// Have the cores go on with the table that is live now.
    Resume,
    /// They do.
    Resumed,
    /// Nothing is left to do.
    Done,
    /// The device is free for the next change.
    Over,
}

/// Where a change waits for others that go in step with it ([`super::changes`]).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    /// Everything that can fail is over, and nothing has stopped for it.
    Prepared,
    /// The device stands still.
    Still,
    /// The end.
    Over,
}

impl Phase {
    /// The last stage that was reached.
    fn stage(self) -> Option<Stage> {
        match self {
            Phase::Prepare | Phase::Prepared => None,
            Phase::Suspend | Phase::Suspended => Some(Stage::Prepared),
            Phase::Still | Phase::Swap | Phase::Resume | Phase::Resumed | Phase::Done => Some(Stage::Still),
            Phase::Over => Some(Stage::Over),
        }
    }
}

/// A suspend or resume under way. Dropped before its end it leaves the device suspended or as it
/// was; a resume mends that. Dropped at its end it may close devices, which can block: see the
/// module's documentation.
#[must_use = "nothing happens until it is stepped"]
pub struct Change {
    device: Arc<MappedDevice>,
    wake: Wake,
    noflush: bool,
    /// What becomes live.
    next: Option<Slot>,
    /// Resume behind the suspend.
    go_on: bool,
    phase: Phase,
    /// Set when all cores have answered.
    waiting: Option<Arc<AtomicBool>>,
    failure: Failure,
    result: Result<(), TargetError>,
    /// Tables that no core uses any more.
    let_go: Vec<Arc<Table>>,
}

impl Change {
    pub(super) fn suspend(
        device: &Arc<MappedDevice>,
        noflush: bool,
        wake: Wake,
    ) -> Result<Change, TargetError> {
        let mut change = Change::begin(device, noflush, wake)?;
        change.phase = if device.is_suspended() { Phase::Done } else { Phase::Suspend };
        Ok(change)
    }

    pub(super) fn resume(
        device: &Arc<MappedDevice>,
        noflush: bool,
        wake: Wake,
    ) -> Result<Change, TargetError> {
        let mut change = Change::begin(device, noflush, wake)?;
        change.go_on = true;
        let mut state = device.state();
        if let Some(table) = state.inactive.clone() {
            state.generation += 1;
            change.next = Some(Slot { table, generation: state.generation });
            change.phase = Phase::Prepare;
        } else if state.suspended {
            change.phase = Phase::Resume;
        }
        drop(state);
        Ok(change)
    }

    fn begin(device: &Arc<MappedDevice>, noflush: bool, wake: Wake) -> Result<Change, TargetError> {
        if std::mem::replace(&mut device.state().changing, true) {
            return Err(TargetError::errno(EBUSY).because("another suspend or resume is under way"));
        }
        Ok(Change {
            device: Arc::clone(device),
            wake,
            noflush,
            next: None,
            go_on: false,
            phase: Phase::Done,
            waiting: None,
            failure: Failure::default(),
            result: Ok(()),
            let_go: Vec::new(),
        })
    }

    /// Goes as far as it can. `None`: the cores have yet to answer; call again after the wake.
    /// `Some`: over, with its outcome.
    pub fn step(&mut self, cores: &dyn Cores) -> Option<Result<(), TargetError>> {
        self.step_to(Stage::Over, Below::NOW, cores)
    }

    /// As [`Change::step`], and no further than to `stage`. A change that fails before says so when
    /// it gets there. `below` says what those below change to.
    pub(super) fn step_to(
        &mut self,
        stage: Stage,
        below: Below<'_>,
        cores: &dyn Cores,
    ) -> Option<Result<(), TargetError>> {
        loop {
            // Acquire pairs with the release behind the last ack: what the lanes did is seen here.
            let patient = !(bugs::on(Bug::SwapTooEarly) && self.phase == Phase::Suspended);
            if patient && self.waiting.as_ref().is_some_and(|answered| !answered.load(Ordering::Acquire)) {
                return None;
            }
            self.waiting = None;
            if self.phase.stage() >= Some(stage) {
                return Some(self.result.clone());
            }
            self.phase = match self.phase {
                Phase::Prepare => self.prepare(below, cores),
                Phase::Prepared => self.prepared(cores),
                Phase::Suspend => self.stop(cores),
                Phase::Suspended => self.stopped(),
                Phase::Swap => self.swap(),
                Phase::Resume => self.go(cores),
                Phase::Still | Phase::Resumed => Phase::Done,
                Phase::Done | Phase::Over => self.end(),
            };
        }
    }

    /// Calls off a change that waits: the device goes on with the table that is live. Step it to
    /// its end, which is EINTR.
    pub fn cancel(&mut self, cores: &dyn Cores) {
        let error = TargetError::errno(EINTR).because("called off");
        match self.phase {
            Phase::Resume | Phase::Resumed | Phase::Done | Phase::Over => return,
            Phase::Suspended if bugs::on(Bug::CancelWaits) => return,
            Phase::Prepare | Phase::Prepared | Phase::Suspend | Phase::Suspended => self.waiting = None,
            Phase::Still | Phase::Swap => {}
        }
        let stopping = matches!(self.phase, Phase::Suspended | Phase::Still | Phase::Swap);
        self.phase = self.refuse(error, cores);
        if stopping {
            self.phase = Phase::Resume;
        }
    }

    /// What is held waits for the resume and does not fail, whatever was said when it began.
    pub(super) fn hand_back(&mut self) {
        self.noflush = true;
    }

    /// The tables that no core uses any more, of a change that is over. Who drops them closes what
    /// they had open.
    #[must_use]
    pub fn take_let_go(&mut self) -> Vec<Arc<Table>> {
        std::mem::take(&mut self.let_go)
    }

    fn ack(&mut self) -> Ack {
        let answered = Arc::new(AtomicBool::new(false));
        self.waiting = Some(Arc::clone(&answered));
        let wake = Arc::clone(&self.wake);
        Ack::new(move || {
            answered.store(true, Ordering::Release);
            wake();
        })
    }

    /// What becomes live has these limits.
    pub(super) fn limits_to_come(&self) -> Option<(DeviceId, Limits)> {
        self.next.as_ref().map(|slot| (self.device.id(), slot.table.limits()))
    }

    fn prepare(&mut self, below: Below<'_>, cores: &dyn Cores) -> Phase {
        let Some(slot) = self.next.clone() else { return Phase::Done };
        if let Err(error) = self.device.prepare(&slot, below) {
            return self.refuse(error, cores);
        }
        let Slot { table, generation } = slot;
        let (failure, ack) = (self.failure.clone(), self.ack());
        cores.broadcast(self.device.id(), LaneCommand::Prepare { table, generation, failure, ack });
        Phase::Prepared
    }

    fn prepared(&mut self, cores: &dyn Cores) -> Phase {
        if let Some(error) = self.failure.take().filter(|_| !bugs::on(Bug::OpenFailureIgnored)) {
            return self.refuse(TargetError::errno(error.errno).because(error.text), cores);
        }
        if self.device.is_suspended() { Phase::Swap } else { Phase::Suspend }
    }

    /// The old table stays, and runs.
    fn refuse(&mut self, error: TargetError, cores: &dyn Cores) -> Phase {
        self.drop_prepared(cores);
        self.result = Err(error);
        if self.go_on && self.device.is_suspended() { Phase::Resume } else { Phase::Done }
    }

    fn drop_prepared(&mut self, cores: &dyn Cores) {
        let Some(Slot { table, generation }) = self.next.take() else { return };
        self.device.state().preparing = None;
        self.let_go.push(table);
        let ack = self.ack();
        cores.broadcast(self.device.id(), LaneCommand::Unprepare { generation, ack });
    }

    fn stop(&mut self, cores: &dyn Cores) -> Phase {
        // In this order: a lane that is opened from now on, and stands still, is one that the
        // targets have been told to expect.
        self.each_target(|target| target.presuspend(self.noflush));
        let tasks = {
            let mut state = self.device.state();
            state.suspended = true;
            std::mem::take(&mut state.tasks)
        };
        let how = if self.noflush { Drain::NoFlush } else { Drain::Flush };
        let ack = self.ack();
        // They are told, and what they have in flight is not waited for.
        tasks.into_iter().for_each(|task| task.stop(ack.clone()));
        cores.broadcast(self.device.id(), LaneCommand::Suspend { how, ack });
        Phase::Suspended
    }

    fn stopped(&mut self) -> Phase {
        self.each_target(|target| target.postsuspend());
        if self.go_on { Phase::Swap } else { Phase::Still }
    }

    fn swap(&mut self) -> Phase {
        let mut state = self.device.state();
        if let Some(slot) = self.next.take() {
            state.preparing = None;
            // A load may have put another table there meanwhile; that one stays.
            if state.inactive.as_ref().is_some_and(|table| Arc::ptr_eq(table, &slot.table)) {
                state.inactive = None;
            }
            state.leaving = state.live.replace(slot);
        }
        Phase::Resume
    }

    fn go(&mut self, cores: &dyn Cores) -> Phase {
        self.each_target(|target| target.resume());
        let generation = {
            let mut state = self.device.state();
            state.suspended = false;
            state.live_generation()
        };
        let ack = self.ack();
        cores.broadcast(self.device.id(), LaneCommand::Resume { generation, ack });
        self.start_tasks(cores);
        Phase::Resumed
    }

    fn start_tasks(&self, cores: &dyn Cores) {
        let upkeep = self.device.state().upkeep;
        let live = self.device.live();
        let targets = live.iter().flat_map(|table| table.targets());
        let makes = targets.flat_map(|entry| entry.target.tasks(&upkeep));
        // Those of a suspend that was called off before they were stopped are stopped now.
        let tasks: Vec<_> = makes.map(|make| cores.start(make)).collect();
        let before = std::mem::replace(&mut self.device.state().tasks, tasks);
        drop(before);
    }

    /// The device is free for the next change.
    fn end(&mut self) -> Phase {
        let mut state = self.device.state();
        state.changing = false;
        if !bugs::on(Bug::LeavingTableKept) {
            self.let_go.extend(state.leaving.take().map(|slot| slot.table));
        }
        Phase::Over
    }

    fn each_target(&self, hook: impl Fn(&dyn Target)) {
        let live = self.device.live();
        for entry in live.iter().flat_map(|table| table.targets()) {
            hook(&*entry.target);
        }
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        if self.phase != Phase::Over {
            let mut state = self.device.state();
            state.changing = false;
            state.preparing = None;
        }
    }
}
