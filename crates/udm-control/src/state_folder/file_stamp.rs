//! Detects changes of files: an origin by its size and time of change, a created store by its file
//! identity.

use super::StableDiskId;
use super::stable_disk_id::FileId;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Longer than one step of a file system's clock. A file changed less than this ago can change
/// again without a later time of change.
const CLOCK_STEP: Duration = Duration::from_millis(20);

/// Size and time of change of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileStamp {
    size_bytes: u64,
    /// In ns since 1970.
    changed_ns: i128,
}

/// A file created for a snapshot, with its identity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct IdentifiedStoreFile {
    /// The path at which it was created.
    pub path: PathBuf,
    /// Identity of the file.
    disk: FileId,
}

impl IdentifiedStoreFile {
    /// The open file `opened`, created at `path`.
    ///
    /// # Errors
    /// The system's; `InvalidInput` if it is neither a file nor a block device.
    pub(crate) fn new(path: &Path, opened: &File) -> io::Result<IdentifiedStoreFile> {
        let disk = FileId::of(&opened.metadata()?).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(IdentifiedStoreFile { path: path.to_owned(), disk })
    }

    /// Removes the file, unless another file is at its path by now. A missing file is no error.
    ///
    /// # Errors
    /// The system's; `Other` if another file is at the path.
    pub(crate) fn remove(&self) -> io::Result<()> {
        match fs::symlink_metadata(&self.path) {
            Ok(found) if FileId::of(&found).is_some_and(|disk| disk.is(self.disk)) => {
                fs::remove_file(&self.path)
            }
            Ok(_) => Err(io::Error::other("it is another file by now, so it stays")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// True if `store` is this file.
    pub(crate) fn is(&self, store: &StableDiskId) -> bool {
        store.disk.is_some_and(|disk| disk.is(self.disk))
    }
}

impl FileStamp {
    /// How the file differs from this stamp, as a text that follows the file's name. `None` if it
    /// does not.
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

    /// The stamp of the file of `disk`, taken so that any later write changes it. If the file was
    /// changed just now, this waits for a step of the file system's clock. `None` if it is no file,
    /// does not exist or is being written.
    pub(crate) fn settled(disk: &StableDiskId) -> Option<FileStamp> {
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
