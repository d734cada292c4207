//! The disks of this machine (`--ublk`).

use super::args::{ServeArgs, UblkDiskArg};
use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::path::PathBuf;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use udm_core::DeviceId;
use udm_frontends::nbd::Exports;
use udm_frontends::ublk::{UblkDiskOptions, UblkServer, remove_unwanted_devices};
use udm_runtime::ProcessCores;

/// How long a start waits for the removal of devices that nobody wants.
const REMOVAL_PATIENCE: Duration = Duration::from_secs(10);

/// How long a server that takes over waits for the end of the old one, which has the devices open.
const TAKE_OVER_PATIENCE: Duration = Duration::from_secs(20);

/// The servers of all disks; unset while another process still has them. If it is dropped, their
/// devices are removed, or left to the next server if they are in use.
pub(super) struct UblkDisks(Arc<OnceLock<Vec<UblkServer>>>);

impl UblkDisks {
    /// Creates the block devices of all disks, or takes them over, and removes those of an earlier
    /// server that nobody wants. Blocks.
    ///
    /// # Errors
    /// A device is named twice or does not exist, or the kernel refuses a disk.
    pub(super) fn start(
        args: &ServeArgs,
        core_set: &Arc<ProcessCores>,
        exports: &Arc<Exports>,
    ) -> Result<UblkDisks> {
        // Without a home there is one set of disks per machine.
        let state_folder = args.state.path().unwrap_or_default();
        let mut disks: Vec<UblkDiskOptions> = Vec::new();
        for disk in &args.ublk {
            let (name, number, state_folder) = (disk.name.clone(), disk.number, state_folder.clone());
            if exports.get(&name).is_none_or(|export| *export.name() != *name) {
                bail!("ublk {name}: there is no --device of that name, or it is not exported");
            }
            let options = UblkDiskOptions { name, number, state_folder };
            if let Some(other) = disks.iter().find(|other| other.owner() == options.owner()) {
                match other.name == disk.name {
                    true => bail!("ublk {}: the device is given twice", disk.name),
                    false => bail!("ublk {}: choose a name that is less like {}", disk.name, other.name),
                }
            }
            if let Some(number) = number.filter(|_| disks.iter().any(|other| other.number == number)) {
                bail!("ublk {}: the number {number} is given twice", disk.name);
            }
            disks.push(options);
        }
        remove_unwanted(state_folder, disks.iter().map(|disk| disk.name.clone()).collect());
        let mut servers = Vec::new();
        for options in disks {
            servers.push(start_disk(core_set, exports, options)?);
        }
        Ok(UblkDisks(Arc::new(OnceLock::from(servers))))
    }

    /// No disks yet, for [`UblkDisks::take_over`].
    pub(super) fn none() -> UblkDisks {
        UblkDisks(Arc::default())
    }

    /// Takes the disks over when process `old`, which has handed its devices to this one, has
    /// ended. Does not wait. A disk that cannot be taken over is logged; its requests wait for the
    /// next server.
    pub(super) fn take_over(
        &self,
        old: u32,
        args: &ServeArgs,
        core_set: &Arc<ProcessCores>,
        exports: &Arc<Exports>,
    ) {
        let state_folder = args.state.path().unwrap_or_default();
        let options = |disk: &UblkDiskArg| UblkDiskOptions {
            name: disk.name.clone(),
            number: disk.number,
            state_folder: state_folder.clone(),
        };
        let disks: Vec<_> = args.ublk.iter().map(options).collect();
        if disks.is_empty() {
            return drop(self.0.set(Vec::new()));
        }
        let (servers, core_set, exports) = (Arc::clone(&self.0), Arc::clone(core_set), Arc::clone(exports));
        let thread = std::thread::Builder::new().name("udm-ublk".into()).spawn(move || {
            wait_for_process_end(old);
            let start = |options| {
                start_disk(&core_set, &exports, options)
                    .inspect_err(|error| tracing::error!("after the upgrade: {error:#}"))
                    .ok()
            };
            let _ = servers.set(disks.into_iter().filter_map(start).collect());
        });
        if let Err(error) = thread {
            tracing::error!("after the upgrade: the block devices wait for the next server: {error}");
        }
    }

