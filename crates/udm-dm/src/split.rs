//! Bios in several pieces: fragments that a lane makes itself, and the bio that they are parts of.
//!
//! A [`Splitter`] keeps the bios that can't go down whole (the parents). What their pieces are, a
//! [`SplitBio`] says; the splitter fills in fragments, counts them home, and gives the parent back as it
//! came, with the first error of its pieces. Data is cut off the parent ([`Segments::split_to`])
//! and joined again in order, so nothing is copied.
//!
//! Contract: fragments come from a bounded pool of this splitter alone. A parent that gets none
//! waits until one is home; those in flight are in the hands of layers below, which never wait for
//! this one, so splitters on top of each other cannot block each other.
//!
//! Parents take turns: [`QUANTUM`] fragments each, round and round, and none holds more than
//! [`SHARE_MAX`] at a time. So what is short waits for what is under way and for one turn of each
//! parent before it, however long those are. Flushes have a round of their own, every other turn is
//! theirs: they move no data and somebody waits for them.
//!
//! It does no I/O: the lane that holds it submits what [`Splitter::pump`] emits and hands what came
//! back to [`Splitter::collect`].

use std::collections::VecDeque;
use udm_core::bugs::{self, Bug};
use udm_core::{Batch, Bio, BioFlags, BioPool, Op, OwnerId, SECTOR_SIZE, Sector, Sectors, Segments, Status};

/// Fragments that one splitter may have in flight.
pub const FRAGMENTS_MAX: usize = 256;

/// Fragments that one parent may have in flight: deeper than any disk's queue needs, and a quarter
/// of the pool, so that a lone long parent leaves room for whoever comes next.
const SHARE_MAX: usize = 64;

/// Fragments that a parent emits in one turn. A turn costs a push and a pop of a queue; this many
/// make that small beside the fragments.
const QUANTUM: usize = 8;

/// One piece of a parent.
#[derive(Clone, Copy, Debug)]
pub struct SplitPiece {
    /// Which of the lanes below gets it.
    pub leg: usize,
    /// The operation: the parent's, or a flush around it.
    pub op: Op,
    /// Its flags.
    pub flags: BioFlags,
    /// First sector, as the lane below counts.
    pub sector: Sector,
    /// Length. Pieces of the parent's own operation that carry data come in the order of the data,
    /// without gaps.
    pub sectors: Sectors,
}

/// What comes next for a parent.
pub enum SplitStep {
    /// This piece, now.
    SplitPiece(SplitPiece),
    /// Nothing until all pieces so far are home; after an error nothing more at all.
    Wait,
    /// No more pieces.
    End,
}

/// How far a parent has got; its meaning is the [`SplitBio`]'s. All start at 0.
#[derive(Clone, Copy, Debug, Default)]
pub struct SplitCursor {
    /// Which part of the work (flush before, data, flush behind).
    pub stage: u8,
    /// Which of the pieces for the same part of its range is next.
    pub part: u32,
    /// How much of it is handed out.
    pub at: u64,
}

/// Says what the pieces of a bio are.
pub trait SplitBio {
    /// The next step for `bio`, whose fields but the data are as they came; moves `cursor` on.
    fn next(&self, bio: &Bio, cursor: &mut SplitCursor) -> SplitStep;
}

#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum ParentState {
    /// More pieces to come; in a queue of those that are ready.
    #[default]
    Issuing,
    /// More pieces to come, and its share of fragments in flight: ready when one is home.
    AtShareLimit,
    /// At a [`SplitStep::Wait`].
    Waiting,
    /// All pieces are out.
    Ended,
}

#[derive(Default)]
struct SplitParent {
    bio: Option<Box<Bio>>,
    state: ParentState,
    cursor: SplitCursor,
    status: Status,
    /// A piece was handed back unstarted: the whole goes back.
    handed_back: bool,
    in_flight: usize,
    /// The number of the first entry of `pieces`.
    first: u32,
    /// For each piece from `first` on: its data, or `None` while in flight.
    pieces: VecDeque<Option<Segments>>,
    /// The data of all pieces before `first`, joined.
    joined: Segments,
}

/// See the module's documentation.
pub struct Splitter {
    owner: OwnerId,
    pool: BioPool,
    /// Bios from above: parents, and those that wait to be handed out.
    held: usize,
    parents: Vec<SplitParent>,
    free: Vec<u32>,
    /// Whose turn it is to emit fragments.
    ready: VecDeque<u32>,
    /// The same, of flushes.
    flushes: VecDeque<u32>,
    /// The turn is a flush's, if there is one.
    flush_turn: bool,
    finished: Batch,
    returned: Batch,
}

impl Splitter {
    /// A splitter whose fragments carry `owner`.
    pub fn new(owner: OwnerId) -> Splitter {
        Splitter {
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

    /// True when it holds no bio: nothing to collect, pump or hand out.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.held == 0
    }

    /// Takes a bio to be cut. [`Splitter::pump`] comes next.
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
        // The deque is empty and keeps its room.
        debug_assert!(parent.pieces.is_empty() && parent.in_flight == 0);
        parent.bio = Some(bio);
        parent.state = ParentState::Issuing;
        parent.cursor = SplitCursor::default();
        parent.status = Status::Ok;
        parent.handed_back = false;
        parent.first = 0;
        self.queue(index);
    }

    /// Puts a parent that has pieces to emit behind the others.
    fn queue(&mut self, index: u32) {
        let parent = &mut self.parents[index as usize];
        parent.state = ParentState::Issuing;
        let flush = parent.bio.as_deref().is_some_and(|bio| bio.op == Op::Flush);
        let queue = if flush { &mut self.flushes } else { &mut self.ready };
        queue.push_back(index);
    }

