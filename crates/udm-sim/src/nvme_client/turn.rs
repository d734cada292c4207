//! Steps of the world: a core, a connection or a disk with a reason gets a turn.

use super::conn::{ConnContext, ControllerConn};
use super::target::TargetAvailability;
use super::world::NvmeClientWorld;
use crate::environment::lock_mutex;
use crate::log_capture;
use crate::model::Violation;
use crate::nbd::ring_core::RunningDeviceChange;
use crate::plan::DisturbanceClass;
use crate::remote_disk::machine::RemoteDiskMachine;
use crate::remote_disk::run::{RemoteDiskWorld, STUCK};
use crate::remote_disk::shared::{WorkloadPhase, lock_front_end_state};
use std::sync::Arc;
use udm_core::Nanos;

/// Time that requests may wait at quiescence before paths are reinstated.
const STUCK_AFTER: Nanos = Nanos(5_000_000_000);

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
    pub(super) fn step_once(&mut self) -> Result<(), Violation> {
        self.machine.step += 1;
        self.machine.set_turn(None);
        if self.machine.step.is_multiple_of(64) {
            let mut shared = lock_front_end_state(&self.machine.shared);
            shared.model.forget(self.machine.step);
            self.writes.forget(&shared.model);
            drop(shared);
            self.conns.retain(|conn| !conn.is_over());
            self.wires.retain(|wire| !wire.is_over);
        }
        lock_front_end_state(&self.machine.shared).step = self.machine.step;
        self.disturb()?;
        self.accept_connects();
        self.look_at_controllers();
        self.check_hosts()?;
        let mut next = self.machine.advance_rings();
        next = next.min(self.advance_own_rings());
        self.machine.note_failures();
        let mut ready = Vec::new();
        let mut add = |at: Nanos, candidate, next: &mut Nanos| {
            *next = (*next).min(at);
            ready.extend((at <= self.machine.now).then_some(candidate));
        };
        for (c, core) in self.machine.cores.iter().enumerate() {
            add(core.reason(), TurnCandidate::Core(c), &mut next);
        }
        for (i, conn) in self.conns.iter().enumerate() {
            // A stopped target notices a broken connection only when it continues.
            if self.targets[conn.target].is_awake() {
                let target = &self.targets[conn.target];
                let at = conn.reason(&self.machine.net.borrow(), target, &self.controllers);
                add(at, TurnCandidate::Conn(i), &mut next);
            }
        }
        for (w, wire) in self.wires.iter().enumerate() {
            if self.targets[wire.target].mode != TargetAvailability::Unreachable {
                add(wire.reason(&self.machine.net.borrow()), TurnCandidate::Wire(w), &mut next);
            }
        }
        for (t, target) in self.targets.iter().enumerate() {
            for (c, core) in target.own_cores() {
                add(core.reason(), TurnCandidate::OwnCore(t, c), &mut next);
            }
            let due = target.jobs.iter().map(|job| job.due).min().unwrap_or(Nanos::NEVER);
            add(due, TurnCandidate::Disk(t), &mut next);
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
            TurnCandidate::Conn(i) => self.conn_turn(i)?,
            TurnCandidate::Disk(t) => self.disk_turn(t)?,
            TurnCandidate::Change(d) => self.machine.go_on_changing(d)?,
            TurnCandidate::OwnCore(t, c) => self.own_core_turn(t, c)?,
            TurnCandidate::Wire(w) => self.wire_turn(w),
        }
        lock_front_end_state(&self.machine.shared).wrong.take().map_or(Ok(()), Err)
    }

    /// Advances the clock to the next event.
    fn jump(&mut self, next: Nanos) -> Result<(), Violation> {
        let times = self.targets.iter().flat_map(|target| [target.until, target.ana_until]);
        let times = times.chain(self.machine.pending_connects.iter().map(|(_, due)| *due));
        let next = times.filter(|at| *at > self.machine.now).fold(next, Nanos::min);
        let next = next.min(self.next_timer());
        if let Some(alone) = self.machine.idle_until
            && next > alone
        {
            (self.machine.now, self.machine.idle_until) = (self.machine.now.max(alone), None);
            return Ok(());
        }
        // While front ends work, a fault may occur at any time.
        let working = lock_front_end_state(&self.machine.shared).phase == WorkloadPhase::Work;
        let most = self.machine.schedule.pick(&[1_000_000, 20_000_000, 500_000_000]);
        let next = if working { next.min(self.machine.now + Nanos(most)) } else { next };
        if next == Nanos::NEVER {
            return Err(format!("{STUCK}, but work is left: {}", self.machine.waiting()));
        }
        self.machine.jump_to(next);
        // If requests do not progress by themselves, the world acts as an administrator.
        if !working && self.machine.idle_until.is_none() {
            let oldest = lock_front_end_state(&self.machine.shared).model.oldest_at();
            if oldest.is_some_and(|at| self.machine.now.since(at) > STUCK_AFTER) {
                self.reinstate_all()?;
            }
        }
        Ok(())
    }

    fn turn(&mut self, c: usize) -> Result<(), Violation> {
        self.machine.core_turn(c)?;
        let links = self.machine.net.borrow().links.len();
        for link in std::mem::replace(&mut self.machine.seen, links)..links {
            // The ends of udm's own targets call nobody.
            if !self.machine.net.borrow().links[link].is_client {
                continue;
            }
            let target = self.machine.net.borrow().links[link].to;
            self.counts.connects += 1;
            self.machine.say(format!("core {c} calls t{target}: connection {link}"));
            let due = self.machine.now + Nanos(1 + self.machine.chance.span(self.targets[target].latency));
            self.machine.pending_connects.push((link, due));
        }
        self.read_log()?;
        self.machine.check_memory(self.memory_max())
    }

    /// Checks the log lines: a target must be reported as lost once for each reason, until it is
    /// connected again.
    fn read_log(&mut self) -> Result<(), Violation> {
        for line in log_capture::take_captured_log_lines() {
            self.counts.lines += 1;
            self.machine.say(format!("log: {line}"));
            let target = RemoteDiskMachine::path_of_line(&line, "nvme+tcp://t")?;
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
            self.machine.check_loss_line(target, &line, &line)?;
        }
        Ok(())
    }

    fn conn_turn(&mut self, i: usize) -> Result<(), Violation> {
        self.machine.set_turn(None);
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
            counts,
            options,
            machine: RemoteDiskMachine { net, shared, chance, now, calm, .. },
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
        self.machine.set_turn(None);
        let (now, target) = (self.machine.now, &mut self.targets[t]);
        let due: Vec<usize> = (0..target.jobs.len()).filter(|i| target.jobs[*i].due <= now).collect();
        if due.is_empty() {
            return Ok(());
        }
        let job = target.jobs.swap_remove(self.machine.chance.pick(&due));
        let disk = Arc::clone(&self.disks[target.namespace]);
        let mut disk = lock_mutex(&disk);
        let is_working = !self.controllers[job.controller].is_over;
        let is_its = |conn: &ControllerConn| conn.link == job.link && conn.controller().is_some();
        let conn = self.conns.iter().position(|conn| is_working && is_its(conn) && !conn.closing);
        if let Some(conn) = conn {
            self.with_conn(conn, |conn, a| conn.carry_out(&job, &mut disk, a));
        } else if !self.machine.plan.without.has(DisturbanceClass::Late) {
            self.counts.landed += u64::from(job.op.is_write());
            self.writes.check_late(&job, &lock_front_end_state(&self.machine.shared).model)?;
            disk.carry_out(job.op, job.range, &job.stamps, job.is_durable, &mut self.machine.chance);
        }
        Ok(())
    }
}
