//! Quiescence, power cuts, and the state after them.

use super::control::{STEPS_MAX, parse_snapshot_status};
use super::world::SnapshotWorld;
use crate::disk::SimDisk;
use crate::environment::{PathMode, lock_environment};
use crate::model::Violation;
use crate::tasks::RunningTask;
use crate::turn::MachineWorld as _;
use udm_core::OwnWork;

/// Steps that a run continues after its planned power cut.
const STEPS_BEHIND: u64 = 100;

impl SnapshotWorld {
    /// Runs all steps of the plan, and quiesces the world.
    pub(super) fn run_all(&mut self) -> Result<(), Violation> {
        while self.machine.step < self.machine.plan.steps {
            if self.dead {
                self.power_on()?;
            } else if self.machine.control.one_in(60) {
                self.act()?;
            } else {
                self.one_step()?;
            }
            if self.machine.step >= self.rest_at && !self.dead {
                self.rest()?;
                self.rest_at = self.machine.step + 200 + self.machine.control.span(2000);
            }
        }
        while self.dead {
            self.power_on()?;
        }
        self.rest()?;
        self.quiet()?;
        self.take_apart()
    }

    /// Creates the cores and the existing devices, as after power-on. The power may be cut
    /// meanwhile.
    pub(super) fn boot(&mut self) -> Result<(), Violation> {
        self.machine.make_cores(self.count);
        lock_environment(&self.machine.env).calm = true;
        self.machine.resting = true;
        self.boot_devices()?;
        if !self.is_dead() {
            self.read_back()?;
        }
        if !self.is_dead() {
            self.look_at_status()?;
            self.machine.resting = false;
            lock_environment(&self.machine.env).calm = false;
        }
        Ok(())
    }

    fn boot_devices(&mut self) -> Result<(), Violation> {
        let fails = |side: usize| Err(format!("s{side} can't be loaded, and nothing fails"));
        for side in 0..self.origins() {
            self.device(side)?;
            let loaded = self.put_floor(side)? && self.load_origin(side)?;
            // The merge of an invalid snapshot has no effect.
            let marked = self.sides[side].merging.is_some_and(|store| self.is_marked(store));
            if !loaded && marked && !self.is_dead() {
                (self.sides[side].merging, self.sides[side].base) = (None, self.word(side));
            }
            if !(loaded || marked && self.load_origin(side)?) {
                return if self.is_dead() { Ok(()) } else { fails(side) };
            }
        }
        // The snapshot continues: writes of an origin are copied from the first one on. Lower
        // snapshots come first.
        for side in self.origins()..self.sides.len() {
            let below = self.sides[side].origin;
            let there = self.sides[below].mapped.is_some();
            if !(there && self.sides[side].live && self.sides[side].is_persistent()) {
                self.forget(side);
                continue;
            }
            let device = self.device(side)?;
            if !self.load_snapshot(side, None)? {
                match self.is_marked(side) && !self.is_dead() {
                    true => self.forget(side),
                    false => return if self.is_dead() { Ok(()) } else { fails(side) },
                }
                continue;
            }
            self.must_resume(&[device])?;
            self.tell_settings(side)?;
            self.put_upper(side)?;
            if self.sides[side].upper.is_some() && !self.load_origin(side)? {
                return if self.is_dead() { Ok(()) } else { fails(side) };
            }
        }
        let all: Vec<usize> =
            (0..self.sides.len()).rev().filter(|&side| self.sides[side].mapped.is_some()).collect();
        for &side in &all {
            let origin = self.sides[side].origin == side || self.sides[side].upper.is_some();
            if let Some(door) = self.sides[side].door().cloned().filter(|_| origin) {
                self.must_resume(&[door])?;
            }
        }
        for side in all {
            self.open(side)?;
        }
        for side in self.origins()..self.sides.len() {
            let valid = self.sides[side].live && self.status(side) != "Invalid";
            self.counts.survived += u64::from(valid && self.counts.cuts > 0);
        }
        Ok(())
    }

    /// Removes a snapshot that was lost with the power.
    fn forget(&mut self, side: usize) {
        let base = self.word(side);
        let one = &mut self.sides[side];
        (one.mapped, one.live, one.merging, one.base) = (None, false, None, base);
    }

