//! Path selectors: they choose the path of a group that a bio takes.
//!
//! A selector has two halves. The [`SharedPathSelector`] is shared by all cores: arguments of the
//! paths, printed text, and for some selectors a number per path on its own cache line. The
//! [`SelectorLane`] belongs to one core: the order of the usable paths. It reads the shared numbers
//! once per batch, chooses for the whole batch on its own copy, and publishes the change once per
//! poll. A request that was sent and completed within one turn is never published. So cores with
//! fast paths exchange no cache lines.
//!
//! [`SelectorLane`] is an enum, so that a choice needs no virtual call. [`SELECTORS`] lists the
//! types. On one core the sequence of choices is the kernel's, checked against a recording. A
//! selector numbers the paths of its group from 0, in the order of the table.

mod historical_service_time;
mod io_affinity;
mod load;
mod queue_length;
mod rotation;
mod round_robin;
mod service_time;

use super::reaped_paths::CompletedPathBios;
use std::ops::Range;
use std::sync::Arc;
use udm_core::{Batch, Bio, CoreId, Cx, Sectors};
use udm_dm::child_lanes::{ChildLaneDispatcher, ChildLanes};

/// A selector without paths, or the index of the invalid argument.
type CreatePathSelectorResult = Result<Box<dyn SharedPathSelector>, usize>;

/// An entry of the list of selectors.
pub struct SelectorType {
    /// The name in tables; case-sensitive.
    pub name: &'static str,
    /// Creates the selector of one group from its arguments.
    pub(super) new: fn(args: &[String]) -> CreatePathSelectorResult,
}

/// All path selectors.
pub const SELECTORS: &[SelectorType] = &[
    round_robin::TYPE,
    queue_length::TYPE,
    service_time::TYPE,
    historical_service_time::TYPE,
    io_affinity::TYPE,
];

/// An error in a path's arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PathArgError {
    /// The kernel's text after `<selector> ps: `.
    pub(super) text: &'static str,
    /// The index of the invalid argument.
    pub(super) arg: usize,
}

/// The part of a selector that the cores share, for one group of one table.
pub(super) trait SharedPathSelector: Send + Sync {
    /// The name in tables.
    fn name(&self) -> &'static str;

    /// Adds the next path of the group. `cores` is the number of cores, for selectors that choose
    /// by core.
    ///
    /// # Errors
    /// If the arguments are invalid.
    fn add_path(&mut self, args: &[String], cores: usize) -> Result<(), PathArgError>;

    /// The selector's own arguments as `table` and `status` print them: their number and the words.
    fn args(&self) -> String {
        String::from("0")
    }

    /// Number of words of [`SharedPathSelector::path_args`] per path; may be 0.
    fn path_arg_count(&self) -> usize;

    /// The arguments of `path` as `table` prints them, with defaults filled in.
    fn path_args(&self, path: usize) -> String;

    /// Number of words of [`SharedPathSelector::path_info`] per path.
    fn path_info_count(&self) -> usize {
        0
    }

    /// The text that `status` prints after a path's failure count.
    fn path_info(&self, path: usize) -> String {
        let _ = path;
        String::new()
    }

    /// The selector's part for one core. All paths are usable and in the table's order.
    fn lane(self: Arc<Self>, core: CoreId) -> SelectorLane;
}

/// The part of a selector that belongs to one core. An enum, because each bio needs a choice and a
/// virtual call would cost as much as the choice. It has an explicit tag, because a niche in a
/// field takes more instructions to read.
#[repr(u8)]
pub(super) enum SelectorLane {
    /// Paths take turns.
    RoundRobin(round_robin::RoundRobinLane),
    /// By the number of bios in flight.
    QueueLength(load::LoadBasedSelectorLane<queue_length::QueueLength>),
    /// By the bytes in flight.
    ServiceTime(load::LoadBasedSelectorLane<service_time::ServiceTime>),
    /// By past service times.
    Historical(historical_service_time::HistoricalServiceTimeLane),
    /// By the core.
    IoAffinity(io_affinity::IoAffinityLane),
}

/// The bios of a batch that are distributed to paths.
pub(super) trait BatchPathDispatch {
    /// Number of bios left.
    fn left(&self) -> usize;

    /// Takes the next bio.
    fn take(&mut self) -> Option<Box<Bio>>;

    /// Sends a taken bio to `path`.
    fn put(&mut self, path: usize, bio: Box<Bio>);

    /// Sends bios to the paths that `choose` returns. Stops at the first bio for which it returns
    /// `None`, and returns that bio.
    fn each(&mut self, choose: impl FnMut(&mut Bio) -> Option<usize>) -> Option<Box<Bio>>;

    /// Sends all bios to the two `paths`, to the second one if `second` returns true. Returns how
    /// many the second path got.
    fn between(self, paths: [usize; 2], second: impl FnMut(&mut Bio) -> bool) -> usize;
}

/// A batch that is distributed to the legs of a group.
struct PriorityGroupDispatch<'a> {
    deal: ChildLaneDispatcher<'a>,
    /// The leg of the group's first path.
    first: usize,
}

