//! Resets of lost controllers through the controller of an admin queue.

use super::AdminConnection;
use crate::nvme::controller_resets::LostController;
use crate::nvme::remote_namespace::RemoteNamespace;
use std::sync::Arc;
use udm_core::Nanos;
use udm_wire::nvme::ControllerInstance;
use udm_wire::nvme::host::{HostAdmin, ResetOutcome};

/// Pause between reads of the log while a reset is in progress. An event usually comes earlier.
const FOLLOW_PERIOD: Nanos = Nanos::from_millis(100);

/// The resets that the controller was asked for.
#[derive(Default)]
pub(super) struct ResetsThroughController {
    /// Number of lost controllers of the process when the list was last read.
    seen: u64,
    asked: Vec<Arc<LostController>>,
    follow_at: Nanos,
}

impl AdminConnection {
    /// Asks for resets of the controllers that were lost since the last call, and follows those in
    /// progress. Returns the time of the next call.
    pub(super) fn look_at_resets(&mut self, namespace: &RemoteNamespace, now: Nanos) -> Nanos {
        let Some(admin) = &mut self.admin else { return Nanos::NEVER };
        let count = namespace.resets.count();
        if std::mem::replace(&mut self.resets.seen, count) != count {
            self.resets.ask(admin, namespace);
            self.resets.follow_at = now + FOLLOW_PERIOD;
        }
        if !self.resets.asked.iter().any(|lost| lost.is_waited_for()) {
            return Nanos::NEVER;
        }
        if now >= self.resets.follow_at {
            admin.follow_resets();
            self.resets.follow_at = now + FOLLOW_PERIOD;
        }
        self.resets.follow_at
    }

    /// Handles the end of a reset.
    #[cold]
    pub(super) fn reset_ended(
        &self,
        instance: ControllerInstance,
        outcome: ResetOutcome,
        namespace: &RemoteNamespace,
    ) {
        namespace.counters.count_reset(outcome == ResetOutcome::Succeeded);
        for lost in self.resets.asked.iter().filter(|lost| lost.instance == instance) {
            match outcome {
                ResetOutcome::Succeeded => lost.fence(&namespace.uri),
                ResetOutcome::Failed => lost.log_failure(&namespace.uri, "the reset has failed"),
                ResetOutcome::Refused(status) => {
                    lost.log_failure(&namespace.uri, &format!("it is refused with status {status}"));
                }
            }
        }
    }
}

impl ResetsThroughController {
    #[cold]
    fn ask(&mut self, admin: &mut HostAdmin, namespace: &RemoteNamespace) {
        self.asked.retain(|lost| lost.is_waited_for());
        for lost in namespace.resets.lost_beside(namespace) {
            let is_asked = self.asked.iter().any(|asked| Arc::ptr_eq(asked, &lost));
            if !is_asked && admin.reset_controller(lost.instance) {
                self.asked.push(lost);
            }
        }
    }
}
