//! Renaming devices, and setting a UUID.

use crate::error::VerbError;
use crate::registry::{DeviceRegistry, NewName};
use udm_core::errno::EIO;
use udm_dm::TargetError;

/// Gives the device `word` another name, or a UUID if it has none. Requests, tables and verbs that
/// use the device continue, in any of its states. Raises an event if the device has a live table.
/// May block on the state folder, where marks of stores are kept by name.
///
/// # Errors
/// EINVAL for an invalid name or UUID, and if there is a UUID already; EBUSY if the name or UUID is
/// in use, even by the device itself, and while the device is being created or removed; ENXIO if
/// there is no such device; EIO if a mark can't be moved. After an error nothing has changed.
pub fn rename_mapped_device(registry: &DeviceRegistry, word: &str, to: NewName<'_>) -> Result<(), VerbError> {
    let mapped = registry.may_rename(word, to)?;
    let before = mapped.device.name();
    let change = || {
        registry.rename(&mapped, word, to)?;
        if let NewName::Name(new) = to {
            registry.vhost_user_sockets().inspect(|sockets| sockets.rename(&before, new));
            registry.ublk_disks().inspect(|disks| disks.rename(&before, new));
        }
        Ok(())
    };
    match (registry.state_folder(), to) {
        (Some(folder), NewName::Name(new)) => {
            let failed = |error: std::io::Error| {
                let why = format!("what is kept against it can't be moved: {error}");
                VerbError::new(word, TargetError::errno(error.raw_os_error().unwrap_or(EIO)).because(why))
            };
            folder.renaming(&mapped.device, new, failed, change)
        }
        _ => change(),
    }
}
