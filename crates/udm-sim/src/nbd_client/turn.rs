//! Steps of the world: a core or connection with a reason gets a turn.

use super::conn::ServerConnContext;
use super::world::{ConnectAttempts, NbdClientWorld};
use crate::environment::lock_mutex;
use crate::log_capture;
use crate::model::Violation;
use crate::nbd::ring_core::RunningDeviceChange;
use crate::plan::DisturbanceClass;
use crate::remote_disk::machine::RemoteDiskMachine;
use crate::remote_disk::run::STUCK;
use crate::remote_disk::shared::{WorkloadPhase, lock_front_end_state};
use udm_core::Nanos;

/// Time that requests may wait at quiescence before paths are reinstated and servers killed.
const STUCK_AFTER: Nanos = Nanos(5_000_000_000);

/// Shortest delay before a lane connects again, and the maximum of this delay, in ns.
const BACK_OFF: u64 = 100_000_000;
const BACK_OFF_MAX: u64 = 5_000_000_000;

/// A candidate for the next turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TurnCandidate {
    Core(usize),
    ServerConn(usize),
    Change(usize),
}

impl NbdClientWorld {
    /// Runs one step.
    pub(super) fn step_once(&mut self) -> Result<(), Violation> {
        self.machine.step += 1;
        self.machine.set_turn(None);
        {
            let mut shared = lock_front_end_state(&self.machine.shared);
            shared.step = self.machine.step;
            if self.machine.step.is_multiple_of(64) {
                let step = self.machine.step;
                shared.model.forget(step);
                drop(shared);
                self.conns.retain(|conn| !conn.is_over());
            }
        }
        self.disturb()?;
        self.accept_connects();
        self.run_fences();
        let mut next = self.machine.advance_rings();
        self.machine.note_failures();
        let mut ready = Vec::new();
        for c in 0..self.machine.cores.len() {
            let wake = self.machine.cores[c].reason();
            next = next.min(wake);
            if wake <= self.machine.now {
                ready.push(TurnCandidate::Core(c));
            }
        }
        for (i, conn) in self.conns.iter().enumerate() {
            // A stopped server notices a broken connection only when it continues.
            if !self.servers[conn.server].is_awake() {
                continue;
            }
            let at = conn.reason(&self.machine.net.borrow());
            next = next.min(at);
            if at <= self.machine.now {
                ready.push(TurnCandidate::ServerConn(i));
            }
        }
        for (d, device) in self.machine.devices.iter().enumerate() {
            if device.change.as_ref().is_some_and(RunningDeviceChange::is_woken) {
                ready.push(TurnCandidate::Change(d));
            }
        }
        if ready.is_empty() {
            return self.jump(next);
        }
        match self.machine.schedule.pick(&ready) {
            TurnCandidate::Core(c) => self.turn(c)?,
            TurnCandidate::ServerConn(i) => self.conn_turn(i)?,
            TurnCandidate::Change(d) => self.machine.go_on_changing(d)?,
        }
        lock_front_end_state(&self.machine.shared).wrong.take().map_or(Ok(()), Err)
    }

    /// Advances the clock to the next event.
    fn jump(&mut self, next: Nanos) -> Result<(), Violation> {
        if let Some(alone) = self.machine.idle_until
            && next > alone
        {
            self.machine.idle_until = None;
            return Ok(());
        }
        let restores =
            self.servers.iter().map(|server| server.until).filter(|until| *until > self.machine.now);
        let fences = lock_mutex(&self.fences).iter().map(|fence| fence.due).min();
        let next = self
            .machine
            .pending_connects
            .iter()
            .map(|(_, due)| *due)
            .chain(restores)
            .chain(fences)
            .fold(next, Nanos::min);
        // While front ends work, a fault may occur at any time.
        let working = lock_front_end_state(&self.machine.shared).phase == WorkloadPhase::Work;
        let next = if working { next.min(self.machine.now + Nanos(1_000_000)) } else { next };
        // If requests do not progress by themselves, the world acts as an administrator. Path
        // checks alone would continue forever.
        let waits = self.machine.idle_until.is_none()
            && lock_front_end_state(&self.machine.shared).model.in_flight() > 0;
        let stuck = next == Nanos::NEVER || waits && next > self.machine.now + STUCK_AFTER;
        if stuck && !working && (self.reinstate_each()? || self.kill_unproved()) {
            // Lanes that back off ask for no turn.
            self.machine.now = self.machine.now + Nanos(1_000_000_000);
            return Ok(());
        }
        if next == Nanos::NEVER {
            return Err(format!("{STUCK}, but work is left: {}", self.machine.waiting()));
        }
        self.machine.jump_to(next);
        Ok(())
    }

