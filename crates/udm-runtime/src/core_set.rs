//! The cores of a process, as others see them: a number, and an inbox each.

use crate::FrontEnd;
use crate::inbox::Inbox;
use crate::task_front_end::{Stop, TaskFrontEnd};
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use udm_core::{CoreId, Cores, DeviceId, LaneCommand, Nanos, TaskFactory, TaskHandle};

/// What front ends, and those that work for them on other threads, write to front ends: see
/// [`CoreSet::send_message`].
pub type Message = Box<dyn Any + Send>;

/// A letter to a core.
pub(crate) enum CoreMessage {
    /// For the lanes of a device.
    Command(DeviceId, LaneCommand),
    /// For those who hold a port of this number: they are to be visited.
    Ring(DeviceId),
    /// A new front end. Made on the core, because it is not `Send`.
    Attach(Box<dyn FnOnce() -> Box<dyn FrontEnd> + Send>),
    /// For the front ends that listen to a device.
    Message(DeviceId, Message),
    /// Take no more, and let nothing wait.
    End,
    /// As `End`, and leave when all is done, or when so much time is over.
    Stop(Nanos),
    /// Say what is under way.
    Report(SyncSender<InFlightReport>),
}

/// What is under way on the cores.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InFlightReport {
    /// Requests of front ends a device, where there are any.
    pub requests: BTreeMap<DeviceId, usize>,
    /// Devices with work of their own under way.
    pub busy: BTreeSet<DeviceId>,
    /// Front ends that are not closed.
    pub front_ends: usize,
    /// Cores that did not answer.
    pub unanswered: usize,
}

/// All cores of a process.
pub struct CoreSet {
    inboxes: Vec<Inbox>,
    /// How many cores serve front ends, and tasks with them: all, or none in library mode.
    pub(crate) serving: AtomicUsize,
    /// Where the next task goes.
    next: AtomicUsize,
    /// The core of all tasks, where there is one for them.
    task_core: Option<CoreId>,
    me: Weak<CoreSet>,
}

impl CoreSet {
    /// A cluster of `cores` (1 to 1024) places. Each becomes a core when a thread attaches to it.
    ///
    /// # Errors
    /// When an eventfd can't be had, or the number is out of range (EINVAL).
    pub fn new(cores: usize) -> io::Result<Arc<CoreSet>> {
        CoreSet::with(cores, None)
    }

    /// A cluster of `cores` places that threads take and leave ([`LocalCore::attach`],
    /// [`LocalCore::detach`]) as they like, and one more, the last, for a core that is there all the
    /// while and has the tasks. Nobody waits for a place that is empty.
    ///
    /// # Errors
    /// As of [`CoreSet::new`].
    ///
    /// [`LocalCore::attach`]: crate::LocalCore::attach
    /// [`LocalCore::detach`]: crate::LocalCore::detach
    pub fn with_task_core(cores: usize) -> io::Result<Arc<CoreSet>> {
        let task_core = u16::try_from(cores).unwrap_or(u16::MAX);
        let cluster = CoreSet::with(cores.saturating_add(1), Some(CoreId(task_core)))?;
        cluster.inboxes.iter().for_each(Inbox::stop_receiving);
        Ok(cluster)
    }

    fn with(cores: usize, task_core: Option<CoreId>) -> io::Result<Arc<CoreSet>> {
        if !(1..=1024).contains(&cores) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{cores} cores: 1 to 1024 are possible"),
            ));
        }
        let inboxes = (0..cores).map(|_| Inbox::new()).collect::<io::Result<_>>()?;
        let none = || AtomicUsize::new(0);
        let (serving, next) = (none(), none());
        Ok(Arc::new_cyclic(|me| CoreSet { inboxes, serving, next, task_core, me: me.clone() }))
    }

    /// How many cores there are.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a cluster has at least one core")]
    pub fn len(&self) -> usize {
        self.inboxes.len()
    }

    /// Posts `message` to the front ends on `core` that listen to `device`
    /// ([`crate::FrontCx::subscribe`]): each is called with it, in no order, then it is dropped. Any
    /// thread may post; the letters of one thread arrive in their order.
    ///
    /// # Panics
    /// When there is no such core.
    pub fn send_message(&self, core: CoreId, device: DeviceId, message: Message) {
        self.send(core, CoreMessage::Message(device, message));
    }

    /// What is under way on all cores. Cores that have not answered after `timeout` are counted
    /// only.
    #[must_use]
    pub fn under_way(&self, timeout: Duration) -> InFlightReport {
        let (tx, rx) = std::sync::mpsc::sync_channel(self.len());
        for inbox in &self.inboxes {
            inbox.send(CoreMessage::Report(tx.clone()));
        }
        drop(tx);
        let end = Instant::now() + timeout;
        let mut all = InFlightReport { unanswered: self.len(), ..InFlightReport::default() };
        while let Ok(one) = rx.recv_timeout(end.saturating_duration_since(Instant::now())) {
            all.unanswered -= 1;
            all.front_ends += one.front_ends;
            all.busy.extend(one.busy);
            one.requests.into_iter().for_each(|(id, n)| *all.requests.entry(id).or_default() += n);
        }
        all
    }

    pub(crate) fn inbox(&self, core: CoreId) -> &Inbox {
        &self.inboxes[core.index()]
    }

    pub(crate) fn send(&self, core: CoreId, mail: CoreMessage) {
        self.inbox(core).send(mail);
    }
}

impl Cores for CoreSet {
    fn broadcast(&self, device: DeviceId, command: LaneCommand) {
        for inbox in &self.inboxes {
            inbox.send(CoreMessage::Command(device, command.clone()));
        }
    }

    fn wake_up(&self, core: CoreId, id: DeviceId) {
        self.send(core, CoreMessage::Ring(id));
    }

    /// On one core after the other. In library mode on the first, which is there before any device
    /// is made, or on the one that is there for them; it is dropped there when that core has no
    /// ring.
    fn start(&self, make: TaskFactory) -> TaskHandle {
        let among = if self.serving.load(Ordering::Relaxed) == self.len() { self.len() } else { 1 };
        let next = || CoreId((self.next.fetch_add(1, Ordering::Relaxed) % among) as u16);
        let core = self.task_core.unwrap_or_else(next);
        let (topic, me) = (DeviceId::new(), self.me.clone());
        self.attach(core, Box::new(move || Box::new(TaskFrontEnd::new(make(), topic))));
        TaskHandle::new(move |told| {
            if let Some(cluster) = me.upgrade() {
                cluster.send_message(core, topic, Box::new(Stop { _ack: told }));
            }
        })
    }
}
