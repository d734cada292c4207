//! Actions on snapshots: create, reload, merge, remove and suspend; and path trouble.

use super::control::parse_snapshot_status;
use super::volumes::StoreFullPolicy;
use super::world::SnapshotWorld;
use crate::environment::lock_environment;
use crate::model::Violation;
use crate::plan::DisturbanceClass;
use crate::power_cuts::{PowerCutWorld as _, STEPS_MAX};
use crate::turn::MachineWorld as _;
use std::sync::Arc;
use udm_core::OwnWork;
use udm_core::errno::EINTR;
use udm_dm::MappedDevice;

impl SnapshotWorld {
    /// Performs a random action.
    pub(super) fn change_something(&mut self) -> Result<(), Violation> {
        let stores = self.origins()..self.sides.len();
        let side = self.machine.control.between(stores.start as u64, stores.end as u64 - 1) as usize;
        let (origin, there) = (self.sides[side].origin, self.sides[side].mapped.is_some());
        let merged_into = self.sides[origin].merging;
        self.sides[side].hot = self.machine.control.any() >> 1;
        self.sides[origin].hot = self.machine.control.any() >> 1;
        match self.machine.control.below(10) {
            0..8 if merged_into == Some(side) => self.end_merge(origin),
            _ if merged_into == Some(side) => self.pause(origin),
            0..7 if !there => self.make_some(side),
            0..2 if there && self.on(DisturbanceClass::Remove) && !self.has_snapshots(side) => {
                self.remove(side)
            }
            2..4 if there && self.on(DisturbanceClass::Reload) => self.reload(side),
            4..6 if merged_into.is_none() && self.on(DisturbanceClass::Merge) => self.merge(side),
            6 if there && self.sides[side].small => self.grow(side).map(drop),
            _ if !self.on(DisturbanceClass::Suspend) => Ok(()),
            _ => {
                let side = if self.machine.control.one_in(2) { side } else { origin };
                self.pause(side)
            }
        }
    }

    /// Clears the header of the store of `side`.
    pub(super) fn wipe(&mut self, side: usize) {
        let mut env = lock_environment(&self.machine.env);
        let disk = &mut env.disks[side];
        (0..disk.block).for_each(|sector| disk.blank(sector));
    }

    /// True if `side` has or may get a snapshot.
    pub(super) fn has_snapshots(&self, side: usize) -> bool {
        let of = |other: usize| other != side && self.sides[other].origin == side;
        (0..self.sides.len()).any(|other| of(other) && self.sides[other].mapped.is_some())
            || self.sides[side].merging.is_some()
    }

    /// Creates snapshot `side`, sometimes together with others in one change.
    fn make_some(&mut self, side: usize) -> Result<(), Violation> {
        let mut group = vec![side];
        if self.machine.control.one_in(3) {
            let free = |&other: &usize| other != side && self.sides[other].mapped.is_none();
            group.extend((self.origins()..self.sides.len()).filter(free));
        }
        // The origin must exist before the change, and a store that is being merged is not free.
        group.retain(|&one| {
            let origin = &self.sides[self.sides[one].origin];
            let merged = self.sides.iter().any(|other| other.merging == Some(one));
            let ready = origin.door().is_some_and(|door| door.live().is_some());
            // After an interrupted run of a merge, the model does not know the content below.
            let on_disk = origin.origin == self.sides[one].origin;
            let whole = on_disk || origin.whole_runs && !self.power.fails;
            let amid = origin.merging.is_none() || whole && origin.merging != Some(one);
            ready && amid && !merged
        });
        if group.is_empty() { Ok(()) } else { self.make(&group) }
    }

