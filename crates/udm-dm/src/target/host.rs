//! The device that a target belongs to, as the target sees it.

use crate::device_events::DeviceEventDetails;
use crate::mapped::MappedDevice;
use std::any::Any;
use std::sync::Arc;
use udm_core::{CoreCommandSender, Nanos};

/// Settings of a device for its targets that no table holds, such as how paths are checked. The
/// crate of the target that reads them defines their type.
pub type SettingsOutsideTable = Arc<dyn Any + Send + Sync>;

/// The interface of a target to its mapped device.
pub trait TargetHostServices: Send + Sync {
    /// Increases the device's event counter, so `wait` returns. Called on the data path when a path
    /// fails; costs an atomic add.
    fn event(&self);
    /// Sends a device event. `change` formats it, only if a client listens. Never blocks.
    fn emit(&self, change: &dyn Fn() -> DeviceEventDetails) {
        let _ = change;
    }
    /// Name of the device, for the log; its number if the name is being changed. Never blocks.
    fn device(&self) -> String;
    /// Polls every lane of the device once, because a condition that lanes wait for has changed.
    /// Sends a message to each core, so only for rare events.
    fn kick(&self, cores: &dyn CoreCommandSender);
    /// Current time of the control half's clock; 0 if none was set.
    fn now(&self) -> Nanos {
        Nanos(0)
    }
    /// The settings of the device for its targets; `None` if none were set.
    fn settings(&self) -> Option<SettingsOutsideTable> {
        None
    }
    /// The device itself, if it still exists. Holding the returned `Arc` keeps the device and its
    /// tables alive.
    fn mapped(&self) -> Option<Arc<MappedDevice>> {
        None
    }
}
