//! The files that outlive a server: origins, stores and the state folder.
//!
//! They lie in a temporary folder. A file has its name, its identity and its length there; what is
//! in it is on a simulated disk. Before a server starts, what stores have in them is written to
//! their files, where the state folder looks.

use crate::disk::SimDisk;
use crate::environment::{Env, PathState};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tempfile::TempDir;
use udm_core::SECTOR_SIZE;

/// When files were last changed before anything happened, in s since 1970: so long ago that a
/// change shows.
const LONG_AGO: u64 = 1_500_000_000;

/// Which file it is: its inode, and when it was made.
type FileIdentity = (u64, u64, Option<SystemTime>);

/// A file whose content is on a simulated disk. Both have the same place in their lists.
struct SimFile {
    file: File,
    identity: FileIdentity,
    /// The writes that its time of change tells of.
    told: u64,
}

/// See the module.
pub(super) struct PersistentFiles {
    temporary: Option<TempDir>,
    base: PathBuf,
    simulated: Vec<SimFile>,
}

fn identity(file: &File) -> io::Result<FileIdentity> {
    let found = file.metadata()?;
    Ok((found.dev(), found.ino(), found.created().ok()))
}

impl PersistentFiles {
    /// An empty folder.
    pub(super) fn new() -> io::Result<PersistentFiles> {
        // In memory, if there is such a file system: nothing here has to last.
        let memory = Path::new("/dev/shm");
        let temporary = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }?;
        let base = fs::canonicalize(temporary.path())?;
        fs::create_dir(base.join("now"))?;
        Ok(PersistentFiles { temporary: Some(temporary), base, simulated: Vec::new() })
    }

    /// Where `name` is.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.base.join("now").join(name)
    }

    /// The state folder.
    pub(super) fn state(&self) -> PathBuf {
        self.path("state")
    }

    /// Removes everything.
    pub(super) fn remove(&mut self) {
        self.temporary = None;
    }

    /// Makes a file of so many sectors.
    pub(super) fn make(&self, name: &str, sectors: u64) -> io::Result<()> {
        File::create_new(self.path(name))?.set_len(sectors * SECTOR_SIZE)
    }

    /// The disk that the file at `path` is; one that was not seen before is blank, or, if it is an
    /// origin, has what disks have at first.
    pub(super) fn disk(&mut self, path: &Path, env: &mut Env, is_origin: bool) -> io::Result<usize> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let identity = identity(&file)?;
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
        env.paths.push(PathState { prompt: true, ..PathState::healthy(disk, 20_000) });
        self.simulated.push(SimFile { file, identity, told: 0 });
        Ok(disk)
    }

    /// The time of change of each file tells of the last write to it.
    pub(super) fn tell_writes(&mut self, env: &Env) -> io::Result<()> {
        for (one, disk) in self.simulated.iter_mut().zip(&env.disks) {
            if !disk.log && std::mem::replace(&mut one.told, disk.mark()) != disk.mark() {
                let changed = Duration::from_secs(LONG_AGO) + Duration::from_micros(disk.mark());
                one.file.set_modified(UNIX_EPOCH + changed)?;
            }
        }
        Ok(())
    }

    /// Stores have in their files what they have.
    pub(super) fn write_stores(&self, env: &Env) -> io::Result<()> {
        for (one, disk) in self.simulated.iter().zip(&env.disks).filter(|(_, disk)| disk.log) {
            for sector in 0..disk.sectors() {
                one.file.write_all_at(&disk.bytes(sector, false), sector * SECTOR_SIZE)?;
            }
        }
        Ok(())
    }

    /// Whatever is done to files from here on is done to a copy: the server was killed.
    pub(super) fn freeze(&self) -> io::Result<()> {
        let (now, kept) = (self.base.join("now"), self.base.join("kept"));
        fs::rename(&now, &kept)?;
        copy_folder(&kept, &now)
    }

    /// And that copy goes.
    pub(super) fn thaw(&self) -> io::Result<()> {
        let (now, kept) = (self.base.join("now"), self.base.join("kept"));
        fs::remove_dir_all(&now)?;
        fs::rename(kept, now)
    }
}

/// Copies a folder; of files that are on simulated disks, the names.
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
