//! Steps of the world: a core or client with a reason gets a turn.

use super::client::{ClientContext, ClientState, DisconnectMode};
use super::clock;
use super::ring_core::RunningDeviceChange;
use super::world::NbdServerWorld;
use crate::environment::lock_environment;
use crate::model::Violation;
use crate::plan::DisturbanceClass;
use crate::trace::{NO_CORE, TraceEventKind};
use udm_core::Nanos;
use udm_runtime::CoreStateAfterStep;
use udm_wire::nbd::{CommandFlags, NbdCommand, NbdRequestHeader};

/// Maximum number of steps until an awaited event, or until another byte is moved. A long reply may
/// be sent byte by byte.
const STEPS_MAX: u64 = 200_000;

/// Reads in flight per client while all data is read back.
const CHECKS: usize = 4;

/// A candidate for the next turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TurnCandidate {
    Core(usize),
    Client(usize),
    BlockStatus,
    Change(usize),
}

impl NbdServerWorld {
    /// Runs one step.
    pub(super) fn one_step(&mut self) -> Result<(), Violation> {
        self.step += 1;
        let now = self.set_turn(None);
        if self.step.is_multiple_of(64) {
            let asked = self.clients.iter().flat_map(|client| client.asked.values());
            let oldest = asked.map(|asked| asked.start).min();
            self.model.cells.set_horizon(oldest.unwrap_or(2 * self.step));
            self.forget_lost_requests();
        }
        self.disturb();
        let mut next = Nanos::NEVER;
        for c in 0..self.cores.len() {
            next = next.min(self.cores[c].outside.borrow_mut().go_on());
        }
        let mut ready = Vec::new();
        for c in 0..self.cores.len() {
            let wake = self.cores[c].reason();
            next = next.min(wake);
            if wake <= now {
                ready.push(TurnCandidate::Core(c));
            }
        }
        for i in 0..self.clients.len() {
            let at = self.client_reason(i);
            next = next.min(at);
            if at <= now {
                ready.push(TurnCandidate::Client(i));
            }
        }
        if self.server.as_ref().is_some_and(|server| server.pending_queries() > 0) {
            ready.push(TurnCandidate::BlockStatus);
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
            TurnCandidate::Client(i) => self.client_turn(i)?,
            TurnCandidate::BlockStatus => self.run_block_status(),
            TurnCandidate::Change(d) => self.go_on_changing(d)?,
        }
        lock_environment(&self.env).verdict()
    }

