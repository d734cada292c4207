//! Mapped devices for a measurement, made as `udm serve` makes them.

use anyhow::{Context, Result};
use std::sync::Arc;
use udm_control::{Registry, verbs};
use udm_core::Device;
use udm_runtime::CoreSet;

/// A mapped device to be: its name and its table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedTable {
    /// What later tables call it, as `@NAME`.
    pub name: String,
    /// The lines of its table.
    pub text: String,
}

/// What has gone over a path of a multipath device.
#[derive(Debug, Clone, PartialEq)]
pub struct PathTotals {
    /// The word of the table.
    pub name: String,
    /// "active" or "failed".
    pub state: String,
    /// What came back from it, well or not.
    pub requests: u64,
    /// Their bytes.
    pub moved: u64,
    /// What of it came back with an error.
    pub errors: u64,
    /// Seconds since it was first looked at, and bytes a second until then; nothing where nobody
    /// watched it.
    pub rates: Vec<(f64, f64)>,
}

/// Mapped devices, and what made them.
pub struct MappedDevices {
    /// In the order of their tables.
    pub devices: Vec<Arc<dyn Device>>,
    registry: Arc<Registry>,
}

impl MappedDevices {
    /// As [`make_mapped`].
    ///
    /// # Errors
    /// The same.
    pub fn new(cluster: &Arc<CoreSet>, tables: &[NamedTable]) -> Result<MappedDevices> {
        let registry = Registry::new(cluster.clone(), cluster.len());
        let control_runtime = control_runtime()?;
        let make = |NamedTable { name, text }: &NamedTable| -> Result<Arc<dyn Device>> {
            let made = control_runtime.block_on(verbs::create(&registry, name, None, Some(text)));
            made.map_err(|e| anyhow::anyhow!(e.beside(text)))?;
            Ok(Arc::clone(&registry.find(name)?.device) as Arc<dyn Device>)
        };
        let devices = tables.iter().map(make).collect::<Result<_>>()?;
        Ok(MappedDevices { devices, registry })
    }

    /// The paths of all of them, in the order of their tables.
    #[must_use]
    pub fn paths(&self) -> Vec<PathTotals> {
        let all = verbs::statuses(&self.registry, false).statuses.into_iter().flat_map(|s| s.paths);
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

    /// Removes one of them. The cores must be taking turns.
    pub(crate) fn remove(&self, name: &str) -> Result<()> {
        Ok(control_runtime()?.block_on(verbs::remove(&self.registry, name))?)
    }
}

/// Runs verbs: they are futures that need no reactor.
fn control_runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().build().context("control")
}

/// Mapped devices with these tables, loaded and resumed on the cores of `core_set`, which must be
/// taking turns.
///
/// # Errors
/// The table's own, with carets under the word to blame.
pub fn make_mapped(cluster: &Arc<CoreSet>, tables: &[NamedTable]) -> Result<Vec<Arc<dyn Device>>> {
    Ok(MappedDevices::new(cluster, tables)?.devices)
}
