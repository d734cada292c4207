//! Which regions are hydrated, and which are being hydrated.
//!
//! One bit per region, in atomic words. A bit is set once, by the core that has claimed the region.
//! A claim is an entry in a small table: the slot of a region is its number modulo the size of the
//! table. If two regions share a slot, the second one waits as if it were claimed itself; a holder
//! never waits for another claim, so nothing waits in a circle. So claims need no memory per
//! region.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use udm_core::{Bio, Sectors, interleave};
use udm_wire::clone_metadata::{CloneMetadataLayout, WORDS_PER_BLOCK};

/// Slots of claims; also the maximum number of claimed regions.
const CLAIM_SLOTS: usize = 4096;

/// The result of an attempt to claim a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RegionClaim {
    /// The region is claimed by the caller, who must set its bit or release it.
    Claimed,
    /// The region, or another in its slot, is claimed.
    Busy,
    /// The region is hydrated.
    Hydrated,
}

/// The regions of a clone.
pub(super) struct RegionMap {
    shift: u32,
    len: u64,
    count: u64,
    layout: CloneMetadataLayout,
    words: Box<[AtomicU64]>,
    /// Per block of the bitmap: it has bits that no commit has taken.
    dirty: Box<[AtomicBool]>,
    claims: Box<[AtomicU64]>,
    hydrated: AtomicU64,
}

