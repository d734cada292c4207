//! What the worlds with power cuts share: steps, rests, changes of tables, and the power itself.
//!
//! Such a world has devices over disks that keep their content when the power is cut. After a cut
//! it closes everything, and creates the devices again over the same disks.

use crate::control::DeviceResolver;
use crate::control_io::SimTableLoadIo;
use crate::disk::SimDisk;
use crate::environment::{PathMode, lock_environment};
use crate::machine::{Machine, OpenLane};
use crate::model::Violation;
use crate::plan::DisturbanceClass;
use crate::rng::SimRng;
use crate::tasks::RunningTask;
use crate::timers::TimedEvent;
use crate::turn::MachineWorld;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use udm_core::{Nanos, OwnWork};
use udm_dm::{DeviceSetTransition, IndexedDeviceError, MappedDevice, Table, TargetError};

/// Maximum number of steps of an operation. A slow path may hold a request for half a second, which
/// is 200,000 steps.
pub(crate) const STEPS_MAX: u64 = 1_000_000;

/// Steps that a run continues after its planned power cut.
const STEPS_BEHIND: u64 = 100;

/// Result of an operation that may fail: `EINTR` if it was cancelled.
pub(crate) type CancellableResult = Result<(), TargetError>;

/// State of a world whose power may be cut.
pub(crate) struct PowerState {
    /// True if the power is off.
    pub off: bool,
    /// True if paths may become slow; `fails` if requests may fail.
    pub troubles: bool,
    pub fails: bool,
    /// Step of the next rest.
    pub rest_at: u64,
    /// The power is cut in one of this many steps.
    pub cut_one_in: u64,
}

impl PowerState {
    /// Draws the state of a new world, whose power is on.
    pub fn draw(build: &mut SimRng, has_path_faults: bool, fails: bool, cut_one_in: u64) -> PowerState {
        let troubles = has_path_faults && build.one_in(2);
        PowerState { off: false, troubles, fails, rest_at: 500 + build.span(1500), cut_one_in }
    }
}

/// A world of devices whose power may be cut.
pub(crate) trait PowerCutWorld: MachineWorld + Sized {
    /// The machine, and the state of the power.
    fn parts(&self) -> (&Machine, &PowerState);

    /// The same, to change them.
    fn parts_mut(&mut self) -> (&mut Machine, &mut PowerState);

    /// Does something to the devices.
    fn act(&mut self) -> Result<(), Violation>;

    /// Quiesces the world, and checks its state.
    fn rest(&mut self) -> Result<(), Violation>;

    /// Creates the cores and the existing devices, as after power-on. The power may be cut
    /// meanwhile.
    fn boot(&mut self) -> Result<(), Violation>;

    /// Takes note of a power cut that happens now, before its effect.
    fn before_power_cut(&mut self);

    /// Gives requests the space for which they wait. Returns false if none waits.
    fn make_room(&mut self) -> Result<bool, Violation> {
        Ok(false)
    }

    /// Called in each step before a core has its turn.
    fn before_turn(&mut self) {}

    /// Called after each step that did not cut the power.
    fn after_turn(&mut self) -> Result<(), Violation> {
        Ok(())
    }

    /// Called after each step of a change of devices.
    fn after_change_step(&mut self) -> Result<(), Violation> {
        Ok(())
    }

    /// Counts a change that was cancelled.
    fn count_cancel(&mut self);

    /// True if the run has disturbances of this class.
    fn on(&self, class: DisturbanceClass) -> bool {
        !self.parts().0.plan.without.has(class)
    }

    /// True if the power is off, or was cut in this turn.
    fn is_dead(&self) -> bool {
        let (machine, power) = self.parts();
        power.off || lock_environment(&machine.env).dead
    }

    /// Runs all steps of the plan.
    fn run_steps(&mut self) -> Result<(), Violation> {
        while self.machine().step < self.machine().plan.steps {
            if self.parts().1.off {
                self.power_on()?;
            } else if self.machine().control.one_in(60) {
                self.act()?;
            } else {
                self.one_step()?;
            }
            let (machine, power) = self.parts();
            if machine.step >= power.rest_at && !power.off {
                self.rest()?;
                let (machine, power) = self.parts_mut();
                power.rest_at = machine.step + 200 + machine.control.span(2000);
            }
        }
        self.end_power_cut()
    }

    /// Restores the power, if it is off.
    fn end_power_cut(&mut self) -> Result<(), Violation> {
        while self.parts().1.off {
            self.power_on()?;
        }
        Ok(())
    }

