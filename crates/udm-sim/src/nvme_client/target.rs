//! A simulated target, which is a path to a namespace, and its controllers.

use super::conn::StoredJob;
use super::description::{ControllerDescription, NamespaceDescription};
use super::own_target::OwnTarget;
use crate::nbd::ring_core::SteppedRingCore;
use crate::rng::SimRng;
use udm_core::Nanos;
use udm_wire::nvme::AnaState;

/// Availability of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TargetAvailability {
    /// The target works.
    Up,
    /// The target is stopped, as by SIGSTOP. Its system still accepts connections and bytes.
    Stopped,
    /// The network delivers nothing to and from the target, connects included.
    Hole,
    /// The target refuses connections.
    Refuses,
    /// The target accepts connections and sends nothing.
    Mute,
    /// The target has returned with another namespace.
    Other,
}

/// How often things go wrong on a connection: one of this many; 0 for never.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConnBehavior {
    /// Commands that hang, and Keep Alives without an answer.
    pub(super) hangs: u64,
    pub(super) errors: u64,
    /// Writes that are refused before their data has come.
    pub(super) early: u64,
    /// PDUs that violate the protocol.
    pub(super) lies: u64,
    /// Connections that are closed within an answer.
    pub(super) closes: u64,
    /// I/O queues that are refused.
    pub(super) refusals: u64,
    /// Maximum number of bytes per send and per receive.
    pub(super) piece: u64,
    /// Mean time of a command, in ns.
    pub(super) latency: u64,
    /// The target never sends anything.
    pub(super) mute: bool,
    /// The target learns that the host has closed the connection. If not, as after a lost RST, only
    /// the keep-alive timer ends the controller.
    pub(super) notices_close: bool,
}

/// A report of an ANA state that the host has read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AnaReport {
    /// The answer is on its way to the host.
    Sent,
    /// The host received it at this time.
    Received(Nanos),
}

/// A controller, which is one association.
pub(super) struct SimController {
    pub(super) target: usize,
    pub(super) id: u16,
    /// The connection of the admin queue.
    pub(super) admin: usize,
    /// The I/O queues with an open connection.
    pub(super) queues: Vec<u16>,
    pub(super) kato: Nanos,
    /// Time of the last restart of the keep-alive timer, and whether a command came since.
    restarted_at: Nanos,
    has_traffic: bool,
    is_traffic_based: bool,
    pub(super) is_enabled: bool,
    /// The command that waits for an event.
    pub(super) event_request: Option<u16>,
    /// Events are reported: the host has asked for them.
    pub(super) reports_events: bool,
    /// Changes that were not reported yet, and whether the last report was read.
    pub(super) namespace_changed: bool,
    pub(super) ana_changed: bool,
    pub(super) is_namespace_armed: bool,
    pub(super) is_ana_armed: bool,
    /// The state in the last ANA log that the host has read.
    pub(super) ana_report: Option<(AnaState, AnaReport)>,
    pub(super) is_over: bool,
    /// The namespace when the controller was created.
    pub(super) is_other: bool,
}

impl SimController {
    pub(super) fn new(
        target: (usize, &SimTarget),
        id: u16,
        admin: usize,
        keep_alive_ms: u32,
        now: Nanos,
    ) -> SimController {
        let step = 100 * u64::from(target.1.description.keep_alive_steps);
        SimController {
            target: target.0,
            id,
            admin,
            queues: Vec::new(),
            kato: Nanos::from_millis(u64::from(keep_alive_ms).next_multiple_of(step)),
            restarted_at: now,
            has_traffic: false,
            is_traffic_based: target.1.description.is_traffic_based,
            is_enabled: false,
            event_request: None,
            reports_events: false,
            namespace_changed: false,
            ana_changed: false,
            is_namespace_armed: true,
            is_ana_armed: true,
            ana_report: None,
            is_over: false,
            is_other: target.1.other.is_some(),
        }
    }

    /// Time at which the keep-alive timer is looked at next.
    pub(super) fn timer(&self) -> Nanos {
        self.restarted_at + self.kato
    }

    /// Looks at the timer. Returns true if it has expired.
    pub(super) fn look_at_timer(&mut self, now: Nanos) -> bool {
        if now < self.timer() {
            return false;
        }
        if !std::mem::take(&mut self.has_traffic) {
            return true;
        }
        self.restarted_at = self.timer();
        self.look_at_timer(now)
    }

    /// A command has come.
    pub(super) fn note_command(&mut self, is_keep_alive: bool, now: Nanos) {
        if is_keep_alive {
            self.restarted_at = now;
            self.has_traffic = false;
        } else if self.is_traffic_based {
            self.has_traffic = true;
        }
    }
}

/// A target.
pub(super) struct SimTarget {
    /// Index of the namespace.
    pub(super) namespace: usize,
    pub(super) description: ControllerDescription,
    pub(super) mode: TargetAvailability,
    /// The namespace while the mode is [`TargetAvailability::Other`].
    pub(super) other: Option<NamespaceDescription>,
    /// End of the present fault.
    pub(super) until: Nanos,
    pub(super) ana: AnaState,
    /// Number of changes of the ANA state.
    pub(super) ana_changes: u64,
    /// End of the present ANA state, if it is a bad one.
    pub(super) ana_until: Nanos,
    /// Commands at the disk.
    pub(super) jobs: Vec<StoredJob>,
    /// Mean time of a command, in ns.
    pub(super) latency: u64,
    /// The time that commands need after the end of a controller.
    pub(super) quiesce: Nanos,
    /// udm's own target, which has none of the controllers here.
    pub(super) own: Option<OwnTarget>,
}

impl SimTarget {
    /// The cores of udm's own target; none if it is stopped, or a model.
    pub(super) fn own_cores(&self) -> impl Iterator<Item = (usize, &SteppedRingCore)> {
        let is_running = self.mode != TargetAvailability::Stopped;
        self.own.iter().filter(move |_| is_running).flat_map(|own| own.cores.iter().enumerate())
    }

    /// True if the target moves bytes now.
    pub(super) fn is_awake(&self) -> bool {
        !matches!(self.mode, TargetAvailability::Stopped | TargetAvailability::Hole)
    }

    /// A controller has ended. Its commands at the disk are dropped, or land within the quiesce
    /// time.
    pub(super) fn end_commands(&mut self, controller: usize, now: Nanos, c: &mut SimRng) {
        let quiesce = self.quiesce;
        self.jobs.retain_mut(|job| {
            if job.controller != controller {
                return true;
            }
            job.due = job.due.min(now + Nanos(c.below(quiesce.0 + 1)));
            !c.one_in(4)
        });
    }

    /// Ends the hangs of commands.
    pub(super) fn finish_hung(&mut self, now: Nanos) {
        self.jobs.iter_mut().for_each(|job| job.due = job.due.min(now));
    }
}
