//! Suspend, resume and removal of one device, one step at a time, on all cores.
//!
//! A resume with a new table goes as follows. Every core opens its lanes of the new table
//! (*prepare*), while the old table serves. If all cores succeed, the device is suspended (unless
//! it already is), the tables are swapped, and the cores continue with the new lanes. All steps
//! that can fail are done before anything stops. So a resume that cannot work is refused with the
//! old table live and running, even if the device was suspended before.
//!
//! A table that is replaced or refused is held until every core has dropped its lanes. Then the
//! [`DeviceTransition`] holds the last reference. So the thread that drops the transition closes
//! the files, and no core does.
//!
//! A *renewal* is a resume with the live table: newly opened lanes replace the lanes in use.
//!
//! A [`DeviceTransition`] never blocks. [`DeviceTransition::step`] does all that is possible now,
//! and `wake` is called when more can be done. Each device has at most one change at a time. Hooks
//! of targets run in the kernel's order: preresume, presuspend, (cores stop), postsuspend, (swap),
//! retired, resume, (cores continue).

use super::device::{MappedDevice, TableWithGeneration, TransitionWakeFn};
use super::phase::{TransitionKind, TransitionPhase, TransitionSyncPoint};
use crate::device_ref::LowerLimits;
use crate::error::TargetError;
use crate::table::Table;
use crate::target::Target;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use udm_core::errno::{EBUSY, EINTR};
use udm_core::{
    AckOnLastDrop, CoreCommandSender, Device, DeviceId, DrainMode, FirstLaneError, LaneCommand, Limits,
};

/// Locks the swap of tables and the hooks after it, for all devices of the process. Of two such
/// changes, the second sees the live tables of the first. Nothing under this lock blocks.
pub(super) fn lock_table_swap() -> MutexGuard<'static, ()> {
    static TABLE_SWAP: Mutex<()> = Mutex::new(());
    TABLE_SWAP.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A suspend, resume or removal of one device that is running. If it is dropped before its end, the
/// device stays suspended or as it was; a resume repairs this. If it is dropped at its end, it may
/// close devices, which can block.
#[must_use = "nothing happens until it is stepped"]
pub struct DeviceTransition {
    device: Arc<MappedDevice>,
    wake: TransitionWakeFn,
    noflush: bool,
    goal: TransitionKind,
    /// True if the device was already suspended when the change began.
    was_suspended: bool,
    /// The table that becomes live.
    next: Option<TableWithGeneration>,
    phase: TransitionPhase,
    /// Set to true when all cores have answered.
    waiting: Option<Arc<AtomicBool>>,
    failure: FirstLaneError,
    result: Result<(), TargetError>,
    /// Tables that no core uses any more.
    released: Vec<Arc<Table>>,
}

impl DeviceTransition {
    pub(super) fn suspend(
        device: &Arc<MappedDevice>,
        noflush: bool,
        wake: TransitionWakeFn,
    ) -> Result<DeviceTransition, TargetError> {
        let mut change = DeviceTransition::begin(device, TransitionKind::Suspend, noflush, wake)?;
        change.phase = if change.was_suspended { TransitionPhase::Done } else { TransitionPhase::Suspend };
        Ok(change)
    }

    pub(super) fn resume(
        device: &Arc<MappedDevice>,
        noflush: bool,
        wake: TransitionWakeFn,
    ) -> Result<DeviceTransition, TargetError> {
        let mut change = DeviceTransition::begin(device, TransitionKind::Resume, noflush, wake)?;
        let (inactive, stale) = {
            let state = device.state();
            (state.inactive.clone(), state.stale)
        };
        if let Some(table) = inactive {
            change.stage_table(table);
        } else if stale {
            change.stage_live_table();
        }
        if change.next.is_some() || change.was_suspended {
            change.phase = TransitionPhase::Preresume;
        }
        Ok(change)
    }

    /// Renews the device because a partner changes. No held bio fails.
    pub(super) fn reopen_lanes(
        device: &Arc<MappedDevice>,
        wake: TransitionWakeFn,
    ) -> Result<DeviceTransition, TargetError> {
        let mut change = DeviceTransition::begin(device, TransitionKind::ReopenLanes, true, wake)?;
        if change.was_suspended {
            change.phase = TransitionPhase::Swap;
        } else {
            change.also_reopen_lanes();
        }
        Ok(change)
    }

