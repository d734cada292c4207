//! Hydration in the background, and commits at intervals.

use super::engine::HydrationEngine;
use super::regions::RegionClaim;
use super::settings::HydrationSettings;
use super::state::{CloneState, MetadataMode};
use std::sync::Arc;
use udm_core::{
    Batch, BioTask, BioTaskCx, BioTaskLaneId, Device, DeviceControlError, Nanos, OwnWork,
    WaitQueueSubscription,
};

/// Interval of commits after requests of clients (kernel `COMMIT_PERIOD`), and the pause after a
/// copy that failed.
const COMMIT_PERIOD: Nanos = Nanos::from_millis(1000);

/// Interval of commits while clients send nothing and regions are copied. A commit flushes the
/// destination, which for a file writes all of the page cache to the disk, so commits each second
/// would halve the rate of copies. A crash loses no data of clients then: regions are copied again.
const QUIET_COMMIT_PERIOD: Nanos = Nanos::from_millis(10_000);

/// Commits may take one part in so many of the time of the copies.
const QUIET_COMMIT_SHARE: u64 = 10;

/// While clients have requests in flight, one batch is started per interval. It is also the
/// interval of attempts while others hydrate all that is left.
const BUSY_PERIOD: Nanos = Nanos::from_millis(10);

/// Maximum number of regions that need no copy in a turn.
const SKIPPED_MAX: usize = 4096;

/// Maximum number of claimed regions that are passed over in a turn.
const BUSY_REGIONS_MAX: usize = 1024;

/// The task of a table.
pub(super) struct HydrationTask {
    /// The devices, in the order of the engine's numbers.
    devices: Vec<Arc<dyn Device>>,
    state: Arc<CloneState>,
    settings: Arc<HydrationSettings>,
    engine: HydrationEngine,
    /// The lanes of the devices; `None` before the first turn.
    lanes: Option<Vec<BioTaskLaneId>>,
    subscription: Option<WaitQueueSubscription>,
    /// The run of the regions that come first ([`HydrationSettings::first`]) at which the search
    /// for the next one begins.
    next_run: usize,
    /// The region at which the search among all others begins.
    next: u64,
    /// No batch is started before this time.
    pause_until: Nanos,
    commit_at: Nanos,
    /// When the last commit of this task began, and whether it is still running.
    commit_began: Nanos,
    is_committing: bool,
    /// The next commit, if clients send nothing.
    quiet_commit_at: Nanos,
    /// What [`CloneState::client_batches`] was when the last commit began.
    batches: usize,
    in_flight: usize,
    stopping: bool,
    /// No lane can be opened: nothing is done until the next resume.
    failed: bool,
}

/// The result of an attempt to start a batch.
#[derive(PartialEq, Eq)]
enum BatchStart {
    Started,
    /// Enough is in flight, or the device is being suspended.
    NotNow,
    /// All regions that are not hydrated are claimed.
    Nothing,
    /// Only regions were hydrated that need no copy. More may follow.
    Skipped,
}

/// Opens a lane of each device. On an error, those that were opened are closed.
///
/// # Errors
/// The first device that cannot be opened on this core.
pub(super) fn open_all_or_none(
    devices: &[Arc<dyn Device>],
    cx: &mut dyn BioTaskCx,
) -> Result<Vec<BioTaskLaneId>, DeviceControlError> {
    let mut lanes = Vec::with_capacity(devices.len());
    for device in devices {
        match cx.open(device) {
            Ok(lane) => lanes.push(lane),
            Err(error) => {
                lanes.iter().for_each(|lane| cx.close(*lane));
                return Err(error);
            }
        }
    }
    Ok(lanes)
}

impl HydrationTask {
    pub(super) fn new(
        devices: Vec<Arc<dyn Device>>,
        engine: HydrationEngine,
        state: Arc<CloneState>,
        settings: Arc<HydrationSettings>,
    ) -> HydrationTask {
        HydrationTask {
            devices,
            state,
            settings,
            engine,
            lanes: None,
            subscription: None,
            next_run: 0,
            next: 0,
            pause_until: Nanos(0),
            commit_at: Nanos(0),
            commit_began: Nanos(0),
            is_committing: false,
            quiet_commit_at: Nanos(0),
            batches: 0,
            in_flight: 0,
            stopping: false,
            failed: false,
        }
    }

