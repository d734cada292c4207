//! What a registry asks of the world outside: what names lead to, and a thread for what may block.

use std::path::Path;
use udm_backends::Backends;
pub use udm_backends::{DiskIdentity, OpenedDevice};
use udm_core::OpenError;
use udm_wire::uri::{DeviceUri, FileUri};

/// The outside of a registry: of the program, [`Backends`] and threads.
pub trait DeviceOpener: Send + Sync {
    /// As [`Backends::map_reader`].
    ///
    /// # Errors
    /// As there.
    fn look(&self, uri: &DeviceUri) -> Result<DiskIdentity, OpenError>;

    /// As [`Backends::open`].
    ///
    /// # Errors
    /// As there.
    fn open(&self, uri: &DeviceUri) -> Result<OpenedDevice, OpenError>;

    /// The word under which a device is known: a file goes by its real path, so that links and `..`
    /// lead to the same device.
    fn canonical(&self, uri: &DeviceUri) -> String;

    /// Is there such a file?
    fn exists(&self, path: &Path) -> bool;

    /// Runs `cpu_budget`, which may block, beside whoever asks. Where that can't be it is dropped.
    fn beside(&self, work: Box<dyn FnOnce() + Send>);
}

impl DeviceOpener for Backends {
    fn look(&self, uri: &DeviceUri) -> Result<DiskIdentity, OpenError> {
        Backends::look(self, uri)
    }

    fn open(&self, uri: &DeviceUri) -> Result<OpenedDevice, OpenError> {
        Backends::open(self, uri)
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

    fn beside(&self, work: Box<dyn FnOnce() + Send>) {
        let _ = std::thread::Builder::new().name("udm-close".into()).spawn(work);
    }
}
