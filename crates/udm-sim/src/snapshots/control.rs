//! The control side of devices: tables, suspends, resumes, messages and status. Each operation runs
//! to its end while the cores continue.

use super::volumes::SnapshotCreatingTable;
use super::world::SnapshotWorld;
use crate::control::DeviceResolver;
use crate::environment::lock_environment;
use crate::helper_threads::MARKED;
use crate::model::Violation;
use crate::power_cuts::{CancellableResult, PowerCutWorld as _};
use crate::wakeable::create_transition_wake_flag;
use std::sync::Arc;
use udm_core::DevNo;
use udm_core::errno::{EBUSY, EINTR};
use udm_dm::{DeviceSetTransition, MappedDevice};

/// First minor number of the devices over snapshots.
const UPPER: u32 = 64;

impl SnapshotWorld {
    /// Creates the device of volume `side`, without a table.
    pub(super) fn device(&mut self, side: usize) -> Result<Arc<MappedDevice>, Violation> {
        let number = DevNo { major: 253, minor: side as u32 };
        let mapped = MappedDevice::new(&format!("s{side}"), None, number).map_err(|e| e.to_string())?;
        self.sides[side].mapped = Some(mapped.clone());
        Ok(mapped)
    }

    /// Loads the snapshot table into the device of `side`. Returns false if storage failed.
    pub(super) fn load_snapshot(
        &mut self,
        side: usize,
        coming: Option<Vec<usize>>,
    ) -> Result<bool, Violation> {
        let Some(device) = self.sides[side].mapped.clone() else { return Ok(false) };
        let line = self.sides[side].line.clone();
        let instant = coming.map(|group| (self.sides[side].origin, group));
        self.load(side, &device, &format!("snapshot {line}"), instant)
    }

    /// Loads the base line of `side` into its top device. Returns false if storage failed.
    pub(super) fn load_base(
        &mut self,
        side: usize,
        kind: &str,
        from: Option<usize>,
    ) -> Result<bool, Violation> {
        let Some(device) = self.sides[side].door().cloned() else { return Ok(false) };
        let line = self.sides[side].base.clone();
        self.load(side, &device, &format!("{kind} {line}"), from.map(|from| (from, vec![side])))
    }

    fn load(
        &mut self,
        side: usize,
        device: &Arc<MappedDevice>,
        words: &str,
        instant: Option<(usize, Vec<usize>)>,
    ) -> Result<bool, Violation> {
        let words = match words.contains('\n') {
            true => words.to_owned(),
            false => format!("0 {} {words}", self.sides[side].sectors),
        };
        self.machine.say(format!("s{side} load: {words}"));
        let floors = self.sides.iter().map(|side| side.floor.clone());
        let devices = self.sides.iter().map(|side| side.mapped.clone()).chain(floors).collect();
        let table = match self.build_table(&words, devices)? {
            Ok(table) => table,
            Err(None) => return Ok(false),
            Err(Some(error)) if error.to_string().contains(MARKED) => {
                self.machine.say(format!("it is refused: {error}"));
                return Ok(false);
            }
            Err(Some(error)) => return Err(format!("{words}: {error}")),
        };
        if let Some((from, group)) = instant {
            let (device, table) = (device.clone(), Arc::downgrade(&table));
            self.sides[side].coming = Some(SnapshotCreatingTable { device, table, from, group });
        }
        device.load(table).map_err(|e| format!("{words}: {e}"))?;
        Ok(true)
    }

    /// Resumes these devices in one change.
    pub(super) fn resume(&mut self, devices: &[Arc<MappedDevice>]) -> Result<CancellableResult, Violation> {
        let (woken, wake) = create_transition_wake_flag();
        self.machine.say(format!("resume of {}", join_device_names(devices)));
        let noflush = self.machine.control.one_in(2);
        self.machine.set_turn(None);
        let outcome = self.finish(DeviceSetTransition::resume(devices, noflush, &wake), &woken);
        self.sides.iter_mut().for_each(|side| side.look_at_limits());
        outcome
    }

