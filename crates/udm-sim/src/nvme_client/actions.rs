//! Random actions in the world: trouble of targets and recovery, ANA states, namespaces that grow,
//! reinstated paths, and power cuts.

use super::conn::ControllerConn;
use super::own_target::OwnTarget;
use super::target::{ConnBehavior, TargetAvailability};
use super::world::NvmeClientWorld;
use crate::environment::lock_mutex;
use crate::model::Violation;
use crate::plan::DisturbanceClass;
use crate::remote_disk::shared::{WorkloadPhase, lock_front_end_state};
use udm_core::{Nanos, errno};
use udm_wire::nvme::AnaState;

impl NvmeClientWorld {
    /// Performs timed actions that are due, and sometimes a random one.
    pub(super) fn disturb(&mut self) -> Result<(), Violation> {
        for t in 0..self.targets.len() {
            let target = &self.targets[t];
            if target.mode != TargetAvailability::Up && target.until <= self.machine.now {
                self.restore(t);
            }
            if self.targets[t].ana_until <= self.machine.now {
                self.set_ana_state(t, AnaState::Optimized);
            }
        }
        let phase = lock_front_end_state(&self.machine.shared).phase;
        if phase != WorkloadPhase::Work
            || self.machine.calm
            || !self.machine.control.one_in(self.machine.fault_interval)
        {
            return Ok(());
        }
        let without = self.machine.plan.without;
        let has = |class| !without.has(class);
        let t = self.machine.control.below(self.targets.len() as u64) as usize;
        match self.machine.control.below(23) {
            0..2 if has(DisturbanceClass::Stalls) => self.trouble(t, TargetAvailability::Stopped),
            2..5 if has(DisturbanceClass::Stalls) => self.trouble(t, TargetAvailability::Unreachable),
            5 if has(DisturbanceClass::Paths) => self.trouble(t, TargetAvailability::Refuses),
            6 if has(DisturbanceClass::Paths) => self.trouble(t, TargetAvailability::Silent),
            7 if has(DisturbanceClass::Limits) && self.machine.control.one_in(2) => {
                self.kill(t);
                self.trouble(t, TargetAvailability::Other);
            }
            8 if has(DisturbanceClass::Paths) => {
                self.kill(t);
                let mode = self.machine.control.pick(&[
                    TargetAvailability::Up,
                    TargetAvailability::Refuses,
                    TargetAvailability::Silent,
                    TargetAvailability::Unreachable,
                ]);
                self.trouble(t, mode);
            }
            9..13 if has(DisturbanceClass::Paths) => self.change_ana_states(t),
            13..18 if has(DisturbanceClass::Messages) => {
                let device = self.machine.control.below(self.machine.devices.len() as u64) as usize;
                let all = self.machine.control.one_in(8);
                self.reinstate(device, all)?;
            }
            18 if has(DisturbanceClass::Limits) => self.grow(self.targets[t].namespace),
            19 if has(DisturbanceClass::Crash) && self.machine.control.one_in(4) => {
                self.power_cut(self.targets[t].namespace);
            }
            20.. if has(DisturbanceClass::Stalls) => self.trouble(t, TargetAvailability::OneWay),
            _ => {}
        }
        Ok(())
    }

    /// Puts target `t` into a fault mode for a while.
    fn trouble(&mut self, t: usize, mode: TargetAvailability) {
        let namespace = &self.namespaces[self.targets[t].namespace];
        let target = &mut self.targets[t];
        let mode = match (&target.own, mode) {
            (
                Some(_),
                TargetAvailability::Silent | TargetAvailability::Other | TargetAvailability::OneWay,
            ) => TargetAvailability::Unreachable,
            (_, mode) => mode,
        };
        if target.mode != TargetAvailability::Up {
            return;
        }
        target.mode = mode;
        let most = self.machine.control.pick(&[50, 500, 500, 3_000, 3_000, 30_000]);
        let mut time = Nanos(self.machine.control.between(1, most) * 1_000_000);
        if mode == TargetAvailability::Stopped
            && let Some(max) = target.own.as_ref().and_then(OwnTarget::stop_max)
        {
            time = time.min(max);
        }
        target.until = self.machine.now + time;
        if mode == TargetAvailability::Stopped {
            target.limit_commands(&self.controllers);
        }
        target.other =
            (mode == TargetAvailability::Other).then(|| namespace.other(&mut self.machine.control));
        let counted = match mode {
            TargetAvailability::Up => return,
            TargetAvailability::Stopped => &mut self.counts.stopped,
            TargetAvailability::Unreachable => &mut self.counts.unreachable,
            TargetAvailability::OneWay => &mut self.counts.one_way,
            TargetAvailability::Refuses => &mut self.counts.refusing,
            TargetAvailability::Silent => &mut self.counts.silent,
            TargetAvailability::Other => &mut self.counts.others,
        };
        *counted += 1;
        self.note_trouble(t, &format!("t{t} is {mode:?}"));
    }