    /// Creates snapshots, all of the same instant.
    fn make(&mut self, group: &[usize]) -> Result<(), Violation> {
        let mut loaded = Vec::new();
        for &side in group {
            self.draw_line(side);
            self.wipe(side);
            let size = self.first_size(side);
            lock_environment(&self.machine.env).disks[side].show(size);
            self.device(side)?;
            match self.load_snapshot(side, Some(group.to_vec())) {
                Ok(true) => loaded.push(side),
                // A store of three chunks or less is too small.
                Err(wrong) if self.sides[side].small && wrong.contains("at least two chunks") => {
                    self.sides[side].mapped = None;
                }
                Ok(false) => self.sides[side].mapped = None,
                Err(wrong) => return Err(wrong),
            }
        }
        if loaded.is_empty() {
            return Ok(());
        }
        for &side in &loaded {
            self.sides[side].coming.iter_mut().for_each(|coming| coming.group = loaded.clone());
        }
        let outcome = self.resume(&self.devices(&loaded))?;
        for side in loaded {
            match &outcome {
                Ok(()) if self.sides[side].live || self.is_dead() => self.begin_use(side)?,
                Ok(()) => return Err(format!("s{side} was resumed and has no table")),
                Err(error) if error.errno == EINTR || self.is_dead() => {
                    (self.sides[side].mapped, self.sides[side].coming) = (None, None);
                }
                Err(error) => return Err(format!("resume of s{side}: {error}")),
            }
        }
        Ok(())
    }

    pub(super) fn devices(&self, sides: &[usize]) -> Vec<Arc<MappedDevice>> {
        sides.iter().filter_map(|&side| self.sides[side].mapped.clone()).collect()
    }

    /// Draws the table line of a new snapshot, and its policy for a full store.
    fn draw_line(&mut self, side: usize) {
        let block = self.sides[side].block;
        let chunk = match self.sides[side].sectors {
            0..=200 => self.machine.control.pick(&[1, 1, 2, 4, 8]),
            _ => self.machine.control.pick(&[1, 8, 16, 64]),
        };
        let small = self.sides[side].small || self.sides[side].grows;
        // Without writes to the origin, a full store makes its snapshot read-only. Otherwise a
        // write of the origin usually makes the snapshot invalid first.
        let kinds = match small && self.images {
            true => ["P", "PO", "PO", "PO", "PO", "N"],
            false => ["P", "P", "P", "PO", "PO", "N"],
        };
        let mut kind = self.machine.control.pick(&kinds);
        if !self.on(DisturbanceClass::Crash) && self.machine.plan.cut.is_some() && kind == "N" {
            kind = "P";
        }
        let features = match self.machine.control.below(4) {
            0 if self.on(DisturbanceClass::Trim) => " 1 discard_zeroes_cow",
            1 if self.on(DisturbanceClass::Trim) => " 2 discard_zeroes_cow discard_passdown_origin",
            _ => "",
        };
        let policies = [
            StoreFullPolicy::Invalidate,
            StoreFullPolicy::Invalidate,
            StoreFullPolicy::Pause,
            StoreFullPolicy::Fail,
        ];
        let on_full = if small { self.machine.control.pick(&policies) } else { StoreFullPolicy::Invalidate };
        let origin = self.word(self.sides[side].origin);
        let chunk = chunk.max(block);
        let one = &mut self.sides[side];
        (one.line, one.on_full) = (format!("{origin} p{side} {kind} {chunk}{features}"), on_full);
    }

    /// Starts to use a snapshot that became live.
    pub(super) fn begin_use(&mut self, side: usize) -> Result<(), Violation> {
        if self.is_dead() {
            return Ok(());
        }
        self.tell_settings(side)?;
        self.put_upper(side)?;
        if let Some(upper) = self.sides[side].upper.clone() {
            if !self.load_base(side, "snapshot-origin", None)? {
                return if self.is_dead() { Ok(()) } else { Err(format!("u{side} can't be loaded")) };
            }
            self.must_resume(&[upper])?;
        }
        self.open(side)
    }

    /// Sends the settings of a snapshot. A snapshot keeps them in memory only.
    pub(super) fn tell_settings(&mut self, side: usize) -> Result<(), Violation> {
        // A store that was full before the settings arrived acted by default.
        let has_room = |(used, total, _): (u64, u64, u64)| used + 64 < total;
        let grows = self.sides[side].grows && !self.sides[side].small;
        let in_time = parse_snapshot_status(&self.status(side)).is_some_and(|now| grows || has_room(now));
        self.sides[side].ends_full = !in_time || self.sides[side].on_full == StoreFullPolicy::Invalidate;
        let (origin, refuses) = (self.sides[side].origin, self.sides[side].refuses());
        self.sides[origin].refused |= refuses;
        match self.sides[side].on_full {
            StoreFullPolicy::Invalidate => {}
            StoreFullPolicy::Pause => drop(self.send_message(side, "set on_full pause")?),
            StoreFullPolicy::Fail => drop(self.send_message(side, "set on_full fail")?),
        }
        if self.machine.control.one_in(2) {
            self.send_message(side, "set copy_memory 64k")?;
        }
        Ok(())
    }

