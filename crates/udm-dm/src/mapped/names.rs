//! What a device may be called, and is.

use super::MappedDevice;
use crate::error::TargetError;
use crate::target::TargetHost;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The longest name in bytes (kernel `DM_NAME_LEN`, less its NUL).
const NAME_MAX: usize = 127;
/// The longest uuid in bytes (kernel `DM_UUID_LEN`, less its NUL).
const UUID_MAX: usize = 128;

/// The name and the uuid of a device.
pub(super) struct DeviceNames {
    name: String,
    uuid: Option<String>,
}

impl DeviceNames {
    pub fn new(name: &str, uuid: Option<&str>) -> Result<DeviceNames, TargetError> {
        check_name(name)?;
        uuid.map_or(Ok(()), check_uuid)?;
        Ok(DeviceNames { name: name.to_owned(), uuid: uuid.map(str::to_owned) })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn uuid(&self) -> Option<&str> {
        self.uuid.as_deref()
    }
}

/// What a device is called, as of when it is asked. Does not keep the device.
#[derive(Clone)]
pub struct NameHandle(Arc<Mutex<DeviceNames>>);

impl NameHandle {
    /// The name; the last one of a device that is gone.
    #[must_use]
    pub fn get(&self) -> String {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).name.clone()
    }
}

impl MappedDevice {
    /// What it is called, now and later.
    #[must_use]
    pub fn name_handle(&self) -> NameHandle {
        NameHandle(Arc::clone(&self.names))
    }

    fn names(&self) -> MutexGuard<'_, DeviceNames> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> String {
        self.names().name.clone()
    }

    /// The uuid.
    #[must_use]
    pub fn uuid(&self) -> Option<String> {
        self.names().uuid.clone()
    }

    /// Checks that a device can be called `name`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check_name(name: &str) -> Result<(), TargetError> {
        check_name(name)
    }

    /// Checks that a device can have `uuid`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check_uuid(uuid: &str) -> Result<(), TargetError> {
        check_uuid(uuid)
    }

    /// Gives the device another name, which the caller knows to be free. Raises an event when there
    /// is a live table.
    ///
    /// # Errors
    /// What is wrong with the name.
    pub fn rename(&self, name: &str) -> Result<(), TargetError> {
        check_name(name)?;
        name.clone_into(&mut self.names().name);
        if self.state().live.is_some() {
            self.events.event();
        }
        Ok(())
    }

    /// Gives a device without a uuid one, which the caller knows to be free.
    ///
    /// # Errors
    /// What is wrong with the uuid; that there is one already.
    pub fn set_uuid(&self, uuid: &str) -> Result<(), TargetError> {
        check_uuid(uuid)?;
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

fn check_name(name: &str) -> Result<(), TargetError> {
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

fn check_uuid(uuid: &str) -> Result<(), TargetError> {
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
