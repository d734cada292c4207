//! The choices of one core.
//!
//! The kernel keeps a list, compares all paths from the front for each bio, and moves the winner to
//! the back. This code does the same for a single bio, and for batches that need the list. For most
//! batches the choices follow from an order ([`BatchPathChoiceRounds`]) without these comparisons.
//! Then only the sequence numbers of the last choices are kept instead of the list.

use super::super::rotation::PathRotation;
use super::super::{BatchPathDispatch, PathSelectorLaneOps};
use super::batch_rounds::{BatchPathChoiceRounds, CostRankedPath};
use super::{
    ALONE_AFTER, HistoricalServiceTime, MANY, POINT, PathHistory, SHARE_EVERY, SHORT, SharedPathHistory,
};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use udm_core::{Bio, Cx, Nanos, Sectors};

/// The state of a path on one core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LanePathHistoryAndLoad {
    pub(super) history: PathHistory,
    /// Bios in flight, including the choices of this batch.
    pub(super) load: u64,
    /// Change of this lane's bios in flight since they were last published, modulo 2^64.
    pub(super) unpublished: u64,
    /// This lane's bios in flight as published.
    pub(super) published: u64,
    /// Sequence number of the last choice or reinstatement, counted per lane. No two are equal.
    pub(super) used: u64,
}

/// Added to the publication number of a lane with each publication.
const PUBLICATION_STEP: u64 = 1 << 32;

/// The selector's state on one core.
pub(in crate::multipath) struct HistoricalServiceTimeLane {
    pub(super) selector: Arc<HistoricalServiceTime>,
    /// The usable paths.
    pub(super) order: Vec<u32>,
    /// `order` is sorted by [`LanePathHistoryAndLoad::used`]: it is the kernel's list.
    pub(super) listed: bool,
    /// Scratch: for each position of the list, the best of the positions up to it.
    bests: Vec<u32>,
    pub(super) slots: Vec<LanePathHistoryAndLoad>,
    /// The last [`LanePathHistoryAndLoad::used`].
    pub(super) clock: u64,
    /// Time of the batch.
    pub(super) now: Nanos,
    /// Low 32 bits: number of this lane in its selector. High bits, in steps of
    /// [`PUBLICATION_STEP`]: how often it has published.
    publication: u64,
    /// The last publication of any lane that this lane has seen.
    last_publication: u64,
    /// Time from which this core counts as alone.
    alone_from: Nanos,
    /// Time of the next publication while other cores work.
    share_at: Nanos,
    /// The order of the batch.
    ranking: Vec<CostRankedPath>,
    /// The last computed history in this poll.
    ended: MemoizedPathHistory,
    /// All paths are usable and have equal histories, as of the last poll.
    are_equal: bool,
    /// The order of the paths while they take turns
    /// ([`HistoricalServiceTimeLane::choose_in_rotation`]).
    pub(super) rotation: PathRotation,
    /// `None` if there is no rotation; otherwise whether its paths are stale.
    pub(super) rotation_is_stale: Option<bool>,
}

/// Inputs and result of the last computed history in a poll. If the next path has the same inputs,
/// it gets the same result.
#[derive(Clone, Copy, Debug, Default)]
struct MemoizedPathHistory {
    /// The average before.
    average: u64,
    /// Start time of the first completed bio.
    start: u64,
    /// Number of completed bios; 0 before the first path of a poll.
    count: usize,
    /// The result.
    after: PathHistory,
    /// Number of consecutive paths with these inputs.
    paths: usize,
}

impl LanePathHistoryAndLoad {
    /// Updates the load from `shared`, the path's load as published by all cores.
    #[inline(always)]
    pub(super) fn look(&mut self, shared: u64) {
        self.load = shared.wrapping_add(self.unpublished);
    }

    /// True if the cost fits into signed words with less than `limit` bios in flight.
    #[inline(always)]
    pub(super) fn is_plain(&self, limit: u64) -> bool {
        (self.history.average.wrapping_sub(1) < SHORT) & (self.load < limit)
    }

    #[inline(always)]
    pub(super) fn is_stale(&self, now: Nanos) -> bool {
        self.history.stale_after < now.0
    }
}

