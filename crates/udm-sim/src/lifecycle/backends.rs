//! The backends of the registry over the simulated files.

use super::files::PersistentFiles;
use crate::environment::{SharedEnv, lock_environment, lock_mutex};
use crate::path::SimPath;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use udm_control::registry::device_opener::{DeviceOpener, DeviceWithDiskIdentity, DiskIdentity};
use udm_core::DeviceControlError;
use udm_core::errno::{EIO, ENODEV};
use udm_wire::uri::DeviceUri;

/// Opens simulated files for the registry.
#[derive(Clone)]
pub(super) struct SimFileOpener {
    env: SharedEnv,
    files: Arc<Mutex<PersistentFiles>>,
    /// Work for helper threads.
    work: Arc<Mutex<Vec<HelperWork>>>,
}

type HelperWork = Box<dyn FnOnce() + Send>;

impl SimFileOpener {
    pub(super) fn new(env: &SharedEnv, files: PersistentFiles) -> SimFileOpener {
        SimFileOpener { env: env.clone(), files: Arc::new(Mutex::new(files)), work: Arc::default() }
    }

    pub(super) fn files(&self) -> MutexGuard<'_, PersistentFiles> {
        lock_mutex(&self.files)
    }

    /// The queued work for helper threads.
    pub(super) fn work(&self) -> MutexGuard<'_, Vec<HelperWork>> {
        lock_mutex(&self.work)
    }

    /// Returns the disk of a file, and its identity.
    fn find(&self, uri: &DeviceUri) -> Result<(usize, DiskIdentity), DeviceControlError> {
        let DeviceUri::File(file) = uri else {
            return Err(DeviceControlError::new(ENODEV, format!("{uri}: there is no such device here")));
        };
        let mut env = lock_environment(&self.env);
        if env.dead {
            return Err(DeviceControlError::new(EIO, format!("{uri}: the server was killed")));
        }
        let failed = |error: std::io::Error| {
            DeviceControlError::new(error.raw_os_error().unwrap_or(EIO), format!("{uri}: {error}"))
        };
        let disk = self.files().disk(&file.path, &mut env, false).map_err(failed)?;
        let found = std::fs::metadata(&file.path).map_err(failed)?;
        use std::os::unix::fs::MetadataExt;
        Ok((disk, DiskIdentity::File { device: found.dev(), inode: found.ino() }))
    }
}

impl DeviceOpener for SimFileOpener {
    fn identify(&self, uri: &DeviceUri) -> Result<DiskIdentity, DeviceControlError> {
        self.find(uri).map(|(_, identity)| identity)
    }

    fn open(&self, uri: &DeviceUri) -> Result<DeviceWithDiskIdentity, DeviceControlError> {
        let (disk, identity) = self.find(uri)?;
        Ok(DeviceWithDiskIdentity { identity, device: Arc::new(SimPath::new(&self.env, disk)) })
    }

    fn canonical(&self, uri: &DeviceUri) -> String {
        uri.to_string()
    }

    fn exists(&self, path: &Path) -> bool {
        path.exists()
    }

    fn spawn_blocking(&self, work: Box<dyn FnOnce() + Send>) {
        self.work().push(work);
    }
}
