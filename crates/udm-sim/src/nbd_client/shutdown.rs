//! Quiescence of the world, its shutdown, and the checks at these times.

use super::servers::ServerAvailability;
use super::world::NbdClientWorld;
use crate::model::Violation;
use crate::nbd::ring_core::count_ring_operations;
use crate::remote_disk::shared::{WorkloadPhase, lock_front_end_state};
use udm_core::Nanos;

/// Idle time at quiescence. It is longer than the limit of a handshake, and longer than the time
/// after a fault in which errors are allowed.
const ALONE: Nanos = Nanos(120_000_000_000);

/// Maximum number of turns of cores per lane during this time.
const TURNS_ALONE: u64 = 60;

impl NbdClientWorld {
    /// Runs all steps of the plan with quiescence in between, and shuts everything down.
    pub(super) fn run(&mut self) -> Result<(), Violation> {
        while self.step < self.plan.steps {
            self.one_step()?;
            if self.step >= self.rest_at {
                self.rest()?;
                self.rest_at = self.step + 300 + self.control.span(2500);
            }
        }
        self.rest()?;
        self.end()
    }

    /// Stops faults and waits until nothing is in flight. Then lets udm idle for a while, and reads
    /// all data back.
    fn rest(&mut self) -> Result<(), Violation> {
        self.say("a rest");
        self.counts.rests += 1;
        self.calm = true;
        self.net.borrow_mut().calm = true;
        for server in 0..self.servers.len() {
            if self.servers[server].mode != ServerAvailability::Up {
                self.restore(server);
            }
        }
        let now = self.now;
        self.callers.iter_mut().for_each(|(_, due)| *due = now);
        self.conns.iter_mut().for_each(|conn| conn.finish_hung(now));
        self.set_phase(WorkloadPhase::Rest);
        self.step_until("a rest", |world| lock_front_end_state(&world.shared).model.in_flight() == 0)?;
        self.check_idle()?;
        self.reinstate_all()?;
        lock_front_end_state(&self.shared).model.exports.iter_mut().for_each(|export| export.check = 0);
        self.set_phase(WorkloadPhase::Check);
        self.step_until("the end of a read of all", |world| {
            let shared = lock_front_end_state(&world.shared);
            let read = |export: &crate::remote_disk::model::ExportModel| export.check == export.limits.size.0;
            shared.model.in_flight() == 0 && shared.model.exports.iter().all(read)
        })?;
        self.calm = false;
        self.net.borrow_mut().calm = false;
        self.set_phase(WorkloadPhase::Work);
        Ok(())
    }

    /// Checks that idle cores sleep once they have abandoned connections that do not answer.
    fn check_idle(&mut self) -> Result<(), Violation> {
        let (from, until) = (self.turns, self.now + ALONE);
        self.alone_until = Some(until);
        self.step_until("nothing", |world| world.alone_until.is_none())?;
        let (turns, lanes) = (self.turns - from, (self.servers.len() * (self.cores.len() + 1)) as u64);
        // If udm checks paths, it continues to do so.
        let looks = self.devices.iter().any(|device| device.checks);
        if !looks && turns > TURNS_ALONE * lanes {
            return Err(format!("{turns} turns of cores at rest, with {lanes} lanes"));
        }
        let asks = |&c: &usize| !looks && self.cores[c].reason() != Nanos::NEVER;
        if let Some(c) = (0..self.cores.len()).find(asks) {
            let wake = self.cores[c].reason().0;
            return Err(format!("core {c} asks to be woken at {wake} ns, with nothing to do"));
        }
        self.now = self.now.max(until);
        let net = self.net.borrow();
        for conn in self.conns.iter().filter(|conn| conn.lied && !conn.is_over()) {
            let link = &net.links[conn.link];
            if !(link.shut || link.half_shut || link.broken) {
                return Err(format!("connection {} goes on, though its server has lied", conn.link));
            }
        }
        Ok(())
    }

    /// Closes everything, and checks that nothing is left.
    fn end(&mut self) -> Result<(), Violation> {
        self.calm = true;
        self.net.borrow_mut().calm = true;
        self.set_phase(WorkloadPhase::Rest);
        self.step_until("a rest", |world| lock_front_end_state(&world.shared).model.in_flight() == 0)?;
        self.set_phase(WorkloadPhase::Close);
        self.step_until("the end of the front ends", |world| {
            lock_front_end_state(&world.shared).closed == world.cores.len()
        })?;
        // The tasks of targets end with their devices.
        self.devices.clear();
        self.paths.clear();
        self.step_until("the end of tasks", |world| {
            world.cores.iter().all(|core| core.reason() == Nanos::NEVER)
        })?;
        self.core_set.end();
        self.core_set.stop(Nanos(60_000_000_000));
        self.step_until("the end of the cores", |world| world.cores.iter().all(|core| core.over))?;
        self.counts.called_off = self.cores.iter().map(|core| core.outside.borrow().called_off).sum();
        // Cancelled operations and disconnect requests complete by themselves.
        self.step_until("the end of the last operation", |world| count_ring_operations(&world.cores) == 0)?;
        self.cores.clear();
        let live = udm_buf::slab_count::thread_live_slab_bytes() - self.base;
        if live != 0 {
            return Err(format!("all is closed, and {live} bytes of memory are not given back"));
        }
        let mut net = self.net.borrow_mut();
        net.look();
        match net.links.iter().position(|link| !link.shut) {
            Some(link) => Err(format!("all is closed, and connection {link} is open")),
            None => Ok(()),
        }
    }
}
