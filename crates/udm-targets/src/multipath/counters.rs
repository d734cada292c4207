//! I/O counters per path.
//!
//! Every lane has counters that only it writes, so counting needs no atomic read-modify-write and
//! no shared cache line. A report adds the lanes up.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use udm_core::latency::{AtomicLatencyHistogram, LatencyHistogramSnapshot};
use udm_core::{Bio, Op, Status};

/// Number of operations.
const OPS: usize = Op::ALL.len();
/// Number of statuses of a bio.
const ENDS: usize = Status::ALL.len();

/// The I/O counters of one path, summed over lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PathIoTotals {
    /// Per operation: bios completed by the path, with or without error, and their bytes.
    pub(super) ops: [(u64, u64); OPS],
    /// Per status: bios that completed with an error.
    pub(super) errors: [u64; ENDS],
    /// Bios that the path got after another path had failed them.
    pub(super) retries: u64,
    /// Bios in flight, as of the last poll of each lane.
    pub(super) in_flight: u64,
    /// Counters of the path watch, in the order of [`PathWatchCounters::cells`].
    pub(super) watched: [u64; WATCH_COUNTERS],
    /// Latency of reads in watched lanes.
    pub(super) latency: LatencyHistogramSnapshot,
}

impl Default for PathIoTotals {
    fn default() -> PathIoTotals {
        PathIoTotals {
            ops: [(0, 0); OPS],
            errors: [0; ENDS],
            retries: 0,
            in_flight: 0,
            watched: [0; WATCH_COUNTERS],
            latency: LatencyHistogramSnapshot::default(),
        }
    }
}

impl PathIoTotals {
    /// Bios completed by the path, with or without error.
    pub(super) fn bios(&self) -> u64 {
        self.ops.iter().map(|(bios, _)| bios).sum()
    }

    /// Bytes of completed bios.
    pub(super) fn bytes(&self) -> u64 {
        self.ops.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Adds another process's counters.
    fn add(&mut self, before: &PathIoTotals) {
        for ((bios, bytes), (more, more_bytes)) in self.ops.iter_mut().zip(&before.ops) {
            (*bios, *bytes) = (*bios + more, *bytes + more_bytes);
        }
        let sums = self.errors.iter_mut().zip(&before.errors);
        let sums = sums.chain(self.watched.iter_mut().zip(&before.watched));
        sums.chain(self.latency.steps.iter_mut().zip(&before.latency.steps)).for_each(|(to, n)| *to += n);
        self.retries += before.retries;
        self.latency.time.0 += before.latency.time.0;
    }

    /// Bios that completed with an error that blames the path.
    pub(super) fn path_errors(&self) -> u64 {
        let blames = |(status, _): &(&Status, &u64)| status.fails_path();
        Status::ALL.iter().zip(&self.errors).filter(blames).map(|(_, count)| count).sum()
    }
}

/// The counters of one path in one lane.
#[derive(Debug, Default)]
pub(super) struct LanePathCounters {
    ops: [(AtomicU64, AtomicU64); OPS],
    errors: [AtomicU64; ENDS],
    retries: AtomicU64,
    in_flight: AtomicU64,
    pub(super) watched: PathWatchCounters,
    /// Present only if the lane is watched.
    pub(super) latency: Option<Box<AtomicLatencyHistogram>>,
}

/// Number of counters of a path watch.
const WATCH_COUNTERS: usize = 9;

/// Counters of one lane's path watch for one path ([`udm_dm::PathLatencyAndHedgeReport`]).
#[derive(Debug, Default)]
pub(super) struct PathWatchCounters {
    pub(super) waiting: AtomicU64,
    pub(super) abandoned_reads: AtomicU64,
    pub(super) late_completions: AtomicU64,
    pub(super) uncopied_reads: AtomicU64,
    pub(super) hedges: AtomicU64,
    pub(super) hedges_won: AtomicU64,
    pub(super) hedges_wasted: AtomicU64,
    pub(super) hedges_refused: AtomicU64,
    pub(super) free_hedges: AtomicU64,
}

impl PathWatchCounters {
    /// Adds `n` to one of the counters.
    pub(super) fn add(cell: &AtomicU64, n: u64) {
        LanePathCounters::bump(cell, n);
    }

