//! Records of moved disks: where the content of a disk is, and where it was.
//!
//! `moves/ID.json` in the state folder is one record. A move writes it before the first copy, and
//! again at the switch: this one write decides which place is the disk. Before it the current place
//! has every acknowledged write, and after it the new place has. The places that a disk has left
//! stay in the record, so no server serves their old content by mistake.
//!
//! `moves/ID.log` beside it is the write-intent log of a move that is under way.
//!
//! Durable as the other records are: written under another name, synced, renamed into place, and
//! the folder is synced.

use super::{StableDiskId, StateFolder, read_own_record, read_records, write_durably};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The folder of the records in the state folder.
const RECORDS: &str = "moves";

/// Maximum number of bytes read from a record.
const RECORD_MAX: u64 = 256 << 10;

/// A range of a disk, by its first sector.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DiskPlace {
    /// The device as a word of a table.
    pub word: String,
    /// The identity of the disk.
    pub disk: StableDiskId,
    /// The first sector.
    pub start: u64,
    /// If the device is a mapped one: what its table uses, and the tables below it. A table over
    /// one of these would serve the content of the place, too.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub beneath: Vec<DiskPiece>,
}

/// A range of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DiskPiece {
    /// The identity of the disk.
    pub disk: StableDiskId,
    /// The first sector.
    pub start: u64,
    /// The length in sectors.
    pub sectors: u64,
}

/// How a disk that was found relates to the disk of a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PlaceMatch {
    /// It is the disk, or has its name while the disk itself is not there.
    Same,
    /// Another disk has the name.
    Replaced,
    /// It is another disk.
    Other,
}

impl DiskPlace {
    /// Compares the disk of this place with `found`.
    pub(crate) fn compare(&self, found: &StableDiskId) -> PlaceMatch {
        compare_disks(&self.disk, found)
    }

    /// True if `sectors` sectors of `found` from `start` on have content of this place, which has
    /// `len` sectors.
    pub(crate) fn overlaps(&self, len: u64, found: &StableDiskId, start: u64, sectors: u64) -> bool {
        let own = DiskPiece { disk: self.disk.clone(), start: self.start, sectors: len };
        std::iter::once(&own).chain(&self.beneath).any(|piece| {
            compare_disks(&piece.disk, found) == PlaceMatch::Same
                && start < piece.start.saturating_add(piece.sectors)
                && piece.start < start.saturating_add(sectors)
        })
    }

    /// True if `found` is the device of this place, or below it.
    pub(crate) fn is_part(&self, found: &StableDiskId) -> bool {
        let beneath = self.beneath.iter().map(|piece| &piece.disk);
        std::iter::once(&self.disk).chain(beneath).any(|disk| disk == found)
    }

    /// True for the same range of the same disk.
    pub(crate) fn is(&self, other: &DiskPlace) -> bool {
        self.start == other.start && self.compare(&other.disk) == PlaceMatch::Same
    }
}

fn compare_disks(known: &StableDiskId, found: &StableDiskId) -> PlaceMatch {
    match (known.disk.zip(found.disk), known.name == found.name) {
        (Some((was, is)), _) if was.is(is) => PlaceMatch::Same,
        (Some(_), true) => PlaceMatch::Replaced,
        (None, true) => PlaceMatch::Same,
        (_, false) => PlaceMatch::Other,
    }
}

/// The record of a disk that was moved, or is being moved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MoveRecord {
    /// The name of its file, without `.json`.
    pub id: String,
    /// Name of the device when it was moved last.
    pub name: String,
    /// Length of the disk in sectors.
    pub sectors: u64,
    /// The place with the content.
    pub current: DiskPlace,
    /// The places that the disk has left, the oldest first.
    pub old: Vec<DiskPlace>,
    /// The place to which it is being moved.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub destination: Option<DiskPlace>,
    /// The device of the move's log, as a word of a table. The next server continues from it;
    /// without one, it copies all again. So the log is named only as long as every write of the
    /// current place goes through the mirror.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub log: Option<String>,
    /// The lock file of the server that moves it.
    pub server: String,
}

impl MoveRecord {
    /// A record of a disk that has not moved yet.
    pub(crate) fn new(name: &str, sectors: u64, current: DiskPlace) -> MoveRecord {
        // Unique: an earlier disk at the same place may have a record too.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let id = format!("{:016x}-{since:x}", current.disk.fingerprint());
        let (old, destination, log, server) = (Vec::new(), None, None, String::new());
        MoveRecord { id, name: name.to_owned(), sectors, current, old, destination, log, server }
    }

    /// The record after the switch to the destination.
    pub(crate) fn switched(&self) -> MoveRecord {
        let Some(current) = self.destination.clone() else { return self.clone() };
        let mut old = self.old.clone();
        old.push(self.current.clone());
        old.retain(|place| !place.is(&current));
        MoveRecord { current, old, destination: None, log: None, ..self.clone() }
    }

    /// True if the record says nothing: the disk is where it was, and is not being moved.
    pub(crate) fn is_needless(&self) -> bool {
        self.old.is_empty() && self.destination.is_none()
    }
}

