//! Mapped devices for a measurement, made as `udm serve` makes them.

use anyhow::{Context, Result};
use std::sync::Arc;
use udm_control::{DeviceRegistry, verbs};
use udm_core::Device;
use udm_runtime::ProcessCores;

/// Name and table of a mapped device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedTable {
    /// The name of the device. Later tables refer to it as `@NAME`.
    pub name: String,
    /// The lines of its table.
    pub text: String,
}

/// I/O totals of one path of a multipath device.
#[derive(Debug, Clone, PartialEq)]
pub struct PathTotals {
    /// The name of the path in the table.
    pub name: String,
    /// "active" or "failed".
    pub state: String,
    /// Requests that completed, with or without an error.
    pub requests: u64,
    /// Bytes of these requests.
    pub moved: u64,
    /// Requests that completed with an error.
    pub errors: u64,
    /// Pairs of seconds since sampling began and bytes per second up to then. Empty if the path was
    /// not sampled.
    pub rates: Vec<(f64, f64)>,
}

/// Mapped devices, and their registry.
pub struct MappedDevices {
    /// The devices, in the order of their tables.
    pub devices: Vec<Arc<dyn Device>>,
    registry: Arc<DeviceRegistry>,
}

impl MappedDevices {
    /// Makes mapped devices, as [`make_mapped_devices`] does.
    ///
    /// # Errors
    /// As [`make_mapped_devices`].
    pub fn new(core_set: &Arc<ProcessCores>, tables: &[NamedTable]) -> Result<MappedDevices> {
        let registry = DeviceRegistry::new(core_set.clone(), core_set.len());
        let control_runtime = control_runtime()?;
        let make = |NamedTable { name, text }: &NamedTable| -> Result<Arc<dyn Device>> {
            let made =
                control_runtime.block_on(verbs::create_mapped_device(&registry, name, None, Some(text)));
            made.map_err(|e| anyhow::anyhow!(e.with_table(text)))?;
            Ok(Arc::clone(&registry.find(name)?.device) as Arc<dyn Device>)
        };
        let devices = tables.iter().map(make).collect::<Result<_>>()?;
        Ok(MappedDevices { devices, registry })
    }

    /// The paths of all devices, in the order of their tables.
    #[must_use]
    pub fn paths(&self) -> Vec<PathTotals> {
        let all = verbs::all_table_statuses(&self.registry, false).statuses.into_iter().flat_map(|s| s.paths);
        all.map(|path| PathTotals {
            requests: path.served.values().map(|m| m.requests).sum(),
            moved: path.served.values().map(|m| m.bytes).sum(),
            errors: path.errors.values().sum(),
            rates: Vec::new(),
            name: path.name,
            state: path.state,
        })
        .collect()
    }

    /// Removes the device `name`. The cores must be taking turns.
    pub(crate) fn remove(&self, name: &str) -> Result<()> {
        Ok(control_runtime()?.block_on(verbs::remove_mapped_device(&self.registry, name))?)
    }
}

/// A runtime for verbs, which are futures that need no I/O driver.
fn control_runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().build().context("control")
}

/// Makes mapped devices: loads and resumes their tables on the cores of `core_set`. The cores must
/// be taking turns.
///
/// # Errors
/// An error in a table, with carets below the wrong word.
pub fn make_mapped_devices(
    core_set: &Arc<ProcessCores>,
    tables: &[NamedTable],
) -> Result<Vec<Arc<dyn Device>>> {
    Ok(MappedDevices::new(core_set, tables)?.devices)
}