    /// Subtracts `n` from one of the counters.
    pub(super) fn take(cell: &AtomicU64, n: u64) {
        cell.store(cell.load(Ordering::Relaxed) - n, Ordering::Relaxed);
    }

    fn cells(&self) -> [&AtomicU64; WATCH_COUNTERS] {
        let PathWatchCounters {
            waiting,
            abandoned_reads,
            late_completions,
            uncopied_reads,
            hedges,
            hedges_won,
            hedges_wasted,
            hedges_refused,
            free_hedges,
        } = self;
        [
            waiting,
            abandoned_reads,
            late_completions,
            uncopied_reads,
            hedges,
            hedges_won,
            hedges_wasted,
            hedges_refused,
            free_hedges,
        ]
    }
}

impl LanePathCounters {
    /// Adds to a counter that only the caller's thread writes. Relaxed: no other data depends on
    /// it.
    #[inline(always)]
    fn bump(cell: &AtomicU64, n: u64) {
        cell.store(cell.load(Ordering::Relaxed) + n, Ordering::Relaxed);
    }

    /// Counts `bios` completed bios of one operation, with `bytes` in total.
    #[inline(always)]
    pub(super) fn count_completed(&self, op: Op, bios: u64, bytes: u64) {
        let (all, sum) = &self.ops[op as usize];
        LanePathCounters::bump(all, bios);
        LanePathCounters::bump(sum, bytes);
    }

    /// Counts a bio that completed with an error.
    pub(super) fn failed(&self, bio: &Bio) {
        LanePathCounters::bump(&self.errors[bio.status as usize], 1);
    }

    /// Counts `bios` bios that another path had failed.
    pub(super) fn retried(&self, bios: u64) {
        LanePathCounters::bump(&self.retries, bios);
    }

    /// Sets the number of bios in flight.
    #[inline(always)]
    pub(super) fn set_in_flight(&self, bios: usize) {
        self.in_flight.store(bios as u64, Ordering::Relaxed);
    }

    fn add_to(&self, count: &mut PathIoTotals) {
        let add = |to: &mut u64, cell: &AtomicU64| *to += cell.load(Ordering::Relaxed);
        for ((bios, bytes), (all, sum)) in count.ops.iter_mut().zip(&self.ops) {
            add(bios, all);
            add(bytes, sum);
        }
        count.errors.iter_mut().zip(&self.errors).for_each(|(to, cell)| add(to, cell));
        add(&mut count.retries, &self.retries);
        add(&mut count.in_flight, &self.in_flight);
        count.watched.iter_mut().zip(self.watched.cells()).for_each(|(to, cell)| add(to, cell));
        self.latency.iter().for_each(|latency| latency.add_to(&mut count.latency));
    }
}

/// The counters of one lane, one entry per path.
pub(super) type LaneCountersByPath = Arc<[LanePathCounters]>;

/// The counters of all lanes of a device. Locked when a lane is opened and when a report is made,
/// never on the data path.
#[derive(Debug, Default)]
pub(super) struct MultipathDeviceCounters(Mutex<OpenAndClosedLaneCounters>);

#[derive(Debug, Default)]
struct OpenAndClosedLaneCounters {
    rows: Vec<LaneCountersByPath>,
    /// Counters of lanes that were closed.
    past: Vec<PathIoTotals>,
}

impl MultipathDeviceCounters {
    /// Counters for a new lane with `paths` paths; `watched` adds latency counters.
    pub(super) fn open(&self, paths: usize, watched: bool) -> LaneCountersByPath {
        let latency = || watched.then(Box::<AtomicLatencyHistogram>::default);
        let row: LaneCountersByPath = (0..paths)
            .map(|_| LanePathCounters { latency: latency(), ..LanePathCounters::default() })
            .collect();
        let mut state = self.0.lock().unwrap_or_else(|e| e.into_inner());
        state.retire(paths);
        state.rows.push(row.clone());
        row
    }

