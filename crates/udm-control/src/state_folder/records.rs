//! Records of persistent snapshots: their disks, and the server that has them.
//!
//! A snapshot is valid only if every write of its origin is copied first. So a server keeps a
//! record of each persistent snapshot from before its first use until it is removed or merged.
//! Every server checks the records before it opens an origin for writing.
//!
//! `snapshots/ORIGIN-STORE.json` in the state folder is one record. The lock file of the server
//! that a record names tells if that server runs (`server_lock.rs`).
//!
//! | state | known facts | a change that can write the origin |
//! |---|---|---|
//! | attached, server runs | the server copies before writes | is refused in any other server |
//! | attached, server is gone | it was killed: its last writes are in order, nothing else is known | waits for the snapshot |
//! | detached | the origin's size and time of change when the server ended | waits for the snapshot |
//! | released | the same, when a user removed the snapshot's device while the origin was in use | continues; the snapshot is checked when it is attached again, and accepted with a warning if its origin is no file |
//! | lost | the snapshot is not valid any more, and the reason | continues; the snapshot is refused |
//!
//! Durable before it is acknowledged: a record is written under another name, synced, renamed into
//! place, and the folder is synced.

use super::file_stamp::{FileStamp, IdentifiedStoreFile};
use super::stable_disk_id::FileId;
use super::store_creation::has_exception_records;
use super::{StableDiskId, StateFolder, read_records, write_durably};
use crate::throttle_settings::ThrottleSettings;
use crate::ublk_disks::RecordedUblkDisk;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use udm_wire::words;

/// The folder of records in the state folder.
const RECORDS: &str = "snapshots";

/// Maximum number of bytes read from a record: a table has two paths.
const RECORD_MAX: u64 = 64 << 10;

/// Record of a persistent snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SnapshotRecord {
    /// Name of the snapshot's device.
    pub name: String,
    /// UUID of that device.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub uuid: Option<String>,
    /// The disk of the origin.
    pub origin: StableDiskId,
    /// The store.
    pub store: StableDiskId,
    /// Table of the snapshot, with URIs instead of numbers.
    pub table: String,
    /// True if it was created by name, so it is attached again with its origin.
    pub by_name: bool,
    /// Creation time in seconds since 1970.
    pub made: u64,
    /// Store file that was created for the snapshot. Its identity is checked before its removal.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub made_store: Option<IdentifiedStoreFile>,
    /// True if its origin's device was linear before it had snapshots.
    #[serde(default)]
    pub was_linear: bool,
    /// True while it is merged into its origin.
    #[serde(default)]
    pub merging: bool,
    /// The limits of its device, if it was created by name.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub throttle: Option<ThrottleSettings>,
    /// Paths of the sockets that were added for virtual machines, if it was created by name.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub vhost_user: Vec<PathBuf>,
    /// The block device that was added to it, if it was created by name.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ublk: Option<RecordedUblkDisk>,
    /// True if its file belongs to another user who is not root. Such a record is waited for, but
    /// the server does not act on it: who wrote it may not open the disks that it names.
    #[serde(skip)]
    pub is_foreign: bool,
    /// Server that has the snapshot, or the facts since.
    pub state: SnapshotRecordState,
}

/// State of a snapshot, as in the table of the module.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SnapshotRecordState {
    /// Attached to the server with this lock file.
    Attached { server: String },
    /// Not attached, and its origin must not be written before it is.
    Detached { origin: Option<FileStamp> },
    /// Not attached, and its origin may be written.
    Released { origin: Option<FileStamp> },
    /// Not valid any more.
    Lost { why: String },
}

impl SnapshotRecord {
    /// True if its origin must not be written before it is attached.
    pub(crate) fn is_waited_for(&self) -> bool {
        matches!(self.state, SnapshotRecordState::Attached { .. } | SnapshotRecordState::Detached { .. })
    }

    /// True if its origin was in use without it and is no file, so there is no time of change to
    /// check.
    pub(crate) fn is_uncertain(&self) -> bool {
        matches!(self.state, SnapshotRecordState::Released { .. }) && !self.origin.is_file()
    }

