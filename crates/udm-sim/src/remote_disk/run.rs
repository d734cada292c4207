//! A run of a world of clients of remote disks: steps with rests in between, a shutdown, and the
//! checks at these times.

use super::machine::RemoteDiskMachine;
use super::model::ExportModel;
use super::shared::{WorkloadPhase, lock_front_end_state};
use crate::model::Violation;
use crate::nbd::ring_core::{RunningDeviceChange, count_ring_operations};
use crate::rng::SimRng;
use udm_core::Nanos;
use udm_targets::multipath::PathWatchOptions;

/// Error text if no event is left.
pub(crate) const STUCK: &str = "nothing moves any more";

/// Maximum number of steps until an awaited event, or until another byte is moved. While bytes are
/// moved, the limit is 20 times as high.
const STEPS_MAX: u64 = 20_000;

/// A world of clients of remote disks.
pub(crate) trait RemoteDiskWorld: Sized {
    fn machine(&self) -> &RemoteDiskMachine;
    fn machine_mut(&mut self) -> &mut RemoteDiskMachine;

    /// Runs one step.
    fn one_step(&mut self) -> Result<(), Violation>;

    /// Ends all trouble of the servers.
    fn calm_servers(&mut self);

    /// Lets the servers fail again.
    fn rouse_servers(&mut self) {}

    /// Checks that idle cores sleep.
    fn check_idle(&mut self) -> Result<(), Violation>;

    /// Reinstates the failed paths of all devices.
    fn reinstate_all(&mut self) -> Result<(), Violation>;

    /// Ends the servers, after the cores.
    fn end_servers(&mut self) -> Result<(), Violation> {
        Ok(())
    }

    /// Adds the device of disk `number` with these paths, and resumes it. `is_late` if its paths
    /// may fail because the world is busy.
    fn add_device(
        &mut self,
        (number, sectors): (usize, u64),
        paths: &[usize],
        is_late: bool,
        draw_watch: impl FnOnce(&mut SimRng) -> PathWatchOptions,
        build: &mut SimRng,
    ) -> Result<(), Violation> {
        let machine = self.machine_mut();
        let (used, holds) = machine.build_device(number, sectors, paths, draw_watch, build)?;
        let (mapped, limits) = (used.mapped.clone(), used.device.limits());
        machine.devices.push(used);
        let model = ExportModel::new(number, limits, holds);
        lock_front_end_state(&machine.shared).model.exports.push(model);
        if let Some(mapped) = mapped {
            let change = RunningDeviceChange::start(|wake| mapped.resume(wake));
            let change = change.map_err(|e| format!("d{number}: {e}"))?;
            machine.devices[number].change = Some(change);
            self.step_until("a device that is resumed", |world| {
                world.machine().devices[number].change.is_none()
            })?;
        }
        // A table has its limits only when it is live.
        let machine = self.machine_mut();
        let mut model = ExportModel::new(number, machine.devices[number].device.limits(), holds);
        model.late = is_late;
        lock_front_end_state(&machine.shared).model.exports[number] = model;
        Ok(())
    }

    /// Runs steps until `done`.
    fn step_until(&mut self, what: &str, done: impl Fn(&Self) -> bool) -> Result<(), Violation> {
        let from = self.machine().step;
        while !done(self) {
            let machine = self.machine();
            let (steps, since_move) = (machine.step - from, machine.step - from.max(machine.moved_at));
            if since_move > STEPS_MAX || steps > 20 * STEPS_MAX {
                return Err(format!("waited too long for {what}: {}", machine.waiting()));
            }
            match self.one_step() {
                // The condition may be true after this step.
                Err(wrong) if wrong.starts_with(STUCK) && !done(self) => {
                    return Err(format!("{what} does not come: {wrong}"));
                }
                Err(wrong) if !wrong.starts_with(STUCK) => return Err(wrong),
                _ => {}
            }
        }
        Ok(())
    }

