//! The admin queue of a namespace: a lane without requests, which a task keeps open on one core.

mod ana_transition;
mod resets;

use super::client::READY_POLL;
use super::remote_namespace::RemoteNamespace;
use crate::stream::{
    BACK_OFF, BACK_OFF_MAX, DisconnectKind, DisconnectReason, HANDSHAKE_TIMEOUT, ServerAddress,
    StreamConnection, StreamEvent,
};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};
use udm_core::errno::EOPNOTSUPP;
use udm_core::{
    Batch, BioTask, BioTaskCx, BioTaskHandle, BioTaskLaneId, BufPool, Cx, Device, DeviceControlError,
    DeviceId, Lane, Limits, Nanos, OwnWork, PauseAwareReplyDeadline, Status, UnansweredRequestState,
    WaitQueueSubscription,
};
use udm_runtime::{Ring, RingCompletion};
use udm_wire::nvme::host::{AdminEvent, HostAdmin};
use udm_wire::uri::TimeSpan;

use ana_transition::{AnaTransition, AnaTransitionStep};
use resets::ResetsThroughController;

/// Bytes of buffers that are kept for reuse.
const KEEP: usize = 64 << 10;

/// The running task of an admin queue. Dropping the last reference stops it.
pub(super) struct AdminTaskHandle {
    _task: BioTaskHandle,
}

impl AdminTaskHandle {
    /// Returns the task of `namespace`; starts it on some core if it does not run.
    pub(super) fn get_or_start(namespace: &Arc<RemoteNamespace>, cx: &mut Cx<'_>) -> Arc<AdminTaskHandle> {
        let mut kept = namespace.task.lock().unwrap_or_else(PoisonError::into_inner);
        let running = kept.upgrade().unwrap_or_else(|| {
            let namespace = Arc::clone(namespace);
            let device = AdminDevice { id: DeviceId::new(), namespace: Arc::clone(&namespace) };
            let device: Arc<dyn Device> = Arc::new(device);
            let number = namespace.begin_task();
            let make = move || {
                let (lane, is_stopping, is_over) = (None, false, false);
                let task = AdminTask { number, namespace, device, lane, is_stopping, is_over };
                Box::new(task) as Box<dyn BioTask>
            };
            Arc::new(AdminTaskHandle { _task: cx.all_cores().start(Box::new(make)) })
        });
        *kept = Arc::downgrade(&running);
        running
    }
}

/// Keeps the lane of an admin queue open.
struct AdminTask {
    /// Number of the task of this namespace.
    number: u64,
    namespace: Arc<RemoteNamespace>,
    device: Arc<dyn Device>,
    lane: Option<BioTaskLaneId>,
    is_stopping: bool,
    is_over: bool,
}

/// Pause between looks for open lanes when the program ends.
const STOP_PAUSE: Nanos = Nanos::from_millis(10);

impl AdminTask {
    fn open_lane(&mut self, cx: &mut dyn BioTaskCx) {
        if self.lane.is_none() {
            // A core without a ring has refused the lane of the device before.
            self.lane = cx.open(&self.device).ok();
        }
    }
}

impl BioTask for AdminTask {
    fn turn(&mut self, cx: &mut dyn BioTaskCx) {
        if self.is_stopping {
            return self.stop(cx);
        }
        self.open_lane(cx);
    }

    fn complete(&mut self, done: &mut Batch, _cx: &mut dyn BioTaskCx) {
        done.clear();
    }

    /// The end of the program stops the task while lanes still have requests: they need the
    /// association.
    fn stop(&mut self, cx: &mut dyn BioTaskCx) {
        self.is_stopping = true;
        if self.namespace.open_lanes() > 0 {
            // Their requests may wait for the first connection.
            self.open_lane(cx);
            return cx.wake_at(cx.now() + STOP_PAUSE);
        }
        if !self.is_over {
            self.namespace.end_task(self.number);
        }
        self.is_over = true;
        if let Some(lane) = self.lane.take() {
            cx.close(lane);
        }
    }

