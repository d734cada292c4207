//! The device that a replay writes to, and copies of it.

use super::source::LogWritesReader;
use anyhow::{Context, Result, bail};
use rustix::fs::{FallocateFlags, SeekFrom as Seek};
use std::fs::{File, OpenOptions};
use std::io::SeekFrom;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes per copy operation.
const STEP: u64 = 1 << 20;

/// The file or block device to write to.
pub(super) struct ReplayOutputImage {
    file: File,
    path: PathBuf,
    size: u64,
    buffer: Vec<u8>,
}

impl ReplayOutputImage {
    /// Opens `path` for writing; with `size`, creates it. Refuses the file of the log itself, under
    /// any name.
    pub(super) fn open(path: &Path, size: Option<u64>, log: &LogWritesReader) -> Result<ReplayOutputImage> {
        let context = || path.display().to_string();
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(size.is_some());
        let mut file = match options.open(path) {
            Err(e) if size.is_none() && e.kind() == std::io::ErrorKind::NotFound => {
                bail!("{}: no such file; --size makes one", path.display())
            }
            other => other.with_context(context)?,
        };
        if log.is_same(&file)? {
            bail!(
                "{}: this is the log itself; a replay would write over it: name another file",
                path.display()
            );
        }
        if let Some(size) = size {
            file.set_len(size).with_context(context)?;
        }
        let size = std::io::Seek::seek(&mut file, SeekFrom::End(0)).with_context(context)?;
        Ok(ReplayOutputImage { file, path: path.to_owned(), size, buffer: vec![0; STEP as usize] })
    }

    pub(super) fn size(&self) -> u64 {
        self.size
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Copies the bytes `data` of `log` to `at`.
    pub(super) fn write(&mut self, log: &LogWritesReader, data: &Range<u64>, at: u64) -> Result<()> {
        for from in data.clone().step_by(STEP as usize) {
            let buffer = &mut self.buffer[..(data.end - from).min(STEP) as usize];
            log.data(buffer, from)?;
            let to = at + (from - data.start);
            self.file.write_all_at(buffer, to).with_context(|| self.path.display().to_string())?;
        }
        Ok(())
    }

    /// Makes `range` read as zeroes.
    pub(super) fn zero(&mut self, range: &Range<u64>) -> Result<()> {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let len = range.end - range.start;
        if len == 0 || rustix::fs::fallocate(&self.file, hole, range.start, len).is_ok() {
            return Ok(());
        }
        self.buffer.fill(0);
        for at in range.clone().step_by(STEP as usize) {
            let buffer = &self.buffer[..(range.end - at).min(STEP) as usize];
            self.file.write_all_at(buffer, at).with_context(|| self.path.display().to_string())?;
        }
        Ok(())
    }

    /// Makes `to` a copy of the image: shares blocks if the file system can, else copies without
    /// the holes.
    pub(super) fn copy_to(&mut self, to: &File) -> Result<()> {
        let context = || format!("{}: copy", self.path.display());
        to.set_len(0).with_context(context)?;
        if rustix::fs::ioctl_ficlone(to, &self.file).is_ok() {
            return Ok(());
        }
        to.set_len(self.size).with_context(context)?;
        let mut at = 0;
        while at < self.size {
            // A file system without holes reports everything as data; a block device supports no
            // SEEK_DATA.
            let start = match rustix::fs::seek(&self.file, Seek::Data(at)) {
                Ok(start) => start,
                Err(rustix::io::Errno::NXIO) => break,
                Err(_) => at,
            };
            let end = rustix::fs::seek(&self.file, Seek::Hole(start))
                .unwrap_or(self.size)
                .clamp(start + 1, self.size);
            for from in (start..end).step_by(STEP as usize) {
                let buffer = &mut self.buffer[..(end - from).min(STEP) as usize];
                self.file.read_exact_at(buffer, from).with_context(context)?;
                to.write_all_at(buffer, from).with_context(context)?;
            }
            at = end;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_equal_and_keeps_holes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let log = folder.path().join("log");
        let mut head = [0; 512];
        udm_wire::log_writes::LogWritesSuperblock { entries: 0, sector_size: 512 }.encode(&mut head);
        std::fs::write(&log, head).unwrap();
        let log = LogWritesReader::open(&log).unwrap();
        let mut image = ReplayOutputImage::open(&path, Some(8 << 20), &log).unwrap();
        image.file.write_all_at(&[7; 5000], 3 << 20).unwrap();
        image.file.write_all_at(&[8; 10], (8 << 20) - 10).unwrap();
        let copy = tempfile::NamedTempFile::new_in(folder.path()).unwrap();
        // The remains of an earlier check.
        copy.as_file().write_all_at(&[9; 100], 100).unwrap();
        image.copy_to(copy.as_file()).unwrap();
        assert!(std::fs::read(&path).unwrap() == std::fs::read(copy.path()).unwrap());
        image.zero(&((3 << 20) + 1..(3 << 20) + 4999)).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!((bytes[3 << 20], bytes[(3 << 20) + 1], bytes[(3 << 20) + 4999]), (7, 0, 7));
        assert!(ReplayOutputImage::open(&path, Some(1), &log).is_err(), "never over an old file");
        assert!(ReplayOutputImage::open(&folder.path().join("no"), None, &log).is_err());
    }
}
