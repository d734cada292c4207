//! Devices that a file declares: created at the start, and changed when the file is applied again.
//!
//! Contract: the file owns the devices that it made, and no others. A device of a verb stays as it
//! is until the file has one of its name. A new file is compared with the file that was applied
//! last, not with the devices: changes by verbs stay until the file changes there. Each device is
//! changed completely or not at all; a failure is reported, and the others continue. Devices that
//! verbs removed are made again.
//!
//! The difference of two files is a pure function (`plan`). First, devices that are no longer used
//! are removed, so their disks are free. Then used devices come before their users. Last, devices
//! are removed that had users before. Each step is a verb.

mod apply;
mod plan;

pub use apply::{reconfigure, start, wait_for_snapshots};
pub use plan::{ConfigPlan, DesiredDevice, PlanStep, plan};

use crate::registry::BaseDir;
use apply::AppliedDevice;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a file says.
#[derive(Clone)]
pub struct DesiredState {
    /// The devices, each with a name of its own.
    pub devices: Vec<DesiredDevice>,
    /// From where relative paths in their tables count.
    pub folder: BaseDir,
    /// What else has changed, for a person, a line each.
    pub notes: Vec<String>,
}

/// Reads the file; an error is its first fault. May block.
pub type ConfigReader = Box<dyn Fn() -> Result<DesiredState, String> + Send + Sync>;

/// The file of a server, and what of it is applied.
pub(crate) struct Config {
    read: ConfigReader,
    /// Held by whoever changes what the file wants: one at a time.
    applied: tokio::sync::Mutex<AppliedConfig>,
    /// Some of it waits for a snapshot.
    is_blocked: tokio::sync::Notify,
    ends: AtomicBool,
}

/// What of a file is applied.
#[derive(Default)]
struct AppliedConfig {
    devices: Vec<AppliedDevice>,
    /// The file, where some of it waits for a snapshot that can't be attached.
    blocked: Option<DesiredState>,
}

impl Config {
    /// The file that `read` reads, with nothing of it applied.
    pub fn new(read: ConfigReader) -> Config {
        let is_blocked = tokio::sync::Notify::new();
        Config { read, applied: tokio::sync::Mutex::default(), is_blocked, ends: AtomicBool::new(false) }
    }

    /// The server ends: nothing more is begun.
    pub fn end(&self) {
        self.ends.store(true, Ordering::Relaxed);
    }
}
