//! The store of a snapshot that is to be made.

use super::origin::OriginDevice;
use super::refuse;
use crate::CoresIo;
use crate::error::VerbError;
use crate::registry::{BaseDir, Registry, TableResolver};
use crate::state_folder::file_stamp::StoreFile;
use crate::state_folder::store_creation::StoreCreation;
use crate::verbs::CancelToken;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::{Errno, retry_on_intr};
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use udm_core::errno::{EEXIST, EINVAL, EIO};
use udm_core::{SECTOR_SIZE, Sector, Sectors, control_io};
use udm_dm::{Resolver, TargetError};
use udm_wire::cow::{ChunkSize, HEADER_LEN, Header, StoreLayout};
use udm_wire::uri::{DeviceUri, FileUri};
use udm_wire::words::escape;

/// What is copied at once when nobody says anything: `lvcreate`'s.
const CHUNK_BYTES: u64 = 4096;

/// By how much a store that is made grows at the most when nobody says anything.
const GROW_BYTES: u64 = 64 << 20;

/// Chunks that a store is made with at the least if it grows. A thousand of them take little.
const CHUNKS_MIN: u64 = 16;

/// A store's rights: it has what its origin has in it.
const MODE: u32 = 0o600;

/// What is wanted of all stores.
pub(super) struct StoreSpec<'a> {
    pub store: Option<&'a str>,
    pub size_bytes: Option<u64>,
    /// 0 for a store that is made as large as it becomes.
    pub grow_bytes: Option<u64>,
    pub chunk_bytes: Option<u64>,
    pub transient: bool,
    pub overflow: bool,
    /// Each of several has its own.
    pub several: bool,
    pub folder: &'a BaseDir,
}

/// A store, ready to be named in a table.
pub(super) struct NewStore {
    /// The words of the table from the store on.
    pub words: String,
    made: Option<CreatedFile>,
}

/// A file that was made just now.
struct CreatedFile {
    file: StoreFile,
    /// For the next server, should this one be killed. Goes behind the file.
    _making: Option<StoreCreation>,
}

impl NewStore {
    /// True when it was made just now, and is nobody else's.
    pub fn is_made(&self) -> bool {
        self.made.is_some()
    }

    /// The file that was made.
    pub fn file(&self) -> Option<&StoreFile> {
        self.made.as_ref().map(|made| &made.file)
    }

    /// Keeps what was made.
    pub fn keep(mut self) {
        self.made = None;
    }
}

impl Drop for NewStore {
    fn drop(&mut self) {
        if let Some(made) = &self.made {
            // What came to nothing leaves nothing behind; it was made just now, and is blank.
            let _ = made.file.remove();
        }
    }
}

