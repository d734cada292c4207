//! Regions become clean in the background: see the head of the module.

use super::MirrorLog;
use super::writer::{LogWriteEnd, LogWriter};
use crate::clone::engine::{DESTINATION, SOURCE};
use crate::clone::mirror::state::{LOG, MirrorState};
use crate::clone::task::open_all_or_none;
use std::sync::Arc;
use udm_core::{
    Batch, Bio, BioFlags, BioPool, BioTask, BioTaskCx, BioTaskLaneId, Device, DeviceControlError, Nanos, Op,
    OwnWork, Sector, Sectors, Status, WaitQueueSubscription,
};

/// How long a region is not used before it becomes clean, at least.
const PERIOD: Nanos = Nanos::from_millis(1000);

/// The pause while another core writes the log.
const RETRY: Nanos = Nanos::from_millis(5);

/// Maximum numbers of regions of a round, and of words that are examined for them.
const REGIONS_MAX: usize = 8192;
const WORDS_MAX: usize = 1 << 16;

/// What the task waits for.
#[derive(PartialEq, Eq)]
enum CleaningStep {
    /// Nothing: it looks for regions.
    Search,
    /// The flushes of both devices.
    Flush,
    /// The right to write the log.
    Right,
    /// The write of the log.
    Write,
}

/// The task of a table.
pub(in crate::clone::mirror) struct LogTask {
    state: Arc<MirrorState>,
    log: Arc<MirrorLog>,
    devices: Vec<Arc<dyn Device>>,
    lanes: Option<Vec<BioTaskLaneId>>,
    subscription: Option<WaitQueueSubscription>,
    writer: LogWriter,
    pool: BioPool,
    step: CleaningStep,
    /// The regions that are being cleaned.
    regions: Vec<u64>,
    /// The word at which the search goes on, and the time of the next one.
    next: usize,
    search_at: Nanos,
    /// A flush has failed.
    failed: bool,
    flushes: usize,
    in_flight: usize,
    stopping: bool,
    /// No lane can be opened: nothing is done until the next resume.
    broken: bool,
}

/// The cookie of a flush; the writer's requests have 0.
const FLUSH: u64 = 1;

impl LogTask {
    pub(in crate::clone::mirror) fn new(state: &Arc<MirrorState>, log: &Arc<MirrorLog>) -> LogTask {
        LogTask {
            devices: state.raw(),
            state: Arc::clone(state),
            log: Arc::clone(log),
            lanes: None,
            subscription: None,
            writer: LogWriter::new(log),
            pool: BioPool::new(usize::MAX),
            step: CleaningStep::Search,
            regions: Vec::new(),
            next: 0,
            search_at: Nanos(0),
            failed: false,
            flushes: 0,
            in_flight: 0,
            stopping: false,
            broken: false,
        }
    }

    fn open(&mut self, cx: &mut dyn BioTaskCx) -> Result<(), DeviceControlError> {
        if self.lanes.is_some() {
            return Ok(());
        }
        let lanes = open_all_or_none(&self.devices, cx)?;
        self.lanes = Some(lanes);
        self.search_at = cx.now() + PERIOD;
        Ok(())
    }

    fn work(&mut self, cx: &mut dyn BioTaskCx) {
        if self.stopping {
            return self.finish(cx);
        }
        if self.broken {
            return;
        }
        if let Err(error) = self.open(cx) {
            tracing::error!("{}: no region becomes clean in the log: {error}", self.state.copies.name());
            self.broken = true;
            return;
        }
        let subscription = self.subscription.take().unwrap_or_else(|| cx.subscribe(&self.log.task_queue));
        let seen = subscription.epoch();
        let wake = self.clean(cx);
        let is_quiet = subscription.register_wait(seen);
        self.subscription = Some(subscription);
        cx.wake_at(if is_quiet { wake } else { cx.now() });
    }

    /// True if regions may become clean: both devices have the data.
    fn may_clean(&self) -> bool {
        self.log.works() && !self.state.is_degraded()
    }

    /// Does what can be done now. Returns the time of the next attempt.
    fn clean(&mut self, cx: &mut dyn BioTaskCx) -> Nanos {
        let now = cx.now();
        if self.step == CleaningStep::Search {
            let is_complete = self.state.copies.map.is_complete();
            if !self.may_clean() || is_complete && self.log.dirty() == 0 {
                self.search_at = now + PERIOD;
                return Nanos::NEVER;
            }
            if now < self.search_at {
                return self.search_at;
            }
            self.search();
            if self.regions.is_empty() {
                return if self.next == 0 { self.search_at.max(now + PERIOD) } else { now };
            }
            self.begin_flushes(cx);
        }
        if self.step == CleaningStep::Right {
            // After the flushes: a failure since then keeps the regions dirty.
            if self.failed || !self.may_clean() {
                self.cancel();
                self.search_at = now + PERIOD;
                return self.search_at;
            }
            if !self.writer.begin_clean(&self.regions) {
                return now + RETRY;
            }
            self.regions.clear();
            self.step = CleaningStep::Write;
            self.send(cx);
            if self.writer.is_idle() {
                self.end_round(now);
                return self.search_at.max(now);
            }
        }
        Nanos::NEVER
    }

