//! A simulated target, which is a path to a namespace, and its controllers.

use super::conn::DiskCommand;
use super::description::{ControllerDescription, NamespaceDescription};
use super::own_target::OwnTarget;
use super::resets::SimReset;
use crate::nbd::ring_core::SteppedRingCore;
use crate::rng::SimRng;
use udm_core::Nanos;
use udm_wire::nvme::{AnaState, ControllerInstance, CrossControllerResetEntry};

/// Availability of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TargetAvailability {
    /// The target works.
    Up,
    /// The target is stopped, as by SIGSTOP. Its system still accepts connections and bytes.
    Stopped,
    /// The network delivers nothing to and from the target, connects included.
    Unreachable,
    /// The network delivers nothing from the target, which receives and executes commands.
    OneWay,
    /// The target refuses connections.
    Refuses,
    /// The target accepts connections and sends nothing.
    Silent,
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
    pub(super) violations: u64,
    /// Connections that are closed within an answer.
    pub(super) closes: u64,
    /// I/O queues that are refused.
    pub(super) refusals: u64,
    /// Maximum number of bytes per send and per receive.
    pub(super) piece: u64,
    /// Mean time of a command, in ns.
    pub(super) latency: u64,
    /// The target never sends anything.
    pub(super) silent: bool,
    /// The target learns that the host has closed the connection. If not, as after a lost RST, only
    /// the keep-alive timer ends the controller.
    pub(super) notices_close: bool,
    /// The host does not learn that the keep-alive timer has ended the controller: the network
    /// delivers nothing more.
    pub(super) loses_close: bool,
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
    /// The end of the controller by its timer does not reach the host.
    loses_close: bool,
    /// Time at which it ended so.
    pub(super) vanished_at: Option<Nanos>,
    /// The host has asked for events, so the association works.
    pub(super) is_ready: bool,
    /// Time at which the host had ended the connection of the admin queue.
    pub(super) left_at: Option<Nanos>,
    /// By this instance the controller can be reset.
    pub(super) instance: Option<ControllerInstance>,
    /// Resets of other controllers that this one was asked for.
    pub(super) resets: Vec<SimReset>,
    /// The log of resets whose command was answered early, with the controllers that they reset.
    pub(super) reset_log: Vec<(usize, CrossControllerResetEntry)>,
    /// A reset has ended whose event was not reported, and whether the log was read since the last.
    pub(super) reset_ended: bool,
    pub(super) is_reset_armed: bool,
    /// Controllers whose successful reset is reported, and not received by the host yet.
    pub(super) fenced: Vec<usize>,
    /// Time at which the host received that this controller was reset.
    pub(super) fence_received: Option<Nanos>,
    /// The namespace when the controller was created.
    pub(super) is_other: bool,
}

impl SimController {
    pub(super) fn new(
        target: (usize, &SimTarget),
        id: u16,
        (admin, loses_close): (usize, bool),
        keep_alive_ms: u32,
        random: u64,
        now: Nanos,
    ) -> SimController {
        let instance = ControllerInstance { id, uniquifier: 1 + (id % 250) as u8, random };
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
            loses_close,
            vanished_at: None,
            is_ready: false,
            left_at: None,
            instance: target.1.description.has_instance.then_some(instance),
            resets: Vec::new(),
            reset_log: Vec::new(),
            reset_ended: false,
            is_reset_armed: true,
            fenced: Vec::new(),
            fence_received: None,
            is_other: target.1.other.is_some(),
        }
    }

    /// Time at which the keep-alive timer is looked at next.
    pub(super) fn timer(&self) -> Nanos {
        self.restarted_at + self.kato
    }

    /// Time at which the keep-alive timer expires if no other command comes.
    fn expires_at(&self) -> Nanos {
        self.timer() + if self.has_traffic { self.kato } else { Nanos(0) }
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

    /// The timer has ended the controller. Perhaps the host does not learn of it.
    pub(super) fn lose_close(&mut self, mode: TargetAvailability, now: Nanos) {
        let is_lost = self.loses_close || mode == TargetAvailability::OneWay;
        self.vanished_at = is_lost.then_some(now);
    }

    /// Time after which the host must have ended an association whose controller has vanished.
    pub(super) fn check_at(&self, now: Nanos) -> Option<Nanos> {
        let at = self.vanished_at? + Nanos(self.kato.0 * 4);
        (self.left_at.is_none() && at > now).then_some(at)
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
    /// Since when writes of its path wait, though all lost controllers are fenced.
    pub(super) stalled_since: Option<Nanos>,
    /// Commands at the disk.
    pub(super) jobs: Vec<DiskCommand>,
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
        !matches!(self.mode, TargetAvailability::Stopped | TargetAvailability::Unreachable)
    }

    /// A controller has ended. Its commands at the disk are dropped, or land within the quiesce
    /// time.
    pub(super) fn end_commands(&mut self, controller: usize, now: Nanos, c: &mut SimRng) {
        let quiesce = self.quiesce;
        self.jobs.retain_mut(|job| {
            if job.controller != controller {
                return true;
            }
            match c.below(4) {
                0 => return false,
                // As late as the target may be.
                1 => job.due = now + quiesce,
                _ => job.due = job.due.min(now + Nanos(c.below(quiesce.0 + 1))),
            }
            job.due = job.due.min(job.limit);
            true
        });
    }

    /// The target is stopped: the commands of its controllers land within the quiesce time after
    /// the end of the keep-alive timer all the same, because initiators rely on it.
    pub(super) fn limit_commands(&mut self, controllers: &[SimController]) {
        for job in self.jobs.iter_mut().filter(|job| !controllers[job.controller].is_over) {
            job.limit = controllers[job.controller].expires_at() + self.quiesce;
            job.due = job.due.min(job.limit);
        }
    }

    /// Ends the hangs of commands.
    pub(super) fn finish_hung(&mut self, now: Nanos) {
        self.jobs.iter_mut().for_each(|job| job.due = job.due.min(now));
    }
}
