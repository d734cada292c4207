//! The server of one disk: a thread on which its device is created, resized and ended.

use super::io_flusher::set_io_flusher;
use super::removal::UblkRemovalError;
use super::session::UblkSession;
use crate::nbd::Exports;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use udm_core::DeviceId;
use udm_runtime::ProcessCores;
use udm_wire::ublk::UblkOwner;

/// The longest wait of a dropped server for its thread.
const STOP_PATIENCE: Duration = Duration::from_secs(8);

/// The options of a disk.
#[derive(Clone, Debug)]
pub struct UblkDiskOptions {
    /// Name of the export, and of the link in `/dev/udm`.
    pub name: String,
    /// The name in the mark of the device: the one that the export had when the device was created.
    pub marked_as: String,
    /// Number of the device; `None` for any.
    pub number: Option<u32>,
    /// Number of queues of a new device, at least 1; `None` for one per core. The kernel makes at
    /// most one per CPU.
    pub queues: Option<u16>,
    /// State folder of the server: the next server with this folder and the same name takes the
    /// device over.
    pub state_folder: PathBuf,
}

impl UblkDiskOptions {
    /// The mark of the device.
    #[must_use]
    pub fn owner(&self) -> UblkOwner {
        UblkOwner::new(self.state_folder.as_os_str().as_encoded_bytes(), &self.marked_as)
    }
}

struct UblkShared {
    core_set: Arc<ProcessCores>,
    exports: Arc<Exports>,
    options: UblkDiskOptions,
    /// The name that the export has now.
    name: Mutex<Arc<str>>,
    link: Mutex<Option<PathBuf>>,
    stop: OwnedFd,
    event: OwnedFd,
    /// Orders that the thread has not carried out. An `event` follows each. `None` once the thread
    /// takes no more.
    orders: Mutex<Option<Vec<UblkOrder>>>,
}

/// An order to the thread of a disk.
enum UblkOrder {
    /// Pause the disk, and reply whether it is paused.
    Pause(SyncSender<bool>),
    /// Go on after a pause.
    Resume,
    /// The export has another name.
    Rename,
    /// Remove the device, with `force` also if it is in use.
    Remove { force: bool, reply: SyncSender<Result<(), UblkRemovalError>> },
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A block device of this machine. If the server is dropped, the device is removed, or left to the
/// next server if it is in use; the drop waits for this for some seconds only.
pub struct UblkServer {
    shared: Arc<UblkShared>,
    started: UblkStarted,
    thread: JoinHandle<()>,
}

/// What is known of a device that was started.
struct UblkStarted {
    number: u32,
    queues: u16,
    is_taken_over: bool,
}

impl UblkServer {
    /// Creates the block device of the export `options.name`, or takes it over, and starts it.
    ///
    /// # Errors
    /// The text says what is missing and what to do.
    pub fn start(
        core_set: &Arc<ProcessCores>,
        exports: &Arc<Exports>,
        options: UblkDiskOptions,
    ) -> io::Result<UblkServer> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let shared = Arc::new(UblkShared {
            core_set: Arc::clone(core_set),
            exports: Arc::clone(exports),
            name: Mutex::new(options.name.as_str().into()),
            link: Mutex::default(),
            options,
            stop: eventfd(0, flags)?,
            event: eventfd(0, flags)?,
            orders: Mutex::new(Some(Vec::new())),
        });
        let (reply, started) = sync_channel(1);
        let thread = {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new().name("udm-ublk".into()).spawn(move || shared.run(&reply))?
        };
        let ended = || io::Error::other("the thread of the disk has ended");
        let started = started.recv().map_err(|_| ended())??;
        Ok(UblkServer { shared, started, thread })
    }

    /// Name of the export.
    #[must_use]
    pub fn name(&self) -> Arc<str> {
        Arc::clone(&lock(&self.shared.name))
    }

    /// The export has another name now: the link follows, without a wait. The mark of the device
    /// stays.
    pub fn set_name(&self, name: &str) {
        *lock(&self.shared.name) = name.into();
        self.shared.order(UblkOrder::Rename);
    }

    /// The options with which the disk was started, and the name that the export has now.
    #[must_use]
    pub fn options(&self) -> UblkDiskOptions {
        UblkDiskOptions { name: self.name().to_string(), ..self.shared.options.clone() }
    }

