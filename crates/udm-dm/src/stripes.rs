//! The arithmetic of striping, and the interface of a target that only stripes
//! ([`TargetDataPath::Striped`]).
//!
//! Chunks are distributed over several devices, one to each in turn.
//!
//! [`TargetDataPath::Striped`]: crate::target::TargetDataPath::Striped

use crate::device_ref::ResolvedDevice;
use crate::divisor::Divisor;
use std::sync::Arc;
use udm_core::Sector;

/// The layout of chunks: chunk k is on stripe k mod n, as chunk k / n of this stripe.
#[derive(Clone, Copy, Debug)]
pub struct StripeLayout {
    stripes: Divisor,
    chunk: Divisor,
    /// Sectors of a row that are not on a given stripe.
    others: u64,
}

/// The parts of a striped target.
#[derive(Clone)]
pub struct StripedTargetDescription {
    /// The layout of its chunks.
    pub layout: StripeLayout,
    /// The device of each stripe, and the first sector there.
    pub stripes: Vec<(ResolvedDevice, Sector)>,
    /// Receives failed requests.
    pub failures: Arc<dyn StripeFailureObserver>,
}

/// Receives failed requests of stripes.
pub trait StripeFailureObserver: Send + Sync {
    /// A request failed in a way that blames the stripe. Called on the data path.
    fn failed(&self, stripe: usize);
}

impl StripeLayout {
    /// A layout of `stripes` stripes with chunks of `chunk` sectors; both are from 1 to 2^32 - 1.
    #[must_use]
    pub fn new(stripes: u64, chunk: u64) -> StripeLayout {
        StripeLayout {
            stripes: Divisor::new(stripes),
            chunk: Divisor::new(chunk),
            others: (stripes - 1) * chunk,
        }
    }

    /// Number of stripes.
    #[must_use]
    pub fn stripes(&self) -> u64 {
        self.stripes.get()
    }

    /// Sectors of a chunk.
    #[must_use]
    pub fn chunk(&self) -> u64 {
        self.chunk.get()
    }

    /// True if both numbers are powers of two.
    pub(crate) fn is_by_shifts(&self) -> bool {
        self.stripes.is_shift() && self.chunk.is_shift()
    }

    /// Number of sectors from `sector` to the end of its chunk.
    #[must_use]
    pub fn left(&self, sector: u64) -> u64 {
        self.chunk.get() - self.chunk.remainder(sector)
    }

    /// The stripe of a sector of the target, and the sector within the stripe.
    #[must_use]
    pub fn map(&self, sector: u64) -> (usize, u64) {
        let (stripe, at, _) = self.place::<false>(sector);
        (stripe, at)
    }

    /// The stripe, the sector within the stripe, and the sector within the chunk. `SHIFTS` may be
    /// true only if [`StripeLayout::is_by_shifts`] is.
    #[inline(always)]
    pub(crate) fn place<const SHIFTS: bool>(&self, sector: u64) -> (usize, u64, u64) {
        let (chunk, within) = self.chunk.div_rem_by::<SHIFTS>(sector);
        let (row, stripe) = self.stripes.div_rem_by::<SHIFTS>(chunk);
        (stripe as usize, row * self.chunk.get() + within, within)
    }

    /// Number of sectors of the target on other stripes that precede sector `at` of the first
    /// stripe.
    #[inline(always)]
    pub(crate) fn before<const SHIFTS: bool>(&self, at: u64) -> u64 {
        self.chunk.div_rem_by::<SHIFTS>(at).0 * self.others
    }

    /// The part of the target's sectors `from..to` on `stripe`: its first sector there, and its
    /// end.
    pub(crate) fn part(&self, stripe: usize, from: u64, to: u64) -> (u64, u64) {
        (self.at_or_behind(from, stripe), self.at_or_behind(to, stripe))
    }

    /// The first sector of `stripe` that maps `sector` of the target or a later one.
    fn at_or_behind(&self, sector: u64, stripe: usize) -> u64 {
        let (here, at) = self.map(sector);
        let row = at - self.chunk.remainder(at);
        match stripe.cmp(&here) {
            std::cmp::Ordering::Equal => at,
            std::cmp::Ordering::Less => row + self.chunk.get(),
            std::cmp::Ordering::Greater => row,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn there_and_back(stripes in 1..9u64, chunk in 1..70u64, sector in 0..1u64 << 50) {
            for (stripes, chunk) in [(stripes, chunk), (stripes.next_power_of_two(), chunk.next_power_of_two())] {
                let layout = StripeLayout::new(stripes, chunk);
                let (k, within) = (sector / chunk, sector % chunk);
                let (stripe, at) = layout.map(sector);
                assert_eq!((stripe as u64, at), (k % stripes, k / stripes * chunk + within));
                assert_eq!(layout.left(sector), chunk - within);
                assert_eq!(at + layout.before::<false>(at) + stripe as u64 * chunk, sector);
                assert_eq!(layout.is_by_shifts(), stripes.is_power_of_two() && chunk.is_power_of_two());
                if layout.is_by_shifts() {
                    assert_eq!(layout.place::<true>(sector), layout.place::<false>(sector));
                    assert_eq!(layout.before::<true>(at), layout.before::<false>(at));
                }
            }
        }

        #[test]
        fn parts_are_all_there_is(stripes in 1..6u64, chunk in 1..9u64, from in 0..100u64, len in 1..100u64) {
            let layout = StripeLayout::new(stripes, chunk);
            let mut on = vec![Vec::new(); stripes as usize];
            (from..from + len).map(|sector| layout.map(sector)).for_each(|(stripe, at)| on[stripe].push(at));
            for (stripe, sectors) in on.iter().enumerate() {
                let (first, end) = layout.part(stripe, from, from + len);
                assert_eq!(*sectors, (first..end.max(first)).collect::<Vec<_>>());
            }
        }
    }
}
