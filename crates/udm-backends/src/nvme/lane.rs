//! The data path of a namespace: turns requests into commands on an I/O queue, and completions into
//! results.

mod loss;

use super::admin_lane::AdminTaskHandle;
use super::command_send_queue::CommandSendQueue;
use super::connection::{QueueConnection, QueueStage};
use super::held_writes::HeldWrites;
use super::remote_namespace::{AssociationState, LaneCountGuard, QueueNumber, RemoteNamespace};
use super::request::{CommandParams, NvmeRequest};
use crate::stream::{DisconnectKind, DisconnectReason, StreamEvent};
use loss::REFUSED_BACK_OFF;
use slab::Slab;
use std::collections::VecDeque;
use std::sync::Arc;
use udm_core::{
    Batch, Bio, BufPool, Cx, DrainMode, Lane, Limits, Nanos, OwnWork, PauseAwareReplyDeadline, Status,
    WaitQueueSubscription, WakeEpoch, move_batch,
};
use udm_runtime::{Ring, RingCompletion};
use udm_wire::nvme::NvmeStatus;
use udm_wire::nvme::host::{Disposition, HostEvent, IoQueueSetup, decide, is_ana_status};

/// The most entries of a queue that a lane asks for.
const ENTRIES_MAX: u16 = 1024;

/// Bytes of buffers that a lane keeps for reuse.
const KEEP: usize = 1 << 20;

/// The lane of a namespace on one core.
pub(super) struct NvmeLane {
    ring: Ring,
    namespace: Arc<RemoteNamespace>,
    number: QueueNumber,
    limits: Limits,
    params: CommandParams,
    connection: Option<QueueConnection>,
    slots: Slab<NvmeRequest>,
    /// Requests that wait for the connection to be ready, or for a slot.
    waiting: VecDeque<Box<Bio>>,
    send_queue: CommandSendQueue,
    /// Commands that are sent again at a time.
    delayed: Vec<(Nanos, usize)>,
    ready: Batch,
    pool: BufPool,
    finished: Vec<RingCompletion>,
    /// Earliest time of the next attempt to connect a queue, and the back-off after its failure.
    next_try: Nanos,
    back_off: Nanos,
    /// Since when the controller refuses the queue.
    refused_since: Option<Nanos>,
    /// Earliest time at which the deadline of a request can have passed.
    next_check: Nanos,
    /// Time at which data last arrived.
    last_reply_at: Nanos,
    /// Deadline of requests, if there is one.
    deadline_timer: Option<PauseAwareReplyDeadline>,
    held: HeldWrites,
    /// Number of changes of the association that the lane has seen, and its state then.
    changes: u64,
    state: AssociationState,
    wait_handle: WaitQueueSubscription,
    /// The epoch at which the lane registered for the next wake.
    registered: Option<WakeEpoch>,
    _count: LaneCountGuard,
    _task: Arc<AdminTaskHandle>,
}

impl NvmeLane {
    pub(super) fn new(
        ring: Ring,
        namespace: &Arc<RemoteNamespace>,
        number: QueueNumber,
        task: Arc<AdminTaskHandle>,
        cx: &mut Cx<'_>,
    ) -> NvmeLane {
        NvmeLane {
            ring,
            limits: namespace.limits(),
            params: CommandParams::new(namespace.uri.nsid, namespace.facts()),
            number,
            connection: None,
            slots: Slab::new(),
            waiting: VecDeque::new(),
            send_queue: CommandSendQueue::default(),
            delayed: Vec::new(),
            ready: Batch::new(),
            pool: BufPool::new(KEEP),
            finished: Vec::new(),
            next_try: Nanos(0),
            back_off: REFUSED_BACK_OFF,
            refused_since: None,
            next_check: Nanos(0),
            last_reply_at: Nanos(0),
            deadline_timer: namespace.deadline.map(PauseAwareReplyDeadline::new),
            held: HeldWrites::default(),
            changes: namespace.changes(),
            state: namespace.state(),
            wait_handle: namespace.wait_queue.subscribe(cx),
            registered: None,
            _count: namespace.count_lane(),
            namespace: Arc::clone(namespace),
            _task: task,
        }
    }

    /// Connects the queue, if the association lives and it is time.
    #[cold]
    fn connect(&mut self, cx: &mut Cx<'_>) {
        let AssociationState::Live(association) = &self.state else { return };
        if cx.now() < self.next_try {
            return cx.wake_at(self.next_try);
        }
        let association = Arc::clone(association);
        self.params.capsule_data_max = association.controller.capsule_data_max;
        match QueueConnection::begin(&self.ring, &self.namespace, association, cx) {
            Ok(connection) => self.connection = Some(connection),
            Err(loss) => self.handle_loss(&loss, cx),
        }
    }

    /// Follows changes of the association that other cores have made.
    fn follow_association(&mut self, cx: &mut Cx<'_>) {
        let epoch = self.wait_handle.epoch();
        if self.registered != Some(epoch) {
            self.registered = Some(epoch);
            self.wait_handle.wait(epoch, cx);
        }
        let changes = self.namespace.changes();
        if self.changes != changes {
            self.changes = changes;
            self.association_changed(cx);
        }
    }