    /// Loads the origin table, or the table of the merge, into the top device of `side`.
    fn load_origin(&mut self, side: usize) -> Result<bool, Violation> {
        let merges = self.sides[side].merging.is_some();
        self.load_base(side, if merges { "snapshot-merge" } else { "snapshot-origin" }, None)
    }

    /// Quiesces the world without faults: first requests must complete while others are submitted,
    /// then all of them. Checks the devices, and reads all data back.
    fn rest(&mut self) -> Result<(), Violation> {
        self.machine.say("a rest");
        self.end_disturbances();
        self.make_room()?;
        if self.machine.control.one_in(2) && !self.is_dead() {
            self.check_no_starvation()?;
        }
        self.quiet()?;
        self.machine.check_goes_idle()?;
        self.machine.paths_are_empty()?;
        if !self.is_dead() {
            self.look_at_status()?;
            self.look_at_events()?;
        }
        self.read_back()?;
        self.machine.totals.rests += 1;
        if !self.is_dead() {
            self.machine.resting = false;
            lock_environment(&self.machine.env).calm = false;
        }
        Ok(())
    }

    fn end_disturbances(&mut self) {
        lock_environment(&self.machine.env).calm = true;
        self.machine.resting = true;
        self.machine.timers.clear();
        (0..self.machine.paths.len()).for_each(|p| self.machine.restore_path(p));
    }

    /// Stops faults, and runs until nothing is in flight.
    fn quiet(&mut self) -> Result<(), Violation> {
        self.end_disturbances();
        if !self.is_dead() {
            self.make_room()?;
        }
        self.step_until(|world| {
            let machine = &world.machine;
            let owes = |o: &crate::machine::OpenLane| o.lane.own_work() == OwnWork::Required;
            let tasks = || machine.cores.iter().flat_map(|c| &c.tasks);
            machine.model.in_flight() == 0
                && !machine.cores.iter().flat_map(|c| &c.open).any(owes)
                && machine.is_inbox_empty()
                && tasks().all(RunningTask::is_idle)
        })
    }

    fn step_until(&mut self, done: impl Fn(&SnapshotWorld) -> bool) -> Result<(), Violation> {
        let from = self.machine.step;
        while !done(self) {
            if self.machine.step - from > STEPS_MAX {
                return Err(format!(
                    "the world does not come to rest, and {} waits",
                    self.describe_waiters()
                ));
            }
            self.one_step()?;
        }
        Ok(())
    }

    pub(super) fn describe_waiters(&self) -> String {
        self.waiting()
    }

    /// Reads every sector of every volume.
    fn read_back(&mut self) -> Result<(), Violation> {
        for side in &mut self.sides {
            side.check.set(if side.open { 0 } else { u64::MAX });
        }
        self.machine.reading = true;
        let read = self.step_until(|world| {
            world.is_dead() || world.sides.iter().all(|side| side.check.get() >= side.sectors)
        });
        self.machine.reading = false;
        self.sides.iter_mut().for_each(|side| side.check.set(u64::MAX));
        read?;
        self.step_until(|world| world.machine.model.in_flight() == 0)
    }

    /// Checks the status of the snapshots.
    fn look_at_status(&mut self) -> Result<(), Violation> {
        for side in self.origins()..self.sides.len() {
            if self.sides[side].mapped.is_none() {
                continue;
            }
            let status = self.status(side);
            let full = self.sides[side].small && self.sides[side].ends_full;
            let lost_below = self.causes(self.sides[side].origin).lost;
            let cause = full || lost_below || self.is_faulty(side);
            match &*status {
                "Invalid" if !cause => return Err(format!("s{side} is invalid without a reason")),
                "Invalid" => {
                    self.counts.invalid += u64::from(self.sides[side].invalid.is_none());
                    self.sides[side].invalid.get_or_insert(2 * self.machine.step);
                }
                _ if self.sides[side].invalid.is_some() => {
                    return Err(format!("s{side} was invalid, and is {status}"));
                }
                "Overflow" if !full || !self.sides[side].line.contains("PO") => {
                    return Err(format!("s{side} overflows without a reason"));
                }
                "Overflow" => self.counts.overflowed += 1,
                numbered => {
                    let size = lock_environment(&self.machine.env).disks[side].size;
                    let most = 16.max(
                        2 * self.sides[side].line.split(' ').nth(3).map_or(0, |n| n.parse().unwrap_or(0)),
                    );
                    let sane =
                        |(used, total, metadata)| metadata <= used && total == size && used <= total + most;
                    if !parse_snapshot_status(numbered).is_some_and(sane) {
                        return Err(format!("s{side} says {numbered}, and its store has {size}"));
                    }
                }
            }
        }
        Ok(())
    }

