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

/// Mapped devices with these tables, loaded and resumed on the cores of `cluster`, which must be
/// taking turns.
///
/// # Errors
/// The table's own, with carets under the word to blame.
pub fn make_mapped(cluster: &Arc<Cluster>, tables: &[Table]) -> Result<Vec<Arc<dyn Device>>> {
    let registry = Registry::new(cluster.clone(), cluster.len());
    // The verbs are futures that need no reactor.
    let control = tokio::runtime::Builder::new_current_thread().build().context("control")?;
    let make = |Table { name, text }: &Table| -> Result<Arc<dyn Device>> {
        let made = control.block_on(verbs::create(&registry, name, None, Some(text)));
        made.map_err(|e| anyhow::anyhow!(e.beside(text)))?;
        Ok(Arc::clone(&registry.find(name)?.device) as Arc<dyn Device>)
    };
    tables.iter().map(make).collect()
}
