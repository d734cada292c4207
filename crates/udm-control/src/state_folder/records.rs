//! Records of persistent snapshots: which there are, of which disk, and whether a server has them.
//!
//! A snapshot is its instant only as long as every write of its origin passes by it. So a server
//! keeps a record of each persistent snapshot from before it is in use until it is removed or
//! merged, and nobody opens its origin for writing without looking here first.
//!
//! `snapshots/ORIGIN-STORE.json` in the state folder is one record. Whether the server that it
//! names runs is known by that one's lock (`server_lock.rs`).
//!
//! | state | what is known | a writer of the origin |
//! |---|---|---|
//! | attached, server runs | the server copies what is written | is refused in any other server |
//! | attached, server is gone | it was killed: its last writes are in order, nothing else is known | waits for the snapshot |
//! | detached | the origin's size and time of change when the server ended | waits for the snapshot |
//! | released | the same, when a user took it away from an origin in use | goes on; the snapshot is checked when it comes back, and taken with a warning if its origin is no file |
//! | lost | it is not its instant any more, and why | goes on; the snapshot is refused |
//!
//! Durable before it is told: a record is written aside, synced, moved to its place, and the folder
//! is synced.

use super::file_stamp::{FileStamp, StoreFile};
use super::store_creation::has_records;
use super::store_id::FileId;
use super::{StateFolder, StoreId, write_durably};
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use udm_core::bugs::{self, Bug};
use udm_wire::words;

/// The folder of records in the state folder.
const RECORDS: &str = "snapshots";

/// The longest record in bytes that is read: a table has two paths.
const RECORD_MAX: u64 = 64 << 10;

/// A persistent snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SnapshotRecord {
    /// The device that has it.
    pub name: String,
    /// That device's uuid.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub uuid: Option<String>,
    /// The disk that it is an instant of.
    pub origin: StoreId,
    /// Where it is kept.
    pub store: StoreId,
    /// Its table, with URIs in the place of numbers.
    pub table: String,
    /// It was made by name, and comes back by itself with its origin.
    pub by_name: bool,
    /// When it was made, in seconds since 1970.
    pub made: u64,
    /// The file that was made for it, by which it is known when it is removed.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub made_store: Option<StoreFile>,
    /// Its origin's device was linear before it had snapshots.
    #[serde(default)]
    pub was_linear: bool,
    /// It is on its way back into its origin.
    #[serde(default)]
    pub merging: bool,
    /// Who has it.
    pub state: RecordState,
}

/// Who has a snapshot. See the module's table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RecordState {
    /// The server with this lock file.
    Attached { server: String },
    /// Nobody, since that server ended.
    Detached { origin: Option<FileStamp> },
    /// Nobody, and its origin is written all the same.
    Released { origin: Option<FileStamp> },
    /// It is not its instant any more.
    Lost { why: String },
}

impl SnapshotRecord {
    /// True when a writer of its origin has to wait for it.
    pub(crate) fn is_waited_for(&self) -> bool {
        if bugs::on(Bug::KilledNotWaitedFor) && matches!(self.state, RecordState::Attached { .. }) {
            return false;
        }
        matches!(self.state, RecordState::Attached { .. } | RecordState::Detached { .. })
    }

    /// True when its origin was in use without it, and has no time of change to tell by.
    pub(crate) fn is_uncertain(&self) -> bool {
        matches!(self.state, RecordState::Released { .. }) && !self.origin.is_file()
    }