/// True if `c` is better than `b` (kernel `hst_compare`).
pub(super) fn is_better_path(
    c: &LanePathHistoryAndLoad,
    b: &LanePathHistoryAndLoad,
    now: u64,
    threshold: u32,
) -> bool {
    let (c_average, b_average) = (c.history.average, b.history.average);
    let (high, low) = (c_average.max(b_average), c_average.min(b_average));
    if high <= low.saturating_mul(threshold.into()) {
        return c.load < b.load;
    }
    let (c_idle, b_idle) = (c.load == 0, b.load == 0);
    let (c_stale, b_stale) = (c.history.stale_after < now, b.history.stale_after < now);
    if c_idle & (c_stale | b_idle) | b_idle & b_stale {
        // Compared to a busy path, an idle stale path counts as stale forever.
        let stale =
            |slot: &LanePathHistoryAndLoad, other_idle| if other_idle { slot.history.stale_after } else { 0 };
        return stale(c, b_idle) < stale(b, c_idle);
    }
    let b_better = if c.load == b.load {
        c_average > b_average
    } else if c.load < MANY && b.load < MANY {
        c_average * (c.load + 1) > b_average * (b.load + 1)
    } else {
        let cost = |slot: &LanePathHistoryAndLoad| {
            u128::from(slot.history.average >> POINT) * (u128::from(slot.load) + 1)
        };
        cost(c) > cost(b)
    };
    if if b_better { b_stale } else { c_stale } { c.load < b.load } else { !b_better }
}

impl HistoricalServiceTimeLane {
    pub(super) fn new(selector: Arc<HistoricalServiceTime>) -> HistoricalServiceTimeLane {
        let paths = selector.paths.len();
        let last_publication = selector.last_publication.load(Acquire);
        let slot = |(path, used): (&SharedPathHistory, u64)| LanePathHistoryAndLoad {
            history: path.get(),
            used,
            ..LanePathHistoryAndLoad::default()
        };
        HistoricalServiceTimeLane {
            order: (0..paths as u32).collect(),
            listed: true,
            bests: vec![0; paths],
            slots: selector.paths.iter().zip(1..).map(slot).collect(),
            clock: paths as u64,
            now: Nanos(0),
            publication: selector.lanes.fetch_add(1, Relaxed).into(),
            last_publication,
            alone_from: Nanos(0),
            share_at: Nanos(0),
            ranking: Vec::with_capacity(paths),
            ended: MemoizedPathHistory::default(),
            are_equal: false,
            rotation: PathRotation::default(),
            rotation_is_stale: None,
            selector,
        }
    }

    /// Imports the histories that other lanes published, and publishes this lane's when due.
    #[inline(always)]
    fn sync_history(&mut self) {
        if self.selector.last_publication.load(Acquire) != self.last_publication {
            self.import_history();
        }
        if self.now < self.alone_from && self.now >= self.share_at {
            self.share_at = self.now + SHARE_EVERY;
            self.publish_history();
        }
    }

    #[cold]
    fn import_history(&mut self) {
        self.last_publication = self.selector.last_publication.load(Acquire);
        self.are_equal = false;
        for (slot, path) in self.slots.iter_mut().zip(&self.selector.paths) {
            slot.history = path.get();
        }
        if self.now >= self.alone_from {
            // The other lane may count itself as alone, so this lane publishes at once.
            self.share_at = self.now;
        }
        self.alone_from = self.now + ALONE_AFTER;
    }

    /// This lane's history of `path`.
    #[cfg(test)]
    pub(super) fn history_of(&self, path: usize) -> PathHistory {
        self.slots[path].history
    }

    #[cold]
    fn publish_history(&mut self) {
        for (slot, path) in self.slots.iter().zip(&self.selector.paths) {
            path.set(&slot.history);
        }
        self.note_publication();
    }

    #[inline(always)]
    fn note_publication(&mut self) {
        self.publication = self.publication.wrapping_add(PUBLICATION_STEP);
        self.last_publication = self.publication;
        self.selector.last_publication.store(self.last_publication, Release);
    }

    /// Sorts the paths in the order of the kernel's list.
    #[inline(always)]
    pub(super) fn list(&mut self) {
        self.end_rotation();
        if !std::mem::replace(&mut self.listed, true) {
            let slots = &self.slots;
            self.order.sort_unstable_by_key(|&path| slots[path as usize].used);
        }
    }

