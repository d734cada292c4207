//! What a core knows of a path.

use super::{AtomicU64, Ordering};

/// A path, as its core sees it.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::multipath) struct PathLoad {
    /// The shared load as of the begin of the batch; for a path that can't be used
    /// [`PathLoad::UNUSABLE`] besides.
    pub(super) shared: u64,
    /// How this lane's part has changed since it was last published, modulo 2^64.
    pub(super) unpublished: u64,
    /// This lane's part of the shared load.
    pub(super) published: u64,
    /// When it was last chosen or reinstated, on the lane's count. No two are equal.
    pub(in super::super) used: u64,
    /// Relative throughput, 0..=100 (service-time); 0 for a path that can't be used.
    pub(in super::super) throughput: u32,
    /// 0, or [`PathLoad::UNUSABLE`].
    pub(super) unusable_bit: u64,
}

impl PathLoad {
    /// More than any load, and far from the end of the numbers.
    pub(super) const UNUSABLE: u64 = 1 << 63;

    /// Reads `load`, the path's.
    #[inline(always)]
    pub(super) fn look(&mut self, load: &AtomicU64) {
        self.shared = load.load(Ordering::Relaxed) | self.unusable_bit;
    }

    /// All bits for a path that can be used, none for another.
    #[inline(always)]
    pub(super) fn if_usable(&self) -> u64 {
        !((self.unusable_bit as i64 >> 63) as u64)
    }

    /// It is chosen for a bio of weight `n`.
    #[inline(always)]
    pub(super) fn choose(&mut self, n: u64, clock: u64) {
        debug_assert!(self.unusable_bit == 0, "one of the paths can be used");
        (self.unpublished, self.used) = (self.unpublished.wrapping_add(n), clock);
    }

    /// Adds to `load`, the path's, how this lane's part has changed since the last time.
    pub(super) fn publish(&mut self, load: &AtomicU64) {
        // Wraps where it went down.
        load.fetch_add(self.unpublished, Ordering::Relaxed);
        self.published = self.published.wrapping_add(std::mem::take(&mut self.unpublished));
    }

    /// The load of the path, this batch's choices included.
    #[inline]
    pub(in super::super) fn load(&self) -> u64 {
        self.shared.wrapping_add(self.unpublished)
    }

    /// Orders by load, then by last use.
    #[inline]
    pub(in super::super) fn load_then_age(&self) -> u128 {
        u128::from(self.load()) << 64 | u128::from(self.used)
    }
}

#[cfg(test)]
impl PathLoad {
    /// A slot for tests of comparisons.
    pub(in super::super) fn of(load: u64, throughput: u32, used: u64) -> PathLoad {
        PathLoad { shared: load, throughput, used, ..PathLoad::default() }
    }
}
