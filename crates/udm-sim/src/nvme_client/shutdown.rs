//! Quiescence of the world, its shutdown, and the checks at these times.

use super::target::TargetAvailability;
use super::world::NvmeClientWorld;
use crate::model::Violation;
use crate::nbd::ring_core::count_ring_operations;
use crate::remote_disk::model::ExportModel;
use crate::remote_disk::shared::{WorkloadPhase, lock_front_end_state};
use udm_core::Nanos;
use udm_wire::nvme::AnaState;

/// Idle time at quiescence, in keep-alive timeouts.
const ALONE_TIMEOUTS: u64 = 20;

/// Time in which an association is made again after all trouble: a handshake that failed, the
/// longest back-off, and another handshake.
const RECONNECT_MAX: Nanos = Nanos(20_000_000_000);

/// Maximum number of turns of cores per path and keep-alive timeout during this time. A Keep Alive,
/// of which there are two, is sent and answered in pieces.
const TURNS_ALONE: u64 = 40;

impl NvmeClientWorld {
    /// Runs all steps of the plan with quiescence in between, and shuts everything down.
    pub(super) fn run(&mut self) -> Result<(), Violation> {
        while self.step < self.plan.steps {
            self.one_step()?;
            if self.step >= self.rest_at {
                self.rest()?;
                self.rest_at = self.step + 300 + self.control.span(2500);
            }
        }
        self.rest()?;
        self.end()
    }

    /// Ends all trouble.
    fn calm_down(&mut self) {
        self.calm = true;
        self.net.borrow_mut().calm = true;
        for t in 0..self.targets.len() {
            if self.targets[t].mode != TargetAvailability::Up {
                self.restore(t);
            }
            self.set_ana_state(t, AnaState::Optimized);
            self.targets[t].finish_hung(self.now);
            self.targets[t].own.iter().for_each(|own| own.set_calm(true));
        }
        let now = self.now;
        self.callers.iter_mut().for_each(|(_, due)| *due = now);
    }

    /// Stops faults and waits until nothing is in flight. Then lets udm idle for a while, and reads
    /// all data back.
    fn rest(&mut self) -> Result<(), Violation> {
        self.say("a rest");
        self.counts.rests += 1;
        self.calm_down();
        self.set_phase(WorkloadPhase::Rest);
        self.step_until("a rest", |world| lock_front_end_state(&world.shared).model.in_flight() == 0)?;
        self.check_idle()?;
        self.reinstate_all()?;
        lock_front_end_state(&self.shared).model.exports.iter_mut().for_each(|export| export.check = 0);
        self.set_phase(WorkloadPhase::Check);
        self.step_until("the end of a read of all", |world| {
            let shared = lock_front_end_state(&world.shared);
            let is_read = |export: &ExportModel| export.check == export.limits.size.0;
            shared.model.in_flight() == 0 && shared.model.exports.iter().all(is_read)
        })?;
        self.calm = false;
        self.net.borrow_mut().calm = false;
        self.targets.iter().flat_map(|target| &target.own).for_each(|own| own.set_calm(false));
        self.set_phase(WorkloadPhase::Work);
        Ok(())
    }

    /// Checks that idle cores sleep between Keep Alives, and that the paths know the size of their
    /// namespace.
    fn check_idle(&mut self) -> Result<(), Violation> {
        // Associations that were lost a moment ago are made again first.
        self.alone_until = Some(self.now + RECONNECT_MAX);
        self.step_until("a quiet time", |world| world.alone_until.is_none())?;
        let (from, until) = (self.turns, self.now + Nanos(self.kato().0 * ALONE_TIMEOUTS));
        self.alone_until = Some(until);
        self.step_until("nothing", |world| world.alone_until.is_none())?;
        let (turns, paths) = (self.turns - from, (self.targets.len() * (self.cores.len() + 1)) as u64);
        // If udm checks paths, it continues to do so.
        let looks = self.devices.iter().any(|device| device.checks);
        if !looks && turns > TURNS_ALONE * paths * ALONE_TIMEOUTS {
            return Err(format!("{turns} turns of cores at rest, with {paths} lanes"));
        }
        for (t, path) in self.paths.iter().enumerate() {
            if let Some(why) = path.stall_reason() {
                return Err(format!("at rest, t{t} stalls: {why}"));
            }
            let (knows, has) = (path.limits().size.0, self.namespaces[self.targets[t].namespace].sectors);
            if knows != has {
                return Err(format!("at rest, t{t} is known to have {knows} sectors and has {has}"));
            }
            if path.rejection_reason().is_some() {
                return Err(format!("at rest, t{t} is refused: {:?}", path.rejection_reason()));
            }
        }
        Ok(())
    }

    /// Closes everything, and checks that nothing is left.
    fn end(&mut self) -> Result<(), Violation> {
        self.calm_down();
        self.set_phase(WorkloadPhase::Rest);
        self.step_until("a rest", |world| lock_front_end_state(&world.shared).model.in_flight() == 0)?;
        self.set_phase(WorkloadPhase::Close);
        self.step_until("the end of the front ends", |world| {
            lock_front_end_state(&world.shared).closed == world.cores.len()
        })?;
        // The tasks of targets and of admin queues end with their devices.
        self.devices.clear();
        self.paths.clear();
        self.step_until("the end of tasks", |world| {
            world.cores.iter().all(|core| core.reason() == Nanos::NEVER)
        })?;
        self.core_set.end();
        self.core_set.stop(Nanos(60_000_000_000));
        self.step_until("the end of the cores", |world| world.cores.iter().all(|core| core.over))?;
        // Cancelled operations complete by themselves.
        self.step_until("the end of the last operation", |world| count_ring_operations(&world.cores) == 0)?;
        self.cores.clear();
        self.end_own_targets()?;
        let live = udm_buf::slab_count::thread_live_slab_bytes() - self.base;
        if live != 0 {
            return Err(format!("all is closed, and {live} bytes of memory are not given back"));
        }
        let mut net = self.net.borrow_mut();
        net.look();
        match net.links.iter().position(|link| !link.shut) {
            Some(link) => Err(format!("all is closed, and connection {link} is open")),
            None => Ok(()),
        }
    }
}
