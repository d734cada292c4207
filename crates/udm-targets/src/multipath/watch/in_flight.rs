//! What a watched lane has in flight, and what a read that it hands down is a copy of.

use slab::Slab;
use smallvec::SmallVec;
use std::collections::VecDeque;
use udm_core::bugs::{self, Bug};
use udm_core::{Batch, Bio, BufPool, Nanos, OwnerId, Segments};

/// Bytes of copies that a lane has at the most, those that hang included. A read that finds no room
/// goes down itself.
const MEMORY_MAX: usize = 32 << 20;
/// Bytes of those that are kept for the next.
const KEPT_MAX: usize = 4 << 20;

/// A bio on a path.
pub(super) struct InFlightSlot {
    /// No two of a lane have the same.
    pub(super) serial: u64,
    pub(super) path: usize,
    /// When it was sent.
    pub(super) at: Nanos,
    pub(super) what: SlotKind,
}

/// What is on the path.
#[derive(Clone, Copy)]
pub(super) enum SlotKind {
    /// The bio from above: a write, a flush, or a read for whose copy there was no room.
    Original {
        /// As its maker set it.
        cookie: u64,
        /// The deadline is over, and it has been counted.
        late: bool,
    },
    /// A copy of a read.
    Copy {
        /// Of which; nothing where nobody waits for the answer any more.
        read: Option<usize>,
        role: CopyRole,
    },
}

/// Why a copy was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyRole {
    /// The path was chosen for the read.
    Own,
    /// The path that was chosen takes long.
    Hedge,
    /// To see how a path on probation does.
    EjectionTrial,
}

/// A read from above, whose copies are on their way.
pub(super) struct CopiedRead {
    pub(super) bio: Box<Bio>,
    /// The path that was chosen for it.
    pub(super) leg: usize,
    /// The slot of its copy there.
    pub(super) own: usize,
    /// That of its hedge.
    pub(super) hedge: Option<usize>,
    /// The paths that hedges of it went to.
    pub(super) tried: SmallVec<[usize; 2]>,
}

/// Slots in the order in which they were sent: what waits for a time.
#[derive(Default)]
pub(super) struct SlotQueue(VecDeque<SentSlot>);

/// When a slot was sent, and which it was.
#[derive(Clone, Copy)]
pub(super) struct SentSlot {
    pub(super) at: Nanos,
    pub(super) slot: usize,
    pub(super) serial: u64,
}

impl SentSlot {
    /// Its answer is still waited for.
    fn is_waited_for(&self, slots: &Slab<InFlightSlot>) -> bool {
        slots.get(self.slot).is_some_and(|slot| {
            slot.serial == self.serial
                && !matches!(slot.what, SlotKind::Copy { read: None, role: CopyRole::Own | CopyRole::Hedge })
        })
    }
}

impl SlotQueue {
    /// `in_flight` says which of the others are through: those are forgotten now and then, so that one
    /// that hangs keeps no row of them.
    pub(super) fn push(&mut self, sent: SentSlot, in_flight: usize, slots: &Slab<InFlightSlot>) {
        if self.0.len() >= 64 + 2 * in_flight {
            self.0.retain(|sent| sent.is_waited_for(slots));
        }
        self.0.push_back(sent);
    }

    /// The oldest that is waited for.
    pub(super) fn first(&mut self, slots: &Slab<InFlightSlot>) -> Option<SentSlot> {
        while let Some(sent) = self.0.front() {
            if sent.is_waited_for(slots) {
                return Some(*sent);
            }
            self.0.pop_front();
        }
        None
    }

    /// Takes the oldest off.
    pub(super) fn pop(&mut self) {
        self.0.pop_front();
    }
}

/// Copies of reads, each with memory of its own, so that an answer that comes late lands nowhere
/// else.
pub(super) struct ReadCopies {
    pub(super) owner: OwnerId,
    memory: BufPool,
    spare: Batch,
}

impl ReadCopies {
    pub(super) fn new(owner: OwnerId) -> ReadCopies {
        ReadCopies { owner, memory: BufPool::new(KEPT_MAX), spare: Batch::new() }
    }

    /// A copy of `bio`; nothing where there is no room.
    pub(super) fn of(&mut self, bio: &Bio) -> Option<Box<Bio>> {
        let len = bio.data.len();
        if self.memory.held() + self.memory.growth(len) > MEMORY_MAX {
            return None;
        }
        let mut copy = self.spare.pop().unwrap_or_default();
        (copy.op, copy.flags, copy.owner) = (bio.op, bio.flags, self.owner);
        (copy.sector, copy.sectors, copy.started) = (bio.sector, bio.sectors, bio.started);
        copy.data = self.memory.get_pieces(len);
        if bugs::on(Bug::WriteGivenUp) {
            copy_segments(&bio.data, &mut copy.data);
        }
        copy.start();
        Some(copy)
    }

    /// Takes a copy back that is home.
    pub(super) fn give_back(&mut self, mut copy: Box<Bio>) {
        std::mem::take(&mut copy.data).into_iter().for_each(|piece| self.memory.put(piece));
        self.spare.push(copy);
    }
}

/// Copies `from`, whose pieces are a copy's own, into `to`.
pub(super) fn copy_segments(from: &Segments, to: &mut Segments) {
    let len = from.len();
    from.consume(0, len, |at, part| {
        to.copy_from_at(at, part);
    });
}
