//! Inspection of devices, tables and log lines after each step.

use super::model::{DiskOrSnapshot, PersistentSnapshotModel, SnapshotFate};
use super::world::{ServerLifecycleWorld, ServerPhase};
use crate::log_capture;
use crate::model::Violation;
use std::path::{Path, PathBuf};
use udm_control::DeviceRegistry;
use udm_control::verbs::snapshot::{self, LostSnapshotPolicy};
use udm_core::{Device, DeviceId};
use udm_dm::{SnapshotState, Table};

/// The meaning of a live table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LiveTableKind {
    /// A disk; `copies` is true if writes copy for its snapshots.
    Disk { disk: usize, copies: bool },
    /// The snapshot in this store.
    Snapshot { store: String, disk: usize, state: SnapshotState },
    /// A disk into which the snapshot in this store is merged.
    Merge { store: String, disk: usize, state: SnapshotState },
    /// No table.
    Empty,
    /// A table that is not checked.
    Other,
}

/// A device, as the model sees it.
#[derive(Clone, Debug)]
pub(super) struct DeviceView {
    pub(super) id: DeviceId,
    pub(super) name: String,
    pub(super) kind: LiveTableKind,
    pub(super) sectors: u64,
    pub(super) suspended: bool,
}

impl DeviceView {
    /// True if clients may read and write the device.
    pub(super) fn is_served(&self) -> bool {
        match &self.kind {
            LiveTableKind::Disk { .. } | LiveTableKind::Merge { .. } => true,
            LiveTableKind::Snapshot { state, .. } => *state == SnapshotState::Valid,
            LiveTableKind::Empty | LiveTableKind::Other => false,
        }
    }
}

/// Returns the meaning of `table`, over the disks at `paths`.
fn classify_live_table(table: &Table, paths: &[PathBuf]) -> LiveTableKind {
    let [entry] = table.targets() else { return LiveTableKind::Other };
    let disk = |name: &str| paths.iter().position(|path| path == Path::new(name));
    if let Some(report) = entry.target.as_snapshot().map(|view| view.report()) {
        let Some(disk) = disk(&report.origin.name) else { return LiveTableKind::Other };
        let (store, state) = (report.store.name, report.state);
        return match entry.target.type_name() {
            "snapshot-merge" => LiveTableKind::Merge { store, disk, state },
            _ => LiveTableKind::Snapshot { store, disk, state },
        };
    }
    let below = entry.target.devices().into_iter().next().and_then(|used| disk(&used.device.name));
    let copies = match entry.target.type_name() {
        "snapshot-origin" => true,
        "linear" => false,
        _ => return LiveTableKind::Other,
    };
    below.map_or(LiveTableKind::Other, |disk| LiveTableKind::Disk { disk, copies })
}

/// Returns all devices of `registry`.
pub(super) fn list_devices(registry: &DeviceRegistry, paths: &[PathBuf]) -> Vec<DeviceView> {
    let seen = |mapped: std::sync::Arc<udm_control::registry::RegisteredDevice>| {
        let live = mapped.device.live();
        DeviceView {
            id: mapped.device.id(),
            name: mapped.device.name(),
            kind: live.as_ref().map_or(LiveTableKind::Empty, |table| classify_live_table(table, paths)),
            sectors: live.map_or(0, |table| table.limits().size.0),
            suspended: mapped.device.is_suspended(),
        }
    };
    let mut all: Vec<DeviceView> = registry.all_with_pending().into_iter().map(seen).collect();
    all.sort_by(|one, other| one.name.cmp(&other.name));
    all
}

