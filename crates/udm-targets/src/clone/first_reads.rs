//! Which regions clients needed from the source, in the order of their first reads: the boot
//! profile of the machine that read them.
//!
//! Only requests of regions that are not hydrated are recorded. A region costs a bit, and an entry
//! under a lock at its first read; later reads load a word.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Maximum number of regions that are recorded.
const REGIONS_MAX: usize = 1 << 16;

/// The regions that clients needed from the source.
pub(super) struct FirstReads {
    /// One bit per region: it was needed.
    seen: Box<[AtomicU64]>,
    order: Mutex<Vec<u32>>,
}

impl FirstReads {
    /// No reads of `regions` regions.
    pub(super) fn new(regions: u64) -> FirstReads {
        let seen = (0..regions.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        FirstReads { seen, order: Mutex::default() }
    }

    /// Records that a client needs `region`. Relaxed: the order of two cores that read at once does
    /// not matter, and the lock orders the entries.
    #[inline]
    pub(super) fn record(&self, region: u64) {
        let (word, bit) = (&self.seen[(region / 64) as usize], 1 << (region % 64));
        if word.load(Ordering::Relaxed) & bit == 0 && word.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            self.add(region);
        }
    }

    #[cold]
    fn add(&self, region: u64) {
        let mut order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        if order.len() < REGIONS_MAX {
            // A clone has at most 2^31 regions.
            order.push(region as u32);
        }
    }

    /// The regions, in their order.
    pub(super) fn regions(&self) -> Vec<u64> {
        let order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        order.iter().map(|region| u64::from(*region)).collect()
    }
}
