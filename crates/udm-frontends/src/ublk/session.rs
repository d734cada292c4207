//! A device from its creation, or its take-over from an earlier server, to its end.

use super::device_link::DeviceLink;
use super::driver::UblkDriver;
use super::existing::{find_own_device, start_recovery};
use super::geometry::UblkGeometry;
use super::openers::{BlockDeviceUse, look_at_block_device};
use super::queue::{EVENTS_MAX, UblkQueue, UblkQueueEvent, UblkQueueMessage, UblkQueueStart};
use super::server::UblkDiskOptions;
use crate::nbd::{ExportRef, Exports};
use rustix::io::Errno;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};
use udm_core::{CoreId, DeviceId};
use udm_runtime::{ProcessCores, UblkDevice};
use udm_wire::ublk::{UblkDeviceInfo, UblkDeviceState, UblkFeatures, UblkParams};

/// Requests per queue.
const DEPTH: u16 = 128;

/// The longest data of a request in bytes.
const IO_BYTES_MAX: u32 = 512 << 10;

/// How long the queues may take to start, or to complete their requests at the end.
pub(super) const QUEUES_LIMIT: Duration = Duration::from_secs(5);

/// A queue on its core.
pub(super) struct RunningUblkQueue {
    core: CoreId,
    topic: DeviceId,
    pub(super) events: Receiver<UblkQueueEvent>,
}

/// A device that is served.
pub(super) struct UblkSession {
    pub(super) driver: UblkDriver,
    core_set: Arc<ProcessCores>,
    /// `None` while the disk is paused.
    pub(super) export: Option<ExportRef>,
    pub(super) name: Arc<str>,
    pub(super) info: UblkDeviceInfo,
    geometry: UblkGeometry,
    /// What the kernel knows.
    params: UblkParams,
    pub(super) queues: Vec<RunningUblkQueue>,
    pub(super) link: Option<DeviceLink>,
    is_taken_over: bool,
}

impl UblkSession {
    /// Creates and starts the device, or takes it over.
    ///
    /// # Errors
    /// The text says what is missing and what to do.
    pub(super) fn start(
        core_set: &Arc<ProcessCores>,
        exports: &Exports,
        options: &UblkDiskOptions,
    ) -> io::Result<UblkSession> {
        let export = exports.acquire(&options.name).filter(|export| *export.name() == *options.name);
        let export = export.ok_or_else(|| io::Error::other("there is no such device"))?;
        let geometry = UblkGeometry::new(export.device().limits(), export.is_read_only());
        // Refused before anything is created.
        geometry.params(IO_BYTES_MAX)?;
        let driver = UblkDriver::open()?;
        let (mut number, mut taken_over) = (options.number, None);
        if let Some(info) = find_own_device(&driver, options.owner())? {
            let fits = number.is_none_or(|number| number == info.number);
            match is_recoverable(&info) && info.state != UblkDeviceState::Dead {
                true if fits => taken_over = Some(info),
                true => remove_for_number(&driver, &info, number)?,
                // The device ended with its server.
                false => {
                    driver.delete(&info)?;
                    number = number.or(Some(info.number));
                }
            }
        }
        let info = match taken_over {
            Some(info) => {
                start_recovery(&driver, &info)?;
                info
            }
            None => add_device(&driver, options, number, core_set.len())?,
        };
        let params = geometry.params(info.io_bytes_max)?;
        let mut session = UblkSession {
            driver,
            core_set: Arc::clone(core_set),
            export: Some(export),
            name: options.name.as_str().into(),
            info,
            geometry,
            params,
            queues: Vec::new(),
            link: None,
            is_taken_over: taken_over.is_some(),
        };
        match session.start_device() {
            Ok(()) => session.create_link(),
            Err(error) => {
                session.give_up();
                return Err(error);
            }
        }
        Ok(session)
    }

    fn start_device(&mut self) -> io::Result<()> {
        // The file is opened first: then the user may also use its path in commands.
        let device = self.driver.open_device(self.info.number)?;
        if !self.is_taken_over {
            self.driver.set_params(&self.info, &self.params)?;
        }
        self.start_queues(&device)?;
        if !self.is_taken_over {
            return Ok(self.driver.start(&self.info)?);
        }
        self.driver.end_recovery(&self.info)?;
        let known = self.driver.params(&self.info)?;
        self.params = known.unwrap_or(self.params);
        self.refresh();
        Ok(())
    }

