//! What the world does with its controllers at each step: keep-alive timers, resets of other
//! controllers, and checks of what the initiator makes of them.

use super::resets::{ResetPhase, SimReset};
use super::target::{AnaReport, TargetAvailability};
use super::world::NvmeClientWorld;
use crate::model::Violation;
use crate::remote_disk::shared::lock_front_end_state;
use udm_core::Nanos;
use udm_wire::nvme::host::{ana_priority, is_usable};

/// Time in which the initiator does what it received: all cores have learned of it.
pub(super) const NOTICE_TIME: Nanos = Nanos::from_millis(5);

/// Time in which the initiator ends an association after an answer that violates the protocol, or
/// sends writes elsewhere after a reset.
const REACTION_TIME: Nanos = Nanos::from_millis(100);

/// Keep-alive timeouts after which the initiator has ended an association without answers: half of
/// one until the next Keep Alive, and one until it is overdue.
const SILENCE_TIMEOUTS: u64 = 2;

impl NvmeClientWorld {
    /// Index of the connection of the admin queue of controller `number`, if it works.
    pub(super) fn admin_conn(&self, number: usize) -> Option<usize> {
        let link = self.controllers[number].admin;
        self.conns.iter().position(|conn| conn.link == link && !conn.closing && !conn.is_over())
    }

    /// Time at which a controller has something to do. A stopped target looks at timers when it
    /// continues.
    pub(super) fn next_timer(&self) -> Nanos {
        let is_running = |target: usize| self.targets[target].mode != TargetAvailability::Stopped;
        let all = self.controllers.iter().filter(|one| !one.is_over && is_running(one.target));
        let resets = all
            .clone()
            .flat_map(|one| &one.resets)
            .map(|reset| reset.due)
            .filter(|due| *due > self.machine.now);
        let checks = self.controllers.iter().filter_map(|one| one.check_at(self.machine.now));
        all.map(super::target::SimController::timer).chain(resets).chain(checks).min().unwrap_or(Nanos::NEVER)
    }

    /// Ends the controllers whose keep-alive timer has expired, and notes what the host has
    /// received.
    pub(super) fn look_at_controllers(&mut self) {
        for number in 0..self.controllers.len() {
            self.note_received(number);
            let one = &mut self.controllers[number];
            if one.is_over || self.targets[one.target].mode == TargetAvailability::Stopped {
                continue;
            }
            if one.look_at_timer(self.machine.now) {
                self.counts.expired += 1;
                self.end_controller(number, "its keep-alive timer expires");
                let mode = self.targets[self.controllers[number].target].mode;
                self.controllers[number].lose_close(mode, self.machine.now);
            } else if !self.controllers[number].resets.is_empty() {
                self.advance_resets(number);
            }
        }
    }

    /// Ends a controller.
    fn end_controller(&mut self, number: usize, why: &str) {
        let one = &mut self.controllers[number];
        if std::mem::replace(&mut one.is_over, true) {
            return;
        }
        let target = &mut self.targets[one.target];
        target.end_commands(number, self.machine.now, &mut self.machine.chance);
        let mut shared = lock_front_end_state(&self.machine.shared);
        shared.model.exports[target.namespace].trouble(self.machine.now);
        shared.say(format!("controller {number} ends: {why}"));
    }

    /// Notes which reports of controller `number` the host has received, and when it has left.
    fn note_received(&mut self, number: usize) {
        let one = &self.controllers[number];
        if one.left_at.is_some() {
            return;
        }
        let net = self.machine.net.borrow();
        let link = &net.links[one.admin];
        let has_left = link.shut || link.half_shut || link.broken;
        let conn = self.conns.iter().find(|conn| conn.link == one.admin);
        let has_received = conn.is_some_and(|conn| conn.has_delivered(&net));
        drop(net);
        let (now, one) = (self.machine.now, &mut self.controllers[number]);
        one.left_at = has_left.then_some(now);
        if has_received && let Some((_, report @ AnaReport::Sent)) = &mut one.ana_report {
            *report = AnaReport::Received(now);
        }
        if has_received {
            let done: Vec<usize> = one.fenced.drain(..).collect();
            for victim in done {
                self.controllers[victim].fence_received.get_or_insert(now);
            }
        }
    }

