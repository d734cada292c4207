//! Quiescence of a world, its inspection while quiescent, power cuts and restarts.

use crate::control::PATHS;
use crate::device::MappedDeviceWithModel;
use crate::disk::SimDisk;
use crate::environment::{Env, PathCounters, PathMode, SimPathState, lock_environment};
use crate::model::Violation;
use crate::plan::DisturbanceClass;
use crate::tables::{PathSelector, TableSpec};
use crate::tasks::RunningTask;
use crate::turn::MachineWorld as _;
use crate::world::MappedDeviceStackWorld;
use udm_core::{Nanos, Op, OwnWork};
use udm_wire::multipath_conf::Failback;

/// Limits of the time until the world is quiescent, in simulated time and in steps. The longest
/// waits are those for the timeouts of silent paths.
const REST_MAX: Nanos = Nanos::from_millis(300_000);
const REST_STEPS_MAX: u64 = 2_000_000;
/// Time after which path checks are synchronised, and the delay that this adds.
const REST_LATE: Nanos = Nanos::from_millis(200_000);
const LATE: Nanos = Nanos::from_millis(1_000);

impl MappedDeviceStackWorld {
    /// Waits until all work completes, and inspects the result. Sometimes all devices are removed
    /// and created again.
    ///
    /// # Errors
    /// The violation: a request that waits forever, a wrong counter, or a device that cannot be
    /// removed.
    pub fn rest(&mut self) -> Result<(), Violation> {
        lock_environment(&self.machine.env).say("all come to rest");
        self.quiesce()?;
        self.machine.check_goes_idle()?;
        self.check_events()?;
        self.check_throttles_at_rest()?;
        self.inspect()?;
        self.look_at_log()?;
        self.machine.totals.rests += 1;
        if !self.machine.plan.without.has(DisturbanceClass::Remove)
            && self.machine.plan.bench.is_none()
            && (self.machine.control.one_in(3) || self.watch.eject_slow && self.slow.one_in(2))
        {
            lock_environment(&self.machine.env).say("all devices are removed and made again");
            self.restart()?;
            self.slow_path()?;
        }
        self.machine.resting = false;
        lock_environment(&self.machine.env).calm = false;
        Ok(())
    }

    /// Runs steps without new requests or faults until nothing is left to do.
    fn quiesce(&mut self) -> Result<(), Violation> {
        self.machine.resting = true;
        let dead = {
            let mut env = lock_environment(&self.machine.env);
            env.calm = true;
            env.open_fails = None;
            let stays = |p: &SimPathState| p.mode == PathMode::Hung && !env.dead;
            let hung: Vec<bool> = env.paths.iter().map(stays).collect();
            for (path, hung) in env.paths.iter_mut().zip(hung) {
                path.mode = if hung { PathMode::Hung } else { PathMode::Up };
            }
            env.dead
        };
        self.land(Some(Nanos::NEVER));
        if !dead
            && !self.hung_disks().contains(&true)
            && self.machine.plan.bench.is_none()
            // A lost request takes 5 s, so others may overtake it.
            && !self.machine.plan.faulty
            && !self.is_throttled()
            && self.machine.control.one_in(2)
        {
            self.check_no_starvation()?;
        }
        if !dead
            && !self.machine.plan.without.has(DisturbanceClass::Queues)
            && !self.machine.queues.is_empty()
        {
            self.late_changes = self.machine.control.below(4);
        }
        // Requests that do not need a disk that hangs must complete.
        let hung = self.hung_disks();
        if hung.contains(&true) && !dead {
            self.quiesce_except(&hung)?;
            self.machine.totals.hung_rests += 1;
        }
        for p in 0..self.machine.paths.len() {
            let was = std::mem::replace(&mut lock_environment(&self.machine.env).paths[p].mode, PathMode::Up);
            if was == PathMode::Hung || dead {
                self.machine.release(p);
            }
        }
        self.quiesce_except(&vec![false; hung.len()])
    }

    fn hung_disks(&self) -> Vec<bool> {
        let env = lock_environment(&self.machine.env);
        let hangs = |d: usize| env.paths.iter().any(|p| p.disk == d && p.mode == PathMode::Hung);
        let mut hung: Vec<bool> = (0..env.disks.len()).map(hangs).collect();
        // Disks that share tags with a disk that hangs may wait for its tags.
        if let Some((sharing, _)) = &env.shared {
            let disks = || sharing.iter().map(|path| env.paths[*path].disk);
            if disks().any(|disk| hung[disk]) {
                disks().for_each(|disk| hung[disk] = true);
            }
        }
        hung
    }

