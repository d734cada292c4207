//! Mapped devices for a measurement, made as `udm serve` makes them.

use anyhow::{Context, Result};
use std::sync::Arc;
use udm_control::{Registry, verbs};
use udm_core::Device;
use udm_runtime::Cluster;

/// A mapped device to be: its name and its table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// What later tables call it, as `@NAME`.
    pub name: String,
    /// The lines of its table.
    pub text: String,
}

/// Mapped devices, and what made them.
pub(crate) struct Mapped {
    /// In the order of their tables.
    pub devices: Vec<Arc<dyn Device>>,
    registry: Arc<Registry>,
}

impl Mapped {
    /// As [`make_mapped`].
    pub(crate) fn new(cluster: &Arc<Cluster>, tables: &[Table]) -> Result<Mapped> {
        let registry = Registry::new(cluster.clone(), cluster.len());
        let control = control()?;
        let make = |Table { name, text }: &Table| -> Result<Arc<dyn Device>> {
            let made = control.block_on(verbs::create(&registry, name, None, Some(text)));
            made.map_err(|e| anyhow::anyhow!(e.beside(text)))?;
            Ok(Arc::clone(&registry.find(name)?.device) as Arc<dyn Device>)
        };
        let devices = tables.iter().map(make).collect::<Result<_>>()?;
        Ok(Mapped { devices, registry })
    }

    /// Removes one of them. The cores must be taking turns.
    pub(crate) fn remove(&self, name: &str) -> Result<()> {
        Ok(control()?.block_on(verbs::remove(&self.registry, name))?)
    }
}

/// Runs verbs: they are futures that need no reactor.
fn control() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().build().context("control")
}

/// Mapped devices with these tables, loaded and resumed on the cores of `cluster`, which must be
/// taking turns.
///
/// # Errors
/// The table's own, with carets under the word to blame.
pub fn make_mapped(cluster: &Arc<Cluster>, tables: &[Table]) -> Result<Vec<Arc<dyn Device>>> {
    Ok(Mapped::new(cluster, tables)?.devices)
}