impl BatchPathDispatch for PriorityGroupDispatch<'_> {
    #[inline(always)]
    fn left(&self) -> usize {
        self.deal.left()
    }

    #[inline(always)]
    fn take(&mut self) -> Option<Box<Bio>> {
        self.deal.take()
    }

    #[inline(always)]
    fn put(&mut self, path: usize, bio: Box<Bio>) {
        self.deal.put(self.first + path, bio);
    }

    #[inline(always)]
    fn each(&mut self, mut choose: impl FnMut(&mut Bio) -> Option<usize>) -> Option<Box<Bio>> {
        let first = self.first;
        self.deal.each(|bio| choose(bio).map(|path| first + path))
    }

    #[inline(always)]
    fn between(self, paths: [usize; 2], mut second: impl FnMut(&mut Bio) -> bool) -> usize {
        self.deal.between(paths.map(|path| self.first + path), |bio| second(bio))
    }
}

/// The operations of a selector on one core.
pub(super) trait PathSelectorLaneOps {
    /// Marks a usable path as failed.
    fn fail(&mut self, path: usize);

    /// Marks an unusable path as usable. Paths that returned since the last refresh are passed in
    /// the order of their reinstatement.
    fn reinstate(&mut self, path: usize);

    /// Called before the choices for a batch, for selectors that read shared state once per batch.
    #[inline(always)]
    fn look(&mut self, cx: &Cx<'_>) {
        let _ = cx;
    }

    /// Returns a usable path for a bio that is a batch of its own. At least one path is usable.
    /// [`PathSelectorLaneOps::look`] gives the time; chance comes from a generator in the lane.
    fn choose(&mut self, bio: &mut Bio) -> usize;

    /// Chooses a path for each of `bios`, with the same result as calls of
    /// [`PathSelectorLaneOps::choose`] if nothing changes in between.
    fn choose_all(&mut self, bios: impl BatchPathDispatch);

    /// Accounts for `back`, bios of `path` that completed with or without error, with `sectors` in
    /// total; possibly none. Called once per poll in which bios of the path are in flight or
    /// complete. The selector publishes its changes to other cores here.
    #[inline(always)]
    fn polled(&mut self, path: usize, back: &[Box<Bio>], sectors: Sectors, cx: &Cx<'_>) {
        let _ = (path, back, sectors, cx);
    }

    /// As [`PathSelectorLaneOps::polled`], for one of several paths that are polled together, if
    /// all of its bios succeeded. [`PathSelectorLaneOps::end_reap`] is called after the last path.
    #[inline(always)]
    fn reaped(&mut self, path: usize, back: &[Box<Bio>], sectors: Sectors, cx: &Cx<'_>) {
        self.polled(path, back, sectors, cx);
    }

    /// Called after the last call of [`PathSelectorLaneOps::reaped`] in a poll.
    #[inline(always)]
    fn end_reap(&mut self, cx: &Cx<'_>) {
        let _ = cx;
    }
}

/// Evaluates `$do` with `$lane` bound to the lane in `$selector`.
macro_rules! each {
    ($selector:expr, $lane:ident => $do:expr) => {
        match $selector {
            SelectorLane::RoundRobin($lane) => $do,
            SelectorLane::QueueLength($lane) => $do,
            SelectorLane::ServiceTime($lane) => $do,
            SelectorLane::Historical($lane) => $do,
            SelectorLane::IoAffinity($lane) => $do,
        }
    };
}

impl SelectorLane {
    /// See [`PathSelectorLaneOps::fail`].
    pub(super) fn fail(&mut self, path: usize) {
        each!(self, lane => lane.fail(path));
    }

    /// See [`PathSelectorLaneOps::reinstate`].
    pub(super) fn reinstate(&mut self, path: usize) {
        each!(self, lane => lane.reinstate(path));
    }

    /// Submits each bio of `batch` to the leg of its chosen path; `first` is the leg of the first
    /// path. `batch` is empty afterwards.
    ///
    /// Three selectors are matched inline, here and in [`SelectorLane::polled`]. With all five, a
    /// single bio takes up to 10 instructions more.
    #[inline(always)]
    pub(super) fn deal(&mut self, batch: &mut Batch, first: usize, legs: &mut ChildLanes, cx: &mut Cx<'_>) {
        match self {
            SelectorLane::RoundRobin(lane) => dispatch_batch_to_paths(lane, batch, first, legs, cx),
            SelectorLane::QueueLength(lane) => dispatch_batch_to_paths(lane, batch, first, legs, cx),
            SelectorLane::ServiceTime(lane) => dispatch_batch_to_paths(lane, batch, first, legs, cx),
            other => other.dispatch_by_other(batch, first, legs, cx),
        }
    }

    #[inline(never)]
    fn dispatch_by_other(&mut self, batch: &mut Batch, first: usize, legs: &mut ChildLanes, cx: &mut Cx<'_>) {
        each!(self, lane => dispatch_batch_to_paths(lane, batch, first, legs, cx));
    }

