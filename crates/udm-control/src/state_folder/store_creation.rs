//! Stores that are being created: if a server is killed meanwhile, the next one removes the
//! leftover.
//!
//! `making-N` in the state folder names the file by its path, inode and time of birth. It is
//! written before the store is created, and removed when the snapshot is in use or has failed. The
//! creator holds a lock on it (`flock`), which the kernel releases when the process ends. The file
//! is not synced, so a power cut may leave a store that is not removed.
//!
//! A leftover store is removed only if it is that very file, not in use, and without an exception
//! record, so it holds no data.

use super::StateFolder;
use rustix::fs::{FlockOperation, Mode, OFlags, SeekFrom, flock, open, seek};
use rustix::io::Errno;
use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::UNIX_EPOCH;
use udm_core::SECTOR_SIZE;
use udm_wire::cow::{ExceptionStoreHeader, ExceptionStoreLayout, HEADER_LEN, RECORD_LEN, SnapshotException};

/// Prefix of the names of these files.
const MAKING: &str = "making-";

/// Maximum number of bytes read: a path and two numbers.
const FILE_MAX: u64 = 8 << 10;

/// Marker of a store that is being created. Dropped when the store is kept or removed.
pub struct StoreCreationMarker {
    path: PathBuf,
    file: File,
}

impl StoreCreationMarker {
    /// Records the identity of the created store. Before that, only an empty file counts as the
    /// store.
    ///
    /// # Errors
    /// If it can't be written.
    pub(crate) fn set_created(&mut self, store: &File) -> io::Result<()> {
        self.file.write_all(format_file_identity(&store.metadata()?).as_bytes())
    }
}

/// Identity of a file. It includes the time of birth, because inode numbers are reused.
fn format_file_identity(found: &Metadata) -> String {
    let born = found.created().ok().and_then(|born| born.duration_since(UNIX_EPOCH).ok());
    format!("{} {} {}", found.dev(), found.ino(), born.unwrap_or_default().as_nanos())
}

impl Drop for StoreCreationMarker {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

impl StateFolder {
    /// Marks that `store`, an absolute path, is being created. `None` if the marker can't be
    /// written; the store is created anyway.
    pub(crate) fn begin_store_creation(&self, store: &Path) -> Option<StoreCreationMarker> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let begin = || -> io::Result<StoreCreationMarker> {
            self.create_folder(&self.path)?;
            loop {
                // Relaxed: each number is taken once.
                let number = COUNT.fetch_add(1, Ordering::Relaxed);
                let path = self.path.join(format!("{MAKING}{}-{number}", std::process::id()));
                let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let mut file = match open(&path, flags, Mode::RUSR | Mode::WUSR) {
                    Ok(file) => File::from(file),
                    // Left by an earlier process with the same PID.
                    Err(Errno::EXIST) => continue,
                    Err(error) => return Err(error.into()),
                };
                flock(&file, FlockOperation::LockExclusive)?;
                // Another server may have removed the file before it was locked.
                if file.metadata()?.nlink() > 0 {
                    file.write_all(store.as_os_str().as_bytes())?;
                    file.write_all(&[0])?;
                    return Ok(StoreCreationMarker { path, file });
                }
            }
        };
        let begun = begin();
        begun.inspect_err(|error| tracing::debug!("{}: {error}", self.path.display())).ok()
    }

    /// Removes the stores and lock files that killed servers left. Logs one line per store.
    pub fn clean(&self) {
        self.clean_servers();
        let Ok(entries) = fs::read_dir(&self.path) else { return };
        let is_one = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.starts_with(MAKING))
        };
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())).filter(is_one) {
            if let Err(error) = clean_up_store_creation(&path)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!("{}: {error}", path.display());
            }
        }
    }
}