    /// Attaches the queues to the cores and waits until all tags are being fetched.
    fn start_queues(&mut self, device: &UblkDevice) -> io::Result<()> {
        let export = self.export.clone().expect("a disk starts with its export");
        for (index, device) in device.queues().iter().enumerate() {
            let core = CoreId((index % self.core_set.len()) as u16);
            let topic = DeviceId::new();
            let (sender, events) = sync_channel(EVENTS_MAX);
            let start = UblkQueueStart {
                index: index as u16,
                topic,
                export: export.clone(),
                device: Arc::clone(device),
                geometry: self.geometry,
                events: sender,
            };
            let io_counters = export.io_counters_on(core);
            self.core_set.attach(core, Box::new(move || Box::new(UblkQueue::new(start, io_counters))));
            self.queues.push(RunningUblkQueue { core, topic, events });
        }
        let end = Instant::now() + QUEUES_LIMIT;
        for queue in &self.queues {
            match queue.events.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(UblkQueueEvent::Started) => {}
                Ok(UblkQueueEvent::Failed(why)) => return Err(io::Error::other(why)),
                Ok(UblkQueueEvent::Paused | UblkQueueEvent::Closed) | Err(_) => {
                    return Err(io::Error::other("the cores do not answer"));
                }
            }
        }
        Ok(())
    }

    fn create_link(&mut self) {
        match DeviceLink::create(&self.name, self.info.number) {
            Ok(link) => self.link = Some(link),
            Err(error) => {
                tracing::warn!("ublk {}: no link to /dev/ublkb{}: {error}", self.name, self.info.number);
            }
        }
    }

    /// Ends a start that failed. A device that was to be taken over is left as it is.
    fn give_up(&mut self) {
        self.tell(&UblkQueueMessage::Detach);
        if !self.is_taken_over
            && let Err(error) = self.driver.delete(&self.info)
        {
            tracing::warn!("ublk {}: /dev/ublkc{}: {error}", self.name, self.info.number);
        }
    }

    /// Number of the device.
    pub(super) fn number(&self) -> u32 {
        self.info.number
    }

    /// The link to the block device, if it could be created.
    pub(super) fn link(&self) -> Option<&Path> {
        self.link.as_ref().map(DeviceLink::path)
    }

    /// Number of its queues.
    pub(super) fn queue_count(&self) -> u16 {
        self.info.queues
    }

    /// The export has another name now: the link follows.
    pub(super) fn rename(&mut self, name: Arc<str>) {
        if self.name == name {
            return;
        }
        self.name = name;
        if let Some(link) = self.link.take() {
            link.remove();
            self.create_link();
        }
    }

    /// True if an earlier server had created the device.
    pub(super) fn is_taken_over(&self) -> bool {
        self.is_taken_over
    }

    pub(super) fn tell(&self, message: &UblkQueueMessage) {
        for queue in &self.queues {
            self.core_set.send_message(queue.core, queue.topic, Box::new(message.clone()));
        }
    }

    /// Completes what is in flight, holds new requests, and releases the export. Returns false,
    /// with the disk as before, if requests do not complete in time.
    pub(super) fn pause(&mut self) -> bool {
        // Of a pause that was given up.
        self.queues.iter().for_each(|queue| queue.events.try_iter().for_each(drop));
        self.tell(&UblkQueueMessage::Pause);
        let end = Instant::now() + QUEUES_LIMIT;
        let is_paused = |queue: &RunningUblkQueue| {
            let event = queue.events.recv_timeout(end.saturating_duration_since(Instant::now()));
            matches!(event, Ok(UblkQueueEvent::Paused))
        };
        let all = self.queues.iter().all(is_paused);
        if all {
            self.export = None;
        } else if let Some(export) = &self.export {
            self.tell(&UblkQueueMessage::Resume(export.clone(), self.geometry));
        }
        all
    }

    /// Goes on after a pause, with the export of the same name.
    pub(super) fn resume(&mut self, exports: &Exports) {
        let Some(export) = exports.acquire(&self.name) else {
            let (name, number) = (&self.name, self.info.number);
            return tracing::error!(
                "ublk {name}: no device has this name now: requests to /dev/ublkb{number} wait"
            );
        };
        self.geometry = UblkGeometry::new(export.device().limits(), export.is_read_only());
        self.tell(&UblkQueueMessage::Resume(export.clone(), self.geometry));
        self.export = Some(export);
        self.refresh();
    }

    /// Looks if the device below has changed, and gives the kernel its size.
    pub(super) fn refresh(&mut self) {
        let Some(export) = &self.export else { return };
        self.geometry = UblkGeometry::new(export.device().limits(), export.is_read_only());
        self.tell(&UblkQueueMessage::Geometry(self.geometry));
        let params = match self.geometry.params(self.info.io_bytes_max) {
            Ok(params) => params,
            Err(error) => return tracing::warn!("ublk {}: requests fail: {error}", self.name),
        };
        if params.sectors != self.params.sectors {
            self.resize(params.sectors);
        }
        if params.logical_block > self.params.logical_block || params.is_read_only != self.params.is_read_only
        {
            let (name, number) = (&self.name, self.info.number);
            tracing::warn!(
                "ublk {name}: /dev/ublkb{number} keeps its old block size and its old way of access until it \
                 is created again: requests that the device cannot serve now will fail"
            );
        }
    }

    fn resize(&mut self, sectors: u64) {
        let (name, number, old) = (&self.name, self.info.number, self.params.sectors);
        if !self.driver.features().contains(UblkFeatures::UPDATE_SIZE) {
            return tracing::warn!(
                "ublk {name}: /dev/ublkb{number} keeps its {old} sectors and not {sectors} until it is created \
                 again: changing the size needs Linux 6.16"
            );
        }
        match self.driver.update_size(&self.info, sectors) {
            Ok(()) => {
                self.params.sectors = sectors;
                tracing::info!("ublk {name}: /dev/ublkb{number} has {sectors} sectors instead of {old}");
            }
            Err(error) => {
                tracing::warn!("ublk {name}: /dev/ublkb{number} keeps its {old} sectors: {error}");
            }
        }
    }
}

