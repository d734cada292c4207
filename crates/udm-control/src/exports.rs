//! Mapped devices as exports: each under its name.
//!
//! Contract: a device is on the list from when it is made until it is removed. Who uses it is
//! counted here, over all the times it was on the list: a client that came just before a removal
//! keeps the export that it chose.

use crate::http::api;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use udm_core::{Device, DeviceId};
use udm_frontends::nbd::{Export, ExportError, Exports, Failing};
use udm_wire::uri::{NbdAddress, NbdUri};

/// What to export, and how.
#[derive(Debug, Clone, Default)]
pub struct ExportOptions {
    /// The devices to export; empty for all.
    pub only: Vec<String>,
    /// Clients may not write.
    pub read_only: bool,
}

/// Puts devices on the list of a server and takes them off.
pub struct Exporter {
    exports: Arc<Exports>,
    options: ExportOptions,
    addresses: OnceLock<Vec<NbdAddress>>,
    by_name: Mutex<HashMap<String, Vec<Arc<Export>>>>,
}

impl Exporter {
    /// For the server that reads `exports`.
    #[must_use]
    pub fn new(exports: Arc<Exports>, options: ExportOptions) -> Exporter {
        Exporter { exports, options, addresses: OnceLock::new(), by_name: Mutex::default() }
    }

    /// Where the server listens. Once; later calls change nothing.
    pub fn listens_on(&self, addresses: Vec<NbdAddress>) {
        let _ = self.addresses.set(addresses);
    }

    /// Has `hook` called, on whatever thread, when a connection has let go of a device. Once; later
    /// calls change nothing.
    pub(crate) fn on_closed(&self, hook: Arc<dyn Fn() + Send + Sync>) {
        self.exports.on_closed(hook);
    }

    fn by_name(&self) -> MutexGuard<'_, HashMap<String, Vec<Arc<Export>>>> {
        self.by_name.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A device was made, or was not removed after all.
    ///
    /// # Errors
    /// When the protocol can't carry the name, or it is on the list already.
    pub fn add(&self, name: &str, device: Arc<dyn Device>) -> Result<(), ExportError> {
        if !self.options.only.is_empty() && !self.options.only.iter().any(|n| n == name) {
            return Ok(());
        }
        let export = self.exports.add(Export::new(name, "", self.options.read_only, device)?)?;
        let mut by_name = self.by_name();
        let all = by_name.entry(name.into()).or_default();
        all.retain(|old| old.users() > 0);
        all.push(export);
        Ok(())
    }

    /// A device is about to be removed: clients that come now do not find it.
    pub fn remove(&self, name: &str) {
        self.exports.remove(name);
    }

    /// Has all requests of a device's clients fail, see [`Exports::fail`].
    pub fn fail(&self, device: DeviceId) -> Failing {
        self.exports.fail(device)
    }

    /// A device is gone.
    pub fn forget(&self, name: &str) {
        self.by_name().remove(name);
    }

    /// Connections that use a device.
    #[must_use]
    pub fn users(&self, name: &str) -> usize {
        self.by_name().get(name).map_or(0, |all| all.iter().map(|e| e.users()).sum())
    }

    /// The URIs of an export, one for each address.
    #[must_use]
    pub fn uris(&self, name: &str) -> Vec<String> {
        let addresses = self.addresses.get().map(Vec::as_slice).unwrap_or_default();
        let uri = |address: &NbdAddress| NbdUri::new(address.clone(), name).to_string();
        addresses.iter().map(uri).collect()
    }

    /// Everything that is on the list, in its order.
    #[must_use]
    pub fn list(&self) -> Vec<api::Export> {
        let describe = |export: &Arc<Export>| {
            let limits = export.device().limits();
            api::Export {
                name: export.name().into(),
                size_bytes: limits.size.bytes(),
                read_only: self.options.read_only || limits.read_only,
                uris: self.uris(export.name()),
            }
        };
        self.exports.all().iter().map(describe).collect()
    }
}