    /// False while another process still has the disks.
    pub(super) fn is_started(&self) -> bool {
        self.0.get().is_some()
    }

    fn servers(&self) -> &[UblkServer] {
        self.0.get().map_or(&[], Vec::as_slice)
    }

    /// Pauses all disks, so that their devices can be handed over. Returns the name of one that has
    /// requests in flight that do not complete; then no disk is paused. Blocks.
    pub(super) fn pause(&self) -> Result<(), String> {
        for (index, server) in self.servers().iter().enumerate() {
            if !server.pause() {
                self.servers()[..index].iter().for_each(UblkServer::resume);
                return Err(server.name().to_owned());
            }
        }
        Ok(())
    }

    /// Goes on after [`UblkDisks::pause`].
    pub(super) fn resume(&self) {
        self.servers().iter().for_each(UblkServer::resume);
    }

    /// The hook for [`Exports::on_changed`]: it refreshes the ublk disks of a changed device.
    pub(super) fn change_hook(&self) -> impl Fn(DeviceId) + Send + Sync + use<> {
        // The end of the disks must not wait for the end of the hook.
        let disks = Arc::downgrade(&self.0);
        move |device| {
            let disks = disks.upgrade();
            let started = disks.iter().filter_map(|disks| disks.get()).flatten();
            started.for_each(|disk| disk.refresh_if_of(device));
        }
    }

    /// Names and addresses of all disks: the block device, and the link to it.
    pub(super) fn addresses(&self) -> Vec<(String, String)> {
        let paths = |server: &UblkServer| {
            let link = server.link().map(|link| link.display().to_string());
            [server.block_device().display().to_string()]
                .into_iter()
                .chain(link)
                .collect::<Vec<_>>()
                .join("  ")
        };
        self.servers().iter().map(|server| (server.name().to_owned(), paths(server))).collect()
    }
}

impl Drop for UblkDisks {
    fn drop(&mut self) {
        // All at once; each waits in its own drop.
        self.servers().iter().for_each(UblkServer::begin_stop);
    }
}

fn start_disk(
    core_set: &Arc<ProcessCores>,
    exports: &Arc<Exports>,
    options: UblkDiskOptions,
) -> Result<UblkServer> {
    let name = options.name.clone();
    let server = UblkServer::start(core_set, exports, options).with_context(|| format!("ublk {name}"))?;
    if server.is_taken_over() {
        let path = server.block_device();
        tracing::info!("ublk {name}: {} is taken over from an earlier server", path.display());
    }
    Ok(server)
}

/// Waits until the process has ended, for a limited time.
fn wait_for_process_end(pid: u32) {
    let Some(pid) = Pid::from_raw(pid.cast_signed()) else { return };
    // An error: it has ended.
    let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return };
    let most = Timespec { tv_sec: TAKE_OVER_PATIENCE.as_secs().cast_signed(), tv_nsec: 0 };
    let _ = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&most));
}

/// Lets the kernel prefer this process when memory is short: memory that the process needs must not
/// wait for its own disks. Inherited by the threads that start later.
pub(super) fn set_io_flusher() {
    if let Err(error) = rustix::process::configure_io_flusher_behavior(true) {
        tracing::debug!("ublk: PR_SET_IO_FLUSHER: {error}: CAP_SYS_RESOURCE is needed");
    }
}

/// Removes devices of earlier servers but those of `names`. A device that hangs delays the start
/// for a limited time only.
fn remove_unwanted(state_folder: PathBuf, names: Vec<String>) {
    let (done, finished) = sync_channel::<()>(1);
    let thread = std::thread::Builder::new().name("udm-ublk".into()).spawn(move || {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        remove_unwanted_devices(&state_folder, &names);
        drop(done);
    });
    if thread.is_ok() {
        let _ = finished.recv_timeout(REMOVAL_PATIENCE);
    }
}