/// True if another server can take the device over.
pub(super) fn is_recoverable(info: &UblkDeviceInfo) -> bool {
    info.flags.contains(UblkFeatures::USER_RECOVERY)
}

fn add_device(
    driver: &UblkDriver,
    options: &UblkDiskOptions,
    number: Option<u32>,
    cores: usize,
) -> io::Result<UblkDeviceInfo> {
    let wanted =
        UblkFeatures::USER_RECOVERY | UblkFeatures::USER_RECOVERY_REISSUE | UblkFeatures::UPDATE_SIZE;
    let mut flags = driver.features() & wanted | UblkFeatures::CMD_IOCTL_ENCODE;
    // The kernel clears it for a process with CAP_SYS_ADMIN.
    flags.set(UblkFeatures::UNPRIVILEGED_DEV, !rustix::process::geteuid().is_root());
    let info = UblkDeviceInfo {
        queues: options.queues.unwrap_or_else(|| u16::try_from(cores).unwrap_or(u16::MAX)),
        depth: DEPTH,
        io_bytes_max: IO_BYTES_MAX,
        number: number.unwrap_or(u32::MAX),
        flags,
        mark: options.owner().encode(),
        ..UblkDeviceInfo::default()
    };
    driver.add(&info).map_err(|error| match (error.errno(), number) {
        (Some(Errno::EXIST), Some(number)) => {
            io::Error::other(format!("/dev/ublkb{number} exists: choose another number, or none"))
        }
        (Some(Errno::ACCESS), _) => {
            let text = "the limit of devices of users without privileges is reached: raise \
                        /sys/module/ublk_drv/parameters/ublks_max";
            io::Error::other(text)
        }
        (Some(Errno::PERM), _) => {
            io::Error::other("no permission to create a device: CAP_SYS_ADMIN is needed")
        }
        _ => error.into(),
    })
}

/// Removes the device of an earlier server, because another number is wanted.
fn remove_for_number(driver: &UblkDriver, info: &UblkDeviceInfo, number: Option<u32>) -> io::Result<()> {
    if let BlockDeviceUse::Used(user) = look_at_block_device(info.number) {
        let (old, new) = (info.number, number.unwrap_or(info.number));
        let text = format!("it is /dev/ublkb{old}, which {user} uses, and cannot become /dev/ublkb{new}");
        return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
    }
    driver.stop_always(info)?;
    Ok(driver.delete(info)?)
}
