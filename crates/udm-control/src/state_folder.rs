//! Facts that survive a server: a folder of small files, one per fact.
//!
//! * `invalid-N.json`: a store must not be trusted, because it lost a copy and could not be marked
//!   itself ([`InvalidStoreMark`]).
//! * `making-N`: a store is being created (`store_creation.rs`). Its creator holds the file locked,
//!   so the next server finds and removes stores that a killed server left.
//! * `snapshots/N.json`: the persistent snapshots (`records.rs`).
//! * `moves/N.json`: disks that were moved, or are being moved (`moves.rs`).
//! * `clones/N.json`: clones that were created by name (`clones.rs`).
//!
//! The folder is created with the first fact, and read when a store is opened. Several servers may
//! share one.
//!
//! A store is identified by its file or block device, under any name, and also by the name in the
//! table, for any disk found there: a replaced disk may have a copy of the old content. A copy
//! under another name whose original is gone is not recognised.
//!
//! Durable: a file is written under another name, synced, renamed into place, and the folder is
//! synced; a new folder is synced into its parent. A fact that could not be written is kept in
//! memory while the server runs. A fact about a mapped device is copied to its new name before a
//! rename and removed from the old one after it (`rename.rs`).

pub(crate) mod clones;
pub(crate) mod file_stamp;
pub mod fuzz;
pub(crate) mod moves;
mod own_record;
pub(crate) mod records;
mod rename;
mod server_lock;
mod stable_disk_id;
pub(crate) mod store_creation;

use clones::CloneRecord;
use own_record::read_own_record;
use records::SnapshotRecord;
use serde::{Deserialize, Serialize};
use server_lock::ServerLock;
pub use stable_disk_id::StableDiskId;
use std::collections::{HashMap, HashSet};
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};
use udm_dm::{DeviceNameReader, InvalidStoreMark};

/// Maximum number of bytes read from a file.
const FILE_MAX: u64 = 64 << 10;

/// Prefix and suffix of the file names of marks.
const MARK: (&str, &str) = ("invalid-", ".json");

/// The records in `folder` that `is_wanted` names, as `read` reads them; none if there is no such
/// folder. `what` is not known if one cannot be read.
///
/// # Errors
/// A text that says so.
fn read_records<T>(
    folder: &Path,
    what: &str,
    is_wanted: impl Fn(&str) -> bool,
    read: impl Fn(&Path) -> io::Result<T>,
) -> Result<Vec<T>, String> {
    let failed = |path: &Path, error: io::Error| format!("{}: {what} is not known: {error}", path.display());
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) => {
            use io::ErrorKind::{NotADirectory, NotFound};
            let none = matches!(error.kind(), NotFound | NotADirectory);
            return if none { Ok(Vec::new()) } else { Err(failed(folder, error)) };
        }
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(|error| failed(folder, error))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if !name.ends_with(".json") || !is_wanted(name) {
            continue;
        }
        match read(&path) {
            Ok(record) => found.push(record),
            // Another server has just removed the record. A directory is not a record.
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::IsADirectory) => {}
            Err(error) => return Err(failed(&path, error)),
        }
    }
    Ok(found)
}

/// A store that can be marked invalid.
#[derive(Clone)]
pub enum StoreToMarkInvalid {
    /// On a disk, or on the device with a name.
    Disk(StableDiskId),
    /// On a mapped device, which may be renamed.
    Mapped(DeviceNameReader),
}

impl StoreToMarkInvalid {
    /// Its current identity.
    fn id(&self) -> StableDiskId {
        match self {
            StoreToMarkInvalid::Disk(id) => id.clone(),
            StoreToMarkInvalid::Mapped(name) => StableDiskId::mapped(&name.get()),
        }
    }
}

/// A store marked invalid by this process.
struct InvalidStore {
    /// Number of the mark.
    id: u64,
    store: StoreToMarkInvalid,
    why: String,
    since: u64,
}

