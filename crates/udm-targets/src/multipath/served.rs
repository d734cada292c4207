//! How much each path has served.
//!
//! Every lane counts on its own, in numbers that it alone writes, so counting costs no atomic
//! read-modify-write and no shared cache line. Whoever asks adds the lanes up.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// What one path has served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Count {
    /// Bios that came back from it, well or not.
    pub(super) bios: u64,
    /// Their bytes.
    pub(super) bytes: u64,
    /// Those that came back with an error that blames the path.
    pub(super) errors: u64,
}

/// The counters of one path in one lane.
#[derive(Debug, Default)]
pub(super) struct Counter {
    bios: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
}

impl Counter {
    /// Adds to a number that only the caller's thread writes. Relaxed: nothing hangs on it.
    fn bump(cell: &AtomicU64, n: u64) {
        cell.store(cell.load(Ordering::Relaxed) + n, Ordering::Relaxed);
    }

    /// A batch came back. Once a poll.
    pub(super) fn served(&self, bios: u64, bytes: u64) {
        Counter::bump(&self.bios, bios);
        Counter::bump(&self.bytes, bytes);
    }

    /// Some of it with path errors.
    pub(super) fn failed(&self, bios: u64) {
        Counter::bump(&self.errors, bios);
    }

    fn add_to(&self, count: &mut Count) {
        count.bios += self.bios.load(Ordering::Relaxed);
        count.bytes += self.bytes.load(Ordering::Relaxed);
        count.errors += self.errors.load(Ordering::Relaxed);
    }
}

/// The counters of one lane, a path each.
pub(super) type Row = Arc<[Counter]>;

/// The counters of all lanes of a device. Locked when a lane is opened and when someone asks, never
/// on the data path.
#[derive(Debug, Default)]
pub(super) struct Served(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    rows: Vec<Row>,
    /// What lanes counted that are gone.
    past: Vec<Count>,
}

impl Served {
    /// Counters for a new lane over `paths` paths.
    pub(super) fn open(&self, paths: usize) -> Row {
        let row: Row = (0..paths).map(|_| Counter::default()).collect();
        let mut state = self.0.lock().unwrap_or_else(|e| e.into_inner());
        state.retire(paths);
        state.rows.push(row.clone());
        row
    }

    /// What each of the `paths` paths has served.
    pub(super) fn total(&self, paths: usize) -> Vec<Count> {
        let mut state = self.0.lock().unwrap_or_else(|e| e.into_inner());
        state.retire(paths);
        let mut total = state.past.clone();
        for row in &state.rows {
            row.iter().zip(&mut total).for_each(|(counter, count)| counter.add_to(count));
        }
        total
    }
}

impl State {
    /// Adds up the rows that only this list still holds, and drops them.
    fn retire(&mut self, paths: usize) {
        let past = &mut self.past;
        past.resize(paths, Count::default());
        // Exclusive access also means that all its lane wrote is seen.
        self.rows.retain_mut(|row| match Arc::get_mut(row) {
            Some(gone) => {
                gone.iter().zip(&mut *past).for_each(|(counter, count)| counter.add_to(count));
                false
            }
            None => true,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_outlive_their_lane() {
        let served = Served::default();
        let (a, b) = (served.open(2), served.open(2));
        a[0].served(3, 12);
        b[1].served(1, 4);
        b[1].failed(1);
        drop(a);
        let want = [Count { bios: 3, bytes: 12, errors: 0 }, Count { bios: 1, bytes: 4, errors: 1 }];
        assert_eq!(served.total(2), want);
        assert_eq!(served.total(2), want, "a row is retired once");
    }
}
