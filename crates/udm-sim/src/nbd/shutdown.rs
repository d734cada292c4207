//! Quiescence of the world, power cuts, the shutdown of the server, and the checks at these times.

use super::client::{ClientState, SimNbdClient};
use super::ring_core::{SteppedRingCore, count_ring_operations};
use super::world::NbdServerWorld;
use crate::disk::SimDisk;
use crate::environment::lock_environment;
use crate::model::Violation;
use crate::plan::DisturbanceClass;
use udm_core::Nanos;

/// Idle time at quiescence. It is longer than the server keeps memory for reuse, and longer than
/// any timer that may still wake a core.
const ALONE: Nanos = Nanos(40_000_000_000);

/// Maximum number of turns per connection and core during this time.
const TURNS_ALONE: u64 = 12;

/// Maximum memory of an idle connection in bytes: its receive buffer, and space for headers.
const KEPT: i64 = (256 + 64) << 10;

impl NbdServerWorld {
    /// Runs all steps of the plan, quiesces the world, and shuts everything down.
    pub(super) fn run(&mut self) -> Result<(), Violation> {
        while self.step < self.plan.steps {
            self.one_step()?;
            if self.step >= self.rest_at {
                self.rest()?;
                let crash = !self.plan.without.has(DisturbanceClass::Crash);
                match self.control.below(6) {
                    0 if crash => self.power_cut()?,
                    1 => {
                        self.end_server()?;
                        self.boot()?;
                    }
                    _ => {}
                }
                self.rest_at = self.step + 200 + self.control.span(1500);
            } else if !self.plan.without.has(DisturbanceClass::Crash) && self.control.one_in(3000) {
                self.power_cut()?;
            } else if self.control.one_in(6000) {
                self.end_server()?;
                self.boot()?;
            }
        }
        self.rest()?;
        self.disconnect_all_clients()?;
        self.end_server()
    }

    /// Ends the requests of disconnected clients in the model, if the server has dropped all their
    /// connections.
    pub(super) fn forget_lost_requests(&mut self) {
        if self.model.has_lost() && self.is_drained() {
            self.model.forget_lost_requests(self.step);
        }
    }

    /// True if the server serves only connected clients. The count excludes clients in their
    /// handshake and those that the server has closed, because the server may count another
    /// connection instead.
    fn is_drained(&self) -> bool {
        let Some(server) = &self.server else { return true };
        self.net.borrow_mut().look();
        let (stats, net) = (server.stats(), self.net.borrow());
        let served = |client: &&SimNbdClient| client.is_served() && !net.links[client.link].shut;
        let there = self.clients.iter().filter(served).count();
        stats.connections - stats.handshakes == there && stats.orphans == 0
    }

    /// Stops faults and new requests, and runs until nothing is in flight.
    fn quiet(&mut self) -> Result<(), Violation> {
        self.resting = true;
        lock_environment(&self.env).calm = true;
        self.net.borrow_mut().calm = true;
        self.restores.clear();
        (0..self.paths.len()).for_each(|p| self.restore(p));
        let now = lock_environment(&self.env).now;
        self.resumes.iter_mut().for_each(|(at, _)| *at = now);
        self.clients.iter_mut().for_each(|client| client.next = client.next.min(now));
        for client in self.clients.iter_mut().filter(|client| client.is_silent()) {
            let link = client.link;
            client.state = ClientState::Over;
            self.net.borrow_mut().leave(link, false, false);
        }
        self.step_until("a rest", |world| {
            let settled = |client: &SimNbdClient| {
                client.is_over() || (client.is_served() && client.is_through() && client.farewell.is_none())
            };
            let inside = lock_environment(&world.env).paths.iter().any(|path| path.in_flight > 0);
            let still = world.devices.iter().all(|device| device.change.is_none() && !device.suspended);
            world.clients.iter().all(settled) && !inside && still && world.is_drained()
        })?;
        self.model.forget_lost_requests(self.step);
        self.clients.retain(|client| !client.is_over());
        Ok(())
    }

