//! Records of clones that were created by name, so that they return with their server.
//!
//! `clones/ID.json` in the state folder is one record. It is written before the device of the clone
//! exists, and removed after that device was removed by a verb. In between it follows what verbs
//! change: a pause, another name, limits, sockets of virtual machines, the end of the clone.
//!
//! The metadata of a clone says which regions are in its destination, so a record must never lead
//! to another destination or to other metadata. It has the identities of both disks.
//!
//! Several servers may share a folder. A record belongs to the server whose lock file it names; a
//! server takes a record of one that has ended, under a lock of the folder of records.

use super::{StableDiskId, StateFolder, read_own_record, read_records, write_durably};
use crate::throttle_settings::ThrottleSettings;
use crate::ublk_disks::RecordedUblkDisk;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{MutexGuard, PoisonError};
use udm_backends::KnownObject;

/// The folder of the records in the state folder.
const RECORDS: &str = "clones";

/// Maximum number of bytes read from a record: a table has three paths and a boot profile.
const RECORD_MAX: u64 = 4 << 20;

/// The version of an object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RecordedObject {
    /// Its URI, as the table names it.
    pub uri: String,
    /// Length in bytes.
    pub len: u64,
    /// Its strong ETag.
    pub etag: String,
}

impl From<KnownObject> for RecordedObject {
    fn from(object: KnownObject) -> RecordedObject {
        let KnownObject { uri, len, etag } = object;
        RecordedObject { uri, len, etag }
    }
}

impl From<RecordedObject> for KnownObject {
    fn from(object: RecordedObject) -> KnownObject {
        let RecordedObject { uri, len, etag } = object;
        KnownObject { uri, len, etag }
    }
}

/// The record of a clone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CloneRecord {
    /// The name of its file, without `.json`.
    pub id: String,
    /// Name of the device.
    pub name: String,
    /// UUID of the device.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub uuid: Option<String>,
    /// Table of the device, with URIs instead of numbers: one `clone` line, or `linear` after the
    /// clone was finished.
    pub table: String,
    /// Length of the clone in sectors.
    pub sectors: u64,
    /// Length of the source in sectors when the clone was created.
    pub source_sectors: u64,
    /// The destination.
    pub destination: StableDiskId,
    /// The metadata; `None` for a finished clone.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub metadata: Option<StableDiskId>,
    /// The source as it was, if it is an object: another version of it is another source.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub object: Option<RecordedObject>,
    /// The limits of its device.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub throttle: Option<ThrottleSettings>,
    /// Paths of the sockets that were added for virtual machines.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub vhost_user: Vec<PathBuf>,
    /// The block device that was added to it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ublk: Option<RecordedUblkDisk>,
    /// The lock file of the server that has the clone.
    pub server: String,
}

impl CloneRecord {
    /// The identifier of the record of a clone on `destination`: a destination is one clone's.
    pub(crate) fn id_of(destination: &StableDiskId) -> String {
        format!("{:016x}", destination.fingerprint())
    }

    /// True if the clone was finished: its table is linear.
    pub(crate) fn is_finished(&self) -> bool {
        self.metadata.is_none()
    }
}

impl StateFolder {
    /// All records of clones, by name.
    ///
    /// # Errors
    /// A text, if they can't be read.
    pub(crate) fn clones(&self) -> Result<Vec<CloneRecord>, String> {
        let mut found =
            read_records(&self.path.join(RECORDS), "which clones there are", |_| true, read_clone_record)?;
        found.sort_by(|one: &CloneRecord, other| (&one.name, &one.id).cmp(&(&other.name, &other.id)));
        Ok(found)
    }

    /// The record of the device `name` of this server.
    pub(crate) fn own_clone(&self, name: &str) -> Option<CloneRecord> {
        self.own_clones().values().find(|record| record.name == name).cloned()
    }

    /// All records of clones of this server.
    pub(crate) fn all_own_clones(&self) -> Vec<CloneRecord> {
        self.own_clones().values().cloned().collect()
    }

    /// Writes the record of the device `name` of this server as `change` has changed it, if there
    /// is one and it is another one then. May block.
    ///
    /// # Errors
    /// As [`StateFolder::put_clone`].
    pub(crate) fn change_clone(
        &self,
        name: &str,
        change: impl FnOnce(CloneRecord) -> CloneRecord,
    ) -> io::Result<()> {
        let _files = self.lock_clone_files();
        let Some(was) = self.own_clone(name) else { return Ok(()) };
        let record = change(was.clone());
        if record == was { Ok(()) } else { self.write_clone(&record) }
    }