/// A store marked invalid, as written to its file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct StoreInvalidMark {
    store: StableDiskId,
    why: String,
    /// In seconds since 1970.
    since: u64,
}

/// Folder of facts that survive a server.
pub struct StateFolder {
    path: PathBuf,
    /// The stores that this process has marked invalid.
    marked: Mutex<Vec<InvalidStore>>,
    /// Lock of the files of marks, and of a rename of a device.
    files: Mutex<()>,
    /// The snapshots attached to this server, by the file names of their records.
    attached: Mutex<HashMap<String, SnapshotRecord>>,
    /// File names of attached snapshots whose tables are not live yet.
    attaching: Mutex<HashSet<String>>,
    /// The clones of this server, by the identifiers of their records.
    clones: Mutex<HashMap<String, CloneRecord>>,
    /// Lock of the files of clones: a record is read, changed and written without another change.
    clone_files: Mutex<()>,
    /// The lock file of this server, from its first record on.
    server: Mutex<Option<ServerLock>>,
    /// The folders whose parents this process has synced.
    durable: Mutex<HashSet<PathBuf>>,
}

impl StateFolder {
    /// The folder `path`, which need not exist.
    #[must_use]
    pub fn new(path: PathBuf) -> Arc<StateFolder> {
        Arc::new(StateFolder {
            path,
            marked: Mutex::default(),
            files: Mutex::default(),
            attached: Mutex::default(),
            attaching: Mutex::default(),
            clones: Mutex::default(),
            clone_files: Mutex::default(),
            server: Mutex::default(),
            durable: Mutex::default(),
        })
    }

    /// The handle that marks `store` invalid.
    #[must_use]
    pub fn mark(self: &Arc<StateFolder>, store: StoreToMarkInvalid) -> Arc<dyn InvalidStoreMark> {
        Arc::new(StateFolderInvalidStoreMark { folder: Arc::clone(self), store })
    }

