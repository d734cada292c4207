//! The copies of regions and the commits of metadata that one lane, or the task, makes.
//!
//! ```text
//!  claim ──► read the source ──► write the destination ──► bit ──► release, wake
//!
//!  commit:  take changed blocks ──► flush the destination ──► write a copy of each ──► flush
//!           ──► committed ──► write the other copies
//! ```
//!
//! The engine makes requests and takes their completions; its user sends them. So the same code
//! runs over the children of a lane and over the lanes of a task.

mod commit;

use super::state::{CloneState, CopyFailure, MetadataMode};
use commit::{CommitRequestKind, MetadataCommit};
use slab::Slab;
use std::collections::VecDeque;
use std::sync::Arc;
use udm_core::{Bio, BioFlags, BioPool, Buf, BufPool, Limits, Op, SECTOR_SIZE, Sector, Sectors, Status};

/// The devices below, as children of a lane or lanes of the task.
pub(super) const SOURCE: usize = 0;
pub(super) const DESTINATION: usize = 1;
pub(super) const METADATA: usize = 2;

/// The memory of an engine.
#[derive(Clone, Copy)]
pub(super) struct CopyMemory {
    /// Maximum bytes of copies in flight. A single piece may exceed it.
    in_flight: usize,
    /// Maximum bytes of free buffers that are kept.
    free: usize,
}

impl CopyMemory {
    /// For a lane, which copies single regions, for writes of a part of them.
    pub(super) const OF_LANE: CopyMemory = CopyMemory { in_flight: 4 << 20, free: 1 << 20 };
    /// For the task: a fast server needs many requests in flight. Buffers are kept, because fresh
    /// memory costs a page fault per 4 KiB; [`HydrationEngine::release_memory`] frees them.
    pub(super) const OF_TASK: CopyMemory = CopyMemory { in_flight: 16 << 20, free: 16 << 20 };
}

/// Maximum length of a piece of a copy.
const PIECE_MAX: u64 = (256 << 10) / SECTOR_SIZE;

/// The purpose of one of the engine's requests.
#[derive(Clone, Copy)]
enum EngineRequestKind {
    /// Reads a piece of a copy from the source.
    Read { copy: usize },
    /// Writes a piece of a copy to the destination.
    Write { copy: usize },
    /// A step of the commit.
    Commit(CommitRequestKind),
}

/// Adjacent regions that are being copied.
struct RegionCopy {
    first: u64,
    count: u64,
    /// Sectors that are still to be read: `at..end`.
    at: u64,
    end: u64,
    /// Pieces in flight.
    in_flight: usize,
    failed: bool,
}

/// The engine of a lane or of the task.
pub(super) struct HydrationEngine {
    state: Arc<CloneState>,
    /// Requests to be sent, with the device of each.
    out: Vec<(usize, Box<Bio>)>,
    copies: Slab<RegionCopy>,
    /// Copies with pieces that have not been read, in order.
    ready: VecDeque<usize>,
    /// Bytes of pieces in flight.
    bytes: usize,
    memory: CopyMemory,
    max_piece: u64,
    /// Pieces of zeroes are written as requests of zeroes, which take no space.
    keeps_holes: bool,
    commit: Option<MetadataCommit>,
    requests: Slab<EngineRequestKind>,
    pool: BioPool,
    bufs: BufPool,
    /// Regions whose copy failed, as first and count.
    failed: Vec<(u64, u64)>,
    /// Claims were released, so others must be woken.
    wake_due: bool,
}

impl HydrationEngine {
    /// An engine. Pieces of copies fit the limits of the source and the destination.
    pub(super) fn new(
        state: Arc<CloneState>,
        [source, destination]: [&Limits; 2],
        memory: CopyMemory,
    ) -> HydrationEngine {
        let block = |limits: &Limits| u64::from(limits.logical_block) / SECTOR_SIZE;
        let block = block(source).max(block(destination)).max(1);
        let most = source.max_sectors.0.min(destination.max_sectors.0).min(PIECE_MAX);
        HydrationEngine {
            state,
            out: Vec::new(),
            copies: Slab::new(),
            ready: VecDeque::new(),
            bytes: 0,
            memory,
            max_piece: (most - most % block).max(block),
            keeps_holes: false,
            commit: None,
            requests: Slab::new(),
            pool: BioPool::new(usize::MAX),
            bufs: BufPool::new(memory.free),
            failed: Vec::new(),
            wake_due: false,
        }
    }

