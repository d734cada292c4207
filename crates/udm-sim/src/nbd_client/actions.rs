//! Random actions in the world: server trouble and recovery, reinstated paths, and power cuts.

use super::conn::ServerConn;
use super::servers::{ServerAvailability, ServerBehavior, SimServer};
use super::world::{NbdClientWorld, RunningFenceCommand};
use crate::environment::lock_mutex;
use crate::model::Violation;
use crate::plan::DisturbanceClass;
use crate::remote_disk::shared::{WorkloadPhase, lock_front_end_state};
use udm_core::{Nanos, errno};
use udm_wire::uri::ServerStoppedProof;

/// A server stopped for a shorter time need not end by itself.
const SHORT: Nanos = Nanos(1_000_000_000);

impl NbdClientWorld {
    /// Performs timed actions that are due, and sometimes a random one.
    pub(super) fn disturb(&mut self) -> Result<(), Violation> {
        for server in 0..self.servers.len() {
            if self.servers[server].mode != ServerAvailability::Up
                && self.servers[server].until <= self.machine.now
            {
                self.restore(server);
            }
        }
        let phase = lock_front_end_state(&self.machine.shared).phase;
        if phase != WorkloadPhase::Work || self.machine.calm {
            return Ok(());
        }
        for server in 0..self.servers.len() {
            let SimServer { mode, again: (trouble, at), .. } = self.servers[server];
            if mode == ServerAvailability::Up && at <= self.machine.now {
                self.counts.flaps += 1;
                self.trouble(server, trouble);
            }
        }
        if !self.machine.control.one_in(self.machine.fault_interval) {
            return Ok(());
        }
        let without = self.machine.plan.without;
        let server = self.machine.control.below(self.servers.len() as u64) as usize;
        match self.machine.control.below(16) {
            0..2 if !without.has(DisturbanceClass::Stalls) => {
                self.trouble(server, ServerAvailability::Stopped);
            }
            2..4 if !without.has(DisturbanceClass::Stalls) => {
                self.trouble(server, ServerAvailability::Unreachable);
            }
            4 if !without.has(DisturbanceClass::Paths) => self.trouble(server, ServerAvailability::Refuses),
            5 if !without.has(DisturbanceClass::Paths) => self.trouble(server, ServerAvailability::Silent),
            6 if !without.has(DisturbanceClass::Limits) => self.trouble(server, ServerAvailability::Other),
            7..9 if !without.has(DisturbanceClass::Paths) => {
                self.kill(server);
                let mode = self.machine.control.pick(&[
                    ServerAvailability::Up,
                    ServerAvailability::Refuses,
                    ServerAvailability::Silent,
                    ServerAvailability::Unreachable,
                ]);
                self.trouble(server, mode);
            }
            9..15 if !without.has(DisturbanceClass::Messages) => {
                let device = self.machine.control.below(self.machine.devices.len() as u64) as usize;
                let all = self.machine.control.one_in(8);
                self.reinstate(device, all)?;
            }
            15 if !without.has(DisturbanceClass::Crash) && self.machine.control.one_in(self.spared) => {
                let export = self.servers[server].export;
                self.power_cut(export);
            }
            _ => {}
        }
        Ok(())
    }

    /// Puts server `server` into a fault mode for a while.
    fn trouble(&mut self, server: usize, mode: ServerAvailability) {
        let without = self.machine.plan.without;
        let of = &mut self.servers[server];
        if of.mode != ServerAvailability::Up || mode == ServerAvailability::Up {
            return;
        }
        of.mode = mode;
        of.since = self.machine.now;
        let flaps = match (of.flaps, without.has(DisturbanceClass::Paths)) {
            (0, false) if self.machine.control.one_in(4) => self.machine.control.between(1, 8),
            (left, _) => left.saturating_sub(1),
        };
        of.flaps = flaps;
        of.again = (mode, Nanos::NEVER);
        let most = if flaps > 0 { 500 } else { self.machine.control.pick(&[500, 3_000, 30_000]) };
        of.until = self.machine.now + Nanos(self.machine.control.between(1, most) * 1_000_000);
        of.other = (mode == ServerAvailability::Other)
            .then(|| self.says[of.export].other(&mut self.machine.control));
        let counted = match mode {
            ServerAvailability::Up => return,
            ServerAvailability::Stopped => &mut self.counts.stopped,
            ServerAvailability::Unreachable => &mut self.counts.unreachable,
            ServerAvailability::Refuses => &mut self.counts.refusing,
            ServerAvailability::Silent => &mut self.counts.silent,
            ServerAvailability::Other => &mut self.counts.others,
        };
        *counted += 1;
        let export = of.export;
        let mut shared = lock_front_end_state(&self.machine.shared);
        shared.model.exports[export].trouble(self.machine.now);
        shared.say(format!("n{server} is {mode:?}"));
    }

