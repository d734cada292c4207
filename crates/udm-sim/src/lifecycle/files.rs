//! The files that outlive a server: origins, stores and the state folder.
//!
//! They are in a temporary folder. A file has a real name, identity and length. Its content is on a
//! simulated disk. Before a server starts, the content of stores is written to their files, because
//! the state folder reads it there.

use crate::disk::SimDisk;
use crate::environment::{Env, SimPathState};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tempfile::TempDir;
use udm_core::SECTOR_SIZE;

/// Base of the modification times of files, in seconds since 1970. It is old enough that each
/// change is visible.
const LONG_AGO: u64 = 1_500_000_000;

/// Identity of a file: inode and creation time.
type FileIdentity = (u64, u64, Option<SystemTime>);

/// A file whose content is on a simulated disk. Both have the same index.
struct FileOnSimDisk {
    file: File,
    identity: FileIdentity,
    /// Number of the last write for which the modification time was set.
    stamped: u64,
}

/// The persistent files of a world.
pub(super) struct PersistentFiles {
    temporary: Option<TempDir>,
    base: PathBuf,
    simulated: Vec<FileOnSimDisk>,
}

fn read_file_identity(file: &File) -> io::Result<FileIdentity> {
    let found = file.metadata()?;
    Ok((found.dev(), found.ino(), found.created().ok()))
}

impl PersistentFiles {
    /// Creates an empty folder.
    pub(super) fn new() -> io::Result<PersistentFiles> {
        // In memory if possible, because the files need not survive.
        let memory = Path::new("/dev/shm");
        let temporary = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }?;
        let base = fs::canonicalize(temporary.path())?;
        fs::create_dir(base.join("now"))?;
        Ok(PersistentFiles { temporary: Some(temporary), base, simulated: Vec::new() })
    }

    /// Path of `name`.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.base.join("now").join(name)
    }

    /// Path of the state folder.
    pub(super) fn state(&self) -> PathBuf {
        self.path("state")
    }

    /// Removes all files.
    pub(super) fn remove(&mut self) {
        self.temporary = None;
    }

    /// Creates a file of this many sectors.
    pub(super) fn make(&self, name: &str, sectors: u64) -> io::Result<()> {
        File::create_new(self.path(name))?.set_len(sectors * SECTOR_SIZE)
    }

    /// Returns the disk of the file at `path`. If the file is new, its disk is created: with
    /// initial content for an origin, otherwise blank.
    pub(super) fn disk(&mut self, path: &Path, env: &mut Env, is_origin: bool) -> io::Result<usize> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let identity = read_file_identity(&file)?;
        if let Some(known) = self.simulated.iter().position(|one| one.identity == identity) {
            return Ok(known);
        }
        let (disk, sectors) = (self.simulated.len(), file.metadata()?.len() / SECTOR_SIZE);
        let mut simulated = SimDisk::new(disk, sectors);
        if !is_origin {
            simulated.log = true;
            (0..sectors).for_each(|sector| simulated.blank(sector));
        }
        env.disks.push(simulated);
        env.paths.push(SimPathState { prompt: true, ..SimPathState::healthy(disk, 20_000) });
        self.simulated.push(FileOnSimDisk { file, identity, stamped: 0 });
        Ok(disk)
    }

    /// Sets the modification time of each file for its last write.
    pub(super) fn tell_writes(&mut self, env: &Env) -> io::Result<()> {
        for (one, disk) in self.simulated.iter_mut().zip(&env.disks) {
            if !disk.log && std::mem::replace(&mut one.stamped, disk.mark()) != disk.mark() {
                let changed = Duration::from_secs(LONG_AGO) + Duration::from_micros(disk.mark());
                one.file.set_modified(UNIX_EPOCH + changed)?;
            }
        }
        Ok(())
    }

    /// Writes the content of stores to their files.
    pub(super) fn write_stores(&self, env: &Env) -> io::Result<()> {
        for (one, disk) in self.simulated.iter().zip(&env.disks).filter(|(_, disk)| disk.log) {
            for sector in 0..disk.sectors() {
                one.file.write_all_at(&disk.bytes(sector, false), sector * SECTOR_SIZE)?;
            }
        }
        Ok(())
    }

    /// After a kill: replaces the files by a copy that the killed server may change.
    pub(super) fn freeze(&self) -> io::Result<()> {
        let (now, kept) = (self.base.join("now"), self.base.join("kept"));
        fs::rename(&now, &kept)?;
        copy_folder(&kept, &now)
    }

    /// Discards the copy and restores the files.
    pub(super) fn thaw(&self) -> io::Result<()> {
        let (now, kept) = (self.base.join("now"), self.base.join("kept"));
        fs::remove_dir_all(&now)?;
        fs::rename(kept, now)
    }
}

/// Copies a folder. Files whose content is on simulated disks are created empty.
fn copy_folder(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (name, path) = (to.join(entry.file_name()), entry.path());
        if path.is_dir() {
            copy_folder(&path, &name)?;
        } else if path.extension().is_some_and(|extension| extension == "json") {
            fs::copy(&path, &name)?;
        } else {
            File::create_new(&name)?;
        }
    }
    Ok(())
}