impl ServerLifecycleWorld {
    /// Updates the model from the devices and the log.
    pub(super) fn look(&mut self) -> Result<(), Violation> {
        if self.phase == ServerPhase::Dying {
            log_capture::take_captured_log_lines();
            return Ok(());
        }
        let Some(server) = &self.server else { return Ok(()) };
        let paths: Vec<PathBuf> = self.model.origins.iter().map(|origin| origin.path.clone()).collect();
        self.view = list_devices(&server.registry, &paths);
        for snapshot in &mut self.model.snapshots {
            (snapshot.was_attached, snapshot.attached) = (snapshot.attached, false);
        }
        self.view_names = self.view.iter().map(|seen| (seen.id, seen.name.clone())).collect();
        let view = std::mem::take(&mut self.view);
        let is_disk = |seen: &&DeviceView| matches!(seen.kind, LiveTableKind::Disk { .. });
        let (disks, others): (Vec<&DeviceView>, Vec<&DeviceView>) = view.iter().partition(is_disk);
        let looked = others.into_iter().chain(disks).try_for_each(|seen| self.look_at(seen));
        self.view = view;
        looked?;
        self.listen()?;
        for one in self.model.snapshots.iter_mut().filter(|one| one.was_attached && !one.attached) {
            one.released_by.clone_from(&self.model.running);
        }
        let gives_up = self.policy == LostSnapshotPolicy::GiveUp;
        for snapshot in self.model.snapshots.iter_mut().filter(|one| gives_up && !one.attached) {
            snapshot.may_be_lost = true;
        }
        self.model.images().for_each(super::model::DiskImage::looked);
        for client in &mut self.clients {
            let seen = self.view.iter().find(|seen| seen.id == client.device);
            let same = seen.is_some_and(|seen| seen.sectors >= client.sectors && seen.is_served());
            client.excused |= !same;
        }
        Ok(())
    }

