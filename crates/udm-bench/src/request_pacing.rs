//! When a job may send its next request: its rate.

use crate::load::FioLoadOptions;
use crate::per_direction::{IoRateLimit, PerDirectionOption};
use crate::stats::DIRECTIONS;
use udm_core::Nanos;

/// The send times of a job with a rate.
///
/// Each direction has its own schedule. The schedule goes on while the device is slow or stalls.
/// The latency of a late request includes its delay, so there is no coordinated omission.
pub struct RequestPacer {
    tables: [Option<RateSchedule>; DIRECTIONS],
}

/// The schedule of a direction.
struct RateSchedule {
    /// Nanoseconds between requests: per request, and per byte. The longer one counts.
    each: f64,
    byte: f64,
    /// When the next request is due; `None` before the first one.
    due: Option<f64>,
}

impl RateSchedule {
    /// The schedule of a direction; `None` if it has no rate.
    fn new(load: &FioLoadOptions, direction: usize) -> Option<RateSchedule> {
        let of = |rates: &Option<PerDirectionOption<IoRateLimit>>| {
            let rate = rates.as_ref().and_then(|rates| rates.of[direction]);
            rate.filter(|rate| rate.0 > 0).map(|rate| 1e9 / rate.0 as f64)
        };
        let (each, byte) = (of(&load.rate_iops), of(&load.rate));
        let has_rate = each.is_some() || byte.is_some();
        let (each, byte) = (each.unwrap_or(0.0), byte.unwrap_or(0.0));
        has_rate.then_some(RateSchedule { each, byte, due: None })
    }
}

impl RequestPacer {
    /// `None` if the load sends as fast as it can.
    pub fn new(load: &FioLoadOptions) -> Option<RequestPacer> {
        let tables = std::array::from_fn(|direction| RateSchedule::new(load, direction));
        tables.iter().any(Option::is_some).then_some(RequestPacer { tables })
    }

    /// The time at which the next request of a direction is due.
    pub fn due(&mut self, direction: usize, now: Nanos) -> Nanos {
        let table = self.tables[direction].as_mut();
        table.map_or(now, |table| Nanos(*table.due.get_or_insert(now.0 as f64) as u64))
    }

    /// Records that a due request was sent.
    pub fn sent(&mut self, direction: usize, bytes: u64) {
        let Some(table) = &mut self.tables[direction] else { return };
        let step = table.each.max(table.byte * bytes as f64);
        table.due = table.due.map(|due| due + step);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::parse_fio_load_options;

    fn new_pacer(text: &str) -> RequestPacer {
        RequestPacer::new(&parse_fio_load_options(text)).unwrap()
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
        let none = |text: &str| RequestPacer::new(&parse_fio_load_options(text)).is_none();
        assert!(none("--rate 0") && none("--rate_iops 0,0") && !none("--rate 0,1"));
        assert!(none(""), "as fast as it can");
    }

    #[test]
    fn bytes_count() {
        let mut pacer = new_pacer("--rate 1m");
        assert_eq!(send(&mut pacer, 0, 512 << 10, Nanos(0)), Ok(Nanos(0)));
        assert_eq!(send(&mut pacer, 0, 512 << 10, Nanos(0)), Err(Nanos::from_millis(500)));
    }
}
