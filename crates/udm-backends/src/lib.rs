//! The devices at the bottom of a stack: null, memory, a pattern, files and block devices, qcow2
//! images, exports of NBD servers, and namespaces of NVMe controllers.
//!
//! [`BackendDeviceRegistry::open`] makes a device from its URI; one `match` names all kinds. Each
//! is a [`Device`] whose lanes keep the rules of [`udm_core::Lane`]. The layer above checks
//! alignment, length and flags. A range beyond the end is refused here once more, because it would
//! extend a file.
//!
//! A *disk* is an inode or the number of a block device. Each name of a disk is a device, so hard
//! links can be paths. State that must be the same for all names belongs to the disk: use of the
//! page cache, size, the exclusive claim, and failed syncs. Its locks are taken when a table is
//! loaded, a device is opened, a size is read or a store grows. Requests do not take them, except a
//! sync through the page cache (`file/sync`).
//!
//! A backend knows no target, and no other backend. There are two exceptions: `mem` stores the data
//! of a memory-backed null device, and `file` reads the files of an image. Work that may block runs
//! on a thread (`blocking`).
#![forbid(unsafe_code)]

mod blocking;
mod cache;
mod faults;
mod file;
mod mem;
pub mod nbd;
mod null;
pub mod nvme;
mod pattern;
mod qcow2;
mod read_only;
mod remote_disks;
mod stream;
#[cfg(test)]
mod testing;

pub use cache::CachedMemory;
pub use faults::InjectedFaults;
pub use qcow2::{ImageBytes, files_of_image, open_image_in_object};
pub use read_only::{advance_copies, immediate_status_of_read_only};
pub use remote_disks::{RemoteDisks, is_on_local_file_system};

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use udm_core::errno::EOPNOTSUPP;
use udm_core::{Bio, Device, DeviceControlError, Limits, Op, Sectors, Status};
use udm_queue::{QueuedDevice, SharedTagSet};
use udm_wire::nbd::client::NegotiatedExportInfo;
use udm_wire::uri::{DeviceUri, ImageFormat, NbdUri, NvmeUri, ObjectUri, QueueParams};

/// Identity of a disk in the operating system. It shows that two names lead to the same disk, or
/// that a name now leads to another disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DiskIdentity {
    /// A regular file: its file system and its inode number.
    File {
        /// `st_dev`.
        device: u64,
        /// `st_ino`.
        inode: u64,
    },
    /// A block device.
    Block {
        /// `st_rdev`.
        number: u64,
    },
    /// No disk of the operating system: the URI alone defines the device.
    Virtual,
}

/// A device and the identity of its disk.
pub struct DeviceWithDiskIdentity {
    /// Identity of the disk that the URI led to.
    pub identity: DiskIdentity,
    /// The device.
    pub device: Arc<dyn Device>,
}

/// The backends of a process. State that all names of a disk must share is in here, so a process
/// has exactly one `BackendDeviceRegistry`.
pub struct BackendDeviceRegistry {
    disks: file::OpenDisks,
    servers: nbd::RemoteExports,
    namespaces: nvme::RemoteNamespaceRegistry,
    /// Tags shared by null devices, by number of hardware queues and depth of each. An entry lives
    /// as long as one of its devices.
    tag_sets: Mutex<HashMap<(u32, u32), Weak<SharedTagSet>>>,
    /// Opens objects of web servers and object stores; `None` if this program has no client.
    objects: Option<Box<dyn ObjectDeviceOpener>>,
    remote_disks: Arc<RemoteDisks>,
}

/// Opens objects of web servers and object stores. `udm-object` has it, so that libudm is built
/// without its crates.
pub trait ObjectDeviceOpener: Send + Sync {
    /// Opens the object that `uri` names as a read-only device. May block.
    ///
    /// # Errors
    /// The server refuses, does not answer, or cannot be used, in one line that names the object.
    fn open(&self, uri: &ObjectUri) -> Result<Arc<dyn Device>, DeviceControlError>;

    /// The open objects, as they were when they were opened.
    fn in_use(&self) -> Vec<KnownObject>;

    /// Sets the objects that [`ObjectDeviceOpener::open`] opens without asking their servers, which
    /// may be down. An object that has changed since fails all reads.
    fn set_known(&self, objects: Vec<KnownObject>);
}

/// An object of a web server or an object store as it was at some moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownObject {
    /// Its URI, as a table names it.
    pub uri: String,
    /// Length in bytes.
    pub len: u64,
    /// Its strong ETag.
    pub etag: String,
}

impl BackendDeviceRegistry {
    /// Creates backends with no open device. `cores` is the expected number of cores. More cores
    /// may use the devices, but then some cores share resources.
    #[must_use]
    pub fn new(cores: usize) -> BackendDeviceRegistry {
        BackendDeviceRegistry {
            disks: file::OpenDisks::new(cores),
            servers: nbd::RemoteExports::default(),
            namespaces: nvme::RemoteNamespaceRegistry::new(cores),
            tag_sets: Mutex::default(),
            objects: None,
            remote_disks: Arc::default(),
        }
    }

