//! When a job may send its next request: its rate, and its pauses.

use crate::load::{FioLoadOptions, RateProcess};
use crate::request_lengths::{IoRateLimit, PerDirection};
use crate::stats::DIRECTIONS;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use udm_core::Nanos;

/// The send times of a job with a rate or pauses.
///
/// Each direction has its own schedule. The schedule goes on while the device is slow or stalls.
/// The latency of a late request includes its delay, so there is no coordinated omission.
pub struct RequestPacer {
    tables: [Option<RateSchedule>; DIRECTIONS],
    poisson: Option<SmallRng>,
    think: Nanos,
    think_after: u64,
    /// Requests since the last pause, and the end of the current pause.
    sent: u64,
    until: Option<Nanos>,
}

/// The schedule of a direction.
struct RateSchedule {
    /// Nanoseconds between requests: per request, and per byte. The longer one counts.
    each: f64,
    byte: f64,
    /// When the next request is due; `None` before the first one.
    due: Option<f64>,
    /// Nanoseconds by which a pause delays the next request.
    thought: f64,
}

impl RateSchedule {
    /// The schedule of a direction; `None` if it has no rate.
    fn new(load: &FioLoadOptions, direction: usize) -> Option<RateSchedule> {
        let think = crate::clock::duration_to_nanos(load.thinktime).0 as f64;
        let of = |rates: &Option<PerDirection<IoRateLimit>>| {
            let rate = rates.as_ref().and_then(|rates| rates.of[direction]);
            rate.filter(|rate| rate.0 > 0).map(|rate| 1e9 / rate.0 as f64)
        };
        let (each, byte) = (of(&load.rate_iops), of(&load.rate));
        let has_rate = each.is_some() || byte.is_some();
        let (each, byte) = (each.unwrap_or(0.0), byte.unwrap_or(0.0));
        let step = each.max(byte * load.sizes(direction).min as f64);
        // The first request after the pause is due at once if its interval is not longer than the
        // pause (fio's `handle_thinktime`).
        let at_once = step <= think && load.rate_process != RateProcess::Poisson;
        let thought = match load.rate_ignore_thinktime {
            false => 0.0,
            true => think - if at_once { step } else { 0.0 },
        };
        has_rate.then_some(RateSchedule { each, byte, due: None, thought })
    }
}

impl RequestPacer {
    /// `None` if the load sends as fast as it can.
    pub fn new(load: &FioLoadOptions, seed: u64) -> Option<RequestPacer> {
        let tables = std::array::from_fn(|direction| RateSchedule::new(load, direction));
        let paced = tables.iter().any(Option::is_some) || !load.thinktime.is_zero();
        paced.then(|| RequestPacer {
            tables,
            poisson: (load.rate_process == RateProcess::Poisson).then(|| SmallRng::seed_from_u64(seed)),
            think: crate::clock::duration_to_nanos(load.thinktime),
            think_after: load.thinktime_blocks.into(),
            sent: 0,
            until: None,
        })
    }

    /// The time at which the next request of a direction is due.
    pub fn due(&mut self, direction: usize, now: Nanos) -> Nanos {
        let table = self.tables[direction].as_mut();
        table.map_or(now, |table| Nanos(*table.due.get_or_insert(now.0 as f64) as u64))
    }

    /// Records that a due request was sent.
    pub fn sent(&mut self, direction: usize, bytes: u64) {
        self.sent += 1;
        let Some(table) = &mut self.tables[direction] else { return };
        let step = table.each.max(table.byte * bytes as f64);
        let step = match &mut self.poisson {
            // This avoids the logarithm of 0.
            Some(rng) => -step * (1.0 - rng.random::<f64>()).ln(),
            None => step,
        };
        table.due = table.due.map(|due| due + step);
    }

