//! Steps of the world: a core, a session, a front end or a guest with a reason gets a turn.

use super::guest::GuestContext;
use super::machine::RingGuest;
use super::world::{ServerState, VhostUserWorld};
use crate::environment::{PathMode, lock_environment};
use crate::log_capture::take_captured_log_lines;
use crate::model::Violation;
use crate::nbd::clock;
use crate::nbd::ring_core::{RunningDeviceChange, SteppedRingCore};
use crate::plan::DisturbanceClass;
use crate::trace::{NO_CORE, TraceEventKind};
use udm_core::Nanos;
use udm_frontends::vhost_user::SteppedVhostUserSession;
use udm_runtime::CoreStateAfterStep;

/// A candidate for the next turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TurnCandidate {
    Core(usize),
    Session(usize),
    FrontEnd(usize),
    Guest(usize, usize),
    Change(usize),
}

/// A step that runs outside of the borrowed world, because it calls back into the world.
pub(super) enum StepOutsideBorrow {
    Core(usize, Box<SteppedRingCore>),
    Session(usize, Box<SteppedVhostUserSession>),
}

impl VhostUserWorld {
    /// Runs one step, or returns the part that runs outside.
    pub(super) fn step(&mut self) -> Result<Option<StepOutsideBorrow>, Violation> {
        self.wrong.take().map_or(Ok(()), Err)?;
        if self.read_log()? {
            return Ok(None);
        }
        lock_environment(&self.env).verdict()?;
        self.step += 1;
        let now = self.set_turn(None);
        if self.step.is_multiple_of(64) {
            self.set_horizon();
        }
        let state = self.state;
        self.disturb(now);
        if self.state != state {
            return Ok(None);
        }
        let mut next = Nanos::NEVER;
        let mut ready = Vec::new();
        let mut see = |at: Nanos, candidate| {
            next = next.min(at);
            if at <= now {
                ready.push(candidate);
            }
        };
        let mut events = Nanos::NEVER;
        for (c, core) in self.cores.iter().enumerate() {
            if let Some(core) = core {
                events = events.min(core.outside.borrow_mut().go_on());
                see(core.reason(), TurnCandidate::Core(c));
            }
        }
        for (i, change) in self.changes.iter().enumerate() {
            if change.is_woken() {
                see(now, TurnCandidate::Change(i));
            }
        }
        if self.state != ServerState::Killed {
            for (m, machine) in self.machines.iter().enumerate() {
                if machine.has_session_work() {
                    see(now, TurnCandidate::Session(m));
                }
                // A server listens when its devices are there.
                if self.state == ServerState::Serving && self.changes.is_empty() {
                    see(machine.front_end_reason(self.is_resting), TurnCandidate::FrontEnd(m));
                }
                for (g, guest) in machine.guests.iter().enumerate().filter(|_| !machine.is_rebooting) {
                    let at = match guest {
                        RingGuest::Orderly(guest) => guest.reason(self.is_resting),
                        RingGuest::Hostile(_) if self.is_resting => Nanos::NEVER,
                        RingGuest::Hostile(guest) => guest.next,
                    };
                    see(at, TurnCandidate::Guest(m, g));
                }
            }
        }
        if ready.is_empty() {
            return self.jump(next.min(events)).map(|()| None);
        }
        match self.schedule.pick(&ready) {
            TurnCandidate::Core(c) => {
                self.set_turn(Some(c));
                return Ok(self.cores[c].take().map(|core| StepOutsideBorrow::Core(c, Box::new(core))));
            }
            TurnCandidate::Session(m) => {
                let machine = &mut self.machines[m];
                machine.is_in_step = true;
                return Ok(machine.session.take().map(|session| StepOutsideBorrow::Session(m, session)));
            }
            TurnCandidate::FrontEnd(m) => self.front_end_turn(m)?,
            TurnCandidate::Guest(m, g) => self.guest_turn(m, g)?,
            TurnCandidate::Change(i) => self.go_on_changing(i)?,
        }
        Ok(None)
    }

    /// Advances the clock to the next event.
    fn jump(&mut self, next: Nanos) -> Result<(), Violation> {
        let timers = self.restores.iter().map(|(at, _)| *at).min();
        let next = next.min(timers.unwrap_or(Nanos::NEVER));
        if next == Nanos::NEVER {
            return Err(format!("nothing moves any more, and {} waits", self.waiting()));
        }
        let mut env = lock_environment(&self.env);
        if next > env.now {
            env.now = next;
            env.trace.add(next, NO_CORE, TraceEventKind::Jump, [next.0, 0, 0, 0]);
        }
        Ok(())
    }

    /// Describes the work that waits, for a person.
    pub(super) fn waiting(&self) -> String {
        let mut text = String::new();
        for (m, machine) in self.machines.iter().enumerate() {
            for (g, guest) in machine.guests.iter().enumerate() {
                let RingGuest::Orderly(guest) = guest else { continue };
                if let Some(request) = guest.requests.values().min_by_key(|request| request.id) {
                    let since = request.at.0 / 1000;
                    let ring = guest.ring.describe(&machine.memory);
                    text += &format!(
                        "ring {g} of machine {m}, {ring}, for {} since {since} us; ",
                        request.describe()
                    );
                }
            }
            if !machine.is_up() {
                text += &format!("machine {m} is not up, {} messages are unread; ", machine.unread);
            }
        }
        let env = lock_environment(&self.env);
        let inside: u64 = env.paths.iter().map(|path| path.in_flight).sum();
        text + &format!("{inside} requests are on the disks, and the server is {:?}", self.state)
    }

