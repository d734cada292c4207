//! What a core knows of a path.

use super::{AtomicU64, Ordering};

/// A path, as its core sees it.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::multipath) struct Slot {
    /// The shared load as of the begin of the batch; for a path that can't be used
    /// [`Slot::UNUSABLE`] besides.
    pub(super) shared: u64,
    /// How this lane's part has changed since it was last published, modulo 2^64.
    pub(super) fresh: u64,
    /// This lane's part of the shared load.
    pub(super) published: u64,
    /// When it was last chosen or reinstated, on the lane's count. No two are equal.
    pub(in super::super) used: u64,
    /// Relative throughput, 0..=100 (service-time); 0 for a path that can't be used.
    pub(in super::super) throughput: u32,
    /// 0, or [`Slot::UNUSABLE`].
    pub(super) bar: u64,
}

impl Slot {
    /// More than any load, and far from the end of the numbers.
    pub(super) const UNUSABLE: u64 = 1 << 63;

    /// Reads `load`, the path's.
    #[inline(always)]
    pub(super) fn look(&mut self, load: &AtomicU64) {
        self.shared = load.load(Ordering::Relaxed) | self.bar;
    }

    /// All bits for a path that can be used, none for another.
    #[inline(always)]
    pub(super) fn if_usable(&self) -> u64 {
        !((self.bar as i64 >> 63) as u64)
    }

    /// It is chosen for a bio of weight `n`.
    #[inline(always)]
    pub(super) fn choose(&mut self, n: u64, clock: u64) {
        debug_assert!(self.bar == 0, "one of the paths can be used");
        (self.fresh, self.used) = (self.fresh.wrapping_add(n), clock);
    }

    /// Adds to `load`, the path's, how this lane's part has changed since the last time.
    pub(super) fn publish(&mut self, load: &AtomicU64) {
        // Wraps where it went down.
        load.fetch_add(self.fresh, Ordering::Relaxed);
        self.published = self.published.wrapping_add(std::mem::take(&mut self.fresh));
    }

    /// The load of the path, this batch's choices included.
    #[inline]
    pub(in super::super) fn load(&self) -> u64 {
        self.shared.wrapping_add(self.fresh)
    }

    /// Orders by load, then by last use.
    #[inline]
    pub(in super::super) fn load_then_age(&self) -> u128 {
        u128::from(self.load()) << 64 | u128::from(self.used)
    }
}

#[cfg(test)]
impl Slot {
    /// A slot for tests of comparisons.
    pub(in super::super) fn of(load: u64, throughput: u32, used: u64) -> Slot {
        Slot { shared: load, throughput, used, ..Slot::default() }
    }
}
