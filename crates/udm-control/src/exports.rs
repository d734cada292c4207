//! Mapped devices as NBD exports, each under its name.
//!
//! Contract: if all names or its own are exported, a device is listed from its creation to its
//! removal. It keeps one export over renames, and if it is unlisted and listed again. So its users
//! are counted once, and a client keeps the export that it chose.

use crate::api;
use crate::registry::RegisteredDevice;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use udm_core::{Device, DeviceId};
use udm_dm::MappedDevice;
use udm_frontends::nbd::{
    AllowedClients, DeviceIoReport, Export, ExportNameError, Exports, FailingExportGuard,
    ServerCountersHandle,
};
use udm_wire::uri::{NbdAddress, NbdUri, format_host_vsock_uri};

/// Options of exports.
#[derive(Debug, Clone, Default)]
pub struct ExportOptions {
    /// The names of the devices to export; empty for all.
    pub only: Vec<String>,
    /// If true, clients may not write.
    pub read_only: bool,
}

/// An address on which NBD clients reach the server.
#[derive(Debug, Clone)]
pub enum ServedAddress {
    /// A port or a Unix socket of this machine.
    Nbd(NbdAddress),
    /// A port of vsock, for virtual machines.
    Vsock(u32),
}

/// Lists mapped devices in the exports of a server.
pub struct DeviceExporter {
    exports: Arc<Exports>,
    options: ExportOptions,
    addresses: OnceLock<Vec<ServedAddress>>,
    requires_tls: OnceLock<bool>,
    server: OnceLock<ServerCountersHandle>,
    by_device: Mutex<HashMap<DeviceId, Arc<Export>>>,
}

impl DeviceExporter {
    /// An exporter for the server that uses `exports`.
    #[must_use]
    pub fn new(exports: Arc<Exports>, options: ExportOptions) -> DeviceExporter {
        DeviceExporter {
            exports,
            options,
            addresses: OnceLock::new(),
            requires_tls: OnceLock::new(),
            server: OnceLock::new(),
            by_device: Mutex::default(),
        }
    }

    /// Sets the addresses of the server, whether clients need TLS, and its counters. Only the first
    /// call has an effect.
    pub fn serves(&self, addresses: Vec<ServedAddress>, requires_tls: bool, server: ServerCountersHandle) {
        let _ = self.addresses.set(addresses);
        let _ = self.requires_tls.set(requires_tls);
        let _ = self.server.set(server);
    }

    /// The counters of the server, once it runs.
    pub(crate) fn server(&self) -> Option<&ServerCountersHandle> {
        self.server.get()
    }

    /// The counters of a device's clients, if it has an export.
    pub(crate) fn served(&self, device: DeviceId) -> Option<DeviceIoReport> {
        self.by_device().get(&device).map(|export| export.served())
    }

    /// Sets the counters that another process has counted for a device before, if it has an export.
    pub(crate) fn set_served_before(&self, device: DeviceId, before: DeviceIoReport) {
        self.by_device().get(&device).inspect(|export| export.set_served_before(before));
    }

    /// Sets a hook that is called on any thread after a connection has closed a device. Only the
    /// first call has an effect.
    pub(crate) fn on_closed(&self, hook: Arc<dyn Fn() + Send + Sync>) {
        self.exports.on_closed(hook);
    }

    fn by_device(&self) -> MutexGuard<'_, HashMap<DeviceId, Arc<Export>>> {
        self.by_device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lists a device under `name`: after its creation, a failed removal or a rename. Connected
    /// clients stay; new clients use the new name.
    ///
    /// # Errors
    /// If the protocol can't carry the name, or another export has it.
    pub(crate) fn put(&self, name: &str, mapped: &RegisteredDevice) -> Result<(), ExportNameError> {
        let device: Arc<dyn Device> = Arc::<MappedDevice>::clone(&mapped.device);
        let is_wanted = self.options.only.is_empty() || self.options.only.iter().any(|n| n == name);
        let (mut known, id) = (self.by_device(), device.id());
        match (known.get(&id), is_wanted) {
            (Some(export), true) => self.exports.put(export, name)?,
            (Some(export), false) => self.exports.remove(export),
            (None, true) => {
                let read_only = self.options.read_only || mapped.read_only.load(Ordering::Relaxed);
                let export = Export::new(name, "", read_only, device)?;
                let export = export.for_clients(Arc::clone(&mapped.allowed_clients));
                let export = export.described_by(Arc::clone(&mapped.description));
                known.insert(id, self.exports.add(export)?);
            }
            (None, false) => {}
        }
        Ok(())
    }

    /// Lists the exports with these names in this order, after all others.
    pub(crate) fn reorder(&self, names: &[String]) {
        for name in names {
            let Some(export) = self.exports.get(name).filter(|export| *export.name() == **name) else {
                continue;
            };
            self.exports.remove(&export);
            // The name was just freed.
            let _ = self.exports.put(&export, name);
        }
    }

    /// Disconnects the clients of all exports that depend on `changed` and that it does not allow.
    pub(crate) fn allowed_clients_changed(&self, changed: &AllowedClients) {
        self.exports.allowed_clients_changed(changed);
    }

    /// Reports that `device` may have another size or other limits.
    pub(crate) fn device_changed(&self, device: DeviceId) {
        self.exports.device_changed(device);
    }

    /// Unlists a device before its removal: new clients do not find it.
    pub fn remove(&self, device: DeviceId) {
        self.by_device().get(&device).inspect(|export| self.exports.remove(export));
    }

    /// Fails all requests of a device's clients, see [`Exports::fail_requests`].
    pub fn fail(&self, device: DeviceId) -> Option<FailingExportGuard> {
        self.by_device().get(&device).map(|export| self.exports.fail_requests(export))
    }

    /// Forgets the export of a removed device.
    pub fn forget(&self, device: DeviceId) {
        self.by_device().remove(&device);
    }

    /// Number of connections that use a device.
    #[must_use]
    pub fn users(&self, device: DeviceId) -> usize {
        self.by_device().get(&device).map_or(0, |export| export.users())
    }

    /// The URIs of an export, one per address. Clients know where their certificates are.
    #[must_use]
    pub fn uris(&self, name: &str) -> Vec<String> {
        let addresses = self.addresses.get().map(Vec::as_slice).unwrap_or_default();
        let requires_tls = self.requires_tls.get().is_some_and(|requires| *requires);
        let uri = |address: &ServedAddress| {
            let uri = match address {
                ServedAddress::Nbd(address) => NbdUri::new(address.clone(), name).to_string(),
                ServedAddress::Vsock(port) => format_host_vsock_uri(*port, name),
            };
            if requires_tls { uri.replacen("nbd", "nbds", 1) } else { uri }
        };
        addresses.iter().map(uri).collect()
    }

    /// All listed exports, in their order.
    #[must_use]
    pub fn list(&self) -> Vec<api::NbdExportDescription> {
        let describe = |export: &Arc<Export>| {
            let (name, limits) = (export.name(), export.device().limits());
            api::NbdExportDescription {
                size_bytes: limits.size.bytes(),
                read_only: export.is_read_only() || limits.read_only,
                uris: self.uris(&name),
                name: name.to_string(),
            }
        };
        self.exports.all().iter().map(describe).collect()
    }
}
