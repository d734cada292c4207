//! Checks of the maps of changes since a checkpoint. If a device and the checkpoint certainly
//! differ in a sector, the map must show it as changed. If the checkpoint no longer exists, the map
//! must show all sectors as changed.

use super::world::SnapshotWorld;
use crate::model::Violation;
use std::sync::Arc;
use udm_core::{ChangeTrackingCheckpoint, Device as _, Extents, RangeChangeStatus, Sector, Sectors};
use udm_dm::MappedDevice;

/// Steps between two checks.
const EVERY: u64 = 16;

/// Maximum number of checkpoints held, the latest ones.
const HELD_MAX: usize = 8;

/// A checkpoint held by a client, which does not know the snapshot's later state.
pub(super) struct ClientHeldCheckpoint {
    /// The volume whose device returned the checkpoint.
    of: usize,
    /// The snapshot that holds the data of the checkpoint, and its creation time in `since`.
    kept: usize,
    since: u64,
    key: ChangeTrackingCheckpoint,
}

impl SnapshotWorld {
    /// Queries the map of one device, a different one each time.
    pub(super) fn look_at_maps(&mut self) -> Result<(), Violation> {
        let look = self.machine.step / EVERY;
        if self.power.off || !self.machine.step.is_multiple_of(EVERY) {
            return Ok(());
        }
        let side = look as usize % self.sides.len();
        for device in self.devices_of(side) {
            for key in device.checkpoints() {
                let kept = key.name.strip_prefix('s').and_then(|n| n.parse::<usize>().ok());
                let Some(kept) = kept.filter(|kept| *kept < self.sides.len()) else {
                    return Err(format!(
                        "s{side} has a checkpoint {:?}, but there is no such snapshot",
                        key.name
                    ));
                };
                // A change that makes the snapshot live, or ends it, may be in progress.
                if self.sides[kept].live {
                    self.held.insert(
                        0,
                        ClientHeldCheckpoint { of: side, kept, since: self.sides[kept].since, key },
                    );
                    self.held.truncate(HELD_MAX);
                }
            }
        }
        let Some(held) = self.held.get(look as usize % HELD_MAX) else { return Ok(()) };
        for device in self.devices_of(held.of) {
            self.compare_map(held, &device, look)?;
        }
        self.counts.maps += 1;
        Ok(())
    }

    fn devices_of(&self, side: usize) -> Vec<Arc<MappedDevice>> {
        let side = &self.sides[side];
        [&side.mapped, &side.upper].into_iter().flatten().cloned().collect()
    }

    fn compare_map(
        &self,
        held: &ClientHeldCheckpoint,
        device: &MappedDevice,
        look: u64,
    ) -> Result<(), Violation> {
        let (one, other) = (&self.sides[held.of], &self.sides[held.kept]);
        let over = other.mapped.is_none() || other.since != held.since;
        // During a merge into a snapshot, its upper device shows data that the snapshot itself does
        // not have yet.
        let known = other.live && one.merging.is_none() && other.merging.is_none();
        let len = one.sectors.min(device.limits().size.0);
        let from = if look.is_multiple_of(3) { look % len.max(1) } else { 0 };
        let mut found = Extents::new(if look.is_multiple_of(5) { 3 } else { usize::MAX });
        device.changed(&held.key, Sector(from), Sectors(len - from), &mut found);
        let (mut at, cells) = (from, &self.machine.model.cells);
        for run in found.list() {
            for sector in at..at + run.len.0 {
                let [a, b] = [held.of, held.kept].map(|side| cells.index(side, sector));
                let differ = over || known && !cells.may_be_equal(a, b, 2 * self.machine.step);
                if run.content == RangeChangeStatus::Same && differ {
                    let why = if over { "which no longer exists" } else { "and they differ" };
                    return Err(format!(
                        "s{} says that sector {sector} has not changed since s{}, {why}:{}\n  and{}",
                        held.of,
                        held.kept,
                        cells.describe(a),
                        cells.describe(b)
                    ));
                }
            }
            at += run.len.0;
        }
        match at {
            _ if at == from && len > from => Err(format!("s{} returned an empty map", held.of)),
            _ if at > len => Err(format!("s{} returned a map of {at} sectors for {len} sectors", held.of)),
            _ => Ok(()),
        }
    }
}