    /// Runs steps until only work that needs a `hung` disk is left. Suspends that wait for such a
    /// disk are cancelled.
    fn quiesce_except(&mut self, hung: &[bool]) -> Result<(), Violation> {
        let (mut from, mut first) = (lock_environment(&self.machine.env).now, self.machine.step);
        let mut late = false;
        self.hung = hung.to_vec();
        while !self.is_at_rest() {
            for i in 0..self.devices.len() {
                let waits = self.needs_hung(i)
                    && self.devices[i].running.as_ref().is_some_and(|r| !r.borrow().cancelled);
                if waits && !self.machine.plan.without.has(DisturbanceClass::Cancel) {
                    self.machine.set_turn(None);
                    self.cancel(i);
                }
            }
            // Queue settings change while the last requests complete, because then no other request
            // causes a poll.
            if self.late_changes > 0 && self.machine.control.one_in(8) {
                self.late_changes -= 1;
                self.machine.set_turn(None);
                self.machine.change_queue(self.watch.eject_slow);
            }
            self.step()?;
            let now = lock_environment(&self.machine.env).now;
            if now.since(from) > REST_LATE && !std::mem::replace(&mut late, true) {
                // Slow checks can take turns forever, so that one is always in progress. If their
                // core is late for all of them, they run together from then on.
                let tasks = self.machine.cores.iter_mut().flat_map(|core| &mut core.tasks);
                tasks.for_each(|task| task.postpone(now + LATE));
            }
            if now.since(from) > REST_MAX || self.machine.step - first > REST_STEPS_MAX {
                if self.cancel_deadlocked_change() {
                    (from, first) = (now, self.machine.step);
                    continue;
                }
                return Err(format!("{} waits although all that it needs works", self.waiting()));
            }
        }
        self.hung.clear();
        self.late_changes = 0;
        Ok(())
    }

    /// True if device `i` needs a disk that hangs.
    fn needs_hung(&self, i: usize) -> bool {
        let device = &self.devices[i];
        let loaded = device.loaded.as_ref().map(|l| &l.map);
        let maps = || device.maps.iter().chain(&device.before).chain(loaded);
        self.hung.contains(&true) && maps().any(|m| m.disks.iter().any(|d| self.hung[*d]))
    }

    fn is_at_rest(&self) -> bool {
        let hangs = |i: usize| self.needs_hung(i);
        let called_off = !self.machine.plan.without.has(DisturbanceClass::Cancel);
        let still = |i: usize, d: &MappedDeviceWithModel| {
            (d.is_live() && !d.is_changing()) || (hangs(i) && !called_off)
        };
        let requests = match self.hung.contains(&true) {
            true => self.machine.model.in_flight_but(&hangs),
            false => self.machine.model.in_flight(),
        };
        requests == 0
            && self.devices.iter().enumerate().all(|(i, d)| still(i, d))
            && self.machine.is_inbox_empty()
            && (self.hung.contains(&true)
                || self.machine.cores.iter().flat_map(|c| &c.tasks).all(RunningTask::is_idle))
            && self
                .machine
                .cores
                .iter()
                .flat_map(|c| &c.open)
                .all(|o| o.lane.own_work() < OwnWork::Required || hangs(o.device))
            && (self.log.waiting.is_empty() || self.blueprint.logger.is_some_and(hangs))
            && self.no_path_failed()
    }

    fn no_path_failed(&self) -> bool {
        let works = |i: usize, a: usize| self.needs_hung(i) || self.failed_paths(i, a).is_empty();
        self.devices.iter().enumerate().all(|(i, d)| d.access.is_none_or(|a| works(i, a)))
    }

    /// True if no event is left that could make progress.
    pub fn is_stuck(&self) -> bool {
        self.machine.resting
            && self.machine.timers.is_empty()
            && !self.devices.iter().any(|d| d.is_woken())
            && !self.is_at_rest()
    }

    /// Counts the hedges and ejections since the last quiescence.
    pub(crate) fn count_watch(&mut self) {
        for device in &mut self.devices {
            let live = device.mapped().live();
            let reports = live.map(|t| t.path_reports()).unwrap_or_default();
            let hedges = reports.iter().filter_map(|r| r.watch.as_ref()).map(|w| w.hedges).sum::<u64>();
            let now: [u64; 2] = [hedges, reports.iter().map(|r| r.ejections).sum::<u64>()];
            // The counters of a new table start at 0.
            let more = |at: usize| now[at].checked_sub(device.hedged[at]).unwrap_or(now[at]);
            self.machine.totals.hedges += more(0);
            self.machine.totals.ejections += more(1);
            device.hedged = now;
        }
    }

