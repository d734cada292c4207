//! The data path of a mirror.
//!
//! Reads go to the source, without any record of them. A write of copied regions goes to the source
//! and then to the destination, as one request. The table splits reads and writes at the borders of
//! regions.

use super::state::MirrorState;
use crate::clone::engine::{CopyMemory, DESTINATION, HydrationEngine, SOURCE};
use crate::clone::regions::RegionClaim;
use crate::clone::state::{CloneState, CopyFailure, LaneActivity};
use crate::snapshot::redirected_bios::RedirectedBios;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use udm_core::{
    Batch, Bio, BioOwnerId, Buf, Cx, DeviceControlError, DrainMode, Lane, Op, OwnWork, Segments, Status,
    WaitQueueSubscription, WakeEpoch,
};
use udm_dm::child_lanes::ChildLanes;

/// Maximum rounds per poll in which a lane polls again for requests that it just sent.
const ROUNDS_MAX: usize = 8;

/// Where a tracked request is, and what follows.
#[derive(Clone, Copy)]
enum MirrorStep {
    /// On the source; the destination is next.
    Source,
    /// On the destination.
    Destination,
    /// On the destination as a write of zeroes, because it has no request for them.
    ZeroFill,
    /// A write of a whole region that is not copied and is claimed: on the source.
    OverwriteSource { region: u64 },
    /// The same on the destination.
    OverwriteDestination { region: u64 },
    /// A write with the claims of those of its regions that are not copied: on the source.
    ClaimedSource,
    /// The same on the destination.
    ClaimedDestination,
}

/// A write that waits for the copies of its regions.
struct WaitingWrite {
    bio: Box<Bio>,
    /// A copy failed: the write goes to the source alone.
    alone: bool,
}

/// The lane of a mirror.
pub(super) struct MirrorLane {
    state: Arc<MirrorState>,
    engine: HydrationEngine,
    children: ChildLanes,
    owner: BioOwnerId,
    tracked: RedirectedBios<MirrorStep>,
    subscription: WaitQueueSubscription,
    seen: WakeEpoch,
    waiting: VecDeque<WaitingWrite>,
    /// The engine's requests that a child handed back.
    again: Vec<(usize, Box<Bio>)>,
    /// Client requests in this lane, and the number that the task sees.
    clients: usize,
    activity: LaneActivity,
    /// Locks were released, so others must be woken.
    wake_due: bool,
    /// Something has happened in this lane since the waiting requests were examined.
    progress: bool,
    /// The program ends.
    ending: bool,
}

impl MirrorLane {
    /// A lane for a table.
    ///
    /// # Errors
    /// If a device cannot be opened on this core.
    pub(super) fn open(state: &Arc<MirrorState>, cx: &mut Cx<'_>) -> Result<MirrorLane, DeviceControlError> {
        let children = ChildLanes::new(state.open(cx)?);
        let subscription = state.copies.wait_queue.subscribe(cx);
        Ok(MirrorLane {
            engine: state.engine(CopyMemory::OF_LANE),
            children,
            owner: cx.new_owner(),
            tracked: RedirectedBios::new(cx.new_owner()),
            seen: subscription.epoch(),
            subscription,
            waiting: VecDeque::new(),
            again: Vec::new(),
            clients: 0,
            activity: state.copies.add_lane(),
            wake_due: false,
            progress: false,
            ending: false,
            state: Arc::clone(state),
        })
    }

    fn copies(&self) -> &CloneState {
        &self.state.copies
    }

    /// Shows the number of client requests to the task, as long as it may copy.
    #[inline(always)]
    fn publish_activity(&self) {
        if !self.copies().map.is_complete() {
            // Relaxed: no other data depends on the number.
            self.activity.store(self.clients, Ordering::Relaxed);
        }
    }

    /// True if a whole batch goes to the source without a record.
    #[inline(always)]
    fn is_for_source(&self, batch: &[Box<Bio>]) -> bool {
        batch.iter().all(|bio| bio.op == Op::Read)
    }

    fn send(&mut self, mut bio: Box<Bio>, step: MirrorStep) {
        let child = match step {
            MirrorStep::Source | MirrorStep::OverwriteSource { .. } | MirrorStep::ClaimedSource => SOURCE,
            MirrorStep::Destination
            | MirrorStep::ZeroFill
            | MirrorStep::OverwriteDestination { .. }
            | MirrorStep::ClaimedDestination => DESTINATION,
        };
        let sector = bio.sector;
        self.tracked.put(&mut bio, sector, step);
        self.children.push(child, bio);
    }

    /// The regions that a write touches.
    fn regions_of(&self, bio: &Bio) -> Range<u64> {
        let map = &self.copies().map;
        map.region_of(bio.sector.0)..map.region_of(bio.end().0 - 1) + 1
    }

