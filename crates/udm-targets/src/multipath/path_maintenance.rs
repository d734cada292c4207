//! The settings of a multipath device that its table does not hold. The device keeps them for the
//! target.

use std::sync::Arc;
use udm_core::Nanos;
use udm_dm::{MappedDevice, SettingsOutsideTable, TargetHostServices};
use udm_wire::multipath_conf::MultipathSettings;

/// Maintenance of paths besides requests, which the kernel leaves to a daemon.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PathMaintenanceSettings {
    /// Settings of path checks and their consequences. `None` leaves the maintenance to messages,
    /// as the kernel does.
    pub paths: Option<Arc<MultipathSettings>>,
    /// Options of the path watch, read when a table is loaded.
    pub watch: PathWatchOptions,
}

impl PathMaintenanceSettings {
    /// The path maintenance among the `settings` of a device for its targets; by default none.
    fn among(settings: Option<&SettingsOutsideTable>) -> PathMaintenanceSettings {
        settings
            .and_then(|settings| settings.downcast_ref::<PathMaintenanceSettings>().cloned())
            .unwrap_or_default()
    }

    /// The path maintenance of `device`; by default none.
    #[must_use]
    pub fn of(device: &MappedDevice) -> PathMaintenanceSettings {
        PathMaintenanceSettings::among(device.target_settings().as_ref())
    }

    /// The path maintenance of the device of a target; by default none.
    pub(super) fn of_host(host: &dyn TargetHostServices) -> PathMaintenanceSettings {
        PathMaintenanceSettings::among(host.settings().as_ref())
    }

    /// Sets the path maintenance of `device`, from the next load and resume on.
    pub fn set(self, device: &MappedDevice) {
        device.set_target_settings(Arc::new(self));
    }
}

/// Options of the path watch of a multipath target. By default all are off, as in the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathWatchOptions {
    /// If a path holds a request longer than this, the path fails and its reads go to another path.
    pub deadline: Option<Nanos>,
    /// If a read takes longer than most, it is also sent to a second path.
    pub hedge_reads: bool,
    /// If a path is much slower than the others of its group, it is ejected for some time.
    pub eject_slow: bool,
}

impl PathWatchOptions {
    /// True if at least one option is set.
    #[must_use]
    pub fn is_on(&self) -> bool {
        *self != PathWatchOptions::default()
    }
}
