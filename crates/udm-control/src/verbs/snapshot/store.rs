//! Creates the stores of new snapshots.

use super::origin::OriginDevice;
use super::verb_error_with_errno;
use crate::TableLoadControlIo;
use crate::error::VerbError;
use crate::registry::{BaseDir, DeviceRegistry, TableResolver};
use crate::state_folder::file_stamp::IdentifiedStoreFile;
use crate::state_folder::store_creation::StoreCreationMarker;
use crate::verbs::CancelToken;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::{Errno, retry_on_intr};
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use udm_core::errno::{EEXIST, EINVAL, EIO};
use udm_core::{SECTOR_SIZE, Sector, Sectors, control_io};
use udm_dm::{DeviceNameResolver, TargetError};
use udm_wire::cow::{ChunkSize, ExceptionStoreHeader, ExceptionStoreLayout, HEADER_LEN};
use udm_wire::uri::{DeviceUri, FileUri};
use udm_wire::words::escape_table_word;

/// Default chunk size: `lvcreate`'s.
const CHUNK_BYTES: u64 = 4096;

/// Default growth step of a new store in bytes.
const GROW_BYTES: u64 = 64 << 20;

/// Minimum initial size of a growing store, in chunks. A thousand such stores need little space.
const CHUNKS_MIN: u64 = 16;

/// File mode of a store: it holds data of its origin.
const MODE: u32 = 0o600;

/// Requested store, sizes and flags of new snapshots.
pub(super) struct StoreSpec<'a> {
    pub store: Option<&'a str>,
    pub size_bytes: Option<u64>,
    /// Growth step; 0 creates the store with its final size.
    pub grow_bytes: Option<u64>,
    pub chunk_bytes: Option<u64>,
    pub transient: bool,
    pub overflow: bool,
    /// True if each of several snapshots needs a store of its own.
    pub several: bool,
    pub folder: &'a BaseDir,
}

/// The store of a new snapshot. If it was created and is not kept, dropping this removes the file.
pub(super) struct NewSnapshotStore {
    /// The words of the table from the store on.
    pub words: String,
    made: Option<CreatedStoreFile>,
}

/// A store file created by this verb.
struct CreatedStoreFile {
    file: IdentifiedStoreFile,
    /// Marker for the next server, in case this one is killed. Dropped after the file.
    _creation: Option<StoreCreationMarker>,
}

impl NewSnapshotStore {
    /// True if the store was just created, so nobody else uses it.
    pub fn is_made(&self) -> bool {
        self.made.is_some()
    }

    /// The created file, if any.
    pub fn file(&self) -> Option<&IdentifiedStoreFile> {
        self.made.as_ref().map(|made| &made.file)
    }

    /// Keeps the created file.
    pub fn keep(mut self) {
        self.made = None;
    }
}

impl Drop for NewSnapshotStore {
    fn drop(&mut self) {
        if let Some(made) = &self.made {
            // The creation failed: the new file holds no data and is removed.
            let _ = made.file.remove();
        }
    }
}

