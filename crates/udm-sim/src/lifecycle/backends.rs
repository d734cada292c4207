//! The backends of the registry over the simulated files.

use super::files::PersistentFiles;
use crate::environment::{SharedEnv, lock};
use crate::path::SimPath;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use udm_control::registry::device_opener::{DeviceOpener, DiskIdentity, OpenedDevice};
use udm_core::OpenError;
use udm_core::errno::{EIO, ENODEV};
use udm_wire::uri::DeviceUri;

/// Opens simulated files for the registry.
#[derive(Clone)]
pub(super) struct LifecycleBackends {
    env: SharedEnv,
    files: Arc<Mutex<PersistentFiles>>,
    /// Work for helper threads.
    work: Arc<Mutex<Vec<HelperWork>>>,
}

type HelperWork = Box<dyn FnOnce() + Send>;

fn lock_mutex<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LifecycleBackends {
    pub(super) fn new(env: &SharedEnv, files: PersistentFiles) -> LifecycleBackends {
        LifecycleBackends { env: env.clone(), files: Arc::new(Mutex::new(files)), work: Arc::default() }
    }

    pub(super) fn files(&self) -> MutexGuard<'_, PersistentFiles> {
        lock_mutex(&self.files)
    }

    /// The queued work for helper threads.
    pub(super) fn work(&self) -> MutexGuard<'_, Vec<HelperWork>> {
        lock_mutex(&self.work)
    }

    /// Returns the disk of a file, and its identity.
    fn find(&self, uri: &DeviceUri) -> Result<(usize, DiskIdentity), OpenError> {
        let DeviceUri::File(file) = uri else {
            return Err(OpenError::new(ENODEV, format!("{uri}: there is no such device here")));
        };
        let mut env = lock(&self.env);
        if env.dead {
            return Err(OpenError::new(EIO, format!("{uri}: the server was killed")));
        }
        let failed = |error: std::io::Error| {
            OpenError::new(error.raw_os_error().unwrap_or(EIO), format!("{uri}: {error}"))
        };
        let disk = self.files().disk(&file.path, &mut env, false).map_err(failed)?;
        let found = std::fs::metadata(&file.path).map_err(failed)?;
        use std::os::unix::fs::MetadataExt;
        Ok((disk, DiskIdentity::File { device: found.dev(), inode: found.ino() }))
    }
}

impl DeviceOpener for LifecycleBackends {
    fn identify(&self, uri: &DeviceUri) -> Result<DiskIdentity, OpenError> {
        self.find(uri).map(|(_, identity)| identity)
    }

    fn open(&self, uri: &DeviceUri) -> Result<OpenedDevice, OpenError> {
        let (disk, identity) = self.find(uri)?;
        Ok(OpenedDevice { identity, device: Arc::new(SimPath::new(&self.env, disk)) })
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