    /// Checks the events: the end of a snapshot raises one event, as does each failure of growth. A
    /// store that may overflow may raise more.
    fn look_at_events(&mut self) -> Result<(), Violation> {
        for side in self.origins()..self.sides.len() {
            let Some(mapped) = &self.sides[side].mapped else { continue };
            let raised = mapped.event_nr();
            let ended = self.sides[side].invalid.is_some();
            let may_overflow = self.sides[side].small && self.sides[side].line.contains("PO");
            if raised > u32::from(ended) + self.sides[side].stuck && !may_overflow {
                return Err(format!("s{side} has raised {raised} events, and is {}", self.status(side)));
            }
        }
        Ok(())
    }

    /// Cuts the power: cached data is lost, and writes in flight take effect wholly, partly or not
    /// at all.
    pub(super) fn power_off(&mut self) {
        self.counts.cuts += 1;
        self.counts.cut_merges += u64::from(self.sides.iter().any(|side| side.merging.is_some()));
        let grouped =
            |side: &super::volumes::OriginOrSnapshot| side.coming.as_ref().is_some_and(|c| c.group.len() > 1);
        let together = |side: &super::volumes::OriginOrSnapshot| {
            side.live
                && self
                    .sides
                    .iter()
                    .any(|other| other.live && other.since == side.since && !std::ptr::eq(other, side))
        };
        self.counts.cut_groups += u64::from(self.sides.iter().any(|side| grouped(side) || together(side)));
        self.machine.cut_power();
        self.dead = true;
        self.sides.iter_mut().for_each(|side| side.whole_runs = false);
        (self.machine.resting, self.machine.reading) = (true, false);
        self.machine.timers.clear();
        (0..self.machine.paths.len()).for_each(|p| self.machine.restore_path(p));
        let machine = &mut self.machine;
        if machine.plan.cut.is_some() {
            machine.plan.steps = machine.plan.steps.min(machine.step + STEPS_BEHIND);
        }
    }

    /// Closes everything in order, and creates all devices again over the same disks.
    fn power_on(&mut self) -> Result<(), Violation> {
        self.quiet()?;
        self.do_asked();
        self.take_apart()?;
        let again = self.machine.control.one_in(4);
        let mut env = lock_environment(&self.machine.env);
        env.disks.iter_mut().for_each(SimDisk::start);
        env.paths.iter_mut().for_each(|path| path.mode = PathMode::Up);
        env.dead = false;
        // Sometimes the power is cut again before all devices exist.
        env.cut_at = again.then(|| env.changes + 1 + env.chance.below(20));
        drop(env);
        self.dead = false;
        self.machine.say("the power is back");
        let booted = self.boot();
        if !self.is_dead() {
            lock_environment(&self.machine.env).cut_at = None;
        }
        booted
    }

    /// Closes all lanes and drops all devices, and checks that nothing is left.
    fn take_apart(&mut self) -> Result<(), Violation> {
        for core in 0..self.machine.cores.len() {
            self.machine.set_turn(Some(core));
            self.machine.cores[core].open.clear();
        }
        self.machine.set_turn(None);
        for side in (0..self.sides.len()).rev() {
            let one = &mut self.sides[side];
            let gone = [one.upper.take(), one.mapped.take(), one.floor.take()];
            let one = &mut self.sides[side];
            (one.open, one.coming, one.invalid) = (false, None, None);
            one.stuck = 0;
            one.check.set(u64::MAX);
            drop(gone);
        }
        // The start or stop message of a task may still be in transit.
        self.step_until(|world| {
            world.machine.is_inbox_empty() && world.machine.cores.iter().all(|core| core.tasks.is_empty())
        })?;
        self.machine.cores.clear();
        self.machine.paths_are_closed()
    }
}
