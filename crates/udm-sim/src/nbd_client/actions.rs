//! Random actions in the world: server trouble and recovery, reinstated paths, and power cuts.

use super::conn::ServerConn;
use super::servers::{ServerAvailability, ServerBehavior, SimServer};
use super::world::{NbdClientWorld, RunningFenceCommand};
use crate::environment::lock_mutex;
use crate::model::Violation;
use crate::nbd::ring_core::NumberedPathResolver;
use crate::plan::DisturbanceClass;
use crate::remote_disk::shared::{WorkloadPhase, lock_front_end_state};
use udm_core::{CoreId, Nanos, errno};
use udm_wire::uri::ServerStoppedProof;

/// A server stopped for a shorter time need not end by itself.
const SHORT: Nanos = Nanos(1_000_000_000);

impl NbdClientWorld {
    /// Performs timed actions that are due, and sometimes a random one.
    pub(super) fn disturb(&mut self) -> Result<(), Violation> {
        for server in 0..self.servers.len() {
            if self.servers[server].mode != ServerAvailability::Up && self.servers[server].until <= self.now {
                self.restore(server);
            }
        }
        let phase = lock_front_end_state(&self.shared).phase;
        if phase != WorkloadPhase::Work || self.calm {
            return Ok(());
        }
        for server in 0..self.servers.len() {
            let SimServer { mode, again: (trouble, at), .. } = self.servers[server];
            if mode == ServerAvailability::Up && at <= self.now {
                self.counts.flaps += 1;
                self.trouble(server, trouble);
            }
        }
        if !self.control.one_in(self.rough) {
            return Ok(());
        }
        let without = self.plan.without;
        let server = self.control.below(self.servers.len() as u64) as usize;
        match self.control.below(16) {
            0..2 if !without.has(DisturbanceClass::Stalls) => {
                self.trouble(server, ServerAvailability::Stopped);
            }
            2..4 if !without.has(DisturbanceClass::Stalls) => self.trouble(server, ServerAvailability::Hole),
            4 if !without.has(DisturbanceClass::Paths) => self.trouble(server, ServerAvailability::Refuses),
            5 if !without.has(DisturbanceClass::Paths) => self.trouble(server, ServerAvailability::Mute),
            6 if !without.has(DisturbanceClass::Limits) => self.trouble(server, ServerAvailability::Other),
            7..9 if !without.has(DisturbanceClass::Paths) => {
                self.kill(server);
                let mode = self.control.pick(&[
                    ServerAvailability::Up,
                    ServerAvailability::Refuses,
                    ServerAvailability::Mute,
                    ServerAvailability::Hole,
                ]);
                self.trouble(server, mode);
            }
            9..15 if !without.has(DisturbanceClass::Messages) => {
                let device = self.control.below(self.devices.len() as u64) as usize;
                let all = self.control.one_in(8);
                self.reinstate(device, all)?;
            }
            15 if !without.has(DisturbanceClass::Crash) && self.control.one_in(self.spared) => {
                let export = self.servers[server].export;
                self.power_cut(export);
            }
            _ => {}
        }
        Ok(())
    }

    /// Puts server `server` into a fault mode for a while.
    fn trouble(&mut self, server: usize, mode: ServerAvailability) {
        let without = self.plan.without;
        let of = &mut self.servers[server];
        if of.mode != ServerAvailability::Up || mode == ServerAvailability::Up {
            return;
        }
        of.mode = mode;
        of.since = self.now;
        let flaps = match (of.flaps, without.has(DisturbanceClass::Paths)) {
            (0, false) if self.control.one_in(4) => self.control.between(1, 8),
            (left, _) => left.saturating_sub(1),
        };
        of.flaps = flaps;
        of.again = (mode, Nanos::NEVER);
        let most = if flaps > 0 { 500 } else { self.control.pick(&[500, 3_000, 30_000]) };
        of.until = self.now + Nanos(self.control.between(1, most) * 1_000_000);
        of.other = (mode == ServerAvailability::Other).then(|| self.says[of.export].other(&mut self.control));
        let counted = match mode {
            ServerAvailability::Up => return,
            ServerAvailability::Stopped => &mut self.counts.stopped,
            ServerAvailability::Hole => &mut self.counts.holes,
            ServerAvailability::Refuses => &mut self.counts.deaf,
            ServerAvailability::Mute => &mut self.counts.mute,
            ServerAvailability::Other => &mut self.counts.others,
        };
        *counted += 1;
        let export = of.export;
        let mut shared = lock_front_end_state(&self.shared);
        shared.model.exports[export].trouble(self.now);
        shared.say(format!("n{server} is {mode:?}"));
    }

