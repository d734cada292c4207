//! Steps of the world: a core, a connection or a disk with a reason gets a turn.

use super::conn::{ConnContext, ControllerConn};
use super::target::TargetAvailability;
use super::world::NvmeClientWorld;
use crate::environment::lock_mutex;
use crate::log_capture;
use crate::model::Violation;
use crate::nbd::clock;
use crate::nbd::ring_core::{RunningDeviceChange, count_ring_operations};
use crate::plan::DisturbanceClass;
use crate::remote_disk::shared::{WorkloadPhase, lock_front_end_state};
use crate::trace::{NO_CORE, TraceEventKind};
use std::sync::Arc;
use udm_core::Nanos;
use udm_runtime::CoreStateAfterStep;

/// Maximum number of steps until an awaited event, or until another byte is moved. While bytes are
/// moved, the limit is 20 times as high.
const STEPS_MAX: u64 = 20_000;

/// Time that requests may wait at quiescence before paths are reinstated.
const STUCK_AFTER: Nanos = Nanos(5_000_000_000);

/// Error text if no event is left.
const STUCK: &str = "nothing moves any more";

/// A candidate for the next turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TurnCandidate {
    Core(usize),
    Conn(usize),
    /// The disk of a target.
    Disk(usize),
    Change(usize),
    /// A core of udm's own target.
    OwnCore(usize, usize),
    Wire(usize),
}

impl NvmeClientWorld {
    /// Runs one step.
    pub(super) fn one_step(&mut self) -> Result<(), Violation> {
        self.step += 1;
        self.set_turn(None);
        if self.step.is_multiple_of(64) {
            let mut shared = lock_front_end_state(&self.shared);
            shared.model.forget(self.step);
            self.writes.forget(&shared.model);
            drop(shared);
            self.conns.retain(|conn| !conn.is_over());
            self.wires.retain(|wire| !wire.is_over);
        }
        lock_front_end_state(&self.shared).step = self.step;
        self.disturb()?;
        self.take_calls();
        self.look_at_controllers();
        self.check_hosts()?;
        let mut next = Nanos::NEVER;
        for core in &self.cores {
            next = next.min(core.outside.borrow_mut().go_on());
        }
        next = next.min(self.advance_own_rings());
        self.note_failures();
        let mut ready = Vec::new();
        let mut add = |at: Nanos, candidate, next: &mut Nanos| {
            *next = (*next).min(at);
            ready.extend((at <= self.now).then_some(candidate));
        };
        for (c, core) in self.cores.iter().enumerate() {
            add(core.reason(), TurnCandidate::Core(c), &mut next);
        }
        for (i, conn) in self.conns.iter().enumerate() {
            // A stopped target notices a broken connection only when it continues.
            if self.targets[conn.target].is_awake() {
                let at = conn.reason(&self.net.borrow(), &self.controllers);
                add(at, TurnCandidate::Conn(i), &mut next);
            }
        }
        for (w, wire) in self.wires.iter().enumerate() {
            if self.targets[wire.target].mode != TargetAvailability::Hole {
                add(wire.reason(&self.net.borrow()), TurnCandidate::Wire(w), &mut next);
            }
        }
        for (t, target) in self.targets.iter().enumerate() {
            for (c, core) in target.own_cores() {
                add(core.reason(), TurnCandidate::OwnCore(t, c), &mut next);
            }
            let due = target.jobs.iter().map(|job| job.due).min().unwrap_or(Nanos::NEVER);
            add(due, TurnCandidate::Disk(t), &mut next);
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
            TurnCandidate::Conn(i) => self.conn_turn(i)?,
            TurnCandidate::Disk(t) => self.disk_turn(t)?,
            TurnCandidate::Change(d) => self.go_on_changing(d)?,
            TurnCandidate::OwnCore(t, c) => self.own_core_turn(t, c)?,
            TurnCandidate::Wire(w) => self.wire_turn(w),
        }
        lock_front_end_state(&self.shared).wrong.take().map_or(Ok(()), Err)
    }

    /// Advances the clock to the next event.
    fn jump(&mut self, next: Nanos) -> Result<(), Violation> {
        let times = self.targets.iter().flat_map(|target| [target.until, target.ana_until]);
        let times = times.chain(self.callers.iter().map(|(_, due)| *due));
        let next = times.filter(|at| *at > self.now).fold(next, Nanos::min);
        let next = next.min(self.next_timer());
        if let Some(alone) = self.alone_until
            && next > alone
        {
            (self.now, self.alone_until) = (self.now.max(alone), None);
            return Ok(());
        }
        // While front ends work, a fault may occur at any time.
        let working = lock_front_end_state(&self.shared).phase == WorkloadPhase::Work;
        let most = self.schedule.pick(&[1_000_000, 20_000_000, 500_000_000]);
        let next = if working { next.min(self.now + Nanos(most)) } else { next };
        if next == Nanos::NEVER {
            return Err(format!("{STUCK}, but work is left: {}", self.waiting()));
        }
        if next > self.now {
            self.now = next;
            let args = [next.0, 0, 0, 0];
            lock_front_end_state(&self.shared).trace.add(next, NO_CORE, TraceEventKind::Jump, args);
        }
        // If requests do not progress by themselves, the world acts as an administrator.
        if !working && self.alone_until.is_none() {
            let oldest = lock_front_end_state(&self.shared).model.oldest_at();
            if oldest.is_some_and(|at| self.now.since(at) > STUCK_AFTER) {
                self.reinstate_all()?;
            }
        }
        Ok(())
    }

