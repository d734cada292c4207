//! Bringing the world to rest, looking at it while it is, and switching it off.

use crate::env::{Mode, lock};
use crate::model::Wrong;
use crate::plan::Class;
use crate::tables::{Selector, TableSpec};
use crate::world::World;
use udm_core::{Busy, Nanos};

/// How long the world may take to come to rest, in simulated time and in steps. The longest that anything waits for is a silent path with
/// its patience, a few times over.
const REST_MAX: Nanos = Nanos::from_millis(300_000);
const REST_STEPS_MAX: u64 = 2_000_000;

impl World {
    /// Lets everything finish and looks at what is left; sometimes removes all devices and makes them again.
    ///
    /// # Errors
    /// What is wrong: a request that waits for ever, a counter that is off, a device that can't be removed.
    pub fn rest(&mut self) -> Result<(), Wrong> {
        lock(&self.env).say("all come to rest");
        self.settle()?;
        self.inspect()?;
        self.look_at_log()?;
        self.totals.rests += 1;
        if !self.plan.without.has(Class::Remove) && self.plan.bench.is_none() && self.control.one_in(3) {
            lock(&self.env).say("all devices are removed and made again");
            self.restart()?;
        }
        self.resting = false;
        lock(&self.env).calm = false;
        Ok(())
    }

    /// Takes steps without new requests or new trouble until nothing is left to do.
    fn settle(&mut self) -> Result<(), Wrong> {
        self.resting = true;
        let (from, first) = {
            let mut env = lock(&self.env);
            env.calm = true;
            env.paths.iter_mut().for_each(|p| p.mode = Mode::Up);
            (env.now, self.step)
        };
        while !self.is_at_rest() {
            self.step()?;
            let now = lock(&self.env).now;
            if now.since(from) > REST_MAX || self.step - first > REST_STEPS_MAX {
                return Err(format!("{} waits although all paths work", self.waiting()));
            }
        }
        Ok(())
    }

    fn is_at_rest(&self) -> bool {
        self.model.in_flight() == 0
            && self.devices.iter().all(|d| d.is_live() && !d.is_changing())
            && (0..self.cores.len()).all(|c| self.post.next(c) == Nanos::NEVER)
            && self.cores.iter().flat_map(|c| &c.open).all(|o| o.lane.busy() < Busy::Owed)
            && self.log.waiting.is_empty()
            && self.no_path_failed()
    }

    fn no_path_failed(&self) -> bool {
        let env = lock(&self.env);
        env.accesses.iter().filter(|a| a.live).all(|a| a.paths.iter().all(|p| !env.paths[*p].failed))
    }

    /// Nothing is to come that could move anything.
    pub fn is_stuck(&self) -> bool {
        self.resting
            && self.timers.only_checks()
            && self.no_path_failed()
            && !self.devices.iter().any(|d| d.is_woken())
            && !self.is_at_rest()
    }

    /// Compares what the devices say of themselves with what happened to them.
    fn inspect(&mut self) -> Result<(), Wrong> {
        let env = lock(&self.env);
        for (p, path) in env.paths.iter().enumerate() {
            if path.in_flight > 0 {
                return Err(format!("at rest, and p{p} has {} requests", path.in_flight));
            }
        }
        for (i, device) in self.devices.iter().enumerate() {
            let Some((_, _, groups)) = device.spec.multipath() else { continue };
            let status = device.mapped().status_text();
            let words: Vec<&str> = status.split_whitespace().collect();
            for (selector, p) in groups.iter().flat_map(|(s, paths)| paths.iter().map(move |p| (*s, *p))) {
                let wrong = |what: &str| {
                    Err(format!("at rest, {what} of p{p} is wrong in the status of d{i}: {status}"))
                };
                let name = format!("8:{p}");
                let Some(at) = words.iter().position(|w| *w == name) else { return wrong("the entry") };
                let word = |n: usize| words.get(at + n).copied().unwrap_or_default();
                if (word(1) == "F") != env.paths[p].failed {
                    return wrong("the state");
                }
                if word(2) != env.paths[p].fails.to_string() {
                    return wrong("the fail count");
                }
                let load = match selector {
                    Selector::QueueLength | Selector::ServiceTime => word(3),
                    Selector::Historical => word(4),
                    Selector::RoundRobin | Selector::Affinity => "0",
                };
                if load != "0" {
                    return wrong("the load");
                }
            }
        }
        Ok(())
    }

    /// The power fails, and comes back.
    ///
    /// # Errors
    /// When the devices can't be made again.
    pub fn crash(&mut self) -> Result<(), Wrong> {
        self.totals.crashes += 1;
        {
            let mut env = lock(&self.env);
            env.say("the power fails");
            env.crashes += 1;
            env.dead = true;
            let crate::env::Env { disks, chance, .. } = &mut *env;
            disks.iter_mut().for_each(|d| d.crash(chance));
        }
        self.model.crash(self.step);
        // What is in memory is of no more use. It is taken apart in good order all the same: bios can't be forgotten.
        let was_resting = self.resting;
        self.settle()?;
        self.look_at_log()?;
        self.restart()?;
        let mut env = lock(&self.env);
        env.dead = false;
        env.calm = was_resting;
        self.resting = was_resting;
        env.say("the power is back");
        Ok(())
    }

    /// Closes all lanes, removes all devices, and makes them again with the tables that they had.
    fn restart(&mut self) -> Result<(), Wrong> {
        self.cores.clear();
        self.log.clear();
        let specs: Vec<TableSpec> = self.devices.iter().map(|d| d.spec.clone()).collect();
        while let Some(device) = self.devices.pop() {
            let name = format!("d{}", self.devices.len());
            let others = std::sync::Arc::strong_count(device.mapped()) - 1;
            if others > 0 {
                return Err(format!("{name} is closed, and {others} still hold it"));
            }
        }
        self.timers.clear();
        let mut env = lock(&self.env);
        env.accesses.clear();
        env.disks.iter_mut().for_each(|d| (d.no_path, d.flaky) = (None, None));
        for p in &mut env.paths {
            (p.access, p.failed, p.barred) = (None, false, 0);
        }
        drop(env);
        self.start(&specs)
    }
}
