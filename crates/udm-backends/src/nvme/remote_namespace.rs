//! State of a namespace, shared by all its names, lanes and the task of its admin queue.

use super::admin_lane::AdminTaskHandle;
use super::controller_resets::ControllerResets;
use super::path_report::NvmePathCounters;
use super::remote_namespaces::KnownNamespace;
use crate::stream::{ServerAddress, ServerReachability, SocketOps};
use std::collections::VecDeque;
use std::sync::atomic::{
    AtomicBool, AtomicU8, AtomicU64, AtomicUsize,
    Ordering::{self, Relaxed},
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use udm_core::{Limits, Nanos, Sectors, SharedDiskState, WaitQueue};
use udm_queue::SingleOwnerForwarder;
use udm_wire::nvme::AnaState;
use udm_wire::nvme::host::{
    AssociationFacts, ControllerFacts, HostOptions, NamespaceFacts, WriteFence, is_usable,
};
use udm_wire::uri::{NvmeUri, TimeSpan};

/// The queue of the lane that a task owns.
const SHARED_QUEUE: u16 = 1;

/// A namespace of a controller.
pub(crate) struct RemoteNamespace {
    pub(super) uri: NvmeUri,
    /// Addresses found when the namespace was opened, at least one; tried in turn.
    pub(super) addresses: Vec<ServerAddress>,
    pub(super) options: HostOptions,
    pub(super) sockets: Box<dyn SocketOps>,
    /// How long a request may wait while the controller sends nothing; `None` for no limit.
    pub(super) deadline: Option<Nanos>,
    pub(super) shared_disk_state: Arc<SharedDiskState>,
    /// For lanes without a queue of their own.
    pub(super) forwarder: SingleOwnerForwarder,
    pub(super) task: Mutex<Weak<AdminTaskHandle>>,
    pub(super) reachability: ServerReachability,
    pub(super) resets: Arc<ControllerResets>,
    pub(super) counters: NvmePathCounters,
    /// Woken when the association changes, and when the task of the admin queue has something to
    /// do.
    pub(super) wait_queue: Arc<WaitQueue>,
    /// The namespace when it was opened.
    known: KnownNamespace,
    /// Size in bytes when it was last read.
    size: AtomicU64,
    /// Last known [`AnaState`], as its number.
    ana: AtomicU8,
    /// Number of times that a command failed with an ANA status.
    ana_doubts: AtomicU64,
    state: Mutex<AssociationState>,
    /// Number of changes of `state`.
    changes: AtomicU64,
    refused: Mutex<Option<String>>,
    queue_numbers: Mutex<VecDeque<u16>>,
    held: AtomicUsize,
    /// Number of tasks of the admin queue so far.
    tasks: AtomicU64,
    /// Number of open lanes with a queue.
    lanes: Arc<AtomicUsize>,
}

/// Counts an open lane.
pub(super) struct LaneCountGuard(Arc<AtomicUsize>);

impl Drop for LaneCountGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// State of the association.
#[derive(Clone)]
pub(super) enum AssociationState {
    /// The first attempt to connect since the namespace was opened: requests wait.
    Connecting,
    /// It works.
    Live(Arc<Association>),
    /// It was lost, or cannot be made: requests fail.
    Down,
}

/// An association with a controller that is set up.
pub(super) struct Association {
    /// Number of the association of this namespace, for comparison.
    pub(super) number: u64,
    pub(super) address: ServerAddress,
    pub(super) controller: ControllerFacts,
    pub(super) fence: WriteFence,
    /// Time in ns at which the admin queue last received something.
    pub(super) last_heard: AtomicU64,
    /// The controller was reset by another one: it will execute no command.
    is_fenced: AtomicBool,
}

impl Association {
    /// Returns true if no command of the association will be executed.
    pub(super) fn is_fenced(&self) -> bool {
        // With the wake of the lane, which reads this flag only while writes wait.
        self.is_fenced.load(Ordering::Acquire)
    }

    /// Records that no command of the association will be executed. Returns false if that was
    /// known.
    pub(super) fn fence(&self) -> bool {
        !self.is_fenced.swap(true, Ordering::AcqRel)
    }
}

/// The number of an I/O queue, reserved for a lane.
pub(super) struct QueueNumber {
    pub(super) number: u16,
    of: Option<Arc<RemoteNamespace>>,
}

impl QueueNumber {
    /// The number of the lane that a task owns.
    pub(super) fn shared() -> QueueNumber {
        QueueNumber { number: SHARED_QUEUE, of: None }
    }
}

impl Drop for QueueNumber {
    fn drop(&mut self) {
        if let Some(namespace) = &self.of {
            lock(&namespace.queue_numbers).push_back(self.number);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RemoteNamespace {
    pub(super) fn new(
        uri: NvmeUri,
        addresses: Vec<ServerAddress>,
        options: HostOptions,
        known: KnownNamespace,
        sockets: Box<dyn SocketOps>,
        shared_disk_state: Arc<SharedDiskState>,
        resets: Arc<ControllerResets>,
    ) -> RemoteNamespace {
        let wait_queue = Arc::new(WaitQueue::new());
        resets.register(&wait_queue);
        RemoteNamespace {
            deadline: uri.deadline(),
            uri,
            addresses,
            options,
            sockets,
            shared_disk_state,
            forwarder: SingleOwnerForwarder::default(),
            task: Mutex::default(),
            reachability: ServerReachability::default(),
            resets,
            counters: NvmePathCounters::default(),
            wait_queue,
            size: AtomicU64::new(known.namespace.size),
            ana: AtomicU8::new(AnaState::Optimized as u8),
            ana_doubts: AtomicU64::new(0),
            state: Mutex::new(AssociationState::Connecting),
            changes: AtomicU64::new(0),
            refused: Mutex::default(),
            // The queue that was free the longest is used first: the controller may still have the
            // last one.
            queue_numbers: Mutex::new((SHARED_QUEUE + 1..=known.queues).collect()),
            held: AtomicUsize::new(0),
            tasks: AtomicU64::new(0),
            lanes: Arc::default(),
            known,
        }
    }

    /// The namespace, with its size when it was last read.
    pub(super) fn known_now(&self) -> KnownNamespace {
        let namespace = NamespaceFacts { size: self.size.load(Relaxed), ..self.known.namespace.clone() };
        KnownNamespace { namespace, ..self.known.clone() }
    }

    /// Limits, and the size when it was last read.
    pub(super) fn limits(&self) -> Limits {
        Limits { size: self.size(), ..self.known.namespace.limits }
    }

    /// Size when it was last read.
    pub(super) fn size(&self) -> Sectors {
        // Relaxed is enough: the number is independent.
        Sectors::from_bytes(self.size.load(Relaxed))
    }

    pub(super) fn facts(&self) -> &NamespaceFacts {
        &self.known.namespace
    }

    /// Reserves the number of an I/O queue; `None` if all are in use.
    pub(super) fn take_queue_number(this: &Arc<RemoteNamespace>) -> Option<QueueNumber> {
        let number = lock(&this.queue_numbers).pop_front()?;
        Some(QueueNumber { number, of: Some(Arc::clone(this)) })
    }

    /// Number of changes of the association. It is read before [`RemoteNamespace::state`].
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(std::sync::atomic::Ordering::Acquire)
    }

    /// State of the association.
    pub(super) fn state(&self) -> AssociationState {
        lock(&self.state).clone()
    }

    fn set_state(&self, state: AssociationState) {
        *lock(&self.state) = state;
        self.changes.fetch_add(1, std::sync::atomic::Ordering::Release);
        self.wait_queue.wake_up();
    }

    /// Returns true if association `number` works.
    pub(super) fn is_live(&self, number: u64) -> bool {
        matches!(&*lock(&self.state), AssociationState::Live(live) if live.number == number)
    }

    /// Checks the namespace of a controller that is set up, and begins to use the controller.
    ///
    /// # Errors
    /// The reason why not, in one line: the namespace has changed.
    pub(super) fn accept(
        &self,
        number: u64,
        address: &ServerAddress,
        facts: &AssociationFacts,
        now: Nanos,
    ) -> Result<(), String> {
        let verdict = self.compare(facts);
        *lock(&self.refused) = verdict.clone().err();
        verdict?;
        self.set_namespace(&facts.namespace);
        self.set_ana(facts.ana);
        let controller = &facts.controller;
        let quiesce = match controller.quiesce {
            Nanos(0) => self.uri.fence_delay.unwrap_or(Nanos(0)),
            reported => reported,
        };
        // The controller rounds the timeout up.
        let kato = Nanos(self.uri.kato.0.next_multiple_of(controller.keep_alive_step.0));
        let fence = WriteFence { kato, is_traffic_based: controller.is_traffic_based, quiesce };
        let association = Association {
            number,
            address: address.clone(),
            controller: controller.clone(),
            fence,
            last_heard: AtomicU64::new(now.0),
            is_fenced: AtomicBool::new(false),
        };
        self.reachability.mark_up(&self.uri.plain());
        self.counters.count_association();
        self.set_state(AssociationState::Live(Arc::new(association)));
        Ok(())
    }

    fn compare(&self, facts: &AssociationFacts) -> Result<(), String> {
        let (was, now) = (&self.known.namespace, &facts.namespace);
        let name =
            |namespace: &NamespaceFacts| namespace.id.wwid().unwrap_or_else(|| "without a name".into());
        if now.id != was.id {
            return Err(format!("it is another namespace: it was {} and is {} now", name(was), name(now)));
        }
        let size = self.size.load(Relaxed);
        if now.size < size {
            return Err(format!("its size was {size} bytes and is {} now", now.size));
        }
        if facts.queues < self.known.queues {
            return Err(format!(
                "the controller granted {} I/O queues and grants {} now",
                self.known.queues, facts.queues
            ));
        }
        let (before, after) = (&was.limits, &now.limits);
        if after.read_only && !before.read_only {
            return Err("it was writable and is read-only now".into());
        }
        let is_less = after.max_sectors < before.max_sectors
            || after.max_discard < before.max_discard
            || after.max_write_zeroes < before.max_write_zeroes
            || after.write_cache && !before.write_cache;
        if after.logical_block != before.logical_block || is_less {
            return Err("its block size or its limits have changed".into());
        }
        Ok(())
    }

    /// Records the namespace as it is now.
    pub(super) fn set_namespace(&self, namespace: &NamespaceFacts) {
        let before = self.size.swap(namespace.size, Relaxed);
        if before != namespace.size {
            let uri = self.uri.plain();
            tracing::warn!("{uri}: its size was {before} bytes and is {} now", namespace.size);
        }
    }

    /// Records the ANA state.
    pub(super) fn set_ana(&self, state: AnaState) {
        if self.ana.swap(state as u8, Relaxed) != state as u8 {
            tracing::warn!("{}: ANA state {}", self.uri.plain(), ana_name(state));
        }
    }

    /// The last known ANA state.
    pub(super) fn ana(&self) -> AnaState {
        match self.ana.load(Relaxed) {
            1 => AnaState::Optimized,
            2 => AnaState::NonOptimized,
            3 => AnaState::Inaccessible,
            4 => AnaState::PersistentLoss,
            _ => AnaState::Change,
        }
    }

    /// Returns true if requests may be sent in the current ANA state.
    pub(super) fn is_accessible(&self) -> bool {
        is_usable(self.ana())
    }

    /// Records that a command failed with an ANA status: the task reads the state again.
    #[cold]
    pub(super) fn doubt_ana(&self) {
        self.ana_doubts.fetch_add(1, Relaxed);
        self.wait_queue.wake_up();
    }

    /// Number of calls of [`RemoteNamespace::doubt_ana`].
    pub(super) fn ana_doubts(&self) -> u64 {
        self.ana_doubts.load(Relaxed)
    }

    /// Ends association `number`, because of `reason`. Does nothing if it has ended already.
    #[cold]
    pub(super) fn end_association(&self, number: u64, reason: &str) {
        let mut state = lock(&self.state);
        if !matches!(&*state, AssociationState::Live(live) if live.number == number) {
            return;
        }
        *state = AssociationState::Down;
        drop(state);
        self.counters.count_loss();
        self.changes.fetch_add(1, std::sync::atomic::Ordering::Release);
        self.wait_queue.wake_up();
        self.mark_down(reason);
    }

    /// Begins a task of the admin queue, which connects for the first time. Returns its number.
    pub(super) fn begin_task(&self) -> u64 {
        let number = self.tasks.fetch_add(1, Relaxed) + 1;
        self.set_state(AssociationState::Connecting);
        number
    }

    /// Records the end of task `number`. Lanes may still have requests if the program ends, and
    /// nobody connects for them.
    pub(super) fn end_task(&self, number: u64) {
        if self.tasks.load(Relaxed) == number {
            self.set_state(AssociationState::Down);
        }
    }

    /// Records that an attempt to connect has failed.
    #[cold]
    pub(super) fn connecting_failed(&self, reason: &str) {
        self.set_state(AssociationState::Down);
        self.mark_down(reason);
    }

    /// Logs `reason` once, until the controller works again.
    pub(super) fn mark_down(&self, reason: &str) {
        self.reachability.mark_down(&self.uri.plain(), reason, reason);
    }

    /// Ends the back-off of the task, because an administrator reports that the controller works.
    pub(super) fn retry_now(&self) {
        self.reachability.retry_now();
        self.wait_queue.wake_up();
    }

    /// Reason why the controller was refused when it last answered, or why the path is not used.
    pub(super) fn rejection_reason(&self) -> Option<String> {
        let refused = lock(&self.refused).clone();
        let ana = self.ana();
        refused.or_else(|| (!is_usable(ana)).then(|| format!("ANA state {}", ana_name(ana))))
    }

    /// Counts a lane until the guard is dropped.
    pub(super) fn count_lane(&self) -> LaneCountGuard {
        self.lanes.fetch_add(1, Relaxed);
        LaneCountGuard(Arc::clone(&self.lanes))
    }

    /// Number of open lanes with a queue.
    pub(super) fn open_lanes(&self) -> usize {
        self.lanes.load(Relaxed)
    }

    /// Number of held writes.
    pub(super) fn held_writes(&self) -> usize {
        self.held.load(Relaxed)
    }

    /// Changes the number of held writes.
    pub(super) fn add_held_writes(&self, writes: usize) {
        self.held.fetch_add(writes, Relaxed);
    }

    /// As [`RemoteNamespace::add_held_writes`].
    pub(super) fn remove_held_writes(&self, writes: usize) {
        self.held.fetch_sub(writes, Relaxed);
    }

    /// The reason why writes are held, in one line; `None` if none are.
    pub(super) fn stall_reason(&self) -> Option<String> {
        let held = self.held_writes();
        let kato = TimeSpan(self.uri.kato);
        (held > 0).then(|| {
            format!(
                "{held} writes wait until the lost controller must have ended them (kato {kato}), or is reset \
                 through another path"
            )
        })
    }
}

/// The name of a state, as in Linux' `ana_state`.
pub(super) const fn ana_name(state: AnaState) -> &'static str {
    match state {
        AnaState::Optimized => "optimized",
        AnaState::NonOptimized => "non-optimized",
        AnaState::Inaccessible => "inaccessible",
        AnaState::PersistentLoss => "persistent-loss",
        AnaState::Change => "change",
    }
}