    /// Runs one step: a turn of one core.
    fn one_step(&mut self) -> Result<(), Violation> {
        let machine = self.machine();
        machine.step += 1;
        machine.totals.steps += 1;
        let step = machine.step;
        if step.is_multiple_of(32) {
            machine.model.advance(step);
        }
        machine.set_turn(None);
        // Requests must not wait for space forever.
        if step.is_multiple_of(4096) {
            self.make_room()?;
        }
        self.before_turn();
        self.disturb();
        match self.machine().choose() {
            Some(core) => self.turn(core)?,
            None => {
                let machine = self.machine();
                // All requests may wait for space in a store.
                if !machine.jump() && machine.timers.is_empty() && !self.make_room()? {
                    return Err(format!("nothing moves any more, and {} waits", self.waiting()));
                }
            }
        }
        let (machine, power) = self.parts();
        lock_environment(&machine.env).verdict()?;
        let cut = !power.off && lock_environment(&machine.env).dead;
        let drawn = !machine.resting && !power.off && machine.crowded.is_none();
        if !cut {
            self.after_turn()?;
        }
        let has_cuts = self.on(DisturbanceClass::Crash);
        let (machine, power) = self.parts_mut();
        if cut || drawn && has_cuts && machine.control.one_in(power.cut_one_in) {
            self.power_off();
        }
        Ok(())
    }

    /// Restores paths that are due. Sometimes makes a path slow or, if requests may fail, faulty.
    fn disturb(&mut self) {
        let hangs = self.on(DisturbanceClass::Hang);
        let (machine, power) = self.parts_mut();
        let now = lock_environment(&machine.env).now;
        while let Some(timer) = machine.timers.take(now) {
            if let TimedEvent::Restore(path) = timer {
                machine.restore_path(path);
            }
        }
        let quiet = machine.resting || power.off || machine.crowded.is_some();
        if !power.troubles || quiet || !machine.control.one_in(400) {
            return;
        }
        let path = machine.control.below(machine.paths.len() as u64) as usize;
        let mode = match machine.control.below(8) {
            0 if power.fails && hangs => PathMode::Hung,
            1 if power.fails => PathMode::Silent,
            2 if power.fails => PathMode::Down,
            _ => PathMode::Slow(machine.control.between(2, 100)),
        };
        let last = Nanos(machine.control.between(1, 100) * 1_000_000);
        if lock_environment(&machine.env).paths[path].mode == PathMode::Up {
            machine.say(format!("p{path} is {mode:?}"));
            lock_environment(&machine.env).paths[path].mode = mode;
            machine.totals.losses += 1;
            machine.timers.set(now + last, TimedEvent::Restore(path));
        }
    }

    /// Stops faults and new requests.
    fn end_disturbances(&mut self) {
        let machine = self.machine();
        lock_environment(&machine.env).calm = true;
        machine.resting = true;
        machine.restore_all_paths();
    }

    /// Continues with faults and new requests, if the power is on.
    fn go_on(&mut self) {
        if !self.is_dead() {
            let machine = self.machine();
            machine.resting = false;
            lock_environment(&machine.env).calm = false;
        }
    }

    /// Stops faults, and runs until nothing is in flight.
    fn quiet(&mut self) -> Result<(), Violation> {
        self.end_disturbances();
        if !self.is_dead() {
            self.make_room()?;
        }
        self.step_until(|world| {
            let machine = world.parts().0;
            let owes = |open: &OpenLane| open.lane.own_work() == OwnWork::Required;
            machine.model.in_flight() == 0
                && !machine.cores.iter().flat_map(|core| &core.open).any(owes)
                && machine.is_inbox_empty()
                && machine.cores.iter().flat_map(|core| &core.tasks).all(RunningTask::is_idle)
        })
    }

    /// Runs steps until `done`, at most [`STEPS_MAX`].
    fn step_until(&mut self, done: impl Fn(&Self) -> bool) -> Result<(), Violation> {
        let from = self.machine().step;
        while !done(self) {
            if self.machine().step - from > STEPS_MAX {
                return Err(format!("the world does not come to rest, and {} waits", self.waiting()));
            }
            self.one_step()?;
        }
        Ok(())
    }

    /// Builds a table, whose lines may name these devices. The inner result is `Err(None)` if
    /// storage failed or the power was cut.
    fn build_table(
        &mut self,
        words: &str,
        devices: Vec<Option<Arc<MappedDevice>>>,
    ) -> Result<Result<Arc<Table>, Option<TargetError>>, Violation> {
        let lines = udm_wire::table::parse_table(words).map_err(|e| format!("{words}: {e}"))?;
        let machine = self.machine();
        let (paths, fronts) = (machine.paths.clone(), machine.fronts.clone());
        let mut names = DeviceResolver { paths, fronts, devices };
        let cores = machine.cores.len();
        let io = SimTableLoadIo::new(self);
        let built = Table::build(udm_targets::TARGETS, &lines, &mut names, &io, cores);
        io.verdict()?;
        let failed = io.has_failed();
        Ok(built.map_err(|error| Some(error).filter(|_| !failed && !self.is_dead())))
    }

