//! The progress of each job over time, for plots.

use crate::stats::DIRECTIONS;
use udm_core::Nanos;

/// Maximum number of readings. When it is reached, every other reading is dropped, and the interval
/// doubles.
const READINGS: usize = 512;

/// The first interval between readings.
const EVERY: Nanos = Nanos::from_millis(50);

/// The timeline of one job of an entry.
#[derive(Clone)]
pub struct JobBytesMovedTimeline {
    pub timeline: BytesMovedTimeline,
    /// Requests of the job, set at its end. `runtime` is its run time.
    pub ios: [u64; DIRECTIONS],
    pub runtime: Nanos,
}

/// Readings of the bytes that a job has moved.
#[derive(Clone)]
pub struct BytesMovedTimeline {
    /// Readings: time since the job began, and bytes.
    readings: Vec<(Nanos, [u64; DIRECTIONS])>,
    every: Nanos,
}

impl JobBytesMovedTimeline {
    /// Creates an empty timeline.
    pub fn new() -> JobBytesMovedTimeline {
        JobBytesMovedTimeline { timeline: BytesMovedTimeline::new(), ios: [0; DIRECTIONS], runtime: Nanos(0) }
    }
}

impl BytesMovedTimeline {
    /// Creates an empty timeline. Readings allocate no more memory.
    pub fn new() -> BytesMovedTimeline {
        BytesMovedTimeline { readings: Vec::with_capacity(READINGS), every: EVERY }
    }

    /// Removes all readings.
    pub fn clear(&mut self) {
        self.readings.clear();
        self.every = EVERY;
    }

    /// When the next reading is due, since the begin of the job.
    pub fn due(&self) -> Nanos {
        self.readings.last().map_or(Nanos(0), |(at, _)| *at) + self.every
    }

    /// Adds a reading.
    pub fn read(&mut self, at: Nanos, bytes: [u64; DIRECTIONS]) {
        if self.readings.len() == READINGS {
            let mut keep = true;
            self.readings.retain(|_| {
                keep = !keep;
                keep
            });
            self.every = self.every + self.every;
        }
        self.readings.push((at, bytes));
    }

    /// Adds the last reading, unless the previous one is too close.
    pub fn end(&mut self, at: Nanos, bytes: [u64; DIRECTIONS]) {
        if self.readings.is_empty() || at.0 >= self.due().0 - self.every.0 / 2 {
            self.read(at, bytes);
        }
    }

    /// Pairs of seconds since the begin and bytes per second of a direction since the previous
    /// reading.
    pub fn rates(&self, direction: usize) -> impl Iterator<Item = (f64, f64)> {
        let mut before = (Nanos(0), 0);
        self.readings.iter().map(move |(at, bytes)| {
            let (since, until) = std::mem::replace(&mut before, (*at, bytes[direction]));
            let seconds = at.since(since).0.max(1) as f64 / 1e9;
            (at.0 as f64 / 1e9, (bytes[direction] - until) as f64 / seconds)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of readings of a long job is bounded, and they cover all of its bytes.
    #[test]
    fn a_long_job_has_few_readings() {
        let mut timeline = JobBytesMovedTimeline::new().timeline;
        let room = timeline.readings.capacity();
        let mut at = Nanos(0);
        for _ in 0..5_000 {
            at = timeline.due();
            timeline.read(at, [at.0, at.0 / 2, 0]);
        }
        assert!(timeline.readings.len() <= READINGS && timeline.readings.capacity() == room);
        assert!(timeline.rates(0).all(|(_, rate)| (rate - 1e9).abs() < 1.0));
        assert!(timeline.rates(1).all(|(_, rate)| (rate - 5e8).abs() < 1.0));
        assert_eq!(timeline.rates(2).map(|r| r.1).sum::<f64>(), 0.0);
        assert_eq!(timeline.rates(0).last().unwrap().0, at.0 as f64 / 1e9);
        timeline.clear();
        assert_eq!(timeline.due(), EVERY);
    }
}
