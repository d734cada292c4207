//! Disks at the start of a server: those of the options, those of snapshots that have come back,
//! and those that an earlier server or the old process of an upgrade had.

use super::{BusyUblkDisk, UblkDisks};
use crate::serve::args::{ServeArgs, UblkDiskArg};
use crate::serve::upgrade::BlockDeviceState;
use anyhow::{Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::path::PathBuf;
use std::sync::mpsc::sync_channel;
use std::time::Duration;
use udm_control::ublk_disks::RecordedUblkDisk;
use udm_frontends::ublk::{UblkDiskOptions, find_names_in_use, remove_unwanted_devices, set_io_flusher};

/// How long a start waits for a look at the devices of earlier servers, and for the removal of
/// those that nobody wants.
const REMOVAL_PATIENCE: Duration = Duration::from_secs(10);

/// How long a server that takes over waits for the end of the old one, which has the devices open.
const TAKE_OVER_PATIENCE: Duration = Duration::from_secs(20);

impl UblkDisks {
    /// Creates the block devices of the options `disks` and of `restored` devices, or takes them
    /// over, and removes those of an earlier server that nobody wants or uses. One that is in use
    /// is taken over as one that was added, if its device is there. Blocks.
    ///
    /// # Errors
    /// An option names a device twice or one that does not exist, or the kernel refuses one.
    pub(super) fn start_all(
        &self,
        disks: &[UblkDiskArg],
        restored: Vec<(String, RecordedUblkDisk)>,
    ) -> Result<()> {
        let wanted = self.options_of_args(disks)?;
        let restored = restored.into_iter().map(|(device, disk)| self.options_of_record(&device, disk));
        let mut added: Vec<UblkDiskOptions> = restored.collect();
        added.retain(|disk| wanted.iter().all(|other| other.owner() != disk.owner()));
        let known: Vec<String> = wanted.iter().chain(&added).map(|disk| disk.marked_as.clone()).collect();
        let others = self.exports.all().into_iter().map(|export| export.name().to_string());
        let others = others.filter(|name| !known.contains(name)).collect();
        let in_use = claim_earlier_devices(self.state_folder.clone(), known, others);
        added.extend(in_use.iter().map(|name| self.options(name, None)));
        for options in wanted {
            let busy = self.begin(&options).map_err(|error| anyhow::anyhow!(error.text))?;
            self.start_busy(busy, options, false)?;
        }
        added.into_iter().for_each(|options| self.start_added(options));
        Ok(())
    }

    fn options_of_args(&self, args: &[UblkDiskArg]) -> Result<Vec<UblkDiskOptions>> {
        let mut disks: Vec<UblkDiskOptions> = Vec::new();
        for disk in args {
            let name = &disk.name;
            if self.exports.get(name).is_none_or(|export| *export.name() != **name) {
                bail!("ublk {name}: there is no --device of that name, or it is not exported");
            }
            let options = self.options(name, disk.number);
            if let Some(other) = disks.iter().find(|other| other.owner() == options.owner()) {
                match other.name == *name {
                    true => bail!("ublk {name}: the device is given twice"),
                    false => bail!("ublk {name}: choose a name that is less like {}", other.name),
                }
            }
            if let Some(number) =
                disk.number.filter(|_| disks.iter().any(|other| other.number == disk.number))
            {
                bail!("ublk {name}: the number {number} is given twice");
            }
            disks.push(options);
        }
        Ok(disks)
    }

    fn options_of_record(&self, device: &str, disk: RecordedUblkDisk) -> UblkDiskOptions {
        let RecordedUblkDisk { marked_as, number, queues } = disk;
        UblkDiskOptions { marked_as, queues, ..self.options(device, number) }
    }

    /// Starts a disk that was added before. An error is logged.
    fn start_added(&self, options: UblkDiskOptions) {
        let name = options.name.clone();
        match self.begin(&options) {
            Ok(busy) => {
                if let Err(error) = self.start_busy(busy, options, true) {
                    tracing::error!("{name}: it is no block device: {error:#}");
                }
            }
            Err(error) => tracing::error!("{name}: it is no block device: {}", error.text),
        }
    }

    /// Makes the block device of a device that has come back, on a thread.
    pub(super) fn restore_on_thread(&self, device: &str, disk: RecordedUblkDisk) {
        let options = self.options_of_record(device, disk);
        let disks = self.clone();
        let start = move || disks.start_added(options);
        if let Err(error) = std::thread::Builder::new().name("udm-ublk".into()).spawn(start) {
            tracing::error!("{device}: it is no block device: {error}");
        }
    }

    /// Takes the disks over when process `old`, which has handed its devices to this one, has
    /// ended: `disks`, or without them those of the options. Does not wait; the disks are busy
    /// meanwhile. A disk that cannot be taken over is logged; its requests wait for the next
    /// server.
    pub(in crate::serve) fn take_over(
        &self,
        old: u32,
        disks: Option<Vec<BlockDeviceState>>,
        args: &ServeArgs,
    ) {
        let of_option = |disk: &UblkDiskArg| BlockDeviceState {
            device: disk.name.clone(),
            marked_as: disk.name.clone(),
            number: disk.number,
            queues: None,
            is_added: false,
        };
        let disks = disks.unwrap_or_else(|| args.ublk.iter().map(of_option).collect());
        let begin = |disk: BlockDeviceState| {
            let BlockDeviceState { device, marked_as, number, queues, is_added } = disk;
            let recorded = RecordedUblkDisk { marked_as, number, queues };
            let options = self.options_of_record(&device, recorded);
            let busy = self.begin(&options).inspect_err(|error| {
                tracing::error!("after the upgrade: ublk {device}: {}", error.text);
            });
            Some((busy.ok()?, options, is_added))
        };
        let disks: Vec<(BusyUblkDisk, UblkDiskOptions, bool)> = disks.into_iter().filter_map(begin).collect();
        if disks.is_empty() {
            return;
        }
        let all = self.clone();
        let take_over = move || {
            set_io_flusher();
            wait_for_process_end(old);
            for (busy, options, is_added) in disks {
                if let Err(error) = all.start_busy(busy, options, is_added) {
                    tracing::error!("after the upgrade: {error:#}");
                }
            }
        };
        if let Err(error) = std::thread::Builder::new().name("udm-ublk".into()).spawn(take_over) {
            tracing::error!("after the upgrade: the block devices wait for the next server: {error}");
        }
    }
}

/// Waits until the process has ended, for a limited time.
fn wait_for_process_end(pid: u32) {
    let Some(pid) = Pid::from_raw(pid.cast_signed()) else { return };
    // An error: it has ended.
    let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return };
    let most = Timespec { tv_sec: TAKE_OVER_PATIENCE.as_secs().cast_signed(), tv_nsec: 0 };
    let _ = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&most));
}

/// Removes devices of earlier servers but those of `known` names and those of `others` that are in
/// use, and returns the latter. A device that hangs delays the start for a limited time only.
fn claim_earlier_devices(state_folder: PathBuf, known: Vec<String>, others: Vec<String>) -> Vec<String> {
    let (found, in_use) = sync_channel(1);
    let (done, finished) = sync_channel::<()>(1);
    let look = move || {
        let others: Vec<&str> = others.iter().map(String::as_str).collect();
        let used = find_names_in_use(&state_folder, &others);
        let wanted: Vec<&str> = known.iter().map(String::as_str).chain(used.iter().copied()).collect();
        let _ = found.send(used.iter().map(|name| (*name).to_owned()).collect());
        remove_unwanted_devices(&state_folder, &wanted);
        drop(done);
    };
    if std::thread::Builder::new().name("udm-ublk".into()).spawn(look).is_err() {
        return Vec::new();
    }
    let in_use = in_use.recv_timeout(REMOVAL_PATIENCE).unwrap_or_default();
    let _ = finished.recv_timeout(REMOVAL_PATIENCE);
    in_use
}
