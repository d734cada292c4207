//! The texts of `table` and `status`, byte for byte as the kernel prints them (each field followed
//! by one space), and the reports per path.

use super::Multipath;
use super::checker;
use super::counters::PathIoTotals;
use super::parse::QueueMode;
use super::path_maintenance::PathWatchOptions;
use super::state::PackedMultipathState;
use std::fmt::Write;
use udm_core::latency::latency_bucket_end;
use udm_core::{Nanos, Status};
use udm_dm::target::ResolvedDevice;
use udm_dm::{PathLatencyAndHedgeReport, PathReport, QueueingAndFailbackReport};

/// Appends a field.
macro_rules! field {
    ($out:expr, $($arg:tt)*) => {{
        // Writing to a String can't fail.
        let _ = write!($out, "{} ", format_args!($($arg)*));
    }};
}

impl Multipath {
    /// The number of the next group, else of the current one, else of the first.
    fn shown_group(&self, word: PackedMultipathState) -> usize {
        match word.next().or(word.current()) {
            Some(group) => group + 1,
            None => usize::from(!self.groups.is_empty()),
        }
    }

    pub(super) fn table_text(&self) -> String {
        let word = self.shared.word();
        let f = &self.features;
        let mut features = Vec::new();
        if word.has(PackedMultipathState::QUEUE_IF_NO_PATH) {
            features.push("queue_if_no_path".to_string());
        }
        if let Some(n) = f.pg_init_retries {
            features.extend(["pg_init_retries".to_string(), n.to_string()]);
        }
        if let Some(n) = f.pg_init_delay_msecs {
            features.extend(["pg_init_delay_msecs".to_string(), n.to_string()]);
        }
        if f.retain_attached_hw_handler {
            features.push("retain_attached_hw_handler".to_string());
        }
        if f.queue_mode == QueueMode::Bio {
            features.extend(["queue_mode".to_string(), "bio".to_string()]);
        }
        let mut out = String::new();
        field!(out, "{}", features.len());
        for word in features {
            field!(out, "{word}");
        }
        match &self.handler {
            Some(name) => field!(out, "1 {name}"),
            None => field!(out, "0"),
        }
        field!(out, "{} {}", self.groups.len(), self.shown_group(word));
        for group in &self.groups {
            let s = &group.selector;
            field!(out, "{} {} {} {}", s.name(), s.args(), group.paths.len(), s.path_arg_count());
            for (i, path) in group.paths.iter().enumerate() {
                field!(out, "{}", path.number);
                if s.path_arg_count() > 0 {
                    field!(out, "{}", s.path_args(i));
                }
            }
        }
        out
    }

    pub(super) fn status_text(&self) -> String {
        let word = self.shared.word();
        let mut out = String::new();
        // No handler is ever active, so the counts of group activations and handler status are 0.
        field!(out, "2 {} 0 0", u8::from(word.has(PackedMultipathState::QUEUE_IO)));
        field!(out, "{} {}", self.groups.len(), self.shown_group(word));
        let mut paths = 0..;
        for (g, group) in self.groups.iter().enumerate() {
            let state = match (self.shared.is_bypassed(g), word.current() == Some(g)) {
                (true, _) => 'D',
                (false, true) => 'A',
                (false, false) => 'E',
            };
            let s = &group.selector;
            field!(out, "{state} {} {} {}", s.args(), group.paths.len(), s.path_info_count());
            for (i, (path, index)) in group.paths.iter().zip(&mut paths).enumerate() {
                let view = self.shared.path(index);
                let state = if view.failed { 'F' } else { 'A' };
                let failures = view.fail_count + self.carried(index).failures;
                field!(out, "{} {state} {failures}", path.number);
                if s.path_info_count() > 0 {
                    field!(out, "{}", s.path_info(i));
                }
            }
        }
        out
    }

    /// The path maintenance report: timers and the manual group; `None` if paths are not checked.
    pub(super) fn path_maintenance(&self) -> Option<QueueingAndFailbackReport> {
        let path_log = &self.shared.path_log;
        path_log.settings()?;
        let now = path_log.now();
        let left = |at: Nanos| at.since(now);
        let queueing = self.shared.word().queues_after_resume();
        let fails_at = Some(self.checker_status.fails_at()).filter(|at| queueing && *at != Nanos::NEVER);
        Some(QueueingAndFailbackReport {
            queueing,
            fails_in: fails_at.map(left),
            failback: self.checker_status.back().map(|(group, at)| (group + 1, left(at))),
            manual_group: self.shared.manual_group().map(|group| group + 1),
        })
    }

    /// The reason why no check reinstates a failed path.
    fn held(&self, index: usize, device: &ResolvedDevice) -> Option<String> {
        let view = self.shared.path(index);
        if view.held {
            return Some("by command".into());
        }
        let back = || {
            let (path_log, held) = (&self.shared.path_log, self.checker_status.quarantine_status(index)?);
            Some(held.why(path_log.now(), &path_log.settings()?.marginal?))
        };
        let short =
            || self.checker_status.is_truncated(index).then(|| checker::short_path_refusal_reason(self.len));
        if view.failed { device.device.rejection_reason().or_else(back).or_else(short) } else { None }
    }

    /// The state and I/O counters of every path.
    pub(super) fn reports(&self) -> Vec<PathReport> {
        let totals = self.counters.total(self.shared.path_count());
        let rows = self.paths().zip(totals).enumerate();
        rows.map(|(index, ((group, device), totals))| {
            let view = self.shared.path(index);
            let (times, carried) = (self.shared.times(index), self.carried(index));
            let kinds = Status::ALL.iter().copied().zip(totals.errors);
            PathReport {
                number: device.number,
                name: device.name.clone(),
                group: group + 1,
                failed: view.failed,
                fail_count: view.fail_count + carried.failures,
                check: self.checker_status.state(index),
                held: self.held(index, device),
                prio: self.checker_status.prio(index),
                in_state: times.in_state,
                failed_for: Nanos(times.failed.0 + carried.failed_for.0),
                in_flight: totals.in_flight,
                bios: totals.bios(),
                bytes: totals.bytes(),
                ops: totals.ops,
                errors: totals.path_errors(),
                errors_by: kinds.filter(|(_, count)| *count > 0).collect(),
                retries: totals.retries,
                ejected: view.ejected,
                ejections: self.shared.ejection(index).count() + carried.ejections,
                watch: self
                    .watch
                    .get()
                    .is_some_and(PathWatchOptions::is_on)
                    .then(|| make_path_watch_report(&totals)),
            }
        })
        .collect()
    }
}

/// The path watch counters of a path.
fn make_path_watch_report(totals: &PathIoTotals) -> PathLatencyAndHedgeReport {
    let [
        waiting,
        abandoned_reads,
        late_completions,
        uncopied_reads,
        hedges,
        hedges_won,
        hedges_wasted,
        hedges_refused,
        free_hedges,
    ] = totals.watched;
    let steps = totals.latency.steps.iter().enumerate().filter(|(_, count)| **count > 0);
    let latency = steps.map(|(step, count)| (latency_bucket_end(step), *count)).collect();
    PathLatencyAndHedgeReport {
        waiting,
        abandoned_reads,
        late_completions,
        uncopied_reads,
        hedges,
        hedges_won,
        hedges_wasted,
        hedges_refused,
        free_hedges,
        latency,
        time: totals.latency.time,
    }
}
