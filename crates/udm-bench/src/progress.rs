//! The progress of jobs, for a progress line.

use crossbeam_utils::CachePadded;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Completed requests: one counter per job, on its own cache line, written once per turn.
pub struct JobProgressCounters(Vec<CachePadded<AtomicU64>>);

impl JobProgressCounters {
    /// Creates counters for `jobs` jobs.
    #[must_use]
    pub fn new(jobs: usize) -> JobProgressCounters {
        JobProgressCounters((0..jobs).map(|_| CachePadded::default()).collect())
    }

    /// The counter of a job.
    pub(crate) fn counter(&self, job: usize) -> &AtomicU64 {
        &self.0[job]
    }

    /// Completed requests of all jobs.
    #[must_use]
    pub fn done(&self) -> u64 {
        self.0.iter().map(|n| n.load(Relaxed)).sum()
    }
}
