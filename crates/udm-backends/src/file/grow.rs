//! Extends a regular file while it is in use.
//!
//! The new part is allocated in the file system (`fallocate`). So a full file system fails here,
//! and not in a later write. A helper thread does this, not a core. The new length becomes durable
//! with the first sync after it, as do the data written there.

use super::disk::OpenDisk;
use crate::blocking;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{self, FallocateFlags};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{Resource, getrlimit};
use std::sync::Arc;
use udm_core::errno::{EAGAIN, EFBIG, EIO, EOPNOTSUPP, EROFS};
use udm_core::{DeviceControlError, GrowResultCallback, Sectors};

/// The longest possible file: the kernel's file offsets are signed.
const LENGTH_MAX: u64 = i64::MAX as u64;

/// Extends the file `fd` to at least `size`, and calls `then` with the result.
pub(super) fn start_file_growth(
    disk: &Arc<OpenDisk>,
    fd: &Arc<OwnedFd>,
    read_only: bool,
    size: Sectors,
    then: GrowResultCallback,
) {
    if disk.is_block {
        return then(Err(DeviceControlError::new(EOPNOTSUPP, "udm cannot grow a block device")));
    }
    if read_only {
        return then(Err(DeviceControlError::new(EROFS, "the file is open read-only")));
    }
    let (disk, fd) = (Arc::clone(disk), Arc::clone(fd));
    let no_thread = || Err(DeviceControlError::new(EAGAIN, "cannot start a thread to grow the file"));
    blocking::run_on_new_thread("udm-grow", then, no_thread, move || grow_file(&disk, &fd, size));
}

fn grow_file(disk: &OpenDisk, fd: &OwnedFd, size: Sectors) -> Result<(), DeviceControlError> {
    let failed = |e: Errno| {
        let text = std::io::Error::from(e).to_string();
        DeviceControlError::new(e.raw_os_error(), text.split(" (os error").next().unwrap_or_default())
    };
    let now = disk.refresh().map_err(failed)?;
    if now < disk.reach() {
        // The data of the missing part is lost. Zeroes must not replace it.
        return Err(DeviceControlError::new(EIO, "the file was truncated"));
    }
    if now >= size {
        return Ok(());
    }
    let (length, wanted) = (fs::fstat(fd).map_err(failed)?.st_size.max(0) as u64, size.0.saturating_mul(512));
    // A process that exceeds its file size limit is killed by SIGXFSZ.
    let limit = getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX).min(LENGTH_MAX);
    if wanted > limit {
        return Err(DeviceControlError::new(
            EFBIG,
            format!("the maximum length of a file is {limit} bytes here"),
        ));
    }
    let more = wanted.saturating_sub(length);
    let tried = match more {
        0 => Ok(()),
        more => retry_on_intr(|| fs::fallocate(fd.as_fd(), FallocateFlags::empty(), length, more)),
    };
    let done = match tried {
        Err(Errno::OPNOTSUPP) => fs::ftruncate(fd.as_fd(), wanted),
        tried => tried,
    };
    // The part that was allocated before an error can be used.
    disk.refresh().map_err(failed)?;
    done.map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{open, uri};
    use super::super::{FileDevice, OpenDisks};
    use std::os::unix::fs::MetadataExt;
    use std::sync::mpsc::channel;
    use tempfile::NamedTempFile;
    use udm_core::errno::{EIO, EROFS};
    use udm_core::{Device, DeviceControlError, GrowthPolicy, Sectors};
    use udm_wire::uri::FileUri;

    fn file(sectors: u64) -> NamedTempFile {
        let file = NamedTempFile::new().unwrap();
        file.as_file().set_len(sectors * 512).unwrap();
        file
    }

    fn grow(device: &FileDevice, sectors: u64) -> Result<(), DeviceControlError> {
        let (tx, rx) = channel();
        device.grow(Sectors(sectors), Box::new(move |outcome| tx.send(outcome).unwrap()));
        rx.recv().unwrap()
    }

    #[test]
    fn it_becomes_as_large_as_was_asked_for_and_has_its_blocks() {
        let file = file(8);
        let device = open(file.path(), false, false).unwrap();
        grow(&device, 2048).unwrap();
        let meta = file.as_file().metadata().unwrap();
        assert_eq!((device.limits().size, meta.len()), (Sectors(2048), 1 << 20));
        assert!(meta.blocks() >= 2040, "{}", meta.blocks());
        // The file is already larger: nothing is done.
        grow(&device, 100).unwrap();
        assert_eq!(device.limits().size, Sectors(2048));
        // Another program extended the file.
        file.as_file().set_len(3 << 20).unwrap();
        grow(&device, 4096).unwrap();
        assert_eq!(device.limits().size, Sectors(6144));
        // Longer than any file can be.
        grow(&device, u64::MAX).unwrap_err();
        assert_eq!(device.limits().size, Sectors(6144));
    }

    #[test]
    fn what_was_cut_off_is_not_replaced_by_zeroes() {
        let file = file(2048);
        let device = open(file.path(), false, false).unwrap();
        file.as_file().set_len(4096).unwrap();
        let error = grow(&device, 4096).unwrap_err();
        assert_eq!((error.errno, error.text.as_str()), (EIO, "the file was truncated"));
        assert_eq!(file.as_file().metadata().unwrap().len(), 4096);
    }

    #[test]
    fn a_name_says_how_it_grows() {
        let file = file(8);
        assert_eq!(open(file.path(), false, false).unwrap().growth(), None);
        let grows = FileUri { grow: Some(1 << 20), grow_max: Some(1 << 30), ..uri(file.path()) };
        let growth = OpenDisks::default().open(&grows).unwrap().1.growth();
        assert_eq!(growth, Some(GrowthPolicy { step: Sectors(2048), max: Sectors(1 << 21) }));
        let error = grow(&open(file.path(), false, true).unwrap(), 16).unwrap_err();
        assert_eq!(error.errno, EROFS);
    }
}