    /// Runs all steps of the plan with quiescence in between, and shuts everything down.
    fn run(&mut self) -> Result<(), Violation> {
        while self.machine().step < self.machine().plan.steps {
            self.one_step()?;
            let machine = self.machine();
            if machine.step >= machine.rest_at {
                self.rest()?;
                let machine = self.machine_mut();
                machine.rest_at = machine.step + 300 + machine.control.span(2500);
            }
        }
        self.rest()?;
        self.end()
    }

    /// Ends all trouble.
    fn calm_down(&mut self) {
        let machine = self.machine_mut();
        machine.calm = true;
        machine.net.borrow_mut().calm = true;
        self.calm_servers();
        let machine = self.machine_mut();
        let now = machine.now;
        machine.pending_connects.iter_mut().for_each(|(_, due)| *due = now);
    }

    /// Stops faults and waits until nothing is in flight. Then lets udm idle for a while, and reads
    /// all data back.
    fn rest(&mut self) -> Result<(), Violation> {
        self.machine().say("a rest");
        self.machine_mut().rests += 1;
        self.calm_down();
        self.machine_mut().set_phase(WorkloadPhase::Rest);
        self.step_until("a rest", |world| world.machine().requests_in_flight() == 0)?;
        self.check_idle()?;
        self.reinstate_all()?;
        let machine = self.machine_mut();
        lock_front_end_state(&machine.shared).model.exports.iter_mut().for_each(|export| export.check = 0);
        machine.set_phase(WorkloadPhase::Check);
        self.step_until("the end of a read of all", |world| {
            let shared = lock_front_end_state(&world.machine().shared);
            let is_read = |export: &ExportModel| export.check == export.limits.size.0;
            shared.model.in_flight() == 0 && shared.model.exports.iter().all(is_read)
        })?;
        let machine = self.machine_mut();
        machine.calm = false;
        machine.net.borrow_mut().calm = false;
        self.rouse_servers();
        self.machine_mut().set_phase(WorkloadPhase::Work);
        Ok(())
    }

    /// Closes everything, and checks that nothing is left.
    fn end(&mut self) -> Result<(), Violation> {
        self.calm_down();
        self.machine_mut().set_phase(WorkloadPhase::Rest);
        self.step_until("a rest", |world| world.machine().requests_in_flight() == 0)?;
        self.machine_mut().set_phase(WorkloadPhase::Close);
        self.step_until("the end of the front ends", |world| {
            let machine = world.machine();
            lock_front_end_state(&machine.shared).closed == machine.cores.len()
        })?;
        // The tasks of servers and of connections end with their devices.
        let machine = self.machine_mut();
        machine.devices.clear();
        machine.paths.clear();
        self.step_until("the end of tasks", |world| {
            world.machine().cores.iter().all(|core| core.reason() == Nanos::NEVER)
        })?;
        let machine = self.machine_mut();
        machine.core_set.end();
        machine.core_set.stop(Nanos(60_000_000_000));
        self.step_until("the end of the cores", |world| world.machine().cores.iter().all(|core| core.over))?;
        let machine = self.machine_mut();
        machine.called_off = machine.cores.iter().map(|core| core.outside.borrow().called_off).sum();
        // Cancelled operations and disconnect requests complete by themselves.
        self.step_until("the end of the last operation", |world| {
            count_ring_operations(&world.machine().cores) == 0
        })?;
        self.machine_mut().cores.clear();
        self.end_servers()?;
        let machine = self.machine_mut();
        let live = udm_buf::slab_count::thread_live_slab_bytes() - machine.base;
        if live != 0 {
            return Err(format!("all is closed, and {live} bytes of memory are not given back"));
        }
        let mut net = machine.net.borrow_mut();
        net.look();
        match net.links.iter().position(|link| !link.shut) {
            Some(link) => Err(format!("all is closed, and connection {link} is open")),
            None => Ok(()),
        }
    }
}
