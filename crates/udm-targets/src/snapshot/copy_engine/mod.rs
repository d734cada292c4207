//! The copies and records that one lane makes for the snapshots that it serves.
//!
//! A lane of an origin has one engine for all snapshots, a lane of a snapshot has one for itself.
//! Below it are the origin (child 0) and the store of each snapshot (child 1 and up). The engine's
//! own requests are copies, records and the mark of an invalid store. Other requests pass through.
//!
//! ```text
//!  claim ──► read the origin ──► write each store ──► copied ──► [records] ──► publish
//!
//!  records   data of 1 ─► flush ─► records of 1 ─┐
//!                         data of 2 ─────────────┴► flush ─► records of 2 ─► ...
//!                                                     └► publish 1
//! ```
//!
//! The origin is read once for all snapshots that lack a chunk. A poll wakes other lanes once for
//! all that it published. A lane that waits only for copies of its own is woken only if its
//! snapshot is lost.

mod copies;
mod records;
mod wakeup;

use super::copy_jobs::{
    ChunkCopyDestination, ChunkCopyJob, ChunkCopyJobQueue, ChunkRunsToCopy, max_copy_piece_size,
};
use super::growth::StoreFullReason;
use super::raw_device;
use super::record_commits::ExceptionRun;
use super::state::Snapshot;
use records::InFlightExceptionRecordWrite;
use slab::Slab;
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;
use udm_core::{
    Batch, Bio, BioFlags, BioOwnerId, BioPool, Buf, BufPool, Cx, DeviceControlError, DrainMode, Nanos, Op,
    OwnWork, SECTOR_SIZE, Sector, Sectors,
};
use udm_dm::child_lanes::ChildLanes;
use wakeup::WaitQueueSeenEpoch;

/// Maximum bytes of free buffers that a lane keeps.
const FREE_BYTES: usize = 256 << 10;

/// The purpose of one of the engine's own requests.
#[derive(Clone, Copy)]
enum CopyEngineRequestKind {
    /// Reads a piece of a job from the origin.
    Read { job: usize },
    /// Writes a piece to `dests[dest]` of a job.
    Write { job: usize, dest: usize },
    /// Clears a part of the next area of records.
    Clear { part: usize },
    /// Makes data and records durable.
    Flush { part: usize },
    /// Writes records.
    Records { part: usize },
    /// Writes the header of an invalid store.
    Header { part: usize },
    /// Reads the last block of a store that may shrink; `size` was the store's size.
    LastBlock { part: usize, size: Sectors },
}

/// Maximum rounds per poll in which a lane polls again for requests that it just sent. A copy and
/// its records are five consecutive requests, and the devices below are often memory.
const ROUNDS_MAX: usize = 8;

/// A snapshot that the lane copies for.
pub(in crate::snapshot) struct CopyEngineSnapshotState {
    pub snapshot: Arc<Snapshot>,
    wakeup: WaitQueueSeenEpoch,
    invalidated_wakeup: WaitQueueSeenEpoch,
    /// The size of the store.
    size: Sectors,
    /// The block size of the store in bytes.
    block: usize,
    /// The lane has published something and must wake waiters.
    notify_due: bool,
    /// The lane has added runs that need records.
    records_due: bool,
    /// The lane has the right to write records.
    may_write_records: bool,
    /// The write of records in progress.
    writing: Option<InFlightExceptionRecordWrite>,
    /// The last written records may be in the cache of the store.
    unflushed: bool,
    /// The store has a cache, or may get one.
    is_cached: bool,
    /// Time of the next check of the store's last block; [`Nanos::NEVER`] for a store that cannot
    /// shrink.
    last_block_check_at: Nanos,
}

/// The copy engine of one lane.
pub(in crate::snapshot) struct ChunkCopyEngine {
    owner: BioOwnerId,
    pub children: ChildLanes,
    parts: Vec<CopyEngineSnapshotState>,
    jobs: ChunkCopyJobQueue,
    requests: Slab<CopyEngineRequestKind>,
    pool: BioPool,
    bufs: BufPool,
    runs: ChunkRunsToCopy,
    /// Own requests that a child handed back, to be sent again.
    again: Vec<(usize, Box<Bio>)>,
    /// Overlay writes that were stored with their chunk.
    overlaid: Batch,
    max_piece: Sectors,
    /// Own requests have completed since the last look.
    progress: bool,
    /// A store had no room.
    refused: bool,
    /// Time at which requests that wait for room retry without a wakeup.
    look_at: Nanos,
}

