//! Locks of blocks while a write of them is under way on one device and then on the other.
//!
//! Two writes of one place that are in flight together may reach the devices in different orders,
//! and a client that has read the result from the source would read another one after a switch. So
//! the second one waits. A lock is a slot of a small table: the number of the block modulo its
//! size. A holder never waits for another lock, so nothing waits in a circle.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use udm_core::{Bio, Sectors, interleave};

/// Slots of the table.
const SLOTS: usize = 1 << 15;

/// Sectors of a block, as a power of two: a page.
const BLOCK_SHIFT: u32 = 3;

/// The longest request that can be locked: far fewer blocks than slots, so that it never waits for
/// itself.
pub(super) const LOCKED_MAX: Sectors = Sectors(8 << 11);

/// The locks of a mirror.
pub(super) struct WriteLocks(Box<[AtomicBool]>);

impl WriteLocks {
    pub(super) fn new() -> WriteLocks {
        WriteLocks((0..SLOTS).map(|_| AtomicBool::new(false)).collect())
    }

    fn blocks_of(bio: &Bio) -> Range<u64> {
        debug_assert!(bio.sectors <= LOCKED_MAX, "{} sectors in one request", bio.sectors);
        bio.sector.0 >> BLOCK_SHIFT..((bio.end().0 - 1) >> BLOCK_SHIFT) + 1
    }

    fn slot(&self, block: u64) -> &AtomicBool {
        &self.0[block as usize % SLOTS]
    }

    /// Locks all blocks of a request, or none. SeqCst: the holders of a block are in one order, and
    /// a write that reads the flags of its region afterwards is seen by
    /// [`WriteLocks::is_any_locked`], or sees the flags that were set before that.
    pub(super) fn lock(&self, bio: &Bio) -> bool {
        let blocks = WriteLocks::blocks_of(bio);
        for block in blocks.clone() {
            interleave::mark_interleave_point();
            if self.slot(block).swap(true, Ordering::SeqCst) {
                self.release(blocks.start..block);
                return false;
            }
        }
        true
    }

    /// Unlocks the blocks of a request. The caller wakes those who wait.
    pub(super) fn unlock(&self, bio: &Bio) {
        self.release(WriteLocks::blocks_of(bio));
    }

    /// True if a block of these sectors is locked, or may be.
    pub(super) fn is_any_locked(&self, sectors: Range<u64>) -> bool {
        let blocks = sectors.start >> BLOCK_SHIFT..((sectors.end - 1) >> BLOCK_SHIFT) + 1;
        let slots = blocks.start..blocks.end.min(blocks.start + SLOTS as u64);
        slots.into_iter().any(|block| self.slot(block).load(Ordering::SeqCst))
    }

    fn release(&self, blocks: Range<u64>) {
        blocks.for_each(|block| self.slot(block).store(false, Ordering::Release));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use udm_core::Sector;

    #[test]
    fn all_blocks_are_locked_or_none() {
        let locks = WriteLocks::new();
        let bio = |sector, sectors| Bio::read(Sector(sector), Sectors(sectors), Default::default());
        let (first, beside, over) = (bio(7, 2), bio(16, 8), bio(9, 9));
        assert!(locks.lock(&first) && locks.lock(&beside));
        assert!(!locks.lock(&over) && !locks.lock(&bio(0, 1)), "one block is enough");
        assert!(locks.is_any_locked(15..17) && !locks.is_any_locked(24..1 << 17), "blocks 0 to 2");
        locks.unlock(&first);
        assert!(!locks.lock(&over), "it waits for the second block, and holds none");
        assert!(locks.lock(&bio(8, 1)));
        locks.unlock(&bio(8, 1));
        locks.unlock(&beside);
        assert!(locks.lock(&over) && locks.lock(&bio(0, 8)));
        assert!(!locks.lock(&bio((SLOTS as u64) << BLOCK_SHIFT, 8)), "the slot of block 0");
        assert!(locks.lock(&bio(1 << 17, LOCKED_MAX.0)));
    }
}