    /// Compares the reports of the devices with the model.
    fn inspect(&mut self) -> Result<(), Violation> {
        self.machine.paths_are_empty()?;
        self.machine.changes_hold()?;
        self.count_watch();
        let env = lock_environment(&self.machine.env);
        self.count_tables()?;
        for p in 0..env.paths.len() {
            let opened = self.machine.cores.iter().flat_map(|c| &c.open).map(|o| self.lanes_of(o.device, p));
            let (want, got) = (opened.sum::<usize>(), env.paths[p].lanes);
            if want != got {
                return Err(format!("at rest, {got} lanes of p{p} are open, and {want} are in use"));
            }
        }
        for (i, device) in self.devices.iter().enumerate() {
            check_path_counters(i, device, &env)?;
            check_path_watch_report(i, device, &env)?;
            let Some((_, _, groups)) = device.spec.multipath() else { continue };
            let status = device.mapped().status_text();
            let words: Vec<&str> = status.split_whitespace().collect();
            for (selector, p) in groups.iter().flat_map(|(s, paths)| paths.iter().map(move |p| (*s, *p))) {
                let wrong = |what: &str| {
                    Err(format!("at rest, {what} of p{p} is wrong in the status of d{i}: {status}"))
                };
                let via = self.blueprint.via.iter().find(|(path, _)| *path == p && device.spec.is_loose());
                let name = via.map_or(format!("8:{p}"), |(_, d)| format!("253:{d}"));
                let Some(at) = words.iter().position(|w| *w == name) else { return wrong("the entry") };
                let word = |n: usize| words.get(at + n).copied().unwrap_or_default();
                let has_unknown_paths = device.is_loose();
                if word(1) == "F" && has_unknown_paths {
                    return wrong("the state");
                }
                if has_unknown_paths {
                    continue;
                }
                if (word(1) == "F") != env.paths[p].failed {
                    return wrong("the state");
                }
                if word(2) != env.paths[p].fails.to_string() {
                    return wrong("the fail count");
                }
                let load = match selector {
                    PathSelector::QueueLength | PathSelector::ServiceTime => word(3),
                    PathSelector::Historical => word(4),
                    PathSelector::RoundRobin | PathSelector::Affinity => "0",
                };
                if load != "0" {
                    return wrong("the load");
                }
            }
        }
        Ok(())
    }

    /// Compares the event counters with the messages sent and the faults of the paths.
    fn check_events(&mut self) -> Result<(), Violation> {
        for i in 0..self.devices.len() {
            self.count_lost(i);
            let device = &mut self.devices[i];
            let raised = u64::from(device.mapped.event_nr());
            let (must, mut may) = device.events;
            // With automatic failback, the number of returns to a better group is not modelled.
            if device.settings.failback != Failback::Manual {
                may = u64::from(u32::MAX);
            }
            // The status letters of a striped line: D is a failed stripe. The first failure of each
            // stripe raises an event.
            let status = device.mapped.status_text();
            let is_failed = |line: &str| line.contains(" striped ") && line.ends_with('D');
            if raised == 0 && status.lines().any(is_failed) {
                return Err(format!("at rest, a stripe of d{i} has failed, and no event was raised"));
            }
            if raised < must || raised > must + may {
                return Err(format!(
                    "at rest, d{i} has raised {raised} events: {must} were due, {may} more could be"
                ));
            }
            device.events = (raised, must + may - raised);
            if device.spec.multipath().is_some() && !device.is_loose() {
                device.events.1 = 0;
            }
        }
        Ok(())
    }

    /// Counts the events of failed paths. Several failures in one turn raise one event, as does one
    /// path that fails on several cores at once.
    pub(crate) fn count_lost(&mut self, i: usize) {
        let device = &mut self.devices[i];
        let Some(access) = device.access else { return };
        let access = &mut lock_environment(&self.machine.env).accesses[access];
        let lost = std::mem::take(&mut access.lost);
        device.events.0 += u64::from(lost > 0);
        device.events.1 +=
            if access.has_unknown_paths { u64::from(u32::MAX) } else { lost.saturating_sub(1) };
    }

