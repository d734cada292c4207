//! The devices at the bottom of a stack: null, memory, a pattern, files and block devices, and
//! exports of NBD servers.
//!
//! [`Backends::open`] makes a device from its URI; one `match` names all kinds. Each is a
//! [`Device`] whose lanes keep the rules of [`udm_core::Lane`]. The layer above checks alignment,
//! length and flags. A range beyond the end is refused here once more, because it would extend a
//! file.
//!
//! A *disk* is the thing to which a name leads: an inode, or the number of a block device. Each
//! name of a disk is a device, so hard links can be paths. State that must be the same for all
//! names belongs to the disk: use of the page cache, size, the exclusive claim, and failed syncs.
//! Its locks are taken when a table is loaded, a device is opened, a size is read or a store grows,
//! and not by a request; the exception is a sync through the page cache (`file/sync`).
//!
//! A backend knows no target, and no other backend except `mem`, which stores the data of a
//! memory-backed null device. Work that may block runs on a thread (`blocking`).
#![forbid(unsafe_code)]

mod blocking;
mod cache;
mod faults;
mod file;
mod mem;
pub mod nbd;
mod null;
mod pattern;
#[cfg(test)]
mod testing;

pub use cache::CachedMemory;
pub use faults::Faults;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use udm_core::errno::EOPNOTSUPP;
use udm_core::{Bio, Device, OpenError, Sectors, Status};
use udm_queue::{QueuedDevice, TagSet};
use udm_wire::uri::{DeviceUri, QueueParams};

/// What a name leads to outside of udm, so that two names can be known as one disk, and a name that
/// leads elsewhere than it did be noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DiskIdentity {
    /// A regular file: the number of its file system and its inode there.
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
    /// Nothing: the device is what its URI says.
    Virtual,
}

/// A device and what it is.
pub struct OpenedDevice {
    /// What the URI led to.
    pub identity: DiskIdentity,
    /// The device.
    pub device: Arc<dyn Device>,
}

/// The backends of a process. What must be one for all names of a disk is kept here, so a process
/// has one of these.
pub struct Backends {
    disks: file::OpenDisks,
    servers: nbd::RemoteExports,
    /// What null devices share, by hardware queues and tags of each, for as long as one is there.
    tag_sets: Mutex<HashMap<(u32, u32), Weak<TagSet>>>,
}

impl Backends {
    /// Nothing open, for `cores` cores. More may use what is opened, and then share more.
    #[must_use]
    pub fn new(cores: usize) -> Backends {
        Backends {
            disks: file::OpenDisks::new(cores),
            servers: nbd::RemoteExports::default(),
            tag_sets: Mutex::default(),
        }
    }

    /// What `uri` leads to now. If that is open its size is read again, and what is open of it
    /// shows the new one. May block for as long as the file system does.
    ///
    /// # Errors
    /// As [`Backends::open`], as far as looking tells.
    pub fn look(&self, uri: &DeviceUri) -> Result<DiskIdentity, OpenError> {
        match uri {
            DeviceUri::File(file) => self.disks.look(file),
            DeviceUri::Nbd(nbd) => {
                self.servers.look(nbd);
                Ok(DiskIdentity::Virtual)
            }
            _ => Ok(DiskIdentity::Virtual),
        }
    }

    /// Opens the device that `uri` names. May block for as long as the file system does.
    ///
    /// # Errors
    /// What the system says, in one line that names the device; EINVAL for parameters out of range;
    /// EOPNOTSUPP for kinds that this crate does not have: mapped devices and numbers are known to
    /// the registry of devices alone.
    pub fn open(&self, uri: &DeviceUri) -> Result<OpenedDevice, OpenError> {
        let mut identity = DiskIdentity::Virtual;
        let (disk, queue): (Arc<dyn Device>, _) = match uri {
            DeviceUri::File(file) => {
                let opened = self.disks.open(file)?;
                identity = opened.0;
                (Arc::new(opened.1), &file.queue)
            }
            DeviceUri::Null(params) => (Arc::new(null::Null::new(params)?), &params.queue),
            DeviceUri::Mem { size, queue } => (Arc::new(mem::Mem::new(*size)?), queue),
            DeviceUri::Pattern { size } => (Arc::new(pattern::Pattern::new(*size)?), &None),
            DeviceUri::Nbd(nbd) => (Arc::new(nbd::Nbd::new(self.servers.open(nbd)?)), &nbd.queue),
            DeviceUri::Mapped(_) | DeviceUri::Number { .. } => {
                return Err(unsupported(uri, "a mapped device is no backend"));
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
        Ok(OpenedDevice { identity, device })
    }

    /// The tags of all null devices that share as many.
    fn tag_set(&self, params: &QueueParams) -> Arc<TagSet> {
        let mut sets = self.tag_sets.lock().unwrap_or_else(PoisonError::into_inner);
        sets.retain(|_, set| set.strong_count() > 0);
        let (queues, depth) = (params.nr_hw_queues, params.queue_depth);
        let there = sets.get(&(queues, depth)).and_then(Weak::upgrade);
        there.unwrap_or_else(|| {
            let set = TagSet::new(queues, depth);
            sets.insert((queues, depth), Arc::downgrade(&set));
            set
        })
    }
}

/// Opens the one device that a process uses.
///
/// # Errors
/// As [`Backends::open`].
pub fn open(uri: &DeviceUri) -> Result<Arc<dyn Device>, OpenError> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Backends::new(cores).open(uri).map(|opened| opened.device)
}

fn unsupported(uri: &DeviceUri, why: &str) -> OpenError {
    OpenError::new(EOPNOTSUPP, format!("{uri}: {why}"))
}

/// The status of a bio that can't be served on a device of `size`: its range ends beyond it, or its
/// data is not as long as the range. (A load generator leaves the data out for devices that move
/// none.)
fn out_of_range_status(bio: &Bio, size: Sectors) -> Option<Status> {
    if bio.sector.0.checked_add(bio.sectors.0).is_none_or(|end| end > size.0) {
        return Some(Status::IoErr);
    }
    (bio.op.has_data() && bio.data.len() as u64 != bio.sectors.bytes()).then_some(Status::Inval)
}
