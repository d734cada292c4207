//! Names and uuids of mapped devices, and the rules for them.

use super::MappedDevice;
use crate::error::TargetError;
use crate::target::TargetHostServices;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The longest name in bytes (kernel `DM_NAME_LEN`, less its NUL).
const NAME_MAX: usize = 127;
/// The longest uuid in bytes (kernel `DM_UUID_LEN`, less its NUL).
const UUID_MAX: usize = 128;

/// The name and the uuid of a device.
pub(super) struct DeviceNameAndUuid {
    name: String,
    uuid: Option<String>,
}

impl DeviceNameAndUuid {
    pub fn new(name: &str, uuid: Option<&str>) -> Result<DeviceNameAndUuid, TargetError> {
        check_device_name(name)?;
        uuid.map_or(Ok(()), check_device_uuid)?;
        Ok(DeviceNameAndUuid { name: name.to_owned(), uuid: uuid.map(str::to_owned) })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn uuid(&self) -> Option<&str> {
        self.uuid.as_deref()
    }
}

/// Reads the current name of a device. Does not keep the device alive.
#[derive(Clone)]
pub struct DeviceNameReader(Arc<Mutex<DeviceNameAndUuid>>);

impl DeviceNameReader {
    /// The current name; the last name if the device was removed.
    #[must_use]
    pub fn get(&self) -> String {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).name.clone()
    }
}

impl MappedDevice {
    /// A handle that reads the name of the device, also after a rename.
    #[must_use]
    pub fn name_handle(&self) -> DeviceNameReader {
        DeviceNameReader(Arc::clone(&self.names))
    }

    fn names(&self) -> MutexGuard<'_, DeviceNameAndUuid> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Name of the device.
    #[must_use]
    pub fn name(&self) -> String {
        self.names().name.clone()
    }

    /// Uuid of the device.
    #[must_use]
    pub fn uuid(&self) -> Option<String> {
        self.names().uuid.clone()
    }

    /// Checks that `name` is a valid device name.
    ///
    /// # Errors
    /// The rule that `name` breaks.
    pub fn check_name(name: &str) -> Result<(), TargetError> {
        check_device_name(name)
    }

    /// Checks that `uuid` is a valid uuid.
    ///
    /// # Errors
    /// The rule that `uuid` breaks.
    pub fn check_uuid(uuid: &str) -> Result<(), TargetError> {
        check_device_uuid(uuid)
    }

    /// Renames the device. The caller knows that the name is free. Raises an event if there is a
    /// live table.
    ///
    /// # Errors
    /// The rule that the name breaks.
    pub fn rename(&self, name: &str) -> Result<(), TargetError> {
        check_device_name(name)?;
        name.clone_into(&mut self.names().name);
        if self.state().live.is_some() {
            self.events.event();
        }
        Ok(())
    }

    /// Sets the uuid of a device without one. The caller knows that the uuid is free. Raises an
    /// event if there is a live table.
    ///
    /// # Errors
    /// The rule that the uuid breaks, or that the device already has a uuid.
    pub fn set_uuid(&self, uuid: &str) -> Result<(), TargetError> {
        check_device_uuid(uuid)?;
        let mut names = self.names();
        if let Some(old) = &names.uuid {
            let name = &names.name;
            return Err(TargetError::new(format!(
                "Unable to change uuid of mapped device {name} to {uuid} because uuid is already set to {old}"
            )));
        }
        names.uuid = Some(uuid.to_owned());
        drop(names);
        if self.state().live.is_some() {
            self.events.event();
        }
        Ok(())
    }
}

fn check_device_name(name: &str) -> Result<(), TargetError> {
    let text = match name {
        "" => "Name not supplied when creating device".to_owned(),
        "control" | "." | ".." => r#"device name cannot be "control", ".", or ".."#.to_owned() + "\"",
        _ if name.contains('/') => format!(r#"Name "{name}" invalid. It contains "/"."#),
        _ if name.len() > NAME_MAX => format!(r#"Name "{name}" too long."#),
        _ if name.chars().any(char::is_control) => {
            "Name invalid. It contains a control character.".to_owned()
        }
        _ => return Ok(()),
    };
    Err(TargetError::new(text))
}

fn check_device_uuid(uuid: &str) -> Result<(), TargetError> {
    let text = if uuid.is_empty() {
        "UUID is empty."
    } else if uuid.len() > UUID_MAX {
        "UUID too long."
    } else if uuid.chars().any(char::is_control) {
        "UUID invalid. It contains a control character."
    } else {
        return Ok(());
    };
    Err(TargetError::new(text))
}
