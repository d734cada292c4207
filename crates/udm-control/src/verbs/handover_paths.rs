//! The counters of the paths of a device, for another process.

use crate::registry::RegisteredDevice;
use serde::{Deserialize, Serialize};
use udm_core::{DevNo, Nanos, Op, Status};
use udm_dm::{PathCheckResult, PathLatencyAndHedgeReport, PathReport};

/// The counters of a path.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandedOverPathCounters {
    /// The path group, from 1.
    pub group: usize,
    /// Index in `Op::ALL` of `udm_core`, completed requests, and their bytes.
    pub ops: Vec<(usize, u64, u64)>,
    /// The kernel's name of an error, and the requests that completed with it.
    pub errors: Vec<(String, u64)>,
    /// Requests that the path got after another path had failed them.
    pub retries: u64,
    /// How often the path failed.
    pub failures: u64,
    /// How long it was failed, in ns.
    pub failed_ns: u64,
    /// How often it was ejected.
    pub ejections: u64,
    /// Counters of the path watch.
    pub watch: Option<HandedOverWatchCounters>,
}

/// The counters of the watch of a path ([`PathLatencyAndHedgeReport`]).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandedOverWatchCounters {
    /// Reads past their deadline that were sent to another path.
    pub given_up: u64,
    /// Answers that nobody waited for any more.
    pub late: u64,
    /// Reads that were sent without a copy.
    pub uncopied: u64,
    /// Hedged reads.
    pub hedges: u64,
    /// Hedged reads that the other path answered first.
    pub hedges_won: u64,
    /// Hedged reads that this path answered first.
    pub hedges_wasted: u64,
    /// Reads that were hedged late or not at all.
    pub hedges_refused: u64,
    /// Hedges beyond the budget.
    pub hedges_free: u64,
    /// Upper bound in ns and number of reads of each step of [`udm_core::latency`] with reads.
    pub latency: Vec<(u64, u64)>,
    /// Sum of the latencies in ns.
    pub time_ns: u64,
}

/// The counters of the paths of the live table.
pub(super) fn paths_to_hand_over(mapped: &RegisteredDevice) -> Vec<HandedOverPathCounters> {
    let reports = mapped.device.live().map(|table| table.path_reports()).unwrap_or_default();
    reports.iter().map(counters_of_report).collect()
}

/// Goes on with the counters of the paths. A path that failed is failed again already.
pub(super) fn take_over_paths(mapped: &RegisteredDevice, from: &[HandedOverPathCounters]) {
    if let Some(table) = mapped.device.live().filter(|_| !from.is_empty()) {
        table.continue_path_counters(&from.iter().map(report_of_counters).collect::<Vec<_>>());
    }
}

fn counters_of_report(report: &PathReport) -> HandedOverPathCounters {
    let ops = report.ops.iter().enumerate().map(|(op, (requests, bytes))| (op, *requests, *bytes));
    let watch = |watch: &PathLatencyAndHedgeReport| HandedOverWatchCounters {
        given_up: watch.abandoned_reads,
        late: watch.late_completions,
        uncopied: watch.uncopied_reads,
        hedges: watch.hedges,
        hedges_won: watch.hedges_won,
        hedges_wasted: watch.hedges_wasted,
        hedges_refused: watch.hedges_refused,
        hedges_free: watch.free_hedges,
        latency: watch.latency.iter().map(|(end, reads)| (end.0, *reads)).collect(),
        time_ns: watch.time.0,
    };
    HandedOverPathCounters {
        group: report.group,
        ops: ops.filter(|(_, requests, _)| *requests > 0).collect(),
        errors: report.errors_by.iter().map(|(status, count)| (status.text().to_owned(), *count)).collect(),
        retries: report.retries,
        failures: report.fail_count,
        failed_ns: report.failed_for.0,
        ejections: report.ejections,
        watch: report.watch.as_ref().map(watch),
    }
}

/// The counters as a report of a path in no other state. Operations and errors that this program
/// does not know are left out.
fn report_of_counters(from: &HandedOverPathCounters) -> PathReport {
    let mut ops = [(0, 0); Op::ALL.len()];
    for (op, requests, bytes) in &from.ops {
        ops.get_mut(*op).into_iter().for_each(|to| *to = (*requests, *bytes));
    }
    let status = |text: &str| Status::ALL.iter().copied().find(|status| status.text() == text);
    let errors = from.errors.iter().filter_map(|(text, count)| Some((status(text)?, *count)));
    let watch = |watch: &HandedOverWatchCounters| PathLatencyAndHedgeReport {
        waiting: 0,
        abandoned_reads: watch.given_up,
        late_completions: watch.late,
        uncopied_reads: watch.uncopied,
        hedges: watch.hedges,
        hedges_won: watch.hedges_won,
        hedges_wasted: watch.hedges_wasted,
        hedges_refused: watch.hedges_refused,
        free_hedges: watch.hedges_free,
        latency: watch.latency.iter().map(|(end, reads)| (Nanos(*end), *reads)).collect(),
        time: Nanos(watch.time_ns),
    };
    PathReport {
        number: DevNo { major: 0, minor: 0 },
        name: String::new(),
        group: from.group,
        failed: false,
        fail_count: from.failures,
        in_state: Nanos(0),
        failed_for: Nanos(from.failed_ns),
        in_flight: 0,
        check: PathCheckResult::default(),
        held: None,
        prio: None,
        bios: ops.iter().map(|(requests, _)| requests).sum(),
        bytes: ops.iter().map(|(_, bytes)| bytes).sum(),
        ops,
        errors: 0,
        errors_by: errors.collect(),
        retries: from.retries,
        ejected: false,
        ejections: from.ejections,
        watch: from.watch.as_ref().map(watch),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All counters are there in the new process, and none has the value of another.
    #[test]
    fn counters_read_back() {
        let watch = HandedOverWatchCounters {
            given_up: 1,
            late: 2,
            uncopied: 3,
            hedges: 4,
            hedges_won: 5,
            hedges_wasted: 6,
            hedges_refused: 7,
            hedges_free: 8,
            latency: vec![(1280, 9), (2560, 10)],
            time_ns: 11,
        };
        let counters = HandedOverPathCounters {
            group: 2,
            ops: vec![(0, 12, 13), (3, 14, 15)],
            errors: vec![(Status::Medium.text().into(), 16), (Status::Timeout.text().into(), 17)],
            retries: 18,
            failures: 19,
            failed_ns: 20,
            ejections: 21,
            watch: Some(watch),
        };
        let text = serde_json::to_string(&counters).unwrap();
        let read: HandedOverPathCounters = serde_json::from_str(&text).unwrap();
        let mut again = counters_of_report(&report_of_counters(&read));
        again.errors.sort_by_key(|(_, count)| *count);
        assert_eq!(again, counters);
        let unknown = HandedOverPathCounters {
            ops: vec![(99, 1, 1)],
            errors: vec![("of a newer version".into(), 1)],
            ..HandedOverPathCounters::default()
        };
        assert_eq!(counters_of_report(&report_of_counters(&unknown)), HandedOverPathCounters::default());
    }
}