    /// Marks regions as being cleaned: copied, dirty, not used since the last search, and without a
    /// write under way.
    fn search(&mut self) {
        let (map, log) = (&self.state.copies.map, &self.log);
        let words = map.count().div_ceil(64) as usize;
        for _ in 0..WORDS_MAX {
            if self.next == words || self.regions.len() >= REGIONS_MAX {
                break;
            }
            let first = self.next as u64 * 64;
            let (dirty, used) = log.take_used(self.next);
            self.next += 1;
            let mut left = dirty & !used;
            while left != 0 {
                let region = first + u64::from(left.trailing_zeros());
                left &= left - 1;
                if !map.is_hydrated(region) {
                    continue;
                }
                log.begin_cleaning(region);
                let (start, end) = map.sectors_of(region);
                match self.state.locks.is_any_locked(start..end) {
                    true => log.cancel_cleaning(region),
                    false => self.regions.push(region),
                }
            }
        }
        if self.next == words {
            self.next = 0;
        }
    }

    fn begin_flushes(&mut self, cx: &mut dyn BioTaskCx) {
        (self.step, self.failed) = (CleaningStep::Flush, false);
        for device in [SOURCE, DESTINATION] {
            let mut bio = self.pool.get().expect("the pool has no bound");
            (bio.op, bio.flags, bio.cookie) = (Op::Flush, BioFlags::empty(), FLUSH);
            (bio.sector, bio.sectors) = (Sector(0), Sectors::ZERO);
            self.flushes += 1;
            self.submit(device, bio, cx);
        }
    }

    fn submit(&mut self, device: usize, bio: Box<Bio>, cx: &mut dyn BioTaskCx) {
        let Some(lanes) = &self.lanes else { return };
        self.in_flight += 1;
        cx.submit(lanes[device], bio);
    }

    fn send(&mut self, cx: &mut dyn BioTaskCx) {
        let requests: Batch = self.writer.take_requests().collect();
        requests.into_iter().for_each(|bio| self.submit(LOG, bio, cx));
    }

    /// All regions of the round stay dirty.
    fn cancel(&mut self) {
        self.regions.drain(..).for_each(|region| self.log.cancel_cleaning(region));
        self.step = CleaningStep::Search;
    }

    fn end_round(&mut self, now: Nanos) {
        self.step = CleaningStep::Search;
        // The next part of the same search follows at once.
        self.search_at = if self.next == 0 { now + PERIOD } else { now };
    }

    fn take(&mut self, mut bio: Box<Bio>, now: Nanos) {
        if bio.cookie == FLUSH {
            self.flushes -= 1;
            self.failed |= !bio.status.is_ok();
            bio.status = Status::Ok;
            self.pool.put(bio);
            if self.flushes == 0 {
                self.step = CleaningStep::Right;
            }
            return;
        }
        match self.writer.complete(bio) {
            LogWriteEnd::Unfinished => return,
            LogWriteEnd::Done => self.state.copies.wait_queue.wake_up(),
            LogWriteEnd::Failed(status) => self.state.report_log_failure(status),
        }
        self.end_round(now);
    }

    /// Ends the task when nothing is in flight.
    fn finish(&mut self, cx: &mut dyn BioTaskCx) {
        self.subscription = None;
        self.send(cx);
        if self.in_flight == 0 {
            self.cancel();
            self.lanes.take().iter().flatten().for_each(|lane| cx.close(*lane));
        }
    }
}

impl BioTask for LogTask {
    fn turn(&mut self, cx: &mut dyn BioTaskCx) {
        self.work(cx);
    }

    fn complete(&mut self, done: &mut Batch, cx: &mut dyn BioTaskCx) {
        self.in_flight -= done.len();
        let now = cx.now();
        done.drain(..).for_each(|bio| self.take(bio, now));
        self.work(cx);
    }

    fn stop(&mut self, cx: &mut dyn BioTaskCx) {
        self.stopping = true;
        self.work(cx);
    }

    fn is_over(&self) -> bool {
        self.stopping && self.lanes.is_none()
    }

    /// Others may wait for the right to write that a stopped task still has.
    fn own_work(&self) -> OwnWork {
        if self.stopping && self.in_flight > 0 { OwnWork::Required } else { OwnWork::Background }
    }
}

/// A task that is dropped leaves no region marked.
impl Drop for LogTask {
    fn drop(&mut self) {
        self.cancel();
    }
}