impl ChunkCopyEngine {
    /// An engine over `origin`, for `snapshots`.
    ///
    /// # Errors
    /// If a device cannot be opened on this core.
    pub(in crate::snapshot) fn open(
        origin: &udm_dm::target::ResolvedDevice,
        snapshots: &[Arc<Snapshot>],
        cx: &mut Cx<'_>,
    ) -> Result<ChunkCopyEngine, DeviceControlError> {
        let mut lanes = vec![origin.device.open(cx)?];
        let mut all = vec![origin.device.limits()];
        let mut parts = Vec::with_capacity(snapshots.len());
        for snapshot in snapshots {
            lanes.push(raw_device::open_lane_through_table(&snapshot.store, cx)?);
            let limits = snapshot.store.device.limits();
            all.push(limits);
            parts.push(CopyEngineSnapshotState {
                snapshot: Arc::clone(snapshot),
                wakeup: WaitQueueSeenEpoch::new(&snapshot.wait_queue, cx),
                invalidated_wakeup: WaitQueueSeenEpoch::new(&snapshot.invalidated_wakeup, cx),
                size: limits.size,
                block: limits.logical_block as usize,
                notify_due: false,
                records_due: false,
                may_write_records: false,
                writing: None,
                unflushed: false,
                is_cached: limits.write_cache || snapshot.store.device.stacked().is_some(),
                last_block_check_at: if snapshot.store.device.may_shrink() { Nanos(0) } else { Nanos::NEVER },
            });
        }
        Ok(ChunkCopyEngine {
            owner: cx.new_owner(),
            children: ChildLanes::new(lanes),
            parts,
            jobs: ChunkCopyJobQueue::default(),
            requests: Slab::new(),
            pool: BioPool::new(usize::MAX),
            bufs: BufPool::new(FREE_BYTES),
            runs: ChunkRunsToCopy::default(),
            again: Vec::new(),
            overlaid: Batch::new(),
            max_piece: max_copy_piece_size(&all),
            progress: false,
            refused: false,
            look_at: Nanos::NEVER,
        })
    }

    /// Drops the snapshots that are not in use, before any request.
    pub(in crate::snapshot) fn keep_active(&mut self) {
        for part in (0..self.parts.len()).rev() {
            if !self.parts[part].snapshot.is_active() {
                self.parts.remove(part);
                self.children.remove(1 + part);
            }
        }
    }

    /// The snapshots.
    #[inline]
    pub(in crate::snapshot) fn parts(&self) -> &[CopyEngineSnapshotState] {
        &self.parts
    }

    /// The engine's own work.
    pub(in crate::snapshot) fn own_work(&self) -> OwnWork {
        if self.is_idle() { self.children.own_work() } else { OwnWork::Required }
    }

    #[inline]
    fn is_idle(&self) -> bool {
        self.requests.is_empty() && self.jobs.is_empty() && self.runs.is_empty()
    }

    /// Claims `chunk` of snapshot `part` and allocates room for it. Returns true if this lane must
    /// copy the chunk. [`ChunkCopyEngine::begin`] must follow after all claims of a turn.
    ///
    /// # Errors
    /// The store is full; the claim is given back.
    pub(in crate::snapshot) fn claim(&mut self, part: usize, chunk: u64) -> Result<bool, StoreFullReason> {
        if !self.parts[part].snapshot.map.claim(chunk) {
            return Ok(false);
        }
        let copied = self.room(part, chunk)?;
        self.runs.add(ChunkCopyDestination { part, copied });
        Ok(true)
    }

    /// Allocates room in the store for `chunk`, which this lane has claimed. The caller writes the
    /// data.
    ///
    /// # Errors
    /// The store is full; the claim is given back.
    pub(in crate::snapshot) fn room(
        &mut self,
        part: usize,
        chunk: u64,
    ) -> Result<ExceptionRun, StoreFullReason> {
        let part = &mut self.parts[part];
        let has_memory = part.snapshot.map.bytes() <= part.snapshot.settings.map_memory();
        let room =
            if has_memory { part.snapshot.take(1, &mut part.size) } else { Err(StoreFullReason::Permanent) };
        match room {
            Ok(grant) => {
                Ok(ExceptionRun { seq: grant.seq, old: chunk, new: grant.new, len: 1, is_valid: true })
            }
            Err(full) => {
                part.snapshot.map.give_up(chunk);
                self.refused |= full == StoreFullReason::Permanent;
                Err(full)
            }
        }
    }

    /// Copies `copied` and applies `overlay` to it. [`ChunkCopyEngine::take_overlaid`] returns
    /// `overlay`.
    pub(in crate::snapshot) fn copy_under(&mut self, part: usize, copied: ExceptionRun, overlay: Box<Bio>) {
        let dests = smallvec![ChunkCopyDestination { part, copied }];
        self.add(dests, Some(overlay));
    }