    /// Number of the device.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.started.number
    }

    /// Number of queues of the device.
    #[must_use]
    pub fn queues(&self) -> u16 {
        self.started.queues
    }

    /// Path of the block device.
    #[must_use]
    pub fn block_device(&self) -> PathBuf {
        format!("/dev/ublkb{}", self.started.number).into()
    }

    /// Path of the link to the block device, if it could be created.
    #[must_use]
    pub fn link(&self) -> Option<PathBuf> {
        lock(&self.shared.link).clone()
    }

    /// True if an earlier server had created the device.
    #[must_use]
    pub fn is_taken_over(&self) -> bool {
        self.started.is_taken_over
    }

    /// Makes the disk look at its device, if that is `device`: its size or limits may have changed.
    pub fn refresh_if_of(&self, device: DeviceId) {
        let export = self.shared.exports.get(&self.name());
        if export.is_some_and(|export| export.device().id() == device) {
            signal(&self.shared.event);
        }
    }

    /// Completes the requests in flight, holds new ones, and releases the device below, for some
    /// seconds at most. A disk that is dropped while it is paused is left to another process, which
    /// can take it over when this one has ended. Returns false, with the disk as before, if
    /// requests do not complete. Blocks.
    #[must_use]
    pub fn pause(&self) -> bool {
        let (reply, paused) = sync_channel(1);
        self.shared.order(UblkOrder::Pause(reply));
        paused.recv().unwrap_or(false)
    }

    /// Goes on after a pause, with the export of the same name. Does not wait.
    pub fn resume(&self) {
        self.shared.order(UblkOrder::Resume);
    }

    /// Removes the device, with `force` also if it is in use: its users get errors then. After an
    /// error the disk is as before. Blocks.
    ///
    /// # Errors
    /// Somebody uses the device, or the kernel refuses.
    pub fn remove(&self, force: bool) -> Result<(), UblkRemovalError> {
        let (reply, removed) = sync_channel(1);
        self.shared.order(UblkOrder::Remove { force, reply });
        removed.recv().unwrap_or(Err(UblkRemovalError::NotServed))
    }

    /// Begins the end of the disk, without waiting.
    pub fn begin_stop(&self) {
        signal(&self.shared.stop);
    }
}

impl Drop for UblkServer {
    fn drop(&mut self) {
        self.begin_stop();
        let end = Instant::now() + STOP_PATIENCE;
        while !self.thread.is_finished() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        if !self.thread.is_finished() {
            let (name, number) = (self.name(), self.started.number);
            tracing::warn!(
                "ublk {name}: /dev/ublkb{number} is not removed: the kernel did not stop it in time"
            );
        }
    }
}

/// Makes an eventfd readable.
fn signal(eventfd: &OwnedFd) {
    // Fails only if it is readable already.
    let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
}

impl UblkShared {
    /// Gives an order; it is dropped if the thread has ended.
    fn order(&self, order: UblkOrder) {
        if let Some(orders) = &mut *lock(&self.orders) {
            orders.push(order);
        }
        signal(&self.event);
    }

    /// Carries the orders out. Returns true if the device is removed.
    fn carry_out_orders(&self, session: &mut UblkSession) -> bool {
        let orders = lock(&self.orders).as_mut().map(std::mem::take).unwrap_or_default();
        let mut is_removed = false;
        for order in orders {
            match order {
                // Nothing is left to order.
                _ if is_removed => {}
                UblkOrder::Pause(reply) => drop(reply.send(session.pause())),
                UblkOrder::Resume => session.resume(&self.exports),
                UblkOrder::Rename => {
                    session.rename(Arc::clone(&lock(&self.name)));
                    *lock(&self.link) = session.link().map(Path::to_owned);
                }
                UblkOrder::Remove { force, reply } => {
                    let removed = session.remove(force);
                    is_removed = removed.is_ok();
                    drop(reply.send(removed));
                }
            }
        }
        is_removed
    }

    /// The thread of the disk.
    fn run(&self, reply: &SyncSender<io::Result<UblkStarted>>) {
        set_io_flusher();
        self.serve(reply);
        *lock(&self.orders) = None;
    }

    fn serve(&self, reply: &SyncSender<io::Result<UblkStarted>>) {
        let mut session = match UblkSession::start(&self.core_set, &self.exports, &self.options) {
            Ok(session) => session,
            Err(error) => return drop(reply.send(Err(error))),
        };
        *lock(&self.link) = session.link().map(Path::to_owned);
        let started = UblkStarted {
            number: session.number(),
            queues: session.queue_count(),
            is_taken_over: session.is_taken_over(),
        };
        if reply.send(Ok(started)).is_err() {
            return session.end();
        }
        loop {
            let fd = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
            let mut fds = [fd(self.stop.as_fd()), fd(self.event.as_fd())];
            match poll(&mut fds, None) {
                Ok(_) if !fds[0].revents().is_empty() => return session.end(),
                Ok(_) => {
                    // Several events are one look at the device.
                    let _ = rustix::io::read(&self.event, &mut [0; 8]);
                    if self.carry_out_orders(&mut session) {
                        return;
                    }
                    session.refresh();
                }
                Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!("ublk {}: {error}", self.options.name);
                    return session.end();
                }
            }
        }
    }
}
