//! Actions of the control side: random ones (path trouble, messages, suspends, tables, crashes),
//! and timed ones.

use crate::dust_model::DustLine;
use crate::environment::{PathMode, lock_environment};
use crate::machine::OpenLane;
use crate::model::Violation;
use crate::plan::DisturbanceClass;
use crate::tables::TableLineTarget;
use crate::timers::TimedEvent;
use crate::world::MappedDeviceStackWorld;
use udm_core::{Nanos, OwnWork};

/// Delay of a timed resume that is due while a table is loaded.
const RESUME_PAUSE: Nanos = Nanos::from_millis(100);

impl MappedDeviceStackWorld {
    /// Performs one random action.
    ///
    /// # Errors
    /// The violation that the action found.
    pub fn act(&mut self) -> Result<(), Violation> {
        if self.change_throttle() {
            return Ok(());
        }
        let i = self.machine.control.below(self.devices.len() as u64) as usize;
        let dice = match self.favourite.filter(|_| self.machine.control.one_in(3)) {
            Some(favourite) => favourite,
            None => self.machine.control.below(200),
        };
        let on = |class: DisturbanceClass| !self.machine.plan.without.has(class);
        match dice {
            0..50 if on(DisturbanceClass::Messages) => self.send_message(i),
            50..90 if on(DisturbanceClass::Paths) => {
                self.trouble();
                Ok(())
            }
            90..120 if on(DisturbanceClass::Suspend) && self.devices[i].is_live() => {
                let noflush = self.machine.control.one_in(2);
                let mut several = vec![i];
                if self.machine.control.one_in(3) {
                    let live = (0..self.devices.len()).filter(|&j| j != i && self.devices[j].is_live());
                    let others: Vec<usize> = live.filter(|_| self.machine.control.one_in(2)).collect();
                    self.join(&mut several, others);
                }
                self.suspend(&several, noflush)
            }
            120..150 if on(DisturbanceClass::Reload) && self.devices[i].is_live() => {
                self.reload(i)?;
                self.resume_some(i)
            }
            155..160 | 182..195 if on(DisturbanceClass::Cancel) && self.devices[i].is_changing() => {
                self.cancel(i);
                Ok(())
            }
            195..200 if on(DisturbanceClass::Reload) && self.devices[i].is_live() => self.grow(i),
            150..155 if on(DisturbanceClass::Reload) && !self.devices[i].is_changing() => self.reload(i),
            160..172 if on(DisturbanceClass::Reopen) => self.reopen(),
            176..180 if on(DisturbanceClass::Queues) && !self.machine.queues.is_empty() => {
                self.machine.change_queue(self.watch.eject_slow);
                Ok(())
            }
            172..180 if on(DisturbanceClass::Limits) => {
                self.change_limits();
                Ok(())
            }
            180..182 if on(DisturbanceClass::Crash) => self.crash(),
            _ => {
                self.move_hot_spot(i);
                Ok(())
            }
        }
    }

    /// Inserts `others` before or after the device in `several`.
    fn join(&mut self, several: &mut Vec<usize>, others: Vec<usize>) {
        let at = if self.machine.control.one_in(2) { 0 } else { 1 };
        several.splice(at..at, others);
    }

    /// Resumes device `i`, sometimes together with other devices. Some of these get new tables too.
    fn resume_some(&mut self, i: usize) -> Result<(), Violation> {
        let mut several = vec![i];
        if !self.machine.plan.without.has(DisturbanceClass::Reload) && self.machine.control.one_in(3) {
            let free = (0..self.devices.len()).filter(|&j| j != i && !self.devices[j].is_changing());
            let others: Vec<usize> = free.filter(|_| self.machine.control.one_in(2)).collect();
            for &j in &others {
                if self.machine.control.one_in(2) {
                    self.reload(j)?;
                }
            }
            self.join(&mut several, others);
        }
        self.resume(&several)
    }