impl RegionMap {
    /// A map without hydrated regions, for a target of `len` with regions of `region` sectors.
    pub(super) fn new(len: Sectors, region: Sectors) -> RegionMap {
        let count = len.0.div_ceil(region.0);
        let layout = CloneMetadataLayout::new(count);
        RegionMap {
            shift: region.0.trailing_zeros(),
            len: len.0,
            count,
            layout,
            words: (0..count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            dirty: (0..layout.bitmap_blocks()).map(|_| AtomicBool::new(false)).collect(),
            claims: (0..CLAIM_SLOTS).map(|_| AtomicU64::new(0)).collect(),
            hydrated: AtomicU64::new(0),
        }
    }

    /// The layout of the metadata.
    pub(super) fn layout(&self) -> CloneMetadataLayout {
        self.layout
    }

    /// Length of the target.
    pub(super) fn len(&self) -> Sectors {
        Sectors(self.len)
    }

    /// The region size.
    pub(super) fn region(&self) -> Sectors {
        Sectors(1 << self.shift)
    }

    /// Number of regions.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Number of hydrated regions. Relaxed: a number for display and for the check of the end.
    pub(super) fn hydrated(&self) -> u64 {
        self.hydrated.load(Ordering::Relaxed)
    }

    /// True if every region is hydrated. Acquire pairs with the release in `set`.
    #[inline(always)]
    pub(super) fn is_complete(&self) -> bool {
        self.hydrated.load(Ordering::Acquire) == self.count
    }

    /// The region of `sector`.
    #[inline(always)]
    pub(super) fn region_of(&self, sector: u64) -> u64 {
        sector >> self.shift
    }

    /// The first sector of `region`, and the first one after it; the last region may be shorter.
    pub(super) fn sectors_of(&self, region: u64) -> (u64, u64) {
        (region << self.shift, ((region + 1) << self.shift).min(self.len))
    }

    /// True if a request within one region covers all of it.
    pub(super) fn is_covered_by(&self, bio: &Bio) -> bool {
        let (start, end) = self.sectors_of(self.region_of(bio.sector.0));
        bio.sector.0 == start && bio.end().0 == end
    }

    /// The regions that a request covers wholly, as first and end. As in the kernel, a short last
    /// region is never covered.
    pub(super) fn covered_by(&self, bio: &Bio) -> (u64, u64) {
        let first = (bio.sector.0 + (1 << self.shift) - 1) >> self.shift;
        (first, self.region_of(bio.end().0).max(first))
    }

    /// True if `region` is hydrated. Acquire: a core that sees the bit sees that the data is in the
    /// destination.
    #[inline(always)]
    pub(super) fn is_hydrated(&self, region: u64) -> bool {
        self.words[(region / 64) as usize].load(Ordering::Acquire) >> (region % 64) & 1 == 1
    }

    /// The first region from `from` on, below `end`, that is not hydrated.
    pub(super) fn next_unhydrated(&self, from: u64, end: u64) -> Option<u64> {
        self.next(from, end, |word| !word)
    }

    /// The first region from `from` on, below `end`, that is hydrated.
    pub(super) fn next_hydrated(&self, from: u64, end: u64) -> Option<u64> {
        self.next(from, end, |word| word)
    }

    fn next(&self, from: u64, end: u64, bits: impl Fn(u64) -> u64) -> Option<u64> {
        let mut at = from;
        while at < end {
            let word = bits(self.words[(at / 64) as usize].load(Ordering::Acquire)) >> (at % 64);
            if word != 0 {
                return Some(at + u64::from(word.trailing_zeros())).filter(|found| *found < end);
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }

    fn slot(&self, region: u64) -> &AtomicU64 {
        &self.claims[region as usize % CLAIM_SLOTS]
    }

    /// Claims `region` for its hydration. Acquire and release: claims of a region are in one order,
    /// and each sees the bit that the previous holder has set. Calls `released` if the claim was
    /// taken and given back, because others may have found it busy.
    pub(super) fn claim(&self, region: u64, released: impl FnOnce()) -> RegionClaim {
        if self.is_hydrated(region) {
            return RegionClaim::Hydrated;
        }
        let slot = self.slot(region);
        interleave::mark_interleave_point();
        if slot.compare_exchange(0, region + 1, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return RegionClaim::Busy;
        }
        if self.is_hydrated(region) {
            slot.store(0, Ordering::Release);
            released();
            return RegionClaim::Hydrated;
        }
        RegionClaim::Claimed
    }

    /// Ends the claim of `region`.
    pub(super) fn release(&self, region: u64) {
        self.slot(region).store(0, Ordering::Release);
    }

    /// Marks `region`, which the caller has claimed, as hydrated, and ends the claim.
    pub(super) fn set(&self, region: u64) {
        self.put(region);
        interleave::mark_interleave_point();
        self.mark_dirty((region / 64) as usize / WORDS_PER_BLOCK);
        self.release(region);
    }

    fn put(&self, region: u64) {
        let before = self.words[(region / 64) as usize].fetch_or(1 << (region % 64), Ordering::Release);
        debug_assert_eq!(before >> (region % 64) & 1, 0, "region {region} is hydrated twice");
        self.hydrated.fetch_add(1, Ordering::Release);
    }

    /// Sets all bits. Nothing else uses the map yet.
    pub(super) fn set_all(&self) {
        (0..self.count).for_each(|region| self.put(region));
    }

    /// Adds the bits of block `index`, as read from the metadata.
    pub(super) fn load(&self, index: u64, words: &[u64]) {
        let first = index as usize * WORDS_PER_BLOCK;
        for (place, word) in self.words[first..].iter().zip(words) {
            place.store(*word, Ordering::Relaxed);
            self.hydrated.fetch_add(u64::from(word.count_ones()), Ordering::Relaxed);
        }
    }

    /// The next commit must write this block.
    pub(super) fn mark_dirty(&self, block: usize) {
        self.dirty[block].store(true, Ordering::Release);
    }

    /// The first changed block from `from` on. Its mark is removed: bits that are set from now on
    /// mark it again.
    pub(super) fn take_dirty(&self, from: usize) -> Option<usize> {
        interleave::mark_interleave_point();
        let marked = |block: &usize| {
            self.dirty[*block].load(Ordering::Relaxed) && self.dirty[*block].swap(false, Ordering::AcqRel)
        };
        (from..self.dirty.len()).find(marked)
    }

    /// The words of a block.
    pub(super) fn words_of(&self, block: usize) -> impl Iterator<Item = u64> + '_ {
        let words = self.words[block * WORDS_PER_BLOCK..].iter().take(WORDS_PER_BLOCK);
        words.map(|word| word.load(Ordering::Acquire))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use udm_core::{Bio, Sector};

    #[test]
    fn a_region_is_claimed_once_and_stays_hydrated() {
        let map = RegionMap::new(Sectors(100_000 * 8 - 3), Sectors(8));
        assert_eq!(map.count(), 100_000);
        assert_eq!(map.claim(5, || ()), RegionClaim::Claimed);
        assert_eq!(map.claim(5, || ()), RegionClaim::Busy);
        assert_eq!(map.claim(5 + CLAIM_SLOTS as u64, || ()), RegionClaim::Busy, "it shares the slot");
        map.release(5);
        assert_eq!(map.claim(5, || ()), RegionClaim::Claimed);
        map.set(5);
        assert_eq!(map.claim(5, || ()), RegionClaim::Hydrated);
        assert_eq!(map.claim(5 + CLAIM_SLOTS as u64, || ()), RegionClaim::Claimed);
        map.set(5 + CLAIM_SLOTS as u64);
        assert_eq!((map.hydrated(), map.next_hydrated(6, 100_000)), (2, Some(4101)));
        assert_eq!(map.next_unhydrated(5, 100_000), Some(6));
        assert_eq!(map.next_unhydrated(5, 6), None);
        assert_eq!((map.take_dirty(0), map.take_dirty(0)), (Some(0), None));
        map.claim(99_999, || ());
        map.set(99_999);
        assert_eq!(map.take_dirty(0), Some(3), "99999 / (64 * 508)");
    }

    #[test]
    fn ranges_of_whole_regions() {
        let map = RegionMap::new(Sectors(45), Sectors(8));
        let bio = |sector, sectors| Bio::read(Sector(sector), Sectors(sectors), Default::default());
        for (sector, sectors, covers, covered) in [
            (0, 8, true, (0, 1)),
            (0, 7, false, (0, 0)),
            (1, 15, false, (1, 2)),
            (8, 16, false, (1, 3)),
            (3, 4, false, (1, 1)),
            (40, 5, true, (5, 5)),
            (32, 13, false, (4, 5)),
        ] {
            let bio = bio(sector, sectors);
            assert_eq!((map.is_covered_by(&bio), map.covered_by(&bio)), (covers, covered), "{sector}");
        }
        assert_eq!(map.sectors_of(5), (40, 45));
    }
}
