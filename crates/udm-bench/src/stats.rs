//! The counters of a job, and their sums over jobs.

use crate::timeline::JobBytesMovedTimeline;
use hdrhistogram::Histogram;
use nix::sys::resource::{UsageWho, getrusage};
use std::time::Duration;
use udm_core::{Nanos, Op};

/// Reads, writes, trims: the order of fio's reports.
pub const DIRECTIONS: usize = 3;

/// The direction of an operation that moves or discards blocks.
pub fn direction_index_of_op(op: Op) -> usize {
    match op {
        Op::Read | Op::Flush => 0,
        Op::Write | Op::WriteZeroes => 1,
        Op::Discard => 2,
    }
}

/// Latencies of one kind of request.
#[derive(Clone)]
pub struct LatencyStats {
    pub histogram: Histogram<u64>,
    pub min: u64,
    pub max: u64,
    sum: u128,
    count: u64,
}

impl LatencyStats {
    fn new() -> LatencyStats {
        // Three significant digits up to one hour. The bounds are fixed, so recording allocates no
        // memory.
        let histogram = Histogram::new_with_bounds(1, 3_600_000_000_000, 3).expect("these bounds are valid");
        LatencyStats { histogram, min: u64::MAX, max: 0, sum: 0, count: 0 }
    }

    /// Records `n` requests with a latency of `ns` each.
    #[inline]
    pub fn record(&mut self, ns: u64, n: u64) {
        self.min = self.min.min(ns);
        self.max = self.max.max(ns);
        self.sum += u128::from(ns) * u128::from(n);
        self.count += n;
        self.histogram.saturating_record_n(ns, n);
    }

    fn clear(&mut self) {
        self.histogram.reset();
        (self.min, self.max, self.sum, self.count) = (u64::MAX, 0, 0, 0);
    }

    /// Adds the latencies of another job.
    pub fn add(&mut self, other: &LatencyStats) {
        self.histogram.add(&other.histogram).expect("histograms of the same bounds");
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
        self.sum += other.sum;
        self.count += other.count;
    }

    /// Number of requests.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The shortest latency in nanoseconds; 0 if there is none.
    pub fn min(&self) -> u64 {
        if self.count == 0 { 0 } else { self.min }
    }

    /// The average in nanoseconds; 0 if there is none.
    pub fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum as f64 / self.count as f64 }
    }

    /// The standard deviation in nanoseconds.
    pub fn stdev(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.histogram.stdev() }
    }
}

/// Samples at intervals: bandwidth in KiB/s, or requests per second.
#[derive(Clone, Copy, Default)]
pub struct IntervalRateStats {
    pub min: f64,
    pub max: f64,
    pub count: u64,
    pub mean: f64,
    squares: f64,
}

impl IntervalRateStats {
    /// Adds a sample (Welford's algorithm).
    pub fn push(&mut self, x: f64) {
        self.min = if self.count == 0 { x } else { self.min.min(x) };
        self.max = self.max.max(x);
        self.count += 1;
        let off = x - self.mean;
        self.mean += off / self.count as f64;
        self.squares += off * (x - self.mean);
    }

    /// The standard deviation.
    pub fn stdev(&self) -> f64 {
        if self.count < 2 { 0.0 } else { (self.squares / (self.count - 1) as f64).sqrt() }
    }

    /// Adds the samples of a job that ran at the same time. Averages add up, as in fio.
    fn add(&mut self, other: &IntervalRateStats) {
        self.min += other.min;
        self.max += other.max;
        self.mean += other.mean;
        self.squares += other.squares;
        self.count += other.count;
    }
}

/// One direction of a job.
#[derive(Clone)]
pub struct DirectionStats {
    pub ios: u64,
    pub bytes: u64,
    pub latency: LatencyStats,
    pub bandwidth: IntervalRateStats,
    pub iops: IntervalRateStats,
    /// Time in which the job had requests of this direction.
    pub runtime: Nanos,
}

impl DirectionStats {
    /// Counts `run`: a latency and the number of its requests, each of `bs` bytes. `bs` is 0 if
    /// bytes are counted separately.
    #[inline]
    pub fn count(&mut self, run: (u64, u64), bs: u64) {
        let (ns, n) = run;
        if n > 0 {
            self.ios += n;
            self.bytes += n * bs;
            self.latency.record(ns, n);
        }
    }
}

/// Counts of batches by size: fio's `submit` and `complete` (0, 4, 8, 16, 32, 64, more).
#[derive(Clone, Copy, Default)]
pub struct BatchSizeCounts(pub [u64; 7]);

impl BatchSizeCounts {
    /// Counts a batch of `n`.
    #[inline]
    pub fn count(&mut self, n: usize) {
        let class = match n {
            0 => 0,
            1..=4 => 1,
            5..=8 => 2,
            9..=16 => 3,
            17..=32 => 4,
            33..=64 => 5,
            _ => 6,
        };
        self.0[class] += 1;
    }
}

/// All counters of a job.
#[derive(Clone)]
pub struct JobStats {
    pub directions: [DirectionStats; DIRECTIONS],
    pub sync: LatencyStats,
    /// Requests by the number in flight when they were submitted: 1, 2, 4, ... 64.
    pub depths: [u64; 7],
    pub submits: BatchSizeCounts,
    pub completes: BatchSizeCounts,
    pub runtime: Nanos,
    pub usage: ThreadRusage,
    /// The timelines of the jobs in this sum.
    pub parts: Vec<JobBytesMovedTimeline>,
}

