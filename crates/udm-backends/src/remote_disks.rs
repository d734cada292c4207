//! Disks that are not of this machine.
//!
//! When a process ends, the kernel waits for its requests to disks of this machine. A server that
//! got a write over a network may carry it out later. So a server records that it uses such a disk,
//! before it uses the first one.
//!
//! Remote are exports of NBD servers, namespaces of NVMe controllers, and files on file systems of
//! which it is not known that a write of a process that ends is over with the process. Block
//! devices count as disks of this machine: the kernel's drivers wait for their requests, also if
//! they use a network. Read-only disks and objects are not written.

use rustix::fs::statfs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use udm_core::DeviceControlError;
use udm_wire::uri::{DeviceUri, FileUri, ImageFormat};

/// Types of file systems whose writes are over when the kernel's request is: ext2 to ext4, XFS,
/// Btrfs, F2FS, tmpfs, ramfs (`statfs(2)`).
const LOCAL_FILE_SYSTEMS: [u64; 6] =
    [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0x0102_1994, 0x8584_58f6];

type Observer = Box<dyn Fn(&str) -> io::Result<()> + Send>;

/// The first disk that is not of this machine, and who must know it.
#[derive(Default)]
pub struct RemoteDisks(Mutex<RemoteDisksState>);

#[derive(Default)]
struct RemoteDisksState {
    first: Option<String>,
    observer: Option<Observer>,
}

impl RemoteDisks {
    fn state(&self) -> MutexGuard<'_, RemoteDisksState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `observer` with the URI of the first remote disk before it is used; at once if it is
    /// in use already. If the observer fails, the disk cannot be opened.
    ///
    /// # Errors
    /// The error of the observer if it was called.
    pub fn observe(&self, observer: impl Fn(&str) -> io::Result<()> + Send + 'static) -> io::Result<()> {
        let mut state = self.state();
        state.first.as_deref().map_or(Ok(()), &observer)?;
        state.observer = Some(Box::new(observer));
        Ok(())
    }

    /// Notes that `uri` was opened, and has no requests yet.
    ///
    /// # Errors
    /// The observer has failed.
    pub(crate) fn note(&self, uri: &DeviceUri) -> Result<(), DeviceControlError> {
        if !is_remote(uri) {
            return Ok(());
        }
        let mut state = self.state();
        if state.first.is_some() {
            return Ok(());
        }
        let plain = match uri {
            DeviceUri::Nbd(nbd) => nbd.plain().to_string(),
            DeviceUri::Nvme(nvme) => nvme.plain().to_string(),
            other => other.to_string(),
        };
        if let Some(observer) = &state.observer {
            observer(&plain).map_err(|error| {
                let errno = error.raw_os_error().unwrap_or(udm_core::errno::EIO);
                DeviceControlError::new(
                    errno,
                    format!("{plain}: recording that it is of another server: {error}"),
                )
            })?;
        }
        state.first = Some(plain);
        Ok(())
    }
}

/// True if a write to the disk may be carried out after the end of this process.
fn is_remote(uri: &DeviceUri) -> bool {
    match uri {
        DeviceUri::Nbd(_) | DeviceUri::Nvme(_) => true,
        // Images of other formats are only read.
        DeviceUri::File(file) => file.format == ImageFormat::Raw && !file.readonly && !is_local_file(file),
        _ => false,
    }
}

/// True for block devices, for files on known file systems, and for files that do not exist.
fn is_local_file(file: &FileUri) -> bool {
    let Ok(about) = std::fs::metadata(&file.path) else { return true };
    if about.file_type().is_block_device() {
        return true;
    }
    is_on_local_file_system(&file.path)
}

/// True if `path` is on a file system of this machine whose writes are over when the kernel's
/// request is, and whose locks are those of this machine alone.
#[must_use]
pub fn is_on_local_file_system(path: &Path) -> bool {
    statfs(path).is_ok_and(|about| LOCAL_FILE_SYSTEMS.contains(&(about.f_type as u64 & 0xffff_ffff)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use udm_wire::uri::parse_device_uri;

    fn open(disks: &RemoteDisks, uri: &str) -> Result<(), DeviceControlError> {
        disks.note(&parse_device_uri(uri).unwrap())
    }

    /// The observer hears of the first remote disk, and of no local one.
    #[test]
    fn the_first_remote_disk_is_recorded() {
        let (disks, seen) = (RemoteDisks::default(), Arc::new(Mutex::new(Vec::new())));
        let list = Arc::clone(&seen);
        let observer = move |uri: &str| {
            list.lock().unwrap().push(uri.to_owned());
            Ok(())
        };
        disks.observe(observer).unwrap();
        for local in ["mem:1M", "null:1M", "file:/proc/version?readonly=on"] {
            open(&disks, local).unwrap();
        }
        assert!(seen.lock().unwrap().is_empty());
        for remote in ["nbd://host/a", "nvme+tcp://host/nqn.2014-08.x/1"] {
            open(&disks, remote).unwrap();
        }
        assert_eq!(*seen.lock().unwrap(), ["nbd://host/a"]);
    }

    /// `/proc` stands for the file systems that are not known.
    #[test]
    fn a_file_on_an_unknown_file_system_is_remote() {
        let disks = RemoteDisks::default();
        open(&disks, "file:/not/there").unwrap();
        assert_eq!(disks.state().first, None);
        open(&disks, "file:/proc/version").unwrap();
        assert_eq!(disks.state().first.as_deref(), Some("/proc/version"));
    }

    /// A disk that cannot be recorded is not opened, and a late observer hears of an earlier disk.
    #[test]
    fn what_is_not_recorded_is_not_opened() {
        let (disks, fails) = (RemoteDisks::default(), Arc::new(AtomicBool::new(true)));
        let is_failing = Arc::clone(&fails);
        let full = || io::Error::from_raw_os_error(udm_core::errno::ENOSPC);
        let observer = move |_: &str| if is_failing.load(Ordering::Relaxed) { Err(full()) } else { Ok(()) };
        disks.observe(observer).unwrap();
        let error = open(&disks, "nbd://host/a").unwrap_err();
        assert_eq!(error.errno, udm_core::errno::ENOSPC, "{error}");
        fails.store(false, Ordering::Relaxed);
        open(&disks, "nbd://host/a").unwrap();
        assert!(disks.observe(move |_: &str| Err(full())).is_err());
    }
}
