//! Latency histograms with buckets that grow with the latency.
//!
//! There are four buckets per doubling, from 1 µs to about 34 s, so a bucket is at most a quarter
//! of its lower bound wide. Shorter or longer latencies count in the first or last bucket.

use crate::Nanos;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Number of buckets.
pub const STEPS: usize = 4 * (OCTAVES as usize);
/// Number of doublings from the shortest latency to the longest.
const OCTAVES: u32 = 25;
/// Log2 of the shortest latency in ns.
const SHORTEST: u32 = 10;

/// Bucket of `time`.
fn latency_bucket_index(time: Nanos) -> usize {
    let time = time.0.max(1 << SHORTEST);
    let octave = time.ilog2();
    let quarter = (time >> (octave - 2)) & 3;
    (((octave - SHORTEST) * 4) as usize + quarter as usize).min(STEPS - 1)
}

/// Exclusive upper bound of a bucket.
pub fn latency_bucket_end(bucket: usize) -> Nanos {
    let (octave, quarter) = (SHORTEST + bucket as u32 / 4, bucket as u64 % 4);
    Nanos((5 + quarter) << (octave - 2))
}

/// A histogram that one core writes and other threads may read.
#[derive(Debug)]
pub struct AtomicLatencyHistogram {
    steps: [AtomicU64; STEPS],
    sum: AtomicU64,
}

impl Default for AtomicLatencyHistogram {
    fn default() -> AtomicLatencyHistogram {
        AtomicLatencyHistogram { steps: std::array::from_fn(|_| AtomicU64::new(0)), sum: AtomicU64::new(0) }
    }
}

/// A snapshot of histograms of any number of cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatencyHistogramSnapshot {
    /// Number of requests per bucket.
    pub steps: [u64; STEPS],
    /// Sum of all latencies.
    pub time: Nanos,
}

impl Default for LatencyHistogramSnapshot {
    fn default() -> LatencyHistogramSnapshot {
        LatencyHistogramSnapshot { steps: [0; STEPS], time: Nanos(0) }
    }
}

impl AtomicLatencyHistogram {
    /// Counts a request that took `time`. Only the core that owns the counters may call it.
    pub fn add(&self, time: Nanos) {
        let cell = &self.steps[latency_bucket_index(time)];
        cell.store(cell.load(Relaxed) + 1, Relaxed);
        self.sum.store(self.sum.load(Relaxed).saturating_add(time.0), Relaxed);
    }

    /// Adds these counters to `sum`.
    pub fn add_to(&self, sum: &mut LatencyHistogramSnapshot) {
        sum.steps.iter_mut().zip(&self.steps).for_each(|(sum, cell)| *sum += cell.load(Relaxed));
        sum.time = Nanos(sum.time.0.saturating_add(self.sum.load(Relaxed)));
    }
}

/// A histogram of a time window.
#[derive(Clone, Debug)]
pub struct LatencyWindowHistogram {
    counts: [u32; STEPS],
    total: u32,
}

impl Default for LatencyWindowHistogram {
    fn default() -> LatencyWindowHistogram {
        LatencyWindowHistogram { counts: [0; STEPS], total: 0 }
    }
}

impl LatencyWindowHistogram {
    /// Counts a request that took `time`.
    pub fn add(&mut self, time: Nanos) {
        self.counts[latency_bucket_index(time)] += 1;
        self.total += 1;
    }

    /// Number of requests.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Adds the counts of another window.
    pub fn merge(&mut self, other: &LatencyWindowHistogram) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(a, b)| *a += b);
        self.total += other.total;
    }

    /// The latency that `percent` % of the requests did not reach, as the end of a bucket. `None`
    /// without requests.
    pub fn percentile(&self, percent: u32) -> Option<Nanos> {
        percentile(self.counts.iter().map(|n| u64::from(*n)), u64::from(self.total), percent)
    }
}

/// As [`LatencyWindowHistogram::percentile`], for any bucket counts with the sum `total`.
pub fn percentile(counts: impl Iterator<Item = u64>, total: u64, percent: u32) -> Option<Nanos> {
    let rank = (total * u64::from(percent)).div_ceil(100).max(1);
    let mut below = 0;
    counts.enumerate().find_map(|(bucket, count)| {
        below += count;
        (below >= rank).then(|| latency_bucket_end(bucket))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_time_is_in_its_step() {
        for time in (0..40).flat_map(|bit| [1 << bit, (1 << bit) + 1, (3 << bit) - 1, (7 << bit) / 4]) {
            let at = latency_bucket_index(Nanos(time));
            assert!(time < latency_bucket_end(at).0 || at == STEPS - 1, "{time}");
            assert!(at == 0 || time >= latency_bucket_end(at - 1).0, "{time}");
        }
        let ends: Vec<_> = (0..STEPS).map(latency_bucket_end).collect();
        assert!(ends.windows(2).all(|w| w[0] < w[1]) && ends[STEPS - 1] > Nanos::from_millis(30_000));
    }

    #[test]
    fn percentiles_are_within_a_step() {
        let mut window = LatencyWindowHistogram::default();
        assert_eq!(window.percentile(50), None);
        (1..=1000).for_each(|us| window.add(Nanos(us * 1000)));
        for percent in [1, 50, 95, 99, 100] {
            let (got, want) = (window.percentile(percent).unwrap().0, u64::from(percent) * 10_000);
            assert!(got >= want && got <= want + want / 3, "p{percent}: {got} for {want}");
        }
        let total = AtomicLatencyHistogram::default();
        let mut sum = LatencyHistogramSnapshot::default();
        total.add(Nanos(5));
        total.add_to(&mut sum);
        assert_eq!(sum.time, Nanos(5));
        total.add(Nanos::NEVER);
        total.add_to(&mut sum);
        assert_eq!((sum.steps[0], sum.steps[STEPS - 1], sum.steps.iter().sum::<u64>()), (2, 1, 3));
    }
}