impl JobStats {
    /// Creates empty counters.
    pub fn new() -> JobStats {
        let direction = || DirectionStats {
            ios: 0,
            bytes: 0,
            latency: LatencyStats::new(),
            bandwidth: IntervalRateStats::default(),
            iops: IntervalRateStats::default(),
            runtime: Nanos(0),
        };
        JobStats {
            directions: std::array::from_fn(|_| direction()),
            sync: LatencyStats::new(),
            depths: [0; 7],
            submits: BatchSizeCounts::default(),
            completes: BatchSizeCounts::default(),
            runtime: Nanos(0),
            usage: ThreadRusage::default(),
            parts: vec![JobBytesMovedTimeline::new()],
        }
    }

    /// Clears all counters at the end of the ramp. Memory stays allocated.
    pub fn clear(&mut self) {
        for d in &mut self.directions {
            (d.ios, d.bytes, d.bandwidth, d.iops) =
                (0, 0, IntervalRateStats::default(), IntervalRateStats::default());
            d.latency.clear();
        }
        self.sync.clear();
        self.parts.iter_mut().for_each(|part| part.timeline.clear());
        (self.depths, self.submits, self.completes) =
            ([0; 7], BatchSizeCounts::default(), BatchSizeCounts::default());
    }

    /// Adds the counters of another job.
    pub fn add(&mut self, other: &JobStats) {
        for (a, b) in self.directions.iter_mut().zip(&other.directions) {
            a.ios += b.ios;
            a.bytes += b.bytes;
            a.latency.add(&b.latency);
            a.bandwidth.add(&b.bandwidth);
            a.iops.add(&b.iops);
            a.runtime = a.runtime.max(b.runtime);
        }
        self.sync.add(&other.sync);
        let sum = |a: &mut [u64; 7], b: &[u64; 7]| a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
        sum(&mut self.depths, &other.depths);
        sum(&mut self.submits.0, &other.submits.0);
        sum(&mut self.completes.0, &other.completes.0);
        self.parts.extend_from_slice(&other.parts);
        self.usage.add(&other.usage);
        self.runtime = self.runtime.max(other.runtime);
    }
}

/// The median of `values`.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// CPU time, context switches and page faults of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ThreadRusage {
    pub user: Duration,
    pub system: Duration,
    /// Context switches, voluntary and involuntary.
    pub switches: u64,
    pub major_faults: u64,
    pub minor_faults: u64,
    /// The sum of the run times of the threads. The CPU times are a part of it.
    pub of: Duration,
}

impl ThreadRusage {
    /// The usage of the calling thread so far; zero if the system does not report it.
    pub fn now() -> ThreadRusage {
        let Ok(r) = getrusage(UsageWho::RUSAGE_THREAD) else { return ThreadRusage::default() };
        let time = |t: nix::sys::time::TimeVal| {
            Duration::from_secs(t.tv_sec() as u64) + Duration::from_micros(t.tv_usec() as u64)
        };
        let count = |n: i64| n.max(0) as u64;
        ThreadRusage {
            user: time(r.user_time()),
            system: time(r.system_time()),
            switches: count(r.voluntary_context_switches()) + count(r.involuntary_context_switches()),
            major_faults: count(r.major_page_faults()),
            minor_faults: count(r.minor_page_faults()),
            of: Duration::ZERO,
        }
    }

    /// The usage since `earlier`, in a time of `of`.
    pub fn since(&self, earlier: &ThreadRusage, of: Duration) -> ThreadRusage {
        ThreadRusage {
            user: self.user.saturating_sub(earlier.user),
            system: self.system.saturating_sub(earlier.system),
            switches: self.switches.saturating_sub(earlier.switches),
            major_faults: self.major_faults.saturating_sub(earlier.major_faults),
            minor_faults: self.minor_faults.saturating_sub(earlier.minor_faults),
            of,
        }
    }

    /// Adds the usage of another thread, or of this thread at another time.
    pub fn add(&mut self, other: &ThreadRusage) {
        self.user += other.user;
        self.system += other.system;
        self.switches += other.switches;
        self.major_faults += other.major_faults;
        self.minor_faults += other.minor_faults;
        self.of += other.of;
    }

    /// `part` as a percentage of the run time.
    pub fn percent(&self, part: Duration) -> f64 {
        if self.of.is_zero() { 0.0 } else { 100.0 * part.as_secs_f64() / self.of.as_secs_f64() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_have_mean_and_deviation() {
        let mut s = IntervalRateStats::default();
        for x in [2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0] {
            s.push(x);
        }
        assert_eq!((s.min, s.max, s.mean, s.count), (2.0, 9.0, 5.0, 8));
        assert!((s.stdev() - 2.138).abs() < 0.001);
    }

    #[test]
    fn latencies_add_up() {
        let (mut a, mut b) = (LatencyStats::new(), LatencyStats::new());
        a.record(100, 3);
        b.record(500, 1);
        a.add(&b);
        assert_eq!((a.count(), a.min(), a.max, a.mean()), (4, 100, 500, 200.0));
        a.clear();
        assert_eq!((a.count(), a.min(), a.mean()), (0, 0, 0.0));
    }

    #[test]
    fn usage_counts_this_thread() {
        let before = ThreadRusage::now();
        std::thread::sleep(Duration::from_millis(2));
        assert!(ThreadRusage::now().since(&before, Duration::from_millis(2)).switches >= 1);
    }
}