    fn is_over(&self) -> bool {
        self.is_over
    }

    /// The end of a core waits for a stopped task, which waits for the lanes of other cores.
    /// Without the association, their writes would be held until the controller must have ended
    /// them.
    fn own_work(&self) -> OwnWork {
        if self.is_stopping && !self.is_over { OwnWork::Required } else { OwnWork::Background }
    }
}

/// The device of which the task opens a lane.
struct AdminDevice {
    id: DeviceId,
    namespace: Arc<RemoteNamespace>,
}

impl Device for AdminDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        let no_ring = || DeviceControlError::new(EOPNOTSUPP, "an NVMe controller needs an io_uring");
        let ring = Ring::of(cx).ok_or_else(no_ring)?;
        Ok(Box::new(AdminLane::new(ring, &self.namespace, cx)))
    }

    fn limits(&self) -> Limits {
        self.namespace.limits()
    }
}

/// The connection of an admin queue.
struct AdminConnection {
    stream: StreamConnection,
    /// `None` until the socket is connected.
    admin: Option<HostAdmin>,
    address_index: usize,
    address: ServerAddress,
    /// Number of the association.
    number: u64,
    is_ready: bool,
    /// Time at which the controller must be set up.
    deadline: Nanos,
    /// Time at which the status of a controller that was not ready is asked for again.
    ask_status_at: Nanos,
    /// Time of the last byte from the controller, and of the last Keep Alive.
    last_heard: Nanos,
    keep_alive_sent: Nanos,
    keep_alive_at: Nanos,
    is_keep_alive_pending: bool,
    timer: PauseAwareReplyDeadline,
    resets: ResetsThroughController,
    transition: AnaTransition,
    /// The longest time of the ANA state `change` (ANATT).
    transition_max: Nanos,
}

struct AdminLane {
    ring: Ring,
    namespace: Arc<RemoteNamespace>,
    connection: Option<AdminConnection>,
    pool: BufPool,
    finished: Vec<RingCompletion>,
    wait_handle: WaitQueueSubscription,
    tries: usize,
    next_try: Nanos,
    back_off: Nanos,
    /// Values of counters of the namespace when they were last handled.
    made: u64,
    doubts: u64,
}

/// The number of the next association of the process.
fn next_number() -> u64 {
    use std::sync::atomic::AtomicU64;
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Relaxed)
}

impl AdminLane {
    fn new(ring: Ring, namespace: &Arc<RemoteNamespace>, cx: &mut Cx<'_>) -> AdminLane {
        let mut lane = AdminLane {
            ring,
            namespace: Arc::clone(namespace),
            connection: None,
            pool: BufPool::new(KEEP),
            finished: Vec::new(),
            wait_handle: namespace.wait_queue.subscribe(cx),
            tries: 0,
            next_try: Nanos(0),
            back_off: BACK_OFF,
            made: 0,
            doubts: 0,
        };
        lane.connect(cx);
        lane
    }

    #[cold]
    fn connect(&mut self, cx: &mut Cx<'_>) {
        let addresses = &self.namespace.addresses;
        let address_index = self.tries % addresses.len();
        let address = &addresses[address_index];
        self.tries += 1;
        let socket = match self.namespace.sockets.open(address) {
            Ok(socket) => socket,
            Err(error) => {
                let loss = DisconnectReason::new(DisconnectKind::LocalError, error.to_string());
                return self.handle_loss(&loss, cx);
            }
        };
        let (now, kato) = (cx.now(), self.namespace.uri.kato);
        let timeout = self.namespace.deadline.unwrap_or(HANDSHAKE_TIMEOUT).min(HANDSHAKE_TIMEOUT);
        self.connection = Some(AdminConnection {
            stream: StreamConnection::connect(&self.ring, socket, cx),
            admin: None,
            address_index,
            address: address.clone(),
            number: next_number(),
            is_ready: false,
            deadline: now + timeout,
            ask_status_at: Nanos::NEVER,
            last_heard: now,
            keep_alive_sent: now,
            keep_alive_at: Nanos::NEVER,
            is_keep_alive_pending: false,
            timer: PauseAwareReplyDeadline::new(kato),
            resets: ResetsThroughController::default(),
            transition: AnaTransition::default(),
            transition_max: Nanos(0),
        });
    }