    /// Adds a client for objects of web servers and object stores.
    #[must_use]
    pub fn with_objects(self, objects: Box<dyn ObjectDeviceOpener>) -> BackendDeviceRegistry {
        BackendDeviceRegistry { objects: Some(objects), ..self }
    }

    /// The disks that are not of this machine.
    #[must_use]
    pub fn remote_disks(&self) -> &Arc<RemoteDisks> {
        &self.remote_disks
    }

    /// Returns the disk that `uri` leads to now. If that disk is open, its size is read again and
    /// its open devices show the new size. May block for as long as the file system does.
    ///
    /// # Errors
    /// Those of [`BackendDeviceRegistry::open`] that can be found without opening the device.
    pub fn look(&self, uri: &DeviceUri) -> Result<DiskIdentity, DeviceControlError> {
        match uri {
            DeviceUri::File(file) => self.disks.look(file),
            DeviceUri::Nbd(nbd) => {
                self.servers.look(nbd);
                Ok(DiskIdentity::Virtual)
            }
            _ => Ok(DiskIdentity::Virtual),
        }
    }

    /// The NBD exports in use: their URIs without a queue, and their properties.
    #[must_use]
    pub fn nbd_exports_in_use(&self) -> Vec<(String, NegotiatedExportInfo)> {
        self.servers.in_use()
    }

    /// Sets the NBD exports that [`BackendDeviceRegistry::open`] opens without a connection, since
    /// their properties are known: another process has them open, and its server may be down now.
    /// Lanes of these exports connect later. A server whose export has changed by then is refused.
    pub fn set_known_nbd_exports(&self, exports: Vec<(String, NegotiatedExportInfo)>) {
        self.servers.set_known(exports);
    }

    /// The NVMe namespaces in use: their URIs without a queue, and their properties.
    #[must_use]
    pub fn nvme_namespaces_in_use(&self) -> Vec<(String, nvme::KnownNamespace)> {
        self.namespaces.in_use()
    }

    /// The NVMe namespaces in use with their associations, by URI.
    #[must_use]
    pub fn nvme_path_reports(&self) -> Vec<nvme::NvmePathReport> {
        self.namespaces.reports()
    }

    /// As [`BackendDeviceRegistry::set_known_nbd_exports`], for NVMe namespaces.
    pub fn set_known_nvme_namespaces(&self, namespaces: Vec<(String, nvme::KnownNamespace)>) {
        self.namespaces.set_known(namespaces);
    }

    /// The open objects, as they were when they were opened.
    #[must_use]
    pub fn objects_in_use(&self) -> Vec<KnownObject> {
        self.objects.as_ref().map(|objects| objects.in_use()).unwrap_or_default()
    }

    /// Sets the objects that [`BackendDeviceRegistry::open`] opens without asking their servers,
    /// since an earlier process had them open. An object that has changed since fails all reads.
    pub fn set_known_objects(&self, objects: Vec<KnownObject>) {
        if let Some(client) = &self.objects {
            client.set_known(objects);
        }
    }

    /// Opens the device that `uri` names. May block for as long as the file system does.
    ///
    /// # Errors
    /// * The error of the system, in one line that names the device.
    /// * EINVAL for parameters out of range.
    /// * EOPNOTSUPP for mapped devices and device numbers: only the registry of devices knows them.
    pub fn open(&self, uri: &DeviceUri) -> Result<DeviceWithDiskIdentity, DeviceControlError> {
        self.open_with(uri, |remote| match remote {
            RemoteUri::Nbd(nbd) => Ok(nbd_device(self.servers.open(nbd)?)),
            RemoteUri::Nvme(nvme) => Ok(nvme_device(self.namespaces.open(nvme)?)),
        })
    }

    /// As [`BackendDeviceRegistry::open`] for an NBD export or an NVMe namespace whose server is
    /// down. It is taken to be like `other`, which is open and of the same kind. A server that
    /// differs is refused later.
    ///
    /// # Errors
    /// As there; EOPNOTSUPP if the two are not of one of these kinds.
    pub fn open_like(
        &self,
        uri: &DeviceUri,
        other: &DeviceUri,
    ) -> Result<DeviceWithDiskIdentity, DeviceControlError> {
        self.open_with(uri, |remote| match (remote, other) {
            (RemoteUri::Nbd(nbd), DeviceUri::Nbd(other)) => {
                Ok(nbd_device(self.servers.open_like(nbd, other)?))
            }
            (RemoteUri::Nvme(nvme), DeviceUri::Nvme(other)) => {
                Ok(nvme_device(self.namespaces.open_like(nvme, other)?))
            }
            _ => {
                Err(unsupported_uri_error(uri, "only a server of the same kind is taken to be like another"))
            }
        })
    }

