//! The data path of a merge.
//!
//! Chunks in the store are read and written there until they have been merged. A write to a chunk
//! of the current unit waits for the end of the unit, and then goes to the origin.

use super::MergeShared;
use crate::snapshot::exception_map::ChunkState;
use crate::snapshot::origin_lane::OriginLane;
use crate::snapshot::raw_device;
use crate::snapshot::readers::LaneReadTracker;
use crate::snapshot::redirected_bios::RedirectedBios;
use slab::Slab;
use std::collections::VecDeque;
use std::sync::Arc;
use udm_core::{
    Batch, Bio, BioOwnerId, BioPool, Cx, DeviceControlError, DrainMode, Lane, Op, OwnWork, Sector, Sectors,
    Status, WaitQueueSubscription, WakeEpoch,
};
use udm_dm::child_lanes::ChildLanes;

const ORIGIN: usize = 0;
const STORE: usize = 1;

/// A flush of both devices.
struct TwoDeviceFlush {
    bio: Box<Bio>,
    left: usize,
    status: Status,
}

/// The lane of a merge.
pub(super) struct MergeLane {
    shared: Arc<MergeShared>,
    children: ChildLanes,
    wait_handle: WaitQueueSubscription,
    seen: WakeEpoch,
    /// Writes to the store, by epoch: a unit begins when the writes before it have completed.
    writes: LaneReadTracker,
    tags: RedirectedBios<Option<u64>>,
    /// Writes to chunks of the current unit.
    waiting: VecDeque<Box<Bio>>,
    owner: BioOwnerId,
    flushes: Slab<TwoDeviceFlush>,
    pool: BioPool,
    ended: Batch,
}

impl MergeLane {
    pub(super) fn open(shared: &Arc<MergeShared>, cx: &mut Cx<'_>) -> Result<MergeLane, DeviceControlError> {
        let binding = &shared.binding;
        let origin = OriginLane::open(&binding.line.origin, &binding.origin_snapshots.listed(), cx)?;
        let lanes: [Box<dyn Lane>; 2] =
            [Box::new(origin), raw_device::open_lane_through_table(&binding.line.store, cx)?];
        let wait_handle = binding.snapshot.wait_queue.subscribe(cx);
        Ok(MergeLane {
            children: ChildLanes::new(lanes),
            seen: wait_handle.epoch(),
            wait_handle,
            writes: binding.snapshot.readers.join(),
            tags: RedirectedBios::new(cx.new_owner()),
            waiting: VecDeque::new(),
            owner: cx.new_owner(),
            flushes: Slab::new(),
            pool: BioPool::new(usize::MAX),
            ended: Batch::new(),
            shared: Arc::clone(shared),
        })
    }

    fn end(&mut self, mut bio: Box<Bio>, status: Status) {
        bio.end_with(status);
        self.ended.push(bio);
    }

    fn send_to_store(&mut self, mut bio: Box<Bio>, new: u64, epoch: Option<u64>) {
        let sector = Sector(self.shared.binding.snapshot.in_store(bio.sector.0, new));
        self.tags.put(&mut bio, sector, epoch);
        self.children.push(STORE, bio);
    }

    fn take(&mut self, bio: Box<Bio>, epoch: u64) {
        let snapshot = &self.shared.binding.snapshot;
        match bio.op {
            Op::Flush => return self.flush(bio),
            Op::Discard | Op::WriteZeroes => {
                let takes = bio.op == Op::Discard && self.shared.binding.line.features.discard_zeroes_cow;
                return self.end(bio, if takes { Status::Ok } else { Status::NotSupp });
            }
            Op::Read | Op::Write => {}
        }
        if self.shared.binding.is_released() {
            return self.end(bio, Status::IoErr);
        }
        let place = snapshot.place(snapshot.chunk_of(bio.sector.0));
        match (place, bio.op) {
            _ if !snapshot.is_valid() => self.children.push(ORIGIN, bio),
            (ChunkState::Free | ChunkState::Pending, _) => self.children.push(ORIGIN, bio),
            (ChunkState::Settled(new) | ChunkState::Copied(new), Op::Read) => {
                self.send_to_store(bio, new, None);
            }
            (ChunkState::Settled(new), _) => {
                self.writes.count();
                self.send_to_store(bio, new, Some(epoch));
            }
            // The chunk is in the origin and perhaps in the store. After a crash either could be
            // used.
            (ChunkState::Copied(_), _) if self.shared.has_failed() => self.end(bio, Status::IoErr),
            (ChunkState::Copied(_), _) => self.waiting.push_back(bio),
        }
    }