/// Handles one marker; skips it if its creator still runs.
fn clean_up_store_creation(path: &Path) -> io::Result<()> {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = File::from(open(path, flags, Mode::empty())?);
    // Markers of other users are not trusted.
    if file.metadata()?.uid() != rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Ok(()),
        Err(error) => return Err(error.into()),
    }
    let mut bytes = Vec::new();
    (&file).take(FILE_MAX).read_to_end(&mut bytes)?;
    if let Some(end) = bytes.iter().position(|byte| *byte == 0) {
        let identity = String::from_utf8_lossy(&bytes[end + 1..]).into_owned();
        bytes.truncate(end);
        let store = PathBuf::from(std::ffi::OsString::from_vec(bytes));
        match remove_leftover_store(&store, &identity) {
            Ok(()) => {
                tracing::warn!("{}: removed, the server that was making it was killed", store.display());
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!("{}: left by a server that was killed: {error}", store.display()),
        }
    }
    fs::remove_file(path)
}

/// Removes `store` if it is the file with this identity and holds no data.
fn remove_leftover_store(store: &Path, identity: &str) -> io::Result<()> {
    let kept = |why: &str| io::Error::other(format!("{why}: the file is not removed"));
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(open(store, flags, Mode::empty())?);
    let found = file.metadata()?;
    let is_it = match identity {
        "" => found.len() == 0,
        known => known == format_file_identity(&found),
    };
    if !(is_it && found.is_file()) {
        return Err(kept("it is another file by now"));
    }
    if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        return Err(kept("it is in use"));
    }
    if has_exception_records(&file)? {
        return Err(kept("it has a snapshot in it"));
    }
    // The marker may be a lie of a process that was taken over.
    if !is_new_store(&file, found.len())? {
        return Err(kept("it is not a store"));
    }
    fs::remove_file(store)
}

