//! The completed bios of several paths, as a selector takes them in one poll.

use super::counters::PathCounters;
use udm_core::{Batch, Bio, Op, Sectors};
use udm_dm::child_lanes::ChildLanes;

/// Bios that completed on several paths, one list per path.
pub(super) struct ReapedPaths<'a> {
    pub legs: &'a mut ChildLanes,
    pub served: &'a [PathCounters],
    pub done: &'a mut Batch,
}

impl ReapedPaths<'_> {
    /// Moves the completed bios of leg `index` to `done` and counts them, if all of them succeeded
    /// and have the same operation. Returns the bios and their total length.
    #[inline(always)]
    pub fn take(&mut self, index: usize) -> Option<(&[Box<Bio>], Sectors)> {
        let (back, from) = (self.legs.back(index), self.done.len());
        let op = back.first().map_or(Op::Read, |bio| bio.op);
        let (count, mut sectors) = (back.len(), Sectors::ZERO);
        let all = udm_core::append_if_zero(back, self.done, |bio| {
            sectors += bio.sectors;
            bio.status as u8 | (bio.op as u8 ^ op as u8)
        });
        all.then(|| {
            let (left, counter) = (self.legs.taken(index, count), &self.served[index]);
            counter.has(left);
            counter.served(op, count as u64, sectors.bytes());
            (&self.done[from..], sectors)
        })
    }
}
