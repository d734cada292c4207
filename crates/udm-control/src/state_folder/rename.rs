//! Moves the marks and records of a mapped device when the device is renamed.
//!
//! Contract: at no moment does a starting server trust the store under either name, or miss a
//! snapshot of its disk. A copy under the new name is durable before the rename; the files of the
//! old name are removed after it. After a kill in between, both count. No mark is set, read or
//! cleared meanwhile.

use super::clones::CloneRecord;
use super::{StableDiskId, StateFolder, StoreInvalidMark, StoreToMarkInvalid};
use std::fs;
use std::io;
use udm_dm::MappedDevice;

impl StateFolder {
    /// Renames `device` to `new` by calling `change`, and moves its marks and records. May block.
    ///
    /// # Errors
    /// The error of `change`, or `failed` if a mark or record can't be copied; the device keeps its
    /// name then.
    pub(crate) fn renaming<E>(
        &self,
        device: &MappedDevice,
        new: &str,
        mut failed: impl FnMut(io::Error) -> E,
        change: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let _files = self.files();
        let (old, to) = (StableDiskId::mapped(&device.name()), StableDiskId::mapped(new));
        let kept = match self.read() {
            Ok(kept) => kept,
            Err(error) => return Err(failed(error)),
        };
        let moves: Vec<_> = kept.iter().filter(|(_, mark)| mark.store == old).collect();
        let mut copy = None;
        if let Some((_, mark)) = moves.first().filter(|_| !kept.iter().any(|(_, mark)| mark.store == to)) {
            let mark = StoreInvalidMark { store: to, ..mark.clone() };
            copy = Some(self.put(&mark).map_err(&mut failed)?);
        }
        let records = self.records_of(&device.name(), new).and_then(|records| {
            let copies: Vec<_> = records.iter().map(|(_, copy)| copy.clone()).collect();
            self.put_records(&copies).map(|()| records)
        });
        let records = records.map_err(&mut failed)?;
        // Written before the rename: after a kill in between, the clone returns under the new name.
        let clone = self.own_clone(&device.name());
        if let Some(clone) = &clone {
            self.put_clone(&CloneRecord { name: new.to_owned(), ..clone.clone() }).map_err(&mut failed)?;
        }
        let ours: Vec<u64> =
            self.marked().iter().filter(|one| one.store.id() == old).map(|one| one.id).collect();
        let changed = change();
        if let (Err(_), Some(clone)) = (&changed, &clone)
            && let Err(error) = self.put_clone(clone)
        {
            tracing::warn!(
                "{}: the record of clone {} has the name {new}: {error}",
                self.path.display(),
                clone.name
            );
        }
        let gone = match &changed {
            Ok(()) => moves.iter().map(|(path, _)| path).collect(),
            Err(_) => copy.iter().collect::<Vec<_>>(),
        };
        for path in gone {
            if let Err(error) = fs::remove_file(path).and_then(|()| self.sync()) {
                tracing::warn!("{}: {error}: this mark is no longer needed", path.display());
            }
        }
        if let Err(error) = self.records_renamed(records, changed.is_ok()) {
            tracing::warn!("{}: records of snapshots under two names: {error}", self.path.display());
        }
        if changed.is_ok() {
            // Marks of an earlier device with the old name keep that name.
            let mut marked = self.marked();
            let here = marked.iter_mut().filter(|one| ours.contains(&one.id));
            here.for_each(|one| one.store = StoreToMarkInvalid::Mapped(device.name_handle()));
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{knows, set};
    use super::*;
    use std::sync::Arc;
    use udm_core::DevNo;

    fn device(name: &str) -> Arc<MappedDevice> {
        MappedDevice::new(name, None, DevNo::default()).unwrap()
    }

    fn rename(folder: &StateFolder, device: &MappedDevice, new: &str) -> Result<(), String> {
        folder.renaming(device, new, |e| e.to_string(), || device.rename(new).map_err(|e| e.to_string()))
    }

    fn why(folder: &Arc<StateFolder>, device: &MappedDevice) -> Option<String> {
        folder.mark(StoreToMarkInvalid::Mapped(device.name_handle())).why()
    }

    #[test]
    fn what_is_kept_goes_with_the_device() {
        let temporary = tempfile::tempdir().unwrap();
        let at = temporary.path();
        let folder = StateFolder::new(at.into());
        let (cow, next) = (device("cow"), device("next"));
        rename(&folder, &cow, "store").unwrap();
        set(&folder, StoreToMarkInvalid::Mapped(cow.name_handle())).unwrap();
        rename(&folder, &cow, "kept").unwrap();
        // The mark moves in this server and for a later one, and does not affect another device
        // that takes the name.
        rename(&folder, &next, "store").unwrap();
        let known = |name: &str| knows(at, &StableDiskId::mapped(name));
        assert_eq!((known("cow"), known("store"), known("kept")), (false, false, true));
        assert!(why(&folder, &cow).is_some_and(|why| why.starts_with("@kept has lost a copy")));
        assert_eq!(why(&folder, &next), None);
        // A refused rename leaves no mark under the new name.
        let refused = folder.renaming(&cow, "other", |e| e.to_string(), || Err("no".into()));
        assert_eq!((refused, known("other"), known("kept")), (Err("no".into()), false, true));
        // An existing mark of the new name stays.
        set(&folder, StoreToMarkInvalid::Disk(StableDiskId::mapped("old"))).unwrap();
        folder.renaming(&cow, "old", |e| e.to_string(), || Err("no".into())).unwrap_err();
        assert!(known("old") && known("kept"));
        rename(&folder, &cow, "old").unwrap();
        assert_eq!((known("old"), known("kept")), (true, false));
        folder.mark(StoreToMarkInvalid::Mapped(cow.name_handle())).clear().unwrap();
        assert_eq!((known("old"), why(&folder, &cow)), (false, None));
    }

    /// A second server reads the folder at each step.
    #[test]
    fn there_is_no_moment_without_a_mark() {
        let temporary = tempfile::tempdir().unwrap();
        let at = temporary.path();
        let (folder, cow) = (StateFolder::new(at.into()), device("cow"));
        set(&folder, StoreToMarkInvalid::Mapped(cow.name_handle())).unwrap();
        let known = |name: &str| knows(at, &StableDiskId::mapped(name));
        let change = || {
            assert!(known("cow") && known("new"), "killed here, it is under both");
            cow.rename("new").map_err(|e| e.to_string())
        };
        folder.renaming(&cow, "new", |e| e.to_string(), change).unwrap();
        assert!(!known("cow") && known("new"));
    }

    /// A mark that is only in memory moves too, also the mark of an earlier device of the same
    /// name.
    #[test]
    fn what_cannot_be_written_goes_with_it_too() {
        let temporary = tempfile::tempdir().unwrap();
        let state = temporary.path().join("state");
        fs::write(&state, "no folder").unwrap();
        let folder = StateFolder::new(state);
        let first = device("cow");
        set(&folder, StoreToMarkInvalid::Mapped(first.name_handle())).unwrap_err();
        drop(first);
        let (again, other) = (device("cow"), device("other"));
        assert!(why(&folder, &again).is_some());
        rename(&folder, &again, "kept").unwrap();
        rename(&folder, &other, "cow").unwrap();
        assert!(why(&folder, &again).is_some() && why(&folder, &other).is_none());
    }
}