    /// Runs steps until `done`.
    pub(super) fn step_until(
        &mut self,
        what: &str,
        done: impl Fn(&NvmeClientWorld) -> bool,
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

    /// Sets the clocks for a turn of core `c`, or of the control side.
    pub(super) fn set_turn(&mut self, c: Option<usize>) {
        // All turns have different times.
        self.now = self.now + Nanos(1);
        clock::set_simulated_clock(self.now, c.map_or(Nanos(0), |c| self.cores[c].spent));
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
        }
        net.adopt();
        net.look();
        let links = net.links.len();
        drop((net, shared));
        for link in std::mem::replace(&mut self.seen, links)..links {
            // The ends of udm's own targets call nobody.
            if !self.net.borrow().links[link].is_client {
                continue;
            }
            let target = self.net.borrow().links[link].to;
            self.counts.connects += 1;
            self.say(format!("core {c} calls t{target}: connection {link}"));
            let due = self.now + Nanos(1 + self.chance.span(self.targets[target].latency));
            self.callers.push((link, due));
        }
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

    /// Records network failures as faults of all namespaces.
    fn note_failures(&mut self) {
        let (lost, now) = (self.net.borrow().lost, self.now);
        if lost > std::mem::replace(&mut self.counts.lost, lost) {
            let mut shared = lock_front_end_state(&self.shared);
            shared.model.exports.iter_mut().for_each(|export| export.trouble(now));
        }
    }

    /// Checks the log lines: a target must be reported as lost once for each reason, until it is
    /// connected again.
    fn read_log(&mut self) -> Result<(), Violation> {
        for line in log_capture::take_captured_log_lines() {
            self.counts.lines += 1;
            self.say(format!("log: {line}"));
            let number = line.split("nvme+tcp://t").nth(1).and_then(|rest| {
                let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
                rest[..end].parse::<usize>().ok()
            });
            let Some(target) = number else { return Err(format!("a line of no target: {line}")) };
            if line.contains(": the lost controller was ") {
                let is_reset = line.contains(" was reset through ");
                *(if is_reset { &mut self.counts.resets } else { &mut self.counts.refused_resets }) += 1;
                continue;
            }
            if line.contains(" writes ") {
                self.counts.waited += 1;
                continue;
            }
            if line.contains(": ANA state ")
                || line.contains(": its size was ") && line.contains(" bytes and is ")
            {
                continue;
            }
            let is_new = match line.strip_suffix(": connected again") {
                Some(_) => !std::mem::take(&mut self.down[target]).is_empty(),
                None => self.down[target].insert(line.clone()),
            };
            if !is_new {
                return Err(format!("t{target} is lost, or there again, twice: {line}"));
            }
        }
        Ok(())
    }

    fn conn_turn(&mut self, i: usize) -> Result<(), Violation> {
        self.set_turn(None);
        self.with_conn(i, |conn, a| conn.turn(a))
    }

    /// Calls `act` with connection `i` and the parts of the world that it uses.
    pub(super) fn with_conn<R>(
        &mut self,
        i: usize,
        act: impl FnOnce(&mut ControllerConn, &mut ConnContext<'_>) -> R,
    ) -> R {
        let NvmeClientWorld {
            conns,
            targets,
            namespaces,
            controllers,
            writes,
            net,
            shared,
            chance,
            counts,
            options,
            now,
            calm,
            ..
        } = self;
        let conn = &mut conns[i];
        let target = &mut targets[conn.target];
        let namespace = &namespaces[target.namespace];
        let (mut net, mut shared) = (net.borrow_mut(), lock_front_end_state(shared));
        let (net, shared, now, calm) = (&mut *net, &mut *shared, *now, *calm);
        let mut a = ConnContext {
            net,
            target,
            namespace,
            controllers,
            writes,
            shared,
            chance,
            counts,
            options,
            now,
            calm,
        };
        act(conn, &mut a)
    }

    /// Executes a command that is due at the disk of target `t`, and answers it if its connection
    /// and its controller still exist.
    fn disk_turn(&mut self, t: usize) -> Result<(), Violation> {
        self.set_turn(None);
        let (now, target) = (self.now, &mut self.targets[t]);
        let due: Vec<usize> = (0..target.jobs.len()).filter(|i| target.jobs[*i].due <= now).collect();
        if due.is_empty() {
            return Ok(());
        }
        let job = target.jobs.swap_remove(self.chance.pick(&due));
        let disk = Arc::clone(&self.disks[target.namespace]);
        let mut disk = lock_mutex(&disk);
        let is_working = !self.controllers[job.controller].is_over;
        let is_its = |conn: &ControllerConn| conn.link == job.link && conn.controller().is_some();
        let conn = self.conns.iter().position(|conn| is_working && is_its(conn) && !conn.closing);
        if let Some(conn) = conn {
            self.with_conn(conn, |conn, a| conn.carry_out(&job, &mut disk, a));
        } else if !self.plan.without.has(DisturbanceClass::Late) {
            self.counts.landed += u64::from(job.op.is_write());
            self.writes.check_late(&job, &lock_front_end_state(&self.shared).model)?;
            disk.carry_out(job.op, job.range, &job.stamps, job.is_durable, &mut self.chance);
        }
        Ok(())
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