impl StoreSpec<'_> {
    /// The store of the snapshot `name` of `origin`. Creates the file if it does not exist.
    ///
    /// # Errors
    /// If the store can't be created, or already holds a snapshot.
    pub fn store(
        &self,
        registry: &DeviceRegistry,
        name: &str,
        origin: &OriginDevice,
        cancel_token: &CancelToken,
    ) -> Result<NewSnapshotStore, VerbError> {
        let chunk = self.chunk(name, origin)?;
        let kind = match (self.transient, self.overflow) {
            (true, true) => {
                return Err(verb_error_with_errno(name, EINVAL, "a transient store has no overflow"));
            }
            (true, false) => "N",
            (false, true) => "PO",
            (false, false) => "P",
        };
        let mut uri = self.place(registry, name, origin)?;
        let most = self.size_bytes.unwrap_or_else(|| default_store_size(origin.len, chunk, self.transient));
        let made = match &mut uri {
            DeviceUri::File(file) => self.create_store(registry, name, file, most, chunk)?,
            _ if self.grow_bytes.is_some_and(|step| step > 0) => {
                return Err(verb_error_with_errno(
                    name,
                    EINVAL,
                    format!("{uri}: a store can grow only in a regular file"),
                ));
            }
            _ => None,
        };
        if made.is_none() && self.store.is_none() {
            // Another user of the folder may have put it there, for example as a link.
            let why = format!("{uri} exists: name it as the store to use it, or another place");
            return Err(verb_error_with_errno(name, EEXIST, why));
        }
        if made.is_none() && self.size_bytes.is_some() {
            return Err(verb_error_with_errno(
                name,
                EEXIST,
                format!("{uri} exists and is not resized: omit the size"),
            ));
        }
        let word = uri.to_string();
        let store = NewSnapshotStore {
            words: format!("{} {kind} {}", escape_table_word(&word), chunk.sectors()),
            made,
        };
        if store.made.is_none() && !self.transient {
            self.check_blank(registry, name, &word, cancel_token)?;
        }
        Ok(store)
    }

    fn chunk(&self, name: &str, origin: &OriginDevice) -> Result<ChunkSize, VerbError> {
        let block = u64::from(origin.disk.device.limits().logical_block);
        let bytes = self.chunk_bytes.unwrap_or(CHUNK_BYTES.max(block));
        if !bytes.is_multiple_of(SECTOR_SIZE) {
            return Err(verb_error_with_errno(
                name,
                EINVAL,
                format!("chunks of {bytes} bytes are not a multiple of a sector"),
            ));
        }
        ChunkSize::new(bytes / SECTOR_SIZE)
            .map_err(|why| verb_error_with_errno(name, EINVAL, why.to_string()))
    }

    /// The place of the store: the given one, or NAME.cow in the given folder or in the folder of
    /// the origin's disk.
    fn place(
        &self,
        registry: &DeviceRegistry,
        name: &str,
        origin: &OriginDevice,
    ) -> Result<DeviceUri, VerbError> {
        let own = |folder: &Path| {
            let path = folder.join(format!("{name}.cow"));
            DeviceUri::File(FileUri::new(path))
        };
        let Some(word) = self.store else {
            let disk = udm_wire::uri::parse_device_uri(&registry.uri_of(origin.disk.number));
            return match disk {
                Ok(DeviceUri::File(file)) if file.path.is_file() => {
                    Ok(own(file.path.parent().unwrap_or(Path::new("/"))))
                }
                _ => Err(verb_error_with_errno(
                    name,
                    EINVAL,
                    "its origin is not a file: give a place for the store",
                )),
            };
        };
        let uri = self.folder.resolve(word).map_err(|e| verb_error_with_errno(name, e.errno, e.reason))?;
        match &uri {
            DeviceUri::File(file) if file.path.is_dir() => Ok(own(&file.path)),
            _ if self.several => Err(verb_error_with_errno(
                name,
                EINVAL,
                format!("{uri} is not a folder: each of several snapshots needs its own store"),
            )),
            _ => Ok(uri),
        }
    }

    /// Creates the file unless it exists. A growing store starts smaller than `most`; `file` then
    /// gets the growth options.
    fn create_store(
        &self,
        registry: &DeviceRegistry,
        name: &str,
        file: &mut FileUri,
        most: u64,
        chunk: ChunkSize,
    ) -> Result<Option<CreatedStoreFile>, VerbError> {
        let asked = self.grow_bytes.or(file.grow);
        let step = asked.unwrap_or(GROW_BYTES);
        let first = match step {
            0 => most,
            step => {
                let first = asked.map_or(0, |_| step).max(CHUNKS_MIN * chunk.bytes());
                most.min(first.next_multiple_of(SECTOR_SIZE))
            }
        };
        let path = file.path.clone();
        let made = self.create_file(registry, name, &path, most, (first, step > 0))?;
        let grows = made.is_none() && self.grow_bytes.is_some() || made.is_some() && first < most;
        if step > 0 && grows {
            file.grow = Some(step);
            file.grow_max = file.grow_max.or(Some(most));
        }
        Ok(made)
    }

    fn create_file(
        &self,
        registry: &DeviceRegistry,
        name: &str,
        path: &Path,
        most: u64,
        (first, is_preallocated): (u64, bool),
    ) -> Result<Option<CreatedStoreFile>, VerbError> {
        let failed = |e: std::io::Error| {
            let errno = e.raw_os_error().unwrap_or(EIO);
            let advice = registry.advice_on_refused_file(errno).map(|advice| format!("; {advice}"));
            let why = format!("{}: {e}{}", path.display(), advice.unwrap_or_default());
            verb_error_with_errno(name, errno, why)
        };
        if most < SECTOR_SIZE || !most.is_multiple_of(SECTOR_SIZE) {
            return Err(verb_error_with_errno(
                name,
                EINVAL,
                format!("a store of {most} bytes is not a multiple of a sector"),
            ));
        }
        let mut creation = registry.begin_store_creation(path);
        match OpenOptions::new().write(true).create_new(true).mode(MODE).open(path) {
            Ok(file) => {
                let known = creation.as_mut().is_none_or(|creation| creation.set_created(&file).is_ok());
                let made = IdentifiedStoreFile::new(path, &file).map_err(|error| {
                    // Without an identity nothing else would remove the new file.
                    let _ = std::fs::remove_file(path);
                    failed(error)
                })?;
                let made = CreatedStoreFile { file: made, _creation: creation.filter(|_| known) };
                let mut store = NewSnapshotStore { words: String::new(), made: Some(made) };
                if is_preallocated { preallocate(&file, first) } else { file.set_len(first) }
                    .map_err(failed)?;
                Ok(store.made.take())
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(None),
            Err(error) => Err(failed(error)),
        }
    }

    /// Refuses a store with a snapshot: its data is of another instant.
    fn check_blank(
        &self,
        registry: &DeviceRegistry,
        name: &str,
        word: &str,
        cancel_token: &CancelToken,
    ) -> Result<(), VerbError> {
        let opened = TableResolver::new(registry, self.folder).get(word);
        let opened = opened.map_err(|e| verb_error_with_errno(name, e.errno, e.reason))?;
        let block = opened.device.limits().logical_block.max(HEADER_LEN as u32);
        let io = TableLoadControlIo::new(registry.cores()).until(cancel_token);
        let sectors = Sectors::from_bytes(u64::from(block));
        if opened.device.limits().size < sectors {
            // Building the table reports this error.
            return Ok(());
        }
        let first = control_io::read_sectors(&io, &opened.device, Sector(0), sectors)
            .map_err(|e| VerbError::new(name, TargetError::errno(e.errno).because(e.text)))?;
        match ExceptionStoreHeader::decode(&first) {
            Ok(Some(_)) => Err(verb_error_with_errno(
                name,
                EEXIST,
                format!(
                    "{word} has a snapshot in it: `udm create` with a table opens it; a new one needs another store"
                ),
            )),
            // Building the table reports a bad header.
            Ok(None) | Err(_) => Ok(()),
        }
    }
}

/// Allocates the blocks of `file`, as later growth steps do: a full file system fails here, not in
/// a later write.
fn preallocate(file: &File, bytes: u64) -> std::io::Result<()> {
    match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, bytes)) {
        Err(Errno::OPNOTSUPP) => file.set_len(bytes),
        done => Ok(done?),
    }
}

/// Size in bytes for all chunks of an origin.
fn default_store_size(origin: Sectors, chunk: ChunkSize, transient: bool) -> u64 {
    let chunks = origin.bytes().div_ceil(chunk.bytes());
    let needed = if transient { chunks } else { ExceptionStoreLayout::new(chunk).chunks_for(chunks) };
    needed * chunk.bytes()
}