    /// Sends a flush to both devices.
    fn flush(&mut self, bio: Box<Bio>) {
        let entry = self.flushes.insert(TwoDeviceFlush { bio, left: 2, status: Status::Ok });
        for child in [ORIGIN, STORE] {
            let mut flush = self.pool.get().expect("the pool has no bound");
            (flush.op, flush.sector, flush.sectors) = (Op::Flush, Sector(0), Sectors::ZERO);
            (flush.owner, flush.cookie) = (self.owner, entry as u64);
            flush.start();
            self.children.push(child, flush);
        }
    }

    fn flushed(&mut self, mut bio: Box<Bio>) {
        bio.finish();
        let flush = &mut self.flushes[bio.cookie as usize];
        flush.left -= 1;
        if flush.status.is_ok() {
            flush.status = bio.status;
        }
        if flush.left == 0 {
            let TwoDeviceFlush { bio, status, .. } = self.flushes.remove(bio.cookie as usize);
            self.end(bio, status);
        }
        self.pool.put(bio);
    }

    /// Restores redirected bios that completed, and takes out the lane's own flushes.
    fn came_back(&mut self, done: &mut Batch, from: usize) {
        let mut at = from;
        while at < done.len() {
            if done[at].owner == self.owner {
                let bio = done.swap_remove(at);
                self.flushed(bio);
                continue;
            }
            if let Some(Some(epoch)) = self.tags.take(&mut done[at]) {
                self.writes.finish(epoch);
            }
            at += 1;
        }
    }

    fn finish_turn(&mut self, cx: &mut Cx<'_>) {
        if self.writes.end(&self.shared.binding.snapshot.readers) {
            self.shared.binding.snapshot.wait_queue.wake_up();
        }
        if self.children.send(cx) || !self.ended.is_empty() {
            cx.wake_now();
        }
        // A suspend waits for the unit, and this lane reports its end.
        if !self.waiting.is_empty() || self.shared.is_running() {
            self.wait_handle.wait(self.seen, cx);
        }
    }
}

impl Lane for MergeLane {
    fn begin(&mut self, cx: &mut Cx<'_>) -> Option<Box<dyn Lane>> {
        self.children.begin(cx);
        None
    }

    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let epoch = self.writes.begin(&self.shared.binding.snapshot.readers);
        for bio in batch.drain(..) {
            self.take(bio, epoch);
        }
        self.finish_turn(cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let from = done.len();
        let mut round = self.children.poll();
        while self.children.poll_next(&mut round, done, cx).is_some() {}
        self.children.poll_idle(&round, done, cx);
        self.came_back(done, from);
        self.seen = self.wait_handle.epoch();
        if !self.waiting.is_empty() {
            let epoch = self.writes.begin(&self.shared.binding.snapshot.readers);
            for bio in std::mem::take(&mut self.waiting) {
                self.take(bio, epoch);
            }
        }
        self.finish_turn(cx);
        done.append(&mut self.ended);
    }

    fn drain(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        let mut again = Vec::new();
        for child in 0..self.children.len() {
            let mut at = self.children.drain(child, how, back, cx);
            while at < back.len() {
                if back[at].owner == self.owner {
                    again.push((child, back.swap_remove(at)));
                    continue;
                }
                if let Some(Some(epoch)) = self.tags.take(&mut back[at]) {
                    self.writes.finish(epoch);
                }
                at += 1;
            }
        }
        again.into_iter().for_each(|(child, bio)| self.children.push(child, bio));
        if how == DrainMode::NoFlush {
            back.extend(self.waiting.drain(..));
        }
    }

    fn own_work(&self) -> OwnWork {
        if self.shared.is_running() { OwnWork::Required } else { self.children.own_work() }
    }
}
