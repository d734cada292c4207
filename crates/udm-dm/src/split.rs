//! Splitting of bios: fragments that a lane creates itself, and the parent bio to which they
//! belong.
//!
//! A [`BioSplitter`] holds the bios that cannot go down whole (the parents). A [`BioSplitRule`]
//! defines their pieces. The splitter fills in fragments, counts them, and gives the parent back
//! unchanged, with the first error of its fragments. Data is cut off the parent
//! ([`Segments::split_to`]) and joined again in order, so nothing is copied.
//!
//! Contract: fragments come from a bounded pool that belongs to one splitter. If the pool is empty,
//! a parent waits until a fragment completes. The fragments in flight belong to layers below, which
//! never wait for this splitter. So splitters on top of each other cannot block each other.
//!
//! Parents take turns of [`QUANTUM`] fragments. None holds more than [`SHARE_MAX`] fragments at a
//! time. So a short parent waits only for fragments in flight and for one turn of each parent
//! before it. Flushes have their own queue, which gets every other turn: they move no data, and
//! clients wait for them.
//!
//! The splitter does no I/O. The lane that owns it submits the fragments that [`BioSplitter::pump`]
//! emits, and passes completed fragments to [`BioSplitter::collect`].

use std::collections::VecDeque;
use udm_core::{
    Batch, Bio, BioFlags, BioOwnerId, BioPool, Op, SECTOR_SIZE, Sector, Sectors, Segments, Status,
};

/// Maximum number of fragments that one splitter has in flight.
pub const FRAGMENTS_MAX: usize = 256;

/// Maximum number of fragments that one parent has in flight. This is deeper than a disk's queue
/// needs. It is a quarter of the pool, so one long parent leaves room for others.
const SHARE_MAX: usize = 64;

/// Fragments that a parent emits in one turn. A turn costs a push and a pop of a queue, which is
/// small beside this many fragments.
const QUANTUM: usize = 8;

/// One piece of a parent.
#[derive(Clone, Copy, Debug)]
pub struct SplitPiece {
    /// The child that gets the piece.
    pub child: usize,
    /// The operation: that of the parent, or a flush before or after it.
    pub op: Op,
    /// Flags of the fragment.
    pub flags: BioFlags,
    /// First sector, in the address space of the child.
    pub sector: Sector,
    /// Length. Pieces with data come in the order of the data, without gaps.
    pub sectors: Sectors,
}

/// The next step of splitting a parent.
pub enum NextBioSplitStep {
    /// Emit this piece now.
    Piece(SplitPiece),
    /// Wait until all pieces so far have completed. After an error, no more pieces follow.
    Wait,
    /// There are no more pieces.
    End,
}

/// Progress of splitting a parent. The [`BioSplitRule`] defines the meaning; all fields start at 0.
#[derive(Clone, Copy, Debug, Default)]
pub struct SplitCursor {
    /// The stage of the work (flush before, data, flush after).
    pub stage: u8,
    /// The next piece, if a part of the range has several.
    pub part: u32,
    /// How much of the range is emitted.
    pub at: u64,
}

/// Defines the pieces of a bio.
pub trait BioSplitRule {
    /// Returns the next step for `bio` and advances `cursor`. All fields of `bio` except its data
    /// are unchanged.
    fn next(&self, bio: &Bio, cursor: &mut SplitCursor) -> NextBioSplitStep;
}

#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum SplitParentState {
    /// More pieces will come; the parent is in a ready queue.
    #[default]
    Issuing,
    /// More pieces will come, but the parent has reached its share of fragments. It is ready when
    /// one completes.
    AtShareLimit,
    /// At a [`NextBioSplitStep::Wait`]: waits for all pieces so far.
    Waiting,
    /// All pieces were emitted.
    Ended,
}

#[derive(Default)]
struct SplitParent {
    bio: Option<Box<Bio>>,
    state: SplitParentState,
    cursor: SplitCursor,
    status: Status,
    /// True if a lane below handed a piece back: the whole parent is handed back.
    handed_back: bool,
    in_flight: usize,
    /// The number of the first entry in `pieces`.
    first: u32,
    /// The data of each piece from `first` on; `None` while the piece is in flight.
    pieces: VecDeque<Option<Segments>>,
    /// The joined data of all pieces before `first`.
    joined: Segments,
}

/// The parents of a lane, and the pool of their fragments.
pub struct BioSplitter {
    owner: BioOwnerId,
    pool: BioPool,
    /// Number of bios from above: parents, and bios that wait to be handed out.
    held: usize,
    parents: Vec<SplitParent>,
    free: Vec<u32>,
    /// Parents that are ready to emit fragments, without flushes.
    ready: VecDeque<u32>,
    /// Flushes that are ready to emit fragments.
    flushes: VecDeque<u32>,
    /// Toggles per turn, so that flushes get every other turn.
    flush_turn: bool,
    finished: Batch,
    returned: Batch,
}