    /// Quiesces the world, checks that the server is idle, and reads all data back.
    fn rest(&mut self) -> Result<(), Violation> {
        self.say("a rest");
        self.counts.rests += 1;
        self.quiet()?;
        self.check_idle()?;
        self.read_back()?;
        self.resting = false;
        lock_environment(&self.env).calm = false;
        self.net.borrow_mut().calm = false;
        Ok(())
    }

    /// Checks that an idle server sleeps and releases its memory.
    fn check_idle(&mut self) -> Result<(), Violation> {
        let (from, until) = (self.turns, lock_environment(&self.env).now + ALONE);
        self.step_until("nothing", |world| {
            let next = world.cores.iter().map(SteppedRingCore::reason).min();
            next.is_none_or(|next| next > until)
        })?;
        let (turns, connections) = (self.turns - from, self.alive() as u64);
        if turns > TURNS_ALONE * (connections + self.count as u64) {
            return Err(format!("{turns} turns of cores with {connections} clients that do nothing"));
        }
        if let Some(c) = (0..self.cores.len()).find(|&c| self.cores[c].reason() != Nanos::NEVER) {
            let wake = self.cores[c].reason().0;
            return Err(format!("core {c} asks to be woken at {wake} ns, with nothing to do"));
        }
        let stats = self.server.as_ref().map(|server| server.stats()).unwrap_or_default();
        if stats.in_flight > 0 {
            return Err(format!("{} requests are in a server at rest", stats.in_flight));
        }
        for export in self.list.all() {
            let served = export.served();
            let (requests, name) = (served.ops.iter().map(|op| op.requests).sum::<u64>(), export.name());
            if served.in_flight > 0 || requests > stats.requests {
                return Err(format!(
                    "{} requests are at the device of {name} at rest, and {requests} were answered of {}",
                    served.in_flight, stats.requests
                ));
            }
        }
        let live = udm_buf::slab_count::thread_live_slab_bytes() - self.base;
        let may = (connections as i64 + self.count as i64) * KEPT;
        if live > may {
            return Err(format!(
                "a server at rest has {live} bytes for {connections} clients, and may have {may}"
            ));
        }
        Ok(())
    }

    /// Reads every byte of every device through a client.
    fn read_back(&mut self) -> Result<(), Violation> {
        for device in 0..self.devices.len() {
            let of_device =
                |client: &SimNbdClient| matches!(&client.state, ClientState::Served(a) if a.device == device);
            let reader = match self.clients.iter().position(of_device) {
                Some(i) => i,
                None => self.reader(device)?,
            };
            self.clients[reader].check = Some(0);
            self.step_until("the end of a read of all", |world| world.clients[reader].is_through())?;
        }
        Ok(())
    }

    fn reader(&mut self, device: usize) -> Result<usize, Violation> {
        let export = self.exports.iter().position(|(of, _)| *of == device).unwrap_or(0);
        let reader = self.connect_to(export, true).ok_or("the server takes no client at a rest")?;
        self.step_until("a client that is served", |world| world.clients[reader].is_served())?;
        Ok(reader)
    }

    /// Disconnects all clients in random ways, and checks that nothing of them is left.
    fn disconnect_all_clients(&mut self) -> Result<(), Violation> {
        self.resting = true;
        for client in &mut self.clients {
            let (link, quietly) = (client.link, self.control.one_in(2));
            match self.control.below(3) {
                0 => self.net.borrow_mut().end_up(link),
                _ => self.net.borrow_mut().leave(link, quietly, false),
            }
            client.state = ClientState::Over;
        }
        self.step_until("the end of the last connection", NbdServerWorld::is_drained)?;
        self.clients.clear();
        self.check_idle()?;
        let stats = self.server.as_ref().map(|server| server.stats()).unwrap_or_default();
        if (stats.connections, stats.orphans, stats.handshakes) != (0, 0, 0) {
            return Err(format!("all clients are gone, and the server has {stats:?}"));
        }
        if let Some(export) = self.list.all().iter().find(|export| export.users() > 0) {
            return Err(format!("all clients are gone, and {} use {}", export.users(), export.name()));
        }
        self.check_lanes()?;
        self.check_ring()
    }

