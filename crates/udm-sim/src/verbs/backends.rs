//! The resolution of names, and the helper threads that close released objects.
//!
//! A name leads to a disk, and may lead to another one later. Resolution takes time, during which
//! other verbs run.

use super::driver;
use crate::environment::{SharedEnv, lock_mutex};
use crate::path::SimPath;
use crate::rng::SimRng;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use udm_control::registry::device_opener::{DeviceOpener, DeviceWithDiskIdentity, DiskIdentity};
use udm_core::errno::{EIO, ENOENT};
use udm_core::{Device, DeviceControlError, DeviceId};
use udm_wire::uri::DeviceUri;

/// Names of disks, and a link to the first of them.
pub(super) const NAMES: [&str; 4] = ["/sim/a", "/sim/b", "/sim/c", "/sim/link"];
const LINK: usize = 3;

/// Errno of a name that cannot be opened at present.
pub(super) const NOT_NOW: i32 = EIO;

/// An opened disk.
pub(super) struct OpenedDisk {
    pub(super) device: Weak<SimPath>,
    pub(super) id: DeviceId,
    pub(super) uri: String,
    pub(super) disk: usize,
}

/// State of the simulated backends.
pub(super) struct SimDiskOpenerState {
    /// Disk of each name.
    pub(super) leads: [usize; LINK],
    pub(super) opened: Vec<OpenedDisk>,
    /// One of this many opens fails; 0 for none.
    pub(super) fails: u64,
    /// Number of failed opens.
    pub(super) failed: u64,
    /// Objects to close, with the verb that released them.
    pub(super) closing: Vec<(u64, Box<dyn FnOnce() + Send>)>,
    /// The verb that runs.
    pub(super) actor: u64,
    pub(super) chance: SimRng,
}

/// Opens simulated disks for the registry.
#[derive(Clone)]
pub(super) struct SimDiskOpener {
    env: SharedEnv,
    world: Arc<Mutex<SimDiskOpenerState>>,
}

impl SimDiskOpener {
    pub(super) fn new(env: &SharedEnv, chance: SimRng, fails: u64) -> SimDiskOpener {
        let world = SimDiskOpenerState {
            leads: [0, 1, 2],
            opened: Vec::new(),
            fails,
            failed: 0,
            closing: Vec::new(),
            actor: 0,
            chance,
        };
        SimDiskOpener { env: env.clone(), world: Arc::new(Mutex::new(world)) }
    }

    pub(super) fn world(&self) -> MutexGuard<'_, SimDiskOpenerState> {
        lock_mutex(&self.world)
    }

    /// Resolves `uri` to a disk, after running other verbs.
    fn find(&self, uri: &DeviceUri) -> Result<usize, DeviceControlError> {
        driver::run_world_during_table_load();
        let mut world = self.world();
        let name = find_disk_name_index(uri)
            .ok_or_else(|| DeviceControlError::new(ENOENT, format!("{uri}: there is none")))?;
        let SimDiskOpenerState { fails, failed, chance, leads, .. } = &mut *world;
        if chance.one_in(*fails) {
            *failed += 1;
            return Err(DeviceControlError::new(NOT_NOW, format!("{uri}: not now")));
        }
        Ok(leads[name])
    }
}

/// Index of a name; a link has the index of its destination.
fn find_disk_name_index(uri: &DeviceUri) -> Option<usize> {
    let DeviceUri::File(file) = uri else { return None };
    NAMES.iter().position(|name| file.path == Path::new(name)).map(|name| name % LINK)
}

/// Returns the name under which the registry knows a word.
pub(super) fn canonicalize_device_name(word: &str) -> &str {
    if word == NAMES[LINK] { NAMES[0] } else { word }
}

impl DeviceOpener for SimDiskOpener {
    fn identify(&self, uri: &DeviceUri) -> Result<DiskIdentity, DeviceControlError> {
        self.find(uri).map(|disk| DiskIdentity::File { device: 1, inode: disk as u64 })
    }

    fn open(&self, uri: &DeviceUri) -> Result<DeviceWithDiskIdentity, DeviceControlError> {
        let disk = self.find(uri)?;
        let device = Arc::new(SimPath::new(&self.env, disk));
        let mut world = self.world();
        world.opened.retain(|opened| opened.device.strong_count() > 0);
        world.opened.push(OpenedDisk {
            device: Arc::downgrade(&device),
            id: device.id(),
            uri: canonicalize_device_name(&uri.to_string()).into(),
            disk,
        });
        Ok(DeviceWithDiskIdentity { identity: DiskIdentity::File { device: 1, inode: disk as u64 }, device })
    }

    fn canonical(&self, uri: &DeviceUri) -> String {
        canonicalize_device_name(&uri.to_string()).into()
    }

    fn exists(&self, path: &Path) -> bool {
        NAMES.iter().any(|name| path == Path::new(name))
    }

    fn spawn_blocking(&self, work: Box<dyn FnOnce() + Send>) {
        let mut world = self.world();
        let actor = world.actor;
        world.closing.push((actor, work));
    }
}
