//! A move of this server, and all of them.

use crate::registry::RegisteredDevice;
use crate::state_folder::moves::MoveRecord;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use udm_dm::{MirrorReport, Table};

/// What a move does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MoveState {
    /// The destination cannot be used: the move is tried again.
    Waiting,
    /// Regions are copied, and writes go to both places.
    Copying,
    /// The new place is the disk, and the table is about to be replaced.
    Switching,
    /// The disk is at the new place.
    Done,
    /// A verb has ended it: the disk is at the old place.
    Stopped,
    /// It could not be done: the disk is at the old place.
    Failed,
}

impl MoveState {
    /// The name of the state, for people and for JSON.
    pub(super) const fn text(self) -> &'static str {
        match self {
            MoveState::Waiting => "waiting",
            MoveState::Copying => "copying",
            MoveState::Switching => "switching",
            MoveState::Done => "done",
            MoveState::Stopped => "stopped",
            MoveState::Failed => "failed",
        }
    }

    /// True if nothing follows.
    pub(super) const fn is_over(self) -> bool {
        matches!(self, MoveState::Done | MoveState::Stopped | MoveState::Failed)
    }
}

/// A move of a device of this server.
pub struct MoveJob {
    /// The device, if it still exists.
    pub(super) mapped: Weak<RegisteredDevice>,
    /// Held by each step and each verb of the move.
    pub(super) turn: Mutex<()>,
    /// True if regions are copied only by writes, and no switch begins.
    is_paused: AtomicBool,
    facts: Mutex<MoveFacts>,
}

/// What changes while a job runs.
pub(super) struct MoveFacts {
    pub state: MoveState,
    /// The record as it was written last.
    pub record: MoveRecord,
    /// The word of the place that the disk leaves, and of the one to which it moves.
    pub from: String,
    pub to: String,
    /// Why it waits, or why it failed.
    pub error: Option<String>,
    /// When the mirror was loaded.
    pub began: Instant,
    /// The pause before the destination is tried again.
    pub retry: Duration,
    /// When the destination is tried again.
    pub retry_at: Instant,
}

/// The first pause before a destination is tried again. It doubles up to the second value.
const RETRY: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(5)];

impl MoveJob {
    pub(super) fn new(mapped: &Arc<RegisteredDevice>, record: MoveRecord, state: MoveState) -> Arc<MoveJob> {
        let word = |place: Option<&crate::state_folder::moves::DiskPlace>| {
            place.map(|place| place.word.clone()).unwrap_or_default()
        };
        let (from, to) = (word(Some(&record.current)), word(record.destination.as_ref()));
        let now = Instant::now();
        let facts =
            MoveFacts { state, record, from, to, error: None, began: now, retry: RETRY[0], retry_at: now };
        Arc::new(MoveJob {
            mapped: Arc::downgrade(mapped),
            turn: Mutex::default(),
            is_paused: AtomicBool::new(false),
            facts: Mutex::new(facts),
        })
    }

    /// The facts. Locked only briefly.
    pub(super) fn facts(&self) -> MutexGuard<'_, MoveFacts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The right to a step.
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::Relaxed)
    }

    /// Pauses the copies and the switch, or lets them go on.
    pub(super) fn set_paused(&self, is_paused: bool) {
        self.is_paused.store(is_paused, Ordering::Relaxed);
        if let Some((table, _)) = self.mirror() {
            let mirror = table.targets().first().and_then(|entry| entry.target.as_mirror());
            mirror.inspect(|mirror| mirror.set_paused(is_paused));
        }
    }

    /// True if the job is of this device.
    pub(super) fn is_of(&self, mapped: &Arc<RegisteredDevice>) -> bool {
        std::ptr::eq(self.mapped.as_ptr(), Arc::as_ptr(mapped))
    }

    /// The name of the device now, or when the move began.
    pub fn name(&self) -> String {
        let name = self.mapped.upgrade().map(|mapped| mapped.device.name());
        name.unwrap_or_else(|| self.facts().record.name.clone())
    }

    /// The live table of the device, if it is the mirror of a move, with its report.
    pub(super) fn mirror(&self) -> Option<(Arc<Table>, MirrorReport)> {
        let table = self.mapped.upgrade()?.device.live()?;
        let [entry] = table.targets() else { return None };
        let report = entry.target.as_mirror()?.report();
        Some((table, report))
    }
}

impl MoveFacts {
    /// The destination was tried without success.
    pub(super) fn retry_later(&mut self, error: String) {
        self.retry_at = Instant::now() + self.retry;
        self.retry = (self.retry * 2).min(RETRY[1]);
        self.error = Some(error);
    }

    /// The destination is tried again at once.
    pub(super) fn retry_now(&mut self) {
        (self.retry, self.retry_at) = (RETRY[0], Instant::now());
    }

    /// The destination works.
    pub(super) fn reset_retry(&mut self) {
        (self.retry, self.error) = (RETRY[0], None);
    }
}

/// What the task of a job does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MovePoll {
    /// Nothing before this time has passed.
    Wait(Duration),
    /// Call [`run_move_step`](super::run_move_step).
    Step,
    /// The move is over.
    Over,
}

/// The moves of a server.
#[derive(Default)]
pub(crate) struct MoveJobs {
    jobs: Mutex<Vec<Arc<MoveJob>>>,
    /// Held while a move begins, so that none begins twice.
    starting: Mutex<()>,
    waiting: Mutex<VecDeque<Arc<MoveJob>>>,
    arrived: Notify,
}

impl MoveJobs {
    fn jobs(&self) -> MutexGuard<'_, Vec<Arc<MoveJob>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The right to begin a move.
    pub(super) fn lock_start(&self) -> MutexGuard<'_, ()> {
        self.starting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a job. It replaces an earlier one of the same device, and those of removed devices.
    pub(super) fn add(&self, job: &Arc<MoveJob>) {
        let mut jobs = self.jobs();
        jobs.retain(|one| one.mapped.strong_count() > 0 && !one.mapped.ptr_eq(&job.mapped));
        jobs.push(Arc::clone(job));
        drop(jobs);
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).push_back(Arc::clone(job));
        self.arrived.notify_one();
    }

    /// The last job of a device.
    pub(super) fn of(&self, mapped: &Arc<RegisteredDevice>) -> Option<Arc<MoveJob>> {
        self.jobs().iter().find(|job| job.is_of(mapped)).cloned()
    }

    /// All jobs of devices that still exist.
    pub(super) fn all(&self) -> Vec<Arc<MoveJob>> {
        self.jobs().iter().filter(|job| job.mapped.strong_count() > 0).cloned().collect()
    }

    /// Waits for the next job. Only one task may call this.
    pub async fn next(&self) -> Arc<MoveJob> {
        loop {
            let next = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            match next {
                Some(job) => return job,
                None => self.arrived.notified().await,
            }
        }
    }
}