    /// Advances the clock to the next event.
    fn jump(&mut self, next: Nanos) -> Result<(), Violation> {
        let timers = self.restores.iter().chain(&self.resumes).map(|(at, _)| *at).min();
        let next = next.min(timers.unwrap_or(Nanos::NEVER));
        // Outside of quiescence, a new client may arrive at any time.
        let others = !self.resting && !self.ending;
        let next = if others { next.min(clock::now() + Nanos(1_000_000)) } else { next };
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

    /// Runs steps until `done`.
    pub(super) fn step_until(
        &mut self,
        what: &str,
        done: impl Fn(&NbdServerWorld) -> bool,
    ) -> Result<(), Violation> {
        let from = self.step;
        while !done(self) {
            if self.step - from.max(self.moved_at) > STEPS_MAX {
                return Err(format!("{what} does not come, and {} waits", self.waiting()));
            }
            self.one_step()?;
        }
        Ok(())
    }

    /// Describes the work that waits, for a person.
    pub(super) fn waiting(&self) -> String {
        let mut text = String::new();
        for client in &self.clients {
            if let Some(asked) = client.asked.values().min_by_key(|asked| asked.id) {
                let NbdRequestHeader { command, offset, len, .. } = asked.request;
                let (who, since) = (client.link, asked.at.0 / 1000);
                text += &format!("connection {who} for a {command:?} {offset}+{len} since {since} us; ");
            } else if !client.is_over() && !client.is_served() {
                text += &format!("connection {} for its handshake; ", client.link);
            }
        }
        let env = lock_environment(&self.env);
        let inside: u64 = env.paths.iter().map(|path| path.in_flight).sum();
        text + &format!("{inside} requests are on the disks, {} devices change", self.changing())
    }

    /// Time of the next turn of client `i`.
    pub(super) fn client_reason(&self, i: usize) -> Nanos {
        let client = &self.clients[i];
        let net = self.net.borrow();
        let asks = (client.check.is_some() && client.asked.len() < CHECKS)
            || (!self.resting && client.farewell.is_none() && client.asked.len() < client.manner.depth);
        let asks = asks && client.is_served() && client.out.is_empty();
        match !client.is_over() && (client.has_to_do(&net) || asks) {
            true => client.next,
            false => Nanos::NEVER,
        }
    }

    fn turn(&mut self, c: usize) -> Result<(), Violation> {
        self.set_turn(Some(c));
        self.turns += 1;
        let mut rest = self.cores[c].core.step();
        for _ in 0..self.schedule.below(4) {
            if rest != CoreStateAfterStep::None {
                break;
            }
            self.set_turn(Some(c));
            rest = self.cores[c].core.step();
        }
        let now = clock::now();
        let core = &mut self.cores[c];
        let took = core.end_turn(rest, now, &mut self.schedule);
        let wrong = core.outside.borrow_mut().wrong.take();
        let mut env = lock_environment(&self.env);
        env.now = env.now + took;
        env.trace.add(now, c as u16, TraceEventKind::Turn, [core.wake.0, 0, 0, 0]);
        let mut net = self.net.borrow_mut();
        for (l, received, sent) in net.take_moved() {
            self.moved_at = self.step;
            env.trace.add(now, c as u16, TraceEventKind::Bytes, [l as u64, received, sent, 0]);
        }
        drop(env);
        net.look();
        drop(net);
        wrong.map_or(Ok(()), Err)?;
        self.check_memory()
    }

    /// Checks that the memory of the server is within its options.
    pub(super) fn check_memory(&mut self) -> Result<(), Violation> {
        let live = udm_buf::slab_count::thread_live_slab_bytes() - self.base;
        self.counts.memory.see(live.max(0) as u64);
        let Some(server) = &self.server else { return Ok(()) };
        let stats = server.stats();
        let connections = stats.connections + stats.orphans;
        // A closing connection may be missing in these counts.
        let all = connections.max(self.clients.len().min(self.net.borrow().links.len()));
        let max = self.memory_max(all);
        if live > max {
            return Err(format!(
                "the server has {live} bytes of memory for {all} connections, and may have {max}"
            ));
        }
        let most = (all * self.options.requests_max) as u64;
        if stats.in_flight > most {
            return Err(format!("{} requests are in the server, which may be {most}", stats.in_flight));
        }
        Ok(())
    }

    fn run_block_status(&mut self) {
        let (some, asks) = (self.schedule.any(), self.schedule.below(8) > 0);
        if let Some(server) = &self.server {
            let nth = (some % server.pending_queries() as u64) as usize;
            server.run_query(nth, asks);
        }
    }

    fn client_turn(&mut self, i: usize) -> Result<(), Violation> {
        let now = self.set_turn(None);
        let excuses = self.excuses();
        let without = self.plan.without;
        let (trims, flushes) = (!without.has(DisturbanceClass::Trim), !without.has(DisturbanceClass::Flush));
        let wild = !without.has(DisturbanceClass::Wild);
        let checks = self.model.unit * 64;
        let NbdServerWorld { clients, net, model, work, step, exports, counts, .. } = self;
        let mut net = net.borrow_mut();
        let client = &mut clients[i];
        let events = Vec::new();
        let mut around =
            ClientContext { net: &mut net, model, chance: work, step: *step, now, excuses, events, exports };
        if !self.resting && client.manner.stalls > 0 && around.chance.one_in(client.manner.stalls) {
            client.stalled = true;
            counts.stalls += 1;
            client.next = now + Nanos(1_000_000 * around.chance.between(10, 8_000));
            return Ok(());
        }
        client.write(&mut around);
        let read = client.read(&mut around);
        let asking = client.is_served() && client.out.is_empty() && client.farewell.is_none();
        if let (true, Some(at), ClientState::Served(agreed)) = (asking, client.check, &client.state) {
            let size = around.model.disks[agreed.device].size;
            let len = (size - at).min(checks.max(4096));
            if len == 0 {
                client.check = None;
            } else if client.asked.len() < CHECKS {
                let flags = CommandFlags::empty();
                let request =
                    NbdRequestHeader { flags, command: NbdCommand::Read, cookie: 0, offset: at, len };
                client.check = Some(at + len);
                client.ask(request, &mut around);
            }
        } else if asking && !self.resting {
            let room = client.manner.depth.saturating_sub(client.asked.len()) as u64;
            for _ in 0..(1 + around.chance.below(8)).min(room) {
                let request = client.draw(&mut around, trims, flushes, wild);
                client.ask(request, &mut around);
            }
            if around.chance.one_in(150) {
                let farewell = match around.chance.below(8) {
                    0..2 => DisconnectMode::Disconnect,
                    2..4 => DisconnectMode::HalfClose,
                    4 if !without.has(DisturbanceClass::Nonsense) => DisconnectMode::Nonsense,
                    5..8 if !without.has(DisturbanceClass::Lost) => DisconnectMode::Cut,
                    _ => DisconnectMode::Disconnect,
                };
                client.farewell = Some(farewell);
                match farewell {
                    DisconnectMode::Disconnect => {
                        let request = NbdRequestHeader {
                            flags: CommandFlags::empty(),
                            command: NbdCommand::Disconnect,
                            cookie: 0,
                            offset: 0,
                            len: 0,
                        };
                        client.put_header(&request);
                    }
                    DisconnectMode::Nonsense => {
                        counts.nonsense += 1;
                        let n = around.chance.between(NbdRequestHeader::EXTENDED_SIZE as u64, 200);
                        let byte = around.chance.any() as u8;
                        client.out.extend(std::iter::repeat_n(byte, n as usize));
                    }
                    DisconnectMode::HalfClose | DisconnectMode::Cut => {}
                }
            }
        }
        match client.farewell {
            Some(DisconnectMode::HalfClose) if client.out.is_empty() && !client.is_over() => {
                around.net.end_up(client.link);
            }
            // At any point, also in the middle of a request.
            Some(DisconnectMode::Cut) if !client.is_over() && around.chance.one_in(4) => {
                counts.lost += 1;
                let (quietly, broken) = (around.chance.one_in(2), around.chance.one_in(2));
                client.end(&mut around, quietly, broken);
            }
            _ => {}
        }
        client.next = now + Nanos(1 + around.chance.span(client.manner.pause));
        let mut env = lock_environment(&self.env);
        around.events.into_iter().for_each(|(kind, args)| env.trace.add(now, NO_CORE, kind, args));
        read
    }
}
