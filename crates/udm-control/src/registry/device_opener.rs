//! The registry's access to the outside: it opens devices and runs blocking work.

use std::path::Path;
use udm_backends::BackendDeviceRegistry;
use udm_backends::nvme::{KnownNamespace, NvmePathReport};
pub use udm_backends::{DeviceWithDiskIdentity, DiskIdentity, KnownObject};
use udm_core::DeviceControlError;
use udm_core::errno::EOPNOTSUPP;
use udm_wire::nbd::client::NegotiatedExportInfo;
use udm_wire::uri::{DeviceUri, FileUri};

/// Opens devices for a registry. The program uses [`BackendDeviceRegistry`] and threads, the
/// simulator its own.
pub trait DeviceOpener: Send + Sync {
    /// As [`BackendDeviceRegistry::look`].
    ///
    /// # Errors
    /// As there.
    fn identify(&self, uri: &DeviceUri) -> Result<DiskIdentity, DeviceControlError>;

    /// As [`BackendDeviceRegistry::open`].
    ///
    /// # Errors
    /// As there.
    fn open(&self, uri: &DeviceUri) -> Result<DeviceWithDiskIdentity, DeviceControlError>;

    /// As [`BackendDeviceRegistry::open_like`]. An opener without servers refuses.
    ///
    /// # Errors
    /// As there.
    fn open_like(
        &self,
        uri: &DeviceUri,
        _other: &DeviceUri,
    ) -> Result<DeviceWithDiskIdentity, DeviceControlError> {
        Err(DeviceControlError::new(EOPNOTSUPP, uri.to_string()))
    }

    /// As [`BackendDeviceRegistry::nbd_exports_in_use`]. An opener without servers has none.
    fn nbd_exports_in_use(&self) -> Vec<(String, NegotiatedExportInfo)> {
        Vec::new()
    }

    /// As [`BackendDeviceRegistry::set_known_nbd_exports`].
    fn set_known_nbd_exports(&self, _: Vec<(String, NegotiatedExportInfo)>) {}

    /// As [`BackendDeviceRegistry::nvme_namespaces_in_use`]. An opener without controllers has
    /// none.
    fn nvme_namespaces_in_use(&self) -> Vec<(String, KnownNamespace)> {
        Vec::new()
    }

    /// As [`BackendDeviceRegistry::nvme_path_reports`]. An opener without controllers has none.
    fn nvme_path_reports(&self) -> Vec<NvmePathReport> {
        Vec::new()
    }

    /// As [`BackendDeviceRegistry::set_known_nvme_namespaces`].
    fn set_known_nvme_namespaces(&self, _: Vec<(String, KnownNamespace)>) {}

    /// As [`BackendDeviceRegistry::objects_in_use`]. An opener without objects has none.
    fn objects_in_use(&self) -> Vec<KnownObject> {
        Vec::new()
    }

    /// As [`BackendDeviceRegistry::set_known_objects`].
    fn set_known_objects(&self, _: Vec<KnownObject>) {}

    /// Canonical form of a URI. A file is named by its real path, so links and `..` lead to the
    /// same device.
    fn canonical(&self, uri: &DeviceUri) -> String;

    /// True if the file exists.
    fn exists(&self, path: &Path) -> bool;

    /// Runs `work`, which may block, on another thread. If no thread can be started, `work` is
    /// dropped.
    fn spawn_blocking(&self, work: Box<dyn FnOnce() + Send>);
}

impl DeviceOpener for BackendDeviceRegistry {
    fn identify(&self, uri: &DeviceUri) -> Result<DiskIdentity, DeviceControlError> {
        BackendDeviceRegistry::look(self, uri)
    }

    fn open(&self, uri: &DeviceUri) -> Result<DeviceWithDiskIdentity, DeviceControlError> {
        BackendDeviceRegistry::open(self, uri)
    }

    fn open_like(
        &self,
        uri: &DeviceUri,
        other: &DeviceUri,
    ) -> Result<DeviceWithDiskIdentity, DeviceControlError> {
        BackendDeviceRegistry::open_like(self, uri, other)
    }

    fn nbd_exports_in_use(&self) -> Vec<(String, NegotiatedExportInfo)> {
        BackendDeviceRegistry::nbd_exports_in_use(self)
    }

    fn set_known_nbd_exports(&self, exports: Vec<(String, NegotiatedExportInfo)>) {
        BackendDeviceRegistry::set_known_nbd_exports(self, exports);
    }

    fn nvme_namespaces_in_use(&self) -> Vec<(String, KnownNamespace)> {
        BackendDeviceRegistry::nvme_namespaces_in_use(self)
    }

    fn nvme_path_reports(&self) -> Vec<NvmePathReport> {
        BackendDeviceRegistry::nvme_path_reports(self)
    }

    fn set_known_nvme_namespaces(&self, namespaces: Vec<(String, KnownNamespace)>) {
        BackendDeviceRegistry::set_known_nvme_namespaces(self, namespaces);
    }

    fn objects_in_use(&self) -> Vec<KnownObject> {
        BackendDeviceRegistry::objects_in_use(self)
    }

    fn set_known_objects(&self, objects: Vec<KnownObject>) {
        BackendDeviceRegistry::set_known_objects(self, objects);
    }

    fn canonical(&self, uri: &DeviceUri) -> String {
        match uri {
            DeviceUri::File(file) => {
                let path = std::fs::canonicalize(&file.path).unwrap_or_else(|_| file.path.clone());
                DeviceUri::File(FileUri { path, ..file.clone() }).to_string()
            }
            other => other.to_string(),
        }
    }

    fn exists(&self, path: &Path) -> bool {
        path.exists()
    }

    fn spawn_blocking(&self, work: Box<dyn FnOnce() + Send>) {
        let _ = std::thread::Builder::new().name("udm-close".into()).spawn(work);
    }
}
