//! The data path of a snapshot.
//!
//! Chunks in the store are read and written there. Other chunks are read from the origin, and
//! copied before they are written. A write of a whole chunk needs no copy: it goes directly to a
//! free chunk of the store. A write of a part of a chunk is applied to the copied data, so it needs
//! no request of its own. Both are acknowledged when their record is on disk.
//!
//! The table splits all requests at chunk boundaries. [`discard`] has the discards.

mod discard;

use super::args::SnapshotFeatures;
use super::binding::SnapshotTableBinding;
use super::copy_engine::ChunkCopyEngine;
use super::exception_map::ChunkState;
use super::growth::StoreFullReason;
use super::readers::LaneReadTracker;
use super::record_commits::ExceptionRun;
use super::redirected_bios::RedirectedBios;
use super::settings::FullStoreWritePolicy;
use super::state::Snapshot;
use slab::Slab;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use udm_core::{Batch, Bio, Cx, DeviceControlError, DrainMode, Lane, Op, OwnWork, Sector, Sectors, Status};

/// Children of the copy engine.
const ORIGIN: usize = 0;
const STORE: usize = 1;

/// The kind of a request in flight.
enum SnapshotInFlightBioKind {
    /// A read of the origin in this epoch.
    Origin(u64),
    /// A request in the store.
    Store,
    /// The first write of a whole chunk, with its index in `first_writes`.
    FirstWrite(u32),
    /// A discard that clears a chunk of the store: the write of one piece. If `discard_origin` is
    /// set, the origin is discarded afterwards.
    Clear { discard_origin: bool },
    /// A discard of the origin.
    Discard,
}

/// The lane of a snapshot.
pub(super) struct SnapshotLane {
    engine: ChunkCopyEngine,
    snapshot: Arc<Snapshot>,
    features: SnapshotFeatures,
    /// The maximum discard of the origin.
    origin_discard_max: Sectors,
    /// Another table has taken the snapshot over; this lane must not use it.
    taken_over: Arc<AtomicBool>,
    reader: LaneReadTracker,
    tags: RedirectedBios<SnapshotInFlightBioKind>,
    /// Scratch: the chunks of the store for the requests of a batch.
    store_chunks: Vec<Option<u64>>,
    /// Chunks that are written for the first time.
    first_writes: Slab<ExceptionRun>,
    /// Requests for chunks that are being copied.
    waiting: VecDeque<Box<Bio>>,
    /// Writes whose data is in the store and whose records may not be durable yet.
    awaiting_commit: Batch,
    /// Bios completed here, for the next poll.
    ended: Batch,
    /// Discards whose last step completed, with their next step.
    to_resubmit: Vec<(Box<Bio>, SnapshotInFlightBioKind)>,
}

impl SnapshotLane {
    /// A lane for the table of `binding`.
    ///
    /// # Errors
    /// If a device cannot be opened on this core.
    pub(super) fn open(
        binding: &SnapshotTableBinding,
        cx: &mut Cx<'_>,
    ) -> Result<SnapshotLane, DeviceControlError> {
        let snapshot = &binding.snapshot;
        Ok(SnapshotLane {
            engine: ChunkCopyEngine::open(&binding.line.origin, std::slice::from_ref(snapshot), cx)?,
            snapshot: Arc::clone(snapshot),
            features: binding.line.features,
            origin_discard_max: binding.line.origin.device.limits().max_discard,
            taken_over: Arc::clone(&binding.released),
            reader: snapshot.readers.join(),
            tags: RedirectedBios::new(cx.new_owner()),
            store_chunks: Vec::new(),
            first_writes: Slab::new(),
            waiting: VecDeque::new(),
            awaiting_commit: Batch::new(),
            ended: Batch::new(),
            to_resubmit: Vec::new(),
        })
    }

    /// True if the snapshot is valid and belongs to this table.
    #[inline]
    fn is_usable(&self) -> bool {
        // Relaxed: it is set while this lane is quiesced.
        self.snapshot.is_valid() && !self.taken_over.load(Ordering::Relaxed)
    }

    fn end(&mut self, mut bio: Box<Bio>, status: Status) {
        bio.end_with(status);
        self.ended.push(bio);
    }

    fn send_to_store(&mut self, mut bio: Box<Bio>, new: u64, what: SnapshotInFlightBioKind) {
        let sector = Sector(self.snapshot.in_store(bio.sector.0, new));
        self.tags.put(&mut bio, sector, what);
        self.engine.children.push(STORE, bio);
    }