    fn open_with(
        &self,
        uri: &DeviceUri,
        open_remote: impl FnOnce(RemoteUri<'_>) -> Result<Arc<dyn Device>, DeviceControlError>,
    ) -> Result<DeviceWithDiskIdentity, DeviceControlError> {
        let mut identity = DiskIdentity::Virtual;
        let (disk, queue): (Arc<dyn Device>, _) = match uri {
            DeviceUri::File(file) if file.format != ImageFormat::Raw => {
                let opened = qcow2::open_image(&self.disks, file)?;
                identity = opened.0;
                (Arc::new(opened.1), &file.queue)
            }
            DeviceUri::File(file) => {
                let opened = self.disks.open(file)?;
                identity = opened.0;
                (Arc::new(opened.1), &file.queue)
            }
            DeviceUri::Null(params) => (Arc::new(null::NullBlockDevice::new(params)?), &params.queue),
            DeviceUri::Mem { size, queue } => (Arc::new(mem::MemoryDevice::new(*size)?), queue),
            DeviceUri::Pattern { size } => (Arc::new(pattern::PatternDevice::new(*size)?), &None),
            DeviceUri::Nbd(nbd) => (open_remote(RemoteUri::Nbd(nbd))?, &nbd.queue),
            DeviceUri::Nvme(nvme) => (open_remote(RemoteUri::Nvme(nvme))?, &nvme.queue),
            DeviceUri::Object(object) => match &self.objects {
                Some(objects) => (objects.open(object)?, &object.queue),
                None => {
                    let why = "only the program udm reads objects; serve it there, and use its NBD export";
                    return Err(unsupported_uri_error(uri, why));
                }
            },
            DeviceUri::Mapped(_) | DeviceUri::Number { .. } => {
                return Err(unsupported_uri_error(uri, "a mapped device is not a backend"));
            }
        };
        let device = match queue {
            Some(params) if matches!(uri, DeviceUri::Null(null) if null.shared_tags) => {
                let may_schedule = !matches!(uri, DeviceUri::Null(null) if null.no_sched);
                Arc::new(QueuedDevice::sharing(disk, params, may_schedule, self.tag_set(params)))
            }
            Some(params) if matches!(uri, DeviceUri::Null(null) if null.no_sched) => {
                Arc::new(QueuedDevice::without_scheduler(disk, params))
            }
            Some(params) => Arc::new(QueuedDevice::new(disk, params)),
            None => disk,
        };
        self.remote_disks.note(uri)?;
        Ok(DeviceWithDiskIdentity { identity, device })
    }

    /// Returns the tag set for null devices with these numbers of queues and tags; creates it if no
    /// device uses it.
    fn tag_set(&self, params: &QueueParams) -> Arc<SharedTagSet> {
        let mut sets = self.tag_sets.lock().unwrap_or_else(PoisonError::into_inner);
        sets.retain(|_, set| set.strong_count() > 0);
        let (queues, depth) = (params.nr_hw_queues, params.queue_depth);
        let there = sets.get(&(queues, depth)).and_then(Weak::upgrade);
        there.unwrap_or_else(|| {
            let set = SharedTagSet::new(queues, depth);
            sets.insert((queues, depth), Arc::downgrade(&set));
            set
        })
    }
}

/// Opens a device for a process that uses no other device.
///
/// # Errors
/// As [`BackendDeviceRegistry::open`].
pub fn open_standalone_device(uri: &DeviceUri) -> Result<Arc<dyn Device>, DeviceControlError> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    BackendDeviceRegistry::new(cores).open(uri).map(|opened| opened.device)
}

/// The URI of a device that a server has.
enum RemoteUri<'a> {
    Nbd(&'a NbdUri),
    Nvme(&'a NvmeUri),
}

fn nbd_device(export: Arc<nbd::RemoteExport>) -> Arc<dyn Device> {
    Arc::new(nbd::NbdDevice::new(export))
}

fn nvme_device(namespace: Arc<nvme::RemoteNamespace>) -> Arc<dyn Device> {
    Arc::new(nvme::NvmeDevice::new(namespace))
}

fn unsupported_uri_error(uri: &DeviceUri, why: &str) -> DeviceControlError {
    DeviceControlError::new(EOPNOTSUPP, format!("{uri}: {why}"))
}

/// Returns the status of a request to a remote disk with these limits that needs no server: it is
/// invalid, not supported, or a flush of a disk without a write cache. `None` for all others.
fn status_without_server(bio: &Bio, limits: &Limits) -> Option<Status> {
    if bio.op == Op::Flush {
        return (!limits.write_cache).then_some(Status::Ok);
    }
    if let Some(status) = invalid_bio_status(bio, limits.size) {
        return Some(status);
    }
    let max = limits.max_for(bio.op);
    match bio.op {
        op if op.is_write() && limits.read_only => Some(Status::ReadOnly),
        Op::Discard | Op::WriteZeroes if max.0 == 0 => Some(Status::NotSupp),
        _ => (bio.sectors > max).then_some(Status::Inval),
    }
}

/// Error status of a bio that a device of `size` cannot serve; `None` for a valid bio. A range
/// beyond the end is `IoErr`. A data length that differs from the range is `Inval`. (A load
/// generator omits the data for devices that move none.)
fn invalid_bio_status(bio: &Bio, size: Sectors) -> Option<Status> {
    if bio.sector.0.checked_add(bio.sectors.0).is_none_or(|end| end > size.0) {
        return Some(Status::IoErr);
    }
    (bio.op.has_data() && bio.data.len() as u64 != bio.sectors.bytes()).then_some(Status::Inval)
}