    /// The parent whose turn it is.
    fn next(&mut self) -> Option<u32> {
        self.flush_turn = !self.flush_turn;
        let (first, second) = match self.flush_turn {
            true => (&mut self.ready, &mut self.flushes),
            false => (&mut self.flushes, &mut self.ready),
        };
        first.pop_front().or_else(|| second.pop_front())
    }

    /// Ends a bio that never went down; it is handed out with the finished ones.
    pub fn end(&mut self, mut bio: Box<Bio>, status: Status) {
        bio.status = status;
        self.held += 1;
        self.finished.push(bio);
    }

    /// Emits the pieces that can go now: `emit(leg, fragment)`.
    pub fn pump(&mut self, cut: &impl SplitBio, mut emit: impl FnMut(usize, Box<Bio>)) {
        while self.pool.available() > 0 {
            let Some(index) = self.next() else { return };
            self.parents[index as usize].state = self.turn(index, cut, &mut emit);
            match self.parents[index as usize].state {
                ParentState::Issuing => self.queue(index),
                _ => self.advance(index),
            }
        }
    }

    /// A turn of one parent; how it stands behind it.
    fn turn(
        &mut self,
        index: u32,
        cut: &impl SplitBio,
        emit: &mut impl FnMut(usize, Box<Bio>),
    ) -> ParentState {
        for _ in 0..QUANTUM.min(self.pool.available()) {
            let parent = &mut self.parents[index as usize];
            if parent.in_flight >= SHARE_MAX {
                return ParentState::AtShareLimit;
            }
            let bio = parent.bio.as_deref_mut().expect("a parent that is ready has its bio");
            let piece = loop {
                match cut.next(bio, &mut parent.cursor) {
                    SplitStep::SplitPiece(piece) => break piece,
                    SplitStep::Wait if parent.in_flight == 0 && parent.status.is_ok() => {}
                    SplitStep::Wait => return ParentState::Waiting,
                    SplitStep::End => return ParentState::Ended,
                }
            };
            if bugs::on(Bug::SplitLosesTail)
                && piece.op == bio.op
                && parent.pieces.len() > 1
                && bio.data.len() as u64 == piece.sectors.bytes()
            {
                return ParentState::Ended;
            }
            let fragment = self.pool.get().expect("one is available");
            emit(piece.leg, parent.fragment(fragment, index, self.owner, &piece));
        }
        ParentState::Issuing
    }

    /// Takes this splitter's fragments out of `done[from..]`. Others stay; their order may change.
    pub fn collect(&mut self, done: &mut Batch, from: usize) {
        self.collect_fragments(done, from, false);
    }

    /// As [`Splitter::collect`], for bios that a lane below handed back unstarted.
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

    /// Moves the bios that are whole again to `done`.
    pub fn take_finished(&mut self, done: &mut Batch) {
        self.held -= self.finished.len();
        done.append(&mut self.finished);
    }

    /// True when bios wait for [`Splitter::take_returned`], in the next `drain`: one is due even if
    /// nothing else happens.
    pub fn has_returned(&self) -> bool {
        !self.returned.is_empty() && !bugs::on(Bug::NoWakeForDrain)
    }

    /// Called when a `poll` begins. The `drain` before it has taken what was to be handed back, as
    /// long as there is one: what is left was meant for a suspend that has been called off, and
    /// goes down again.
    pub fn requeue_returned(&mut self) {
        if bugs::on(Bug::CancelStrandsReturned) {
            return;
        }
        while let Some(bio) = self.returned.pop() {
            self.held -= 1;
            self.take(bio);
        }
    }

    /// Moves the bios that are to be handed back to `reverse_map`.
    pub fn take_returned(&mut self, back: &mut Batch) {
        self.held -= self.returned.len();
        back.append(&mut self.returned);
    }

    fn complete_fragment(&mut self, mut fragment: Box<Bio>, handed_back: bool) {
        fragment.finish();
        let (index, number) = ((fragment.cookie >> 32) as u32, fragment.cookie as u32);
        let parent = &mut self.parents[index as usize];
        parent.in_flight -= 1;
        if handed_back && !bugs::on(Bug::HandedBackIsDone) {
            debug_assert!(fragment.status.is_ok(), "what was not done has no status: {fragment:?}");
            // The whole goes back: no more pieces.
            if parent.state == ParentState::Issuing {
                self.ready.retain(|&i| i != index);
                self.flushes.retain(|&i| i != index);
            }
            parent.handed_back = true;
            parent.state = ParentState::Ended;
        }
        if parent.status.is_ok() && !bugs::on(Bug::PieceErrorLost) {
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

    /// Moves a parent on whose pieces may all be home.
    fn advance(&mut self, index: u32) {
        let parent = &mut self.parents[index as usize];
        match parent.state {
            ParentState::Issuing => return,
            ParentState::AtShareLimit if parent.in_flight < SHARE_MAX => return self.queue(index),
            _ if parent.in_flight > 0 => return,
            ParentState::Waiting if parent.status.is_ok() => return self.queue(index),
            ParentState::AtShareLimit | ParentState::Waiting | ParentState::Ended => {}
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
        owner: OwnerId,
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
        // A bio for devices that store nothing may come without data.
        if piece.op.has_data() && !bio.data.is_empty() {
            fragment.data = bio.data.split_to((piece.sectors.0 * SECTOR_SIZE) as usize);
        }
        fragment.start();
        fragment
    }
}
