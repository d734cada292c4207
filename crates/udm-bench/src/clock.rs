//! The timers of a job: begin and end of its phases, and times of its bandwidth samples.

use crate::stats::{DIRECTIONS, JobStats, ThreadRusage};
use std::time::Duration;
use udm_core::Nanos;

/// Interval of the bandwidth samples, for minimum, maximum and deviation.
const SAMPLE: Nanos = Nanos::from_millis(500);

/// The timers of one job.
pub struct JobTimers {
    /// Begin of the current phase.
    begin: Nanos,
    /// End of the load.
    pub deadline: Nanos,
    /// Time of the last sample. `counted` has the requests and bytes of each direction at that
    /// time.
    pub sampled: Nanos,
    counted: [(u64, u64); DIRECTIONS],
    /// The next time at which a timer expires.
    pub next: Nanos,
    usage: ThreadRusage,
    /// If set, the clock also takes readings for plots.
    plots: bool,
}

impl JobTimers {
    /// Creates a clock before its first phase.
    pub fn new() -> JobTimers {
        JobTimers {
            begin: Nanos(0),
            deadline: Nanos::NEVER,
            sampled: Nanos(0),
            counted: [(0, 0); DIRECTIONS],
            next: Nanos(0),
            usage: ThreadRusage::default(),
            plots: true,
        }
    }

    /// Begins a phase.
    pub fn begin(&mut self, now: Nanos) {
        (self.begin, self.sampled, self.counted) = (now, now, [(0, 0); DIRECTIONS]);
        self.usage = ThreadRusage::now();
    }

    /// Begins another phase. Its requests count together with those of the phase before, but not in
    /// plots.
    pub fn continue_phase(&mut self, now: Nanos, stats: &JobStats) {
        self.counted = count_requests_and_bytes(stats);
        (self.next, self.plots) = (now + SAMPLE, false);
    }

    /// Takes a bandwidth sample and a reading for plots, if they are due. Sets `next`.
    pub fn sample_if_due(&mut self, now: Nanos, stats: &mut JobStats) {
        let since = now.since(self.sampled);
        if since >= SAMPLE {
            let seconds = since.0 as f64 / 1e9;
            let before = std::mem::replace(&mut self.counted, count_requests_and_bytes(stats));
            for (direction, (ios, bytes)) in stats.directions.iter_mut().zip(before) {
                if direction.ios > 0 {
                    direction.iops.push((direction.ios - ios) as f64 / seconds);
                    direction.bandwidth.push((direction.bytes - bytes) as f64 / seconds / 1024.0);
                }
            }
            self.sampled = now;
        }
        let timeline = &mut stats.parts[0].timeline;
        let begun = now.since(self.begin);
        if self.plots && begun >= timeline.due() {
            timeline.read(begun, stats.directions.each_ref().map(|d| d.bytes));
        }
        let reading = if self.plots { self.begin + timeline.due() } else { Nanos::NEVER };
        self.next = self.deadline.min(self.sampled + SAMPLE).min(reading);
    }

    /// Ends a phase and adds its time to each direction for which `ran` (direction, requests) is
    /// true.
    pub fn end(&self, now: Nanos, stats: &mut JobStats, ran: impl Fn(usize, u64) -> bool) {
        let took = now.since(self.begin);
        for (i, direction) in stats.directions.iter_mut().enumerate() {
            if ran(i, direction.ios) {
                direction.runtime = direction.runtime + took;
            }
        }
        stats.runtime = stats.runtime + took;
        let part = &mut stats.parts[0];
        if self.plots {
            part.timeline.end(took, stats.directions.each_ref().map(|d| d.bytes));
        }
        (part.ios, part.runtime) = (stats.directions.each_ref().map(|d| d.ios), stats.runtime);
        let took = Duration::from_nanos(took.0);
        stats.usage.add(&ThreadRusage::now().since(&self.usage, took));
    }
}

/// Requests and bytes so far, by direction.
fn count_requests_and_bytes(stats: &JobStats) -> [(u64, u64); DIRECTIONS] {
    stats.directions.each_ref().map(|d| (d.ios, d.bytes))
}

pub fn duration_to_nanos(t: Duration) -> Nanos {
    Nanos(u64::try_from(t.as_nanos()).unwrap_or(u64::MAX))
}
