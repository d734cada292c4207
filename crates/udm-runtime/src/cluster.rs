//! The cores of a process, as others see them: a number, and an inbox each.

use crate::FrontEnd;
use crate::inbox::Inbox;
use crate::tasked::{Stop, Tasked};
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use udm_core::{CoreId, Cores, DeviceId, LaneCommand, MakeTask, Nanos, TaskHandle};

/// What front ends, and those that work for them on other threads, write to front ends: see
/// [`Cluster::post_letter`].
pub type Letter = Box<dyn Any + Send>;

/// A letter to a core.
pub(crate) enum Mail {
    /// For the lanes of a device.
    Command(DeviceId, LaneCommand),
    /// For those who hold a port of this number: they are to be visited.
    Ring(DeviceId),
    /// A new front end. Made on the core, because it is not `Send`.
    Attach(Box<dyn FnOnce() -> Box<dyn FrontEnd> + Send>),
    /// For the front ends that listen to a device.
    Letter(DeviceId, Letter),
    /// Take no more, and let nothing wait.
    End,
    /// As `End`, and leave when all is done, or when so much time is over.
    Stop(Nanos),
    /// Say what is under way.
    Report(SyncSender<UnderWay>),
}

/// What is under way on the cores.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnderWay {
    /// Requests of front ends a device, where there are any.
    pub requests: BTreeMap<DeviceId, usize>,
    /// Devices with work of their own under way.
    pub busy: BTreeSet<DeviceId>,
    /// Front ends that are not closed.
    pub front_ends: usize,
    /// Cores that did not answer.
    pub silent: usize,
}

/// All cores of a process.
pub struct Cluster {
    inboxes: Vec<Inbox>,
    /// How many cores serve front ends, and tasks with them: all, or none in library mode.
    pub(crate) serving: AtomicUsize,
    /// Where the next task goes.
    next: AtomicUsize,
    /// The core of all tasks, where there is one for them.
    keeper: Option<CoreId>,
    me: Weak<Cluster>,
}

impl Cluster {
    /// A cluster of `cores` (1 to 1024) places. Each becomes a core when a thread attaches to it.
    ///
    /// # Errors
    /// When an eventfd can't be had, or the number is out of range (EINVAL).
    pub fn new(cores: usize) -> io::Result<Arc<Cluster>> {
        Cluster::with(cores, None)
    }

    /// A cluster of `cores` places that threads take and leave ([`LocalCore::attach`],
    /// [`LocalCore::detach`]) as they like, and one more, the last, for a core that is there all the
    /// while and has the tasks. Nobody waits for a place that is empty.
    ///
    /// # Errors
    /// As of [`Cluster::new`].
    ///
    /// [`LocalCore::attach`]: crate::LocalCore::attach
    /// [`LocalCore::detach`]: crate::LocalCore::detach
    pub fn kept(cores: usize) -> io::Result<Arc<Cluster>> {
        let keeper = u16::try_from(cores).unwrap_or(u16::MAX);
        let cluster = Cluster::with(cores.saturating_add(1), Some(CoreId(keeper)))?;
        cluster.inboxes.iter().for_each(Inbox::leave);
        Ok(cluster)
    }

    fn with(cores: usize, keeper: Option<CoreId>) -> io::Result<Arc<Cluster>> {
        if !(1..=1024).contains(&cores) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{cores} cores: 1 to 1024 are possible"),
            ));
        }
        let inboxes = (0..cores).map(|_| Inbox::new()).collect::<io::Result<_>>()?;
        let none = || AtomicUsize::new(0);
        let (serving, next) = (none(), none());
        Ok(Arc::new_cyclic(|me| Cluster { inboxes, serving, next, keeper, me: me.clone() }))
    }

    /// How many cores there are.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a cluster has at least one core")]
    pub fn len(&self) -> usize {
        self.inboxes.len()
    }

    /// Posts `letter` to the front ends on `core` that listen to `device`
    /// ([`crate::FrontCx::listen`]): each is called with it, in no order, then it is dropped. Any
    /// thread may post; the letters of one thread arrive in their order.
    ///
    /// # Panics
    /// When there is no such core.
    pub fn post_letter(&self, core: CoreId, device: DeviceId, letter: Letter) {
        self.post(core, Mail::Letter(device, letter));
    }

    /// What is under way on all cores. Cores that have not answered after `patience` are counted
    /// only.
    #[must_use]
    pub fn under_way(&self, patience: Duration) -> UnderWay {
        let (tx, rx) = std::sync::mpsc::sync_channel(self.len());
        for inbox in &self.inboxes {
            inbox.post(Mail::Report(tx.clone()));
        }
        drop(tx);
        let end = Instant::now() + patience;
        let mut all = UnderWay { silent: self.len(), ..UnderWay::default() };
        while let Ok(one) = rx.recv_timeout(end.saturating_duration_since(Instant::now())) {
            all.silent -= 1;
            all.front_ends += one.front_ends;
            all.busy.extend(one.busy);
            one.requests.into_iter().for_each(|(id, n)| *all.requests.entry(id).or_default() += n);
        }
        all
    }

    pub(crate) fn inbox(&self, core: CoreId) -> &Inbox {
        &self.inboxes[core.index()]
    }

    pub(crate) fn post(&self, core: CoreId, mail: Mail) {
        self.inbox(core).post(mail);
    }
}

impl Cores for Cluster {
    fn broadcast(&self, device: DeviceId, command: LaneCommand) {
        for inbox in &self.inboxes {
            inbox.post(Mail::Command(device, command.clone()));
        }
    }

    fn ring(&self, core: CoreId, id: DeviceId) {
        self.post(core, Mail::Ring(id));
    }

    /// On one core after the other. In library mode on the first, which is there before any device
    /// is made, or on the one that is there for them; it is dropped there when that core has no
    /// ring.
    fn start(&self, make: MakeTask) -> TaskHandle {
        let among = if self.serving.load(Ordering::Relaxed) == self.len() { self.len() } else { 1 };
        let next = || CoreId((self.next.fetch_add(1, Ordering::Relaxed) % among) as u16);
        let core = self.keeper.unwrap_or_else(next);
        let (topic, me) = (DeviceId::new(), self.me.clone());
        self.attach(core, Box::new(move || Box::new(Tasked::new(make(), topic))));
        TaskHandle::new(move |told| {
            if let Some(cluster) = me.upgrade() {
                cluster.post_letter(core, topic, Box::new(Stop { _told: told }));
            }
        })
    }
}