    /// Why the snapshot is not valid any more, as far as its origin shows; `None` if nothing is
    /// known against it.
    pub(crate) fn stale(&self) -> Option<String> {
        let origin = &self.origin.name;
        let (stamp, released) = match &self.state {
            SnapshotRecordState::Lost { why } => return Some(why.clone()),
            SnapshotRecordState::Attached { .. } => (None, false),
            SnapshotRecordState::Detached { origin } => (*origin, false),
            SnapshotRecordState::Released { origin } => (*origin, true),
        };
        let Some(found) = self.origin.file() else {
            return (released && self.origin.is_file()).then(|| {
                format!("its device was removed while its origin {origin} was in use, and whether that was written since can't be told")
            });
        };
        if self.origin.disk.zip(FileId::of(&found)).is_some_and(|(was, is)| !was.is(is)) {
            return Some(format!("its origin {origin} is another file by now"));
        }
        match stamp {
            Some(stamp) => stamp.differs(&found).map(|how| format!("its origin {origin} {how}")),
            None => None,
        }
    }

    /// The record after the mapped device `old` is renamed to `new`; `None` if nothing changes.
    pub(super) fn renamed(&self, old: &str, new: &str, is_ours: bool) -> Option<SnapshotRecord> {
        let (from, to) = (StableDiskId::mapped(old), StableDiskId::mapped(new));
        let moved = |id: &StableDiskId| if *id == from { to.clone() } else { id.clone() };
        let word = |word: String| if word == from.name { to.name.clone() } else { word };
        let table: Vec<String> = words::split_message_words(&self.table)
            .into_iter()
            .map(|one| words::escape_table_word(&word(one)).into_owned())
            .collect();
        let renamed = SnapshotRecord {
            // A snapshot that is not attached keeps its name, even if a device has that name
            // meanwhile.
            name: if self.name == old && is_ours { new.to_owned() } else { self.name.clone() },
            origin: moved(&self.origin),
            store: moved(&self.store),
            table: table.join(" "),
            ..self.clone()
        };
        (renamed != *self).then_some(renamed)
    }

    /// The name of its file.
    pub(crate) fn file_name(&self) -> String {
        format!("{:016x}-{:016x}.json", self.origin.fingerprint(), self.store.fingerprint())
    }
}

impl StateFolder {
    /// The records of all snapshots that are not attached to this server.
    ///
    /// # Errors
    /// A text, if the records can't be read.
    pub(crate) fn unattached(&self) -> Result<Vec<SnapshotRecord>, String> {
        let folder = self.path.join(RECORDS);
        let mut found = read_records(
            &folder,
            "which snapshots there are",
            |name| !self.attached().contains_key(name),
            read_snapshot_record,
        )?;
        found.sort_by(|one: &SnapshotRecord, other| (one.made, &one.name).cmp(&(other.made, &other.name)));
        Ok(found)
    }

    /// The record of `store`, attached or not.
    ///
    /// # Errors
    /// As [`StateFolder::unattached`].
    pub(crate) fn record_of(&self, store: &StableDiskId) -> Result<Option<SnapshotRecord>, String> {
        let ours = self.attached().values().find(|record| record.store.is(store)).cloned();
        match ours {
            Some(record) => Ok(Some(record)),
            None => Ok(self.unattached()?.into_iter().find(|record| record.store.is(store))),
        }
    }

    /// Records these snapshots as attached to this server, replacing earlier records of their
    /// stores. Changes that write their origins are refused until [`StateFolder::finish_attach`].
    /// May block.
    ///
    /// # Errors
    /// If a record can't be written.
    pub(crate) fn attach(&self, records: Vec<SnapshotRecord>) -> io::Result<()> {
        let server = self.begin()?;
        let records = records.into_iter().map(|record| SnapshotRecord {
            state: SnapshotRecordState::Attached { server: server.clone() },
            ..record
        });
        let records: Vec<SnapshotRecord> = records.collect();
        self.put_records(&records)?;
        self.attaching_names().extend(records.iter().map(SnapshotRecord::file_name));
        let mut attached = self.attached();
        for record in records {
            attached.insert(record.file_name(), record);
        }
        Ok(())
    }