    /// Writes pieces of zeroes as requests of zeroes, if the destination takes those. A discard
    /// would do only for a destination that is known to have zeroes.
    pub(super) fn keep_holes(mut self, destination: &Limits) -> HydrationEngine {
        self.keeps_holes = destination.max_write_zeroes > Sectors::ZERO;
        self
    }

    /// True if the engine has nothing to do and nothing in flight.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.requests.is_empty() && self.copies.is_empty() && self.commit.is_none()
    }

    /// Frees the buffers, if nothing is in flight.
    pub(super) fn release_memory(&mut self) {
        if self.is_idle() {
            self.bufs = BufPool::new(self.memory.free);
        }
    }

    /// True if a request of the engine is in flight.
    pub(super) fn has_requests(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Copies `count` regions from `first` on, which the caller has claimed and counted
    /// ([`CloneState::add_hydrating`]).
    pub(super) fn copy(&mut self, first: u64, count: u64) {
        let (at, _) = self.state.map.sectors_of(first);
        let (_, end) = self.state.map.sectors_of(first + count - 1);
        let copy = RegionCopy { first, count, at, end, in_flight: 0, failed: false };
        let copy = self.copies.insert(copy);
        self.ready.push_back(copy);
    }

    /// The requests that can be sent now, with the device of each. Their cookie is the engine's.
    pub(super) fn take_requests(&mut self) -> std::vec::Drain<'_, (usize, Box<Bio>)> {
        while let Some((copy, sector, sectors)) = self.next_piece() {
            let data = self.bufs.get(sectors.bytes() as usize);
            self.send(
                SOURCE,
                (Op::Read, BioFlags::empty(), sector),
                Some(data),
                EngineRequestKind::Read { copy },
            );
        }
        self.out.drain(..)
    }

    fn next_piece(&mut self) -> Option<(usize, u64, Sectors)> {
        let index = *self.ready.front()?;
        let copy = &mut self.copies[index];
        let len = Sectors(self.max_piece.min(copy.end - copy.at));
        let bytes = len.bytes() as usize;
        if self.bytes > 0 && self.bytes + bytes > self.memory.in_flight {
            return None;
        }
        self.bytes += bytes;
        let from = copy.at;
        copy.at += len.0;
        copy.in_flight += 1;
        if copy.at == copy.end {
            self.ready.pop_front();
        }
        Some((index, from, len))
    }

    fn send(
        &mut self,
        device: usize,
        (op, flags, sector): (Op, BioFlags, u64),
        data: Option<Buf>,
        request: EngineRequestKind,
    ) {
        let mut bio = self.pool.get().expect("the pool has no bound");
        bio.sectors = Sectors(data.as_ref().map_or(0, |data| data.len() as u64 / SECTOR_SIZE));
        bio.data = data.map(Into::into).unwrap_or_default();
        (bio.op, bio.flags, bio.sector) = (op, flags, Sector(sector));
        bio.cookie = self.requests.insert(request) as u64;
        self.out.push((device, bio));
    }

    /// Takes a completed request of the engine, after [`Bio::finish`].
    pub(super) fn complete(&mut self, bio: Box<Bio>) {
        match self.requests.remove(bio.cookie as usize) {
            EngineRequestKind::Read { copy } => self.read_done(copy, bio),
            EngineRequestKind::Write { copy } => {
                self.keeps_holes &= bio.status != Status::NotSupp;
                if !bio.status.is_ok() {
                    self.state.destination_holes.forget();
                    self.fail_copy(copy, DESTINATION, bio.status);
                }
                self.piece_done(copy, bio.sectors.bytes() as usize);
                self.put(bio);
            }
            EngineRequestKind::Commit(kind) => {
                let status = bio.status;
                self.put(bio);
                self.commit_step_done(kind, status);
            }
        }
    }

    fn read_done(&mut self, copy: usize, mut bio: Box<Bio>) {
        if !bio.status.is_ok() {
            self.fail_copy(copy, SOURCE, bio.status);
        }
        if self.copies[copy].failed {
            self.piece_done(copy, bio.data.len());
            return self.put(bio);
        }
        (bio.op, bio.flags) = (Op::Write, BioFlags::empty());
        let is_hole = self.state.destination_holes.contain(bio.sector.0, bio.end().0);
        if (is_hole || self.keeps_holes) && bio.data.iter().all(|buf| is_zero(buf)) {
            if is_hole {
                self.piece_done(copy, bio.data.len());
                return self.put(bio);
            }
            bio.op = Op::WriteZeroes;
            std::mem::take(&mut bio.data).into_iter().for_each(|buf| self.bufs.put(buf));
        }
        bio.cookie = self.requests.insert(EngineRequestKind::Write { copy }) as u64;
        self.out.push((DESTINATION, bio));
    }

    /// A piece of a copy has failed at a device. Writes that wait for the copy now fail; later ones
    /// wait for its other pieces, and try again.
    fn fail_copy(&mut self, index: usize, device: usize, status: Status) {
        self.state.add_copy_error(device == SOURCE);
        let copy = &mut self.copies[index];
        let (first, count) = (copy.first, copy.count);
        self.state.set_copy_failure(CopyFailure { device, status, region: first });
        if !std::mem::replace(&mut copy.failed, true) {
            self.failed.push((first, count));
            tracing::error!("{}: hydration failed: regions {first} +{count}", self.state.name());
        }
    }

    fn piece_done(&mut self, index: usize, bytes: usize) {
        self.bytes -= bytes;
        let copy = &mut self.copies[index];
        copy.in_flight -= 1;
        if copy.failed && copy.at < copy.end {
            copy.at = copy.end;
            self.ready.retain(|ready| *ready != index);
        }
        if copy.in_flight > 0 || copy.at < copy.end {
            return;
        }
        let RegionCopy { first, count, failed, .. } = self.copies.remove(index);
        if !failed {
            self.state.clear_copy_failure();
        }
        // As in the kernel: with metadata that cannot be written, no bit is set.
        let sets = !failed && self.state.mode() == MetadataMode::ReadWrite;
        for region in first..first + count {
            self.end_claim(region, sets);
        }
        if !sets && !failed {
            self.failed.push((first, count));
        }
    }

    /// Ends the claim of a region that is being hydrated. `sets` says whether it is hydrated now.
    pub(super) fn end_claim(&mut self, region: u64, sets: bool) {
        match sets {
            true => self.state.set_hydrated(region),
            false => self.state.map.release(region),
        }
        self.state.sub_hydrating(1);
        self.wake_due = true;
    }

    /// The regions whose copies failed since the last call, as first and count.
    pub(super) fn take_failed(&mut self) -> Vec<(u64, u64)> {
        std::mem::take(&mut self.failed)
    }

    /// Wakes those who wait for regions whose claims have ended.
    pub(super) fn wake_waiters(&mut self) {
        if std::mem::take(&mut self.wake_due) {
            self.state.wait_queue.wake_up();
        }
    }

    fn put(&mut self, mut bio: Box<Bio>) {
        bio.status = Status::Ok;
        for buf in std::mem::take(&mut bio.data) {
            self.bufs.put(buf);
        }
        self.pool.put(bio);
    }
}

/// True if all bytes are zeroes. Blocks without an early end are compared by vector instructions.
fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(256).all(|block| block.iter().fold(0, |all, byte| all | byte) == 0)
}

/// An engine that is dropped with work in flight must not stop the others.
impl Drop for HydrationEngine {
    fn drop(&mut self) {
        for (_, RegionCopy { first, count, .. }) in std::mem::take(&mut self.copies) {
            (first..first + count).for_each(|region| self.end_claim(region, false));
        }
        self.abandon_commit();
        self.wake_waiters();
    }
}
