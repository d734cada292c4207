//! Devices that a file declares: created at the start, and changed when the file is applied again.
//!
//! Contract: the file owns the devices that it created, and no others. A device of a verb stays as
//! it is until the file declares one with its name. A new file is compared with the file that was
//! applied last, not with the devices: changes by verbs stay until the file changes there. Each
//! device is changed completely or not at all; a failure is reported, and the others continue.
//! Devices that verbs removed are created again.
//!
//! The difference of two files is a pure function (`plan`). First, devices that are no longer used
//! are removed, so their disks are free. Then used devices come before their users. Last, devices
//! are removed that had users before. Each step is a verb.

mod apply;
mod handover;
mod plan;
mod retry;

pub use apply::{apply_config_file, create_declared_devices};
pub use handover::{HandedOverConfig, HandedOverConfigDevice};
pub(crate) use handover::{config_to_hand_over, take_over_config};
pub(crate) use plan::creation_order;
pub use plan::{ConfigPlan, DesiredDevice, PlanStep, plan_config_changes};
pub use retry::{absent_devices, run_config_device_retries};

use crate::registry::BaseDir;
use apply::ConfigOwnedDevice;
use retry::AbsentDevices;
use std::sync::atomic::{AtomicBool, Ordering};

/// The content of a configuration file.
#[derive(Clone)]
pub struct DesiredState {
    /// The devices, each with a unique name.
    pub devices: Vec<DesiredDevice>,
    /// Base directory of relative paths in their tables.
    pub folder: BaseDir,
    /// Other changes in the file, as texts for people, one line each.
    pub notes: Vec<String>,
}

/// Reads the file; the error is its first fault. May block.
pub type ConfigReader = Box<dyn Fn() -> Result<DesiredState, String> + Send + Sync>;

/// The configuration file of a server, and what is applied of it.
pub(crate) struct ServerConfigFile {
    read: ConfigReader,
    /// Lock of changes by the file: one at a time.
    applied: tokio::sync::Mutex<LastAppliedConfig>,
    /// Notified when devices of the file are to be tried again.
    is_waiting: tokio::sync::Notify,
    ends: AtomicBool,
}

/// The applied part of a file.
#[derive(Default)]
struct LastAppliedConfig {
    devices: Vec<ConfigOwnedDevice>,
    /// The file, if some of its devices wait for a snapshot that can't be attached.
    blocked: Option<DesiredState>,
    /// The devices that need something that is not there.
    absent: Option<AbsentDevices>,
}

impl ServerConfigFile {
    /// The file that `read` reads, with nothing applied.
    pub fn new(read: ConfigReader) -> ServerConfigFile {
        ServerConfigFile {
            read,
            applied: tokio::sync::Mutex::default(),
            is_waiting: tokio::sync::Notify::new(),
            ends: AtomicBool::new(false),
        }
    }

    /// Marks the shutdown: no more steps begin.
    pub fn end(&self) {
        self.ends.store(true, Ordering::Relaxed);
    }
}
