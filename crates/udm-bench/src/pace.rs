//! When a job may send its next request: by a rate, and by thinking in between.

use crate::load::{Load, RateProcess};
use crate::stats::DIRECTIONS;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use udm_core::Nanos;

/// The times of a job that does not send as fast as it can.
///
/// Each kind of request has a timetable of its own. It goes on while the device is slow or stands
/// still: a request that could not be sent at its time has waited since, and its latency says so.
/// Nothing is left out because the device did not answer (which is called coordinated omission).
pub struct Pace {
    /// Nanoseconds from one request to the next: for each, and for each byte.
    each: Option<f64>,
    byte: Option<f64>,
    poisson: Option<SmallRng>,
    /// When the next one of each kind is due.
    due: [Option<f64>; DIRECTIONS],
    think: Nanos,
    think_after: u64,
    /// Sent since the last thought, and until when the one under way takes.
    sent: u64,
    until: Option<Nanos>,
    /// The timetable stands still meanwhile.
    apart: bool,
}

impl Pace {
    /// None where the load sends as fast as it can.
    pub fn new(load: &Load, seed: u64) -> Option<Pace> {
        let paced = load.rate.is_some() || load.rate_iops.is_some() || !load.thinktime.is_zero();
        paced.then(|| Pace {
            each: load.rate_iops.map(|iops| 1e9 / f64::from(iops)),
            byte: load.rate.map(|bytes| 1e9 / bytes as f64),
            poisson: (load.rate_process == RateProcess::Poisson).then(|| SmallRng::seed_from_u64(seed)),
            due: [None; DIRECTIONS],
            think: crate::clock::nanos(load.thinktime),
            think_after: load.thinktime_blocks.into(),
            sent: 0,
            until: None,
            apart: load.rate_ignore_thinktime,
        })
    }

    /// A request of so many bytes wants to be sent.
    ///
    /// # Errors
    /// When that may be. Otherwise it may now, and what is given is when it should have been.
    pub fn send(&mut self, direction: usize, bytes: u64, now: Nanos) -> Result<Nanos, Nanos> {
        let step = match (self.each, self.byte) {
            (Some(each), byte) => each.max(byte.unwrap_or(0.0) * bytes as f64),
            (None, Some(byte)) => byte * bytes as f64,
            (None, None) => {
                self.sent += 1;
                return Ok(now);
            }
        };
        let due = *self.due[direction].get_or_insert(now.0 as f64);
        let at = Nanos(due as u64);
        if at > now {
            return Err(at);
        }
        let step = match &mut self.poisson {
            // Never the logarithm of 0.
            Some(rng) => -step * (1.0 - rng.random::<f64>()).ln(),
            None => step,
        };
        self.due[direction] = Some(due + step);
        self.sent += 1;
        Ok(at)
    }

    /// Until when nothing is to be sent, for thinking; the thought begins when all has come back.
    pub fn thinks(&mut self, all_back: bool, now: Nanos) -> Option<Nanos> {
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
                if self.apart {
                    self.due.iter_mut().flatten().for_each(|due| *due += self.think.0 as f64);
                }
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::load_of;

    fn pace(text: &str) -> Pace {
        Pace::new(&load_of(text), 1).unwrap()
    }

    /// What stands still for a second has ten requests to make up for, each from its own time.
    #[test]
    fn a_timetable_goes_on() {
        let mut pace = pace("--rate_iops 10");
        let ms = Nanos::from_millis;
        assert_eq!(pace.send(0, 512, ms(1000)), Ok(ms(1000)));
        assert_eq!(pace.send(0, 512, ms(1050)), Err(ms(1100)));
        assert_eq!(pace.send(1, 512, ms(1050)), Ok(ms(1050)), "each kind has its own");
        for due in 11..=20 {
            assert_eq!(pace.send(0, 512, ms(2050)), Ok(ms(due * 100)));
        }
        assert_eq!(pace.send(0, 512, ms(2050)), Err(ms(2100)));
    }

    #[test]
    fn bytes_count() {
        let mut pace = pace("--rate 1m");
        assert_eq!(pace.send(0, 512 << 10, Nanos(0)), Ok(Nanos(0)));
        assert_eq!(pace.send(0, 512 << 10, Nanos(0)), Err(Nanos::from_millis(500)));
    }

    /// Intervals differ, and their average is what was asked for.
    #[test]
    fn poisson_has_the_rate() {
        let mut pace = pace("--rate_iops 1000 --rate_process poisson");
        let now = Nanos::NEVER;
        let _ = pace.send(0, 512, Nanos(0));
        let times: Vec<u64> = (0..10_000).map(|_| pace.send(0, 512, now).unwrap().0).collect();
        let mean = *times.last().unwrap() as f64 / 1e4;
        assert!((0.9e6..1.1e6).contains(&mean), "{mean}");
        let long = times.windows(2).filter(|w| w[1] - w[0] > 2_000_000).count();
        assert!((1000..1700).contains(&long), "{long} of 10000 are twice as long, 1353 expected");
    }

    #[test]
    fn thoughts_wait_for_what_is_in_flight() {
        for (more, next) in [("", 150), ("--rate_ignore_thinktime", 250)] {
            let mut pace = pace(&format!("--thinktime 100000 --thinktime_blocks 2 --rate_iops 20 {more}"));
            let ms = Nanos::from_millis;
            assert_eq!(pace.thinks(true, ms(50)), None);
            let _ = (pace.send(0, 512, ms(50)), pace.send(0, 512, ms(100)));
            assert_eq!(pace.thinks(false, ms(120)), Some(Nanos::NEVER));
            assert_eq!(pace.thinks(true, ms(130)), Some(ms(230)));
            assert_eq!(pace.thinks(true, ms(229)), Some(ms(230)));
            assert_eq!(pace.thinks(true, ms(230)), None);
            let sent = pace.send(0, 512, ms(1000));
            assert_eq!(sent, Ok(ms(next)), "{more}");
        }
    }
}