    /// Restores server `server`.
    pub(super) fn restore(&mut self, server: usize) {
        let of = &mut self.servers[server];
        let was = std::mem::replace(&mut of.mode, ServerAvailability::Up);
        (of.other, of.until) = (None, Nanos(0));
        if of.flaps > 0 && !self.machine.calm {
            of.again.1 = self.machine.now + Nanos(self.machine.control.between(1, 1_000) * 1_000_000);
        }
        let (export, long) = (of.export, self.machine.now.since(of.since) > SHORT);
        let now = self.machine.now;
        let mut shared = lock_front_end_state(&self.machine.shared);
        shared.model.exports[export].trouble(now);
        shared.say(format!("n{server} was {was:?} and is well"));
        drop(shared);
        // With `fence=wait`, udm relies on the server to end by itself in time, so it is killed.
        if matches!(self.silence.fence, ServerStoppedProof::Wait(_))
            && matches!(was, ServerAvailability::Stopped | ServerAvailability::Unreachable)
            && long
        {
            self.kill(server);
        }
        for conn in self.conns.iter_mut().filter(|conn| conn.server == server) {
            conn.next = conn.next.min(now);
        }
    }

    /// Completes fence commands that are due. Some fail; the others have killed the server.
    pub(super) fn run_fences(&mut self) {
        let due: Vec<RunningFenceCommand> = {
            let mut fences = lock_mutex(&self.fences);
            let (due, later) =
                std::mem::take(&mut *fences).into_iter().partition(|f| f.due <= self.machine.now);
            *fences = later;
            due
        };
        for RunningFenceCommand { server, then, .. } in due {
            let fails = !self.machine.calm && self.machine.control.one_in(4);
            if !fails {
                self.kill(server);
                self.counts.fenced += 1;
            }
            self.machine.set_turn(None);
            then(if fails { Err("the command has failed".into()) } else { Ok(()) });
        }
    }

    /// Kills the servers for which writes wait and that no other event would prove dead. Returns
    /// true if there was one.
    pub(super) fn kill_unproved(&mut self) -> bool {
        let waits = |path: &std::sync::Arc<dyn udm_core::Device>| path.stall_reason().is_some();
        let all: Vec<usize> =
            (0..self.machine.paths.len()).filter(|&s| waits(&self.machine.paths[s])).collect();
        let any = all.iter().any(|&s| self.conns.iter().any(|conn| conn.server == s && !conn.is_over()));
        all.into_iter().for_each(|server| self.kill(server));
        any
    }

    /// Kills server `server`, and ends all its connections.
    fn kill(&mut self, server: usize) {
        self.counts.killed += 1;
        self.machine.say(format!("n{server} is killed"));
        let export = self.servers[server].export;
        lock_front_end_state(&self.machine.shared).model.exports[export].trouble(self.machine.now);
        let mut net = self.machine.net.borrow_mut();
        for conn in self.conns.iter_mut().filter(|conn| conn.server == server && !conn.is_over()) {
            // Its system resets the connection, or closes it if all bytes were read.
            let reset = self.machine.control.one_in(2);
            conn.end(&mut net, reset);
        }
        self.conns.retain(|conn| !conn.is_over());
    }

    /// Cuts the power of an export: its servers are killed, and cached data is lost.
    fn power_cut(&mut self, export: usize) {
        self.counts.crashes += 1;
        for server in 0..self.servers.len() {
            if self.servers[server].export == export {
                self.kill(server);
            }
        }
        self.disks[export].crash(&mut self.machine.control);
        let mut shared = lock_front_end_state(&self.machine.shared);
        shared.say(format!("the power of d{export} fails"));
        shared.model.exports[export].crash(self.machine.step);
    }

