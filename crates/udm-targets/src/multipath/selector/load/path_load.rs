//! The load of a path on one core.

use super::{AtomicU64, Ordering};

/// A path's load as seen by one core.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::multipath) struct PathLoad {
    /// The shared load at the begin of the batch. For an unusable path [`PathLoad::UNUSABLE`] is
    /// set too.
    pub(super) shared: u64,
    /// Change of this lane's part since it was last published, modulo 2^64.
    pub(super) unpublished: u64,
    /// This lane's part of the shared load.
    pub(super) published: u64,
    /// Sequence number of the last choice or reinstatement, counted per lane. No two are equal.
    pub(in super::super) used: u64,
    /// Relative throughput, 0 to 100 (service-time); 0 for an unusable path.
    pub(in super::super) throughput: u32,
    /// 0, or [`PathLoad::UNUSABLE`].
    pub(super) unusable_bit: u64,
}

impl PathLoad {
    /// More than any load, and far from overflow.
    pub(super) const UNUSABLE: u64 = 1 << 63;

    /// Reads the path's shared load.
    #[inline(always)]
    pub(super) fn look(&mut self, load: &AtomicU64) {
        self.shared = load.load(Ordering::Relaxed) | self.unusable_bit;
    }

    /// All bits set for a usable path, otherwise 0.
    #[inline(always)]
    pub(super) fn if_usable(&self) -> u64 {
        !((self.unusable_bit as i64 >> 63) as u64)
    }

    /// Chooses the path for a bio of weight `n`.
    #[inline(always)]
    pub(super) fn choose(&mut self, n: u64, clock: u64) {
        debug_assert!(self.unusable_bit == 0, "one of the paths can be used");
        (self.unpublished, self.used) = (self.unpublished.wrapping_add(n), clock);
    }

    /// Adds the unpublished change of this lane's part to `load`, the path's shared load.
    pub(super) fn publish(&mut self, load: &AtomicU64) {
        // Wraps if the part has decreased.
        load.fetch_add(self.unpublished, Ordering::Relaxed);
        self.published = self.published.wrapping_add(std::mem::take(&mut self.unpublished));
    }

    /// The load of the path, including the choices of this batch.
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
