//! Steps of the world: a core or connection with a reason gets a turn.

use super::conn::ServerConnContext;
use super::world::{ConnectAttempts, NbdClientWorld};
use crate::environment::lock_mutex;
use crate::log_capture;
use crate::model::Violation;
use crate::nbd::ring_core::{RunningDeviceChange, count_ring_operations};
use crate::plan::DisturbanceClass;
use crate::remote_disk::shared::{WorkloadPhase, lock_front_end_state};
use crate::trace::{NO_CORE, TraceEventKind};
use udm_core::Nanos;
use udm_runtime::CoreStateAfterStep;

/// Maximum number of steps until an awaited event, or until another byte is moved. While bytes are
/// moved, the limit is 20 times as high.
const STEPS_MAX: u64 = 20_000;

/// Time that requests may wait at quiescence before paths are reinstated and servers killed.
const STUCK_AFTER: Nanos = Nanos(5_000_000_000);

/// Error text if no event is left.
const STUCK: &str = "nothing moves any more";

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
    pub(super) fn one_step(&mut self) -> Result<(), Violation> {
        self.step += 1;
        self.set_turn(None);
        {
            let mut shared = lock_front_end_state(&self.shared);
            shared.step = self.step;
            if self.step.is_multiple_of(64) {
                let step = self.step;
                shared.model.forget(step);
                drop(shared);
                self.conns.retain(|conn| !conn.is_over());
            }
        }
        self.disturb()?;
        self.take_calls();
        self.run_fences();
        let mut next = Nanos::NEVER;
        for core in &self.cores {
            next = next.min(core.outside.borrow_mut().go_on());
        }
        self.note_failures();
        let mut ready = Vec::new();
        for c in 0..self.cores.len() {
            let wake = self.cores[c].reason();
            next = next.min(wake);
            if wake <= self.now {
                ready.push(TurnCandidate::Core(c));
            }
        }
        for (i, conn) in self.conns.iter().enumerate() {
            // A stopped server notices a broken connection only when it continues.
            if !self.servers[conn.server].is_awake() {
                continue;
            }
            let at = conn.reason(&self.net.borrow());
            next = next.min(at);
            if at <= self.now {
                ready.push(TurnCandidate::ServerConn(i));
            }
        }
        for (d, device) in self.devices.iter().enumerate() {
            if device.change.as_ref().is_some_and(RunningDeviceChange::is_woken) {
                ready.push(TurnCandidate::Change(d));
            }
        }
        if ready.is_empty() {
            return self.jump(next);
        }
        match self.schedule.pick(&ready) {
            TurnCandidate::Core(c) => self.turn(c)?,
            TurnCandidate::ServerConn(i) => self.conn_turn(i)?,
            TurnCandidate::Change(d) => self.go_on_changing(d)?,
        }
        lock_front_end_state(&self.shared).wrong.take().map_or(Ok(()), Err)
    }

    /// Advances the clock to the next event.
    fn jump(&mut self, next: Nanos) -> Result<(), Violation> {
        if let Some(alone) = self.alone_until
            && next > alone
        {
            self.alone_until = None;
            return Ok(());
        }
        let restores = self.servers.iter().map(|server| server.until).filter(|until| *until > self.now);
        let fences = lock_mutex(&self.fences).iter().map(|fence| fence.due).min();
        let next =
            self.callers.iter().map(|(_, due)| *due).chain(restores).chain(fences).fold(next, Nanos::min);
        // While front ends work, a fault may occur at any time.
        let working = lock_front_end_state(&self.shared).phase == WorkloadPhase::Work;
        let next = if working { next.min(self.now + Nanos(1_000_000)) } else { next };
        // If requests do not progress by themselves, the world acts as an administrator. Path
        // checks alone would continue forever.
        let waits = self.alone_until.is_none() && lock_front_end_state(&self.shared).model.in_flight() > 0;
        let stuck = next == Nanos::NEVER || waits && next > self.now + STUCK_AFTER;
        if stuck && !working && (self.reinstate_all()? || self.kill_unproved()) {
            // Lanes that back off ask for no turn.
            self.now = self.now + Nanos(1_000_000_000);
            return Ok(());
        }
        if next == Nanos::NEVER {
            return Err(format!("{STUCK}, but work is left: {}", self.waiting()));
        }
        if next > self.now {
            self.now = next;
            lock_front_end_state(&self.shared).trace.add(
                next,
                NO_CORE,
                TraceEventKind::Jump,
                [next.0, 0, 0, 0],
            );
        }
        Ok(())
    }

    /// Runs steps until `done`.
    pub(super) fn step_until(
        &mut self,
        what: &str,
        done: impl Fn(&NbdClientWorld) -> bool,
    ) -> Result<(), Violation> {
        let from = self.step;
        while !done(self) {
            if self.step - from.max(self.moved_at) > STEPS_MAX || self.step - from > 20 * STEPS_MAX {
                return Err(format!("waited too long for {what}: {}", self.waiting()));
            }
            match self.one_step() {
                // The condition may be true after this step.
                Err(wrong) if wrong.starts_with(STUCK) && !done(self) => {
                    return Err(format!("{what} does not come: {wrong}"));
                }
                Err(wrong) if !wrong.starts_with(STUCK) => return Err(wrong),
                _ => {}
            }
        }
        Ok(())
    }

    /// Describes the work that waits, for a person.
    pub(super) fn waiting(&self) -> String {
        let shared = lock_front_end_state(&self.shared);
        let changing = self.devices.iter().filter(|device| device.change.is_some()).count();
        let in_flight = count_ring_operations(&self.cores);
        let (oldest, n) = (shared.model.oldest(), shared.model.in_flight());
        let states: Vec<_> =
            self.devices.iter().filter_map(|device| Some(device.mapped.as_ref()?.status_text())).collect();
        format!("{oldest} of {n}, {in_flight} operations, {changing} devices change: {}", states.join("; "))
    }

    fn turn(&mut self, c: usize) -> Result<(), Violation> {
        self.set_turn(Some(c));
        self.turns += 1;
        let mut rest = self.cores[c].core.step();
        for _ in 0..self.schedule.below(4) {
            if rest != CoreStateAfterStep::None {
                break;
            }
            self.note_failures();
            self.set_turn(Some(c));
            rest = self.cores[c].core.step();
        }
        let now = self.now;
        let core = &mut self.cores[c];
        let took = core.end_turn(rest, now, &mut self.schedule);
        self.now = now + took;
        let wrong = core.outside.borrow_mut().wrong.take();
        wrong.map_or(Ok(()), Err)?;
        let mut shared = lock_front_end_state(&self.shared);
        shared.trace.add(now, c as u16, TraceEventKind::Turn, [core.wake.0, 0, 0, 0]);
        let mut net = self.net.borrow_mut();
        for (l, received, sent) in net.take_moved() {
            self.moved_at = self.step;
            shared.trace.add(now, c as u16, TraceEventKind::Bytes, [l as u64, received, sent, 0]);
            // A lane is connected when it has received the last byte of the handshake.
            if received > 0 && self.greeted.contains(&l) && !self.answered.contains(&l) {
                self.shaken[net.links[l].to] = now;
            }
        }
        net.adopt();
        net.look();
        drop((net, shared));
        self.calls_of(c)?;
        self.read_log()?;
        let live = udm_buf::slab_count::thread_live_slab_bytes() - self.base;
        self.counts.memory.see(live.max(0) as u64);
        match live > self.memory_max() {
            true => {
                Err(format!("{live} bytes of memory are allocated, the maximum is {}", self.memory_max()))
            }
            false => Ok(()),
        }
    }

    /// Records network failures as faults of all exports.
    fn note_failures(&mut self) {
        let (lost, now) = (self.net.borrow().lost, self.now);
        if lost > std::mem::replace(&mut self.counts.lost, lost) {
            lock_front_end_state(&self.shared)
                .model
                .exports
                .iter_mut()
                .for_each(|export| export.trouble(now));
        }
    }

    /// Checks the connects that core `c` has started.
    fn calls_of(&mut self, c: usize) -> Result<(), Violation> {
        let links = self.net.borrow().links.len();
        for l in std::mem::replace(&mut self.seen, links)..links {
            let server = self.net.borrow().links[l].to;
            self.counts.connects += 1;
            self.say(format!("core {c} calls n{server}: connection {l}"));
            self.callers.push((l, self.now + Nanos(1 + self.chance.span(self.servers[server].latency))));
            let ConnectAttempts { last, vain } = self.attempts[c][server];
            let export = self.servers[server].export;
            let Some((before, at)) = last else {
                self.attempts[c][server].last = Some((l, self.now));
                continue;
            };
            // A late reply on the abandoned connection also frees the lane.
            let late = self.last_reply_at[server] >= at;
            let vain = if late || self.answered.contains(&before) { 0 } else { vain };
            let then = if late { 0 } else { vain + 1 };
            self.attempts[c][server] = ConnectAttempts { last: Some((l, self.now)), vain: then };
            let least = (BACK_OFF << vain.min(10)).min(BACK_OFF_MAX);
            // A checker has its own lane. A lane that has connected ends the wait of the others.
            let free = late || self.devices[export].checks || self.shaken[server] >= at;
            if !free && self.now.since(at).0 + 1_000_000 < least {
                let passed = self.now.since(at).0 / 1000;
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
            self.say(format!("log: {line}"));
            let server = line.split("socket=/n").nth(1).and_then(|rest| {
                let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
                rest[..end].parse::<usize>().ok()
            });
            let Some(server) = server else { return Err(format!("a line of no server: {line}")) };
            // Each event of writes that wait is logged once.
            if line.contains("writes that waited")
                || line.contains("waiting writes")
                || line.contains(": fence")
            {
                self.counts.waited += 1;
                if line.ends_with(" writes that waited were answered") {
                    self.last_reply_at[server] = self.now;
                }
                let answered = line.rsplit_once("answered: ").is_some_and(|(_, n)| n != "0");
                let all = line.ends_with(" were answered");
                self.counts.late += u64::from(all || answered);
                continue;
            }
            let is_new = match line.strip_suffix(": connected again") {
                Some(_) => !std::mem::take(&mut self.down[server]).is_empty(),
                None => {
                    // Without the number of writes that wait.
                    let reason = line.split(" writes wait until").next().unwrap_or_default();
                    self.down[server].insert(reason.trim_end_matches(|c: char| c.is_ascii_digit()).to_owned())
                }
            };
            if !is_new {
                return Err(format!("n{server} is lost, or there again, twice: {line}"));
            }
        }
        Ok(())
    }

    fn conn_turn(&mut self, i: usize) -> Result<(), Violation> {
        self.set_turn(None);
        let (now, calm) = (self.now, self.calm);
        let late = !self.plan.without.has(DisturbanceClass::Late);
        let NbdClientWorld { conns, servers, disks, net, shared, chance, counts, .. } = self;
        let conn = &mut conns[i];
        let export = servers[conn.server].export;
        let (mut net, mut shared) = (net.borrow_mut(), lock_front_end_state(shared));
        let disk = &mut disks[export];
        let (net, shared) = (&mut *net, &mut *shared);
        let shaken = counts.handshakes;
        let outcome =
            conn.turn(&mut ServerConnContext { net, disk, shared, chance, counts, export, now, calm, late });
        if counts.handshakes > shaken {
            self.shaken[conn.server] = now;
            self.greeted.insert(conn.link);
        }
        if conn.answered > 0 {
            self.answered.insert(conn.link);
        }
        outcome
    }

    /// Continues the change of `device`.
    fn go_on_changing(&mut self, device: usize) -> Result<(), Violation> {
        self.set_turn(None);
        let change = self.devices[device].change.as_mut();
        let Some(outcome) = change.and_then(|change| change.step(&self.core_set)) else { return Ok(()) };
        self.devices[device].change = None;
        outcome.map_err(|e| format!("a change of d{device} failed: {e}"))
    }
}