    /// Ends the change in which `records` were attached.
    pub(crate) fn finish_attach(&self, records: &[String]) {
        self.attaching_names().retain(|name| !records.contains(name));
    }

    /// The snapshots that are being attached to this server.
    pub(crate) fn attaching(&self) -> Vec<SnapshotRecord> {
        let (attached, attaching) = (self.attached(), self.attaching_names());
        attaching.iter().filter_map(|name| attached.get(name).cloned()).collect()
    }

    /// Writes another state of a snapshot that is no longer attached to this server. May block.
    ///
    /// # Errors
    /// If the record can't be written.
    pub(crate) fn record(&self, record: &SnapshotRecord) -> io::Result<()> {
        let name = record.file_name();
        self.put_records(std::slice::from_ref(record))?;
        self.attached().remove(&name);
        Ok(())
    }

    /// Deletes the record of a snapshot. May block.
    ///
    /// # Errors
    /// If the record can't be removed.
    pub(crate) fn forget_snapshot(&self, record: &SnapshotRecord) -> io::Result<()> {
        let name = record.file_name();
        let folder = self.path.join(RECORDS);
        match fs::remove_file(folder.join(&name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        self.attached().remove(&name);
        match File::open(&folder) {
            Ok(folder) => folder.sync_all(),
            Err(_) => Ok(()),
        }
    }

    /// Deletes the record of a snapshot whose merge was complete when its server ended: its store
    /// is empty. Returns true if so. May block.
    ///
    /// # Errors
    /// If the record can't be removed.
    pub(crate) fn forget_merged(&self, record: &SnapshotRecord) -> Result<bool, String> {
        let is_empty = |file: &File| !has_exception_records(file).unwrap_or(true);
        let is_it = |found: fs::Metadata| {
            FileId::of(&found).zip(record.store.disk).is_some_and(|(is, was)| is.is(was))
        };
        let is_over = record.merging
            && !self.is_elsewhere(record)
            && record.store.file().is_some_and(is_it)
            && File::open(&record.store.name).is_ok_and(|file| is_empty(&file));
        if is_over {
            let failed = |error| format!("{}: its record stays: {error}", record.name);
            self.forget_snapshot(record).map_err(failed)?;
        }
        Ok(is_over)
    }

    /// The snapshots that are attached to this server.
    pub(crate) fn attached_here(&self) -> Vec<SnapshotRecord> {
        self.attached().values().cloned().collect()
    }

    /// Records the limits of the device of a snapshot that is attached to this server; does nothing
    /// if there is no such snapshot. The caller holds the lock of its store. May block.
    ///
    /// # Errors
    /// If the record can't be written.
    pub(crate) fn record_throttle(
        &self,
        file_name: &str,
        throttle: Option<ThrottleSettings>,
    ) -> io::Result<()> {
        self.change_record(file_name, |was| SnapshotRecord { throttle, ..was })
    }

    /// Records the sockets and the block device of a snapshot that this process has attached. Does
    /// nothing if there is no such snapshot. The caller holds the lock of its store. May block.
    ///
    /// # Errors
    /// If the record can't be written.
    pub(crate) fn record_disks(
        &self,
        file_name: &str,
        vhost_user: Vec<PathBuf>,
        ublk: Option<RecordedUblkDisk>,
    ) -> io::Result<()> {
        self.change_record(file_name, |was| SnapshotRecord { vhost_user, ublk, ..was })
    }

    /// Writes the record of a snapshot that this process has attached, as `change` has changed it.
    fn change_record(
        &self,
        file_name: &str,
        change: impl FnOnce(SnapshotRecord) -> SnapshotRecord,
    ) -> io::Result<()> {
        let Some(was) = self.attached().get(file_name).cloned() else { return Ok(()) };
        let record = change(was);
        self.put_records(std::slice::from_ref(&record))?;
        self.attached().insert(record.file_name(), record);
        Ok(())
    }

    /// Detaches all snapshots at shutdown, after the last write. Records the size and time of
    /// change of their origins, so that the next server detects later writes.
    pub fn detach_all(&self) {
        for record in self.attached_here() {
            let origin = FileStamp::settled(&record.origin);
            let state = SnapshotRecordState::Detached { origin };
            if let Err(error) = self.record(&SnapshotRecord { state, ..record.clone() }) {
                tracing::warn!("{}: the state of its origin is not recorded: {error}", record.name);
            }
        }
    }

    /// Gives up all snapshots and clones for another server that takes them at once. Their records
    /// stay as those of a server that was killed, so nothing is written, and nothing can fail.
    pub fn hand_over_all(&self) {
        self.attached().clear();
        self.own_clones().clear();
        *self.own_server() = None;
    }

    /// The records that mention the mapped device `old`, each with its version for the name `new`.
    pub(super) fn records_of(
        &self,
        old: &str,
        new: &str,
    ) -> io::Result<Vec<(SnapshotRecord, SnapshotRecord)>> {
        let others = self.unattached().map_err(io::Error::other)?.into_iter().map(|record| (record, false));
        let all = others.chain(self.attached_here().into_iter().map(|record| (record, true)));
        let renamed = |(record, is_ours): (SnapshotRecord, bool)| {
            let new = record.renamed(old, new, is_ours)?;
            Some((record, new))
        };
        Ok(all.filter_map(renamed).collect())
    }

    /// Removes one record of each pair after a rename: the old one if the rename is `done`, else
    /// the new one.
    pub(super) fn records_renamed(
        &self,
        records: Vec<(SnapshotRecord, SnapshotRecord)>,
        done: bool,
    ) -> io::Result<()> {
        for (old, new) in records {
            let (stays, goes) = if done { (new, old) } else { (old, new) };
            if goes.file_name() == stays.file_name() {
                self.put_records(std::slice::from_ref(&stays))?;
            } else {
                fs::remove_file(self.path.join(RECORDS).join(goes.file_name()))?;
            }
            let mut attached = self.attached();
            let was_attached = attached.remove(&goes.file_name()).is_some();
            if was_attached || attached.contains_key(&stays.file_name()) {
                attached.insert(stays.file_name(), stays);
            }
        }
        Ok(())
    }

    /// Trusts the snapshot in `store` again: it becomes detached from its origin's current state.
    /// Returns the number of snapshots.
    pub(super) fn mark_valid(&self, store: &StableDiskId) -> io::Result<usize> {
        let found = self.unattached().map_err(io::Error::other)?;
        let mut count = 0;
        for record in found.into_iter().filter(|record| record.store.is_exactly(store)) {
            if record.stale().is_none() || self.is_elsewhere(&record) {
                continue;
            }
            // Identity of the file that is at the origin's path now.
            let disk = record.origin.file().as_ref().and_then(FileId::of).or(record.origin.disk);
            let origin = StableDiskId { disk, ..record.origin.clone() };
            self.forget_snapshot(&record)?;
            let state = SnapshotRecordState::Detached { origin: FileStamp::settled(&origin) };
            self.record(&SnapshotRecord { origin, state, ..record })?;
            count += 1;
        }
        Ok(count)
    }

    /// Writes records and syncs the folder once.
    pub(super) fn put_records(&self, records: &[SnapshotRecord]) -> io::Result<()> {
        if records.is_empty() {
            return Ok(());
        }
        let folder = self.path.join(RECORDS);
        self.create_folder(&self.path)?;
        self.create_folder(&folder)?;
        let files =
            records.iter().map(|record| Ok((folder.join(record.file_name()), serde_json::to_vec(record)?)));
        write_durably(&folder, &files.collect::<io::Result<Vec<_>>>()?)
    }
}

fn read_snapshot_record(path: &Path) -> io::Result<SnapshotRecord> {
    let mut bytes = Vec::new();
    let file = File::open(path)?;
    let owner = file.metadata()?.uid();
    file.take(RECORD_MAX).read_to_end(&mut bytes)?;
    let is_foreign = owner != 0 && owner != rustix::process::geteuid().as_raw();
    Ok(SnapshotRecord { is_foreign, ..serde_json::from_slice(&bytes)? })
}