    #[cold]
    fn association_changed(&mut self, cx: &mut Cx<'_>) {
        self.state = self.namespace.state();
        let live = match &self.state {
            AssociationState::Live(association) => Some(association.number),
            AssociationState::Connecting | AssociationState::Down => None,
        };
        let own = self.connection.as_ref().map(|connection| connection.association.number);
        if own.is_some() && own != live {
            self.fail_requests(Status::Transport, cx);
        }
        match live {
            Some(_) => {
                self.forget_refusals();
                if self.connection.is_none() && !self.waiting.is_empty() {
                    self.connect(cx);
                }
            }
            None if matches!(self.state, AssociationState::Down) => self.fail_waiting(Status::Transport),
            None => {}
        }
    }

    /// Sends waiting requests, if no send is in flight.
    fn send(&mut self, cx: &Cx<'_>) {
        let Some(connection) = &mut self.connection else { return };
        let entries = usize::from(queue_entries(connection)) - 1;
        let (stream, stage) = (&mut connection.stream, &mut connection.stage);
        let QueueStage::Ready(queue) = stage else {
            if stream.may_send() {
                stream.send_raw();
            }
            return;
        };
        if !self.waiting.is_empty() {
            // The time is needed only for a deadline.
            let now = self.namespace.deadline.map_or(Nanos(0), |_| cx.now());
            while self.slots.len() < entries {
                let Some(mut bio) = self.waiting.pop_front() else { break };
                if let Some(status) = crate::status_without_server(&bio, &self.limits) {
                    bio.end_with(status);
                    self.ready.push(bio);
                    continue;
                }
                let key = self.slots.insert(NvmeRequest::new(bio, self.limits.write_cache, now));
                self.send_queue.push_command(key);
            }
        }
        // If more waits to be sent, the lane must be woken when the current send completes.
        if !stream.may_send() {
            return stream.set_defer_sends(self.send_queue.is_empty());
        }
        if self.send_queue.is_empty() {
            return;
        }
        let buf = self.send_queue.gather(&self.slots, &self.params, queue, &mut self.pool);
        stream.set_defer_sends(self.send_queue.is_empty());
        stream.send(buf);
    }

    /// Handles the completed operations of the ring.
    fn collect(&mut self, cx: &mut Cx<'_>) {
        let Some(connection) = &mut self.connection else { return };
        let mut finished = std::mem::take(&mut self.finished);
        connection.stream.take(&mut finished, cx);
        for done in finished.drain(..) {
            // Completions of a connection that was lost before are dropped.
            if let Err(loss) = self.operation_done(done, cx) {
                self.handle_loss(&loss, cx);
                break;
            }
        }
        finished.clear();
        self.finished = finished;
    }

