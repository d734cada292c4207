//! Counters that the same paths had in another process: reports and status go on with them.

use super::Multipath;
use super::counters::PathIoTotals;
use udm_core::Nanos;
use udm_core::latency::latency_bucket_end;
use udm_dm::PathReport;

/// What is added to the state of a path in reports.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CarriedPathCounters {
    /// How often the path failed.
    pub(super) failures: u64,
    /// How long it was failed.
    pub(super) failed_for: Nanos,
    /// How often it was ejected.
    pub(super) ejections: u64,
}

impl Multipath {
    /// The counters of another process, without those of I/O, which lanes add up.
    pub(super) fn carried(&self, index: usize) -> CarriedPathCounters {
        self.carried.get().and_then(|all| all.get(index)).copied().unwrap_or_default()
    }

    /// Goes on with the counters of `before`, as [`udm_dm::MultipathTarget`] describes it.
    pub(super) fn carry_on(&self, before: &[PathReport]) {
        let now = self.reports();
        let is_same = before.len() == now.len() && before.iter().zip(&now).all(|(a, b)| a.group == b.group);
        if !is_same {
            return;
        }
        let carried = before.iter().zip(&now).map(|(before, now)| CarriedPathCounters {
            // A path that was failed there was failed again here.
            failures: before.fail_count.saturating_sub(now.fail_count),
            failed_for: before.failed_for,
            ejections: before.ejections,
        });
        if self.carried.set(carried.collect()).is_ok() {
            self.counters.add_past(before.iter().map(path_io_totals));
        }
    }
}

/// The counters of a report, without what is in flight.
fn path_io_totals(report: &PathReport) -> PathIoTotals {
    let mut totals = PathIoTotals { ops: report.ops, retries: report.retries, ..PathIoTotals::default() };
    for (status, count) in &report.errors_by {
        totals.errors[*status as usize] += count;
    }
    let Some(watch) = &report.watch else { return totals };
    totals.watched = [
        0,
        watch.abandoned_reads,
        watch.late_completions,
        watch.uncopied_reads,
        watch.hedges,
        watch.hedges_won,
        watch.hedges_wasted,
        watch.hedges_refused,
        watch.free_hedges,
    ];
    for (bucket, step) in totals.latency.steps.iter_mut().enumerate() {
        let same = watch.latency.iter().find(|(end, _)| *end == latency_bucket_end(bucket));
        *step = same.map_or(0, |(_, count)| *count);
    }
    totals.latency.time = watch.time;
    totals
}