    fn turn(&mut self, c: usize) -> Result<(), Violation> {
        let moved = self.machine.core_turn(c)?;
        let net = self.machine.net.borrow();
        for (l, received, _) in moved {
            // A lane is connected when it has received the last byte of the handshake.
            if received > 0 && self.handshaken.contains(&l) && !self.answered.contains(&l) {
                self.handshake_at[net.links[l].to] = self.machine.ended_turn;
            }
        }
        drop(net);
        self.calls_of(c)?;
        self.read_log()?;
        self.machine.check_memory(self.memory_max())
    }

    /// Checks the connects that core `c` has started.
    fn calls_of(&mut self, c: usize) -> Result<(), Violation> {
        let links = self.machine.net.borrow().links.len();
        for l in std::mem::replace(&mut self.machine.seen, links)..links {
            let server = self.machine.net.borrow().links[l].to;
            self.counts.connects += 1;
            self.machine.say(format!("core {c} calls n{server}: connection {l}"));
            self.machine.pending_connects.push((
                l,
                self.machine.now + Nanos(1 + self.machine.chance.span(self.servers[server].latency)),
            ));
            let ConnectAttempts { last, failed } = self.attempts[c][server];
            let export = self.servers[server].export;
            let Some((before, at)) = last else {
                self.attempts[c][server].last = Some((l, self.machine.now));
                continue;
            };
            // A late reply on the abandoned connection also frees the lane.
            let late = self.last_reply_at[server] >= at;
            let failed = if late || self.answered.contains(&before) { 0 } else { failed };
            let then = if late { 0 } else { failed + 1 };
            self.attempts[c][server] = ConnectAttempts { last: Some((l, self.machine.now)), failed: then };
            let least = (BACK_OFF << failed.min(10)).min(BACK_OFF_MAX);
            // A checker has its own lane. A lane that has connected ends the wait of the others.
            let free = late || self.machine.devices[export].checks || self.handshake_at[server] >= at;
            if !free && self.machine.now.since(at).0 + 1_000_000 < least {
                let passed = self.machine.now.since(at).0 / 1000;
                return Err(format!("core {c} connects to n{server} again after {passed} us"));
            }
        }
        Ok(())
    }

    /// Checks the log lines: a server must be reported as lost once for each reason, until it is
    /// connected again.
    fn read_log(&mut self) -> Result<(), Violation> {
        for line in log_capture::take_captured_log_lines() {
            self.counts.lines += 1;
            self.machine.say(format!("log: {line}"));
            let server = RemoteDiskMachine::path_of_line(&line, "socket=/n")?;
            // Each event of writes that wait is logged once.
            if line.contains("writes that waited")
                || line.contains("waiting writes")
                || line.contains(": fence")
            {
                self.counts.waited += 1;
                if line.ends_with(" writes that waited were answered") {
                    self.last_reply_at[server] = self.machine.now;
                }
                let answered = line.rsplit_once("answered: ").is_some_and(|(_, n)| n != "0");
                let all = line.ends_with(" were answered");
                self.counts.late += u64::from(all || answered);
                continue;
            }
            // Without the number of writes that wait.
            let reason = line.split(" writes wait until").next().unwrap_or_default();
            let reason = reason.trim_end_matches(|c: char| c.is_ascii_digit()).to_owned();
            self.machine.check_loss_line(server, &line, &reason)?;
        }
        Ok(())
    }

    fn conn_turn(&mut self, i: usize) -> Result<(), Violation> {
        self.machine.set_turn(None);
        let (now, calm) = (self.machine.now, self.machine.calm);
        let late = !self.machine.plan.without.has(DisturbanceClass::Late);
        let NbdClientWorld { conns, servers, disks, counts, machine, .. } = self;
        let RemoteDiskMachine { net, shared, chance, .. } = machine;
        let conn = &mut conns[i];
        let export = servers[conn.server].export;
        let (mut net, mut shared) = (net.borrow_mut(), lock_front_end_state(shared));
        let disk = &mut disks[export];
        let (net, shared) = (&mut *net, &mut *shared);
        let handshake_at = counts.handshakes;
        let outcome =
            conn.turn(&mut ServerConnContext { net, disk, shared, chance, counts, export, now, calm, late });
        if counts.handshakes > handshake_at {
            self.handshake_at[conn.server] = now;
            self.handshaken.insert(conn.link);
        }
        if conn.answered > 0 {
            self.answered.insert(conn.link);
        }
        outcome
    }
}