    /// The device is also a partner of another device in the change. If it gets no new table, its
    /// live table is renewed.
    pub(super) fn also_reopen_lanes(&mut self) {
        if self.goal == TransitionKind::Remove {
            return;
        }
        if self.next.is_none() {
            self.stage_live_table();
        }
        // A table that was in use all the time needs no `preresume`.
        if self.phase == TransitionPhase::Done && self.next.is_some() {
            self.phase = TransitionPhase::Prepare;
        }
    }

    /// Stops the device and retires its live table.
    pub(super) fn remove(
        device: &Arc<MappedDevice>,
        wake: TransitionWakeFn,
    ) -> Result<DeviceTransition, TargetError> {
        let mut change = DeviceTransition::begin(device, TransitionKind::Remove, true, wake)?;
        change.phase = if change.was_suspended { TransitionPhase::Swap } else { TransitionPhase::Suspend };
        Ok(change)
    }

    fn begin(
        device: &Arc<MappedDevice>,
        goal: TransitionKind,
        noflush: bool,
        wake: TransitionWakeFn,
    ) -> Result<DeviceTransition, TargetError> {
        let mut state = device.state();
        if std::mem::replace(&mut state.changing, true) {
            return Err(TargetError::errno(EBUSY).because("another suspend or resume is under way"));
        }
        Ok(DeviceTransition {
            device: Arc::clone(device),
            wake,
            noflush,
            goal,
            was_suspended: state.suspended,
            next: None,
            phase: TransitionPhase::Done,
            waiting: None,
            failure: FirstLaneError::default(),
            result: Ok(()),
            released: Vec::new(),
        })
    }

    fn stage_table(&mut self, table: Arc<Table>) {
        let mut state = self.device.state();
        state.generation += 1;
        self.next = Some(TableWithGeneration { table, generation: state.generation });
    }

    fn stage_live_table(&mut self) {
        if let Some(live) = self.device.live() {
            self.stage_table(live);
        }
    }

    /// The device that changes.
    pub(super) fn device(&self) -> &Arc<MappedDevice> {
        &self.device
    }

    /// The partners of the tables that become live or are retired, without the device itself.
    pub(super) fn partners(&self) -> Vec<Arc<MappedDevice>> {
        let live = self.device.live();
        let tables = match (self.goal, &self.next) {
            (TransitionKind::Resume, Some(next)) if !self.device.state().is_renewal(&next.table) => {
                [live, Some(Arc::clone(&next.table))]
            }
            (TransitionKind::Remove, _) => [live, None],
            _ => [None, None],
        };
        let partners = tables.iter().flatten().flat_map(|table| table.partners());
        partners.filter(|partner| partner.id() != self.device.id()).collect()
    }

    /// Does all steps that are possible now. Returns `None` if cores have not answered yet; call
    /// again after the wake. Returns the outcome if the change is finished. Partners are not
    /// renewed; use [`super::DeviceSetTransition`] for this.
    pub fn step(&mut self, cores: &dyn CoreCommandSender) -> Option<Result<(), TargetError>> {
        let _places = lock_table_swap();
        self.step_to(TransitionSyncPoint::Finished, LowerLimits::NOW, cores)
    }

    /// As [`DeviceTransition::step`], but stops at `stage`. If the change failed before, the error
    /// is returned when `stage` is reached. `below` has the coming limits of the devices below.
    pub(super) fn step_to(
        &mut self,
        stage: TransitionSyncPoint,
        below: LowerLimits<'_>,
        cores: &dyn CoreCommandSender,
    ) -> Option<Result<(), TargetError>> {
        loop {
            // Acquire pairs with the release after the last ack, so all effects of the lanes are
            // visible here.
            if self.waiting.as_ref().is_some_and(|answered| !answered.load(Ordering::Acquire)) {
                return None;
            }
            self.waiting = None;
            if self.phase.stage() >= Some(stage) {
                return Some(self.result.clone());
            }
            self.phase = match self.phase {
                TransitionPhase::Preresume => self.ask(cores),
                TransitionPhase::Prepare => self.prepare(below, cores),
                TransitionPhase::Prepared => self.prepared(cores),
                TransitionPhase::Suspend => self.stop(cores),
                TransitionPhase::Suspended => self.stopped(),
                TransitionPhase::Swap => self.swap(),
                TransitionPhase::RunResumeHooks => self.run_resume_hooks(),
                TransitionPhase::Resume => self.go(cores),
                TransitionPhase::Resumed => TransitionPhase::Done,
                TransitionPhase::Done | TransitionPhase::Finished => self.end(),
            };
        }
    }

