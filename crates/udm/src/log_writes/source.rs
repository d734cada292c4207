//! A log, read from a file.

use anyhow::{Context, Result};
use std::fs::{File, Metadata};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use udm_wire::log_writes::{LogWritesCursor, LogWritesEntry, LogWritesSuperblock, SECTOR_SIZE_MIN};

/// A log and a cursor over its entries.
pub(super) struct LogWritesReader {
    file: File,
    path: PathBuf,
    cursor: LogWritesCursor,
    sector: Vec<u8>,
}

impl LogWritesReader {
    /// Opens the log at `path`.
    pub(super) fn open(path: &Path) -> Result<LogWritesReader> {
        let context = || path.display().to_string();
        let mut file = File::open(path).with_context(context)?;
        // Finds the length by seeking to the end: a block device has no length in its metadata.
        let len = file.seek(SeekFrom::End(0)).with_context(context)?;
        let mut first = vec![0; len.min(SECTOR_SIZE_MIN.into()) as usize];
        file.read_exact_at(&mut first, 0).with_context(context)?;
        let cursor = LogWritesCursor::new(&first, len).with_context(context)?;
        let sector = vec![0; cursor.superblock().sector_size as usize];
        Ok(LogWritesReader { file, path: path.to_owned(), cursor, sector })
    }

    /// True if `other` is the file or block device of the log, under any name.
    pub(super) fn is_same(&self, other: &File) -> Result<bool> {
        let context = || self.path.display().to_string();
        let (log, other) =
            (self.file.metadata().with_context(context)?, other.metadata().with_context(context)?);
        let both = |test: fn(&Metadata) -> bool| test(&log) && test(&other);
        // A block device may have several nodes; the device number identifies it.
        let node = both(|m| m.file_type().is_block_device()) && log.rdev() == other.rdev();
        Ok(node || (log.dev(), log.ino()) == (other.dev(), other.ino()))
    }

    pub(super) fn superblock(&self) -> LogWritesSuperblock {
        self.cursor.superblock()
    }

    /// Reads the next entry; `None` after the last one.
    pub(super) fn next(&mut self) -> Result<Option<LogWritesEntry>> {
        let Some(at) = self.cursor.offset().with_context(|| self.path.display().to_string())? else {
            return Ok(None);
        };
        let mut sector = std::mem::take(&mut self.sector);
        let read = self.data(&mut sector, at);
        self.sector = sector;
        read?;
        let record = self.cursor.step(&self.sector);
        record.map(Some).with_context(|| self.path.display().to_string())
    }

    /// Reads the bytes of the log at `at` into `out`.
    pub(super) fn data(&self, out: &mut [u8], at: u64) -> Result<()> {
        self.file.read_exact_at(out, at).with_context(|| format!("{}: at byte {at}", self.path.display()))
    }
}
