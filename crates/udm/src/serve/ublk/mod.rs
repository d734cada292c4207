//! The disks of this machine: those of `--ublk`, and those that verbs add (`added`).
//!
//! [`UblkDisks`] has all disks. A disk that is being added, taken over or removed is *busy*: the
//! kernel may take its time, so no lock is held meanwhile, and nothing else is done with this disk.
//! While the disks are *frozen*, none is added or removed: they are being handed over to another
//! process, or the server ends. The end is explicit ([`UblkDisksEndGuard`]), because the cores must
//! still serve the disks while the kernel ends them.

mod added;
mod start;

use super::args::ServeArgs;
use super::upgrade::BlockDeviceState;
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use udm_control::ublk_disks::RecordedUblkDisk;
use udm_core::errno::{EBUSY, ETIMEDOUT};
use udm_core::{DeviceControlError, DeviceId};
use udm_frontends::nbd::Exports;
use udm_frontends::ublk::{UblkDiskOptions, UblkServer};
use udm_runtime::ProcessCores;

/// How long an end waits for disks that are being added or removed.
const BUSY_PATIENCE: Duration = Duration::from_secs(8);

/// A disk that is served. If the last reference to its server is dropped, its device is removed, or
/// left to the next server if it is in use.
#[derive(Clone)]
struct ServedUblkDisk {
    server: Arc<UblkServer>,
    /// True if it was added while the server runs.
    is_added: bool,
}

#[derive(Default)]
struct UblkDiskList {
    served: Vec<ServedUblkDisk>,
    /// Names of devices whose disks are being added, taken over or removed.
    busy: Vec<String>,
    is_frozen: bool,
}

impl UblkDiskList {
    fn find(&self, device: &str) -> Option<&ServedUblkDisk> {
        self.served.iter().find(|disk| *disk.server.name() == *device)
    }
}

/// The list, and what is notified when a disk is no longer busy.
#[derive(Default)]
struct SharedUblkDiskList {
    list: Mutex<UblkDiskList>,
    changed: Condvar,
}

impl SharedUblkDiskList {
    fn lock(&self) -> MutexGuard<'_, UblkDiskList> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The disk of a device is busy until this is dropped.
struct BusyUblkDisk {
    all: Arc<SharedUblkDiskList>,
    device: String,
}

impl Drop for BusyUblkDisk {
    fn drop(&mut self) {
        let mut list = self.all.lock();
        if let Some(at) = list.busy.iter().position(|name| *name == self.device) {
            list.busy.swap_remove(at);
        }
        self.all.changed.notify_all();
    }
}

/// All disks of this machine; a clone is the same disks.
#[derive(Clone)]
pub(super) struct UblkDisks {
    core_set: Arc<ProcessCores>,
    exports: Arc<Exports>,
    /// The folder whose servers take disks over from each other. Without a home there is one set of
    /// disks per machine.
    state_folder: PathBuf,
    is_sandboxed: bool,
    all: Arc<SharedUblkDiskList>,
}

/// Ends all disks when it is dropped.
pub(super) struct UblkDisksEndGuard(Arc<UblkDisks>);

impl UblkDisksEndGuard {
    /// The disks.
    pub(super) fn disks(&self) -> &Arc<UblkDisks> {
        &self.0
    }
}

impl Drop for UblkDisksEndGuard {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl UblkDisks {
    /// Serves the disks of the options, and those of devices that have come back. Without
    /// `restored` there are no disks yet: another process has them, see [`UblkDisks::take_over`].
    /// Blocks.
    ///
    /// # Errors
    /// An option names a device twice or one that does not exist, or the kernel refuses one.
    pub(super) fn start(
        args: &ServeArgs,
        core_set: &Arc<ProcessCores>,
        exports: &Arc<Exports>,
        restored: Option<Vec<(String, RecordedUblkDisk)>>,
    ) -> Result<UblkDisksEndGuard> {
        let disks = UblkDisksEndGuard(Arc::new(UblkDisks {
            core_set: Arc::clone(core_set),
            exports: Arc::clone(exports),
            state_folder: args.state.path().unwrap_or_default(),
            is_sandboxed: args.sandboxed,
            all: Arc::default(),
        }));
        match restored {
            Some(restored) => disks.0.start_all(&args.ublk, restored).map(|()| disks),
            None => Ok(disks),
        }
    }

    fn options(&self, device: &str, number: Option<u32>) -> UblkDiskOptions {
        let (name, marked_as) = (device.to_owned(), device.to_owned());
        UblkDiskOptions { name, marked_as, number, queues: None, state_folder: self.state_folder.clone() }
    }

