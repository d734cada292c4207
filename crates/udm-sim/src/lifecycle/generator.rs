//! Random choice of verbs and client actions, and changes of files.

use super::model::{DiskOrSnapshot, SnapshotFate};
use super::observation::{DeviceView, LiveTableKind, last_component};
use super::verb_jobs::ServerVerb;
use super::world::ServerLifecycleWorld;
use crate::model::Violation;
use crate::plan::DisturbanceClass;
use std::fs;

/// Maximum number of snapshots per disk.
const SNAPSHOTS_MAX: usize = 4;

/// Content of a foreign file at the path of a store.
const OTHER: &[u8] = b"somebody else's";

impl ServerLifecycleWorld {
    /// Performs random actions: verbs, connections, and file changes.
    pub(super) fn act(&mut self) -> Result<(), Violation> {
        if self.control.one_in(40)
            && self.jobs.len() < self.jobs_max
            && let Some(verb) = self.draw()
        {
            self.begin(verb);
        }
        match self.work.below(200) {
            0..10 => {
                let at = self.work.below(self.view.len() as u64) as usize;
                if let Some(name) = self.view.get(at).map(|seen| seen.name.clone()) {
                    self.come(&name, false)?;
                }
            }
            10..14 if !self.clients.is_empty() => {
                // Clients of disks stay longer.
                let at = self.work.below(self.clients.len() as u64) as usize;
                if !matches!(self.clients[at].of, DiskOrSnapshot::Disk(_)) || self.work.one_in(8) {
                    self.go(at);
                }
            }
            14 if !self.away.is_empty() => {
                self.bring_back_stores()?;
                self.counts.returned += 1;
                self.begin(ServerVerb::Reconfigure);
            }
            15 if self.on(DisturbanceClass::Paths) && self.away.is_empty() => self.replace_store()?,
            _ => {}
        }
        Ok(())
    }

    /// Chooses a device for which `is` is true.
    fn device(&mut self, is: impl Fn(&DeviceView) -> bool) -> Option<DeviceView> {
        let all: Vec<&DeviceView> = self.view.iter().filter(|seen| is(seen)).collect();
        let at = self.control.below(all.len() as u64) as usize;
        all.get(at).map(|seen| (*seen).clone())
    }

    fn fresh(&mut self, letter: char) -> String {
        self.ids += 1;
        format!("{letter}{:05}", self.ids)
    }

    fn draw(&mut self) -> Option<ServerVerb> {
        let is_snapshot = |seen: &DeviceView| matches!(seen.kind, LiveTableKind::Snapshot { .. });
        let is_disk = |seen: &DeviceView| matches!(seen.kind, LiveTableKind::Disk { .. });
        Some(match self.control.below(26) {
            0..5 => {
                let of = self.device(is_disk)?;
                let LiveTableKind::Disk { disk, .. } = of.kind else { return None };
                let kept = |one: &&super::model::PersistentSnapshotModel| {
                    one.disk == disk && one.fate == SnapshotFate::Kept
                };
                if self.model.snapshots.iter().filter(kept).count() >= SNAPSHOTS_MAX {
                    return None;
                }
                ServerVerb::Snapshot { names: vec![self.fresh('s')], of: of.name, store: None }
            }
            5..7 if self.on(DisturbanceClass::Remove) => {
                let name = self.device(is_snapshot)?.name;
                ServerVerb::Discard { name, keep_store: self.control.one_in(3) }
            }
            7..10 if self.on(DisturbanceClass::Merge) => {
                ServerVerb::Merge { name: self.device(is_snapshot)?.name }
            }
            10 => ServerVerb::Rename { word: self.device(|_| true)?.name, to: self.fresh('r') },
            11..14 if self.on(DisturbanceClass::Reload) => {
                // A snapshot device keeps its own snapshot in a reload, so its clients continue.
                let own = |seen: &DeviceView| {
                    matches!(seen.kind, LiveTableKind::Snapshot { .. } | LiveTableKind::Empty)
                };
                let DeviceView { name, kind, .. } = self.device(own)?;
                let store = if let LiveTableKind::Snapshot { store, .. } = kind { Some(store) } else { None };
                ServerVerb::Load { word: name, table: self.table(store.as_deref())? }
            }
            14..18 => ServerVerb::Resume { words: vec![self.device(|_| true)?.name] },
            18..20 if self.on(DisturbanceClass::Suspend) => {
                ServerVerb::Suspend { word: self.device(|_| true)?.name }
            }
            20 if self.on(DisturbanceClass::Remove) => {
                ServerVerb::Remove { word: self.device(is_snapshot)?.name }
            }
            21 | 22 if self.on(DisturbanceClass::Reload) => {
                let table = if self.control.one_in(2) { Some(self.table(None)?) } else { None };
                ServerVerb::Create { name: self.fresh('x'), table }
            }
            23 => ServerVerb::Clear { word: self.device(|_| true)?.name },
            24 | 25 => ServerVerb::Reconfigure,
            _ => return None,
        })
    }

