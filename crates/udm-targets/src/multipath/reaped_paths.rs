//! The completed bios of several paths, as a selector takes them in one poll.

use super::counters::LanePathCounters;
use udm_core::{Batch, Bio, Op, Sectors};
use udm_dm::child_lanes::ChildLanes;

/// Bios that completed on several paths, one list per path.
pub(super) struct CompletedPathBios<'a> {
    pub children: &'a mut ChildLanes,
    pub counters: &'a [LanePathCounters],
    pub done: &'a mut Batch,
}

impl CompletedPathBios<'_> {
    /// Moves the completed bios of path `index` to `done` and counts them, if all of them succeeded
    /// and have the same operation. Returns the bios and their total length.
    #[inline(always)]
    pub fn take(&mut self, index: usize) -> Option<(&[Box<Bio>], Sectors)> {
        let (back, from) = (self.children.completions(index), self.done.len());
        let op = back.first().map_or(Op::Read, |bio| bio.op);
        let (count, mut sectors) = (back.len(), Sectors::ZERO);
        let all = udm_core::append_all_if_none_flagged(back, self.done, |bio| {
            sectors += bio.sectors;
            bio.status as u8 | (bio.op as u8 ^ op as u8)
        });
        all.then(|| {
            let (left, counter) = (self.children.taken(index, count), &self.counters[index]);
            counter.set_in_flight(left);
            counter.count_completed(op, count as u64, sectors.bytes());
            (&self.done[from..], sectors)
        })
    }
}