    /// Loads another table. If a device lies above, the table maps the same data; otherwise it may
    /// differ.
    fn reload(&mut self, i: usize) -> Result<(), Violation> {
        let free = self.blueprint.is_free(i) && self.devices[i].spec.multipath().is_none();
        let logs = self.blueprint.logger == Some(i);
        // A target that loses data may be only in a top device, where the model knows the data.
        let without = if free {
            self.machine.plan.without
        } else {
            self.machine.plan.without.and(DisturbanceClass::Lossy)
        };
        let mut spec = match free && self.machine.control.one_in(2) {
            true => self.blueprint.compose(&mut self.machine.control, logs, without),
            false => self.blueprint.vary(&self.devices[i].spec, &mut self.machine.control, logs, without),
        };
        // A path device must not fail the same request forever, because its users would retry
        // forever.
        if self.blueprint.via.iter().any(|(_, d)| *d == i)
            && (spec.is_flaky() || !DustLine::of(&spec, false).is_empty())
        {
            spec = self.devices[i].spec.clone();
        }
        // Sometimes one open of a lane of the new table fails.
        if !self.machine.plan.without.has(DisturbanceClass::Opens) && self.machine.control.one_in(6) {
            let nth = self
                .machine
                .control
                .below(2 * self.machine.cores.len() as u64 * (1 + spec.paths().len() as u64));
            lock_environment(&self.machine.env).open_fails = Some(nth);
        }
        self.load(i, spec)
    }

    /// Extends a multipath device to the current size of its disk.
    fn grow(&mut self, i: usize) -> Result<(), Violation> {
        let mut spec = self.devices[i].spec.clone();
        let Some((len, TableLineTarget::Multipath { disk, via, .. })) = spec.lines.first_mut() else {
            return Ok(());
        };
        let size = lock_environment(&self.machine.env).disks[*disk].size;
        if size <= *len || !via.is_empty() {
            return Ok(());
        }
        *len = size;
        self.machine.totals.grown += 1;
        self.load(i, spec)?;
        self.resume(&[i])
    }

    fn send_message(&mut self, i: usize) -> Result<(), Violation> {
        if self.blueprint.logger == Some(i) && self.log.is_kept() && self.machine.control.one_in(2) {
            return self.mark(i);
        }
        if !self.machine.plan.without.has(DisturbanceClass::Dust) && !self.devices[i].dust.is_empty() {
            return self.dust(i);
        }
        let Some(access) = self.devices[i].access else { return Ok(()) };
        let (paths, groups) = {
            let env = lock_environment(&self.machine.env);
            let groups = self.devices[i].spec.multipath().map_or(1, |(_, _, g)| g.len());
            (env.accesses[access].paths.clone(), groups as u64)
        };
        let path = self.machine.control.pick(&paths);
        let group = self.machine.control.between(1, groups);
        let queue = match self.machine.control.below(20) {
            0..4 => {
                let word = self.devices[i].spec.path_word(path);
                if self.message(i, &format!("fail_path {word}"))? {
                    let fails = lock_environment(&self.machine.env).fail(path);
                    self.raised(i, fails);
                }
                return Ok(());
            }
            4..8 => return self.reinstate(i, path),
            8..17 => {
                let verb =
                    ["switch_group", "disable_group", "enable_group"][self.machine.control.below(3) as usize];
                let raises = self.message(i, &format!("{verb} {group}"))?;
                self.raised(i, raises);
                return Ok(());
            }
            17 => false,
            _ => true,
        };
        if self.message(i, if queue { "queue_if_no_path" } else { "fail_if_no_path" })? {
            let mut env = lock_environment(&self.machine.env);
            env.accesses[access].queue = queue;
            let disk = env.accesses[access].disk;
            env.recheck(disk);
        }
        Ok(())
    }

    fn reinstate(&mut self, i: usize, path: usize) -> Result<(), Violation> {
        let word = self.devices[i].spec.path_word(path);
        if self.message(i, &format!("reinstate_path {word}"))? {
            let returns = lock_environment(&self.machine.env).reinstate(path);
            self.raised(i, returns);
        }
        Ok(())
    }

    /// Counts a message that raised the event counter of device `i` if `really`.
    fn raised(&mut self, i: usize, really: bool) {
        let device = &mut self.devices[i];
        match device.is_loose() {
            true => device.events.1 += 1,
            false => device.events.0 += u64::from(really),
        }
    }