    fn note_trouble(&self, t: usize, text: &str) {
        self.machine.note_trouble(self.targets[t].namespace, text);
    }

    /// Ends the trouble of target `t`.
    pub(super) fn restore(&mut self, t: usize) {
        let was = std::mem::replace(&mut self.targets[t].mode, TargetAvailability::Up);
        if was == TargetAvailability::Other {
            self.kill(t);
        }
        let target = &mut self.targets[t];
        (target.other, target.until) = (None, Nanos(0));
        if was == TargetAvailability::OneWay {
            target.finish_hung(self.machine.now);
        }
        self.note_trouble(t, &format!("t{t} was {was:?} and is well"));
        let now = self.machine.now;
        self.conns.iter_mut().filter(|conn| conn.target == t).for_each(|conn| conn.next = conn.next.min(now));
    }

    /// Kills target `t`: its controllers and connections end.
    fn kill(&mut self, t: usize) {
        self.counts.killed += 1;
        self.note_trouble(t, &format!("t{t} is killed"));
        for number in 0..self.controllers.len() {
            let one = &mut self.controllers[number];
            if one.target == t && !std::mem::replace(&mut one.is_over, true) {
                self.targets[t].end_commands(number, self.machine.now, &mut self.machine.control);
            }
        }
        let mut net = self.machine.net.borrow_mut();
        // udm's own target only loses its connections.
        for wire in self.wires.iter().filter(|wire| wire.target == t && !wire.is_over) {
            net.leave(wire.initiator_link, true, true);
        }
        for conn in self.conns.iter_mut().filter(|conn| conn.target == t && !conn.is_over()) {
            // Its system resets the connection, or closes it if all bytes were read.
            let is_reset = self.machine.control.one_in(2);
            conn.end(&mut net, is_reset);
        }
        self.conns.retain(|conn| !conn.is_over());
    }

    /// Changes the ANA state of target `t`, perhaps in a storm.
    fn change_ana_states(&mut self, t: usize) {
        if !self.targets[t].description.has_ana {
            return;
        }
        let storm = if self.machine.control.one_in(4) { self.machine.control.between(2, 6) } else { 1 };
        for _ in 0..storm {
            let state = self.machine.control.pick(&[
                AnaState::Optimized,
                AnaState::NonOptimized,
                AnaState::Inaccessible,
                AnaState::Inaccessible,
                AnaState::PersistentLoss,
                AnaState::Change,
            ]);
            self.set_ana_state(t, state);
        }
    }

    pub(super) fn set_ana_state(&mut self, t: usize, state: AnaState) {
        let most = self.machine.control.pick(&[20, 500, 5_000]);
        let target = &mut self.targets[t];
        target.ana_until = match state {
            AnaState::Optimized => Nanos::NEVER,
            _ => self.machine.now + Nanos(self.machine.control.between(1, most) * 1_000_000),
        };
        if std::mem::replace(&mut target.ana, state) == state {
            return;
        }
        target.ana_changes += 1;
        target.own.iter().for_each(|own| own.set_ana_state(state));
        self.counts.ana += 1;
        self.note_trouble(t, &format!("t{t}: ANA state {state:?}"));
        let is_own = |one: &usize| self.controllers[*one].target == t;
        for number in (0..self.controllers.len()).filter(is_own).collect::<Vec<_>>() {
            self.controllers[number].ana_changed = true;
            // The host has to read the log again.
            self.controllers[number].ana_report = None;
            self.report_events(number);
        }
    }

    /// Adds blocks to a namespace. The table over it keeps its size, which the model knows.
    fn grow(&mut self, namespace: usize) {
        if self.machine.devices[namespace].mapped.is_none() {
            return;
        }
        self.counts.grown += 1;
        self.namespaces[namespace].sectors += 8;
        lock_mutex(&self.disks[namespace]).grow(8);
        let its = self.targets.iter().filter(|target| target.namespace == namespace);
        its.flat_map(|target| &target.own).for_each(|own| own.grow(8));
        self.machine
            .say(format!("namespace {namespace} grows to {} sectors", self.namespaces[namespace].sectors));
        let is_own = |one: &usize| self.targets[self.controllers[*one].target].namespace == namespace;
        for number in (0..self.controllers.len()).filter(is_own).collect::<Vec<_>>() {
            self.controllers[number].namespace_changed = true;
            self.report_events(number);
        }
    }