    /// Ends the connection, and the association if there is one.
    #[cold]
    fn handle_loss(&mut self, loss: &DisconnectReason, cx: &mut Cx<'_>) {
        let connection = self.connection.take();
        self.made = self.namespace.reachability.connections_made();
        self.next_try = cx.now() + self.back_off;
        self.back_off = (self.back_off + self.back_off).min(BACK_OFF_MAX);
        if let Some(connection) = &connection {
            self.namespace.sockets.reset(connection.stream.socket());
        }
        match connection {
            Some(AdminConnection { is_ready: true, number, address_index, .. }) => {
                // The address that answered is tried first.
                self.tries = address_index;
                self.namespace.end_association(number, &loss.why);
            }
            _ => self.namespace.connecting_failed(&loss.why),
        }
    }

    /// Handles the completed operations of the ring.
    fn collect(&mut self, cx: &mut Cx<'_>) {
        let Some(connection) = &mut self.connection else { return };
        let mut finished = std::mem::take(&mut self.finished);
        connection.stream.take(&mut finished, cx);
        for done in finished.drain(..) {
            if let Err(loss) = self.operation_done(done, cx) {
                self.handle_loss(&loss, cx);
            }
        }
        self.finished = finished;
    }

    fn operation_done(&mut self, done: RingCompletion, cx: &mut Cx<'_>) -> Result<(), DisconnectReason> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        match connection.stream.finished(done, &mut self.pool, cx)? {
            StreamEvent::Connected => {
                connection.admin = Some(HostAdmin::new(self.namespace.options.clone()));
                connection.stream.receive(None, &mut self.pool);
            }
            StreamEvent::Sent(buf) => self.pool.put(buf),
            StreamEvent::Bytes(buf, n) => {
                let now = cx.now();
                connection.last_heard = now;
                let (namespace, connection) = (&self.namespace, connection);
                let handled = connection.take_events(namespace, &buf[..n], now);
                handled.map_err(|why| DisconnectReason::new(DisconnectKind::ProtocolError, why))?;
                if connection.is_ready {
                    self.back_off = BACK_OFF;
                    connection.store_last_heard(namespace);
                }
                connection.stream.receive(Some(buf), &mut self.pool);
            }
            StreamEvent::Nothing => {}
        }
        Ok(())
    }

    /// Does what is due at this time.
    fn look_at_times(&mut self, cx: &mut Cx<'_>) {
        let now = cx.now();
        let Some(connection) = &mut self.connection else {
            let is_told = self.namespace.reachability.connections_made() != self.made;
            if now >= self.next_try || is_told {
                return self.connect(cx);
            }
            return cx.wake_at(self.next_try);
        };
        let kato = self.namespace.uri.kato;
        if !connection.is_ready {
            if now >= connection.deadline {
                let why = "the controller does not answer";
                return self.handle_loss(&DisconnectReason::new(DisconnectKind::TimedOut, why), cx);
            }
            if now >= connection.ask_status_at {
                connection.ask_status_at = Nanos::NEVER;
                connection.admin.iter_mut().for_each(HostAdmin::ask_status);
            }
            return cx.wake_at(connection.deadline.min(connection.ask_status_at));
        }
        if !self.namespace.is_live(connection.number) {
            let why = "the association has ended";
            return self.handle_loss(&DisconnectReason::new(DisconnectKind::LocalError, why), cx);
        }
        cx.wake_at(connection.look_at_resets(&self.namespace, now));
        let doubts = self.namespace.ana_doubts();
        if std::mem::replace(&mut self.doubts, doubts) != doubts {
            connection.admin.iter_mut().for_each(HostAdmin::refresh_ana);
        }
        match connection.transition.look(self.namespace.ana(), connection.transition_max, now) {
            AnaTransitionStep::Wait(until) => cx.wake_at(until),
            AnaTransitionStep::ReadLog(until) => {
                connection.admin.iter_mut().for_each(HostAdmin::refresh_ana);
                cx.wake_at(until);
            }
            AnaTransitionStep::TooLong => {
                let why = "the ANA state was change for twice as long as the controller has promised (ANATT)";
                return self.handle_loss(&DisconnectReason::new(DisconnectKind::TimedOut, why), cx);
            }
        }
        if now >= connection.keep_alive_at
            && let Some(admin) = &mut connection.admin
            && admin.keep_alive()
        {
            connection.is_keep_alive_pending = true;
            connection.keep_alive_sent = now;
        }
        if connection.is_keep_alive_pending {
            let sent = connection.keep_alive_sent;
            match connection.timer.check(sent, sent, now) {
                UnansweredRequestState::Pending(due) => cx.wake_at(due),
                UnansweredRequestState::Silent(_) | UnansweredRequestState::Starved(_) => {
                    let why = format!("a Keep Alive was not answered for {}", TimeSpan(kato));
                    self.handle_loss(&DisconnectReason::new(DisconnectKind::TimedOut, why), cx);
                }
            }
        } else {
            cx.wake_at(connection.keep_alive_at);
        }
    }

    fn send(&mut self) {
        let Some(AdminConnection { stream, admin: Some(admin), .. }) = &mut self.connection else { return };
        stream.raw.extend(admin.take_out());
        if stream.may_send() {
            stream.send_raw();
        }
    }
}

