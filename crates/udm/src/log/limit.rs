//! How often each place in the code may log: 32 lines at once, and one a second after that.
//!
//! A place is a `tracing` callsite. Its budget is one atomic, the time at which it would be whole again; there is no lock, since cores log too.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Places that are told apart. The program has a few dozen; more share the last one's budget.
const PLACES: usize = 256;

/// Lines that a place may log at once.
const BURST: u64 = 32;

/// What a line costs, in milliseconds of the budget.
const LINE_MS: u64 = 1000;

pub(super) struct Limit {
    places: Box<[Place]>,
    /// Some place has left lines out.
    left_out: AtomicBool,
}

#[derive(Default)]
struct Place {
    /// Which callsite it is; 0 for none yet.
    key: AtomicUsize,
    /// When its budget is whole again, in milliseconds.
    whole_at_ms: AtomicU64,
    left_out: AtomicU64,
}

/// What may be done with a line of a place.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Write it; the number is the place's.
    Write(usize),
    /// Leave it out. True for the first after a report: somebody has to be woken that will report it.
    LeaveOut(bool),
}

impl Limit {
    pub fn new() -> Limit {
        Limit { places: (0..PLACES).map(|_| Place::default()).collect(), left_out: AtomicBool::new(false) }
    }

    /// A line of the callsite `key`, which is not 0.
    pub fn line(&self, key: usize, now_ms: u64) -> Verdict {
        let index = self.place(key);
        let place = &self.places[index];
        let take = |whole_at: u64| {
            let whole_at = whole_at.max(now_ms) + LINE_MS;
            (whole_at - now_ms <= BURST * LINE_MS).then_some(whole_at)
        };
        if place.whole_at_ms.fetch_update(Relaxed, Relaxed, take).is_ok() {
            return Verdict::Write(index);
        }
        place.left_out.fetch_add(1, Relaxed);
        Verdict::LeaveOut(!self.left_out.swap(true, Relaxed))
    }

    /// True when there is something to report.
    pub fn has_left_out(&self) -> bool {
        self.left_out.load(Relaxed)
    }

    /// Calls `say` with each place that has left lines out since the last report, and how many.
    pub fn report(&self, mut say: impl FnMut(usize, u64)) {
        self.left_out.store(false, Relaxed);
        for (index, place) in self.places.iter().enumerate() {
            let n = place.left_out.swap(0, Relaxed);
            if n > 0 {
                say(index, n);
            }
        }
    }

    /// The place of a callsite, taken on its first line.
    fn place(&self, key: usize) -> usize {
        // Callsites are statics some words apart.
        let first = (key >> 4) % PLACES;
        (0..PLACES)
            .map(|i| (first + i) % PLACES)
            .find(|&i| {
                let place = &self.places[i].key;
                // A place that is known is read and not written, so that cores do not pass its line to and fro.
                match place.load(Relaxed) {
                    0 => {
                        place.compare_exchange(0, key, Relaxed, Relaxed).is_ok() || place.load(Relaxed) == key
                    }
                    taken => taken == key,
                }
            })
            .unwrap_or(PLACES - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(limit: &Limit, key: usize, now_ms: u64, lines: usize) -> usize {
        (0..lines).filter(|_| matches!(limit.line(key, now_ms), Verdict::Write(_))).count()
    }

    #[test]
    fn a_burst_and_then_one_a_second() {
        let limit = Limit::new();
        assert_eq!(written(&limit, 16, 5, 1000), 32);
        assert_eq!(written(&limit, 16, 1004, 10), 0);
        assert_eq!(written(&limit, 16, 1005, 10), 1);
        assert_eq!(written(&limit, 16, 11_005, 100), 10);
        assert_eq!(written(&limit, 16, 1_000_000, 100), 32, "a budget is whole again and not more");
        assert_eq!(written(&limit, 32, 5, 1000), 32, "other places have their own");
    }

    #[test]
    fn what_is_left_out_is_counted_and_reported_once() {
        let limit = Limit::new();
        assert_eq!(written(&limit, 16, 0, 32), 32);
        assert!(!limit.has_left_out());
        assert_eq!(limit.line(16, 0), Verdict::LeaveOut(true));
        assert_eq!(limit.line(16, 0), Verdict::LeaveOut(false));
        let mut said = Vec::new();
        limit.report(|place, n| said.push((place, n)));
        assert_eq!(said, [(1, 2)]);
        assert!(!limit.has_left_out());
        limit.report(|_, _| panic!("twice"));
        assert_eq!(limit.line(16, 0), Verdict::LeaveOut(true));
    }

    #[test]
    fn more_places_than_are_told_apart() {
        let limit = Limit::new();
        for key in 1..=2 * PLACES {
            // In range, and no endless search.
            written(&limit, key << 4, 0, 1);
        }
    }
}