    fn look_at(&mut self, seen: &DeviceView) -> Result<(), Violation> {
        match &seen.kind {
            LiveTableKind::Snapshot { store, disk, state: SnapshotState::Valid } => {
                let known = self.model.in_store(store);
                let is_new = known.is_none_or(|at| {
                    let known = &self.model.snapshots[at];
                    known.fate == SnapshotFate::Gone || known.fate == SnapshotFate::Merged && known.over
                });
                let Some(at) = known.filter(|_| !is_new) else {
                    let origin = &self.model.origins[*disk].image;
                    // The store of a removed snapshot holds another point in time. In the middle of
                    // a merge the content of a disk is not known.
                    let merges = |one: &PersistentSnapshotModel| {
                        one.disk == *disk && one.fate == SnapshotFate::Merged && !one.over
                    };
                    let left = known.is_some_and(|at| self.model.snapshots[at].fate == SnapshotFate::Gone)
                        || self.model.snapshots.iter().any(merges);
                    let image = if left {
                        super::model::DiskImage::anything(origin.sectors())
                    } else {
                        origin.instant()
                    };
                    self.counts.made += 1;
                    self.machine.say(format!("a snapshot of o{disk} is in {}", last_component(store)));
                    let mut one = PersistentSnapshotModel::new(store.into(), *disk, image);
                    one.holder = Some(seen.id);
                    self.model.snapshots.push(one);
                    return Ok(());
                };
                let known = &mut self.model.snapshots[at];
                match known.fate {
                    SnapshotFate::Lost => {
                        return Err(format!("{} was lost, and is taken for valid", last_component(store)));
                    }
                    SnapshotFate::Merged => {
                        return Err(format!(
                            "{} is being merged, and a server has it as a snapshot",
                            last_component(store)
                        ));
                    }
                    _ => {}
                }
                if !self.attached_before.contains(store) {
                    self.attached_before.push(store.clone());
                    self.counts.attached_again += u64::from(self.counts.lives > 1);
                }
                known.attached = true;
                known.image.cut(seen.sectors);
                let before = known.holder.replace(seen.id);
                self.counts.handed_over +=
                    u64::from(known.was_attached && before.is_some_and(|before| before != seen.id));
                // A snapshot that a verb has released may still be listed until the verb is over.
                if !known.was_attached {
                    (known.fate, known.passed) = (SnapshotFate::Kept, false);
                }
                Ok(())
            }
            // A user has created this table, and the disk does not copy for it.
            LiveTableKind::Disk { disk, copies: false } => {
                let unseen = self.model.snapshots.iter_mut().filter(|one| {
                    let by_table = self
                        .view_names
                        .iter()
                        .any(|(id, name)| Some(*id) == one.holder && name.starts_with('x'));
                    one.attached && one.disk == *disk && by_table
                });
                unseen.for_each(|one| one.image.cut(0));
                Ok(())
            }
            LiveTableKind::Merge { store, disk, state } => {
                let Some(at) = self.model.in_store(store) else { return Ok(()) };
                let known = &mut self.model.snapshots[at];
                known.attached = true;
                known.over |= *state == SnapshotState::Merged;
                if known.fate == SnapshotFate::Merged {
                    return Ok(());
                }
                if known.merges.is_empty() {
                    return Err(format!("{} is merged, but no verb asked for it", last_component(store)));
                }
                known.fate = SnapshotFate::Merged;
                let image = known.image.clone();
                self.machine.say(format!("o{disk} becomes what {} is", last_component(store)));
                self.model.origins[*disk].image.turn_into(&image);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Updates the model from log lines about snapshots.
    fn listen(&mut self) -> Result<(), Violation> {
        for line in log_capture::take_captured_log_lines() {
            self.machine.say(format!("log: {}", line.replace(&self.base, "")));
            let is_named =
                |one: &PersistentSnapshotModel| one.store.to_str().is_some_and(|store| line.contains(store));
            let Some(at) = self.model.snapshots.iter().rposition(is_named) else { continue };
            let one = &mut self.model.snapshots[at];
            if line.contains(" is lost: ") {
                let stale = one.fate == SnapshotFate::Released;
                if one.attached || !(stale || one.may_be_lost || self.policy == LostSnapshotPolicy::GiveUp) {
                    return Err(format!("without a cause: {line}"));
                }
                one.fate = SnapshotFate::Lost;
                self.counts.lost += 1;
            } else if line.contains("no longer attached") {
                one.fate = SnapshotFate::Released;
                self.counts.released += 1;
            }
        }
        Ok(())
    }

    /// Checks that every snapshot is listed: as attached, as missing, or as lost for a reason.
    pub(super) fn check_listed(&mut self) -> Result<(), Violation> {
        let Some(server) = &self.server else { return Ok(()) };
        let mut all = snapshot::list_live_snapshots(&server.registry);
        all.extend(snapshot::list_unattached_snapshots(&server.registry).map_err(|e| e.to_string())?);
        for at in 0..self.model.snapshots.len() {
            let one = &mut self.model.snapshots[at];
            if !matches!(one.fate, SnapshotFate::Kept | SnapshotFate::Released) {
                continue;
            }
            let name = last_component(&one.store.display().to_string()).to_owned();
            // A snapshot whose table was handed over is also listed, as invalid.
            let mut listed: Vec<_> =
                all.iter().filter(|listed| Path::new(&listed.store) == one.store).collect();
            listed.sort_by_key(|listed| listed.state == "invalid");
            let listed = listed.first();
            match listed {
                None if !one.removals.is_empty() || !one.merges.is_empty() => {
                    one.fate = SnapshotFate::Gone;
                }
                None => return Err(format!("the snapshot in {name} is forgotten")),
                Some(listed) => {
                    // An interrupted merge continues once its store is present.
                    if listed.state == "active" {
                        (one.removals, one.merges) = (Vec::new(), Vec::new());
                    }
                    let stale = one.fate == SnapshotFate::Released;
                    match &*listed.state {
                        "lost" if stale => one.fate = SnapshotFate::Lost,
                        "lost" | "invalid" | "overflow" => {
                            return Err(format!(
                                "the snapshot in {name} is {}: {:?}",
                                listed.state, listed.why
                            ));
                        }
                        _ => {}
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the disk or snapshot that the clients of `seen` use.
    pub(super) fn served(&self, seen: &DeviceView) -> Option<DiskOrSnapshot> {
        match &seen.kind {
            _ if !seen.is_served() => None,
            LiveTableKind::Disk { disk, .. } | LiveTableKind::Merge { disk, .. } => {
                Some(DiskOrSnapshot::Disk(*disk))
            }
            LiveTableKind::Snapshot { store, .. } => self.model.in_store(store).map(DiskOrSnapshot::Snapshot),
            LiveTableKind::Empty | LiveTableKind::Other => None,
        }
    }
}

/// Returns the last component of a path.
pub(super) fn last_component(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}
