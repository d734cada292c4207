//! What is applied of a configuration file, handed over to another process.

use super::apply::ConfigOwnedDevice;
use super::{AbsentDevices, DesiredDevice, LastAppliedConfig};
use crate::error::VerbError;
use crate::registry::DeviceRegistry;
use crate::throttle_settings::ThrottleSettings;
use serde::{Deserialize, Serialize};
use udm_core::errno::EBUSY;
use udm_dm::TargetError;

/// A device that the file owns, as the file declared it when it was applied last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandedOverConfigDevice {
    /// Name of the device.
    pub name: String,
    /// The table in the file.
    pub table: String,
    /// The UUID in the file.
    pub uuid: Option<String>,
    /// True if the file says that clients may not write.
    pub read_only: bool,
    /// The names of the clients that may use it in the file; `None` for all clients.
    #[serde(default)]
    pub allow: Option<Vec<String>>,
    /// The description in the file.
    #[serde(default)]
    pub description: String,
    /// The limits in the file.
    #[serde(default)]
    pub throttle: Option<ThrottleSettings>,
    /// True if a verb has changed the table since.
    pub is_changed: bool,
}

/// The applied part of a file.
pub type HandedOverConfig = Vec<HandedOverConfigDevice>;

/// The applied part of the server's file, and the names of its devices that are tried again; empty
/// without a file.
///
/// # Errors
/// EBUSY while the file is being applied, and while a device of it waits for a snapshot.
pub(crate) fn config_to_hand_over(
    registry: &DeviceRegistry,
) -> Result<(HandedOverConfig, Vec<String>), VerbError> {
    let Some(config) = registry.config() else { return Ok(Default::default()) };
    let busy = |why: &str| VerbError::new("upgrade", TargetError::new(why).with_errno(EBUSY));
    let Ok(applied) = config.applied.try_lock() else {
        return Err(busy("the configuration file is being applied: try again"));
    };
    if applied.blocked.is_some() {
        return Err(busy("a device of the configuration file waits for a snapshot that is not attached"));
    }
    let absent = applied.absent.iter().flat_map(|absent| absent.names.clone()).collect();
    Ok((applied.devices.iter().filter_map(ConfigOwnedDevice::to_hand_over).collect(), absent))
}

/// Makes the file the owner of its devices, which exist already. Those of `absent` are tried again.
///
/// # Errors
/// A table of `from` has no target type that this program knows.
pub(crate) fn take_over_config(
    registry: &DeviceRegistry,
    from: &HandedOverConfig,
    absent: &[String],
) -> Result<(), VerbError> {
    let Some(config) = registry.config() else { return Ok(()) };
    let mut devices = Vec::new();
    for one in from {
        let HandedOverConfigDevice { name, table, uuid, read_only, allow, description, throttle, is_changed } =
            one.clone();
        let wanted = DesiredDevice::new(&name, table, uuid, read_only)?
            .with_allow(allow.map(Into::into))
            .with_description(description)
            .with_throttle(throttle);
        devices.extend(ConfigOwnedDevice::taken_over(registry, &wanted, is_changed));
    }
    if let Ok(mut applied) = config.applied.try_lock() {
        let absent = AbsentDevices { desired: None, names: absent.iter().cloned().collect() };
        let absent = Some(absent).filter(|absent| !absent.names.is_empty());
        *applied = LastAppliedConfig { devices, blocked: None, absent };
        config.is_waiting.notify_one();
    }
    Ok(())
}