    fn open(&mut self, cx: &mut dyn BioTaskCx) -> Result<(), DeviceControlError> {
        if self.lanes.is_some() {
            return Ok(());
        }
        let lanes = open_all_or_none(&self.devices, cx)?;
        self.commit_at = cx.now() + COMMIT_PERIOD;
        self.quiet_commit_at = cx.now() + QUIET_COMMIT_PERIOD;
        self.batches = self.state.client_batches();
        self.lanes = Some(lanes);
        Ok(())
    }

    /// Does what can be done now, and asks for the next turn.
    fn work(&mut self, cx: &mut dyn BioTaskCx) {
        if !self.engine.take_failed().is_empty() {
            self.pause_until = cx.now() + COMMIT_PERIOD;
            self.next_run = 0;
        }
        self.engine.wake_waiters();
        if self.stopping {
            return self.finish(cx);
        }
        if self.failed {
            return;
        }
        if let Err(error) = self.open(cx) {
            tracing::error!("{}: no hydration in the background: {error}", self.state.name());
            self.failed = true;
            return;
        }
        let subscription = self.subscription.take().unwrap_or_else(|| cx.subscribe(&self.state.task_queue));
        let seen = subscription.epoch();
        let wake = self.commit(cx.now()).min(self.hydrate(cx.now()));
        self.send(cx);
        let is_quiet = subscription.register_wait(seen);
        self.subscription = Some(subscription);
        cx.wake_at(if is_quiet { wake } else { cx.now() });
    }

    /// Commits if it is time. Returns the time of the next attempt.
    fn commit(&mut self, now: Nanos) -> Nanos {
        if self.is_committing && !self.engine.is_committing() {
            self.is_committing = false;
            let pause = Nanos((now.0 - self.commit_began.0) * QUIET_COMMIT_SHARE);
            self.quiet_commit_at = now + pause.max(QUIET_COMMIT_PERIOD);
        }
        if !self.state.needs_commit() {
            self.commit_at = now + COMMIT_PERIOD;
            return Nanos::NEVER;
        }
        let is_complete = self.state.map.is_complete();
        if now < self.commit_at && !is_complete {
            return self.commit_at;
        }
        self.commit_at = now + COMMIT_PERIOD;
        let batches = self.state.client_batches();
        let copies = self.settings.values().enabled && !is_complete;
        if copies && batches == self.batches && now < self.quiet_commit_at {
            return self.commit_at;
        }
        self.batches = batches;
        self.engine.begin_commit();
        if self.engine.is_committing() && !std::mem::replace(&mut self.is_committing, true) {
            self.commit_began = now;
        }
        self.commit_at
    }

    /// Starts batches. Returns the time of the next attempt.
    fn hydrate(&mut self, now: Nanos) -> Nanos {
        let values = self.settings.values();
        let is_stopped = !values.enabled || values.threshold == 0 || self.state.is_suspending();
        if is_stopped || self.state.mode() != MetadataMode::ReadWrite || self.state.map.is_complete() {
            self.engine.release_memory();
            return Nanos::NEVER;
        }
        if now < self.pause_until {
            return self.pause_until;
        }
        let is_busy = self.state.is_busy();
        loop {
            // Clients wait for the regions that come first, so these do not wait for clients.
            if is_busy && !self.has_first_regions() {
                self.start_batch();
                self.pause_until = now + BUSY_PERIOD;
                return self.pause_until;
            }
            match self.start_batch() {
                BatchStart::Started => {}
                BatchStart::Skipped => return now,
                // A completion of this task causes the next turn, a completion of a lane does not.
                BatchStart::NotNow | BatchStart::Nothing => return now + BUSY_PERIOD,
            }
        }
    }

