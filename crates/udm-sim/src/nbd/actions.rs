//! Random actions in the world: new clients, moves, suspends, and path trouble.

use super::client::{ClientBehavior, SimNbdClient};
use super::handshake::ClientHandshake;
use super::ring_core::RunningDeviceChange;
use super::world::NbdServerWorld;
use crate::environment::{PathMode, lock_environment};
use crate::model::Violation;
use crate::plan::DisturbanceClass;
use udm_core::Nanos;

impl NbdServerWorld {
    /// Performs timed actions that are due, and sometimes a random one.
    pub(super) fn disturb(&mut self) {
        let now = lock_environment(&self.env).now;
        let due = |all: &mut Vec<(Nanos, usize)>| {
            let due: Vec<usize> = all.iter().filter(|(at, _)| *at <= now).map(|(_, which)| *which).collect();
            all.retain(|(at, _)| *at > now);
            due
        };
        due(&mut self.restores).into_iter().for_each(|p| self.restore(p));
        for device in due(&mut self.resumes) {
            self.resumes_later(device);
        }
        if self.resting || self.dead || self.ending || !self.control.one_in(40) {
            return;
        }
        match self.control.below(24) {
            0..8 if self.alive() < self.clients_max => drop(self.connect()),
            8..10 if !self.plan.without.has(DisturbanceClass::Paths) => self.trouble(now),
            10 if !self.plan.without.has(DisturbanceClass::Suspend) => self.suspend(now),
            11 if !self.plan.without.has(DisturbanceClass::Moves) => {
                self.say("all clients are to move");
                if let Some(server) = &self.server {
                    server.rotate();
                }
            }
            _ => {}
        }
    }

    /// Connects a client. Returns its number, unless the server has no room.
    pub(super) fn connect(&mut self) -> Option<usize> {
        let export = self.work.below(self.exports.len() as u64) as usize;
        self.connect_to(export, false)
    }

    /// Connects a client to this export. If `plain`, the client sends only the necessary options
    /// and does not stall.
    pub(super) fn connect_to(&mut self, export: usize, plain: bool) -> Option<usize> {
        let c = &mut self.work;
        let room =
            if plain { 1 << 20 } else { c.pick(&[1, 100, 4096, 4096, 64 << 10, 64 << 10, 1 << 20, 1 << 20]) };
        let cuts = !self.plan.without.has(DisturbanceClass::Cuts);
        let stalls = !self.plan.without.has(DisturbanceClass::Stalls) && c.one_in(3);
        let manner = ClientBehavior {
            depth: self.depth,
            pause: self.pause,
            piece: if cuts { c.pick(&[16, 1024, 4096, 64 << 10, 1 << 20]) } else { u64::MAX },
            sip: if cuts { c.pick(&[16, 1024, 4096, 64 << 10, 1 << 20]) } else { u64::MAX },
            stalls: if plain || !stalls { 0 } else { 60 },
            longest: self.longest,
            reads: c.pick(&[20, 50, 80]),
        };
        let shaking = ClientHandshake::draw(c, export, plain);
        let (link, fd) = self.net.borrow_mut().connect(room).ok()?;
        let now = lock_environment(&self.env).now;
        let falls_silent = shaking.falls_silent;
        let mut client = SimNbdClient::new(link, manner, shaking, now);
        client.stalled = falls_silent;
        self.counts.clients += 1;
        self.say(format!("connection {link} to export {export}"));
        if self.server.as_ref()?.adopt(fd).is_err() {
            return None;
        }
        self.clients.push(client);
        Some(self.clients.len() - 1)
    }

    fn trouble(&mut self, now: Nanos) {
        let p = self.control.below(self.paths.len() as u64) as usize;
        let mode = match self.control.below(8) {
            0..2 if !self.plan.without.has(DisturbanceClass::Hang) => PathMode::Hung,
            2 if self.fails => PathMode::Silent,
            3 if self.fails => PathMode::Down,
            _ => PathMode::Slow(self.control.between(2, 100)),
        };
        let last = Nanos(self.control.between(1, 3_000) * 1_000_000);
        if self.restores.iter().all(|(_, other)| *other != p) {
            self.counts.troubles += 1;
            self.say(format!("p{p} is {mode:?}"));
            lock_environment(&self.env).paths[p].mode = mode;
            self.restores.push((now + last, p));
        }
    }

    /// Restores path `p` and releases its hung requests. Wakes all cores, because nothing else
    /// does.
    pub(super) fn restore(&mut self, p: usize) {
        let mut env = lock_environment(&self.env);
        if env.paths[p].mode == PathMode::Hung {
            // The hung requests succeed or time out.
            env.faults += 1;
        }
        env.paths[p].mode = PathMode::Up;
        env.paths[p].released += 1;
        let now = env.now;
        self.cores.iter_mut().for_each(|core| core.wake = core.wake.min(now));
    }

    fn suspend(&mut self, now: Nanos) {
        let device = self.control.below(self.devices.len() as u64) as usize;
        let noflush = self.control.one_in(2);
        let slot = &mut self.devices[device];
        if slot.change.is_some() || slot.suspended {
            return;
        }
        let Some(mapped) = slot.mapped.clone() else { return };
        if let Ok(change) = RunningDeviceChange::start(|wake| mapped.suspend(noflush, wake)) {
            self.counts.suspends += 1;
            slot.suspended = true;
            slot.change = Some(change);
            self.say(format!("d{device} is to be suspended"));
            self.resumes.push((now + Nanos(1 + self.control.span(100_000_000)), device));
        }
    }

    /// Resumes a suspended device. If its suspend is in progress, tries again a little later.
    fn resumes_later(&mut self, device: usize) {
        if self.devices[device].change.is_some() {
            let later = lock_environment(&self.env).now + Nanos(1_000_000);
            self.resumes.push((later, device));
        } else if self.devices[device].suspended
            && let Err(wrong) = self.resume(device)
        {
            lock_environment(&self.env).violate(|| wrong);
        }
    }

    /// Starts a resume of `device`.
    pub(super) fn resume(&mut self, device: usize) -> Result<(), Violation> {
        let slot = &mut self.devices[device];
        let Some(mapped) = slot.mapped.clone() else { return Ok(()) };
        let change = RunningDeviceChange::start(|wake| mapped.resume(wake));
        let change = change.map_err(|e| format!("d{device} can't be resumed: {e}"))?;
        slot.change = Some(change);
        slot.suspended = false;
        self.say(format!("d{device} is to be resumed"));
        Ok(())
    }

    /// Continues the change of `device`.
    pub(super) fn go_on_changing(&mut self, device: usize) -> Result<(), Violation> {
        self.set_turn(None);
        let change = self.devices[device].change.as_mut();
        let Some(outcome) = change.and_then(|change| change.step(&self.core_set)) else { return Ok(()) };
        self.devices[device].change = None;
        self.say(format!("d{device} has changed"));
        outcome.map_err(|e| format!("a change of d{device} failed: {e}"))
    }

    /// Number of devices with a change in progress.
    pub(super) fn changing(&self) -> usize {
        self.devices.iter().filter(|device| device.change.is_some()).count()
    }
}
