//! The block devices of this machine, as far as the registry knows them.

use super::DeviceRegistry;
use crate::ublk_disks::{RecordedUblkDisk, UblkDisks};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// What serves block devices.
#[derive(Default)]
pub(super) struct ServedUblkDisks {
    disks: OnceLock<Arc<dyn UblkDisks>>,
    /// Block devices that are made when `disks` is set, by name of their device.
    awaited: Mutex<Vec<(String, RecordedUblkDisk)>>,
}

impl DeviceRegistry {
    /// Sets what serves block devices, and restores those of devices that have come back. Only the
    /// first call has an effect.
    pub fn set_ublk_disks(&self, disks: Arc<dyn UblkDisks>) {
        let _ = self.ublk.disks.set(disks);
        let awaited = self.take_awaited_ublk_disks();
        awaited.into_iter().for_each(|(device, disk)| self.restore_ublk_disk(device, disk));
    }

    /// The block devices of devices that have come back so far, by name, once.
    #[must_use]
    pub fn take_awaited_ublk_disks(&self) -> Vec<(String, RecordedUblkDisk)> {
        std::mem::take(&mut *self.awaited_ublk())
    }

    /// What serves block devices, once it is set.
    pub(crate) fn ublk_disks(&self) -> Option<&Arc<dyn UblkDisks>> {
        self.ublk.disks.get()
    }

    /// Makes the block device that `device` had, now or when [`DeviceRegistry::set_ublk_disks`] is
    /// called.
    pub(crate) fn restore_ublk_disk(&self, device: String, disk: RecordedUblkDisk) {
        let mut awaited = self.awaited_ublk();
        let Some(disks) = self.ublk.disks.get() else { return awaited.push((device, disk)) };
        drop(awaited);
        disks.restore(&device, disk);
    }

    fn awaited_ublk(&self) -> MutexGuard<'_, Vec<(String, RecordedUblkDisk)>> {
        self.ublk.awaited.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