    pub(super) fn must_resume(&mut self, devices: &[Arc<MappedDevice>]) -> Result<(), Violation> {
        for _ in 0..1000 {
            match self.resume(devices)? {
                Ok(()) => return Ok(()),
                Err(error) if error.errno == EINTR => {}
                Err(error) => return Err(format!("resume of {}: {error}", join_device_names(devices))),
            }
        }
        Err(format!("resume of {} is cancelled each time", join_device_names(devices)))
    }

    pub(super) fn suspend(&mut self, device: &Arc<MappedDevice>) -> Result<CancellableResult, Violation> {
        let (woken, wake) = create_transition_wake_flag();
        let devices = [device.clone()];
        self.machine.say(format!("suspend of {}", join_device_names(&devices)));
        let noflush = self.machine.control.one_in(2);
        self.machine.set_turn(None);
        let outcome = self.finish(DeviceSetTransition::suspend(&devices, noflush, &wake), &woken)?;
        self.counts.suspends += u64::from(outcome.is_ok());
        Ok(outcome)
    }

    /// Removes a device that is not open.
    pub(super) fn leave(&mut self, device: Arc<MappedDevice>) -> Result<(), Violation> {
        let devices = [device];
        loop {
            let (woken, wake) = create_transition_wake_flag();
            self.machine.set_turn(None);
            match self.finish(DeviceSetTransition::remove(&devices, &wake), &woken)? {
                Ok(()) => return Ok(()),
                Err(error) if error.errno == EINTR => {}
                Err(error) => {
                    return Err(format!("{} can't be removed: {error}", join_device_names(&devices)));
                }
            }
        }
    }

    /// Sends a message to snapshot `side`. Returns false if the snapshot is suspended.
    pub(super) fn send_message(&mut self, side: usize, words: &str) -> Result<bool, Violation> {
        let Some(mapped) = self.sides[side].mapped.clone() else { return Ok(false) };
        self.machine.say(format!("s{side} message: {words}"));
        // After a message, growth is tried again.
        lock_environment(&self.machine.env).disks[side].stuck = false;
        let all: Vec<String> = words.split(' ').map(str::to_string).collect();
        let mut names = DeviceResolver {
            paths: self.machine.paths.clone(),
            fronts: self.machine.fronts.clone(),
            devices: Vec::new(),
        };
        self.machine.set_turn(None);
        match mapped.send(0, &all, &mut names, &*self.machine.inboxes) {
            Ok(_) => Ok(true),
            Err(error) if error.errno == EBUSY => Ok(false),
            Err(error) => Err(format!("s{side} message {words}: {error}")),
        }
    }

    /// Returns the status of snapshot `side`, without the target type.
    pub(super) fn status(&self, side: usize) -> String {
        self.sides[side].mapped.as_ref().map(|mapped| describe_device_state(mapped)).unwrap_or_default()
    }

    /// Returns the status of the top device of an origin, without the target type.
    pub(super) fn base_status(&self, side: usize) -> String {
        self.sides[side].door().map(|door| describe_device_state(door)).unwrap_or_default()
    }

    /// Copies the content of origins for snapshots that became live. Those of one change have the
    /// same instant.
    pub(super) fn look_at_tables(&mut self) -> Result<(), Violation> {
        for side in 0..self.sides.len() {
            let is_live = |coming: &SnapshotCreatingTable| {
                coming.device.live().is_some_and(|live| Arc::as_ptr(&live) == coming.table.as_ptr())
            };
            if !self.sides[side].coming.as_ref().is_some_and(is_live) {
                continue;
            }
            let group =
                self.sides[side].coming.as_ref().map(|coming| coming.group.clone()).unwrap_or_default();
            let waits = |&&side: &&usize| self.sides[side].coming.as_ref().is_some_and(|c| !is_live(c));
            if let Some(late) = group.iter().find(waits).filter(|_| !self.is_dead()) {
                return Err(format!("s{side} has its instant, and s{late} of the same change has none"));
            }
            if let Some(coming) = self.sides[side].coming.take().filter(|_| !self.is_dead()) {
                self.take_instant(side, &coming);
            }
        }
        Ok(())
    }