impl AdminConnection {
    /// Handles received bytes.
    fn take_events(
        &mut self,
        namespace: &RemoteNamespace,
        mut input: &[u8],
        now: Nanos,
    ) -> Result<(), String> {
        let half = Nanos(namespace.uri.kato.0 / 2);
        while let Some(admin) = &mut self.admin
            && let Some(event) = admin.take(&mut input).map_err(|error| error.to_string())?
        {
            match event {
                AdminEvent::Ready(facts) => {
                    namespace.accept(self.number, &self.address, &facts, now)?;
                    self.is_ready = true;
                    self.transition_max = facts.controller.ana_transition_max;
                    self.keep_alive_at = now + half;
                }
                AdminEvent::NotReady => self.ask_status_at = now + READY_POLL,
                AdminEvent::Namespace(facts) => {
                    if facts.id != namespace.facts().id {
                        return Err("its namespace has become another one".into());
                    }
                    namespace.set_namespace(&facts);
                }
                AdminEvent::Ana(state) => namespace.set_ana(state),
                AdminEvent::ResetEnded(instance, outcome) => {
                    self.reset_ended(instance, outcome, namespace);
                }
                AdminEvent::Alive => {
                    self.is_keep_alive_pending = false;
                    self.keep_alive_at = self.keep_alive_sent + half;
                }
            }
        }
        Ok(())
    }

    /// Publishes the time of the last byte.
    fn store_last_heard(&self, namespace: &RemoteNamespace) {
        if let super::remote_namespace::AssociationState::Live(live) = namespace.state()
            && live.number == self.number
        {
            live.last_heard.store(self.last_heard.0, Relaxed);
        }
    }
}

impl Lane for AdminLane {
    fn submit(&mut self, batch: &mut Batch, _cx: &mut Cx<'_>) {
        // The task submits nothing.
        batch.iter_mut().for_each(|bio| bio.end_with(Status::NotSupp));
    }

    fn poll(&mut self, _done: &mut Batch, cx: &mut Cx<'_>) {
        let seen = self.wait_handle.epoch();
        self.collect(cx);
        self.look_at_times(cx);
        self.send();
        self.wait_handle.wait(seen, cx);
    }

    fn own_work(&self) -> OwnWork {
        OwnWork::Background
    }
}
