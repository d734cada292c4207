//! Detection of a path that is much slower than the others of its group.
//!
//! The median latency of a path's reads in a window is compared with the medians of the other
//! paths. A median more than [`SLOW_FACTOR`] times theirs, and at least [`SLOW_MIN`], is a strike.
//! After [`STRIKES`] strikes in a row the path is ejected. If [`LOST_READS_MAX`] reads in a row
//! were answered only by their hedges, the path is ejected without a window.

use udm_core::Nanos;
use udm_core::latency::LatencyWindowHistogram;

/// A slow path is more than this many times slower than the others.
const SLOW_FACTOR: u64 = 4;
/// Minimum median of a slow path.
const SLOW_MIN: Nanos = Nanos::from_millis(1);
/// Number of slow windows in a row that eject a path.
const STRIKES: u32 = 3;
/// Minimum number of reads of a path in a window.
const READS_MIN: u32 = 16;
/// Number of reads in a row, answered only by hedges, that eject a path.
pub(super) const LOST_READS_MAX: u32 = 8;
/// Number of reads in a trial of an ejected path.
pub(super) const TRIAL_READS: usize = 8;

/// The score of a path on one core.
#[derive(Clone, Debug, Default)]
pub(super) struct SlowPathScore {
    strikes: u32,
    /// Reads in a row that only a hedge answered.
    pub(super) lost: u32,
    /// The median of the last window that had enough reads.
    median: Option<Nanos>,
}

/// True if `median` is slow compared to the medians of the other paths in use of the group.
fn is_median_latency_slow(median: Nanos, others: &mut [Nanos]) -> bool {
    others.sort_unstable();
    match others.get(others.len().saturating_sub(1) / 2) {
        Some(usual) => median >= SLOW_MIN && median.0 > SLOW_FACTOR * usual.0,
        None => false,
    }
}

/// Evaluates a window of the paths in use of a group. Returns the path to eject, if any.
pub(super) fn find_slow_path(
    paths: &mut [(usize, &mut SlowPathScore, &LatencyWindowHistogram)],
) -> Option<usize> {
    for (_, score, window) in paths.iter_mut().filter(|(.., window)| window.total() >= READS_MIN) {
        score.median = window.percentile(50);
    }
    let medians: Vec<_> = paths.iter().map(|(_, score, _)| score.median).collect();
    let mut verdict = None;
    for (at, (path, score, window)) in paths.iter_mut().enumerate() {
        if window.total() < READS_MIN {
            continue;
        }
        let others = medians.iter().enumerate().filter(|(other, _)| *other != at);
        let mut others: Vec<_> = others.filter_map(|(_, median)| *median).collect();
        let slow = score.median.is_some_and(|median| is_median_latency_slow(median, &mut others));
        score.strikes = if slow { score.strikes + 1 } else { 0 };
        if score.strikes >= STRIKES && verdict.is_none() {
            score.strikes = 0;
            verdict = Some(*path);
        }
    }
    verdict
}

/// True if an ejected path passed its trial: `trials` are its latencies, `others` the scores of the
/// other paths.
pub(super) fn trial_passed(trials: &mut [Nanos], others: &[&SlowPathScore]) -> bool {
    trials.sort_unstable();
    let Some(median) = trials.get(trials.len().saturating_sub(1) / 2) else { return false };
    let mut others: Vec<_> = others.iter().filter_map(|score| score.median).collect();
    !is_median_latency_slow(*median, &mut others)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(reads: u32, us: u64) -> LatencyWindowHistogram {
        let mut window = LatencyWindowHistogram::default();
        (0..reads).for_each(|_| window.add(Nanos(us * 1000)));
        window
    }

    /// The result of each window; a row has the reads and µs of each path.
    fn verdicts(windows: &[[(u32, u64); 3]]) -> Vec<Option<usize>> {
        let mut standings = vec![SlowPathScore::default(); 3];
        let one = |row: &[(u32, u64); 3]| {
            let windows: Vec<_> = row.iter().map(|(reads, us)| window(*reads, *us)).collect();
            let mut paths: Vec<_> =
                standings.iter_mut().zip(&windows).enumerate().map(|(i, (s, w))| (i, s, w)).collect();
            find_slow_path(&mut paths)
        };
        windows.iter().map(one).collect()
    }

    #[test]
    fn three_slow_windows_in_a_row() {
        let (slow, even) = ([(20, 300), (20, 9000), (20, 500)], [(20, 300), (20, 400), (20, 500)]);
        assert_eq!(verdicts(&[slow, slow, slow, slow]), [None, None, Some(1), None]);
        assert_eq!(verdicts(&[slow, slow, even, slow, slow]), [None; 5]);
        let few = [(20, 300), (15, 9000), (20, 500)];
        assert_eq!(verdicts(&[slow, few, slow, few, slow]), [None, None, None, None, Some(1)]);
    }

    #[test]
    fn what_is_slow_beside_none_or_fast_by_itself_is_not_too_slow() {
        assert_eq!(verdicts(&[[(20, 9000), (0, 0), (0, 0)]; 5]), [None; 5]);
        assert_eq!(verdicts(&[[(20, 10), (20, 900), (20, 10)]; 5]), [None; 5]);
        assert_eq!(verdicts(&[[(20, 9000), (20, 9000), (20, 9000)]; 5]), [None; 5]);
    }

    #[test]
    fn trials_are_compared_with_the_others() {
        let mut standings = [SlowPathScore::default(), SlowPathScore::default()];
        let windows = [window(20, 300), window(20, 500)];
        let mut paths: Vec<_> =
            standings.iter_mut().zip(&windows).enumerate().map(|(i, (s, w))| (i, s, w)).collect();
        find_slow_path(&mut paths);
        let others: Vec<_> = standings.iter().collect();
        let of = |us: u64| vec![Nanos(us * 1000); TRIAL_READS];
        assert!(trial_passed(&mut of(900), &others) && !trial_passed(&mut of(9000), &others));
        assert!(!trial_passed(&mut [], &others));
    }
}