    fn operation_done(&mut self, done: RingCompletion, cx: &mut Cx<'_>) -> Result<(), DisconnectReason> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        match connection.stream.finished(done, &mut self.pool, cx)? {
            StreamEvent::Connected => {
                let entries = queue_entries(connection);
                let (controller, options) = (connection.association.controller.id, &self.namespace.options);
                let (setup, out) = IoQueueSetup::begin(options, controller, self.number.number, entries);
                connection.stage = QueueStage::Setup(Box::new(setup));
                connection.stream.raw.extend(out);
                connection.stream.receive(None, &mut self.pool);
            }
            StreamEvent::Sent(buf) => self.pool.put(buf),
            StreamEvent::Bytes(buf, n) => {
                self.last_reply_at = cx.now();
                cx.set_cpu_budget(cx.cpu_budget().saturating_sub(n as u64));
                self.take_bytes(&buf[..n], cx)?;
                if let Some(connection) = &self.connection {
                    connection.stream.receive(Some(buf), &mut self.pool);
                }
            }
            StreamEvent::Nothing => {}
        }
        Ok(())
    }

    /// Handles received bytes.
    fn take_bytes(&mut self, mut input: &[u8], cx: &mut Cx<'_>) -> Result<(), DisconnectReason> {
        let violation = |why: String| DisconnectReason::new(DisconnectKind::ProtocolError, why);
        let Some(connection) = &mut self.connection else { return Ok(()) };
        if let QueueStage::Setup(setup) = &mut connection.stage {
            let connected = setup.take(&self.namespace.options, &mut input, &mut connection.stream.raw);
            let connected = connected.map_err(|error| match error {
                // The queue of an old lane may still be connected: only this lane tries again.
                udm_wire::nvme::host::HostError::Refused { .. } => {
                    DisconnectReason::new(DisconnectKind::ShuttingDown, error.to_string())
                }
                error => violation(error.to_string()),
            })?;
            let Some(queue) = connected else { return Ok(()) };
            connection.stage = QueueStage::Ready(Box::new(queue));
            self.forget_refusals();
        }
        while let Some(connection) = &mut self.connection
            && let QueueStage::Ready(queue) = &mut connection.stage
            && let Some(event) = queue.take(&mut input).map_err(|error| violation(error.to_string()))?
        {
            match event {
                HostEvent::Data { id, at, bytes } => {
                    self.slots[usize::from(id)].bio.data.copy_from_at(at as usize, bytes);
                }
                HostEvent::ReadyToTransfer(data) => self.send_queue.push_data(data),
                HostEvent::Completed { id, status, .. } => {
                    let key = usize::from(id);
                    if self.send_queue.is_sending(key) {
                        return Err(violation("a completion before all data was sent".into()));
                    }
                    if status.is_ok() {
                        self.complete(key, Status::Ok);
                    } else {
                        self.handle_error(key, status, cx)?;
                    }
                }
                HostEvent::Initialized => {}
            }
        }
        Ok(())
    }

    /// Handles the result of the current command of a slot.
    fn complete(&mut self, key: usize, status: Status) {
        let slot = &mut self.slots[key];
        if slot.flushing && status.is_ok() {
            (slot.flushing, slot.retries) = (false, 0);
            return self.send_queue.push_command(key);
        }
        let mut bio = self.slots.remove(key).bio;
        bio.end_with(status);
        self.ready.push(bio);
    }

    #[cold]
    fn handle_error(
        &mut self,
        key: usize,
        status: NvmeStatus,
        cx: &mut Cx<'_>,
    ) -> Result<(), DisconnectReason> {
        if is_ana_status(status) {
            self.namespace.doubt_ana();
        }
        let Some(connection) = &self.connection else { return Ok(()) };
        let slot = &mut self.slots[key];
        match decide(status, slot.retries, &connection.association.controller.retry_delays) {
            Disposition::Complete(status) => self.complete(key, status),
            Disposition::Retry(Nanos(0)) => {
                slot.retries += 1;
                self.send_queue.push_command(key);
            }
            Disposition::Retry(delay) => {
                slot.retries += 1;
                self.delayed.push((cx.now() + delay, key));
            }
            Disposition::Reconnect => {
                self.complete(key, Status::Transport);
                let why = "the controller asks for authentication again";
                return Err(DisconnectReason::new(DisconnectKind::ProtocolError, why));
            }
        }
        Ok(())
    }

    /// Sends commands again whose delay has passed.
    #[cold]
    fn repeat_delayed(&mut self, cx: &mut Cx<'_>) {
        let now = cx.now();
        for (_, key) in self.delayed.extract_if(.., |(at, _)| *at <= now) {
            self.send_queue.push_command(key);
        }
        if let Some((next, _)) = self.delayed.iter().min() {
            cx.wake_at(*next);
        }
    }
}

/// Number of entries of the queue of a connection.
fn queue_entries(connection: &QueueConnection) -> u16 {
    connection.association.controller.queue_entries.min(ENTRIES_MAX)
}

impl Lane for NvmeLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.limits.size = self.namespace.size();
        self.follow_association(cx);
        let is_accessible = self.namespace.is_accessible();
        if self.connection.is_none() && is_accessible {
            self.connect(cx);
        }
        let may_come = match &self.state {
            AssociationState::Connecting => true,
            AssociationState::Live(_) => self.connection.is_some() || self.refused_since.is_some(),
            AssociationState::Down => self.connection.is_some(),
        };
        if is_accessible && may_come {
            self.waiting.extend(batch.drain(..));
            self.send(cx);
        } else {
            for mut bio in batch.drain(..) {
                bio.end_with(Status::Transport);
                self.ready.push(bio);
            }
        }
        if !self.ready.is_empty() {
            cx.wake_now();
        }
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        self.collect(cx);
        self.follow_association(cx);
        if !self.delayed.is_empty() {
            self.repeat_delayed(cx);
        }
        if self.connection.is_none() && !self.waiting.is_empty() {
            self.connect(cx);
        }
        self.send(cx);
        self.look_for_silence(cx);
        if !self.held.is_empty() {
            let works = self.connection.as_ref().is_some_and(QueueConnection::is_ready);
            self.held.release(works, &self.namespace, &mut self.ready, cx);
        }
        if let Some(deadline) = self.connection.as_ref().and_then(QueueConnection::deadline) {
            if deadline <= cx.now() {
                let why = "the controller does not answer";
                self.handle_loss(&DisconnectReason::new(DisconnectKind::LocalError, why), cx);
            } else {
                cx.wake_at(deadline);
            }
        }
        move_batch(&mut self.ready, done);
    }

    fn drain(&mut self, how: DrainMode, back: &mut Batch, _cx: &mut Cx<'_>) {
        if how == DrainMode::NoFlush {
            back.extend(self.waiting.drain(..));
        }
    }

    fn held_writes(&self) -> usize {
        self.held.len()
    }

    /// The lane needs turns while it connects, so that a slow attempt is abandoned in time.
    fn own_work(&self) -> OwnWork {
        match self.connection.as_ref().and_then(QueueConnection::deadline) {
            Some(_) => OwnWork::Background,
            None => OwnWork::Idle,
        }
    }
}
