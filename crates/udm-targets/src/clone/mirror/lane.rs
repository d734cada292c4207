//! The data path of a mirror.
//!
//! Reads go to the source, without any record of them. A write of copied regions goes to the source
//! and then to the destination, as one request. The table splits reads and writes at the borders of
//! regions.

use super::log::writer::LogWriter;
use super::state::{LOG, MirrorState};
use super::steps::MirrorStep;
use crate::clone::engine::{CopyMemory, HydrationEngine, SOURCE};
use crate::clone::regions::RegionClaim;
use crate::clone::state::{CloneState, LaneActivity};
use crate::snapshot::redirected_bios::RedirectedBios;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use udm_core::{
    Batch, Bio, BioOwnerId, Cx, DeviceControlError, DrainMode, Lane, Op, OwnWork, Status,
    WaitQueueSubscription, WakeEpoch,
};
use udm_dm::child_lanes::ChildLanes;

/// Maximum rounds per poll in which a lane polls again for requests that it just sent.
const ROUNDS_MAX: usize = 8;

/// A write that waits for the copies of its regions.
struct WaitingWrite {
    bio: Box<Bio>,
    /// A copy failed: the write goes to the source alone.
    alone: bool,
}

/// The lane of a mirror.
pub(super) struct MirrorLane {
    pub(super) state: Arc<MirrorState>,
    pub(super) engine: HydrationEngine,
    children: ChildLanes,
    owner: BioOwnerId,
    pub(super) tracked: RedirectedBios<MirrorStep>,
    subscription: WaitQueueSubscription,
    seen: WakeEpoch,
    waiting: VecDeque<WaitingWrite>,
    /// The engine's requests that a child handed back.
    again: Vec<(usize, Box<Bio>)>,
    /// Client requests in this lane, and the number that the task sees.
    clients: usize,
    activity: LaneActivity,
    /// The writer of the log, and the owner of its requests.
    pub(super) writer: Option<LogWriter>,
    pub(super) log_owner: BioOwnerId,
    /// The regions of writes that wait for the log.
    log_wants: Vec<u64>,
    /// Writes that fail because the log has failed.
    refused: Batch,
    /// Locks were released, so others must be woken.
    pub(super) wake_due: bool,
    /// Something has happened in this lane since the waiting requests were examined.
    pub(super) progress: bool,
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
            writer: state.log.as_ref().map(LogWriter::new),
            log_owner: cx.new_owner(),
            log_wants: Vec::new(),
            refused: Vec::new(),
            wake_due: false,
            progress: false,
            ending: false,
            state: Arc::clone(state),
        })
    }

    pub(super) fn copies(&self) -> &CloneState {
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

    pub(super) fn send(&mut self, mut bio: Box<Bio>, step: MirrorStep) {
        let sector = bio.sector;
        self.tracked.put(&mut bio, sector, step);
        self.children.push(step.device(), bio);
    }

    /// The regions that a write touches.
    pub(super) fn regions_of(&self, bio: &Bio) -> Range<u64> {
        let map = &self.copies().map;
        map.region_of(bio.sector.0)..map.region_of(bio.end().0 - 1) + 1
    }

    /// Sends `bio` to a device, or queues it.
    fn take(&mut self, bio: Box<Bio>, alone: bool) {
        match bio.op {
            Op::Read => self.children.push(SOURCE, bio),
            _ if self.state.is_degraded() => self.write_to_source(bio, alone),
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
        if self.lock(&bio) {
            return self.send(bio, MirrorStep::OverwriteSource { region });
        }
        // A discard is under way, which needs no claim, or the log is not dirty there.
        self.engine.end_claim(region, false);
        self.wait(bio, false);
    }

    /// Sends a request with the locks of its blocks, or lets it wait for them.
    fn send_locked(&mut self, bio: Box<Bio>, step: MirrorStep) {
        match self.lock(&bio) {
            true => self.send(bio, step),
            false => self.wait(bio, false),
        }
    }

    /// Sends a request to the source alone, because the destination has failed. The log must say
    /// so, for a mirror that continues from it.
    fn write_to_source(&mut self, bio: Box<Bio>, alone: bool) {
        match bio.op == Op::Flush || self.is_permitted(&bio) {
            true => self.children.push(SOURCE, bio),
            false => self.wait(bio, alone),
        }
    }

    /// True if the log permits a write. Otherwise the log is written in this turn.
    fn is_permitted(&mut self, bio: &Bio) -> bool {
        let is_permitted = self.state.is_permitted(self.regions_of(bio));
        if !is_permitted {
            self.log_wants.extend(self.regions_of(bio));
        }
        is_permitted
    }

    /// Locks the blocks of a request, if the log permits its write. Otherwise nothing is locked.
    fn lock(&mut self, bio: &Bio) -> bool {
        // First without the lock: an unlock wakes those who wait, as this request may do.
        if !self.is_permitted(bio) || !self.state.locks.lock(bio) {
            return false;
        }
        // Again, because the task reads the locks after it has changed the flags.
        let is_permitted = self.is_permitted(bio);
        if !is_permitted {
            self.unlock(bio);
        }
        is_permitted
    }

    /// Queues a request until something has happened.
    fn wait(&mut self, mut bio: Box<Bio>, alone: bool) {
        if self.state.fails_without_log() {
            bio.status = Status::IoErr;
            return self.refused.push(bio);
        }
        self.waiting.push_back(WaitingWrite { bio, alone });
    }

    /// Sends the requests of the writer of the log.
    fn write_log(&mut self) {
        let Some(writer) = &mut self.writer else { return };
        if !self.log_wants.is_empty() {
            writer.begin_dirty(self.log_wants.drain(..));
        }
        for mut bio in writer.take_requests() {
            bio.owner = self.log_owner;
            bio.start();
            self.children.push(LOG, bio);
        }
    }

    /// True for a request of the engine, or of the writer of the log.
    pub(super) fn is_own(&self, bio: &Bio) -> bool {
        bio.owner == self.owner || bio.owner == self.log_owner
    }

    /// True if the writer of the log has requests in flight.
    fn writes_log(&self) -> bool {
        self.writer.as_ref().is_some_and(|writer| !writer.is_idle())
    }

    /// Ends the locks of a request that is done.
    pub(super) fn unlock(&mut self, bio: &Bio) {
        if bio.op != Op::Flush {
            self.state.locks.unlock(bio);
            self.wake_due = true;
        }
    }

    /// Sends a write whose regions could not be copied: to the source, with the claims of these
    /// regions, so that no copy reads them meanwhile. Regions that are copied get it on the
    /// destination too.
    fn write_alone(&mut self, bio: Box<Bio>) {
        if !self.lock(&bio) {
            return self.wait(bio, true);
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
    pub(super) fn release_claims(&mut self, regions: Range<u64>) {
        for region in regions {
            if !self.copies().map.is_hydrated(region) {
                self.engine.end_claim(region, false);
            }
        }
    }

    /// True if a suspend or the end of the program must wait for copies.
    fn waits_for_end(&self) -> bool {
        (self.ending || self.copies().is_suspending())
            && (self.copies().has_unfinished_work() || self.state.is_log_busy())
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
        self.write_log();
        self.wake_waiters();
        let sent = self.children.send(cx);
        if sent || self.progress || !self.refused.is_empty() {
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
            let sent = self.finish_turn(cx);
            done.append(&mut self.refused);
            if !(sent && any) {
                break;
            }
        }
    }

    /// True if nothing but requests without a record is in this lane.
    #[inline(always)]
    fn is_calm(&self) -> bool {
        self.engine.is_idle()
            && self.tracked.is_empty()
            && self.waiting.is_empty()
            && !self.waits_for_end()
            && !self.writes_log()
            && self.refused.is_empty()
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
        let must_complete = self.engine.has_requests()
            || self.writes_log()
            || self.state.is_switching() && !self.tracked.is_empty();
        if how != DrainMode::NoFlush || !must_complete {
            for child in 0..self.children.len() {
                let mut at = self.children.drain(child, how, back, cx);
                while at < back.len() {
                    if self.is_own(&back[at]) {
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
            back.append(&mut self.refused);
        }
        self.clients -= back.len() - start;
    }

    fn own_work(&self) -> OwnWork {
        let required = !self.engine.is_idle() || self.writes_log() || self.waits_for_end();
        if required { OwnWork::Required } else { self.children.own_work() }
    }
}
