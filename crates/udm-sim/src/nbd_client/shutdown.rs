//! Quiescence of the world, and the checks at this time.

use super::servers::ServerAvailability;
use super::world::NbdClientWorld;
use crate::model::Violation;
use crate::remote_disk::machine::RemoteDiskMachine;
use crate::remote_disk::run::RemoteDiskWorld;
use udm_core::Nanos;

/// Idle time at quiescence. It is longer than the limit of a handshake, and longer than the time
/// after a fault in which errors are allowed.
const ALONE: Nanos = Nanos(120_000_000_000);

/// Maximum number of turns of cores per lane during this time.
const TURNS_ALONE: u64 = 60;

impl RemoteDiskWorld for NbdClientWorld {
    fn machine(&self) -> &RemoteDiskMachine {
        &self.machine
    }

    fn machine_mut(&mut self) -> &mut RemoteDiskMachine {
        &mut self.machine
    }

    fn one_step(&mut self) -> Result<(), Violation> {
        self.step_once()
    }

    fn calm_servers(&mut self) {
        for server in 0..self.servers.len() {
            if self.servers[server].mode != ServerAvailability::Up {
                self.restore(server);
            }
        }
        let now = self.machine.now;
        self.conns.iter_mut().for_each(|conn| conn.finish_hung(now));
    }

    /// Checks that idle cores sleep once they have abandoned connections that do not answer.
    fn check_idle(&mut self) -> Result<(), Violation> {
        let (from, until) = (self.machine.turns, self.machine.now + ALONE);
        self.machine.idle_until = Some(until);
        self.step_until("nothing", |world| world.machine.idle_until.is_none())?;
        let (turns, lanes) =
            (self.machine.turns - from, (self.servers.len() * (self.machine.cores.len() + 1)) as u64);
        // If udm checks paths, it continues to do so.
        let looks = self.machine.devices.iter().any(|device| device.checks);
        if !looks && turns > TURNS_ALONE * lanes {
            return Err(format!("{turns} turns of cores at rest, with {lanes} lanes"));
        }
        let asks = |&c: &usize| !looks && self.machine.cores[c].reason() != Nanos::NEVER;
        if let Some(c) = (0..self.machine.cores.len()).find(asks) {
            let wake = self.machine.cores[c].reason().0;
            return Err(format!("core {c} asks to be woken at {wake} ns, with nothing to do"));
        }
        self.machine.now = self.machine.now.max(until);
        let net = self.machine.net.borrow();
        for conn in self.conns.iter().filter(|conn| conn.has_violated && !conn.is_over()) {
            let link = &net.links[conn.link];
            if !(link.shut || link.half_shut || link.broken) {
                return Err(format!("connection {} goes on, though its server has has_violated", conn.link));
            }
        }
        Ok(())
    }

    fn reinstate_all(&mut self) -> Result<(), Violation> {
        self.reinstate_each().map(drop)
    }
}