/// True for a file as a server makes a store: a header, or nothing, and zeroes.
fn is_new_store(file: &File, len: u64) -> io::Result<bool> {
    let mut block = vec![0; 1 << 20];
    let mut at = 0;
    while at < len {
        // Skips holes. ENXIO: there is nothing but a hole.
        match seek(file, SeekFrom::Data(at)) {
            Ok(data) => at = data,
            Err(Errno::NXIO) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
        let n = file.read_at(&mut block, at)?;
        if n == 0 {
            return Ok(true);
        }
        let has_header = at == 0
            && n >= HEADER_LEN
            && block
                .first_chunk::<HEADER_LEN>()
                .is_some_and(|first| matches!(ExceptionStoreHeader::decode(first), Ok(Some(_))));
        let zeroes = if has_header { HEADER_LEN } else { 0 };
        if block[zeroes..n].iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
        at += n as u64;
    }
    Ok(true)
}

/// True for a persistent store with an exception record.
pub(super) fn has_exception_records(store: &File) -> io::Result<bool> {
    let mut first = [0; HEADER_LEN];
    match store.read_exact_at(&mut first, 0) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
        Err(error) => return Err(error),
    }
    let Ok(Some(header)) = ExceptionStoreHeader::decode(&first) else { return Ok(false) };
    let area =
        ExceptionStoreLayout::new(header.chunk).area(0) * u64::from(header.chunk.sectors()) * SECTOR_SIZE;
    let mut record = [0; RECORD_LEN];
    match store.read_exact_at(&mut record, area) {
        Ok(()) => Ok(SnapshotException::decode(&record, 0).is_some()),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use udm_wire::cow::ChunkSize;

    /// Writes a store of 64 KiB with a header and, if asked for, a record.
    fn store(path: &Path, record: bool) {
        let mut bytes = vec![0; 64 << 10];
        ExceptionStoreHeader { valid: true, chunk: ChunkSize::new(8).unwrap() }.encode(&mut bytes);
        if record {
            SnapshotException { old: 0, new: 2 }.encode(&mut bytes[4096..8192], 0);
        }
        fs::write(path, bytes).unwrap();
    }

    /// What a server makes, and what only has the place of it.
    #[test]
    fn a_new_store_has_a_header_and_zeroes() {
        let folder = tempfile::tempdir().unwrap();
        let is_new = |bytes: &[u8], len: u64| {
            let path = folder.path().join("file");
            fs::write(&path, bytes).unwrap();
            let file = File::options().read(true).write(true).open(&path).unwrap();
            file.set_len(len).unwrap();
            is_new_store(&file, len).unwrap()
        };
        let mut header = vec![0; 4096];
        ExceptionStoreHeader { valid: true, chunk: ChunkSize::new(8).unwrap() }.encode(&mut header);
        assert!(is_new(&[], 0) && is_new(&[], 64 << 20) && is_new(&[0; 100], 100));
        assert!(is_new(&header, 64 << 20) && is_new(&header, 4096));
        assert!(!is_new(b"a letter", 8) && !is_new(&[&[0; 4096][..], b"x"].concat(), 1 << 20));
        assert!(!is_new(&[&header[..], &[0; 4096], b"x"].concat(), 1 << 20));
        let late = [&vec![0; 3 << 20][..], b"x"].concat();
        assert!(!is_new(&late, late.len() as u64));
    }

    /// Makes the leftovers of a killed server.
    fn left(folder: &StateFolder, path: &Path, made: bool) {
        let mut creation = folder.begin_store_creation(path).unwrap();
        if made {
            creation.set_created(&File::open(path).unwrap()).unwrap();
        }
        let held = creation.path.clone();
        let bytes = fs::read(&held).unwrap();
        drop(creation);
        fs::write(held, bytes).unwrap();
    }

    fn is_empty(folder: &Path) -> bool {
        fs::read_dir(folder).unwrap().next().is_none()
    }

    #[test]
    fn what_was_being_made_is_taken_away_and_nothing_else() {
        let temporary = tempfile::tempdir().unwrap();
        let (state, at) = (temporary.path().join("state"), |name: &str| temporary.path().join(name));
        let folder = StateFolder::new(state.clone());
        for name in ["blank", "header", "taken", "records", "other", "given"] {
            store(&at(name), name == "records");
        }
        for name in ["blank", "zero"] {
            File::create(at(name)).unwrap();
        }
        for name in ["blank", "header", "taken", "records", "other"] {
            left(&folder, &at(name), true);
        }
        for name in ["zero", "given", "missing"] {
            left(&folder, &at(name), false);
        }
        fs::remove_file(at("other")).unwrap();
        store(&at("new"), false);
        fs::rename(at("new"), at("other")).unwrap();
        let taken = File::open(at("taken")).unwrap();
        flock(&taken, FlockOperation::LockExclusive).unwrap();
        folder.clean();
        for (name, stays) in [
            ("blank", false),
            ("header", false),
            ("zero", false),
            ("taken", true),
            ("records", true),
            ("other", true),
            ("given", true),
        ] {
            assert_eq!(at(name).exists(), stays, "{name}");
        }
        assert!(is_empty(&state));
    }

    #[test]
    fn what_a_server_that_lives_is_making_stays() {
        let temporary = tempfile::tempdir().unwrap();
        let (state, path) = (temporary.path().join("state"), temporary.path().join("cow"));
        let folder: Arc<StateFolder> = StateFolder::new(state.clone());
        store(&path, false);
        let mut creation = folder.begin_store_creation(&path).unwrap();
        creation.set_created(&File::open(&path).unwrap()).unwrap();
        StateFolder::new(state.clone()).clean();
        assert!(path.exists() && !is_empty(&state));
        drop(creation);
        assert!(path.exists() && is_empty(&state));
    }

    #[test]
    fn nonsense_in_the_folder_takes_nothing_away() {
        let temporary = tempfile::tempdir().unwrap();
        let (state, path) = (temporary.path().join("state"), temporary.path().join("cow"));
        fs::create_dir(&state).unwrap();
        File::create(&path).unwrap();
        fs::write(state.join("making-1"), path.as_os_str().as_bytes()).unwrap();
        fs::write(state.join("making-2"), b"\0").unwrap();
        fs::create_dir(state.join("making-3")).unwrap();
        std::os::unix::fs::symlink(&path, state.join("making-4")).unwrap();
        StateFolder::new(state).clean();
        assert!(path.exists());
    }
}