    /// Reinstates failed paths of `device`: all of them, or those whose server works. Returns true
    /// if there was one.
    pub(super) fn reinstate(&mut self, device: usize, all: bool) -> Result<bool, Violation> {
        let is_well = |s: usize| self.servers[s].mode == ServerAvailability::Up;
        let (failed, reinstated) = self.machine.reinstate(device, |s| all || is_well(s))?;
        self.counts.failures += failed;
        self.counts.messages += reinstated.len() as u64;
        // The message ends the wait before the next connect.
        reinstated.iter().for_each(|server| self.handshake_at[*server] = self.machine.now);
        Ok(!reinstated.is_empty())
    }

    /// Reinstates the failed paths of all devices. Returns true if there was one.
    pub(super) fn reinstate_each(&mut self) -> Result<bool, Violation> {
        let mut any = false;
        for device in 0..self.machine.devices.len() {
            any |= self.reinstate(device, true)?;
        }
        Ok(any)
    }

    /// Accepts or refuses the connects that are due, according to the mode of their server.
    pub(super) fn accept_connects(&mut self) {
        let pending_connects = std::mem::take(&mut self.machine.pending_connects);
        for (link, due) in pending_connects {
            let net = self.machine.net.clone();
            let mut net = net.borrow_mut();
            let server = net.links[link].to;
            let (mode, export) = (self.servers[server].mode, self.servers[server].export);
            if net.links[link].shut {
                continue;
            }
            if due > self.machine.now {
                self.machine.pending_connects.push((link, due));
                continue;
            }
            if mode == ServerAvailability::Unreachable {
                self.machine.pending_connects.push((link, self.servers[server].until));
                continue;
            }
            let lost = !self.machine.calm && net.fails > 0 && self.machine.chance.one_in(20);
            if mode == ServerAvailability::Refuses || lost {
                let error = if lost { errno::EHOSTUNREACH } else { errno::ECONNREFUSED };
                net.links[link].connected = Some(-error);
                self.counts.refusals += 1;
                lock_front_end_state(&self.machine.shared).model.exports[export].trouble(self.machine.now);
                continue;
            }
            net.links[link].connected = Some(0);
            net.links[link].room = self.machine.chance.pick(&[1, 100, 4096, 64 << 10, 64 << 10, 1 << 20]);
            let manner = self.manner_of(server);
            let (says, other) = match &self.servers[server].other {
                Some(other) => (other.clone(), true),
                None => (self.says[export].clone(), false),
            };
            let mut conn = ServerConn::new(link, server, manner, (says, other), self.machine.now);
            if !self.machine.calm
                && !self.machine.plan.without.has(DisturbanceClass::Nonsense)
                && self.machine.chance.one_in(40)
            {
                conn.greets_badly();
                self.counts.violations += 1;
                lock_front_end_state(&self.machine.shared).model.exports[export].trouble(self.machine.now);
            }
            self.conns.push(conn);
        }
    }

    /// Draws the behaviour of `server` on its next connection.
    fn manner_of(&mut self, server: usize) -> ServerBehavior {
        let (without, calm) = (self.machine.plan.without, self.machine.calm);
        let c = &mut self.machine.chance;
        let mut often = |class, all: &[u64]| if calm || without.has(class) { 0 } else { c.pick(all) };
        ServerBehavior {
            hangs: often(DisturbanceClass::Hang, &[0, 0, 20, 300]),
            errors: often(DisturbanceClass::Errors, &[0, 0, 30, 300]),
            early: often(DisturbanceClass::Errors, &[0, 0, 4, 60, 600]),
            violations: often(DisturbanceClass::Nonsense, &[0, 0, 50, 500]),
            closes: often(DisturbanceClass::Lost, &[0, 0, 50, 500]),
            piece: match without.has(DisturbanceClass::Cuts) {
                true => u64::MAX,
                false => c.pick(&[16, 1024, 64 << 10, 64 << 10, 1 << 20]),
            },
            latency: self.servers[server].latency,
            silent: self.servers[server].mode == ServerAvailability::Silent,
        }
    }
}
