//! What the control side does by chance: trouble for paths, messages, suspends, tables, crashes; and what it does at set times.

use crate::env::{Mode, lock};
use crate::model::Wrong;
use crate::plan::Class;
use crate::tables::Below;
use crate::timers::Timer;
use crate::world::World;
use udm_core::{Busy, Nanos};

impl World {
    /// One act, drawn.
    ///
    /// # Errors
    /// What went wrong with it.
    pub fn act(&mut self) -> Result<(), Wrong> {
        let i = self.control.below(self.devices.len() as u64) as usize;
        let dice = self.control.below(200);
        let on = |class: Class| !self.plan.without.has(class);
        match dice {
            0..50 if on(Class::Messages) => self.send_message(i),
            50..90 if on(Class::Paths) => {
                self.trouble();
                Ok(())
            }
            90..120 if on(Class::Suspend) && self.devices[i].is_live() => {
                let noflush = self.control.one_in(2);
                self.suspend(i, noflush)
            }
            120..150 if on(Class::Reload) && self.devices[i].is_live() => {
                self.reload(i)?;
                self.resume(i)
            }
            155..160 | 182..195 if on(Class::Cancel) && self.devices[i].is_changing() => {
                self.cancel(i);
                Ok(())
            }
            150..155 if on(Class::Reload) && !self.devices[i].is_changing() => self.reload(i),
            160..180 if on(Class::Reopen) => self.reopen(),
            180..182 if on(Class::Crash) => self.crash(),
            _ => {
                self.move_hot_spot(i);
                Ok(())
            }
        }
    }

    /// Loads another table: of the same meaning, or of any where nothing stands above.
    fn reload(&mut self, i: usize) -> Result<(), Wrong> {
        let free = self.blueprint.devices[i].top
            && self.devices[i].spec.multipath().is_none()
            && !self.blueprint.blocks.iter().any(|(b, _)| *b == Below::Device(i));
        let logs = self.blueprint.logger == Some(i);
        let spec = match free && self.control.one_in(2) {
            true => self.blueprint.compose(&mut self.control, logs),
            false => self.blueprint.vary(&self.devices[i].spec, &mut self.control, logs),
        };
        self.load(i, spec)
    }

    fn send_message(&mut self, i: usize) -> Result<(), Wrong> {
        if self.blueprint.logger == Some(i) && self.log.is_kept() {
            return self.mark(i);
        }
        let Some(access) = self.devices[i].access else { return Ok(()) };
        let (paths, groups) = {
            let env = lock(&self.env);
            let groups = self.devices[i].spec.multipath().map_or(1, |(_, _, g)| g.len());
            (env.accesses[access].paths.clone(), groups as u64)
        };
        let path = self.control.pick(&paths);
        let group = self.control.between(1, groups);
        let queue = match self.control.below(20) {
            0..4 => {
                if self.message(i, &format!("fail_path p{path}"))? {
                    lock(&self.env).fail(path);
                }
                return Ok(());
            }
            4..8 => return self.reinstate(i, path),
            8..11 => return self.message(i, &format!("switch_group {group}")).map(drop),
            11..14 => return self.message(i, &format!("disable_group {group}")).map(drop),
            14..17 => return self.message(i, &format!("enable_group {group}")).map(drop),
            17 => false,
            _ => true,
        };
        if self.message(i, if queue { "queue_if_no_path" } else { "fail_if_no_path" })? {
            let mut env = lock(&self.env);
            env.accesses[access].queue = queue;
            let disk = env.accesses[access].disk;
            env.recheck(disk);
        }
        Ok(())
    }

    fn reinstate(&mut self, i: usize, path: usize) -> Result<(), Wrong> {
        if self.message(i, &format!("reinstate_path p{path}"))? {
            lock(&self.env).reinstate(path);
        }
        Ok(())
    }

    /// A path gets into trouble, and out of it again some time later.
    fn trouble(&mut self) {
        let p = self.control.below(self.paths.len() as u64) as usize;
        // A log that failed is not written any more: it fails now and then.
        if self.blueprint.log == Some(p) && !self.control.one_in(8) {
            return;
        }
        let mode = match self.control.below(6) {
            0..2 => Mode::Down,
            2 => Mode::Slow(self.control.between(2, 100)),
            3 => Mode::Silent,
            4 => Mode::Flapping,
            _ => Mode::Up,
        };
        let mean = self.control.between(1, 1000) * 1_000_000;
        let last = self.control.span(mean);
        // Now and then the disk itself is out of reach: all ways to it go, and come back one by one.
        let all = self.control.one_in(3);
        let mut env = lock(&self.env);
        for other in 0..env.paths.len() {
            if other == p || (all && env.paths[other].disk == env.paths[p].disk) {
                env.say(format!("p{other} is {mode:?}"));
                env.paths[other].mode = mode;
                self.totals.losses += u64::from(mode != Mode::Up);
                let last = if other == p { last } else { last + self.control.below(last + 1) };
                self.timers.set(env.now + Nanos(last), Timer::Restore(other));
            }
        }
    }

    /// Closes an idle lane and opens another.
    fn reopen(&mut self) -> Result<(), Wrong> {
        let c = self.control.below(self.cores.len() as u64) as usize;
        let at = self.control.below(self.cores[c].open.len() as u64) as usize;
        if self.cores[c].open[at].in_flight > 0 || self.cores[c].open[at].lane.busy() == Busy::Owed {
            return Ok(());
        }
        let closed = self.cores[c].open.swap_remove(at);
        lock(&self.env).say(format!("core {c} closes and opens d{}", closed.device));
        let device = closed.device;
        drop(closed);
        self.open(c, device)
    }

    /// Does what is due.
    pub fn run_timers(&mut self) -> Result<(), Wrong> {
        let now = lock(&self.env).now;
        while let Some(timer) = self.timers.take(now) {
            match timer {
                Timer::Check => {
                    self.check_paths()?;
                    let wait = self.control.between(50, 500) * 1_000_000;
                    self.timers.set(now + Nanos(wait), Timer::Check);
                }
                Timer::Restore(p) => {
                    let mut env = lock(&self.env);
                    env.paths[p].mode = Mode::Up;
                    env.say(format!("p{p} is Up"));
                }
                Timer::Resume(i) => {
                    if !self.plan.without.has(Class::Reload) && self.control.one_in(2) {
                        self.reload(i)?;
                    }
                    self.resume(i)?;
                }
            }
        }
        Ok(())
    }

    /// What a checker does: failed paths that work are reinstated.
    fn check_paths(&mut self) -> Result<(), Wrong> {
        for i in 0..self.devices.len() {
            let Some(access) = self.devices[i].access else { continue };
            if !self.devices[i].is_live() {
                continue;
            }
            let failed: Vec<usize> = {
                let env = lock(&self.env);
                let works = |p: &usize| env.paths[*p].failed && env.paths[*p].mode != Mode::Down;
                env.accesses[access].paths.iter().copied().filter(works).collect()
            };
            for path in failed {
                self.reinstate(i, path)?;
            }
        }
        Ok(())
    }
}