    fn send_to_origin(&mut self, mut bio: Box<Bio>, what: SnapshotInFlightBioKind) {
        let sector = bio.sector;
        self.tags.put(&mut bio, sector, what);
        self.engine.children.push(ORIGIN, bio);
    }

    /// Redirects the bios at the front of a batch that are in the store, and returns their number.
    /// They need no epoch, because a chunk in the store stays there.
    #[inline]
    fn redirect_to_store(&mut self, batch: &mut [Box<Bio>]) -> usize {
        let snapshot = &self.snapshot;
        if !self.is_usable() || snapshot.is_overflowed() {
            return 0;
        }
        let look = |bio: &Bio| snapshot.place(snapshot.chunk_of(bio.sector.0)).store_chunk();
        if batch.first().is_none_or(|bio| look(bio).is_none()) {
            return 0;
        }
        // All lookups come first, so that their memory accesses overlap.
        self.store_chunks.clear();
        self.store_chunks.extend(batch.iter().map(|bio| look(bio)));
        for (at, (bio, &store_chunk)) in batch.iter_mut().zip(&self.store_chunks).enumerate() {
            let (Some(new), Op::Read | Op::Write) = (store_chunk, bio.op) else { return at };
            let sector = Sector(snapshot.in_store(bio.sector.0, new));
            self.tags.put(bio, sector, SnapshotInFlightBioKind::Store);
        }
        batch.len()
    }

    /// Redirects the reads at the front of a batch that are not in the store, and returns their
    /// number.
    #[inline]
    fn redirect_to_origin(&mut self, batch: &mut [Box<Bio>], epoch: u64) -> usize {
        let snapshot = &self.snapshot;
        if !self.is_usable() || snapshot.is_overflowed() {
            return 0;
        }
        self.store_chunks.clear();
        let look = |bio: &Bio| snapshot.place(snapshot.chunk_of(bio.sector.0)).store_chunk();
        self.store_chunks.extend(batch.iter().map(|bio| look(bio)));
        for (at, (bio, &store_chunk)) in batch.iter_mut().zip(&self.store_chunks).enumerate() {
            // The read may go to the origin even if its chunk has been copied since.
            let (None, Op::Read) = (store_chunk, bio.op) else { return at };
            self.reader.count();
            let sector = bio.sector;
            self.tags.put(bio, sector, SnapshotInFlightBioKind::Origin(epoch));
        }
        batch.len()
    }

    /// Sends `bio` to a device, or queues it. `epoch` is the epoch of this turn's reads.
    #[inline]
    fn take(&mut self, bio: Box<Bio>, epoch: u64) {
        match bio.op {
            Op::Flush => self.engine.children.push(STORE, bio),
            _ if !self.is_usable() => self.end(bio, Status::IoErr),
            Op::Read => {
                let place = self.snapshot.place(self.snapshot.chunk_of(bio.sector.0));
                match place.store_chunk() {
                    Some(new) => self.send_to_store(bio, new, SnapshotInFlightBioKind::Store),
                    None => {
                        self.reader.count();
                        self.send_to_origin(bio, SnapshotInFlightBioKind::Origin(epoch));
                    }
                }
            }
            Op::Write => self.write(bio),
            Op::Discard if self.features.discard_zeroes_cow => self.discard(bio),
            Op::Discard | Op::WriteZeroes => self.end(bio, Status::NotSupp),
        }
    }

    fn write(&mut self, bio: Box<Bio>) {
        // As in the kernel, an overflowed snapshot fails writes even if the chunk has an exception.
        if self.snapshot.is_overflowed() {
            return self.end(bio, Status::IoErr);
        }
        let chunk = self.snapshot.chunk_of(bio.sector.0);
        match self.snapshot.place(chunk) {
            ChunkState::Copied(new) | ChunkState::Settled(new) => {
                self.send_to_store(bio, new, SnapshotInFlightBioKind::Store);
            }
            ChunkState::Pending => self.waiting.push_back(bio),
            ChunkState::Free if !self.snapshot.map.claim(chunk) => self.waiting.push_back(bio),
            ChunkState::Free => match self.engine.room(0, chunk) {
                Ok(copied) if self.covers(&bio) => {
                    let first = self.first_writes.insert(copied) as u32;
                    self.send_to_store(bio, copied.new, SnapshotInFlightBioKind::FirstWrite(first));
                }
                Ok(copied) => self.engine.copy_under(0, copied, bio),
                Err(full) => self.is_full(full, bio),
            },
        }
    }

