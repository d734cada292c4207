//! Path selectors: they choose the path of a group that a bio takes.
//!
//! A selector has two halves. The [`Selector`] is shared by all cores: arguments of the paths,
//! printed text, and for some selectors a number per path on its own cache line. The
//! [`SelectorLane`] belongs to one core: the order of the usable paths. It reads the shared numbers
//! once per batch, chooses for the whole batch on its own copy, and publishes the change once per
//! poll. A request that was sent and completed within one turn is never published. So cores with
//! fast paths exchange no cache lines.
//!
//! [`SelectorLane`] is a closed list, so that a choice is no call through a table of functions.
//! [`SELECTORS`] lists the types. On one core the sequence of choices is the kernel's, checked
//! against a recording. A selector numbers the paths of its group from 0, in the order of the
//! table.

mod historical_service_time;
mod io_affinity;
mod load;
mod queue_length;
mod rotation;
mod round_robin;
mod service_time;

use super::lane::ReapedPaths;
use std::ops::Range;
use std::sync::Arc;
use udm_core::{Batch, Bio, CoreId, Cx, Sectors};
use udm_dm::child_lanes::{BatchDispatch, ChildLanes};

/// A selector without paths, or which of its arguments it refuses, from 0.
type SelectorResult = Result<Box<dyn Selector>, usize>;

/// One line of the list of selectors.
pub struct SelectorType {
    /// Its name in tables; case counts.
    pub name: &'static str,
    /// Makes the selector of one group from its arguments.
    pub(super) new: fn(args: &[String]) -> SelectorResult,
}

/// All path selectors.
pub const SELECTORS: &[SelectorType] = &[
    round_robin::TYPE,
    queue_length::TYPE,
    service_time::TYPE,
    historical_service_time::TYPE,
    io_affinity::TYPE,
];

/// Why a path's arguments were refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PathArgError {
    /// The kernel's words behind `<selector> ps: `.
    pub(super) text: &'static str,
    /// Which of the path's arguments, from 0.
    pub(super) arg: usize,
}

/// The half of a selector that the cores share, for one group of one table.
pub(super) trait Selector: Send + Sync {
    /// Its name in tables.
    fn name(&self) -> &'static str;

    /// Takes the next path of the group. `cores` is the number of cores, for selectors that choose
    /// by core.
    ///
    /// # Errors
    /// When the arguments are wrong.
    fn add_path(&mut self, args: &[String], cores: usize) -> Result<(), PathArgError>;

    /// Its own arguments as `table` and `status` print them: their number and the words.
    fn args(&self) -> String {
        String::from("0")
    }

    /// How many words [`Selector::path_args`] has for each path.
    fn path_arg_count(&self) -> usize;

    /// The arguments of `path` as `table` prints them, defaults filled in.
    fn path_args(&self, path: usize) -> String;

    /// How many words [`Selector::path_info`] has for each path.
    fn path_info_count(&self) -> usize {
        0
    }

    /// What `status` prints behind a path's failure count.
    fn path_info(&self, path: usize) -> String {
        let _ = path;
        String::new()
    }

    /// The half for one core. All its paths are usable and in the table's order.
    fn lane(self: Arc<Self>, core: CoreId) -> SelectorLane;
}

/// The half of a selector that belongs to one core. A list, as what is chosen by is asked for each
/// bio: a call through a table of functions would cost as much as the choice. With a tag of its
/// own: one hidden in a field takes more instructions to read.
#[repr(u8)]
pub(super) enum SelectorLane {
    /// By turns.
    RoundRobin(round_robin::RoundRobinLane),
    /// By the number of bios in flight.
    QueueLength(load::LoadLane<queue_length::QueueLength>),
    /// By the bytes in flight.
    ServiceTime(load::LoadLane<service_time::ServiceTime>),
    /// By the time that bios took.
    Historical(historical_service_time::HistoricalLane),
    /// By the core.
    IoAffinity(io_affinity::IoAffinityLane),
}

/// The bios of a batch, each of which is to have a path.
pub(super) trait BioDispatch {
    /// How many are left.
    fn left(&self) -> usize;

    /// Takes the next.
    fn take(&mut self) -> Option<Box<Bio>>;

    /// The path for what was taken.
    fn put(&mut self, path: usize, bio: Box<Bio>);

    /// Takes one after the other to the path that `choose` says: the first for which it says none.
    fn each(&mut self, choose: impl FnMut(&mut Bio) -> Option<usize>) -> Option<Box<Bio>>;

    /// Takes all to the first or the second of `paths`: `second` says which. How many the second
    /// gets.
    fn between(self, paths: [usize; 2], second: impl FnMut(&mut Bio) -> bool) -> usize;
}

/// Those of a batch on their way to the legs of a group.
struct GroupDispatch<'a> {
    deal: BatchDispatch<'a>,
    /// The leg of its first path.
    first: usize,
}

impl BioDispatch for GroupDispatch<'_> {
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

/// What each selector does on one core.
pub(super) trait PathChooser {
    /// `path` can be used no more. It was usable.
    fn fail(&mut self, path: usize);