    fn set_horizon(&mut self) {
        let mut oldest = 2 * self.step;
        for guest in self.machines.iter().flat_map(|machine| &machine.guests) {
            if let RingGuest::Orderly(guest) = guest {
                oldest = guest.requests.values().fold(oldest, |oldest, request| oldest.min(request.start));
            }
        }
        self.model.cells.set_horizon(oldest);
    }

    /// Reads the log: orderly guests cause no line about their rings, and hostile ones one line for
    /// each start of their ring. Returns true if there was one.
    fn read_log(&mut self) -> Result<bool, Violation> {
        let before = self.hostile_lines;
        // A server that was killed in the middle of a change may do anything.
        let is_killed = self.state == ServerState::Killed;
        for line in take_captured_log_lines().into_iter().filter(|_| !is_killed) {
            let Some((_, ring)) = line.split_once(": queue ") else { continue };
            let is_hostile =
                |m: usize| line.starts_with(&format!("vhost-user d{m}:")) && self.machines[m].is_hostile;
            let Some(m) = (0..self.machines.len()).find(|m| is_hostile(*m) && ring.starts_with("0 ")) else {
                return Err(format!("an orderly guest caused a line in the log: {line}"));
            };
            self.hostile_lines += 1;
            self.counts.broken += 1;
            self.say(line.clone());
            let allowed = self.machines[m].lines_allowed;
            if self.hostile_lines > allowed {
                return Err(format!(
                    "{} lines in the log about a ring that was started {allowed} times at most: {line}",
                    self.hostile_lines
                ));
            }
        }
        Ok(self.hostile_lines > before)
    }

    /// A turn of guest `g` of machine `m`.
    pub(super) fn guest_turn(&mut self, m: usize, g: usize) -> Result<(), Violation> {
        let now = self.set_turn(None);
        let faults = self.faults();
        let machine = &mut self.machines[m];
        let guest = match &mut machine.guests[g] {
            RingGuest::Orderly(guest) => guest,
            RingGuest::Hostile(guest) => {
                guest.turn(&machine.memory, &mut self.work, now);
                return Ok(());
            }
        };
        let mut around = GuestContext {
            memory: &machine.memory,
            model: &mut self.model,
            chance: &mut self.work,
            disk: machine.disk,
            features: machine.features,
            step: self.step,
            now,
            faults,
            through_since: machine.through_since,
            is_resting: self.is_resting,
            events: Vec::new(),
            kicks: self.counts.kicks,
        };
        let done = guest.turn(&mut around);
        self.counts.kicks = around.kicks;
        let mut env = lock_environment(&self.env);
        around.events.into_iter().for_each(|event| env.say(event));
        done
    }

    /// An action in the middle of a core's turn: a guest's turn, or the end of the server.
    #[cfg(feature = "interleave")]
    pub(super) fn act_inside_core_turn(&mut self) {
        let on = |class| !self.plan.without.has(class);
        if self.state != ServerState::Serving || self.wrong.is_some() {
            return;
        }
        if on(DisturbanceClass::Crash) && !self.is_resting && self.between.one_in(6000) {
            self.kill(true);
        } else if on(DisturbanceClass::Between) && self.between.one_in(8) {
            let m = self.between.below(self.machines.len() as u64) as usize;
            let machine = &self.machines[m];
            let g = self.between.below(machine.guests.len() as u64) as usize;
            let is_quiet = self.is_resting && matches!(machine.guests[g], RingGuest::Hostile(_));
            if machine.is_rebooting || is_quiet {
                return;
            }
            let core = lock_environment(&self.env).core;
            // The guest's turn has a time of its own.
            self.step += 1;
            self.counts.interleaved += 1;
            self.wrong = self.guest_turn(m, g).err();
            lock_environment(&self.env).core = core;
        }
    }

    /// Ends the turn of core `c`, which returned `rest`.
    pub(super) fn end_core_turn(
        &mut self,
        c: usize,
        mut core: SteppedRingCore,
        rest: CoreStateAfterStep,
    ) -> Result<(), Violation> {
        let now = clock::now();
        let took = core.end_turn(rest, now, &mut self.schedule);
        let wrong = core.outside.borrow_mut().wrong.take();
        let mut env = lock_environment(&self.env);
        env.now = env.now + took;
        env.trace.add(now, c as u16, TraceEventKind::Turn, [core.wake.0, 0, 0, 0]);
        drop(env);
        self.cores[c] = Some(core);
        wrong.map_or(Ok(()), Err)
    }

    fn go_on_changing(&mut self, i: usize) -> Result<(), Violation> {
        let Some(outcome) = self.changes[i].step(&self.core_set) else { return Ok(()) };
        drop::<RunningDeviceChange>(self.changes.remove(i));
        outcome.map_err(|e| format!("a change of a device failed: {e}"))
    }

    /// Performs timed actions that are due, and sometimes a random one.
    fn disturb(&mut self, now: Nanos) {
        let due: Vec<usize> = self.restores.iter().filter(|(at, _)| *at <= now).map(|(_, p)| *p).collect();
        self.restores.retain(|(at, _)| *at > now);
        due.into_iter().for_each(|p| self.restore(p));
        if self.is_resting || self.state != ServerState::Serving {
            return;
        }
        if !self.plan.without.has(DisturbanceClass::Crash) && self.control.one_in(2500) {
            self.kill(false);
        } else if !self.plan.without.has(DisturbanceClass::Paths) && self.control.one_in(300) {
            self.trouble(now);
        }
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
        self.cores.iter_mut().flatten().for_each(|core| core.wake = core.wake.min(now));
    }
}