    /// Handles a write without room in the store.
    fn is_full(&mut self, full: StoreFullReason, bio: Box<Bio>) {
        match self.snapshot.on_full(full) {
            FullStoreWritePolicy::Pause => return self.waiting.push_back(bio),
            FullStoreWritePolicy::Fail => {
                self.snapshot.notify_without_room();
                return self.end(bio, Status::NoSpace);
            }
            FullStoreWritePolicy::Invalidate if self.features.overflow => {
                self.snapshot.overflow();
                self.snapshot.notify_without_room();
            }
            FullStoreWritePolicy::Invalidate => self.engine.lose(0, "Unable to allocate exception"),
        }
        self.end(bio, Status::IoErr);
    }

    /// True if a write covers a whole chunk. A write of the last chunk does not, if the origin ends
    /// within it (kernel).
    fn covers(&self, bio: &Bio) -> bool {
        bio.sectors.0 == u64::from(self.snapshot.chunk.sectors())
            && bio.end().0 <= self.snapshot.origin_size()
    }

    /// Retries waiting requests.
    fn look(&mut self, cx: &mut Cx<'_>) {
        let epoch = self.reader.begin(&self.snapshot.readers);
        for _ in 0..self.waiting.len() {
            let Some(bio) = self.waiting.pop_front() else { break };
            self.take(bio, epoch);
        }
        self.complete_committed();
        self.finish_turn(cx);
    }

    /// Completes the writes whose records are durable.
    fn complete_committed(&mut self) {
        let mut at = 0;
        while at < self.awaiting_commit.len() {
            let chunk = self.snapshot.chunk_of(self.awaiting_commit[at].sector.0);
            let status = match self.snapshot.place(chunk).store_chunk() {
                // Checked before the chunk's state: data in an invalid store is lost.
                _ if !self.snapshot.is_valid() => Status::IoErr,
                Some(_) => Status::Ok,
                None => {
                    at += 1;
                    continue;
                }
            };
            let bio = self.awaiting_commit.swap_remove(at);
            self.end(bio, status);
        }
    }

    /// The last step after all bios of a turn.
    fn finish_turn(&mut self, cx: &mut Cx<'_>) {
        if self.reader.end(&self.snapshot.readers) {
            self.snapshot.wait_queue.wake_up();
        }
        self.engine.begin(cx);
        if !self.ended.is_empty() {
            cx.wake_now();
        }
        if self.waits() {
            self.engine.wait(true, cx);
        }
    }

    fn waits(&self) -> bool {
        !self.waiting.is_empty() || !self.awaiting_commit.is_empty()
    }

    /// Restores redirected bios that completed, and handles those that need more work.
    fn came_back(&mut self, done: &mut Batch, from: usize) {
        let mut at = from;
        while at < done.len() {
            if self.passed(&mut done[at]) {
                at += 1;
                continue;
            }
            match self.tags.take(&mut done[at]) {
                Some(SnapshotInFlightBioKind::FirstWrite(first)) => {
                    let copied = self.first_writes.remove(first as usize);
                    let bio = done.swap_remove(at);
                    let is_valid = bio.status.is_ok();
                    if !is_valid {
                        self.engine.fail(0, bio.status);
                    }
                    self.engine.copied(0, ExceptionRun { is_valid, ..copied });
                    if is_valid {
                        self.awaiting_commit.push(bio);
                    } else {
                        self.ended.push(bio);
                    }
                }
                Some(SnapshotInFlightBioKind::Clear { discard_origin }) => {
                    at += usize::from(self.piece_cleared(done, at, discard_origin));
                }
                None
                | Some(
                    SnapshotInFlightBioKind::Store
                    | SnapshotInFlightBioKind::Discard
                    | SnapshotInFlightBioKind::Origin(_),
                ) => {
                    unreachable!("it passed")
                }
            }
        }
    }
}

