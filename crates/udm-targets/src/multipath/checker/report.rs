//! The checker's output: its status for reports, and log lines.

use super::PathChecker;
use crate::multipath::quarantine_status::QuarantineStatus;
use udm_core::{Nanos, Sectors};
use udm_wire::multipath_conf::MarginalPathPolicy;

/// The reason for refusing a path whose device is shorter than the table's range.
pub(in crate::multipath) fn short_path_refusal_reason(len: Sectors) -> String {
    format!("it is shorter than the {} bytes of the table", len.bytes())
}

impl PathChecker {
    /// Publishes timers and quarantines, converted to the path log's clock.
    pub(super) fn publish_status(&self, now: Nanos) {
        let theirs = self.shared.path_log.now();
        let at = |at: Nanos| if at == Nanos::NEVER { at } else { theirs + at.since(now) };
        let back = self.failback.plan().map(|(group, when)| (group, at(when)));
        self.checker_status.set_timers(at(self.queueing.next()), back);
        let Some(rule) = &self.settings.marginal else { return };
        for (index, path) in self.paths.iter().enumerate() {
            let held = path.quarantine.quarantine_status(rule);
            self.checker_status
                .set_quarantine(index, held.map(|held| QuarantineStatus { end: at(held.end), ..held }));
        }
    }

    /// True if the path's device is shorter than the table's range.
    pub(super) fn is_truncated(&self, index: usize) -> bool {
        let device = self.paths[index].device.as_ref();
        device.is_some_and(|device| device.device.limits().size < self.len)
    }

    /// Logs once that a failed path is refused because another or a truncated disk answers.
    pub(super) fn log_refused(&mut self, index: usize, short: bool) {
        let path = &mut self.paths[index];
        if path.refused {
            return;
        }
        let why = path.device.as_ref().and_then(|device| device.device.rejection_reason());
        if let Some(why) = why.or_else(|| short.then(|| short_path_refusal_reason(self.len))) {
            path.refused = true;
            self.shared.path_log.refused(index, &why);
        }
    }

    /// Logs that a path is now in quarantine, if it is.
    pub(super) fn log_quarantine(&self, index: usize, now: Nanos) {
        let held = |rule: &MarginalPathPolicy| {
            Some(self.paths[index].quarantine.quarantine_status(rule)?.why(now, rule))
        };
        if let Some(why) = self.settings.marginal.as_ref().and_then(held) {
            self.shared.path_log.refused(index, &why);
        }
    }
}
