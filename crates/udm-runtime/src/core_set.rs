//! The cores of a process, as seen from other threads: ids and inboxes.

use crate::front_end::FrontEnd;
use crate::in_flight_report::CoreWorkInFlightReport;
use crate::inbox::EventFdMessageQueue;
use crate::task_front_end::{StopTaskMessage, TaskFrontEnd};
use std::any::Any;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use udm_core::{BioTaskFactory, BioTaskHandle, CoreCommandSender, CoreId, DeviceId, LaneCommand, Nanos};

/// A message to front ends; see [`ProcessCores::send_message`].
pub type FrontEndMessage = Box<dyn Any + Send>;

/// A message to a core.
pub(crate) enum CoreMessage {
    /// A command to the lanes of a device.
    Command(DeviceId, LaneCommand),
    /// A wakeup for the holders of lane inboxes with this id.
    Wake(DeviceId),
    /// A new front end, made on the core because it is not `Send`.
    Attach(Box<dyn FnOnce() -> Box<dyn FrontEnd> + Send>),
    /// A message to the front ends that subscribe to a device.
    Message(DeviceId, FrontEndMessage),
    /// Refuse new requests and hold back no bios.
    End,
    /// As `End`; the core exits when all is done, or after this time.
    Stop(Nanos),
    /// Report the work in flight.
    Report(SyncSender<CoreWorkInFlightReport>),
    /// Register a file with the ring.
    RegisterFile(Arc<OwnedFd>, SyncSender<io::Result<()>>),
}

/// The inbox of a core.
pub(crate) type CoreInbox = EventFdMessageQueue<CoreMessage>;

/// All cores of a process.
pub struct ProcessCores {
    inboxes: Vec<CoreInbox>,
    /// Number of cores that serve front ends and tasks: all, or none in library mode.
    pub(crate) serving: AtomicUsize,
    /// Counter to choose the core of the next task.
    next: AtomicUsize,
    /// The core of all tasks, if there is one for them.
    task_core: Option<CoreId>,
    me: Weak<ProcessCores>,
}

impl ProcessCores {
    /// Creates a set of `cores` (1 to 1024) cores. Each starts when a thread attaches to it.
    ///
    /// # Errors
    /// No eventfd is available, or the number is out of range (EINVAL).
    pub fn new(cores: usize) -> io::Result<Arc<ProcessCores>> {
        ProcessCores::with(cores, None)
    }

    /// Creates a set of `cores` cores that threads may attach to and detach from
    /// ([`LocalCore::attach`], [`LocalCore::detach`]). One more core, the last, always runs and
    /// executes the tasks. A detached core delays nothing.
    ///
    /// # Errors
    /// As for [`ProcessCores::new`].
    ///
    /// [`LocalCore::attach`]: crate::LocalCore::attach
    /// [`LocalCore::detach`]: crate::LocalCore::detach
    pub fn with_task_core(cores: usize) -> io::Result<Arc<ProcessCores>> {
        let task_core = u16::try_from(cores).unwrap_or(u16::MAX);
        let core_set = ProcessCores::with(cores.saturating_add(1), Some(CoreId(task_core)))?;
        core_set.inboxes.iter().for_each(CoreInbox::stop_receiving);
        Ok(core_set)
    }

