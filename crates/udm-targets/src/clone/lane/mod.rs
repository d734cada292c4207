//! The data path of a clone.
//!
//! Requests of hydrated regions go to the destination, and reads of others to the source, without
//! any record of them (`route`). The table splits reads and writes at the borders of regions.

mod route;

use crate::clone::engine::{CopyMemory, DESTINATION, HydrationEngine, SOURCE};
use crate::clone::regions::RegionClaim;
use crate::clone::state::{CloneState, LaneActivity, MetadataMode, lane_activity};
use crate::clone::target::CloneDevices;
use crate::snapshot::redirected_bios::RedirectedBios;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use udm_core::{
    Batch, Bio, BioFlags, BioOwnerId, Cx, DeviceControlError, DrainMode, Lane, Op, OwnWork, Sector, Sectors,
    Status, WaitQueueSubscription, WakeEpoch,
};
use udm_dm::WholeDeviceLane;
use udm_dm::child_lanes::ChildLanes;

/// Maximum rounds per poll in which a lane polls again for requests that it just sent.
const ROUNDS_MAX: usize = 8;

/// Maximum number of regions that a discard marks in a turn.
const DISCARD_REGIONS_MAX: usize = 4096;

/// A flush or FUA.
const DURABLE: BioFlags = BioFlags::FUA.union(BioFlags::PREFLUSH);

/// The kind of a tracked request in flight to the destination.
enum TrackedBioKind {
    /// A write of a whole region that is not hydrated.
    Overwrite { region: u64 },
    /// A discard that was cut to whole regions; its length.
    Discard { sectors: Sectors },
}

/// What follows the commit that a request waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AfterCommit {
    /// The request is sent to the destination.
    Send,
    /// The request is done.
    End,
}

/// A request that waits until the metadata has some changes.
struct CommitWaiter {
    bio: Box<Bio>,
    changes: u64,
    then: AfterCommit,
}

/// The lane of a clone.
pub(super) struct CloneLane {
    state: Arc<CloneState>,
    engine: HydrationEngine,
    children: ChildLanes<WholeDeviceLane>,
    owner: BioOwnerId,
    /// Discards are passed down.
    passdown: Arc<AtomicBool>,
    tracked: RedirectedBios<TrackedBioKind>,
    subscription: WaitQueueSubscription,
    seen: WakeEpoch,
    /// Requests for regions that are being hydrated, here or on other cores.
    waiting: VecDeque<Box<Bio>>,
    commit_waiters: VecDeque<CommitWaiter>,
    /// Bios completed here, for the next poll.
    ended: Batch,
    /// Bios of a batch that need more than a device; empty outside of a `submit`.
    special: Batch,
    /// The engine's requests that a child handed back.
    again: Vec<(usize, Box<Bio>)>,
    /// Client requests in this lane, and the number that the task sees.
    clients: usize,
    activity: LaneActivity,
    /// Number of batches of clients, which wraps.
    batches: usize,
    /// Something has happened in this lane since the waiting requests were examined.
    progress: bool,
    /// The program ends.
    ending: bool,
}

impl CloneLane {
    /// A lane for a table with these devices.
    ///
    /// # Errors
    /// If a device cannot be opened on this core.
    pub(super) fn open(
        devices: &CloneDevices,
        state: &Arc<CloneState>,
        passdown: Arc<AtomicBool>,
        cx: &mut Cx<'_>,
    ) -> Result<CloneLane, DeviceControlError> {
        let children = ChildLanes::new(devices.open(cx)?);
        let subscription = state.wait_queue.subscribe(cx);
        Ok(CloneLane {
            engine: devices.engine(state, CopyMemory::OF_LANE),
            children,
            owner: cx.new_owner(),
            passdown,
            tracked: RedirectedBios::new(cx.new_owner()),
            seen: subscription.epoch(),
            subscription,
            waiting: VecDeque::new(),
            commit_waiters: VecDeque::new(),
            ended: Batch::new(),
            special: Batch::new(),
            again: Vec::new(),
            clients: 0,
            batches: 0,
            activity: state.add_lane(),
            progress: false,
            ending: false,
            state: Arc::clone(state),
        })
    }