    fn check_lanes(&self) -> Result<(), Violation> {
        let env = lock_environment(&self.env);
        match env.paths.iter().position(|path| path.lanes > 0) {
            Some(p) => Err(format!("no client is left, but {} lanes of p{p} are open", env.paths[p].lanes)),
            None => Ok(()),
        }
    }

    fn check_ring(&self) -> Result<(), Violation> {
        match count_ring_operations(&self.cores) {
            0 => Ok(()),
            n => Err(format!("no client is left, but {n} operations are in progress in the rings")),
        }
    }

    /// Cuts the power. Cached data and writes in flight may be lost wholly or partly. All devices
    /// and the server are created again over the same disks.
    fn power_cut(&mut self) -> Result<(), Violation> {
        self.counts.crashes += 1;
        self.say("the power fails");
        {
            let mut env = lock_environment(&self.env);
            (env.crashes, env.dead) = (env.crashes + 1, true);
            let crate::environment::Env { disks, chance, .. } = &mut *env;
            disks.iter_mut().for_each(|disk| disk.crash(chance));
        }
        self.dead = true;
        for client in &mut self.clients {
            client.asked.clear();
            client.out.clear();
            client.state = ClientState::Over;
            self.net.borrow_mut().leave(client.link, false, true);
        }
        self.model.crash(self.step);
        self.restores.clear();
        (0..self.paths.len()).for_each(|p| self.restore(p));
        self.end_server()?;
        let mut env = lock_environment(&self.env);
        env.disks.iter_mut().for_each(SimDisk::start);
        env.dead = false;
        drop(env);
        self.dead = false;
        self.say("the power is back");
        self.boot()?;
        let calm = std::mem::replace(&mut lock_environment(&self.env).calm, true);
        self.net.borrow_mut().calm = true;
        self.resting = true;
        self.read_back()?;
        self.resting = false;
        lock_environment(&self.env).calm = calm;
        self.net.borrow_mut().calm = calm;
        Ok(())
    }

    /// Shuts the server down in order: requests in flight are answered, the cores end, and no
    /// resource is left.
    pub(super) fn end_server(&mut self) -> Result<(), Violation> {
        self.counts.ends += 1;
        self.say("the server ends");
        let moves = self.server.as_ref().map_or(0, |server| server.stats().moves);
        self.counts.moves += moves;
        (self.ending, self.resting) = (true, true);
        self.restores.clear();
        (0..self.paths.len()).for_each(|p| self.restore(p));
        let now = lock_environment(&self.env).now;
        self.clients.iter_mut().for_each(|client| client.next = client.next.min(now));
        self.set_turn(None);
        self.core_set.end();
        // Requests that a suspended device holds fail, and changes in progress complete.
        self.step_until("the end of changes", |world| world.changing() == 0)?;
        self.core_set.stop(Nanos(20_000_000_000));
        self.step_until("the end of the cores", |world| world.cores.iter().all(|core| core.over))?;
        // The clients read the rest without short reads, which could take forever.
        let calm = std::mem::replace(&mut self.net.borrow_mut().calm, true);
        self.step_until("the end of the clients", |world| world.alive() == 0)?;
        self.net.borrow_mut().calm = calm;
        self.clients.clear();
        self.resumes.clear();
        self.counts.called_off += self.cores.iter().map(|core| core.outside.borrow().called_off).sum::<u64>();
        self.check_ring()?;
        self.cores.clear();
        self.server = None;
        self.list = std::sync::Arc::default();
        for device in &mut self.devices {
            (device.mapped, device.suspended) = (None, false);
        }
        self.check_lanes()?;
        self.model.forget_lost_requests(self.step);
        let live = udm_buf::slab_count::thread_live_slab_bytes() - self.base;
        if live != 0 {
            return Err(format!("the server has ended, but {live} bytes of its memory are still allocated"));
        }
        (self.ending, self.resting) = (false, false);
        Ok(())
    }
}