    /// Cancels the change: the device continues with its live table, if it can. The caller must
    /// step the change to its end, which is EINTR. If it is too late to cancel, this does nothing.
    pub fn cancel(&mut self, cores: &dyn CoreCommandSender) {
        match self.phase {
            TransitionPhase::RunResumeHooks
            | TransitionPhase::Resume
            | TransitionPhase::Resumed
            | TransitionPhase::Done
            | TransitionPhase::Finished => return,
            TransitionPhase::Preresume | TransitionPhase::Swap => {}
            TransitionPhase::Prepare
            | TransitionPhase::Prepared
            | TransitionPhase::Suspend
            | TransitionPhase::Suspended => self.waiting = None,
        }
        self.phase = self.refuse(TargetError::errno(EINTR).because("called off"), cores);
    }

    /// Held bios wait for the resume and do not fail, even if the change began without `noflush`.
    pub(super) fn force_noflush(&mut self) {
        self.noflush = true;
    }

    /// Takes the tables that no core uses any more, after the change is finished. The thread that
    /// drops them closes their devices.
    #[must_use]
    pub fn take_released(&mut self) -> Vec<Arc<Table>> {
        std::mem::take(&mut self.released)
    }

    fn ack(&mut self) -> AckOnLastDrop {
        let answered = Arc::new(AtomicBool::new(false));
        self.waiting = Some(Arc::clone(&answered));
        let wake = Arc::clone(&self.wake);
        AckOnLastDrop::new(move || {
            answered.store(true, Ordering::Release);
            wake();
        })
    }

    /// The limits of the table that becomes live.
    pub(super) fn limits_to_come(&self) -> Option<(DeviceId, Limits)> {
        self.next.as_ref().map(|slot| (self.device.id(), slot.table.limits()))
    }

    fn ask(&mut self, cores: &dyn CoreCommandSender) -> TransitionPhase {
        let table = self.next.as_ref().map(|slot| Arc::clone(&slot.table)).or_else(|| self.device.live());
        match table.map_or(Ok(()), |table| table.preresume(self.device.id())) {
            Ok(()) => TransitionPhase::Prepare,
            Err(error) => self.refuse(error, cores),
        }
    }

    fn prepare(&mut self, below: LowerLimits<'_>, cores: &dyn CoreCommandSender) -> TransitionPhase {
        // Without a new table, the device is already suspended.
        let Some(slot) = self.next.clone() else { return TransitionPhase::Swap };
        if let Err(error) = self.device.prepare(&slot, below) {
            return self.refuse(error, cores);
        }
        let TableWithGeneration { table, generation } = slot;
        let (failure, ack) = (self.failure.clone(), self.ack());
        cores.broadcast(self.device.id(), LaneCommand::Prepare { table, generation, failure, ack });
        TransitionPhase::Prepared
    }

    fn prepared(&mut self, cores: &dyn CoreCommandSender) -> TransitionPhase {
        if let Some(error) = self.failure.take() {
            return self.refuse(TargetError::errno(error.errno).because(error.text), cores);
        }
        if self.device.is_suspended() { TransitionPhase::Swap } else { TransitionPhase::Suspend }
    }

    /// Cancels the change: the old table stays and runs. A device that was suspended before a
    /// resume also runs, if its live table can continue.
    fn refuse(&mut self, error: TargetError, cores: &dyn CoreCommandSender) -> TransitionPhase {
        self.drop_prepared(cores);
        self.result = Err(error);
        let (suspended, stale, live) = {
            let state = self.device.state();
            (state.suspended, state.stale, state.live.as_ref().map(|slot| Arc::clone(&slot.table)))
        };
        let can = || !stale && live.is_none_or(|table| table.preresume(self.device.id()).is_ok());
        let runs = suspended && (!self.was_suspended || self.goal == TransitionKind::Resume && can());
        if runs { TransitionPhase::RunResumeHooks } else { TransitionPhase::Done }
    }

    fn drop_prepared(&mut self, cores: &dyn CoreCommandSender) {
        let Some(TableWithGeneration { table, generation }) = self.next.take() else { return };
        self.device.state().preparing = None;
        self.released(table);
        let ack = self.ack();
        cores.broadcast(self.device.id(), LaneCommand::Unprepare { generation, ack });
    }