    fn with(cores: usize, task_core: Option<CoreId>) -> io::Result<Arc<ProcessCores>> {
        if !(1..=1024).contains(&cores) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{cores} cores: 1 to 1024 are possible"),
            ));
        }
        let inboxes = (0..cores).map(|_| CoreInbox::new()).collect::<io::Result<_>>()?;
        let none = || AtomicUsize::new(0);
        let (serving, next) = (none(), none());
        Ok(Arc::new_cyclic(|me| ProcessCores { inboxes, serving, next, task_core, me: me.clone() }))
    }

    /// Number of cores.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a set has at least one core")]
    pub fn len(&self) -> usize {
        self.inboxes.len()
    }

    /// Sends `message` to the front ends on `core` that subscribe to `device`
    /// ([`crate::FrontCx::subscribe`]). Each is called with it, in no order; then the message is
    /// dropped. Any thread may send; messages of one thread keep their order.
    ///
    /// # Panics
    /// If there is no such core.
    pub fn send_message(&self, core: CoreId, device: DeviceId, message: FrontEndMessage) {
        self.send(core, CoreMessage::Message(device, message));
    }

    /// Collects the work in flight on all cores. Cores that have not replied within `timeout` are
    /// only counted.
    #[must_use]
    pub fn in_flight_report(&self, timeout: Duration) -> CoreWorkInFlightReport {
        let (tx, rx) = std::sync::mpsc::sync_channel(self.len());
        for inbox in &self.inboxes {
            inbox.send(CoreMessage::Report(tx.clone()));
        }
        drop(tx);
        let end = Instant::now() + timeout;
        let mut all = CoreWorkInFlightReport { unanswered: self.len(), ..CoreWorkInFlightReport::default() };
        while let Ok(one) = rx.recv_timeout(end.saturating_duration_since(Instant::now())) {
            all.unanswered -= 1;
            all.front_ends += one.front_ends;
            all.busy.extend(one.busy);
            one.requests.into_iter().for_each(|(id, n)| *all.requests.entry(id).or_default() += n);
        }
        all
    }

    /// Registers `file` with the ring of each core. From then on the kernel closes the file only
    /// when the process has closed it and no operation of any ring is in flight, also if the
    /// process is killed: a ring lets go of its files after its last operation. So whoever finds a
    /// lock of this file free knows that no read or write of a core can still reach a disk. A
    /// process can do this once.
    ///
    /// # Errors
    /// The error of the kernel; EBUSY if a file is registered already. A core does not answer
    /// within `timeout`.
    pub fn register_file(&self, file: &Arc<OwnedFd>, timeout: Duration) -> io::Result<()> {
        let (tx, rx) = std::sync::mpsc::sync_channel(self.len());
        for inbox in &self.inboxes {
            inbox.send(CoreMessage::RegisterFile(Arc::clone(file), tx.clone()));
        }
        drop(tx);
        let end = Instant::now() + timeout;
        for _ in 0..self.len() {
            let answer = rx.recv_timeout(end.saturating_duration_since(Instant::now()));
            answer.map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "a core does not answer"))??;
        }
        Ok(())
    }

    pub(crate) fn inbox(&self, core: CoreId) -> &CoreInbox {
        &self.inboxes[core.index()]
    }

    pub(crate) fn send(&self, core: CoreId, message: CoreMessage) {
        self.inbox(core).send(message);
    }
}

impl CoreCommandSender for ProcessCores {
    fn broadcast(&self, device: DeviceId, command: LaneCommand) {
        for inbox in &self.inboxes {
            inbox.send(CoreMessage::Command(device, command.clone()));
        }
    }

    fn wake_up(&self, core: CoreId, id: DeviceId) {
        self.send(core, CoreMessage::Wake(id));
    }

    /// Uses the cores in turn. In library mode it uses the first core, which exists before any
    /// device, or the task core. A core without a ring drops the task.
    fn start(&self, make: BioTaskFactory) -> BioTaskHandle {
        let among = if self.serving.load(Ordering::Relaxed) == self.len() { self.len() } else { 1 };
        let next = || CoreId((self.next.fetch_add(1, Ordering::Relaxed) % among) as u16);
        let core = self.task_core.unwrap_or_else(next);
        let (topic, me) = (DeviceId::new(), self.me.clone());
        self.attach(core, Box::new(move || Box::new(TaskFrontEnd::new(make(), topic))));
        BioTaskHandle::new(move |ack| {
            if let Some(core_set) = me.upgrade() {
                core_set.send_message(core, topic, Box::new(StopTaskMessage { _ack: ack }));
            }
        })
    }
}