impl BioSplitter {
    /// Creates a splitter; its fragments carry `owner`.
    pub fn new(owner: BioOwnerId) -> BioSplitter {
        BioSplitter {
            owner,
            pool: BioPool::new(FRAGMENTS_MAX),
            held: 0,
            parents: Vec::new(),
            free: Vec::new(),
            ready: VecDeque::new(),
            flushes: VecDeque::new(),
            flush_turn: true,
            finished: Batch::new(),
            returned: Batch::new(),
        }
    }

    /// True if the splitter holds no bio, so there is nothing to collect, pump or hand out.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.held == 0
    }

    /// Takes a bio to be split. The caller must call [`BioSplitter::pump`] next.
    pub fn take(&mut self, bio: Box<Bio>) {
        if bio.flags.contains(BioFlags::NOWAIT) && self.pool.available() == 0 {
            return self.end(bio, Status::Again);
        }
        self.held += 1;
        let index = self.free.pop().unwrap_or_else(|| {
            self.parents.push(SplitParent::default());
            u32::try_from(self.parents.len() - 1).expect("parents are bounded by the bios above")
        });
        let parent = &mut self.parents[index as usize];
        // The deque is empty and keeps its capacity.
        debug_assert!(parent.pieces.is_empty() && parent.in_flight == 0);
        parent.bio = Some(bio);
        parent.state = SplitParentState::Issuing;
        parent.cursor = SplitCursor::default();
        parent.status = Status::Ok;
        parent.handed_back = false;
        parent.first = 0;
        self.queue(index);
    }

    /// Queues a parent that has pieces to emit after the others.
    fn queue(&mut self, index: u32) {
        let parent = &mut self.parents[index as usize];
        parent.state = SplitParentState::Issuing;
        let flush = parent.bio.as_deref().is_some_and(|bio| bio.op == Op::Flush);
        let queue = if flush { &mut self.flushes } else { &mut self.ready };
        queue.push_back(index);
    }

    /// The parent that has the next turn.
    fn next(&mut self) -> Option<u32> {
        self.flush_turn = !self.flush_turn;
        let (first, second) = match self.flush_turn {
            true => (&mut self.ready, &mut self.flushes),
            false => (&mut self.flushes, &mut self.ready),
        };
        first.pop_front().or_else(|| second.pop_front())
    }

    /// Ends a bio that was never submitted. It is handed out with the finished bios.
    pub fn end(&mut self, mut bio: Box<Bio>, status: Status) {
        bio.status = status;
        self.held += 1;
        self.finished.push(bio);
    }

    /// Emits the pieces that can go now: `emit(child, fragment)`.
    pub fn pump(&mut self, cut: &impl BioSplitRule, mut emit: impl FnMut(usize, Box<Bio>)) {
        while self.pool.available() > 0 {
            let Some(index) = self.next() else { return };
            self.parents[index as usize].state = self.turn(index, cut, &mut emit);
            match self.parents[index as usize].state {
                SplitParentState::Issuing => self.queue(index),
                _ => self.advance(index),
            }
        }
    }

    /// Emits up to [`QUANTUM`] fragments of one parent. Returns its new state.
    fn turn(
        &mut self,
        index: u32,
        cut: &impl BioSplitRule,
        emit: &mut impl FnMut(usize, Box<Bio>),
    ) -> SplitParentState {
        for _ in 0..QUANTUM.min(self.pool.available()) {
            let parent = &mut self.parents[index as usize];
            if parent.in_flight >= SHARE_MAX {
                return SplitParentState::AtShareLimit;
            }
            let bio = parent.bio.as_deref_mut().expect("a parent that is ready has its bio");
            let piece = loop {
                match cut.next(bio, &mut parent.cursor) {
                    NextBioSplitStep::Piece(piece) => break piece,
                    NextBioSplitStep::Wait if parent.in_flight == 0 && parent.status.is_ok() => {}
                    NextBioSplitStep::Wait => return SplitParentState::Waiting,
                    NextBioSplitStep::End => return SplitParentState::Ended,
                }
            };
            let fragment = self.pool.get().expect("one is available");
            emit(piece.child, parent.fragment(fragment, index, self.owner, &piece));
        }
        SplitParentState::Issuing
    }

    /// Takes this splitter's fragments out of `done[from..]`. Other bios stay; their order may
    /// change.
    pub fn collect(&mut self, done: &mut Batch, from: usize) {
        self.collect_fragments(done, from, false);
    }

    /// As [`BioSplitter::collect`], for bios that a lane below handed back unstarted.
    pub fn collect_returned(&mut self, back: &mut Batch, from: usize) {
        self.collect_fragments(back, from, true);
    }

    fn collect_fragments(&mut self, batch: &mut Batch, from: usize, handed_back: bool) {
        let mut i = from;
        while i < batch.len() {
            if batch[i].owner == self.owner {
                let fragment = batch.swap_remove(i);
                self.complete_fragment(fragment, handed_back);
            } else {
                i += 1;
            }
        }
    }

    /// Moves finished parents to `done`.
    pub fn take_finished(&mut self, done: &mut Batch) {
        self.held -= self.finished.len();
        done.append(&mut self.finished);
    }

    /// True if bios wait for [`BioSplitter::take_returned`] in the next `drain`. The lane must then
    /// wake itself.
    pub fn has_returned(&self) -> bool {
        !self.returned.is_empty()
    }

    /// Called when a `poll` begins. During a suspend, the preceding `drain` took all returned bios.
    /// If bios are left, the suspend was cancelled, and they are submitted again.
    pub fn requeue_returned(&mut self) {
        while let Some(bio) = self.returned.pop() {
            self.held -= 1;
            self.take(bio);
        }
    }

    /// Moves the bios that must be handed back to `back`.
    pub fn take_returned(&mut self, back: &mut Batch) {
        self.held -= self.returned.len();
        back.append(&mut self.returned);
    }

    fn complete_fragment(&mut self, mut fragment: Box<Bio>, handed_back: bool) {
        fragment.finish();
        let (index, number) = ((fragment.cookie >> 32) as u32, fragment.cookie as u32);
        let parent = &mut self.parents[index as usize];
        parent.in_flight -= 1;
        if handed_back {
            debug_assert!(fragment.status.is_ok(), "what was not done has no status: {fragment:?}");
            // The whole parent is handed back, so it emits no more pieces.
            if parent.state == SplitParentState::Issuing {
                self.ready.retain(|&i| i != index);
                self.flushes.retain(|&i| i != index);
            }
            parent.handed_back = true;
            parent.state = SplitParentState::Ended;
        }
        if parent.status.is_ok() {
            parent.status = fragment.status;
        }
        let at = number.wrapping_sub(parent.first) as usize;
        parent.pieces[at] = Some(std::mem::take(&mut fragment.data));
        self.pool.put(fragment);
        while let Some(Some(data)) = parent.pieces.front_mut() {
            parent.joined.append(std::mem::take(data));
            parent.pieces.pop_front();
            parent.first = parent.first.wrapping_add(1);
        }
        self.advance(index);
    }

    /// Advances a parent after one of its pieces completed.
    fn advance(&mut self, index: u32) {
        let parent = &mut self.parents[index as usize];
        match parent.state {
            SplitParentState::Issuing => return,
            SplitParentState::AtShareLimit if parent.in_flight < SHARE_MAX => return self.queue(index),
            _ if parent.in_flight > 0 => return,
            SplitParentState::Waiting if parent.status.is_ok() => return self.queue(index),
            SplitParentState::AtShareLimit | SplitParentState::Waiting | SplitParentState::Ended => {}
        }
        let mut bio = parent.bio.take().expect("a parent has its bio until it is finished");
        parent.joined.append(std::mem::take(&mut bio.data));
        bio.data = std::mem::take(&mut parent.joined);
        bio.status = parent.status;
        let back = parent.handed_back && bio.status.is_ok();
        self.free.push(index);
        if back { self.returned.push(bio) } else { self.finished.push(bio) }
    }
}

impl SplitParent {
    /// Fills in a fragment for `piece`.
    fn fragment(
        &mut self,
        mut fragment: Box<Bio>,
        index: u32,
        owner: BioOwnerId,
        piece: &SplitPiece,
    ) -> Box<Bio> {
        let bio = self.bio.as_deref_mut().expect("the parent has its bio");
        let number = self.first.wrapping_add(self.pieces.len() as u32);
        self.pieces.push_back(None);
        self.in_flight += 1;
        fragment.op = piece.op;
        fragment.flags = piece.flags;
        fragment.owner = owner;
        fragment.sector = piece.sector;
        fragment.sectors = piece.sectors;
        fragment.cookie = u64::from(index) << 32 | u64::from(number);
        fragment.started = bio.started;
        // A bio for devices that store nothing may have no data.
        if piece.op.has_data() && !bio.data.is_empty() {
            fragment.data = bio.data.split_to((piece.sectors.0 * SECTOR_SIZE) as usize);
        }
        fragment.start();
        fragment
    }
}