    /// Goes on from what another process has counted for each path, as if by lanes that are closed.
    pub(super) fn add_past(&self, before: impl ExactSizeIterator<Item = PathIoTotals>) {
        let mut state = self.0.lock().unwrap_or_else(|e| e.into_inner());
        state.retire(before.len());
        state.past.iter_mut().zip(before).for_each(|(past, before)| past.add(&before));
    }

    /// The counters of each of the `paths` paths.
    pub(super) fn total(&self, paths: usize) -> Vec<PathIoTotals> {
        let mut state = self.0.lock().unwrap_or_else(|e| e.into_inner());
        state.retire(paths);
        let mut total = state.past.clone();
        for row in &state.rows {
            row.iter().zip(&mut total).for_each(|(counter, count)| counter.add_to(count));
        }
        total
    }
}

impl OpenAndClosedLaneCounters {
    /// Adds up the rows that only this list still holds, and drops them.
    fn retire(&mut self, paths: usize) {
        let past = &mut self.past;
        past.resize(paths, PathIoTotals::default());
        // Exclusive access also means that all writes of the lane are visible.
        self.rows.retain_mut(|row| match Arc::get_mut(row) {
            Some(gone) => {
                for (counter, count) in gone.iter().zip(&mut *past) {
                    counter.add_to(count);
                    // The closed lane has no bios in flight.
                    (count.in_flight, count.watched[0]) = (0, 0);
                }
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
        let served = MultipathDeviceCounters::default();
        let (a, b) = (served.open(2, false), served.open(2, true));
        a[0].count_completed(Op::Read, 3, 12);
        a[0].set_in_flight(5);
        b[1].count_completed(Op::Write, 1, 4);
        for status in [Status::Timeout, Status::Medium] {
            let mut bio = Bio::new();
            bio.end_with(status);
            b[1].failed(&bio);
        }
        b[1].retried(2);
        b[1].set_in_flight(1);
        assert_eq!(served.total(2)[0].in_flight, 5);
        drop(a);
        for _ in 0..2 {
            let [first, second] = served.total(2)[..] else { panic!("two paths") };
            assert_eq!((first.ops[Op::Read as usize], first.in_flight), ((3, 12), 0), "retired once");
            assert_eq!((second.bios(), second.bytes(), second.path_errors()), (1, 4, 1));
            assert_eq!((second.errors[Status::Medium as usize], second.retries), (1, 2));
            assert_eq!(second.in_flight, 1);
        }
    }

    #[test]
    fn counts_of_another_process_are_added() {
        let served = MultipathDeviceCounters::default();
        let lanes = served.open(2, true);
        lanes[1].count_completed(Op::Read, 1, 4);
        lanes[1].set_in_flight(1);
        let mut before = PathIoTotals { retries: 3, ..PathIoTotals::default() };
        before.ops[Op::Read as usize] = (5, 20);
        (before.errors[Status::Medium as usize], before.watched[4]) = (6, 2);
        (before.latency.steps[0], before.latency.time) = (7, udm_core::Nanos(9));
        served.add_past([PathIoTotals::default(), before].into_iter());
        assert_eq!(served.total(2)[1].in_flight, 1);
        drop(lanes);
        for _ in 0..2 {
            let [first, second] = served.total(2)[..] else { panic!("two paths") };
            assert_eq!(first, PathIoTotals::default());
            let ops = [(6, 24), (0, 0), (0, 0), (0, 0), (0, 0)];
            assert_eq!(second, PathIoTotals { ops, in_flight: 0, ..before });
        }
    }
}