    /// `path` can be used again. It was not usable. Of several that returned since the last look
    /// the earliest comes first.
    fn reinstate(&mut self, path: usize);

    /// A batch is to be chosen for: the time to look at what the choice goes by, for those that do
    /// not look while they choose.
    #[inline(always)]
    fn look(&mut self, cx: &Cx<'_>) {
        let _ = cx;
    }

    /// The path for a bio that is a batch of its own: a usable one, of which there is at least one.
    fn choose(&mut self, bio: &mut Bio) -> usize;

    /// Says the path for each of `bio_faults`: what so many calls of [`PathChooser::choose`] would choose if
    /// nothing changed meanwhile.
    fn choose_all(&mut self, bios: impl BioDispatch);

    /// `reverse_map` came back from `path`, well or not, `sectors` long in all; perhaps none. Called
    /// once for each poll in which bios of the path are in flight or come back: the time to tell
    /// the other cores what has changed on it.
    #[inline(always)]
    fn polled(&mut self, path: usize, back: &[Box<Bio>], sectors: Sectors, cx: &Cx<'_>) {
        let _ = (path, back, sectors, cx);
    }

    /// The same for one of several paths that are polled together, all of whose bios went well:
    /// [`PathChooser::end_reap`] comes behind the last.
    #[inline(always)]
    fn reaped(&mut self, path: usize, back: &[Box<Bio>], sectors: Sectors, cx: &Cx<'_>) {
        self.polled(path, back, sectors, cx);
    }

    /// See [`PathChooser::reaped`].
    #[inline(always)]
    fn end_reap(&mut self, cx: &Cx<'_>) {
        let _ = cx;
    }
}

/// Does `$do` with the lane in `$selector`, whichever it is.
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
    /// See [`PathChooser::fail`].
    pub(super) fn fail(&mut self, path: usize) {
        each!(self, lane => lane.fail(path));
    }

    /// See [`PathChooser::reinstate`].
    pub(super) fn reinstate(&mut self, path: usize) {
        each!(self, lane => lane.reinstate(path));
    }

    /// Submits each bio of `batch` to the leg of the path that is chosen for it; that of the first
    /// path is `first`. Leaves `batch` empty.
    ///
    /// Three are asked in line, here and in [`SelectorLane::polled`]: with all five the way of a
    /// single bio is up to 10 instructions longer.
    #[inline(always)]
    pub(super) fn deal(&mut self, batch: &mut Batch, first: usize, legs: &mut ChildLanes, cx: &mut Cx<'_>) {
        match self {
            SelectorLane::RoundRobin(lane) => dispatch_batch(lane, batch, first, legs, cx),
            SelectorLane::QueueLength(lane) => dispatch_batch(lane, batch, first, legs, cx),
            SelectorLane::ServiceTime(lane) => dispatch_batch(lane, batch, first, legs, cx),
            other => other.dispatch_by_other(batch, first, legs, cx),
        }
    }

    #[inline(never)]
    fn dispatch_by_other(&mut self, batch: &mut Batch, first: usize, legs: &mut ChildLanes, cx: &mut Cx<'_>) {
        each!(self, lane => dispatch_batch(lane, batch, first, legs, cx));
    }

    /// See [`PathChooser::polled`].
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

    /// See [`PathChooser::reaped`]: takes what the legs that `polled` marks have given back, as far as
    /// they are the group's `paths` and all went well. The marks of the others.
    #[inline(always)]
    pub(super) fn reaped(
        &mut self,
        paths: Range<usize>,
        polled: u64,
        from: ReapedPaths<'_>,
        cx: &Cx<'_>,
    ) -> u64 {
        each!(self, lane => reap_group(lane, paths, polled, from, cx))
    }
}

/// Out of line, as the loop that chooses is: each has all registers then.
#[inline(never)]
fn dispatch_batch(
    lane: &mut impl PathChooser,
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
        _ => dispatch_many(lane, batch, first, legs, cx),
    }
}

/// Out of line, one for each selector: it asks nothing of a list of selectors then.
#[inline(never)]
fn reap_group(
    lane: &mut impl PathChooser,
    paths: Range<usize>,
    polled: u64,
    mut from: ReapedPaths<'_>,
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
fn dispatch_many(
    lane: &mut impl PathChooser,
    batch: &mut Batch,
    first: usize,
    legs: &mut ChildLanes,
    cx: &mut Cx<'_>,
) {
    if !batch.is_empty() {
        lane.choose_all(GroupDispatch { deal: legs.deal(batch), first });
        legs.send(cx);
    }
}

/// The `parse_repeat_count` argument that three selectors take, and none still uses: above 1 it is taken
/// for 1, and 0 is kept for `table`.
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

/// What [`PathChooser::choose_all`] says for each of `bio_faults`.
#[cfg(test)]
fn choose_all(lane: &mut impl PathChooser, bios: Batch) -> Vec<(usize, Box<Bio>)> {
    struct RecordedChoices<'a>(&'a mut std::vec::IntoIter<Box<Bio>>, &'a mut Vec<(usize, Box<Bio>)>);
    impl BioDispatch for RecordedChoices<'_> {
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
