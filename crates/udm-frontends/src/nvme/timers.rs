//! The timers of a queue: the end of the host, of the server, and of idle memory.

use super::queue::{NvmeQueue, QueuePhase};
use super::receive::Incoming;
use udm_core::Nanos;
use udm_runtime::FrontCx;

/// Idle time after which a queue frees the memory that it keeps for reuse.
const IDLE: Nanos = Nanos(1_000_000_000);

/// Pause between looks of an admin queue at the other queues of its association, when the server
/// stops.
const STOP_PAUSE: Nanos = Nanos(5_000_000);

impl NvmeQueue {
    /// Sets the time of the next call.
    pub(super) fn set_timers(&mut self, cx: &mut FrontCx<'_, '_>) {
        if self.phase == QueuePhase::Dead {
            return cx.wake_at(self.quiesce_until());
        }
        if self.admin.is_some() {
            self.link.association.set_alive_until(self.keep_alive_until());
        }
        if self.trim_at == Nanos::NEVER && self.reads.total_bytes() + self.writes.total_bytes() > 0 {
            // All queues use the same times, so the core wakes up once for all.
            self.trim_at = Nanos((cx.now().0 / IDLE.0 + 2) * IDLE.0);
        }
        let is_waiting = self.phase == QueuePhase::Draining && self.admin.is_some();
        let look_at = if is_waiting { cx.now() + STOP_PAUSE } else { Nanos::NEVER };
        let timers =
            look_at.min(self.deadline).min(self.trim_at).min(self.stalled_at()).min(self.keep_alive_until());
        cx.wake_at(timers.min(self.reset_answers_until()).min(self.authentication_until()));
    }

    /// The time at which a dead queue has needed longer for its requests than hosts expect; never
    /// if it has none.
    fn quiesce_until(&self) -> Nanos {
        if self.phase == QueuePhase::Dead && !self.pending.is_empty() {
            self.quiesce_until
        } else {
            Nanos::NEVER
        }
    }

    /// The time at which the host is given up because it moves no byte; never if it need not.
    fn stalled_at(&self) -> Nanos {
        let is_expected = self.sending || self.transfers > 0 || !matches!(self.incoming, Incoming::Pdu);
        match is_expected {
            true => self.host_at + Nanos(self.server.limits.stall_max.as_nanos() as u64),
            false => Nanos::NEVER,
        }
    }

    pub(super) fn timers_due(&mut self, cx: &mut FrontCx<'_, '_>) {
        let now = cx.now();
        if self.deadline <= now {
            self.die("the server stops");
        }
        if self.stalled_at() <= now && self.phase != QueuePhase::Dead {
            tracing::warn!(
                "nvme: {}: a queue moves no data, and is disconnected",
                self.link.association.host
            );
            self.die("a queue moves no data");
        }
        self.look_at_keep_alive();
        if self.authentication_until() <= now && self.phase != QueuePhase::Dead {
            self.die("its host does not authenticate itself");
        }
        self.answer_late_resets();
        if self.quiesce_until() <= now {
            self.quiesce_until = Nanos::NEVER;
            self.server.subsystem.count_late_quiesce();
            tracing::warn!(
                "nvme: controller {} of {}: {} requests are at a device for longer than the quiesce time, after \
                 which the host may repeat them over another path: set --nvme-quiesce-time to more",
                self.link.association.id,
                self.link.association.host,
                self.pending.len()
            );
        }
        if self.trim_at <= now {
            self.trim_at = Nanos::NEVER;
            if self.pending.is_empty() {
                self.trim();
            }
        }
    }

    /// Ends the association if its keep-alive timer has expired, before a command is taken.
    pub(super) fn look_at_keep_alive(&mut self) {
        let association = &self.link.association;
        let until = if self.admin.is_some() { self.keep_alive_until() } else { association.alive_until() };
        if until <= self.now && self.phase != QueuePhase::Dead {
            const WHY: &str = "the keep-alive timer has expired";
            if !association.is_ended() {
                tracing::warn!("nvme: {}: {WHY}", association.host);
            }
            association.end(WHY);
            self.die(WHY);
        }
    }

    pub(super) fn trim(&mut self) {
        self.rx.trim();
        self.tx.trim();
        self.reads.trim();
        self.writes.trim();
    }
}