impl SnapshotLane {
    /// Submits a batch whose first `redirected` bios are redirected to the store and others are
    /// not.
    #[inline(never)]
    fn submit_rest(&mut self, batch: &mut Batch, redirected: usize, cx: &mut Cx<'_>) {
        // Only reads need the epoch.
        let reads = batch.iter().any(|bio| bio.op == Op::Read);
        let epoch = if reads { self.reader.begin(&self.snapshot.readers) } else { 0 };
        let to_origin = if reads && redirected == 0 { self.redirect_to_origin(batch, epoch) } else { 0 };
        if to_origin == batch.len() {
            return self.engine.children.submit(ORIGIN, batch, cx);
        }
        self.engine.schedule_last_block_check(0, cx);
        for (at, bio) in batch.drain(..).enumerate() {
            match (at < redirected, at < to_origin) {
                (true, _) => self.engine.children.push(STORE, bio),
                (_, true) => self.engine.children.push(ORIGIN, bio),
                _ => self.take(bio, epoch),
            }
        }
        self.finish_turn(cx);
    }

    /// Restores the bios in `done[from..]` that need no more work. Returns false if any needs more.
    #[inline]
    fn restore_passed(&mut self, done: &mut Batch, from: usize) -> bool {
        let all = done[from..].iter_mut().all(|bio| self.passed(bio));
        if self.reader.end(&self.snapshot.readers) {
            self.snapshot.wait_queue.wake_up();
        }
        all
    }

    /// Restores `bio` if it needs no more work. Returns false otherwise.
    #[inline]
    fn passed(&mut self, bio: &mut Bio) -> bool {
        match self.tags.get(bio) {
            Some(SnapshotInFlightBioKind::FirstWrite(_) | SnapshotInFlightBioKind::Clear { .. }) => {
                return false;
            }
            None
            | Some(
                SnapshotInFlightBioKind::Store
                | SnapshotInFlightBioKind::Discard
                | SnapshotInFlightBioKind::Origin(_),
            ) => {}
        }
        if let Some(SnapshotInFlightBioKind::Origin(epoch)) = self.tags.take(bio) {
            self.reader.finish(epoch);
            // If a copy was lost, the origin may have changed before this read completed.
            if !self.snapshot.is_valid() {
                bio.end_with(Status::IoErr);
            }
        }
        true
    }

    #[inline(never)]
    fn poll_all(&mut self, done: &mut Batch, from: usize, polled: bool, cx: &mut Cx<'_>) {
        if !polled {
            self.engine.poll(done, cx);
        }
        if done.len() > from {
            self.came_back(done, from);
            for (bio, next) in std::mem::take(&mut self.to_resubmit) {
                match next {
                    SnapshotInFlightBioKind::Clear { discard_origin } => {
                        self.clear_piece(bio, discard_origin);
                    }
                    next => self.send_to_origin(bio, next),
                }
            }
        }
        self.awaiting_commit.extend(self.engine.take_overlaid());
        if self.waits() && self.engine.has_news(true) {
            self.look(cx);
        } else {
            self.finish_turn(cx);
        }
        done.append(&mut self.ended);
    }
}

impl Lane for SnapshotLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let count = self.redirect_to_store(batch);
        if count == batch.len() {
            self.engine.schedule_last_block_check(0, cx);
            self.engine.children.submit(STORE, batch, cx);
        } else {
            self.submit_rest(batch, count, cx);
        }
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let from = done.len();
        let calm = !self.waits() && self.ended.is_empty() && self.engine.poll_through(done, cx);
        if !(calm && self.restore_passed(done, from)) {
            self.poll_all(done, from, calm, cx);
        }
    }

    fn drain(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        let (tags, reader, snapshot) = (&mut self.tags, &mut self.reader, &self.snapshot);
        let mut void = Vec::new();
        self.engine.drain(how, back, cx, |bio| match tags.take(bio) {
            Some(SnapshotInFlightBioKind::Origin(epoch)) => reader.finish(epoch),
            Some(SnapshotInFlightBioKind::FirstWrite(first)) => void.push(first),
            Some(SnapshotInFlightBioKind::Clear { .. }) => discard::restore_discard(bio, snapshot),
            None | Some(SnapshotInFlightBioKind::Store | SnapshotInFlightBioKind::Discard) => {}
        });
        let any = !void.is_empty();
        for first in void {
            let copied = self.first_writes.remove(first as usize);
            self.engine.copied(0, ExceptionRun { is_valid: false, ..copied });
            snapshot.map.give_up(copied.old);
            snapshot.wait_queue.wake_up();
        }
        if any {
            // Records of other lanes wait for these sequence numbers, and this lane may not be
            // polled again.
            self.engine.begin(cx);
        }
        if how == DrainMode::NoFlush {
            back.extend(self.waiting.drain(..));
        }
    }

    fn own_work(&self) -> OwnWork {
        self.engine.own_work()
    }
}
