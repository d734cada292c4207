//! Renaming a device, and setting its first UUID.
//!
//! Contract: a rename changes only the name. The number, tables, users and a deferred removal stay.
//! Names and exports change together under the lock of the directory. Errors are the kernel's,
//! checked in its order: an invalid new name, a name in use, an unknown device.

use super::{DeviceDirectory, RegisteredDevice};
use crate::error::VerbError;
use crate::registry::DeviceRegistry;
use std::sync::Arc;
use udm_core::DevNo;
use udm_core::errno::{EBUSY, EINVAL, ENXIO};
use udm_dm::{EventKind, MappedDevice, TargetError};

/// Checks that `word`, a name or a UUID, does not look like a device number.
pub(super) fn check_not_number(what: &str, word: &str) -> Result<(), TargetError> {
    if word.parse::<DevNo>().is_err() {
        return Ok(());
    }
    let reason = format!("a {what} of the form major:minor would be taken for a device number");
    Err(TargetError::errno(EINVAL).because(reason))
}

/// New name or UUID of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewName<'a> {
    /// Another name: 1 to 127 bytes, without a slash.
    Name(&'a str),
    /// A UUID, if the device has none: 1 to 128 bytes.
    Uuid(&'a str),
}

impl NewName<'_> {
    /// Checks the word itself.
    fn check(self) -> Result<(), TargetError> {
        match self {
            NewName::Name("") => Err(TargetError::new("Non empty new name is required.")),
            NewName::Name(name) => {
                MappedDevice::check_name(name).and_then(|()| check_not_number("name", name))
            }
            NewName::Uuid(uuid) => {
                MappedDevice::check_uuid(uuid).and_then(|()| check_not_number("uuid", uuid))
            }
        }
    }
}

impl DeviceDirectory {
    /// The device `word`, if it may get this name or UUID.
    fn renameable(&self, word: &str, to: NewName<'_>) -> Result<&Arc<RegisteredDevice>, VerbError> {
        let refused = |error: TargetError| VerbError::new(word, error);
        to.check().map_err(refused)?;
        let (what, prefix, new, taken) = match to {
            NewName::Name(new) => ("name", "", new, self.names.contains_key(new)),
            NewName::Uuid(new) => ("uuid", "uuid ", new, self.uuids.contains_key(new)),
        };
        if taken {
            let text =
                format!("Unable to change {what} on mapped device {word} to one that already exists: {new}");
            return Err(refused(TargetError::new(text).with_errno(EBUSY)));
        }
        self.resolve(word).map_err(|absent| match absent.reason() {
            Some(reason) => refused(TargetError::errno(EBUSY).because(reason)),
            None => {
                let text = format!("Unable to rename non-existent device, {word} to {prefix}{new}");
                VerbError { missing: true, ..refused(TargetError::new(text).with_errno(ENXIO)) }
            }
        })
    }
}

impl DeviceRegistry {
    /// The device `word`, if it may get this name or UUID now.
    ///
    /// # Errors
    /// As [`DeviceRegistry::rename`].
    pub(crate) fn may_rename(&self, word: &str, to: NewName<'_>) -> Result<Arc<RegisteredDevice>, VerbError> {
        self.state().directory.renameable(word, to).cloned()
    }

    /// Renames `mapped`, if `word` still means it. Its clients stay connected; new clients use the
    /// new name.
    ///
    /// # Errors
    /// EINVAL for an invalid name or UUID, and if there is a UUID already; EBUSY for a name or UUID
    /// in use, while the device is being created or removed, and if `word` now means another
    /// device; ENXIO if there is no such device.
    pub(crate) fn rename(
        &self,
        mapped: &Arc<RegisteredDevice>,
        word: &str,
        to: NewName<'_>,
    ) -> Result<(), VerbError> {
        let refused = |error: TargetError| VerbError::new(word, error);
        let mut state = self.state();
        let directory = &mut state.directory;
        if !Arc::ptr_eq(directory.renameable(word, to)?, mapped) {
            return Err(refused(TargetError::errno(EBUSY).because("another device has that name meanwhile")));
        }
        let (device, minor) = (&mapped.device, mapped.device.number().minor);
        match to {
            NewName::Uuid(uuid) => {
                device.set_uuid(uuid).map_err(refused)?;
                directory.uuids.insert(uuid.into(), minor);
                mapped.publish(EventKind::Renamed, "it has a uuid now");
            }
            NewName::Name(name) => {
                if let Some(exporter) = self.exporter() {
                    let put = exporter.put(name, mapped);
                    put.map_err(|e| refused(TargetError::new(e.to_string())))?;
                }
                let old = device.name();
                device.rename(name).map_err(refused)?;
                directory.names.remove(&old);
                directory.names.insert(name.into(), minor);
                mapped.publish(EventKind::Renamed, &format!("it was called {old}"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::DeviceLifecycleStage;
    use super::*;

    #[test]
    fn what_has_no_name_yet_or_no_more_is_not_renamed() {
        let mut directory = DeviceDirectory::default();
        let made = directory.reserve("a", Some("u"), None).unwrap();
        directory.reserve("b", None, None).unwrap();
        let refusal = |directory: &DeviceDirectory, word: &str, to| {
            let refused = directory.renameable(word, to).err().unwrap();
            (refused.error.errno, refused.to_string())
        };
        let (name, uuid) = (NewName::Name, NewName::Uuid);
        let (errno, text) = refusal(&directory, "a", name("c"));
        assert!(errno == EBUSY && text.contains("still being created"), "{text}");
        directory.set(&made, DeviceLifecycleStage::Active);
        assert!(directory.renameable("254:0", name("c")).is_ok_and(|found| Arc::ptr_eq(found, &made)));
        // The name of a device being created is in use, and so is the device's own name.
        for new in ["b", "a"] {
            let (errno, text) = refusal(&directory, "a", name(new));
            assert_eq!(errno, EBUSY);
            assert!(
                text.contains(&format!("on mapped device a to one that already exists: {new}")),
                "{text}"
            );
        }
        assert_eq!(
            refusal(&directory, "none", uuid("u")).0,
            EBUSY,
            "the name that is taken is reported first"
        );
        let (errno, text) = refusal(&directory, "none", uuid("v"));
        assert!(errno == ENXIO && text.contains("non-existent device, none to uuid v"), "{text}");
        for bad in [name(""), name("a/b"), name("254:9"), name("."), uuid(""), uuid("1:1"), name("x\ny")] {
            assert_eq!(refusal(&directory, "a", bad).0, udm_core::errno::EINVAL, "{bad:?}");
        }
        directory.set(&made, DeviceLifecycleStage::Removing);
        let (errno, text) = refusal(&directory, "a", name("c"));
        assert!(errno == EBUSY && text.contains("is being removed"), "{text}");
    }
}
