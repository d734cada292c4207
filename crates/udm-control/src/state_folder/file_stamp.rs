//! How files are known again: an origin by its size and the time of its last change, a store that
//! was made by which file it is.

use super::StoreId;
use super::store_id::FileId;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use udm_core::bugs::{self, Bug};

/// Longer than a file system's clock takes for a step. A file that was changed less than this ago
/// can be changed again without a later time of change.
const CLOCK_STEP: Duration = Duration::from_millis(20);

/// How a file was when it was last looked at: its size, and when it was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileStamp {
    size_bytes: u64,
    /// In ns since 1970.
    changed_ns: i128,
}

/// A file that was made for a snapshot, and how it is known again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoreFile {
    /// Where it was made.
    pub path: PathBuf,
    /// Which file it is.
    disk: FileId,
}

impl StoreFile {
    /// The file that `opened` is, at `path`.
    ///
    /// # Errors
    /// The system's; `InvalidInput` for what is no file.
    pub(crate) fn new(path: &Path, opened: &File) -> io::Result<StoreFile> {
        let disk = FileId::of(&opened.metadata()?).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(StoreFile { path: path.to_owned(), disk })
    }

    /// Removes the file, if it is the one that was made: whatever else is at its path by now stays.
    ///
    /// # Errors
    /// The system's; `Other` when it is another file. None when there is none.
    pub(crate) fn remove(&self) -> io::Result<()> {
        if bugs::on(Bug::OtherFileRemoved) {
            return fs::remove_file(&self.path);
        }
        match fs::symlink_metadata(&self.path) {
            Ok(found) if FileId::of(&found).is_some_and(|disk| disk.is(self.disk)) => {
                fs::remove_file(&self.path)
            }
            Ok(_) => Err(io::Error::other("it is another file by now, so it stays")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// True when `store` is this file.
    pub(crate) fn is(&self, store: &StoreId) -> bool {
        store.disk.is_some_and(|disk| disk.is(self.disk))
    }
}

impl FileStamp {
    /// What is another about the file by now, in words that follow its name.
    pub(super) fn differs(&self, found: &fs::Metadata) -> Option<String> {
        let (was, is) = (self.size_bytes, found.len());
        match () {
            () if was != is => Some(format!("has {is} bytes, and had {was} when it was last attached")),
            () if *self != FileStamp::of(found) => Some("was written without it".into()),
            () => None,
        }
    }

    fn of(found: &fs::Metadata) -> FileStamp {
        let changed_ns = i128::from(found.mtime()) * 1_000_000_000 + i128::from(found.mtime_nsec());
        FileStamp { size_bytes: found.len(), changed_ns }
    }

    /// Of the file that `disk` is, when any later write shows: where it was changed just now that
    /// takes a step of the file system's clock. `None` for what is no file, or not there, or is
    /// being written.
    pub(crate) fn settled(disk: &StoreId) -> Option<FileStamp> {
        let is_settled = |found: &fs::Metadata| {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_nanos();
            let age = i128::try_from(now).ok()? - FileStamp::of(found).changed_ns;
            Some(!(0..CLOCK_STEP.as_nanos() as i128).contains(&age))
        };
        let first = disk.file()?;
        if is_settled(&first)? {
            return Some(FileStamp::of(&first));
        }
        std::thread::sleep(2 * CLOCK_STEP);
        let second = disk.file()?;
        is_settled(&second)?.then(|| FileStamp::of(&second))
    }
}