    fn marked(&self) -> MutexGuard<'_, Vec<InvalidStore>> {
        self.marked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn files(&self) -> MutexGuard<'_, ()> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attached(&self) -> MutexGuard<'_, HashMap<String, SnapshotRecord>> {
        self.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attaching_names(&self) -> MutexGuard<'_, HashSet<String>> {
        self.attaching.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn own_clones(&self) -> MutexGuard<'_, HashMap<String, CloneRecord>> {
        self.clones.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn own_server(&self) -> MutexGuard<'_, Option<ServerLock>> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The marks in the folder, with their files.
    ///
    /// # Errors
    /// If a mark can't be read; then no store can be trusted.
    fn read(&self) -> io::Result<Vec<(PathBuf, StoreInvalidMark)>> {
        let is_mark = |name: &str| name.starts_with(MARK.0) && name.ends_with(MARK.1);
        let read = |path: &Path| Ok((path.to_owned(), read_invalid_store_record(path)?));
        read_records(&self.path, "which stores are invalid", is_mark, read).map_err(io::Error::other)
    }

    /// Writes the mark `id`, unless it was cleared meanwhile.
    fn write(&self, id: u64) -> io::Result<()> {
        let _files = self.files();
        let mark = self.marked().iter().find(|mark| mark.id == id).map(InvalidStore::as_kept);
        mark.map_or(Ok(()), |mark| self.put(&mark).map(drop))
    }

    /// Writes `mark` and returns the path of its file.
    fn put(&self, mark: &StoreInvalidMark) -> io::Result<PathBuf> {
        self.create_folder(&self.path)?;
        let path = self.path.join(format!("{}{:016x}{}", MARK.0, mark.store.fingerprint(), MARK.1));
        write_durably(&self.path, &[(path.clone(), serde_json::to_vec(mark)?)])?;
        Ok(path)
    }

    /// Creates `folder`, the state folder or one in it, durably. A fact in a folder that a power
    /// cut removes would be lost with it.
    fn create_folder(&self, folder: &Path) -> io::Result<()> {
        let mut durable = self.durable.lock().unwrap_or_else(PoisonError::into_inner);
        create_folder_durably(folder, &mut sync_folder)?;
        if !durable.contains(folder) {
            // Another server may have created the folder and not have synced its parent yet.
            match sync_folder(parent_of(folder)) {
                // This user can't have created a folder there.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
                done => done?,
            }
            durable.insert(folder.to_owned());
        }
        Ok(())
    }

    /// Syncs the folder, so that new and removed files are durable.
    fn sync(&self) -> io::Result<()> {
        sync_folder(&self.path)
    }

    /// Removes all marks of `store` and returns their number.
    ///
    /// # Errors
    /// If a file can't be removed.
    pub fn forget(&self, store: &StableDiskId) -> io::Result<usize> {
        Ok(self.clear(&StoreToMarkInvalid::Disk(store.clone()))? + self.mark_valid(store)?)
    }

    fn clear(&self, store: &StoreToMarkInvalid) -> io::Result<usize> {
        let _files = self.files();
        let store = &store.id();
        let mut count = 0;
        for (path, _) in self.read()?.into_iter().filter(|(_, mark)| mark.store.is_exactly(store)) {
            fs::remove_file(path)?;
            count += 1;
        }
        if count > 0 {
            self.sync()?;
        }
        let mut marked = self.marked();
        let before = marked.len();
        marked.retain(|mark| !mark.store.id().is_exactly(store));
        Ok(count.max(before - marked.len()))
    }
}

impl InvalidStore {
    fn as_kept(&self) -> StoreInvalidMark {
        StoreInvalidMark { store: self.store.id(), why: self.why.clone(), since: self.since }
    }
}

fn read_invalid_store_record(path: &Path) -> io::Result<StoreInvalidMark> {
    let mut bytes = Vec::new();
    File::open(path)?.take(FILE_MAX).read_to_end(&mut bytes)?;
    Ok(serde_json::from_slice(&bytes)?)
}

fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Creates `folder` and the missing folders above it. `sync` gets the parent of each new folder.
fn create_folder_durably(folder: &Path, sync: &mut impl FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    let parent = parent_of(folder);
    create_folder_durably(parent, sync)?;
    match DirBuilder::new().mode(0o700).create(folder) {
        // Another server has created it meanwhile.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && folder.is_dir() => {}
        done => done?,
    }
    sync(parent)
}

/// Writes files into `folder`, atomically each and durably. All files are written before the first
/// sync, so that one journal commit can cover them.
fn write_durably(folder: &Path, files: &[(PathBuf, Vec<u8>)]) -> io::Result<()> {
    let aside = |path: &Path| path.with_extension(format!("{}.new", std::process::id()));
    let write = |(path, bytes): &(PathBuf, Vec<u8>)| {
        let mut options = fs::OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(aside(path))?;
        file.write_all(bytes)?;
        Ok(file)
    };
    let written = || -> io::Result<()> {
        let open: Vec<File> = files.iter().map(write).collect::<io::Result<_>>()?;
        open.iter().try_for_each(File::sync_all)?;
        files.iter().try_for_each(|(path, _)| fs::rename(aside(path), path))
    };
    written().inspect_err(|_| files.iter().for_each(|(path, _)| drop(fs::remove_file(aside(path)))))?;
    sync_folder(folder)
}

/// Marks one store invalid.
struct StateFolderInvalidStoreMark {
    folder: Arc<StateFolder>,
    store: StoreToMarkInvalid,
}

type StoreMarkDurableCallback = Box<dyn FnOnce(Result<(), String>) + Send>;

impl InvalidStoreMark for StateFolderInvalidStoreMark {
    fn why(&self) -> Option<String> {
        let _files = self.folder.files();
        let store = self.store.id();
        let is_it = |mark: &StoreInvalidMark| mark.store.is(&store);
        let here = self.folder.marked().iter().map(InvalidStore::as_kept).find(is_it);
        let kept = match (here, self.folder.read()) {
            (Some(mark), _) => Some(mark),
            (None, Ok(marks)) => marks.into_iter().map(|(_, mark)| mark).find(is_it),
            (None, Err(error)) => return Some(error.to_string()),
        };
        if let Some(StoreInvalidMark { store: StableDiskId { name, .. }, why, .. }) = kept {
            return Some(format!(
                "{name} has lost a copy, and that could not be written into it ({why}); if its \
                 content is good all the same, use \"udm cow clear-invalid\""
            ));
        }
        match self.folder.record_of(&store) {
            Ok(record) => record.and_then(|record| {
                let why = record.stale()?;
                let name = record.store.name();
                Some(format!("{name}: {why}; if it is good all the same, use \"udm cow clear-invalid\""))
            }),
            Err(error) => Some(error),
        }
    }

