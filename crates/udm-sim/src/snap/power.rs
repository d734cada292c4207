//! Rests, power cuts, and what comes back after them.

use super::control::numbers;
use super::world::World;
use crate::disk::Disk;
use crate::env::lock;
use crate::model::Wrong;
use udm_core::{Busy, Nanos};

/// The most steps until all is quiet.
const STEPS_MAX: u64 = 1_000_000;

impl World {
    /// Takes all the steps of the plan, and comes to rest.
    pub(super) fn run(&mut self) -> Result<(), Wrong> {
        while self.step < self.plan.steps {
            if self.dead {
                self.power_on()?;
            } else if self.control.one_in(60) {
                self.act()?;
            } else {
                self.one_step()?;
            }
            if self.step >= self.rest_at && !self.dead {
                self.rest()?;
                self.rest_at = self.step + 200 + self.control.span(2000);
            }
        }
        if self.dead {
            self.power_on()?;
        }
        self.rest()?;
        self.quiet()?;
        self.take_apart()
    }

    /// Makes the cores and the devices, as after power-on: those that were there.
    pub(super) fn boot(&mut self) -> Result<(), Wrong> {
        self.make_cores();
        lock(&self.env).calm = true;
        self.resting = true;
        for side in 0..self.sides.len() {
            let is_origin = self.sides[side].origin == side;
            let merging = self.sides[side].merging;
            let persistent = self.sides[side].words.contains(" P");
            let stays = is_origin || self.sides[side].live && persistent;
            if !stays {
                self.sides[side].live = false;
                continue;
            }
            self.device(side)?;
            let kind = match (is_origin, merging) {
                (true, None) => {
                    self.sides[side].words = format!("p{side}");
                    "snapshot-origin"
                }
                (true, Some(_)) => "snapshot-merge",
                (false, _) => "snapshot",
            };
            if !self.load(side, kind, None)? {
                return Err(format!("s{side} can't be loaded, and nothing fails"));
            }
        }
        // The instant goes on: writes of an origin are copied from the first on.
        let there: Vec<usize> =
            (0..self.sides.len()).rev().filter(|&side| self.sides[side].mapped.is_some()).collect();
        for side in there.iter().copied() {
            self.must_resume(&[side])?;
        }
        for side in there {
            self.open(side)?;
        }
        for side in self.origins()..self.sides.len() {
            let valid = self.sides[side].live && self.status(side) != "Invalid";
            self.counts.survived += u64::from(valid && self.counts.cuts > 0);
        }
        self.read_back()?;
        self.look_at_status()?;
        self.resting = false;
        lock(&self.env).calm = false;
        Ok(())
    }

    /// Nothing fails any more and nothing new is asked for: everything must end. Then all is read
    /// back.
    fn rest(&mut self) -> Result<(), Wrong> {
        self.say("a rest");
        self.counts.rests += 1;
        self.quiet()?;
        self.look_at_status()?;
        self.read_back()?;
        self.resting = false;
        lock(&self.env).calm = false;
        Ok(())
    }

    /// Ends all trouble, and goes on until nothing is in flight.
    fn quiet(&mut self) -> Result<(), Wrong> {
        lock(&self.env).calm = true;
        self.resting = true;
        self.restores.clear();
        (0..self.paths.len()).for_each(|p| self.restore(p));
        self.go_on_until(|world| {
            let owes = |o: &crate::world::Open| o.lane.busy() == Busy::Owed;
            world.model.in_flight(None) == 0 && !world.cores.iter().flat_map(|c| &c.open).any(owes)
        })
    }

    fn go_on_until(&mut self, done: impl Fn(&World) -> bool) -> Result<(), Wrong> {
        let from = self.step;
        while !done(self) {
            if self.step - from > STEPS_MAX {
                return Err(format!("the world does not come to rest, and {} waits", self.waiting()));
            }
            self.one_step()?;
        }
        Ok(())
    }