    fn add(&mut self, dests: SmallVec<[ChunkCopyDestination; 1]>, overlay: Option<Box<Bio>>) {
        let (run, snapshot) = (dests[0].copied, &self.parts[dests[0].part].snapshot);
        let start = snapshot.start_of(run.old);
        // The origin may end within its last chunk, and may have grown since a snapshot was
        // resumed.
        let sizes = dests.iter().map(|dest| self.parts[dest.part].snapshot.origin_size());
        let limit = sizes.max().unwrap_or(u64::MAX);
        let end = snapshot.start_of(run.old + run.len).min(limit);
        self.jobs.add(ChunkCopyJob::new(start, end, dests, overlay));
    }

    /// Starts the claimed copies.
    pub(in crate::snapshot) fn begin(&mut self, cx: &mut Cx<'_>) {
        if let [_] = &self.parts[..] {
            let mut runs = std::mem::take(&mut self.runs);
            runs.drain().for_each(|dest| self.add(smallvec![dest], None));
            self.runs = runs;
        } else if !self.runs.is_empty() {
            let mut runs = std::mem::take(&mut self.runs);
            let shifts: SmallVec<[u32; 4]> = self.parts.iter().map(|part| part.snapshot.shift).collect();
            runs.sort(|part| shifts[part]);
            while let Some(dests) = runs.take(|part| shifts[part]) {
                self.add(dests, None);
            }
            self.runs = runs;
        }
        if std::mem::take(&mut self.refused) {
            self.parts.iter().for_each(|part| part.snapshot.retry(cx.now()));
        }
        self.send_ready(cx);
    }

    /// Called if `copied` is in the store of `part`, or was allocated but not used.
    pub(in crate::snapshot) fn copied(&mut self, part: usize, copied: ExceptionRun) {
        let part = &mut self.parts[part];
        part.notify_due |= part.snapshot.copied(copied);
        part.records_due = true;
        self.progress = true;
    }

    /// Sends one of the engine's own writes to the store of `part`.
    fn write(
        &mut self,
        part: usize,
        sector: u64,
        data: Buf,
        flags: BioFlags,
        request: CopyEngineRequestKind,
    ) {
        let mut bio = self.pool.get().expect("the pool has no bound");
        bio.sectors = Sectors(data.len() as u64 / SECTOR_SIZE);
        bio.data = data.into();
        self.send(1 + part, bio, (Op::Write, flags, sector), request);
    }

    fn send(
        &mut self,
        child: usize,
        mut bio: Box<Bio>,
        what: (Op, BioFlags, u64),
        request: CopyEngineRequestKind,
    ) {
        (bio.op, bio.flags, bio.sector) = (what.0, what.1, Sector(what.2));
        bio.owner = self.owner;
        bio.cookie = self.requests.insert(request) as u64;
        bio.start();
        self.children.push(child, bio);
    }

    /// The longest request that the origin and all stores accept without a split, at most 256 KiB.
    pub(in crate::snapshot) fn max_piece(&self) -> Sectors {
        self.max_piece
    }

    fn next_piece(&mut self) -> Option<(usize, u64, Sectors)> {
        if self.jobs.is_empty() {
            return None;
        }
        let memory = self.parts.iter().map(|part| part.snapshot.settings.copy_memory()).min()?;
        self.jobs.next_piece(self.max_piece, memory)
    }

    /// Sends the requests that can be sent now. Returns true if there were any.
    fn send_ready(&mut self, cx: &mut Cx<'_>) -> bool {
        while let Some((job, sector, sectors)) = self.next_piece() {
            let mut bio = self.pool.get().expect("the pool has no bound");
            bio.sectors = sectors;
            bio.data = self.bufs.get(sectors.bytes() as usize).into();
            self.send(0, bio, (Op::Read, BioFlags::empty(), sector), CopyEngineRequestKind::Read { job });
        }
        for part in 0..self.parts.len() {
            self.commit(part);
            if std::mem::take(&mut self.parts[part].notify_due) {
                self.parts[part].snapshot.wait_queue.wake_up();
            }
        }
        if !self.is_idle() {
            (0..self.parts.len()).for_each(|part| self.schedule_last_block_check(part, cx));
        }
        let sent = self.children.send(cx);
        if sent {
            // The requests may have completed already.
            cx.wake_now();
        }
        sent
    }

    /// Checks at intervals that the store of `part`, which is in use, has not become shorter.
    #[inline]
    pub(in crate::snapshot) fn schedule_last_block_check(&mut self, part: usize, cx: &mut Cx<'_>) {
        let at = self.parts[part].last_block_check_at;
        if at != Nanos::NEVER && at <= cx.now() {
            self.read_last(part, cx.now());
        }
    }