    /// Returns the table of an existing snapshot, in the store `own` or in any, sometimes with
    /// another length.
    fn table(&mut self, own: Option<&str>) -> Option<String> {
        let is = |one: &super::model::PersistentSnapshotModel| match own {
            Some(store) => one.store.to_str() == Some(store) && one.fate == SnapshotFate::Kept,
            None => matches!(one.fate, SnapshotFate::Kept | SnapshotFate::Released),
        };
        let all = 0..self.model.snapshots.len();
        let kept: Vec<usize> = all.filter(|at| is(&self.model.snapshots[*at])).collect();
        let at = self.control.below(kept.len() as u64) as usize;
        let one = &self.model.snapshots[*kept.get(at)?];
        let origin = &self.model.origins[one.disk];
        let all = origin.image.sectors();
        let (origin, store) = (origin.path.display(), one.store.display());
        let sectors = if self.control.one_in(4) { all / 2 } else { all };
        Some(format!("0 {sectors} snapshot {origin} {store} P 8"))
    }

    /// Moves a store away. A server that has it open continues to use it.
    pub(super) fn take_store_away(&mut self) -> Result<(), Violation> {
        let there: Vec<_> = self
            .model
            .snapshots
            .iter()
            .map(|one| one.store.clone())
            .filter(|store| store.exists() && !self.others.contains(store))
            .collect();
        let at = self.control.below(there.len() as u64) as usize;
        let Some(store) = there.get(at) else { return Ok(()) };
        let name = last_component(&store.display().to_string()).to_owned();
        let away = self.outside.files().path(&format!("{name}.away"));
        fs::rename(store, &away).map_err(|e| e.to_string())?;
        self.machine.say(format!("{name} is away"));
        self.away.push((away, store.clone()));
        self.counts.away += 1;
        Ok(())
    }

    /// Moves a store away and places a foreign file at its path.
    fn replace_store(&mut self) -> Result<(), Violation> {
        self.take_store_away()?;
        if let Some((_, path)) = self.away.last() {
            fs::write(path, OTHER).map_err(|e| e.to_string())?;
            self.others.push(path.clone());
            self.counts.replaced += 1;
        }
        Ok(())
    }

    /// Moves all stores back.
    pub(super) fn bring_back_stores(&mut self) -> Result<(), Violation> {
        self.check_others()?;
        self.others.clear();
        for (from, to) in std::mem::take(&mut self.away) {
            fs::rename(from, to).map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    /// Checks that the foreign files at the paths of stores are unchanged.
    pub(super) fn check_others(&mut self) -> Result<(), Violation> {
        for path in &self.others {
            if fs::read(path).ok().as_deref() != Some(OTHER) {
                return Err(format!(
                    "{} was a foreign file, and is removed",
                    last_component(&path.display().to_string())
                ));
            }
        }
        Ok(())
    }
}
