//! The choices of one core.
//!
//! The kernel keeps a list, goes through it from the front for each bio, and moves the winner to
//! the back. For a bio by itself, and wherever comparisons need the list, so does this. For most
//! batches the winners follow from an order ([`BatchRounds`]), and then nobody is compared with all
//! others; who was chosen when is all that is kept of the list.

use super::super::rotation::Rotation;
use super::super::{BioDispatch, PathChooser};
use super::batch_rounds::{BatchRounds, CostRank};
use super::{
    ALONE_AFTER, HistoricalServiceTime, MANY, POINT, PathHistory, SHARE_EVERY, SHORT, SharedHistory,
};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use udm_core::{Bio, Cx, Nanos, Sectors};

/// A path as its core sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PathEstimate {
    pub(super) history: PathHistory,
    /// Bios in flight, this batch's choices included.
    pub(super) load: u64,
    /// How this lane's part of those has changed since it was last published, modulo 2^64.
    pub(super) unpublished: u64,
    /// This lane's part as it was published.
    pub(super) published: u64,
    /// When it was last chosen or reinstated, on the lane's count. No two are equal.
    pub(super) used: u64,
}

/// Added to what a lane tells each time.
const PUBLICATION_STEP: u64 = 1 << 32;

/// See the module.
pub(in crate::multipath) struct HistoricalLane {
    pub(super) selector: Arc<HistoricalServiceTime>,
    /// The usable paths.
    pub(super) order: Vec<u32>,
    /// They are in the order of [`PathEstimate::used`]: the kernel's list.
    pub(super) listed: bool,
    /// Scratch: of each place of the list, which of the places up to it is the best.
    bests: Vec<u32>,
    pub(super) slots: Vec<PathEstimate>,
    /// The last [`PathEstimate::used`].
    pub(super) clock: u64,
    /// The time of the batch.
    pub(super) now: Nanos,
    /// What it told last: its number among the lanes of the selector, and from [`PUBLICATION_STEP`] on how
    /// often.
    publication: u64,
    /// What was told last by whichever lane, as far as it has heard.
    last_publication: u64,
    /// From when on it is alone.
    alone_from: Nanos,
    /// When it tells the others next, while it is not.
    share_at: Nanos,
    /// The order of the batch.
    ranking: Vec<CostRank>,
    /// What came of the last path in this poll.
    ended: HistoryMemo,
    /// All paths can be used, and what is known of each is the same, as of the last poll.
    are_equal: bool,
    /// While they take turns ([`HistoricalLane::choose_in_rotation`]).
    pub(super) rotation: Rotation,
    /// Whether there is a ring, and of paths that are stale.
    pub(super) rotation_is_stale: Option<bool>,
}

/// What came of a path in a poll: the same comes of the next, if all that it hangs on is the same.
#[derive(Clone, Copy, Debug, Default)]
struct HistoryMemo {
    /// The average before.
    average: u64,
    /// When the first bio that came back was begun.
    start: u64,
    /// How many came back; 0 before the first path of a poll.
    count: usize,
    /// What came of it.
    after: PathHistory,
    /// Of so many paths one behind the other.
    paths: usize,
}

impl PathEstimate {
    /// `shared` is the path's load as all cores have published it.
    #[inline(always)]
    pub(super) fn look(&mut self, shared: u64) {
        self.load = shared.wrapping_add(self.unpublished);
    }

    /// True when what it costs can be reckoned with in signed words, with less than `limit` bios in
    /// flight.
    #[inline(always)]
    pub(super) fn is_plain(&self, limit: u64) -> bool {
        (self.history.average.wrapping_sub(1) < SHORT) & (self.load < limit)
    }

    #[inline(always)]
    pub(super) fn is_stale(&self, now: Nanos) -> bool {
        self.history.stale_after < now.0
    }
}

