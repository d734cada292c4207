//! Quiescence of the world, and the checks at this time.

use super::target::TargetAvailability;
use super::world::NvmeClientWorld;
use crate::model::Violation;
use crate::remote_disk::machine::RemoteDiskMachine;
use crate::remote_disk::run::RemoteDiskWorld;
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

impl RemoteDiskWorld for NvmeClientWorld {
    fn machine(&self) -> &RemoteDiskMachine {
        &self.machine
    }

    fn machine_mut(&mut self) -> &mut RemoteDiskMachine {
        &mut self.machine
    }

    fn one_step(&mut self) -> Result<(), Violation> {
        self.step_once()
    }

    fn calm_servers(&mut self) {
        for t in 0..self.targets.len() {
            if self.targets[t].mode != TargetAvailability::Up {
                self.restore(t);
            }
            self.set_ana_state(t, AnaState::Optimized);
            self.targets[t].finish_hung(self.machine.now);
            self.targets[t].own.iter().for_each(|own| own.set_calm(true));
        }
    }

    fn rouse_servers(&mut self) {
        self.targets.iter().flat_map(|target| &target.own).for_each(|own| own.set_calm(false));
    }

    /// Checks that idle cores sleep between Keep Alives, and that the paths know the size of their
    /// namespace.
    fn check_idle(&mut self) -> Result<(), Violation> {
        // Associations that were lost a moment ago are made again first.
        self.machine.idle_until = Some(self.machine.now + RECONNECT_MAX);
        self.step_until("a quiet time", |world| world.machine.idle_until.is_none())?;
        let (from, until) = (self.machine.turns, self.machine.now + Nanos(self.kato().0 * ALONE_TIMEOUTS));
        self.machine.idle_until = Some(until);
        self.step_until("nothing", |world| world.machine.idle_until.is_none())?;
        let (turns, paths) =
            (self.machine.turns - from, (self.targets.len() * (self.machine.cores.len() + 1)) as u64);
        // If udm checks paths, it continues to do so.
        let looks = self.machine.devices.iter().any(|device| device.checks);
        if !looks && turns > TURNS_ALONE * paths * ALONE_TIMEOUTS {
            return Err(format!("{turns} turns of cores at rest, with {paths} lanes"));
        }
        for (t, path) in self.machine.paths.iter().enumerate() {
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

    fn reinstate_all(&mut self) -> Result<(), Violation> {
        (0..self.machine.devices.len()).try_for_each(|device| self.reinstate(device, true))
    }

    fn end_servers(&mut self) -> Result<(), Violation> {
        self.end_own_targets()
    }
}