    /// Stops requests to `side`, waits for those in flight, and closes its lanes.
    fn close(&mut self, side: usize) -> Result<(), Violation> {
        self.sides[side].open = false;
        let from = self.machine.step;
        let busy = |world: &SnapshotWorld| {
            let mut lanes = world.machine.cores.iter().flat_map(|c| &c.open).filter(|o| o.device == side);
            lanes.any(|o| o.in_flight > 0 || o.lane.own_work() == OwnWork::Required)
        };
        while busy(self) {
            if self.machine.step - from > STEPS_MAX {
                return Err(format!("s{side} does not come to rest, and {} waits", self.waiting()));
            }
            self.one_step()?;
        }
        for core in 0..self.machine.cores.len() {
            self.machine.set_turn(Some(core));
            self.machine.cores[core].open.retain(|open| open.device != side);
        }
        self.machine.set_turn(None);
        Ok(())
    }

    fn remove(&mut self, side: usize) -> Result<(), Violation> {
        self.machine.say(format!("s{side} is removed"));
        self.close(side)?;
        self.drop_side(side)?;
        // If the power was cut meanwhile, the snapshot may or may not be removed.
        self.sides[side].live = false;
        if !self.is_dead() {
            self.counts.removed += 1;
            self.is_linear(self.sides[side].origin)?;
        }
        Ok(())
    }

    /// Removes the devices of `side`, which are not open.
    fn drop_side(&mut self, side: usize) -> Result<(), Violation> {
        if let Some(upper) = self.sides[side].upper.take() {
            self.leave(upper)?;
        }
        if let Some(mapped) = self.sides[side].mapped.clone() {
            self.leave(mapped)?;
        }
        (self.sides[side].mapped, self.sides[side].coming) = (None, None);
        Ok(())
    }

    /// Checks that an origin without snapshots is a linear mapping of its disk, without lanes of
    /// stores.
    pub(super) fn is_linear(&self, origin: usize) -> Result<(), Violation> {
        if self.has_snapshots(origin) {
            return Ok(());
        }
        let table = self.sides[origin].door().and_then(|door| door.live());
        match table.is_some_and(|table| table.targets()[0].target.data_path().into_linear().is_some()) {
            true => Ok(()),
            false => Err(format!("s{origin} has no snapshots any more, and is not linear")),
        }
    }

    /// Loads a new table that takes the snapshot over.
    fn reload(&mut self, side: usize) -> Result<(), Violation> {
        if !self.load_snapshot(side, None)? {
            return Ok(());
        }
        match self.resume(&self.devices(&[side]))? {
            Ok(()) => self.counts.reloaded += 1,
            // An inactive table that waits for the snapshot would prevent others from taking it
            // over.
            Err(error) if error.errno == EINTR => {
                self.sides[side].mapped.iter().for_each(|mapped| mapped.clear());
            }
            Err(error) => return Err(format!("reload of s{side}: {error}")),
        }
        Ok(())
    }

    /// Suspends a device, and resumes it some time later.
    fn pause(&mut self, side: usize) -> Result<(), Violation> {
        let (door, own) = (self.sides[side].door().cloned(), self.sides[side].mapped.clone());
        let device = if self.machine.control.one_in(2) { door } else { own };
        let Some(device) = device else { return Ok(()) };
        if self.suspend(&device)?.is_err() {
            return Ok(());
        }
        for _ in 0..self.machine.control.below(60) {
            // With the power off, a suspended device makes no progress.
            if !self.is_dead() {
                self.one_step()?;
            }
        }
        self.must_resume(&[device])
    }