    fn lock_clone_files(&self) -> MutexGuard<'_, ()> {
        self.clone_files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a record of this server. May block.
    ///
    /// # Errors
    /// If it can't be written durably. What a power cut leaves is then not known.
    pub(crate) fn put_clone(&self, record: &CloneRecord) -> io::Result<()> {
        let _files = self.lock_clone_files();
        self.write_clone(record)
    }

    /// As [`StateFolder::put_clone`], for the holder of the lock.
    fn write_clone(&self, record: &CloneRecord) -> io::Result<()> {
        let record = CloneRecord { server: self.begin()?, ..record.clone() };
        let folder = self.path.join(RECORDS);
        self.create_folder(&folder)?;
        write_durably(&folder, &[(self.clone_path(&record.id), serde_json::to_vec(&record)?)])?;
        self.own_clones().insert(record.id.clone(), record);
        Ok(())
    }

    /// Takes a record that no server has that runs, as this server's. Returns it as it is then;
    /// `None` if another server has it, or if it is gone. May block.
    ///
    /// # Errors
    /// If it can't be read or written.
    pub(crate) fn take_clone(&self, id: &str) -> io::Result<Option<CloneRecord>> {
        let folder = match File::open(self.path.join(RECORDS)) {
            Ok(folder) => folder,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        // Held until the record names this server, so that no other one takes it too.
        flock(&folder, FlockOperation::LockExclusive)?;
        let record = match read_clone_record(&self.clone_path(id)) {
            Ok(record) => record,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        if self.runs_elsewhere(&record.server) {
            return Ok(None);
        }
        self.put_clone(&record)?;
        Ok(Some(record))
    }

    /// Removes a record, if there is one. May block.
    ///
    /// # Errors
    /// If it can't be removed durably: the clone may return then.
    pub(crate) fn forget_clone(&self, id: &str) -> io::Result<()> {
        let _files = self.lock_clone_files();
        match fs::remove_file(self.clone_path(id)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        self.own_clones().remove(id);
        match File::open(self.path.join(RECORDS)) {
            Ok(folder) => folder.sync_all(),
            Err(_) => Ok(()),
        }
    }

    /// True if another server that runs has the clone.
    pub(crate) fn has_clone_elsewhere(&self, record: &CloneRecord) -> bool {
        self.runs_elsewhere(&record.server)
    }

    fn clone_path(&self, id: &str) -> PathBuf {
        self.path.join(RECORDS).join(format!("{id}.json"))
    }
}

fn read_clone_record(path: &Path) -> io::Result<CloneRecord> {
    read_own_record(path, RECORD_MAX, |record: &CloneRecord| &record.id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(name: &str) -> CloneRecord {
        let destination = StableDiskId { name: format!("/{name}.img"), disk: None };
        CloneRecord {
            id: CloneRecord::id_of(&destination),
            name: name.into(),
            uuid: None,
            table: format!("0 8 linear /{name}.img 0"),
            sectors: 8,
            source_sectors: 8,
            destination,
            metadata: None,
            object: None,
            throttle: None,
            vhost_user: Vec::new(),
            ublk: None,
            server: String::new(),
        }
    }

    #[test]
    fn one_server_at_a_time_has_a_record() {
        let temporary = tempfile::tempdir().unwrap();
        let at = temporary.path().join("state");
        let (folder, next) = (StateFolder::new(at.clone()), StateFolder::new(at));
        assert_eq!((folder.clones(), folder.take_clone("x").unwrap()), (Ok(Vec::new()), None));
        let one = record("one");
        folder.put_clone(&one).unwrap();
        assert!(folder.own_clone("one").is_some() && next.own_clone("one").is_none());
        let written = next.clones().unwrap().remove(0);
        assert!(next.has_clone_elsewhere(&written) && !folder.has_clone_elsewhere(&written));
        assert_eq!(next.take_clone(&one.id).unwrap(), None, "the other server runs");
        drop(folder);
        assert_eq!(next.take_clone(&one.id).unwrap().map(|taken| taken.name), Some("one".into()));
        assert!(next.own_clone("one").is_some());
        next.forget_clone(&one.id).unwrap();
        assert_eq!((next.clones(), next.own_clone("one")), (Ok(Vec::new()), None));
        next.forget_clone(&one.id).unwrap();
    }

    #[test]
    fn a_record_that_cannot_be_read_is_said() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = StateFolder::new(temporary.path().join("state"));
        folder.put_clone(&record("one")).unwrap();
        fs::write(folder.clone_path("x"), "{").unwrap();
        assert!(folder.clones().is_err_and(|why| why.contains("which clones there are is not known")));
        fs::copy(folder.clone_path(&record("one").id), folder.clone_path("x")).unwrap();
        assert!(folder.clones().is_err_and(|why| why.contains("its name is not that of its record")));
    }
}