    /// Why it can't be its instant any more, as far as its origin tells; `None` when nothing speaks
    /// against it.
    pub(crate) fn stale(&self) -> Option<String> {
        let origin = &self.origin.name;
        let (stamp, released) = match &self.state {
            RecordState::Lost { why } => return Some(why.clone()),
            RecordState::Attached { .. } => (None, false),
            RecordState::Detached { origin } => (*origin, false),
            RecordState::Released { origin } => (*origin, true),
        };
        let Some(found) = self.origin.file() else {
            return (released && self.origin.is_file()).then(|| {
                format!("it was taken away while its origin {origin} was in use, and whether that was written since can't be told")
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

    /// As it is when the mapped device `old` is called `new`; `None` when nothing of it changes.
    fn renamed(&self, old: &str, new: &str, is_ours: bool) -> Option<SnapshotRecord> {
        let (from, to) = (StoreId::mapped(old), StoreId::mapped(new));
        let moved = |id: &StoreId| if *id == from { to.clone() } else { id.clone() };
        let word = |word: String| if word == from.name { to.name.clone() } else { word };
        let table: Vec<String> =
            words::words(&self.table).into_iter().map(|one| words::escape(&word(one)).into_owned()).collect();
        let renamed = SnapshotRecord {
            // One that no device has keeps its name, whoever has that meanwhile.
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
    /// The records of all snapshots that this server does not have.
    ///
    /// # Errors
    /// In words, when that can't be told.
    pub(crate) fn unattached(&self) -> Result<Vec<SnapshotRecord>, String> {
        let folder = self.path.join(RECORDS);
        let failed = |path: &Path, error: io::Error| {
            format!("{}: which snapshots there are is not known: {error}", path.display())
        };
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(error) => {
                use io::ErrorKind::{NotADirectory, NotFound};
                let none = matches!(error.kind(), NotFound | NotADirectory);
                return if none { Ok(Vec::new()) } else { Err(failed(&folder, error)) };
            }
        };
        let mut found = Vec::new();
        for entry in entries {
            let path = entry.map_err(|error| failed(&folder, error))?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if !name.ends_with(".json") || self.attached().contains_key(name) {
                continue;
            }
            match read(&path) {
                Ok(record) => found.push(record),
                // Another server has just taken it away.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(failed(&path, error)),
            }
        }
        found.sort_by(|one: &SnapshotRecord, other| (one.made, &one.name).cmp(&(other.made, &other.name)));
        Ok(found)
    }

    /// The record of `store`, whoever has it.
    ///
    /// # Errors
    /// As [`StateFolder::unattached`]'s.
    pub(crate) fn record_of(&self, store: &StoreId) -> Result<Option<SnapshotRecord>, String> {
        let ours = self.attached().values().find(|record| record.store.is(store)).cloned();
        match ours {
            Some(record) => Ok(Some(record)),
            None => Ok(self.unattached()?.into_iter().find(|record| record.store.is(store))),
        }
    }

    /// Records that this server has these snapshots from now on, whatever was recorded of their
    /// stores before. Who writes their origins waits until they have [come](StateFolder::finish_attach). May
    /// block.
    ///
    /// # Errors
    /// When that can't be kept.
    pub(crate) fn attach(&self, records: Vec<SnapshotRecord>) -> io::Result<()> {
        let server = self.begin()?;
        let records = records.into_iter().map(|record| SnapshotRecord {
            state: RecordState::Attached { server: server.clone() },
            ..record
        });
        let records: Vec<SnapshotRecord> = records.collect();
        self.put_records(&records)?;
        self.coming().extend(records.iter().map(SnapshotRecord::file_name));
        let mut attached = self.attached();
        for record in records {
            attached.insert(record.file_name(), record);
        }
        Ok(())
    }

    /// The change in which `records` were attached is over.
    pub(crate) fn finish_attach(&self, records: &[String]) {
        self.coming().retain(|name| !records.contains(name));
    }

    /// The snapshots that this server is about to have.
    pub(crate) fn attaching(&self) -> Vec<SnapshotRecord> {
        let (attached, coming) = (self.attached(), self.coming());
        coming.iter().filter_map(|name| attached.get(name).cloned()).collect()
    }

    /// Records another state of a snapshot, which this server does not have any more. May block.
    ///
    /// # Errors
    /// When that can't be kept.
    pub(crate) fn record(&self, record: &SnapshotRecord) -> io::Result<()> {
        let name = record.file_name();
        self.put_records(std::slice::from_ref(record))?;
        self.attached().remove(&name);
        Ok(())
    }

    /// Forgets a snapshot: it is gone. May block.
    ///
    /// # Errors
    /// When its record can't be removed.
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

    /// Forgets a snapshot whose merge was over when its server went: nothing is left in its store.
    /// True when it was. May block.
    ///
    /// # Errors
    /// When its record can't be removed.
    pub(crate) fn forget_merged(&self, record: &SnapshotRecord) -> Result<bool, String> {
        let is_empty = |file: &File| !has_records(file).unwrap_or(true);
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

    /// The snapshots that this server has.
    pub(crate) fn attached_here(&self) -> Vec<SnapshotRecord> {
        self.attached().values().cloned().collect()
    }

    /// This server ends, and nothing writes any more: the origins of its snapshots are looked at
    /// once more, so that the next one can tell whether somebody else wrote them meanwhile.
    pub fn detach_all(&self) {
        for record in self.attached_here() {
            let origin = FileStamp::settled(&record.origin);
            let state = RecordState::Detached { origin };
            if let Err(error) = self.record(&SnapshotRecord { state, ..record.clone() }) {
                tracing::warn!("{}: how its origin was is not kept: {error}", record.name);
            }
        }
    }

    /// The records in which the mapped device `old` stands, each with its form when that is called
    /// `new`.
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

    /// `records` are those of a device that was renamed, or was to be: of each pair one goes.
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

    /// Has the snapshot in `store` believed again: it is detached from its origin as that is now.
    /// How many there were.
    pub(super) fn believe(&self, store: &StoreId) -> io::Result<usize> {
        let found = self.unattached().map_err(io::Error::other)?;
        let mut count = 0;
        for record in found.into_iter().filter(|record| record.store.is_exactly(store)) {
            if record.stale().is_none() || self.is_elsewhere(&record) {
                continue;
            }
            // The file that its origin is by now.
            let disk = record.origin.file().as_ref().and_then(FileId::of).or(record.origin.disk);
            let origin = StoreId { disk, ..record.origin.clone() };
            self.forget_snapshot(&record)?;
            let state = RecordState::Detached { origin: FileStamp::settled(&origin) };
            self.record(&SnapshotRecord { origin, state, ..record })?;
            count += 1;
        }
        Ok(count)
    }

    /// Writes records, the folder synced once for all.
    pub(super) fn put_records(&self, records: &[SnapshotRecord]) -> io::Result<()> {
        if records.is_empty() {
            return Ok(());
        }
        let folder = self.path.join(RECORDS);
        let is_new = !folder.is_dir();
        DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        let files =
            records.iter().map(|record| Ok((folder.join(record.file_name()), serde_json::to_vec(record)?)));
        write_durably(&folder, &files.collect::<io::Result<Vec<_>>>()?)?;
        if is_new {
            self.sync()?;
        }
        Ok(())
    }
}

fn read(path: &Path) -> io::Result<SnapshotRecord> {
    let mut bytes = Vec::new();
    File::open(path)?.take(RECORD_MAX).read_to_end(&mut bytes)?;
    Ok(serde_json::from_slice(&bytes)?)
}