    fn end(&mut self, mut bio: Box<Bio>, status: Status) {
        bio.end_with(status);
        self.ended.push(bio);
    }

    /// Shows the number of client requests to the task, as long as it may hydrate.
    #[inline(always)]
    fn publish_activity(&self) {
        if !self.state.map.is_complete() {
            // Relaxed: no other data depends on the number.
            self.activity.store(lane_activity(self.clients, self.batches), Ordering::Relaxed);
        }
    }

    /// Sends `bio` to a device, or queues it.
    fn take(&mut self, bio: Box<Bio>) {
        if self.state.mode() == MetadataMode::Fail {
            return self.end(bio, Status::IoErr);
        }
        match bio.op {
            Op::Flush => self.send_durable(bio),
            Op::Discard => self.discard(bio),
            Op::WriteZeroes => self.end(bio, Status::NotSupp),
            Op::Read => {
                let is_hydrated = self.state.map.is_hydrated(self.state.map.region_of(bio.sector.0));
                self.children.push(if is_hydrated { DESTINATION } else { SOURCE }, bio);
            }
            Op::Write => self.write(bio),
        }
    }

    fn write(&mut self, bio: Box<Bio>) {
        let map = &self.state.map;
        let region = map.region_of(bio.sector.0);
        if map.is_hydrated(region) {
            return match bio.flags.intersects(DURABLE) {
                true => self.send_durable(bio),
                false => self.children.push(DESTINATION, bio),
            };
        }
        // As in the kernel: a hydration could not be recorded.
        if self.state.mode() != MetadataMode::ReadWrite {
            return self.end(bio, Status::IoErr);
        }
        match self.state.claim(region) {
            RegionClaim::Hydrated => self.write(bio),
            RegionClaim::Busy => self.waiting.push_back(bio),
            RegionClaim::Claimed => {
                self.state.add_hydrating(1);
                if map.is_covered_by(&bio) {
                    let sector = bio.sector;
                    self.send_tracked(bio, sector, TrackedBioKind::Overwrite { region });
                } else if self.state.zero_regions.contains(region) {
                    self.engine.end_claim(region, true);
                    self.write(bio);
                } else {
                    self.state.first_reads.record(region);
                    self.engine.copy(region, 1);
                    self.waiting.push_back(bio);
                }
            }
        }
    }

    fn send_tracked(&mut self, mut bio: Box<Bio>, sector: Sector, kind: TrackedBioKind) {
        self.tracked.put(&mut bio, sector, kind);
        self.children.push(DESTINATION, bio);
    }

    /// Sends a flush, or a FUA write of a hydrated region. If the metadata lacks changes, they are
    /// committed first (kernel).
    fn send_durable(&mut self, bio: Box<Bio>) {
        let changes = self.state.changes();
        if self.state.is_committed(changes) {
            return self.children.push(DESTINATION, bio);
        }
        self.wait_for_commit(bio, changes, AfterCommit::Send);
    }

    fn wait_for_commit(&mut self, bio: Box<Bio>, changes: u64, then: AfterCommit) {
        if self.state.mode() != MetadataMode::ReadWrite && !self.state.is_committed(changes) {
            return self.end(bio, Status::IoErr);
        }
        self.commit_waiters.push_back(CommitWaiter { bio, changes, then });
        self.progress = true;
    }