    /// As [`ChunkCopyEngine::poll`], if the engine has no own requests in flight and only one child
    /// is busy. Otherwise returns false. Waiting requests are not handled.
    #[inline]
    pub(in crate::snapshot) fn poll_through(&mut self, done: &mut Batch, cx: &mut Cx<'_>) -> bool {
        self.is_idle() && self.children.poll_busy(done, cx).is_some()
    }

    /// Polls the children. Bios that are not the engine's own are returned in `done`.
    pub(in crate::snapshot) fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        self.progress |= self.look_at != Nanos::NEVER && self.look_at <= cx.now();
        for (child, bio) in self.again.drain(..) {
            self.children.push(child, bio);
        }
        for _ in 0..ROUNDS_MAX {
            let start = done.len();
            let mut round = self.children.poll();
            while self.children.poll_next(&mut round, done, cx).is_some() {}
            self.children.poll_idle(&round, done, cx);
            // A slow child is polled in vain only once.
            if self.is_idle() || !(self.collect(done, start) & self.send_ready(cx)) {
                break;
            }
        }
    }

    /// Takes the engine's own requests out of `done[from..]`, in order. Returns true if there were
    /// any.
    fn collect(&mut self, done: &mut Batch, from: usize) -> bool {
        let owner = self.owner;
        let mut any = false;
        for bio in done.extract_if(from.., |bio| bio.owner == owner) {
            self.complete_own(bio);
            any = true;
        }
        any
    }

    fn complete_own(&mut self, mut bio: Box<Bio>) {
        bio.finish();
        let request = self.requests.remove(bio.cookie as usize);
        match request {
            CopyEngineRequestKind::Read { job } => return self.read_done(job, bio),
            CopyEngineRequestKind::Write { job, dest } => self.write_done(job, dest, &bio),
            CopyEngineRequestKind::Clear { part } => self.clear_done(part, bio.status),
            CopyEngineRequestKind::Flush { part } => self.flush_done(part, bio.status),
            CopyEngineRequestKind::Records { part } => self.records_done(part, &bio),
            CopyEngineRequestKind::Header { part } => self.mark_done(part, bio.status),
            CopyEngineRequestKind::LastBlock { part, size } => self.last_block_done(part, size, bio.status),
        }
        self.put(bio);
    }

    fn put(&mut self, mut bio: Box<Bio>) {
        for buf in std::mem::take(&mut bio.data) {
            self.bufs.put(buf);
        }
        self.pool.put(bio);
    }

    /// Drains the children. The engine's own requests that a child hands back are sent again.
    pub(in crate::snapshot) fn drain(
        &mut self,
        how: DrainMode,
        back: &mut Batch,
        cx: &mut Cx<'_>,
        mut up: impl FnMut(&mut Box<Bio>),
    ) {
        // The lane is quiesced when all of the engine's own requests have completed. If a child
        // handed such a request back in each round, a request that is split into parts might never
        // complete.
        if how == DrainMode::NoFlush && !self.requests.is_empty() {
            return;
        }
        for child in 0..self.children.len() {
            let from = self.children.drain(child, how, back, cx);
            let mut at = from;
            while at < back.len() {
                if back[at].owner == self.owner {
                    self.again.push((child, back.swap_remove(at)));
                } else {
                    up(&mut back[at]);
                    at += 1;
                }
            }
        }
    }

    /// Overlay writes that are in the store with their chunk; their records may not be written yet.
    pub(in crate::snapshot) fn take_overlaid(&mut self) -> impl Iterator<Item = Box<Bio>> + '_ {
        self.overlaid.drain(..)
    }

    /// True if waiting requests may make progress: own requests have completed, a snapshot is
    /// invalid, or, if `others` is set, another core sent a wakeup. Call it before the waiting
    /// requests are examined.
    pub(in crate::snapshot) fn has_news(&mut self, others: bool) -> bool {
        let mut news = std::mem::take(&mut self.progress);
        self.look_at = Nanos::NEVER;
        for part in &mut self.parts {
            let woken = part.wakeup.has_news();
            news |= (woken && others) | part.invalidated_wakeup.has_news();
        }
        news
    }

    /// Registers for a wakeup after requests were left waiting; `others` is set if one waits for
    /// another lane.
    pub(in crate::snapshot) fn wait(&mut self, others: bool, cx: &mut Cx<'_>) {
        for part in &self.parts {
            match others {
                // This queue is woken on invalidation too.
                true => part.wakeup.wait(cx),
                false => part.invalidated_wakeup.wait(cx),
            }
            if let Some(at) = part.snapshot.retry_at() {
                self.look_at = self.look_at.min(at);
                cx.wake_at(at);
            }
        }
        if self.progress {
            cx.wake_now();
        }
    }
}
