//! What jobs have done so far, for whoever looks on.

use crossbeam_utils::CachePadded;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Finished requests: a counter a job, on a cache line of its own, written once a turn.
pub struct Progress(Vec<CachePadded<AtomicU64>>);

impl Progress {
    /// For so many jobs.
    #[must_use]
    pub fn new(jobs: usize) -> Progress {
        Progress((0..jobs).map(|_| CachePadded::default()).collect())
    }

    /// The counter of a job.
    pub(crate) fn counter(&self, job: usize) -> &AtomicU64 {
        &self.0[job]
    }

    /// How many requests all jobs have finished.
    #[must_use]
    pub fn done(&self) -> u64 {
        self.0.iter().map(|n| n.load(Relaxed)).sum()
    }
}