    /// Hydrates the regions that a discard covers wholly, and passes this part of it down.
    fn discard(&mut self, mut bio: Box<Bio>) {
        let map = &self.state.map;
        let (first, end) = map.covered_by(&bio);
        if first == end {
            return self.end(bio, Status::Ok);
        }
        let mut at = first;
        for marked in 0.. {
            let Some(region) = map.next_unhydrated(at, end) else { break };
            if self.state.mode() != MetadataMode::ReadWrite {
                // As in the kernel: a discard may be ignored.
                return self.end(bio, Status::Ok);
            }
            if marked == DISCARD_REGIONS_MAX {
                self.progress = true;
                return self.waiting.push_back(bio);
            }
            match self.state.claim(region) {
                RegionClaim::Busy => return self.waiting.push_back(bio),
                RegionClaim::Claimed => {
                    self.state.add_hydrating(1);
                    self.engine.end_claim(region, true);
                }
                RegionClaim::Hydrated => {}
            }
            at = region + 1;
        }
        if !self.passdown.load(Ordering::Relaxed) {
            return self.end(bio, Status::Ok);
        }
        let ((start, _), (_, until)) = (map.sectors_of(first), map.sectors_of(end - 1));
        let sectors = std::mem::replace(&mut bio.sectors, Sectors(until - start));
        self.send_tracked(bio, Sector(start), TrackedBioKind::Discard { sectors });
    }

    fn waits(&self) -> bool {
        !self.waiting.is_empty() || !self.commit_waiters.is_empty()
    }

    /// True if a suspend or the end of the program must wait for work that this lane has to do or
    /// to see done.
    fn waits_for_end(&self) -> bool {
        (self.ending || self.state.is_suspending()) && self.state.has_unfinished_work()
    }

    /// Fails the writes that wait for copies of this lane that failed.
    fn fail_waiting(&mut self) {
        for (first, count) in self.engine.take_failed() {
            for _ in 0..self.waiting.len() {
                let Some(bio) = self.waiting.pop_front() else { break };
                let region = self.state.map.region_of(bio.sector.0);
                match bio.op == Op::Write && (first..first + count).contains(&region) {
                    true => self.end(bio, Status::IoErr),
                    false => self.waiting.push_back(bio),
                }
            }
        }
    }

    /// Examines the waiting requests if something has happened.
    fn look(&mut self) {
        let now = self.subscription.epoch();
        let woken = std::mem::replace(&mut self.seen, now) != now;
        if !std::mem::take(&mut self.progress) && !woken {
            return;
        }
        self.fail_waiting();
        for _ in 0..self.waiting.len() {
            let Some(bio) = self.waiting.pop_front() else { break };
            self.take(bio);
        }
        self.look_at_commits();
    }

    fn look_at_commits(&mut self) {
        for _ in 0..self.commit_waiters.len() {
            let Some(CommitWaiter { bio, changes, then }) = self.commit_waiters.pop_front() else { break };
            match (self.state.is_committed(changes), then) {
                (true, AfterCommit::Send) => self.children.push(DESTINATION, bio),
                (true, AfterCommit::End) => self.end(bio, Status::Ok),
                _ if self.state.mode() != MetadataMode::ReadWrite => self.end(bio, Status::IoErr),
                _ => self.commit_waiters.push_back(CommitWaiter { bio, changes, then }),
            }
        }
    }

    /// The last step after all bios of a turn. Returns true if requests were sent.
    fn finish_turn(&mut self, cx: &mut Cx<'_>) -> bool {
        self.look();
        if !self.commit_waiters.is_empty() || self.waits_for_end() {
            self.engine.begin_commit();
        }
        for (child, mut bio) in self.engine.take_requests() {
            bio.owner = self.owner;
            bio.start();
            self.children.push(child, bio);
        }
        self.engine.wake_waiters();
        let sent = self.children.send(cx);
        if sent || !self.ended.is_empty() || self.progress {
            cx.wake_now();
        }
        if self.waits() || self.waits_for_end() {
            self.subscription.wait(self.seen, cx);
        }
        sent
    }