    fn take_instant(&mut self, side: usize, coming: &SnapshotCreatingTable) {
        let from = coming.from;
        let now = 2 * self.machine.step;
        if from != self.sides[side].origin || self.sides[side].origin == side {
            // The snapshot is merged into its origin, so its data replaces that of the origin.
            self.sides[from].live = false;
            (self.sides[side].merging, self.sides[side].whole_runs) = (Some(from), true);
            self.sides[side].refused = self.sides.iter().any(|other| other.origin == side && other.refuses());
            if self.base_status(side) == "Invalid" {
                // The snapshot became invalid before the merge, so the origin is unchanged.
                self.machine.say(format!("s{from} is invalid, and nothing of it comes to s{side}"));
                return;
            }
            self.machine.say(format!("s{side} is what s{from} is"));
            // The content below stays as it was, for a snapshot that is created during the merge.
            let (sectors, shadow) = (self.sides[side].sectors, self.sides.len() + side);
            self.machine.model.cells.copy(&[side], shadow, sectors, now, |_, _| true);
            // The model does not know which data is in the store.
            self.machine.model.cells.copy(&[from], side, sectors, now, |_, _| true);
            self.counts.merges += 1;
            return;
        }
        self.machine.say(format!("s{side} is what s{from} is"));
        let amid = self.sides[from].merging.is_some();
        let shadow = self.sides.len() + from;
        let all = [from, shadow];
        let sources = if amid { &all[..] } else { &all[..1] };
        let on_disk = self.sides[from].origin == from;
        let env = lock_environment(&self.machine.env);
        let reached = |sector, stamp| !on_disk || env.disks[from].has(sector, stamp);
        self.machine.model.cells.copy(sources, side, self.sides[side].sectors, now, reached);
        // A run that failed or was interrupted may have left intermediate data.
        for sector in (0..self.sides[side].sectors).filter(|_| amid && on_disk) {
            let cell = self.machine.model.cells.index(side, sector);
            for stamp in env.disks[from].contents(sector) {
                self.machine.model.cells.may_hold(cell, stamp, now);
            }
        }
        drop(env);
        let one = &mut self.sides[side];
        (one.live, one.since, one.invalid) = (true, now, None);
        self.counts.made += 1;
        self.counts.stacked += u64::from(!on_disk);
        self.counts.amid += u64::from(amid);
        self.counts.grouped += u64::from(coming.group.len() > 1);
    }
}

fn join_device_names(devices: &[Arc<MappedDevice>]) -> String {
    let names: Vec<String> = devices.iter().map(|device| device.name()).collect();
    names.join(", ")
}

fn describe_device_state(device: &MappedDevice) -> String {
    device.status_text().splitn(4, ' ').nth(3).unwrap_or_default().trim().to_owned()
}

/// Parses the numbers of a status: used sectors, total sectors, and metadata sectors.
pub(super) fn parse_snapshot_status(status: &str) -> Option<(u64, u64, u64)> {
    let (use_, metadata) = status.split_once(' ')?;
    let (used, total) = use_.split_once('/')?;
    Some((used.parse().ok()?, total.parse().ok()?, metadata.parse().ok()?))
}

impl SnapshotWorld {
    /// Creates the device below origin `side`, if it must have one. It maps the disk in several
    /// lines, so requests are split. Returns false if storage failed.
    pub(super) fn put_floor(&mut self, side: usize) -> Result<bool, Violation> {
        let Some(lines) = self.sides[side].floor_lines.clone() else { return Ok(true) };
        let number = DevNo { major: 253, minor: (self.sides.len() + side) as u32 };
        let floor = MappedDevice::new(&format!("f{side}"), None, number).map_err(|e| e.to_string())?;
        if !self.load(side, &floor, &lines, None)? {
            return Ok(false);
        }
        self.must_resume(std::slice::from_ref(&floor))?;
        self.sides[side].floor = Some(floor);
        Ok(true)
    }

    /// Creates a `snapshot-origin` device over snapshot `side`, if it must have one.
    pub(super) fn put_upper(&mut self, side: usize) -> Result<(), Violation> {
        if !self.sides[side].stacked || self.sides[side].upper.is_some() || self.is_dead() {
            return Ok(());
        }
        let number = DevNo { major: 253, minor: UPPER + side as u32 };
        let upper = MappedDevice::new(&format!("u{side}"), None, number).map_err(|e| e.to_string())?;
        self.sides[side].upper = Some(upper);
        Ok(())
    }
}
