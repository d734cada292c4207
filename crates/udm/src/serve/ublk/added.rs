//! Disks that verbs add and remove while the server runs.

use super::{ServedUblkDisk, UblkDisks};
use std::sync::Arc;
use udm_control::api::{AddUblkDiskRequest, UblkDiskDescription};
use udm_control::ublk_disks::{self, RecordedUblkDisk};
use udm_core::DeviceControlError;
use udm_core::errno::{EACCES, EBUSY, EINVAL, EIO, ENODEV, ENOENT, EOPNOTSUPP, EPERM};
use udm_frontends::ublk::{UblkDiskOptions, UblkRemovalError};
use udm_wire::ublk::NUMBER_MAX;

/// The maximum number of disks, as each has a thread.
const DISKS_MAX: usize = 4096;

fn describe(ServedUblkDisk { server, is_added }: &ServedUblkDisk) -> UblkDiskDescription {
    UblkDiskDescription {
        device: server.name().to_string(),
        path: server.block_device().display().to_string(),
        link: server.link().map(|link| link.display().to_string()),
        queues: server.queues(),
        added: *is_added,
    }
}

/// The error of a disk that was not started.
fn start_refusal(error: &anyhow::Error) -> DeviceControlError {
    let cause = error.root_cause().downcast_ref::<std::io::Error>();
    let errno = cause.map_or(EIO, |cause| match cause.kind() {
        std::io::ErrorKind::NotFound => ENODEV,
        std::io::ErrorKind::PermissionDenied => EACCES,
        std::io::ErrorKind::ResourceBusy => EBUSY,
        std::io::ErrorKind::Unsupported => EOPNOTSUPP,
        _ => cause.raw_os_error().unwrap_or(EIO),
    });
    DeviceControlError::new(errno, cause.map_or_else(|| format!("{error:#}"), ToString::to_string))
}

impl UblkDisks {
    /// Says what is wrong with a request.
    fn check_request(&self, device: &str, request: &AddUblkDiskRequest) -> Result<(), DeviceControlError> {
        let refused = |errno, why: String| Err(DeviceControlError::new(errno, why));
        if self.is_sandboxed {
            return refused(EOPNOTSUPP, "a server with --sandbox has no block devices".into());
        }
        if self.exports.get(device).is_none_or(|export| *export.name() != *device) {
            return refused(EINVAL, "it is not exported (--export)".into());
        }
        if request.number.is_some_and(|number| number > NUMBER_MAX) {
            return refused(EINVAL, format!("number: expected 0 to {NUMBER_MAX}"));
        }
        let cores = self.core_set.len();
        if request.queues.is_some_and(|queues| queues == 0 || usize::from(queues) > cores) {
            return refused(EINVAL, format!("queues: expected 1 to {cores}, one per core"));
        }
        if self.all.lock().served.len() >= DISKS_MAX {
            return refused(EBUSY, format!("{DISKS_MAX} block devices is the maximum"));
        }
        Ok(())
    }
}

impl ublk_disks::UblkDisks for UblkDisks {
    fn list(&self) -> Vec<UblkDiskDescription> {
        self.all.lock().served.iter().map(describe).collect()
    }

    fn add(
        &self,
        device: &str,
        request: &AddUblkDiskRequest,
    ) -> Result<UblkDiskDescription, DeviceControlError> {
        self.check_request(device, request)?;
        let options = UblkDiskOptions { queues: request.queues, ..self.options(device, request.number) };
        let owner = options.owner();
        let busy = self.begin(&options)?;
        self.start_busy(busy, options, true).map_err(|error| start_refusal(&error))?;
        let list = self.all.lock();
        // By its mark: it may have another name already.
        let added = list.served.iter().find(|disk| disk.server.options().owner() == owner);
        added.map(describe).ok_or_else(|| DeviceControlError::new(EBUSY, "it was removed at once"))
    }

    fn remove(&self, device: &str, force: bool) -> Result<(), DeviceControlError> {
        let refused = |errno, why: &str| Err(DeviceControlError::new(errno, why));
        let mut list = self.all.lock();
        if list.busy.iter().any(|name| name == device) {
            return refused(EBUSY, "its block device is being added, taken over or removed: try again");
        }
        let Some(disk) = list.find(device).cloned() else {
            return refused(ENOENT, "it has no block device");
        };
        let path = disk.server.block_device();
        let path = path.display();
        if !disk.is_added {
            let why = format!("{path} is one of the server's options, and ends with the server");
            return refused(EPERM, &why);
        }
        if list.is_frozen {
            return refused(EBUSY, "the server ends, or hands its devices over");
        }
        list.busy.push(device.to_owned());
        let _busy = super::BusyUblkDisk { all: Arc::clone(&self.all), device: device.to_owned() };
        drop(list);
        disk.server.remove(force).map_err(|error| match error {
            UblkRemovalError::InUse(user) => {
                let why = format!(
                    "{path} is in use ({user}): end that first, or remove it with --force: its users get \
                     errors then"
                );
                DeviceControlError::new(EBUSY, why)
            }
            UblkRemovalError::NotServed => DeviceControlError::new(EBUSY, format!("{path}: {error}")),
            UblkRemovalError::Kernel(_) => DeviceControlError::new(EIO, format!("{path}: {error}")),
        })?;
        self.all.lock().served.retain(|other| !Arc::ptr_eq(&other.server, &disk.server));
        Ok(())
    }

    fn rename(&self, device: &str, to: &str) {
        let list = self.all.lock();
        list.find(device).inspect(|disk| disk.server.set_name(to));
    }

    fn recorded(&self, device: &str) -> Option<RecordedUblkDisk> {
        let list = self.all.lock();
        let disk = list.find(device).filter(|disk| disk.is_added)?;
        let UblkDiskOptions { marked_as, number, queues, .. } = disk.server.options();
        Some(RecordedUblkDisk { marked_as, number, queues })
    }

    fn restore(&self, device: &str, disk: RecordedUblkDisk) {
        // A disk that is there already stays.
        if !self.has_disk(device) {
            self.restore_on_thread(device, disk);
        }
    }
}