    fn set(&self, why: &str, done: StoreMarkDurableCallback) {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        // Relaxed: each number is taken once.
        let id = COUNT.fetch_add(1, Ordering::Relaxed);
        self.folder.marked().push(InvalidStore { id, store: self.store.clone(), why: why.into(), since });
        let folder = Arc::clone(&self.folder);
        // Called in any case, because the origin waits for it.
        let done = Arc::new(Mutex::new(Some(done)));
        let tell = move |done: &Mutex<Option<StoreMarkDurableCallback>>, kept: io::Result<()>| {
            let done = done.lock().unwrap_or_else(PoisonError::into_inner).take();
            let kept = kept.map_err(|error| format!("{}: {error}", folder.path.display()));
            done.into_iter().for_each(|done| done(kept.clone()));
        };
        let (folder, later, tell_later) = (Arc::clone(&self.folder), Arc::clone(&done), tell.clone());
        let work = move || tell_later(&later, folder.write(id));
        // A core must not block on a file.
        if let Err(error) = std::thread::Builder::new().name("udm-mark".into()).spawn(work) {
            tell(&done, Err(error));
        }
    }

    fn clear(&self) -> Result<(), String> {
        let failed = |error: io::Error| format!("{}: {error}", self.folder.path.display());
        self.folder.clear(&self.store).map_err(failed)?;
        let record = self.folder.record_of(&self.store.id())?;
        record.map_or(Ok(()), |record| self.folder.forget_snapshot(&record).map_err(failed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    pub(super) fn set(folder: &Arc<StateFolder>, store: StoreToMarkInvalid) -> Result<(), String> {
        let (sender, receiver) = channel();
        folder.mark(store).set("I/O error", Box::new(move |kept| sender.send(kept).unwrap()));
        receiver.recv().unwrap()
    }

    /// True if a server started later knows the mark.
    pub(super) fn knows(folder: &Path, store: &StableDiskId) -> bool {
        StateFolder::new(folder.into()).mark(StoreToMarkInvalid::Disk(store.clone())).why().is_some()
    }

    #[test]
    fn a_store_is_known_again() {
        let temporary = tempfile::tempdir().unwrap();
        let (state, at) = (temporary.path().join("a/state"), |name: &str| temporary.path().join(name));
        fs::write(at("cow"), "x").unwrap();
        let folder = StateFolder::new(state.clone());
        let store = StableDiskId::named(&at("cow"));
        assert!(!knows(&state, &store) && !state.exists(), "nothing is kept");
        set(&folder, StoreToMarkInvalid::Disk(store.clone())).unwrap();
        assert!(knows(&state, &store));
        // The mark holds under other names, and for a file that replaces the store.
        fs::hard_link(at("cow"), at("link")).unwrap();
        assert!(knows(&state, &StableDiskId::named(&at("link"))));
        std::os::unix::fs::symlink(at("cow"), at("symbolic")).unwrap();
        assert!(knows(&state, &StableDiskId::named(&at("symbolic"))));
        fs::rename(at("cow"), at("moved")).unwrap();
        fs::copy(at("moved"), at("cow")).unwrap();
        assert!(
            knows(&state, &StableDiskId::named(&at("cow")))
                && knows(&state, &StableDiskId::named(&at("moved")))
        );
        fs::copy(at("moved"), at("other")).unwrap();
        assert!(!knows(&state, &StableDiskId::named(&at("other"))));
        // A file that replaced the store has a name, and no mark of its own.
        assert_eq!(folder.forget(&StableDiskId::named(&at("cow"))).unwrap(), 0);
        assert!(knows(&state, &StableDiskId::named(&at("moved"))));
        // A mapped device is identified by its name only.
        set(&folder, StoreToMarkInvalid::Disk(StableDiskId::mapped("cow"))).unwrap();
        assert!(knows(&state, &StableDiskId::named(Path::new("@cow"))));
        assert_eq!(folder.forget(&StableDiskId::named(&at("link"))).unwrap(), 1);
        assert!(!knows(&state, &store) && knows(&state, &StableDiskId::mapped("cow")));
        assert_eq!(folder.mark(StoreToMarkInvalid::Disk(store.clone())).why(), None);
        assert_eq!(folder.forget(&store).unwrap(), 0);
    }

    #[test]
    fn what_cannot_be_written_is_kept_while_the_server_lives() {
        let temporary = tempfile::tempdir().unwrap();
        let state = temporary.path().join("state");
        fs::write(&state, "no folder").unwrap();
        let folder = StateFolder::new(state.clone());
        let store = StableDiskId::mapped("cow");
        assert!(
            set(&folder, StoreToMarkInvalid::Disk(store.clone()))
                .unwrap_err()
                .starts_with(&state.display().to_string())
        );
        assert!(folder.mark(StoreToMarkInvalid::Disk(store.clone())).why().is_some());
        assert_eq!(folder.forget(&store).unwrap(), 1);
        assert_eq!(folder.mark(StoreToMarkInvalid::Disk(store)).why(), None);
    }

    #[test]
    fn each_new_folder_is_synced_into_its_parent() {
        let temporary = tempfile::tempdir().unwrap();
        let at = |name: &str| temporary.path().join(name);
        let create = |folder: &Path| {
            let mut synced = Vec::new();
            let sync = &mut |folder: &Path| {
                synced.push(folder.to_owned());
                Ok(())
            };
            create_folder_durably(folder, sync).map(|()| synced)
        };
        assert_eq!(
            create(&at("a/state/snapshots")).unwrap(),
            [at(""), at("a"), at("a/state")].map(|p| p.components().collect::<PathBuf>())
        );
        assert!(create(&at("a/state")).unwrap().is_empty());
        fs::write(at("file"), "").unwrap();
        assert!(create(&at("file")).is_err() && create(&at("file/state")).is_err());
        // The first fact of a server syncs the parent also if the folder exists.
        let folder = StateFolder::new(at("a/state"));
        folder.begin().unwrap();
        assert!(folder.durable.lock().unwrap().contains(&at("a/state")));
    }

    #[test]
    fn with_nonsense_in_the_folder_nothing_is_believed() {
        let temporary = tempfile::tempdir().unwrap();
        let store = StableDiskId::mapped("cow");
        for (name, text) in [("invalid-1.json", "{"), ("invalid-2.json", "{}"), ("x.json", "[]")] {
            fs::write(temporary.path().join(name), text).unwrap();
        }
        fs::create_dir(temporary.path().join("invalid-3.json")).unwrap();
        let why = StateFolder::new(temporary.path().into())
            .mark(StoreToMarkInvalid::Disk(store.clone()))
            .why()
            .unwrap();
        assert!(why.contains("which stores are invalid is not known") && why.contains("/invalid-"), "{why}");
        set(&StateFolder::new(temporary.path().into()), StoreToMarkInvalid::Disk(store.clone())).unwrap();
        assert!(knows(temporary.path(), &store));
    }
}