impl StateFolder {
    /// All records of moves.
    ///
    /// # Errors
    /// A text, if they can't be read: then where disks are is not known.
    pub(crate) fn moves(&self) -> Result<Vec<MoveRecord>, String> {
        let folder = self.path.join(RECORDS);
        let mut found = read_records(&folder, "which disks were moved", |_| true, read_move_record)?;
        found.sort_by(|one: &MoveRecord, other| one.id.cmp(&other.id));
        Ok(found)
    }

    /// Writes a record of this server, or removes one that says nothing. Returns the record as it
    /// was written. May block.
    ///
    /// # Errors
    /// If it can't be written durably. What a power cut leaves is then not known.
    pub(crate) fn put_move(&self, record: &MoveRecord) -> io::Result<MoveRecord> {
        let record = MoveRecord { server: self.begin()?, ..record.clone() };
        let folder = self.path.join(RECORDS);
        let path = self.move_path(&record.id);
        if !record.is_needless() {
            self.create_folder(&folder)?;
            write_durably(&folder, &[(path, serde_json::to_vec(&record)?)])?;
            if record.log.is_none() {
                // Nobody continues from it. A mirror that still writes it keeps the open file.
                let _ = fs::remove_file(self.move_log_path(&record.id));
            }
            return Ok(record);
        }
        let _ = fs::remove_file(self.move_log_path(&record.id));
        match fs::remove_file(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(record),
            removed => removed.and_then(|()| super::sync_folder(&folder)).map(|()| record),
        }
    }

    /// Makes the log file of a move, of `bytes` zeroes that take their space. Returns its path. May
    /// block.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn make_move_log(&self, id: &str, bytes: u64) -> io::Result<PathBuf> {
        let folder = self.path.join(RECORDS);
        self.create_folder(&folder)?;
        let path = self.move_log_path(id);
        let _ = fs::remove_file(&path);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes).or_else(|error| match error {
            // A log on a full disk fails later, and the move copies all again.
            Errno::OPNOTSUPP => Ok(rustix::fs::ftruncate(&file, bytes)?),
            error => Err(error),
        })?;
        file.sync_all()?;
        super::sync_folder(&folder)?;
        fs::canonicalize(path)
    }

    fn move_log_path(&self, id: &str) -> PathBuf {
        self.path.join(RECORDS).join(format!("{id}.log"))
    }

    fn move_path(&self, id: &str) -> PathBuf {
        self.path.join(RECORDS).join(format!("{id}.json"))
    }

    /// True if another server that runs moves the disk.
    pub(crate) fn is_moved_elsewhere(&self, record: &MoveRecord) -> bool {
        self.runs_elsewhere(&record.server)
    }
}

fn read_move_record(path: &Path) -> io::Result<MoveRecord> {
    read_own_record(path, RECORD_MAX, |record: &MoveRecord| &record.id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state_folder::stable_disk_id::FileId;

    fn place(name: &str, number: u64) -> DiskPlace {
        let disk = Some(FileId::Block { number });
        let disk = StableDiskId { name: name.into(), disk };
        DiskPlace { word: name.into(), disk, start: 0, beneath: Vec::new() }
    }

    #[test]
    fn a_disk_that_moves_back_leaves_only_the_other_place() {
        let (a, b) = (place("/a", 1), place("/b", 2));
        let record = MoveRecord::new("disk", 8, a.clone());
        assert!(record.is_needless());
        let there = MoveRecord { destination: Some(b.clone()), ..record }.switched();
        assert_eq!((&there.current, &there.old), (&b, &vec![a.clone()]));
        let back = MoveRecord { destination: Some(a.clone()), ..there }.switched();
        assert_eq!((back.current, back.old), (a, vec![b]));
    }

    #[test]
    fn another_disk_under_the_name_is_noticed() {
        let old = place("/a", 1);
        assert_eq!(old.compare(&place("/link", 1).disk), PlaceMatch::Same);
        assert_eq!(old.compare(&place("/a", 2).disk), PlaceMatch::Replaced);
        assert_eq!(old.compare(&place("/b", 2).disk), PlaceMatch::Other);
        assert_eq!(old.compare(&StableDiskId { name: "/a".into(), disk: None }), PlaceMatch::Same);
    }

    #[test]
    fn records_survive_and_those_that_say_nothing_go() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = StateFolder::new(temporary.path().join("state"));
        assert_eq!(folder.moves(), Ok(Vec::new()));
        let record = MoveRecord::new("disk", 8, place("/a", 1));
        let moving = MoveRecord { destination: Some(place("/b", 2)), ..record.clone() };
        let moving = folder.put_move(&moving).unwrap();
        let next = StateFolder::new(temporary.path().join("state"));
        assert_eq!(next.moves(), Ok(vec![moving.clone()]));
        assert!(next.is_moved_elsewhere(&moving) && !folder.is_moved_elsewhere(&moving));
        drop(folder);
        assert!(!next.is_moved_elsewhere(&moving));
        next.put_move(&record).unwrap();
        assert_eq!(next.moves(), Ok(Vec::new()));
        fs::write(next.move_path("x"), "{").unwrap();
        assert!(next.moves().is_err_and(|why| why.contains("which disks were moved is not known")));
    }
}