    /// Reads every sector of every side.
    fn read_back(&mut self) -> Result<(), Wrong> {
        for side in &mut self.sides {
            side.check = if side.open { 0 } else { u64::MAX };
        }
        self.go_on_until(|world| {
            world.sides.iter().all(|side| side.check >= side.sectors) && world.model.in_flight(None) == 0
        })
    }

    /// What the devices say of themselves.
    fn look_at_status(&mut self) -> Result<(), Wrong> {
        for side in 0..self.sides.len() {
            if self.sides[side].mapped.is_none() || self.sides[side].origin == side {
                continue;
            }
            let status = self.status(side);
            let cause = self.sides[side].small || self.is_faulty(side);
            match &*status {
                "Invalid" if !cause => return Err(format!("s{side} is invalid without a reason")),
                "Invalid" => {
                    self.counts.invalid += u64::from(self.sides[side].invalid.is_none());
                    self.sides[side].invalid.get_or_insert(2 * self.step);
                }
                _ if self.sides[side].invalid.is_some() => {
                    return Err(format!("s{side} was invalid, and is {status}"));
                }
                "Overflow" if !self.sides[side].small || !self.sides[side].words.contains("PO") => {
                    return Err(format!("s{side} overflows without a reason"));
                }
                "Overflow" => self.counts.overflowed += 1,
                numbered => {
                    let size = lock(&self.env).disks[side].size;
                    let sane =
                        |(used, total, metadata)| metadata <= used && total == size && used <= total + 16;
                    if !numbers(numbered).is_some_and(sane) {
                        return Err(format!("s{side} says {numbered}, and its store has {size}"));
                    }
                }
            }
        }
        Ok(())
    }

    /// The power is cut: caches are lost, what is in flight is there, or not, or in part.
    pub(super) fn power_off(&mut self) {
        self.counts.cuts += 1;
        self.say("the power fails");
        {
            let mut env = lock(&self.env);
            (env.crashes, env.dead) = (env.crashes + 1, true);
            let crate::env::Env { disks, chance, .. } = &mut *env;
            disks.iter_mut().for_each(|disk| disk.crash(chance));
        }
        self.model.cells.crash(2 * self.step + 1);
        self.dead = true;
        self.restores.clear();
        (0..self.paths.len()).for_each(|p| self.restore(p));
        // Where its store could not be told, a snapshot that was invalid may pass for valid.
        for side in self.origins()..self.sides.len() {
            if self.status(side) == "Invalid" && self.is_faulty(side) {
                self.sides[side].live = false;
            }
        }
    }

    /// What is in memory is taken apart in good order, and all begins anew over the same disks.
    fn power_on(&mut self) -> Result<(), Wrong> {
        self.quiet()?;
        self.take_apart()?;
        let mut env = lock(&self.env);
        env.disks.iter_mut().for_each(Disk::start);
        env.dead = false;
        drop(env);
        self.dead = false;
        self.say("the power is back");
        self.boot()
    }

    /// Closes all lanes and drops all devices; nothing of them is left.
    fn take_apart(&mut self) -> Result<(), Wrong> {
        for core in 0..self.cores.len() {
            self.set_turn(Some(core));
            self.cores[core].open.clear();
        }
        self.set_turn(None);
        for side in (0..self.sides.len()).rev() {
            let gone = self.sides[side].mapped.take();
            (self.sides[side].open, self.sides[side].coming) = (false, None);
            (self.sides[side].check, self.sides[side].invalid) = (u64::MAX, None);
            drop(gone);
        }
        // A task may be on its way to its core, and so may be the word that it is to stop.
        let none = |world: &World| {
            let mut cores = world.cores.iter().enumerate();
            cores.all(|(c, core)| core.tasks.is_empty() && world.post.next(c) == Nanos::NEVER)
        };
        self.go_on_until(none)?;
        self.cores.clear();
        let env = lock(&self.env);
        match env.paths.iter().position(|path| path.lanes > 0) {
            Some(p) => {
                Err(format!("all devices are gone, and {} lanes of p{p} are open", env.paths[p].lanes))
            }
            None => Ok(()),
        }
    }
}
