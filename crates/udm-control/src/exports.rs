//! Mapped devices as exports: each under its name.
//!
//! Contract: a device is on the list from when it is made until it is removed, if all names are
//! exported or its own is. It has one export all the while, whatever it is called and however often
//! it is taken off and put on again: so who uses it is counted once, and a client keeps what it
//! chose.

use crate::http::api;
use crate::registry::Mapped;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use udm_core::{Device, DeviceId};
use udm_dm::MappedDevice;
use udm_frontends::nbd::{
    DeviceIoReport, Export, ExportError, Exports, FailRequestsGuard, ServerCountersHandle,
};
use udm_wire::uri::{NbdAddress, NbdUri};

/// What to export, and how.
#[derive(Debug, Clone, Default)]
pub struct ExportOptions {
    /// The names of the devices to export; empty for all.
    pub only: Vec<String>,
    /// Clients may not write.
    pub read_only: bool,
}

/// Puts devices on the list of a server and takes them off.
pub struct Exporter {
    exports: Arc<Exports>,
    options: ExportOptions,
    addresses: OnceLock<Vec<NbdAddress>>,
    server: OnceLock<ServerCountersHandle>,
    by_device: Mutex<HashMap<DeviceId, Arc<Export>>>,
}

impl Exporter {
    /// For the server that reads `exports`.
    #[must_use]
    pub fn new(exports: Arc<Exports>, options: ExportOptions) -> Exporter {
        Exporter {
            exports,
            options,
            addresses: OnceLock::new(),
            server: OnceLock::new(),
            by_device: Mutex::default(),
        }
    }

    /// Where the server listens, and what it counts. Once; later calls change nothing.
    pub fn serves(&self, addresses: Vec<NbdAddress>, server: ServerCountersHandle) {
        let _ = self.addresses.set(addresses);
        let _ = self.server.set(server);
    }

    /// What the server counts, once it is there.
    pub(crate) fn server(&self) -> Option<&ServerCountersHandle> {
        self.server.get()
    }

    /// What clients of a device have asked for and got, where it has an export.
    pub(crate) fn served(&self, device: DeviceId) -> Option<DeviceIoReport> {
        self.by_device().get(&device).map(|export| export.served())
    }

    /// Has `hook` called, on whatever thread, when a connection has let go of a device. Once; later
    /// calls change nothing.
    pub(crate) fn on_closed(&self, hook: Arc<dyn Fn() + Send + Sync>) {
        self.exports.on_closed(hook);
    }

    fn by_device(&self) -> MutexGuard<'_, HashMap<DeviceId, Arc<Export>>> {
        self.by_device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A device was made, was not removed after all, or is called `name` from now on. Clients that
    /// it has stay, whatever it is called; those that come ask for the new name.
    ///
    /// # Errors
    /// When the protocol can't carry the name, or it is another's on the list.
    pub(crate) fn put(&self, name: &str, mapped: &Mapped) -> Result<(), ExportError> {
        let device: Arc<dyn Device> = Arc::<MappedDevice>::clone(&mapped.device);
        let is_wanted = self.options.only.is_empty() || self.options.only.iter().any(|n| n == name);
        let (mut known, id) = (self.by_device(), device.id());
        match (known.get(&id), is_wanted) {
            (Some(export), true) => self.exports.put(export, name)?,
            (Some(export), false) => self.exports.remove(export),
            (None, true) => {
                let read_only = self.options.read_only || mapped.read_only.load(Ordering::Relaxed);
                let export = Export::new(name, "", read_only, device)?;
                known.insert(id, self.exports.add(export)?);
            }
            (None, false) => {}
        }
        Ok(())
    }

    /// A device is about to be removed: clients that come now do not find it.
    pub fn remove(&self, device: DeviceId) {
        self.by_device().get(&device).inspect(|export| self.exports.remove(export));
    }

    /// Has all requests of a device's clients fail, see [`Exports::fail`].
    pub fn fail(&self, device: DeviceId) -> Option<FailRequestsGuard> {
        self.by_device().get(&device).map(|export| self.exports.fail(export))
    }

    /// A device is gone.
    pub fn forget(&self, device: DeviceId) {
        self.by_device().remove(&device);
    }

    /// Connections that use a device.
    #[must_use]
    pub fn users(&self, device: DeviceId) -> usize {
        self.by_device().get(&device).map_or(0, |export| export.users())
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
            let (name, limits) = (export.name(), export.device().limits());
            api::Export {
                size_bytes: limits.size.bytes(),
                read_only: export.is_read_only() || limits.read_only,
                uris: self.uris(&name),
                name: name.to_string(),
            }
        };
        self.exports.all().iter().map(describe).collect()
    }
}