    /// Runs steps until `changes` has completed. Sometimes cancels it.
    fn finish(
        &mut self,
        changes: Result<DeviceSetTransition, IndexedDeviceError>,
        woken: &AtomicBool,
    ) -> Result<CancellableResult, Violation> {
        let mut changes = changes.map_err(|(_, e)| e.to_string())?;
        let cancels = self.on(DisturbanceClass::Cancel) && self.machine().control.one_in(12);
        let machine = self.machine();
        let from = machine.step;
        let cancel_at = from + if cancels { machine.control.below(60) } else { STEPS_MAX };
        loop {
            if woken.swap(false, Ordering::Relaxed) {
                let machine = self.machine();
                machine.set_turn(None);
                let over = changes.step(&*machine.inboxes);
                self.after_change_step()?;
                if let Some(result) = over {
                    return Ok(result.map_err(|(_, e)| e));
                }
            }
            let machine = self.machine();
            if machine.step - from > STEPS_MAX {
                return Err(format!("a change does not end, and {} waits", self.waiting()));
            }
            if machine.step >= cancel_at && machine.step < from + STEPS_MAX {
                machine.set_turn(None);
                if changes.cancel(&*machine.inboxes) {
                    machine.say("that is called off");
                    self.count_cancel();
                    woken.store(true, Ordering::Relaxed);
                }
            }
            self.one_step()?;
        }
    }

    /// Cuts the power: cached data is lost, and writes in flight take effect wholly, partly or not
    /// at all.
    fn power_off(&mut self) {
        self.before_power_cut();
        let (machine, power) = self.parts_mut();
        machine.cut_power();
        power.off = true;
        (machine.resting, machine.reading) = (true, false);
        machine.restore_all_paths();
        if machine.plan.cut.is_some() {
            machine.plan.steps = machine.plan.steps.min(machine.step + STEPS_BEHIND);
        }
    }

    /// Closes everything in order, and creates all devices again over the same disks.
    fn power_on(&mut self) -> Result<(), Violation> {
        self.quiet()?;
        self.before_turn();
        self.take_apart()?;
        let (machine, power) = self.parts_mut();
        let again = machine.control.one_in(4);
        let mut env = lock_environment(&machine.env);
        env.disks.iter_mut().for_each(SimDisk::start);
        env.paths.iter_mut().for_each(|path| path.mode = PathMode::Up);
        env.dead = false;
        // Sometimes the power is cut again before all devices exist.
        env.cut_at = again.then(|| env.changes + 1 + env.chance.below(20));
        drop(env);
        power.off = false;
        machine.say("the power is back");
        let booted = self.boot();
        if !self.is_dead() {
            lock_environment(&self.machine().env).cut_at = None;
        }
        booted
    }

    /// Drops the devices, whose lanes are closed.
    fn drop_devices(&mut self);

    /// Closes all lanes and drops all devices, and checks that nothing is left.
    fn take_apart(&mut self) -> Result<(), Violation> {
        self.machine().close_lanes();
        self.drop_devices();
        // The start or stop message of a task may still be in transit.
        self.step_until(|world| {
            let machine = world.parts().0;
            machine.is_inbox_empty() && machine.cores.iter().all(|core| core.tasks.is_empty())
        })?;
        let machine = self.machine();
        machine.cores.clear();
        machine.paths_are_closed()
    }
}

impl Machine {
    /// Ends the faults of all paths.
    fn restore_all_paths(&mut self) {
        self.timers.clear();
        (0..self.paths.len()).for_each(|path| self.restore_path(path));
    }

    /// Closes the lanes of all cores.
    pub(crate) fn close_lanes(&mut self) {
        for core in 0..self.cores.len() {
            self.set_turn(Some(core));
            self.cores[core].open.clear();
        }
        self.set_turn(None);
    }

    /// Describes the work that waits, for a person. `of` describes a device, such as ` of s1`.
    pub(crate) fn describe_waiting(&self, of: impl Fn(usize) -> String) -> String {
        let mut text = self.model.oldest().unwrap_or_else(|| "nobody".into());
        for (c, core) in self.cores.iter().enumerate() {
            for open in &core.open {
                let (n, busy) = (open.in_flight, open.lane.own_work());
                if n > 0 || busy == OwnWork::Required {
                    text += &format!("; core {c} with {n} requests{}, {busy:?}", of(open.device));
                }
            }
        }
        text
    }
}