    /// Sends `bio` to a device, or queues it.
    fn take(&mut self, bio: Box<Bio>, alone: bool) {
        match bio.op {
            Op::Read => self.children.push(SOURCE, bio),
            _ if self.state.is_degraded() => self.children.push(SOURCE, bio),
            Op::Flush => self.send(bio, MirrorStep::Source),
            // What a discard leaves is not defined, so it needs no copy.
            Op::Discard => self.send_locked(bio, MirrorStep::Source),
            Op::Write | Op::WriteZeroes if alone => self.write_alone(bio),
            Op::Write | Op::WriteZeroes => self.write(bio),
        }
    }

    /// Copies the regions of a write that are not copied, or sends the write to both devices.
    fn write(&mut self, bio: Box<Bio>) {
        let regions = self.regions_of(&bio);
        let mut waits = false;
        for region in regions.clone() {
            match self.copies().claim(region) {
                RegionClaim::Hydrated => {}
                RegionClaim::Busy => waits = true,
                RegionClaim::Claimed => {
                    self.copies().add_hydrating(1);
                    if bio.op == Op::Write && self.copies().map.is_covered_by(&bio) {
                        return self.overwrite(bio, region);
                    }
                    self.engine.copy(region, 1);
                    waits = true;
                }
            }
        }
        match waits {
            true => self.waiting.push_back(WaitingWrite { bio, alone: false }),
            false => self.send_locked(bio, MirrorStep::Source),
        }
    }

    /// Sends a write of a whole region, which the caller has claimed.
    fn overwrite(&mut self, bio: Box<Bio>, region: u64) {
        if self.state.locks.lock(&bio) {
            return self.send(bio, MirrorStep::OverwriteSource { region });
        }
        // A discard is under way, which needs no claim.
        self.engine.end_claim(region, false);
        self.waiting.push_back(WaitingWrite { bio, alone: false });
    }

    /// Sends a request with the locks of its blocks, or lets it wait for them.
    fn send_locked(&mut self, bio: Box<Bio>, step: MirrorStep) {
        match self.state.locks.lock(&bio) {
            true => self.send(bio, step),
            false => self.waiting.push_back(WaitingWrite { bio, alone: false }),
        }
    }

    /// Ends the locks of a request that is done.
    fn unlock(&mut self, bio: &Bio) {
        if bio.op != Op::Flush {
            self.state.locks.unlock(bio);
            self.wake_due = true;
        }
    }

    /// Sends a write whose regions could not be copied: to the source, with the claims of these
    /// regions, so that no copy reads them meanwhile. Regions that are copied get it on the
    /// destination too.
    fn write_alone(&mut self, bio: Box<Bio>) {
        if !self.state.locks.lock(&bio) {
            return self.waiting.push_back(WaitingWrite { bio, alone: true });
        }
        let regions = self.regions_of(&bio);
        for region in regions.clone() {
            match self.copies().claim(region) {
                RegionClaim::Hydrated => {}
                RegionClaim::Claimed => self.copies().add_hydrating(1),
                RegionClaim::Busy => {
                    self.release_claims(regions.start..region);
                    self.unlock(&bio);
                    return self.waiting.push_back(WaitingWrite { bio, alone: true });
                }
            }
        }
        self.send(bio, MirrorStep::ClaimedSource);
    }

    /// Ends the claims of a request that has claimed those of `regions` that are not copied.
    fn release_claims(&mut self, regions: Range<u64>) {
        for region in regions {
            if !self.copies().map.is_hydrated(region) {
                self.engine.end_claim(region, false);
            }
        }
    }

    /// True if a suspend or the end of the program must wait for copies.
    fn waits_for_end(&self) -> bool {
        (self.ending || self.copies().is_suspending()) && self.copies().has_unfinished_work()
    }

    /// Lets the writes that wait for failed copies of this lane go to the source alone.
    fn pass_failed_copies(&mut self) {
        for (first, count) in self.engine.take_failed() {
            for at in 0..self.waiting.len() {
                let regions = self.regions_of(&self.waiting[at].bio);
                self.waiting[at].alone |= regions.start < first + count && first < regions.end;
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
        self.pass_failed_copies();
        for _ in 0..self.waiting.len() {
            let Some(WaitingWrite { bio, alone }) = self.waiting.pop_front() else { break };
            self.take(bio, alone);
        }
    }

    /// The last step after all bios of a turn. Returns true if requests were sent.
    fn finish_turn(&mut self, cx: &mut Cx<'_>) -> bool {
        self.look();
        for (child, mut bio) in self.engine.take_requests() {
            bio.owner = self.owner;
            bio.start();
            self.children.push(child, bio);
        }
        self.wake_waiters();
        let sent = self.children.send(cx);
        if sent || self.progress {
            cx.wake_now();
        }
        if !self.waiting.is_empty() || self.waits_for_end() {
            self.subscription.wait(self.seen, cx);
        }
        sent
    }

    /// Wakes those who wait for claims or locks that have ended.
    fn wake_waiters(&mut self) {
        self.engine.wake_waiters();
        if std::mem::take(&mut self.wake_due) {
            self.copies().wait_queue.wake_up();
        }
    }

    /// Takes the requests of the engine, and the next steps of tracked requests.
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
            let Some(step) = self.tracked.take(&mut done[at]) else {
                at += 1;
                continue;
            };
            any = true;
            match self.next_step(&mut done[at], step) {
                Some(next) => {
                    let mut bio = done.swap_remove(at);
                    bio.status = Status::Ok;
                    self.send(bio, next);
                }
                None => {
                    self.unlock(&done[at]);
                    at += 1;
                }
            }
        }
        self.progress |= any;
        any
    }