    /// Number of lanes of path `p` that one lane of device `i` opens.
    fn lanes_of(&self, i: usize, p: usize) -> usize {
        self.devices[i].spec.lanes(p, &|d| self.lanes_of(d, p))
    }

    /// Checks that tables that are neither live nor loaded are dropped.
    fn count_tables(&self) -> Result<(), Violation> {
        let there = self.tables.iter().filter(|t| t.strong_count() > 0).count();
        let known = self.devices.iter().map(|d| 1 + usize::from(d.loaded.is_some())).sum::<usize>();
        match there <= known {
            true => Ok(()),
            false => Err(format!("at rest, {there} tables exist, but {known} are live or inactive")),
        }
    }

    /// Cuts the power, and restores it.
    ///
    /// # Errors
    /// If the devices cannot be created again.
    pub fn crash(&mut self) -> Result<(), Violation> {
        self.machine.totals.crashes += 1;
        self.machine.cut_power();
        // The lanes cannot be dropped while bios are in flight, so they are drained first.
        let was_resting = self.machine.resting;
        self.quiesce()?;
        self.look_at_log()?;
        self.restart()?;
        let mut env = lock_environment(&self.machine.env);
        env.dead = false;
        env.calm = was_resting;
        self.machine.resting = was_resting;
        env.say("the power is back");
        Ok(())
    }

    /// Closes all lanes, removes all devices, and creates them again with the same tables.
    fn restart(&mut self) -> Result<(), Violation> {
        self.machine.cores.clear();
        self.log.clear();
        let specs: Vec<TableSpec> = self.devices.iter().map(|d| d.spec.clone()).collect();
        while let Some(device) = self.devices.pop() {
            let name = format!("d{}", self.devices.len());
            let others = std::sync::Arc::strong_count(device.mapped()) - 1;
            if others > 0 {
                return Err(format!("{name} is closed, and {others} still hold it"));
            }
        }
        self.machine.timers.clear();
        self.tables.retain(|t| t.strong_count() > 0);
        if !self.tables.is_empty() {
            return Err(format!("all devices are gone, and {} tables are not", self.tables.len()));
        }
        self.machine.paths_are_closed()?;
        let mut env = lock_environment(&self.machine.env);
        env.disks.iter_mut().for_each(|d| d.set_read_only(false));
        env.accesses.clear();
        env.disks.iter_mut().for_each(SimDisk::start);
        for p in &mut env.paths {
            (p.access, p.failed, p.suspended_users) = (None, false, 0);
        }
        drop(env);
        self.start(&specs)
    }
}

/// Compares the path counters that device `i` reports with the model.
fn check_path_counters(i: usize, device: &MappedDeviceWithModel, env: &Env) -> Result<(), Violation> {
    let access = device.access.map(|a| &env.accesses[a]);
    let reports = device.mapped().live().map(|t| t.path_reports()).unwrap_or_default();
    for report in reports.iter().filter(|_| access.is_some_and(|a| !a.has_unknown_paths)) {
        let served = env.paths[report.number.minor as usize].served;
        let reported = PathCounters { bios: report.bios, bytes: report.bytes, errors: report.errors };
        if reported != served {
            return Err(format!(
                "at rest, d{i} reports {reported:?} for {}, expected {served:?}",
                report.name
            ));
        }
    }
    Ok(())
}

/// Checks the report of the path watch of device `i`: no request waits, and the reads allow that
/// many hedges.
fn check_path_watch_report(i: usize, device: &MappedDeviceWithModel, env: &Env) -> Result<(), Violation> {
    let reports = device.mapped().live().map(|t| t.path_reports()).unwrap_or_default();
    let (mut reads, mut hedges) = (0, 0);
    for (report, watch) in reports.iter().filter_map(|report| Some((report, report.watch.as_ref()?))) {
        if watch.waiting > 0 {
            return Err(format!(
                "at rest, d{i} says that {} requests wait for {}",
                watch.waiting, report.name
            ));
        }
        reads += report.ops[Op::Read as usize].0;
        hedges += watch.hedges - watch.free_hedges;
    }
    // A request that is handed back is sent once more than it completes. For paths that are mapped
    // devices this number is not known.
    let over_paths = reports.iter().all(|report| report.number.major == PATHS);
    match !over_paths || hedges * READS_A_HEDGE <= reads + env.seen.handed_back {
        true => Ok(()),
        false => Err(format!("at rest, d{i} has sent {hedges} hedges for {reads} reads")),
    }
}

/// Number of reads that allow one hedge.
const READS_A_HEDGE: u64 = 20;