    /// The choice for a single bio, by the list.
    #[inline(always)]
    fn choose_one(&mut self, bio: &mut Bio) -> usize {
        let (slots, now, threshold) = (&self.slots[..], self.now.0, self.selector.threshold);
        let (mut place, mut best) = (0, &slots[self.order[0] as usize]);
        for (i, &path) in self.order.iter().enumerate().skip(1) {
            let other = &slots[path as usize];
            if is_better_path(other, best, now, threshold) {
                (place, best) = (i, other);
            }
        }
        self.chosen(place, bio)
    }

    /// The choices for a batch, by the list. Comparisons among the positions before the last winner
    /// have the same result for the next bio and are not repeated.
    #[inline(never)]
    fn choose_by_list(&mut self, mut bios: impl BatchPathDispatch) {
        self.list();
        let (now, threshold, mut front) = (self.now.0, self.selector.threshold, 0);
        let _ = bios.each(|bio| {
            let slot = |place: usize| &self.slots[self.order[place] as usize];
            for place in front..self.order.len() {
                let best = place.checked_sub(1).map_or(0, |before| self.bests[before] as usize);
                let is_better = place > 0 && is_better_path(slot(place), slot(best), now, threshold);
                self.bests[place] = if is_better { place } else { best } as u32;
            }
            front = self.bests[self.order.len() - 1] as usize;
            Some(self.chosen(front, bio))
        });
    }

    /// Accounts for the choice of the path at position `place` of the list for `bio`.
    #[inline(always)]
    fn chosen(&mut self, place: usize, bio: &mut Bio) -> usize {
        let path = self.order[place];
        let behind = &mut self.order[place..];
        for i in 1..behind.len() {
            behind[i - 1] = behind[i];
        }
        behind[behind.len() - 1] = path;
        self.clock += 1;
        let slot = &mut self.slots[path as usize];
        (slot.load, slot.unpublished, slot.used) =
            (slot.load + 1, slot.unpublished.wrapping_add(1), self.clock);
        bio.sent = self.now;
        path as usize
    }

    /// Fills `ranking`. Returns whether all paths are stale, or `None` if `count` bios must be
    /// chosen by the list.
    #[inline(always)]
    fn order_for(&mut self, count: usize) -> Option<bool> {
        let (limit, now) = (MANY.saturating_sub(count as u64), self.now);
        let stale = self.slots[self.order[0] as usize].is_stale(now);
        let (mut plain, mut last_idle, mut first_busy) = (self.selector.threshold == 0, 0, u64::MAX);
        let loads = self.selector.loads.all();
        self.ranking.clear();
        for &path in &self.order {
            let slot = &mut self.slots[path as usize];
            slot.look(loads[path as usize].load(Relaxed));
            plain &= slot.is_plain(limit) & (slot.is_stale(now) == stale);
            match slot.load {
                0 => last_idle = last_idle.max(slot.used),
                _ => first_busy = first_busy.min(slot.used),
            }
            self.ranking.push(CostRankedPath::new(path, slot, stale));
        }
        (plain && last_idle < first_busy).then_some(stale)
    }

    /// The choices for a batch, by the order in `ranking`.
    #[inline(always)]
    fn choose_in_order(&mut self, stale: bool, mut bios: impl BatchPathDispatch) {
        let now = self.now;
        let mut rounds = BatchPathChoiceRounds::new(&mut self.ranking, stale, self.clock);
        let _ = bios.each(|bio| {
            bio.sent = now;
            Some(rounds.choose())
        });
        self.clock = rounds.end();
        self.listed = false;
        for (place, turn) in self.order.iter_mut().zip(&self.ranking) {
            *place = turn.path;
            let slot = &mut self.slots[turn.path as usize];
            (slot.unpublished, slot.used) = (slot.unpublished.wrapping_add(turn.times.into()), turn.used);
        }
    }

    /// The choices for a batch with a single path.
    #[inline(always)]
    fn choose_only(&mut self, path: usize, mut bios: impl BatchPathDispatch) {
        let (count, now) = (bios.left() as u64, self.now);
        let _ = bios.each(|bio| {
            bio.sent = now;
            Some(path)
        });
        self.clock += count;
        let slot = &mut self.slots[path];
        (slot.unpublished, slot.used) = (slot.unpublished.wrapping_add(count), self.clock);
    }

    /// Called when the set of usable paths has changed.
    fn forget(&mut self) {
        self.are_equal = false;
        self.ended = MemoizedPathHistory::default();
    }