    /// The step after `step`; `None` if the request is done.
    fn next_step(&mut self, bio: &mut Bio, step: MirrorStep) -> Option<MirrorStep> {
        let is_ok = bio.status.is_ok();
        let goes_on = is_ok && !self.state.is_degraded();
        match step {
            MirrorStep::Source => return goes_on.then_some(MirrorStep::Destination),
            MirrorStep::OverwriteSource { region } if goes_on => {
                return Some(MirrorStep::OverwriteDestination { region });
            }
            MirrorStep::OverwriteSource { region } => self.engine.end_claim(region, false),
            MirrorStep::OverwriteDestination { region } => {
                self.engine.end_claim(region, is_ok);
                if !is_ok {
                    // The region is not copied, so the source alone has to have it.
                    let failure = CopyFailure { device: DESTINATION, status: bio.status, region };
                    self.copies().set_copy_failure(failure);
                    bio.status = Status::Ok;
                }
            }
            MirrorStep::ClaimedSource => {
                let regions = self.regions_of(bio);
                if goes_on && regions.clone().any(|region| self.copies().map.is_hydrated(region)) {
                    return Some(MirrorStep::ClaimedDestination);
                }
                self.release_claims(regions);
            }
            MirrorStep::ClaimedDestination => {
                self.end_on_destination(bio);
                self.release_claims(self.regions_of(bio));
            }
            MirrorStep::Destination if bio.status == Status::NotSupp && bio.op == Op::Discard => {
                bio.status = Status::Ok;
            }
            MirrorStep::Destination if bio.status == Status::NotSupp && bio.op == Op::WriteZeroes => {
                bio.op = Op::Write;
                bio.data = Buf::zeroed(bio.sectors.bytes() as usize).into();
                return Some(MirrorStep::ZeroFill);
            }
            MirrorStep::Destination => self.end_on_destination(bio),
            MirrorStep::ZeroFill => {
                (bio.op, bio.data) = (Op::WriteZeroes, Segments::default());
                self.end_on_destination(bio);
            }
        }
        None
    }

    fn end_on_destination(&self, bio: &mut Bio) {
        if !bio.status.is_ok() && self.state.fail_destination(bio.status) {
            bio.status = Status::Ok;
        }
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
    }

    /// True if nothing but requests without a record is in this lane.
    #[inline(always)]
    fn is_calm(&self) -> bool {
        self.engine.is_idle() && self.tracked.is_empty() && self.waiting.is_empty() && !self.waits_for_end()
    }
}

impl Lane for MirrorLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.clients += batch.len();
        self.publish_activity();
        if self.is_for_source(batch) {
            return self.children.submit(SOURCE, batch, cx);
        }
        batch.drain(..).for_each(|bio| self.take(bio, false));
        self.finish_turn(cx);
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
        // As in a clone, the engine's own requests complete first. In a switch, the next table
        // reads the destination: a write that a client has read from the source must be there.
        let must_complete =
            self.engine.has_requests() || self.state.is_switching() && !self.tracked.is_empty();
        if how != DrainMode::NoFlush || !must_complete {
            for child in 0..self.children.len() {
                let mut at = self.children.drain(child, how, back, cx);
                while at < back.len() {
                    if back[at].owner == self.owner {
                        self.again.push((child, back.swap_remove(at)));
                        continue;
                    }
                    if let Some(step) = self.tracked.take(&mut back[at]) {
                        self.hand_back(step, &mut back[at]);
                    }
                    at += 1;
                }
            }
            self.wake_waiters();
        }
        if how == DrainMode::NoFlush {
            back.extend(self.waiting.drain(..).map(|waiting| waiting.bio));
        }
        self.clients -= back.len() - start;
    }

    fn own_work(&self) -> OwnWork {
        let required = !self.engine.is_idle() || self.waits_for_end();
        if required { OwnWork::Required } else { self.children.own_work() }
    }
}

impl MirrorLane {
    /// Restores a request that a child handed back. It is sent again as a new one, to both devices.
    fn hand_back(&mut self, step: MirrorStep, bio: &mut Bio) {
        match step {
            MirrorStep::OverwriteSource { region } | MirrorStep::OverwriteDestination { region } => {
                self.engine.end_claim(region, false);
            }
            MirrorStep::ClaimedSource | MirrorStep::ClaimedDestination => {
                self.release_claims(self.regions_of(bio));
            }
            MirrorStep::ZeroFill => (bio.op, bio.data) = (Op::WriteZeroes, Segments::default()),
            MirrorStep::Source | MirrorStep::Destination => {}
        }
        self.unlock(bio);
    }
}
