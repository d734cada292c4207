//! Requests in flight in a watched lane, and the copies that it sends for reads.

use slab::Slab;
use smallvec::SmallVec;
use std::collections::VecDeque;
use udm_core::{Batch, Bio, BioOwnerId, BufPool, Nanos, Segments};

/// Maximum bytes of all copies of a lane, including copies on hanging paths. A read that does not
/// fit is sent itself.
const MEMORY_MAX: usize = 32 << 20;
/// Maximum bytes of completed copies that are kept for reuse.
const KEPT_MAX: usize = 4 << 20;

/// A bio in flight on a path.
pub(super) struct PathInFlightBio {
    /// Unique within a lane.
    pub(super) serial: u64,
    pub(super) path: usize,
    /// Time when the bio was sent.
    pub(super) at: Nanos,
    pub(super) kind: PathInFlightBioKind,
}

/// The kind of a bio in flight.
#[derive(Clone, Copy)]
pub(super) enum PathInFlightBioKind {
    /// The original bio: a write, a flush, or a read whose copy did not fit.
    Original {
        /// The cookie set by the owner of the bio.
        cookie: u64,
        /// The deadline has passed and the bio was counted as late.
        late: bool,
    },
    /// A copy of a read.
    Copy {
        /// The read; `None` if the answer is no longer needed.
        read: Option<usize>,
        role: PathReadReason,
    },
}

/// The reason why a copy was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PathReadReason {
    /// The path was chosen for the read.
    Own,
    /// The chosen path takes too long.
    Hedge,
    /// A trial read on an ejected path.
    EjectionTrial,
}

/// An original read whose copies are in flight.
pub(super) struct ReadAwaitingCopies {
    pub(super) bio: Box<Bio>,
    /// The path chosen for the read.
    pub(super) child: usize,
    /// The slot of the copy on the chosen path.
    pub(super) own: usize,
    /// The slot of the hedge.
    pub(super) hedge: Option<usize>,
    /// The paths to which hedges of the read were sent.
    pub(super) hedge_paths: SmallVec<[usize; 2]>,
}

/// Slots in the order of their sending.
#[derive(Default)]
pub(super) struct BioSendTimeQueue(VecDeque<BioSendTime>);

/// The time at which a slot was sent, and its identity.
#[derive(Clone, Copy)]
pub(super) struct BioSendTime {
    pub(super) at: Nanos,
    pub(super) slot: usize,
    pub(super) serial: u64,
}

impl BioSendTime {
    /// True if the answer is still needed.
    fn is_waited_for(&self, slots: &Slab<PathInFlightBio>) -> bool {
        slots.get(self.slot).is_some_and(|slot| {
            slot.serial == self.serial
                && !matches!(
                    slot.kind,
                    PathInFlightBioKind::Copy {
                        read: None,
                        role: PathReadReason::Own | PathReadReason::Hedge
                    }
                )
        })
    }
}

impl BioSendTimeQueue {
    /// Appends a slot. If the queue is much longer than `in_flight`, finished slots are removed
    /// first, so that one hanging request does not keep them.
    pub(super) fn push(&mut self, sent: BioSendTime, in_flight: usize, slots: &Slab<PathInFlightBio>) {
        if self.0.len() >= 64 + 2 * in_flight {
            self.0.retain(|sent| sent.is_waited_for(slots));
        }
        self.0.push_back(sent);
    }

    /// The oldest slot whose answer is still needed.
    pub(super) fn first(&mut self, slots: &Slab<PathInFlightBio>) -> Option<BioSendTime> {
        while let Some(sent) = self.0.front() {
            if sent.is_waited_for(slots) {
                return Some(*sent);
            }
            self.0.pop_front();
        }
        None
    }

    /// Removes the oldest slot.
    pub(super) fn pop(&mut self) {
        self.0.pop_front();
    }
}

/// Copies of reads. Each has its own memory, so that a late answer overwrites nothing else.
pub(super) struct ReadCopyPool {
    pub(super) owner: BioOwnerId,
    memory: BufPool,
    free_bios: Batch,
}

impl ReadCopyPool {
    pub(super) fn new(owner: BioOwnerId) -> ReadCopyPool {
        ReadCopyPool { owner, memory: BufPool::new(KEPT_MAX), free_bios: Batch::new() }
    }

    /// A copy of `bio`; `None` if it does not fit into the memory limit.
    pub(super) fn of(&mut self, bio: &Bio) -> Option<Box<Bio>> {
        let len = bio.data.len();
        if self.memory.total_bytes() + self.memory.growth(len) > MEMORY_MAX {
            return None;
        }
        let mut copy = self.free_bios.pop().unwrap_or_default();
        (copy.op, copy.flags, copy.owner) = (bio.op, bio.flags, self.owner);
        (copy.sector, copy.sectors, copy.started) = (bio.sector, bio.sectors, bio.started);
        copy.data = self.memory.get_pieces(len);
        copy.start();
        Some(copy)
    }

    /// Takes back a completed copy.
    pub(super) fn give_back(&mut self, mut copy: Box<Bio>) {
        std::mem::take(&mut copy.data).into_iter().for_each(|piece| self.memory.put(piece));
        self.free_bios.push(copy);
    }
}

/// Copies `from`, the data of a copy, into `to`.
pub(super) fn copy_segments(from: &Segments, to: &mut Segments) {
    let len = from.len();
    from.consume(0, len, |at, part| {
        to.copy_from_at(at, part);
    });
}