    /// Takes the requests of the engine, and restores tracked requests.
    fn came_back(&mut self, done: &mut Batch, from: usize) -> bool {
        let mut at = from;
        let mut any = false;
        while at < done.len() {
            if done[at].owner == self.owner {
                let mut bio = done.swap_remove(at);
                bio.finish();
                self.engine.complete(bio);
                any = true;
                continue;
            }
            match self.tracked.take(&mut done[at]) {
                Some(TrackedBioKind::Discard { sectors }) => done[at].sectors = sectors,
                Some(TrackedBioKind::Overwrite { region }) => {
                    any = true;
                    if self.overwritten(region, &mut done[at]) {
                        let bio = done.swap_remove(at);
                        self.wait_for_commit(bio, self.state.changes(), AfterCommit::End);
                        continue;
                    }
                }
                None => {}
            }
            at += 1;
        }
        self.progress |= any;
        any
    }

    /// A write of a whole region completed. Returns true if it must wait for a commit.
    fn overwritten(&mut self, region: u64, bio: &mut Bio) -> bool {
        let sets = bio.status.is_ok() && self.state.mode() == MetadataMode::ReadWrite;
        if !sets {
            self.state.zero_regions.remove(region);
            self.state.destination_holes.forget();
        }
        self.engine.end_claim(region, sets);
        if bio.status.is_ok() && !sets {
            // The region is still read from the source.
            bio.end_with(Status::IoErr);
        }
        sets && bio.flags.intersects(DURABLE)
    }

    #[inline(never)]
    fn poll_all(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        for (child, bio) in self.again.drain(..) {
            self.children.push(child, bio);
        }
        for _ in 0..ROUNDS_MAX {
            let start = done.len();
            let mut round = self.children.poll();
            while self.children.poll_next(&mut round, done, cx).is_some() {}
            self.children.poll_idle(&round, done, cx);
            let any = self.came_back(done, start);
            if !(self.finish_turn(cx) && any) {
                break;
            }
        }
        done.append(&mut self.ended);
    }

    /// True if nothing but requests without a record is in this lane.
    #[inline(always)]
    fn is_calm(&self) -> bool {
        self.engine.is_idle()
            && self.tracked.is_empty()
            && self.ended.is_empty()
            && !self.waits()
            && !self.waits_for_end()
    }
}

impl Lane for CloneLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.clients += batch.len();
        self.batches = self.batches.wrapping_add(1);
        self.publish_activity();
        match self.device_of_all(batch) {
            Some(device) => {
                if device == SOURCE {
                    self.record_source_reads(batch);
                }
                // The limits of the clone are those of both devices, so the table above has checked
                // the bios.
                self.children.submit_by(device, batch, |lane, batch| lane.submit_checked(batch, cx));
            }
            None => self.submit_each(batch, cx),
        }
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let from = done.len();
        let polled = self.is_calm() && self.children.poll_busy(done, cx).is_some();
        if !polled {
            self.poll_all(done, cx);
        }
        if done.len() > from {
            self.clients -= done.len() - from;
            self.publish_activity();
        }
    }

    fn drain(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        let start = back.len();
        self.ending |= how == DrainMode::End;
        // The lane is quiesced when all of the engine's own requests have completed. If a child
        // handed such a request back in each round, it might never complete.
        if how != DrainMode::NoFlush || !self.engine.has_requests() {
            for child in 0..self.children.len() {
                let mut at = self.children.drain(child, how, back, cx);
                while at < back.len() {
                    if back[at].owner == self.owner {
                        self.again.push((child, back.swap_remove(at)));
                        continue;
                    }
                    match self.tracked.take(&mut back[at]) {
                        Some(TrackedBioKind::Discard { sectors }) => back[at].sectors = sectors,
                        Some(TrackedBioKind::Overwrite { region }) => self.engine.end_claim(region, false),
                        None => {}
                    }
                    at += 1;
                }
            }
            self.engine.wake_waiters();
        }
        if how == DrainMode::NoFlush {
            back.extend(self.waiting.drain(..));
        }
        self.clients -= back.len() - start;
    }

    fn own_work(&self) -> OwnWork {
        let required = !self.engine.is_idle() || self.waits_for_end();
        if required { OwnWork::Required } else { self.children.own_work() }
    }
}