    /// Reports changes to the host of controller `number`.
    pub(super) fn report_events(&mut self, number: usize) {
        if let Some(conn) = self.admin_conn(number) {
            self.with_conn(conn, |conn, a| conn.report_events(number, a));
        }
    }

    /// Cuts the power of a disk: its targets are killed, and cached data is lost.
    fn power_cut(&mut self, namespace: usize) {
        if self.has_own_targets(namespace) {
            return;
        }
        self.counts.crashes += 1;
        for t in 0..self.targets.len() {
            if self.targets[t].namespace == namespace {
                self.kill(t);
                self.targets[t].jobs.clear();
            }
        }
        lock_mutex(&self.disks[namespace]).crash(&mut self.machine.control);
        let mut shared = lock_front_end_state(&self.machine.shared);
        shared.say(format!("the power of disk {namespace} fails"));
        shared.model.exports[namespace].crash(self.machine.step);
    }

    /// Reinstates failed paths of `device`: all of them, or those whose target works.
    pub(super) fn reinstate(&mut self, device: usize, all: bool) -> Result<(), Violation> {
        let is_well = |t: usize| self.targets[t].mode == TargetAvailability::Up;
        let (_, reinstated) = self.machine.reinstate(device, |t| all || is_well(t))?;
        self.counts.messages += reinstated.len() as u64;
        Ok(())
    }

    /// Accepts or refuses the connects that are due, according to the mode of their target.
    pub(super) fn accept_connects(&mut self) {
        for (link, due) in std::mem::take(&mut self.machine.pending_connects) {
            let net = self.machine.net.clone();
            let mut net = net.borrow_mut();
            let t = net.links[link].to;
            if net.links[link].shut {
                continue;
            }
            let mode = self.targets[t].mode;
            let is_cut = matches!(mode, TargetAvailability::Unreachable | TargetAvailability::OneWay);
            if due > self.machine.now || is_cut {
                let due = if is_cut { self.targets[t].until } else { due };
                self.machine.pending_connects.push((link, due));
                continue;
            }
            let is_lost = !self.machine.calm && net.fails > 0 && self.machine.chance.one_in(20);
            if mode == TargetAvailability::Refuses || is_lost {
                let error = if is_lost { errno::EHOSTUNREACH } else { errno::ECONNREFUSED };
                net.links[link].connected = Some(-error);
                self.counts.refusals += 1;
                drop(net);
                self.note_trouble(t, &format!("t{t} refuses connection {link}"));
                continue;
            }
            net.links[link].connected = Some(0);
            net.links[link].room = self.machine.chance.pick(&[1, 100, 4096, 64 << 10, 64 << 10, 1 << 20]);
            if self.targets[t].own.is_some() {
                drop(net);
                self.connect_wire(t, link);
                continue;
            }
            drop(net);
            let behavior = self.behavior_of(t);
            self.conns.push(ControllerConn::new(link, t, behavior, self.machine.now));
        }
    }

    /// Draws the behaviour of target `t` on its next connection.
    fn behavior_of(&mut self, t: usize) -> ConnBehavior {
        let (without, calm) = (self.machine.plan.without, self.machine.calm);
        let (c, target) = (&mut self.machine.chance, &self.targets[t]);
        let mut often = |class, all: &[u64]| if calm || without.has(class) { 0 } else { c.pick(all) };
        ConnBehavior {
            hangs: often(DisturbanceClass::Hang, &[0, 20, 100, 300]),
            errors: often(DisturbanceClass::Errors, &[0, 10, 50, 300]),
            early: often(DisturbanceClass::Errors, &[0, 0, 4, 60]),
            violations: often(DisturbanceClass::Nonsense, &[0, 0, 6, 30, 200]),
            closes: often(DisturbanceClass::Lost, &[0, 0, 50, 500]),
            refusals: often(DisturbanceClass::Errors, &[0, 0, 2, 8]),
            piece: match without.has(DisturbanceClass::Cuts) {
                true => u64::MAX,
                // Any command restarts the timer of these: a stream that trickles would keep it up.
                false if target.description.is_traffic_based => u64::MAX,
                false => c.pick(&[16, 1024, 64 << 10, 64 << 10, 1 << 20]),
            },
            latency: target.latency,
            silent: target.mode == TargetAvailability::Silent,
            notices_close: without.has(DisturbanceClass::Late) || c.one_in(2),
            loses_close: !calm && !without.has(DisturbanceClass::Stalls) && c.one_in(3),
        }
    }
}