    /// Continues the resets that controller `source` was asked for.
    fn advance_resets(&mut self, source: usize) {
        let Some(conn) =
            self.admin_conn(source).filter(|_| self.targets[self.controllers[source].target].is_awake())
        else {
            return;
        };
        for i in 0..self.controllers[source].resets.len() {
            let SimReset { victim, phase, due, fails, .. } = self.controllers[source].resets[i];
            if phase == ResetPhase::Asked {
                self.end_controller(victim, "another controller resets it");
                self.controllers[source].resets[i].phase = ResetPhase::Begun;
            }
            // A reset that fails may end while commands are at the disk.
            let jobs = &self.targets[self.controllers[victim].target].jobs;
            let is_quiet = fails || jobs.iter().all(|job| job.controller != victim);
            if due <= self.machine.now {
                self.with_conn(conn, |conn, a| conn.advance_reset(source, i, is_quiet, a));
            }
        }
        self.controllers[source].resets.retain(|reset| reset.phase != ResetPhase::Over);
    }

    /// Checks what the initiator has made of violations, of silent controllers, of ANA states and
    /// of resets.
    pub(super) fn check_hosts(&mut self) -> Result<(), Violation> {
        if self.machine.paths.is_empty() {
            return Ok(());
        }
        let (now, net) = (self.machine.now, self.machine.net.borrow());
        for conn in self.conns.iter_mut().filter(|conn| conn.has_violated && !conn.is_over()) {
            let link = &net.links[conn.link];
            if link.shut || link.half_shut || link.broken {
                continue;
            }
            match conn.violation_received {
                None if conn.has_delivered(&net) => conn.violation_received = Some(now),
                Some(at) if now.since(at) > REACTION_TIME => {
                    return Err(format!(
                        "connection {} goes on, though its target violated the protocol",
                        conn.link
                    ));
                }
                _ => {}
            }
        }
        for (number, one) in self.controllers.iter().enumerate() {
            if one.left_at.is_some() || !one.is_ready {
                continue;
            }
            if let Some(at) = one.vanished_at
                && now.since(at) > Nanos(one.kato.0 * SILENCE_TIMEOUTS) + REACTION_TIME
            {
                return Err(format!("controller {number} has gone, and the host misses no Keep Alive"));
            }
            if let Some((state, AnaReport::Received(at))) = one.ana_report
                && now.since(at) > NOTICE_TIME
            {
                let path = &self.machine.paths[one.target];
                let knows = path.rejection_reason().is_some() != is_usable(state);
                if !knows || path.path_priority() != Some(ana_priority(state)) {
                    return Err(format!("t{} is {state:?}, and its path does not show it", one.target));
                }
            }
        }
        drop(net);
        (0..self.targets.len()).try_for_each(|t| self.check_stall(t))
    }

    /// Checks that writes do not wait for controllers that the host knows to be reset.
    fn check_stall(&mut self, t: usize) -> Result<(), Violation> {
        let now = self.machine.now;
        let fence_max = |kato: Nanos| Nanos(3 * kato.0) + self.targets[t].quiesce + Nanos(1_000_000_000);
        let mut its = self.controllers.iter().filter(|one| one.target == t && one.is_ready);
        let is_fenced = its.all(|one| {
            one.fence_received.is_some()
                || one.left_at.is_none_or(|left| now.since(left) > fence_max(one.kato))
        });
        let stalls =
            is_fenced && self.targets[t].own.is_none() && self.machine.paths[t].stall_reason().is_some();
        let target = &mut self.targets[t];
        match (stalls, target.stalled_since) {
            (false, _) => target.stalled_since = None,
            (true, None) => target.stalled_since = Some(now),
            (true, Some(since)) if now.since(since) > REACTION_TIME => {
                return Err(format!("writes of t{t} wait, though all its lost controllers are fenced"));
            }
            (true, Some(_)) => {}
        }
        Ok(())
    }
}
