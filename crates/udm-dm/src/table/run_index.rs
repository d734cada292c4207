//! Finds the run of a sector among many runs, mostly without a search.

/// An index of several runs of sectors. The runs are in order and do not overlap.
pub(super) struct SectorRunIndex {
    /// The end of each run.
    ends: Box<[u64]>,
    /// For each stretch of 2^`shift` sectors, its run. If a stretch touches several runs, this is
    /// the first one, marked with [`SEVERAL`].
    stretches: Box<[u32]>,
    shift: u32,
}

/// Number of stretches per run.
const STRETCHES: u64 = 32;

/// Marks a stretch that touches several runs.
const SEVERAL: u32 = 1 << 31;

impl SectorRunIndex {
    /// Creates an index of runs with these ends. Each run begins at the end of the previous one, or
    /// later.
    pub fn new(ends: Box<[u64]>) -> SectorRunIndex {
        let (size, last) = (ends.last().copied().unwrap_or_default(), ends.len().saturating_sub(1));
        let most = STRETCHES * ends.len() as u64;
        let shift = (0..u64::BITS).find(|&shift| size >> shift <= most).unwrap_or_default();
        let find = |sector| ends.partition_point(|&end| end <= sector).min(last) as u32;
        let stretch = |n: u64| {
            let (first, last) = (find(n << shift), find((n << shift) + ((1 << shift) - 1)));
            if first == last { first } else { first | SEVERAL }
        };
        let stretches = (0..=size >> shift).map(stretch).collect();
        SectorRunIndex { ends, stretches, shift }
    }

    /// Returns the entry of `list` for the run of `sector`, if it is found without a search. For a
    /// sector outside of all runs, the result is arbitrary.
    #[inline(always)]
    pub fn pick<'a, T>(&self, list: &'a [T], sector: u64) -> Option<&'a T> {
        // No list is long enough to have an entry for an index with the [`SEVERAL`] mark.
        list.get(*self.stretches.get((sector >> self.shift) as usize)? as usize)
    }

    /// The run of `sector`. For a sector outside of all runs, the result is arbitrary, or the
    /// number of runs.
    #[inline(always)]
    pub fn find(&self, sector: u64) -> usize {
        match self.stretches.get((sector >> self.shift) as usize) {
            Some(&run) if run & SEVERAL == 0 => run as usize,
            _ => self.search(sector),
        }
    }

    #[cold]
    fn search(&self, sector: u64) -> usize {
        self.ends.partition_point(|&end| end <= sector)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn each_sector_is_found(lengths in prop::collection::vec((0..3u64, 1..300u64), 1..20), at: u64) {
            let mut end = 0;
            let mut runs = Vec::new();
            for (gap, len) in lengths {
                runs.push(end + gap..end + gap + len);
                end += gap + len;
            }
            let index = SectorRunIndex::new(runs.iter().map(|run| run.end).collect());
            let numbers: Vec<usize> = (0..runs.len()).collect();
            for (i, run) in runs.iter().enumerate() {
                for sector in run.clone() {
                    assert_eq!(index.find(sector), i);
                    assert!(index.pick(&numbers, sector).is_none_or(|&found| found == i));
                }
            }
            // For sectors outside of all runs, the result only has to be in range.
            assert!(index.find(end + at % 1000) <= runs.len() && index.find(at) <= runs.len());
        }
    }

    #[test]
    fn runs_at_the_far_end() {
        let index = SectorRunIndex::new([8, 1 << 54, (1 << 54) + 8].into());
        for (sector, run) in [(0, 0), (7, 0), (8, 1), ((1 << 54) - 1, 1), (1 << 54, 2), ((1 << 54) + 7, 2)] {
            assert_eq!(index.find(sector), run, "{sector}");
        }
    }

    #[test]
    fn runs_of_whole_stretches_are_plain() {
        let index = SectorRunIndex::new([240, 480, 800].into());
        assert!((0..800).all(|sector| index.pick(&[0, 1, 2], sector).is_some()));
    }
}