impl StoreSpec<'_> {
    /// The store of the snapshot `name` of `origin`: made when it is a file that is not there.
    ///
    /// # Errors
    /// When it can't be made, or has a snapshot in it.
    pub fn store(
        &self,
        registry: &Registry,
        name: &str,
        origin: &OriginDevice,
        cancel_token: &CancelToken,
    ) -> Result<NewStore, VerbError> {
        let chunk = self.chunk(name, origin)?;
        let kind = match (self.transient, self.overflow) {
            (true, true) => return Err(refuse(name, EINVAL, "a transient store has no overflow")),
            (true, false) => "N",
            (false, true) => "PO",
            (false, false) => "P",
        };
        let mut uri = self.place(registry, name, origin)?;
        let most = self.size_bytes.unwrap_or_else(|| default_size(origin.len, chunk, self.transient));
        let made = match &mut uri {
            DeviceUri::File(file) => self.make(registry, name, file, most, chunk)?,
            _ if self.grow_bytes.is_some_and(|step| step > 0) => {
                return Err(refuse(name, EINVAL, format!("{uri}: only a regular file grows")));
            }
            _ => None,
        };
        if made.is_none() && self.size_bytes.is_some() {
            return Err(refuse(
                name,
                EEXIST,
                format!("{uri} is there and is not resized: leave the size out"),
            ));
        }
        let word = uri.to_string();
        let store = NewStore { words: format!("{} {kind} {}", escape(&word), chunk.sectors()), made };
        if store.made.is_none() && !self.transient {
            self.check_blank(registry, name, &word, cancel_token)?;
        }
        Ok(store)
    }

    fn chunk(&self, name: &str, origin: &OriginDevice) -> Result<ChunkSize, VerbError> {
        let block = u64::from(origin.disk.device.limits().logical_block);
        let bytes = self.chunk_bytes.unwrap_or(CHUNK_BYTES.max(block));
        if !bytes.is_multiple_of(SECTOR_SIZE) {
            return Err(refuse(name, EINVAL, format!("chunks of {bytes} bytes are no whole sectors")));
        }
        ChunkSize::new(bytes / SECTOR_SIZE).map_err(|why| refuse(name, EINVAL, why.to_string()))
    }

    /// Where it is: as given, in the folder that was given, or in that of the origin's disk.
    fn place(&self, registry: &Registry, name: &str, origin: &OriginDevice) -> Result<DeviceUri, VerbError> {
        let own = |folder: &Path| {
            let path = folder.join(format!("{name}.cow"));
            DeviceUri::File(FileUri::new(path))
        };
        let Some(word) = self.store else {
            let disk = udm_wire::uri::parse(&registry.uri_of(origin.disk.number));
            return match disk {
                Ok(DeviceUri::File(file)) if file.path.is_file() => {
                    Ok(own(file.path.parent().unwrap_or(Path::new("/"))))
                }
                _ => Err(refuse(name, EINVAL, "its origin is no file: say where its store is to be")),
            };
        };
        let uri = self.folder.resolve(word).map_err(|e| refuse(name, e.errno, e.reason))?;
        match &uri {
            DeviceUri::File(file) if file.path.is_dir() => Ok(own(&file.path)),
            _ if self.several => {
                Err(refuse(name, EINVAL, format!("{uri} is no folder: several snapshots have a store each")))
            }
            _ => Ok(uri),
        }
    }

    /// Makes the file, unless it is there: as large as `most`, or smaller, and `file` says then how
    /// it grows.
    fn make(
        &self,
        registry: &Registry,
        name: &str,
        file: &mut FileUri,
        most: u64,
        chunk: ChunkSize,
    ) -> Result<Option<CreatedFile>, VerbError> {
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
        let made = self.make_file(registry, name, &path, most, (first, step > 0))?;
        let grows = made.is_none() && self.grow_bytes.is_some() || made.is_some() && first < most;
        if step > 0 && grows {
            file.grow = Some(step);
            file.grow_max = file.grow_max.or(Some(most));
        }
        Ok(made)
    }

    fn make_file(
        &self,
        registry: &Registry,
        name: &str,
        path: &Path,
        most: u64,
        (first, is_set_aside): (u64, bool),
    ) -> Result<Option<CreatedFile>, VerbError> {
        let failed = |e: std::io::Error| {
            refuse(name, e.raw_os_error().unwrap_or(EIO), format!("{}: {e}", path.display()))
        };
        if most < SECTOR_SIZE || !most.is_multiple_of(SECTOR_SIZE) {
            return Err(refuse(name, EINVAL, format!("a store of {most} bytes is no whole sectors")));
        }
        let mut making = registry.making(path);
        match OpenOptions::new().write(true).create_new(true).mode(MODE).open(path) {
            Ok(file) => {
                let known = making.as_mut().is_none_or(|making| making.set_created(&file).is_ok());
                let made = StoreFile::new(path, &file).map_err(failed)?;
                let made = CreatedFile { file: made, _making: making.filter(|_| known) };
                let mut store = NewStore { words: String::new(), made: Some(made) };
                if is_set_aside { preallocate(&file, first) } else { file.set_len(first) }.map_err(failed)?;
                Ok(store.made.take())
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(None),
            Err(error) => Err(failed(error)),
        }
    }

    /// What is in a store is of another instant.
    fn check_blank(
        &self,
        registry: &Registry,
        name: &str,
        word: &str,
        cancel_token: &CancelToken,
    ) -> Result<(), VerbError> {
        let opened = TableResolver::new(registry, self.folder).get(word);
        let opened = opened.map_err(|e| refuse(name, e.errno, e.reason))?;
        let block = opened.device.limits().logical_block.max(HEADER_LEN as u32);
        let io = CoresIo::new(registry.cores()).until(cancel_token);
        let sectors = Sectors::from_bytes(u64::from(block));
        if opened.device.limits().size < sectors {
            // The table says what is wrong with it.
            return Ok(());
        }
        let first = control_io::read(&io, &opened.device, Sector(0), sectors)
            .map_err(|e| VerbError::new(name, TargetError::errno(e.errno).because(e.text)))?;
        match Header::decode(&first) {
            Ok(Some(_)) => Err(refuse(
                name,
                EEXIST,
                format!(
                    "{word} has a snapshot in it: `udm create` opens that with a table; a new one wants another store"
                ),
            )),
            // The same.
            Ok(None) | Err(_) => Ok(()),
        }
    }
}

/// Makes `file` so long with its blocks, as its next steps do: a file system without room says so
/// here, and not to a write that comes later.
fn preallocate(file: &File, bytes: u64) -> std::io::Result<()> {
    match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, bytes)) {
        Err(Errno::OPNOTSUPP) => file.set_len(bytes),
        done => Ok(done?),
    }
}

/// What all chunks of an origin need.
fn default_size(origin: Sectors, chunk: ChunkSize, transient: bool) -> u64 {
    let chunks = origin.bytes().div_ceil(chunk.bytes());
    let needed = if transient { chunks } else { StoreLayout::new(chunk).chunks_for(chunks) };
    needed * chunk.bytes()
}