    fn stop(&mut self, cores: &dyn CoreCommandSender) -> TransitionPhase {
        // The hook runs before `suspended` is set. So each lane that opens suspended is one that
        // the targets expect.
        self.each_target(|target| target.presuspend(self.noflush));
        let tasks = {
            let mut state = self.device.state();
            state.suspended = true;
            std::mem::take(&mut state.tasks)
        };
        let how = if self.noflush { DrainMode::NoFlush } else { DrainMode::Flush };
        let ack = self.ack();
        // The tasks are told to stop; their requests in flight are not waited for.
        tasks.into_iter().for_each(|task| task.stop(ack.clone()));
        cores.broadcast(self.device.id(), LaneCommand::Suspend { how, ack });
        TransitionPhase::Suspended
    }

    fn stopped(&mut self) -> TransitionPhase {
        self.each_target(|target| target.postsuspend());
        TransitionPhase::Swap
    }

    fn swap(&mut self) -> TransitionPhase {
        let retired = self.swap_tables();
        let retired = retired.iter().flat_map(|table| table.targets());
        retired.for_each(|entry| match self.goal {
            TransitionKind::Remove => entry.target.removed(),
            _ => entry.target.retired(),
        });
        if self.goal == TransitionKind::Resume
            || !self.was_suspended && self.goal == TransitionKind::ReopenLanes
        {
            TransitionPhase::RunResumeHooks
        } else {
            TransitionPhase::Done
        }
    }

    /// Swaps the tables. Returns the table that is retired.
    fn swap_tables(&mut self) -> Option<Arc<Table>> {
        let mut state = self.device.state();
        let Some(slot) = self.next.take() else {
            state.stale |= self.goal == TransitionKind::ReopenLanes && state.live.is_some();
            return state
                .live
                .as_ref()
                .filter(|_| self.goal == TransitionKind::Remove)
                .map(|live| Arc::clone(&live.table));
        };
        let renewal = state.is_renewal(&slot.table);
        state.preparing = None;
        state.stale = false;
        // A load may have put another table into the slot meanwhile; that table stays.
        if !renewal && state.inactive.as_ref().is_some_and(|table| Arc::ptr_eq(table, &slot.table)) {
            state.inactive = None;
        }
        state.leaving = state.live.replace(slot);
        state.leaving.as_ref().filter(|_| !renewal).map(|leaving| Arc::clone(&leaving.table))
    }

    fn run_resume_hooks(&self) -> TransitionPhase {
        self.each_target(|target| target.resume());
        TransitionPhase::Resume
    }

    fn go(&mut self, cores: &dyn CoreCommandSender) -> TransitionPhase {
        let generation = {
            let mut state = self.device.state();
            state.suspended = false;
            state.live_generation()
        };
        let ack = self.ack();
        cores.broadcast(self.device.id(), LaneCommand::Resume { generation, ack });
        self.start_tasks(cores);
        TransitionPhase::Resumed
    }

    fn start_tasks(&self, cores: &dyn CoreCommandSender) {
        let live = self.device.live();
        let targets = live.iter().flat_map(|table| table.targets());
        let makes = targets.flat_map(|entry| entry.target.tasks());
        // If a suspend was cancelled before its tasks stopped, the old tasks are dropped here.
        let tasks: Vec<_> = makes.map(|make| cores.start(make)).collect();
        let before = std::mem::replace(&mut self.device.state().tasks, tasks);
        drop(before);
    }

    /// Makes the device free for the next change.
    fn end(&mut self) -> TransitionPhase {
        let leaving = {
            let mut state = self.device.state();
            state.changing = false;
            state.leaving.take()
        };
        if let Some(slot) = leaving {
            self.released(slot.table);
        }
        TransitionPhase::Finished
    }

    /// Releases `table`, unless it is live (a renewal).
    fn released(&mut self, table: Arc<Table>) {
        if !self.device.state().is_renewal(&table) {
            self.released.push(table);
        }
    }

    fn each_target(&self, hook: impl Fn(&dyn Target)) {
        let live = self.device.live();
        for entry in live.iter().flat_map(|table| table.targets()) {
            hook(&*entry.target);
        }
    }
}

impl Drop for DeviceTransition {
    fn drop(&mut self) {
        if self.phase != TransitionPhase::Finished {
            let mut state = self.device.state();
            state.changing = false;
            state.preparing = None;
        }
    }
}
