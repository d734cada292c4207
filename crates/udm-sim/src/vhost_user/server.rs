//! The life of a server: it starts, ends in order, or is killed.

use super::machine::RingGuest;
use super::world::{ServerState, VhostUserWorld};
use crate::disk::SimDisk;
use crate::environment::lock_environment;
use crate::model::Violation;
use crate::nbd::ring_core::{NumberedPathResolver, RunningDeviceChange, SteppedRingCore};
use std::io;
use std::sync::Arc;
use udm_core::{DevNo, Nanos};
use udm_dm::{MappedDevice, Table};
use udm_frontends::nbd::{Export, Exports};
use udm_runtime::{ProcessCores, TemporaryCoreIo};

impl VhostUserWorld {
    /// Creates the cores, the devices and the exports. The devices are being resumed afterwards.
    pub(super) fn start_server(&mut self) -> Result<(), Violation> {
        self.say("a server starts");
        let failed = |e: io::Error| e.to_string();
        self.base = udm_buf::slab_count::thread_live_slab_bytes();
        self.core_set = ProcessCores::new(self.count).map_err(failed)?;
        self.exports = Arc::new(Exports::new());
        self.set_turn(None);
        self.state = ServerState::Serving;
        for id in 0..self.count {
            let core = SteppedRingCore::new(&self.core_set, id, &self.net, self.latency, &mut self.schedule);
            self.cores.push(Some(core));
        }
        for m in 0..self.machines.len() {
            let (name, number) = (format!("d{m}"), DevNo { major: 253, minor: m as u32 });
            let mapped = MappedDevice::new(&name, None, number).map_err(|e| e.to_string())?;
            let words = format!("0 {} linear p{m} 0", self.machines[m].disk.sectors);
            let lines = udm_wire::table::parse_table(&words).map_err(|e| format!("{words}: {e}"))?;
            let paths = self.paths.iter().map(|path| path.clone() as _).collect();
            let mut names = NumberedPathResolver { letter: 'p', paths };
            let table = Table::build(udm_targets::TARGETS, &lines, &mut names, &TemporaryCoreIo, self.count)
                .map_err(|e| format!("{words}: {e}"))?;
            mapped.load(table).map_err(|e| e.to_string())?;
            let change = RunningDeviceChange::start(|wake| mapped.resume(wake)).map_err(|e| e.to_string())?;
            self.changes.push(change);
            let export = Export::new(&name, "", false, mapped.clone()).map_err(|e| e.to_string())?;
            self.exports.add(export).map_err(|e| e.to_string())?;
            self.devices[m] = Some(mapped);
        }
        Ok(())
    }

    /// Kills the server, or cuts the power. What it does until its cores have ended has no effect:
    /// the memory of the machines is restored afterwards.
    pub(super) fn kill(&mut self, in_turn: bool) {
        self.is_power_cut = self.control.one_in(4);
        self.say(if self.is_power_cut { "the power fails" } else { "the server is killed" });
        self.counts.kills[0] += 1;
        self.counts.kills[1] += u64::from(in_turn);
        self.counts.crashes += u64::from(self.is_power_cut);
        self.state = ServerState::Killed;
        self.copies = self.machines.iter().map(super::machine::Machine::copy).collect();
        for guest in self.machines.iter().flat_map(|machine| &machine.guests) {
            if let RingGuest::Orderly(guest) = guest {
                self.counts.in_flight += guest.requests.len() as u64;
            }
        }
        let mut env = lock_environment(&self.env);
        (env.crashes, env.dead) = (env.crashes + 1, true);
        if self.is_power_cut {
            let crate::environment::Env { disks, chance, .. } = &mut *env;
            disks.iter_mut().for_each(|disk| disk.crash(chance));
        }
    }

    /// Tells the cores to end. The sessions have ended, or do not matter any more.
    pub(super) fn stop_cores(&mut self) {
        self.restores.clear();
        (0..self.paths.len()).for_each(|p| self.restore(p));
        self.set_turn(None);
        self.core_set.end();
        self.core_set.stop(Nanos(20_000_000_000));
    }

    /// True if all cores have ended.
    pub(super) fn is_stopped(&self) -> bool {
        self.cores.iter().all(|core| core.as_ref().is_some_and(|core| core.over))
    }

    /// Drops what is left of a server whose cores have ended, and checks that it held nothing.
    pub(super) fn drop_server(&mut self) -> Result<(), Violation> {
        self.machines.iter_mut().for_each(super::machine::Machine::forget_connection);
        self.cores.clear();
        self.changes.clear();
        let users = self.exports.all().iter().map(|export| export.users()).sum::<usize>();
        if users > 0 {
            return Err(format!("the server has ended, and its devices have {users} users"));
        }
        self.exports = Arc::default();
        self.devices.iter_mut().for_each(|device| *device = None);
        let lanes = lock_environment(&self.env).paths.iter().map(|path| path.lanes).sum::<usize>();
        if lanes > 0 {
            return Err(format!("the server has ended, and {lanes} lanes of its disks are open"));
        }
        let live = udm_buf::slab_count::thread_live_slab_bytes() - self.base;
        if live != 0 {
            return Err(format!("the server has ended, but {live} bytes of its memory are still allocated"));
        }
        Ok(())
    }

    /// Restores the memory of the machines as it was when the server was killed. After a power cut
    /// the machines begin again.
    pub(super) fn forget_killed_server(&mut self) {
        let copies = std::mem::take(&mut self.copies);
        for (machine, copy) in self.machines.iter_mut().zip(&copies) {
            machine.restore(copy);
            machine.is_rebooting |= self.is_power_cut || !machine.has_record;
        }
        if self.is_power_cut {
            self.model.crash(self.step);
            for guest in self.machines.iter_mut().flat_map(|machine| &mut machine.guests) {
                if let RingGuest::Orderly(guest) = guest {
                    guest.requests.clear();
                }
            }
        }
        let mut env = lock_environment(&self.env);
        if self.is_power_cut {
            env.disks.iter_mut().for_each(SimDisk::start);
        }
        env.dead = false;
    }

    /// Ends the connection of machine `m`, whose session has ended with `outcome`.
    pub(super) fn end_session(&mut self, m: usize, outcome: io::Result<bool>) -> Result<(), Violation> {
        let machine = &mut self.machines[m];
        machine.is_in_step = false;
        if self.state == ServerState::Killed {
            return Ok(());
        }
        let (has_left, may_fail) = (machine.has_left, machine.may_fail);
        machine.forget_connection();
        if !has_left {
            // All requests are complete, so this is where the rings continue.
            machine.bases = machine.used_bases();
        }
        let how = outcome.as_ref().map_or_else(ToString::to_string, |_| "its front end left".into());
        self.say(format!("the session of machine {m} ends: {how}"));
        match outcome {
            Err(error) if !may_fail => Err(format!("machine {m} is disconnected: {error}")),
            _ => Ok(()),
        }
    }
}