    /// The end of the pause; `None` if requests may be sent. A pause begins when nothing is in
    /// flight.
    pub fn think_until(&mut self, all_back: bool, now: Nanos) -> Option<Nanos> {
        if self.think == Nanos(0) || self.sent < self.think_after {
            return None;
        }
        match self.until {
            None if !all_back => Some(Nanos::NEVER),
            None => {
                let until = now + self.think;
                self.until = Some(until);
                Some(until)
            }
            Some(until) if now < until => Some(until),
            Some(_) => {
                (self.until, self.sent) = (None, 0);
                for table in self.tables.iter_mut().flatten() {
                    table.due = table.due.map(|due| due + table.thought);
                }
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::parse_fio_load_options;

    fn new_pacer(text: &str) -> RequestPacer {
        RequestPacer::new(&parse_fio_load_options(text), 1).unwrap()
    }

    /// Sends a request if it is due. Returns its due time, as an error if that is later than `now`.
    fn send(pacer: &mut RequestPacer, direction: usize, bytes: u64, now: Nanos) -> Result<Nanos, Nanos> {
        let due = pacer.due(direction, now);
        if due > now {
            return Err(due);
        }
        pacer.sent(direction, bytes);
        Ok(due)
    }

    /// After a stall of a second, ten requests are late, each with its own due time.
    #[test]
    fn a_timetable_goes_on() {
        let mut pacer = new_pacer("--rate_iops 10");
        let ms = Nanos::from_millis;
        assert_eq!(send(&mut pacer, 0, 512, ms(1000)), Ok(ms(1000)));
        assert_eq!(send(&mut pacer, 0, 512, ms(1050)), Err(ms(1100)));
        assert_eq!(send(&mut pacer, 1, 512, ms(1050)), Ok(ms(1050)), "each kind has its own");
        for due in 11..=20 {
            assert_eq!(send(&mut pacer, 0, 512, ms(2050)), Ok(ms(due * 100)));
        }
        assert_eq!(send(&mut pacer, 0, 512, ms(2050)), Err(ms(2100)));
    }

    #[test]
    fn directions_have_rates_of_their_own() {
        let ms = Nanos::from_millis;
        for text in ["--rate_iops 10,20,0", "--rate 5120,10240,0"] {
            let mut pacer = new_pacer(text);
            (0..3).for_each(|direction| pacer.sent(direction, 512));
            let due = [0, 1, 2].map(|direction| pacer.due(direction, ms(7)));
            assert_eq!(due, [ms(7); 3], "the first is due at once");
            (0..3).for_each(|direction| pacer.sent(direction, 512));
            let due = [0, 1, 2].map(|direction| pacer.due(direction, ms(7)));
            assert_eq!(due, [ms(107), ms(57), ms(7)], "{text}");
        }
        let none = |text: &str| RequestPacer::new(&parse_fio_load_options(text), 1).is_none();
        assert!(none("--rate 0") && none("--rate_iops 0,0") && !none("--rate 0,1"));
        assert!(none(""), "as fast as it can");
    }

    #[test]
    fn bytes_count() {
        let mut pacer = new_pacer("--rate 1m");
        assert_eq!(send(&mut pacer, 0, 512 << 10, Nanos(0)), Ok(Nanos(0)));
        assert_eq!(send(&mut pacer, 0, 512 << 10, Nanos(0)), Err(Nanos::from_millis(500)));
    }

    /// Intervals differ, and their average matches the rate.
    #[test]
    fn poisson_has_the_rate() {
        let mut pacer = new_pacer("--rate_iops 1000 --rate_process poisson");
        let now = Nanos::NEVER;
        let _ = send(&mut pacer, 0, 512, Nanos(0));
        let times: Vec<u64> = (0..10_000).map(|_| send(&mut pacer, 0, 512, now).unwrap().0).collect();
        let mean = *times.last().unwrap() as f64 / 1e4;
        assert!((0.9e6..1.1e6).contains(&mean), "{mean}");
        let long = times.windows(2).filter(|w| w[1] - w[0] > 2_000_000).count();
        assert!((1000..1700).contains(&long), "{long} of 10000 are twice as long, 1353 expected");
    }

    #[test]
    fn thoughts_wait_for_what_is_in_flight() {
        for (more, next) in [("", 150), ("--rate_ignore_thinktime", 200)] {
            let mut pacer =
                new_pacer(&format!("--thinktime 100000 --thinktime_blocks 2 --rate_iops 20 {more}"));
            let ms = Nanos::from_millis;
            assert_eq!(pacer.think_until(true, ms(50)), None);
            let _ = (send(&mut pacer, 0, 512, ms(50)), send(&mut pacer, 0, 512, ms(100)));
            assert_eq!(pacer.think_until(false, ms(120)), Some(Nanos::NEVER));
            assert_eq!(pacer.think_until(true, ms(130)), Some(ms(230)));
            assert_eq!(pacer.think_until(true, ms(229)), Some(ms(230)));
            assert_eq!(pacer.think_until(true, ms(230)), None);
            let sent = send(&mut pacer, 0, 512, ms(1000));
            assert_eq!(sent, Ok(ms(next)), "{more}");
        }
    }
}