    /// Restores server `server`.
    pub(super) fn restore(&mut self, server: usize) {
        let of = &mut self.servers[server];
        let was = std::mem::replace(&mut of.mode, ServerAvailability::Up);
        (of.other, of.until) = (None, Nanos(0));
        if of.flaps > 0 && !self.calm {
            of.again.1 = self.now + Nanos(self.control.between(1, 1_000) * 1_000_000);
        }
        let (export, long) = (of.export, self.now.since(of.since) > SHORT);
        let now = self.now;
        let mut shared = lock_front_end_state(&self.shared);
        shared.model.exports[export].trouble(now);
        shared.say(format!("n{server} was {was:?} and is well"));
        drop(shared);
        // With `fence=wait`, udm relies on the server to end by itself in time, so it is killed.
        if matches!(self.silence.fence, ServerStoppedProof::Wait(_))
            && matches!(was, ServerAvailability::Stopped | ServerAvailability::Hole)
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
            let (due, later) = std::mem::take(&mut *fences).into_iter().partition(|f| f.due <= self.now);
            *fences = later;
            due
        };
        for RunningFenceCommand { server, then, .. } in due {
            let fails = !self.calm && self.control.one_in(4);
            if !fails {
                self.kill(server);
                self.counts.fenced += 1;
            }
            self.set_turn(None);
            then(if fails { Err("the command has failed".into()) } else { Ok(()) });
        }
    }

    /// Kills the servers for which writes wait and that no other event would prove dead. Returns
    /// true if there was one.
    pub(super) fn kill_unproved(&mut self) -> bool {
        let waits = |path: &std::sync::Arc<dyn udm_core::Device>| path.stall_reason().is_some();
        let all: Vec<usize> = (0..self.paths.len()).filter(|&s| waits(&self.paths[s])).collect();
        let any = all.iter().any(|&s| self.conns.iter().any(|conn| conn.server == s && !conn.is_over()));
        all.into_iter().for_each(|server| self.kill(server));
        any
    }

    /// Kills server `server`, and ends all its connections.
    fn kill(&mut self, server: usize) {
        self.counts.killed += 1;
        self.say(format!("n{server} is killed"));
        let export = self.servers[server].export;
        lock_front_end_state(&self.shared).model.exports[export].trouble(self.now);
        let mut net = self.net.borrow_mut();
        for conn in self.conns.iter_mut().filter(|conn| conn.server == server && !conn.is_over()) {
            // Its system resets the connection, or closes it if all bytes were read.
            let reset = self.control.one_in(2);
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
        self.disks[export].crash(&mut self.control);
        let mut shared = lock_front_end_state(&self.shared);
        shared.say(format!("the power of d{export} fails"));
        shared.model.exports[export].crash(self.step);
    }

    /// Reinstates failed paths of `device` by message: all of them, or those whose server works.
    /// Paths that udm checks itself are skipped.
    pub(super) fn reinstate(&mut self, device: usize, all: bool) -> Result<bool, Violation> {
        let Some(mapped) = self.devices[device].mapped.clone() else { return Ok(false) };
        let Some(table) = mapped.live() else { return Ok(false) };
        let before = self.counts.messages;
        let reports = table.path_reports();
        for report in reports.iter().filter(|report| report.failed) {
            self.counts.failures += 1;
            let well = self.servers[report.number.minor as usize].mode == ServerAvailability::Up;
            if self.devices[device].checks || !(well || all) {
                continue;
            }
            self.set_turn(None);
            let words = ["reinstate_path".to_owned(), report.name.clone()];
            let mut names = NumberedPathResolver { letter: 'n', paths: self.paths.clone() };
            mapped
                .message(0, &words, &mut names, &*self.core_set)
                .map_err(|e| format!("d{device}: reinstate_path {}: {e}", report.name))?;
            self.say(format!("d{device}: {} is reinstated", report.name));
            self.counts.messages += 1;
            // The message ends the wait before the next connect.
            self.shaken[report.number.minor as usize] = self.now;
        }
        Ok(self.counts.messages > before)
    }

    /// Reinstates the failed paths of all devices. Returns true if there was one.
    pub(super) fn reinstate_all(&mut self) -> Result<bool, Violation> {
        let mut any = false;
        for device in 0..self.devices.len() {
            any |= self.reinstate(device, true)?;
        }
        Ok(any)
    }

    /// Accepts or refuses the connects that are due, according to the mode of their server.
    pub(super) fn take_calls(&mut self) {
        let callers = std::mem::take(&mut self.callers);
        for (link, due) in callers {
            let net = self.net.clone();
            let mut net = net.borrow_mut();
            let server = net.links[link].to;
            let (mode, export) = (self.servers[server].mode, self.servers[server].export);
            if net.links[link].shut {
                continue;
            }
            if due > self.now {
                self.callers.push((link, due));
                continue;
            }
            if mode == ServerAvailability::Hole {
                self.callers.push((link, self.servers[server].until));
                continue;
            }
            let lost = !self.calm && net.fails > 0 && self.chance.one_in(20);
            if mode == ServerAvailability::Refuses || lost {
                let error = if lost { errno::EHOSTUNREACH } else { errno::ECONNREFUSED };
                net.links[link].connected = Some(-error);
                self.counts.refusals += 1;
                lock_front_end_state(&self.shared).model.exports[export].trouble(self.now);
                continue;
            }
            net.links[link].connected = Some(0);
            net.links[link].room = self.chance.pick(&[1, 100, 4096, 64 << 10, 64 << 10, 1 << 20]);
            let manner = self.manner_of(server);
            let (says, other) = match &self.servers[server].other {
                Some(other) => (other.clone(), true),
                None => (self.says[export].clone(), false),
            };
            let mut conn = ServerConn::new(link, server, manner, (says, other), self.now);
            if !self.calm && !self.plan.without.has(DisturbanceClass::Nonsense) && self.chance.one_in(40) {
                conn.greets_badly();
                self.counts.lies += 1;
                lock_front_end_state(&self.shared).model.exports[export].trouble(self.now);
            }
            self.conns.push(conn);
        }
    }

    /// Draws the behaviour of `server` on its next connection.
    fn manner_of(&mut self, server: usize) -> ServerBehavior {
        let (without, calm) = (self.plan.without, self.calm);
        let c = &mut self.chance;
        let mut often = |class, all: &[u64]| if calm || without.has(class) { 0 } else { c.pick(all) };
        ServerBehavior {
            hangs: often(DisturbanceClass::Hang, &[0, 0, 20, 300]),
            errors: often(DisturbanceClass::Errors, &[0, 0, 30, 300]),
            early: often(DisturbanceClass::Errors, &[0, 0, 4, 60, 600]),
            lies: often(DisturbanceClass::Nonsense, &[0, 0, 50, 500]),
            closes: often(DisturbanceClass::Lost, &[0, 0, 50, 500]),
            piece: match without.has(DisturbanceClass::Cuts) {
                true => u64::MAX,
                false => c.pick(&[16, 1024, 64 << 10, 64 << 10, 1 << 20]),
            },
            latency: self.servers[server].latency,
            mute: self.servers[server].mode == ServerAvailability::Mute,
        }
    }

    /// Sets the phase of the front ends, and notifies them.
    pub(super) fn set_phase(&mut self, phase: WorkloadPhase) {
        self.set_turn(None);
        lock_front_end_state(&self.shared).phase = phase;
        for core in 0..self.cores.len() {
            self.core_set.send_message(CoreId(core as u16), self.topic, Box::new(()));
        }
    }
}