    /// Marks a disk as busy.
    ///
    /// # Errors
    /// The disks are frozen, this one is busy, or another one is served under its name or mark.
    fn begin(&self, options: &UblkDiskOptions) -> Result<BusyUblkDisk, DeviceControlError> {
        let refused = |why: String| Err(DeviceControlError::new(EBUSY, why));
        let mut list = self.all.lock();
        if list.is_frozen {
            return refused("the server ends, or hands its devices over".into());
        }
        if list.busy.contains(&options.name) {
            return refused("its block device is being added, taken over or removed: try again".into());
        }
        if let Some(disk) = list.find(&options.name) {
            return refused(format!("it is {} already", disk.server.block_device().display()));
        }
        if let Some(other) = list.served.iter().find(|one| one.server.options().owner() == options.owner()) {
            let (name, path) = (other.server.name(), other.server.block_device());
            let why = format!(
                "{}, of {name}, has the mark of this name: remove it first, or choose another name",
                path.display()
            );
            return refused(why);
        }
        list.busy.push(options.name.clone());
        Ok(BusyUblkDisk { all: Arc::clone(&self.all), device: options.name.clone() })
    }

    /// Starts a disk that is busy, and lists it. Blocks.
    fn start_busy(&self, busy: BusyUblkDisk, options: UblkDiskOptions, is_added: bool) -> Result<()> {
        let name = options.name.clone();
        let export = self.exports.get(&name);
        let server = UblkServer::start(&self.core_set, &self.exports, options)
            .with_context(|| format!("ublk {name}"))?;
        if server.is_taken_over() {
            let path = server.block_device();
            tracing::info!("ublk {name}: {} is taken over from an earlier server", path.display());
        }
        let mut list = self.all.lock();
        list.served.push(ServedUblkDisk { server: Arc::new(server), is_added });
        // A rename that came meanwhile has not found the disk.
        if let (Some(export), Some(disk)) = (export, list.served.last())
            && *export.name() != *name
        {
            disk.server.set_name(&export.name());
        }
        drop(list);
        drop(busy);
        Ok(())
    }

    /// True if the device has a disk, or gets one.
    fn has_disk(&self, device: &str) -> bool {
        let list = self.all.lock();
        list.find(device).is_some() || list.busy.iter().any(|name| name == device)
    }

    /// The name of a disk that is busy, if there is one: it cannot be handed over.
    pub(super) fn busy(&self) -> Option<String> {
        self.all.lock().busy.first().cloned()
    }

    /// Pauses all disks, so that their devices can be handed over, and freezes them. Blocks.
    ///
    /// # Errors
    /// A disk is busy, or has requests in flight that do not complete: one line. Then no disk is
    /// paused.
    pub(super) fn pause(&self) -> Result<(), DeviceControlError> {
        let mut list = self.all.lock();
        if let Some(name) = list.busy.first() {
            let why = format!("the block device of {name} is being added or removed: try again");
            return Err(DeviceControlError::new(EBUSY, why));
        }
        list.is_frozen = true;
        let served = list.served.clone();
        drop(list);
        for (index, disk) in served.iter().enumerate() {
            if !disk.server.pause() {
                served[..index].iter().for_each(|disk| disk.server.resume());
                self.all.lock().is_frozen = false;
                let why = format!(
                    "the block device of {} has requests in flight that do not complete",
                    disk.server.name()
                );
                return Err(DeviceControlError::new(ETIMEDOUT, why));
            }
        }
        Ok(())
    }

    /// Goes on after [`UblkDisks::pause`].
    pub(super) fn resume(&self) {
        let mut list = self.all.lock();
        list.is_frozen = false;
        list.served.iter().for_each(|disk| disk.server.resume());
    }

    /// The disks for another process, as it takes them over.
    pub(super) fn handed_over(&self) -> Vec<BlockDeviceState> {
        let state = |disk: &ServedUblkDisk| {
            let UblkDiskOptions { name, marked_as, number, queues, .. } = disk.server.options();
            BlockDeviceState { device: name, marked_as, number, queues, is_added: disk.is_added }
        };
        self.all.lock().served.iter().map(state).collect()
    }

    /// The hook for [`Exports::on_changed`]: it refreshes the ublk disks of a changed device.
    pub(super) fn change_hook(&self) -> impl Fn(DeviceId) + Send + Sync + use<> {
        let all = Arc::clone(&self.all);
        move |device| all.lock().served.iter().for_each(|disk| disk.server.refresh_if_of(device))
    }

    /// Names and addresses of all disks: the block device, and the link to it.
    pub(super) fn addresses(&self) -> Vec<(String, String)> {
        let paths = |server: &UblkServer| {
            let link = server.link().map(|link| link.display().to_string());
            [server.block_device().display().to_string()]
                .into_iter()
                .chain(link)
                .collect::<Vec<_>>()
                .join("  ")
        };
        let list = self.all.lock();
        list.served.iter().map(|disk| (disk.server.name().to_string(), paths(&disk.server))).collect()
    }

    /// Ends all disks, and waits for this for some seconds at most. None is added afterwards.
    fn end(&self) {
        let mut list = self.all.lock();
        list.is_frozen = true;
        let waited = self.all.changed.wait_timeout_while(list, BUSY_PATIENCE, |list| !list.busy.is_empty());
        let (mut list, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let served = std::mem::take(&mut list.served);
        drop(list);
        // All at once; each waits in its own drop.
        served.iter().for_each(|disk| disk.server.begin_stop());
    }
}
