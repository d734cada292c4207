//! The lock file of a running server. A server with snapshots holds `server-PID-N` in the state
//! folder locked (`flock`). The kernel releases the lock when the process ends.

use super::StateFolder;
use super::records::{SnapshotRecord, SnapshotRecordState};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

/// Prefix of the names of lock files.
const SERVER: &str = "server-";

/// The lock file of this server, removed on drop.
#[derive(Debug)]
pub(super) struct ServerLock {
    name: String,
    path: PathBuf,
    _file: File,
}

impl Drop for ServerLock {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

impl StateFolder {
    /// True if `record` is attached to another server that runs.
    pub(crate) fn is_elsewhere(&self, record: &SnapshotRecord) -> bool {
        let SnapshotRecordState::Attached { server } = &record.state else { return false };
        self.runs_elsewhere(server)
    }

    /// True if `server` is the lock file of another server that runs.
    pub(super) fn runs_elsewhere(&self, server: &str) -> bool {
        if self.server().is_some_and(|own| own == server) || server.contains('/') {
            return false;
        }
        let Ok(file) = File::open(self.path.join(server)) else { return false };
        flock(&file, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK)
    }

    /// The name of this server's lock file, which is created if necessary.
    pub(super) fn begin(&self) -> io::Result<String> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let mut own = self.own_server();
        if let Some(own) = &*own {
            return Ok(own.name.clone());
        }
        self.create_folder(&self.path)?;
        loop {
            // Relaxed: each number is taken once.
            let name = format!("{SERVER}{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
            let path = self.path.join(&name);
            match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
                Ok(file) => {
                    flock(&file, FlockOperation::LockExclusive)?;
                    // Another server may have removed the file before it was locked.
                    if file.metadata()?.nlink() == 0 {
                        continue;
                    }
                    *own = Some(ServerLock { name: name.clone(), path, _file: file });
                    return Ok(name);
                }
                // Left by an earlier process with the same PID.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn server(&self) -> Option<String> {
        self.own_server().as_ref().map(|own| own.name.clone())
    }

    /// Removes the lock files of servers that no longer run.
    pub(super) fn clean_servers(&self) {
        let Ok(entries) = fs::read_dir(&self.path) else { return };
        let is_lock = |path: &PathBuf| {
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(SERVER))
        };
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())).filter(is_lock) {
            let Ok(file) = OpenOptions::new().read(true).write(true).open(&path) else { continue };
            if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
                let _ = fs::remove_file(&path);
            }
        }
    }
}