    /// Starts to merge snapshot `side` into its origin.
    fn merge(&mut self, side: usize) -> Result<(), Violation> {
        let origin = self.sides[side].origin;
        let Some(mapped) = self.sides[side].mapped.clone() else { return Ok(()) };
        if !self.sides[side].is_persistent() || self.has_snapshots(side) {
            return Ok(());
        }
        self.close(side)?;
        // The device above must release the snapshot first.
        if let Some(upper) = self.sides[side].upper.take() {
            self.leave(upper)?;
        }
        let usable = |world: &SnapshotWorld| !["Invalid", "Overflow"].contains(&&*world.status(side));
        if self.suspend(&mapped)?.is_err() || self.is_dead() || !usable(self) {
            if mapped.is_suspended() {
                self.must_resume(&[mapped])?;
            }
            return self.begin_use(side);
        }
        let merged = self.sides[side].line.clone();
        let base = std::mem::replace(&mut self.sides[origin].base, merged);
        let loaded = self.load_base(origin, "snapshot-merge", Some(side))?;
        let door: Vec<Arc<MappedDevice>> = self.sides[origin].door().cloned().into_iter().collect();
        let done = loaded && self.resume(&door)?.is_ok();
        if !done || self.sides[origin].merging.is_none() {
            (self.sides[origin].base, self.sides[origin].coming) = (base, None);
            door.iter().for_each(|door| door.clear());
            self.must_resume(&[mapped])?;
            return self.begin_use(side);
        }
        self.drop_side(side)
    }

    /// Ends the merge into `origin`, if nothing is left to merge.
    fn end_merge(&mut self, origin: usize) -> Result<(), Violation> {
        let Some(store) = self.sides[origin].merging else { return Ok(()) };
        let status = self.base_status(origin);
        let is_over = |(used, _, metadata)| used == metadata;
        if status != "Invalid" && !parse_snapshot_status(&status).is_some_and(is_over) {
            return Ok(());
        }
        let bare = self.word(origin);
        let line = std::mem::replace(&mut self.sides[origin].base, bare);
        let loaded = self.load_base(origin, "snapshot-origin", None)?;
        let door: Vec<Arc<MappedDevice>> = self.sides[origin].door().cloned().into_iter().collect();
        let done = loaded && self.resume(&door)?.is_ok();
        if !done || self.is_dead() {
            self.sides[origin].base = line;
            door.iter().for_each(|door| door.clear());
            return Ok(());
        }
        self.counts.merged += 1;
        self.sides[origin].merging = None;
        self.wipe(store);
        self.is_linear(origin)
    }

    /// Enlarges the small store of `side` to its maximum need. Returns false if it already has this
    /// size.
    pub(super) fn grow(&mut self, side: usize) -> Result<bool, Violation> {
        let before;
        {
            let mut env = lock_environment(&self.machine.env);
            let disk = &mut env.disks[side];
            if disk.size == disk.sectors() {
                return Ok(false);
            }
            before = disk.size;
            disk.show(disk.sectors());
            env.say(format!("disk {side} shows all of its sectors"));
        }
        // A suspended snapshot refuses the message, so this is tried again later.
        let accepted = self.send_message(side, "grown")?;
        if !accepted {
            lock_environment(&self.machine.env).disks[side].show(before);
        }
        self.counts.grown += u64::from(accepted);
        Ok(accepted)
    }

    /// Initial size of the store of a new snapshot. A store that grows starts with four chunks.
    fn first_size(&mut self, side: usize) -> u64 {
        let one = &mut self.sides[side];
        one.begin_growth();
        let chunk: u64 = one.line.split(' ').nth(3).and_then(|word| word.parse().ok()).unwrap_or(1);
        if one.grows { one.shown.min(4 * chunk) } else { one.shown }
    }

    /// Enlarges stores for which writes wait.
    pub(super) fn enlarge_full_stores(&mut self) -> Result<bool, Violation> {
        let mut grown = false;
        for side in self.origins()..self.sides.len() {
            let one = &self.sides[side];
            // A device that is being created again has no table yet, so it takes no message.
            let has_table = one.mapped.as_ref().is_some_and(|mapped| mapped.live().is_some());
            if one.on_full == StoreFullPolicy::Pause && one.live && has_table {
                grown |= self.grow(side)?;
            }
        }
        Ok(grown)
    }
}
