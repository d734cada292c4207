//! The times of the checks of a path.

use udm_core::Nanos;
use udm_wire::multipath_conf::MultipathSettings;

/// The check times and intervals of one path.
pub(super) struct PathCheckSchedule {
    first: Nanos,
    most: Nanos,
    /// Time of the next check.
    pub due: Nanos,
    /// The interval between the last two checks while the path works; 0 before the first.
    up: Nanos,
    /// The interval between checks while the path is down.
    down: Nanos,
    /// Time when a check last reinstated the path.
    back: Option<Nanos>,
}

impl PathCheckSchedule {
    /// The schedule of a path that is assumed to work. `number` spreads the first checks of all
    /// devices over the first interval.
    pub fn new(settings: &MultipathSettings, now: Nanos, number: u32) -> PathCheckSchedule {
        let (first, most) = (settings.polling_interval, settings.max_polling_interval);
        // The golden ratio spreads consecutive numbers evenly, whatever their count.
        let part = u128::from(number.wrapping_mul(0x9e37_79b9));
        let due = now + Nanos(((u128::from(first.0) * part) >> 32) as u64);
        PathCheckSchedule { first, most, due, up: Nanos(0), down: first, back: None }
    }

    /// The path still works: the interval doubles, up to the maximum.
    pub fn works(&mut self, now: Nanos) {
        self.up = Nanos((self.up.0 * 2).clamp(self.first.0, self.most.0));
        self.due = now + self.up;
    }

    /// The path has failed. If a check reinstated it and it failed again within the last interval,
    /// the interval doubles. So a path whose first block works, but not the rest, is not in use
    /// half of the time.
    pub fn failed(&mut self, now: Nanos) {
        let soon = self.back.take().is_some_and(|back| now.since(back) < self.down);
        self.down = if soon { Nanos((self.down.0 * 2).min(self.most.0)) } else { self.first };
        self.up = Nanos(0);
        self.due = now + self.down;
    }

    /// The path is still down, or its state is unknown.
    pub fn still_down(&mut self, now: Nanos) {
        self.due = now + self.down;
    }

    /// The path is up again. `here` is true if a check reinstated it. If a message did, the path is
    /// checked at once, because its state is unknown.
    pub fn returned(&mut self, now: Nanos, here: bool) {
        self.back = here.then_some(now);
        self.up = self.first;
        self.due = if here { now + self.first } else { now };
    }

    /// A check completed but its result does not count. A path that is up is checked again at once.
    pub fn unanswered(&mut self, now: Nanos, up: bool) {
        self.due = if up { now } else { now + self.down };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn new_schedule() -> PathCheckSchedule {
        PathCheckSchedule::new(&MultipathSettings::every(5), Nanos(0), 0)
    }

    fn seconds(due: Nanos, now: u64) -> u64 {
        due.since(Nanos(now * SECOND)).0 / SECOND
    }

    #[test]
    fn d01_intervals_double_while_healthy_and_begin_anew() {
        let mut schedule = new_schedule();
        let mut now = 0;
        let mut gaps = Vec::new();
        for _ in 0..4 {
            schedule.works(Nanos(now * SECOND));
            gaps.push(seconds(schedule.due, now));
            now += gaps[gaps.len() - 1];
        }
        assert_eq!(gaps, [5, 10, 20, 20]);
        schedule.failed(Nanos(now * SECOND));
        assert_eq!(seconds(schedule.due, now), 5);
        for _ in 0..3 {
            schedule.still_down(Nanos(now * SECOND));
            assert_eq!(seconds(schedule.due, now), 5, "while it is down");
        }
        schedule.returned(Nanos(now * SECOND), true);
        assert_eq!(seconds(schedule.due, now), 5);
        schedule.works(Nanos(now * SECOND));
        assert_eq!(seconds(schedule.due, now), 10);
    }

    #[test]
    fn a_path_that_does_not_stay_up_waits_longer() {
        let mut schedule = new_schedule();
        for wait in [5, 10, 20, 20] {
            schedule.failed(Nanos(0));
            assert_eq!(seconds(schedule.due, 0), wait);
            schedule.returned(Nanos(0), true);
        }
        schedule.failed(Nanos(20 * SECOND));
        assert_eq!(seconds(schedule.due, 20), 5, "it stayed up for as long as it had waited");
        schedule.returned(Nanos(20 * SECOND), false);
        schedule.failed(Nanos(20 * SECOND));
        assert_eq!(seconds(schedule.due, 20), 5, "a message brought it back");
    }

    #[test]
    fn first_checks_are_spread() {
        let settings = MultipathSettings::every(5);
        let mut due: Vec<u64> =
            (0..16).map(|n| PathCheckSchedule::new(&settings, Nanos(0), n).due.0).collect();
        due.sort_unstable();
        assert!(due.iter().all(|&due| due < 5 * SECOND));
        let apart = due.windows(2).map(|pair| pair[1] - pair[0]).min();
        assert!(apart.is_some_and(|apart| apart > 5 * SECOND / 40), "{due:?}");
    }
}