    /// Puts a random path into a fault mode, and schedules its recovery.
    fn trouble(&mut self) {
        let p = self.machine.control.below(self.machine.paths.len() as u64) as usize;
        // A log that failed is never written again, so its path fails rarely.
        if self.blueprint.log == Some(p) && !self.machine.control.one_in(8) {
            return;
        }
        let mode = match self.machine.control.below(6) {
            0..2 => PathMode::Down,
            2 => PathMode::Slow(self.machine.control.between(2, 100)),
            3 => PathMode::Silent,
            4 => PathMode::Flapping,
            _ if !self.machine.plan.without.has(DisturbanceClass::Hang) => PathMode::Hung,
            _ => PathMode::Up,
        };
        let mean = self.machine.control.between(1, 1000) * 1_000_000;
        let last = self.machine.control.span(mean);
        // Sometimes the whole disk is unreachable: all its paths fail, and return one by one.
        let all = self.machine.control.one_in(3);
        for other in 0..self.machine.paths.len() {
            let mut env = lock_environment(&self.machine.env);
            if other == p || (all && env.paths[other].disk == env.paths[p].disk) {
                let hung = env.paths[other].mode == PathMode::Hung;
                env.say(format!("p{other} is {mode:?}"));
                env.paths[other].mode = mode;
                self.machine.totals.losses += u64::from(mode != PathMode::Up);
                let last = if other == p { last } else { last + self.machine.control.below(last + 1) };
                self.machine.timers.set(env.now + Nanos(last), TimedEvent::Restore(other));
                drop(env);
                if hung && mode != PathMode::Hung {
                    self.machine.release(other);
                }
            }
        }
    }

    /// Closes an idle lane and opens a new one.
    fn reopen(&mut self) -> Result<(), Violation> {
        let c = self.machine.control.below(self.machine.cores.len() as u64) as usize;
        let mut at = self.machine.control.below(self.machine.cores[c].open.len() as u64) as usize;
        let changing = |o: &OpenLane| self.devices[o.device].is_changing();
        if let Some(busy) =
            self.machine.cores[c].open.iter().position(changing).filter(|_| self.machine.control.one_in(2))
        {
            // A lane of a changing device is preferred, because most errors occur during changes.
            at = busy;
        }
        if self.machine.cores[c].open[at].in_flight > 0
            || self.machine.cores[c].open[at].lane.own_work() == OwnWork::Required
        {
            return Ok(());
        }
        let closed = self.machine.cores[c].open.swap_remove(at);
        lock_environment(&self.machine.env).say(format!("core {c} closes and opens d{}", closed.device));
        let device = closed.device;
        drop(closed);
        self.open(c, device)
    }

    /// Performs the timed actions that are due.
    pub fn run_timers(&mut self) -> Result<(), Violation> {
        let now = lock_environment(&self.machine.env).now;
        while let Some(timer) = self.machine.timers.take(now) {
            match timer {
                TimedEvent::Restore(p) => {
                    let mut env = lock_environment(&self.machine.env);
                    let hung = env.paths[p].mode == PathMode::Hung;
                    env.paths[p].mode = PathMode::Up;
                    env.say(format!("p{p} is Up"));
                    drop(env);
                    if hung {
                        self.machine.release(p);
                    }
                }
                TimedEvent::Writable(d) => {
                    let mut env = lock_environment(&self.machine.env);
                    env.disks[d].set_read_only(false);
                    env.say(format!("disk {d} can be written"));
                }
                // Only one control operation runs at a time.
                TimedEvent::Resume(i) if self.acting => {
                    self.machine.timers.set(now + RESUME_PAUSE, TimedEvent::Resume(i));
                }
                // Another resume may have included this device.
                TimedEvent::Resume(i) if !self.devices[i].is_suspended() || self.devices[i].is_changing() => {
                }
                TimedEvent::Resume(i) => {
                    if !self.machine.plan.without.has(DisturbanceClass::Reload)
                        && self.machine.control.one_in(2)
                    {
                        self.reload(i)?;
                    }
                    self.resume_some(i)?;
                }
            }
        }
        Ok(())
    }
    /// Returns the failed paths of device `i`: from the model, or from the target's report if the
    /// model does not know them.
    pub(crate) fn failed_paths(&self, i: usize, access: usize) -> Vec<usize> {
        let env = lock_environment(&self.machine.env);
        let access = &env.accesses[access];
        if !access.has_unknown_paths {
            return access.paths.iter().copied().filter(|p| env.paths[*p].failed).collect();
        }
        let reports = self.devices[i].mapped().live().map(|t| t.path_reports());
        let failed: Vec<String> =
            reports.into_iter().flatten().filter(|r| r.failed).map(|r| r.name).collect();
        let spec = &self.devices[i].spec;
        access.paths.iter().copied().filter(|p| failed.contains(&spec.path_word(*p))).collect()
    }
}