    fn publish(&mut self, path: usize) {
        let slot = &mut self.slots[path];
        self.selector.loads.add(path, slot.unpublished);
        slot.published = slot.published.wrapping_add(std::mem::take(&mut slot.unpublished));
    }
}

impl PathSelectorLaneOps for HistoricalServiceTimeLane {
    fn fail(&mut self, path: usize) {
        self.list();
        self.forget();
        self.order.retain(|other| *other as usize != path);
    }

    fn reinstate(&mut self, path: usize) {
        self.list();
        self.forget();
        self.clock += 1;
        self.slots[path].used = self.clock;
        self.order.push(path as u32);
    }

    #[inline]
    fn look(&mut self, cx: &Cx<'_>) {
        self.now = cx.now();
    }

    #[inline]
    fn choose(&mut self, bio: &mut Bio) -> usize {
        self.sync_history();
        for (slot, load) in self.slots.iter_mut().zip(self.selector.loads.all()) {
            slot.look(load.load(Relaxed));
        }
        self.list();
        self.choose_one(bio)
    }

    #[inline]
    fn choose_all(&mut self, bios: impl BatchPathDispatch) {
        self.sync_history();
        if self.are_equal && self.can_rotate(bios.left()) {
            return self.choose_in_rotation(bios);
        }
        self.end_rotation();
        if let [path] = self.order[..] {
            return self.choose_only(path as usize, bios);
        }
        if self.order.len() == 2 {
            self.list();
            let paths = [self.order[0] as usize, self.order[1] as usize];
            if let Some(stale) = self.refresh_pair(paths, bios.left()) {
                return self.choose_between(paths, stale, bios);
            }
        } else if let Some(stale) = self.order_for(bios.left()) {
            return self.choose_in_order(stale, bios);
        }
        self.choose_by_list(bios);
    }

    #[inline]
    fn polled(&mut self, path: usize, back: &[Box<Bio>], _sectors: Sectors, cx: &Cx<'_>) {
        if let [first, ..] = back {
            let slot = &mut self.slots[path];
            self.are_equal = false;
            slot.history =
                self.selector.ended(&slot.history, first.sent, back.len(), self.order.len(), cx.now());
            slot.unpublished = slot.unpublished.wrapping_sub(back.len() as u64);
            if cx.now() >= self.alone_from {
                self.selector.paths[path].set(&slot.history);
                self.note_publication();
            }
        }
        if self.slots[path].unpublished != 0 {
            self.publish(path);
        }
    }

    /// Compares the path with the previous one. [`PathSelectorLaneOps::polled`] does not, because
    /// with one path it would only cost time.
    #[inline(always)]
    fn reaped(&mut self, path: usize, back: &[Box<Bio>], _sectors: Sectors, cx: &Cx<'_>) {
        let slot = &mut self.slots[path];
        if let [first, ..] = back {
            let (now, count, PathHistory { average, last_finish, .. }) = (cx.now(), back.len(), slot.history);
            let start = first.sent.0.max(last_finish);
            let last = &mut self.ended;
            if (last.average == average) & (last.start == start) & (last.count == count) {
                last.paths += 1;
            } else {
                let after = self.selector.ended(&slot.history, first.sent, count, self.order.len(), now);
                *last = MemoizedPathHistory { average, start, count, after, paths: 1 };
            }
            slot.history = last.after;
            slot.unpublished = slot.unpublished.wrapping_sub(count as u64);
        }
        if slot.unpublished != 0 {
            self.publish(path);
        }
    }

    #[inline(always)]
    fn end_reap(&mut self, cx: &Cx<'_>) {
        let MemoizedPathHistory { paths, count, .. } = self.ended;
        self.are_equal = (paths == self.slots.len()) & (self.order.len() == self.slots.len());
        (self.ended.paths, self.ended.count) = (0, 0);
        if count > 0 && cx.now() >= self.alone_from {
            self.publish_history();
        }
    }
}

impl Drop for HistoricalServiceTimeLane {
    /// Publishes the lane's histories and removes its bios in flight from the shared loads.
    fn drop(&mut self) {
        if self.alone_from > Nanos(0) {
            self.publish_history();
        }
        for path in 0..self.slots.len() {
            self.slots[path].unpublished = self.slots[path].published.wrapping_neg();
            self.publish(path);
        }
    }
}