    /// Starts the copy of the next adjacent regions. Those before that need no copy are hydrated at
    /// once, up to [`SKIPPED_MAX`] of them.
    fn start_batch(&mut self) -> BatchStart {
        for _ in 0..SKIPPED_MAX {
            match self.start_or_skip() {
                BatchStart::Skipped => {}
                other => return other,
            }
        }
        BatchStart::Skipped
    }

    /// Starts the copy of the next adjacent regions, or hydrates one that needs no copy.
    fn start_or_skip(&mut self) -> BatchStart {
        let values = self.settings.values();
        let room = u64::from(values.threshold).saturating_sub(self.state.hydrating());
        let most = u64::from(values.batch.max(1)).min(room);
        if most == 0 || !self.state.begin_in_background(1) {
            return BatchStart::NotNow;
        }
        let Some((first, end)) = self.claim_first().or_else(|| self.claim_next()) else {
            self.state.give_up_in_background(1);
            return BatchStart::Nothing;
        };
        let zero_regions = &self.state.zero_regions;
        if zero_regions.contains(first) {
            self.engine.end_claim(first, true);
            return BatchStart::Skipped;
        }
        let mut count = 1;
        while count < most
            && first + count < end
            && !zero_regions.contains(first + count)
            && self.state.claim(first + count) == RegionClaim::Claimed
        {
            count += 1;
        }
        // The first region is counted, so a suspend waits for all of them.
        self.state.add_hydrating(count - 1);
        self.engine.copy(first, count);
        BatchStart::Started
    }

    /// True if regions that come first may be left.
    fn has_first_regions(&self) -> bool {
        self.next_run < self.settings.first.runs.len()
    }

    /// Claims the next of the regions that come first. Returns it, and the end of its run.
    fn claim_first(&mut self) -> Option<(u64, u64)> {
        let map = &self.state.map;
        while let Some(&(first, count)) = self.settings.first.runs.get(self.next_run) {
            let mut at = first;
            while let Some(region) = map.next_unhydrated(at, first + count) {
                if self.state.claim(region) == RegionClaim::Claimed {
                    return Some((region, first + count));
                }
                at = region + 1;
            }
            self.next_run += 1;
        }
        None
    }

    /// Claims the next of all regions. Returns it, and the end of the map.
    fn claim_next(&mut self) -> Option<(u64, u64)> {
        let map = &self.state.map;
        for _ in 0..BUSY_REGIONS_MAX {
            let Some(region) = map.next_unhydrated(self.next, map.count()) else {
                if self.next == 0 {
                    return None;
                }
                self.next = 0;
                continue;
            };
            self.next = region + 1;
            if self.state.claim(region) == RegionClaim::Claimed {
                return Some((region, map.count()));
            }
        }
        None
    }

    fn send(&mut self, cx: &mut dyn BioTaskCx) {
        let Some(lanes) = &self.lanes else { return };
        for (device, bio) in self.engine.take_requests() {
            self.in_flight += 1;
            cx.submit(lanes[device], bio);
        }
    }

    /// Ends the task when nothing is in flight.
    fn finish(&mut self, cx: &mut dyn BioTaskCx) {
        self.subscription = None;
        self.send(cx);
        if self.in_flight == 0 {
            self.lanes.take().iter().flatten().for_each(|lane| cx.close(*lane));
        }
    }
}

impl BioTask for HydrationTask {
    fn turn(&mut self, cx: &mut dyn BioTaskCx) {
        self.work(cx);
    }

    fn complete(&mut self, done: &mut Batch, cx: &mut dyn BioTaskCx) {
        self.in_flight -= done.len();
        done.drain(..).for_each(|bio| self.engine.complete(bio));
        self.work(cx);
    }

    fn stop(&mut self, cx: &mut dyn BioTaskCx) {
        self.stopping = true;
        self.work(cx);
    }

    fn is_over(&self) -> bool {
        self.stopping && self.lanes.is_none()
    }

    /// The lanes of the device wait for the copies of the task (`CloneState::has_unfinished_work`).
    /// At the end of a core there may be none, so the core waits for what a stopped task has in
    /// flight.
    fn own_work(&self) -> OwnWork {
        if self.stopping && self.in_flight > 0 { OwnWork::Required } else { OwnWork::Background }
    }
}