    /// See [`PathSelectorLaneOps::polled`].
    #[inline(always)]
    pub(super) fn polled(&mut self, path: usize, back: &[Box<Bio>], sectors: Sectors, cx: &Cx<'_>) {
        match self {
            SelectorLane::RoundRobin(lane) => lane.polled(path, back, sectors, cx),
            SelectorLane::QueueLength(lane) => lane.polled(path, back, sectors, cx),
            SelectorLane::ServiceTime(lane) => lane.polled(path, back, sectors, cx),
            other => other.polled_by_other(path, back, sectors, cx),
        }
    }

    #[inline(never)]
    fn polled_by_other(&mut self, path: usize, back: &[Box<Bio>], sectors: Sectors, cx: &Cx<'_>) {
        each!(self, lane => lane.polled(path, back, sectors, cx));
    }

    /// Takes the completed bios of the legs set in `polled`, if a leg belongs to the group's
    /// `paths` and all of its bios succeeded ([`PathSelectorLaneOps::reaped`]). Returns the bits of
    /// the other legs.
    #[inline(always)]
    pub(super) fn reaped(
        &mut self,
        paths: Range<usize>,
        polled: u64,
        from: CompletedPathBios<'_>,
        cx: &Cx<'_>,
    ) -> u64 {
        each!(self, lane => reap_priority_group_bios(lane, paths, polled, from, cx))
    }
}

/// Not inlined, as the loop that chooses: so each has all registers.
#[inline(never)]
fn dispatch_batch_to_paths(
    lane: &mut impl PathSelectorLaneOps,
    batch: &mut Batch,
    first: usize,
    legs: &mut ChildLanes,
    cx: &mut Cx<'_>,
) {
    lane.look(cx);
    match &mut batch[..] {
        [only] => {
            let path = lane.choose(only);
            legs.submit(first + path, batch, cx);
        }
        _ => dispatch_many_bios_to_paths(lane, batch, first, legs, cx),
    }
}

/// Not inlined, one instance per selector: the loop has no match on the selector.
#[inline(never)]
fn reap_priority_group_bios(
    lane: &mut impl PathSelectorLaneOps,
    paths: Range<usize>,
    polled: u64,
    mut from: CompletedPathBios<'_>,
    cx: &Cx<'_>,
) -> u64 {
    let (first, mut rest, mut marks) = (paths.start, 0, polled);
    while marks != 0 {
        let (index, mark) = (marks.trailing_zeros() as usize, marks & marks.wrapping_neg());
        marks ^= mark;
        if paths.contains(&index)
            && let Some((back, sectors)) = from.take(index)
        {
            lane.reaped(index - first, back, sectors, cx);
        } else {
            rest |= mark;
        }
    }
    lane.end_reap(cx);
    rest
}

#[inline(never)]
fn dispatch_many_bios_to_paths(
    lane: &mut impl PathSelectorLaneOps,
    batch: &mut Batch,
    first: usize,
    legs: &mut ChildLanes,
    cx: &mut Cx<'_>,
) {
    if !batch.is_empty() {
        lane.choose_all(PriorityGroupDispatch { deal: legs.deal(batch), first });
        legs.send(cx);
    }
}

/// Parses the `repeat_count` argument of three selectors, which none uses. A value above 1 is taken
/// as 1; 0 is kept for `table`.
fn parse_repeat_count(selector: &str, word: &str) -> Result<u32, PathArgError> {
    match super::parse::parse_u32(word) {
        Some(n @ 0..=1) => Ok(n),
        Some(_) => {
            tracing::warn!("multipath {selector}: repeat_count > 1 is deprecated, using 1 instead");
            Ok(1)
        }
        None => Err(PathArgError { text: "invalid repeat count", arg: 0 }),
    }
}

/// The choices of [`PathSelectorLaneOps::choose_all`] for `bios`.
#[cfg(test)]
fn record_path_choices(lane: &mut impl PathSelectorLaneOps, bios: Batch) -> Vec<(usize, Box<Bio>)> {
    struct RecordedChoices<'a>(&'a mut std::vec::IntoIter<Box<Bio>>, &'a mut Vec<(usize, Box<Bio>)>);
    impl BatchPathDispatch for RecordedChoices<'_> {
        fn left(&self) -> usize {
            self.0.len()
        }
        fn take(&mut self) -> Option<Box<Bio>> {
            self.0.next()
        }
        fn put(&mut self, path: usize, bio: Box<Bio>) {
            self.1.push((path, bio));
        }
        fn each(&mut self, mut choose: impl FnMut(&mut Bio) -> Option<usize>) -> Option<Box<Bio>> {
            self.0.find_map(|mut bio| match choose(&mut bio) {
                Some(path) => {
                    self.1.push((path, bio));
                    None
                }
                None => Some(bio),
            })
        }
        fn between(mut self, paths: [usize; 2], mut second: impl FnMut(&mut Bio) -> bool) -> usize {
            let mut seconds = 0;
            let _ = self.each(|bio| {
                let place = usize::from(second(bio));
                seconds += place;
                Some(paths[place])
            });
            seconds
        }
    }
    let (mut bios, mut chosen) = (bios.into_iter(), Vec::new());
    lane.choose_all(RecordedChoices(&mut bios, &mut chosen));
    assert!(bios.next().is_none(), "each has its path");
    chosen
}