/// True when `c` is better than `b` (kernel `hst_compare`).
pub(super) fn is_better_path(c: &PathEstimate, b: &PathEstimate, now: u64, threshold: u32) -> bool {
    let (c_average, b_average) = (c.history.average, b.history.average);
    let (high, low) = (c_average.max(b_average), c_average.min(b_average));
    if high <= low.saturating_mul(threshold.into()) {
        return c.load < b.load;
    }
    let (c_idle, b_idle) = (c.load == 0, b.load == 0);
    let (c_stale, b_stale) = (c.history.stale_after < now, b.history.stale_after < now);
    if c_idle & (c_stale | b_idle) | b_idle & b_stale {
        // One that is stale is as if it were so for ever beside one that is not idle.
        let stale = |slot: &PathEstimate, other_idle| if other_idle { slot.history.stale_after } else { 0 };
        return stale(c, b_idle) < stale(b, c_idle);
    }
    let b_better = if c.load == b.load {
        c_average > b_average
    } else if c.load < MANY && b.load < MANY {
        c_average * (c.load + 1) > b_average * (b.load + 1)
    } else {
        let cost =
            |slot: &PathEstimate| u128::from(slot.history.average >> POINT) * (u128::from(slot.load) + 1);
        cost(c) > cost(b)
    };
    if if b_better { b_stale } else { c_stale } { c.load < b.load } else { !b_better }
}

impl HistoricalLane {
    pub(super) fn new(selector: Arc<HistoricalServiceTime>) -> HistoricalLane {
        let paths = selector.paths.len();
        let last_publication = selector.last_publication.load(Acquire);
        let slot = |(path, used): (&SharedHistory, u64)| PathEstimate {
            history: path.get(),
            used,
            ..PathEstimate::default()
        };
        HistoricalLane {
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
            ended: HistoryMemo::default(),
            are_equal: false,
            rotation: Rotation::default(),
            rotation_is_stale: None,
            selector,
        }
    }

    /// Hears what other lanes know of the paths, and tells them.
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
            // The other one may take itself to be alone: it hears at once that it is not.
            self.share_at = self.now;
        }
        self.alone_from = self.now + ALONE_AFTER;
    }

    /// What it knows of `path`.
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

    /// Puts the paths in the order of the kernel's list.
    #[inline(always)]
    pub(super) fn list(&mut self) {
        self.end_rotation();
        if !std::mem::replace(&mut self.listed, true) {
            let slots = &self.slots;
            self.order.sort_unstable_by_key(|&path| slots[path as usize].used);
        }
    }

    /// The choice for a bio, by the list.
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

    /// The choices for a batch, by the list. What the places in front of the last winner's came to
    /// is the same for the next bio: they are not compared again.
    #[inline(never)]
    fn choose_by_list(&mut self, mut bios: impl BioDispatch) {
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

    /// The path at `place` of the list is chosen for `bio`.
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

    /// Puts the paths into `ranking`, and says whether all of them are stale; `None` where `count`
    /// bios have to be chosen for by the list.
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
            self.ranking.push(CostRank::new(path, slot, stale));
        }
        (plain && last_idle < first_busy).then_some(stale)
    }

    /// The choices for a batch, by the order in `ranking`.
    #[inline(always)]
    fn choose_in_order(&mut self, stale: bool, mut bios: impl BioDispatch) {
        let now = self.now;
        let mut rounds = BatchRounds::new(&mut self.ranking, stale, self.clock);
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

    /// The choices for a batch where there is one path.
    #[inline(always)]
    fn choose_only(&mut self, path: usize, mut bios: impl BioDispatch) {
        let (count, now) = (bios.left() as u64, self.now);
        let _ = bios.each(|bio| {
            bio.sent = now;
            Some(path)
        });
        self.clock += count;
        let slot = &mut self.slots[path];
        (slot.unpublished, slot.used) = (slot.unpublished.wrapping_add(count), self.clock);
    }

    /// Which paths can be used has changed.
    fn forget(&mut self) {
        self.are_equal = false;
        self.ended = HistoryMemo::default();
    }

    fn publish(&mut self, path: usize) {
        let slot = &mut self.slots[path];
        self.selector.loads.add(path, slot.unpublished);
        slot.published = slot.published.wrapping_add(std::mem::take(&mut slot.unpublished));
    }
}

impl PathChooser for HistoricalLane {
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
    fn choose_all(&mut self, bios: impl BioDispatch) {
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

    /// Looks whether the path is equal to the one before: where there is but one, that would only
    /// take time.
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
                *last = HistoryMemo { average, start, count, after, paths: 1 };
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
        let HistoryMemo { paths, count, .. } = self.ended;
        self.are_equal = (paths == self.slots.len()) & (self.order.len() == self.slots.len());
        (self.ended.paths, self.ended.count) = (0, 0);
        if count > 0 && cx.now() >= self.alone_from {
            self.publish_history();
        }
    }
}

impl Drop for HistoricalLane {
    /// What a lane that goes away knows is told, and what it had under way is no load any more.
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
