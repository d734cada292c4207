//! The data path of a namespace: turns requests into commands on an I/O queue, and completions into
//! results.

use super::admin_lane::AdminTaskHandle;
use super::command_send_queue::CommandSendQueue;
use super::connection::{QueueConnection, QueueStage};
use super::held_writes::HeldWrites;
use super::remote_namespace::{AssociationState, QueueNumber, RemoteNamespace};
use super::request::{CommandParams, NvmeRequest, status_without_controller};
use crate::stream::{BACK_OFF, BACK_OFF_MAX, DisconnectKind, DisconnectReason, StreamEvent, discard_unsent};
use slab::Slab;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use udm_core::{
    Batch, Bio, BufPool, Cx, DrainMode, Lane, Limits, Nanos, OwnWork, PauseAwareReplyDeadline, Status,
    UnansweredRequestState, WaitQueueSubscription, WakeEpoch, move_batch,
};
use udm_runtime::{Ring, RingCompletion};
use udm_wire::nvme::NvmeStatus;
use udm_wire::nvme::host::{Disposition, HostEvent, IoQueueSetup, decide, is_ana_status};
use udm_wire::uri::TimeSpan;

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
            back_off: BACK_OFF,
            next_check: Nanos(0),
            last_reply_at: Nanos(0),
            deadline_timer: namespace.deadline.map(PauseAwareReplyDeadline::new),
            held: HeldWrites::default(),
            changes: namespace.changes(),
            state: namespace.state(),
            wait_handle: namespace.wait_queue.subscribe(cx),
            registered: None,
            namespace: Arc::clone(namespace),
            _task: task,
        }
    }

    /// Connects the queue, if the association lives and it is time.
    #[cold]
    fn connect(&mut self, cx: &mut Cx<'_>) {
        let AssociationState::Live(association) = &self.state else { return };
        if cx.now() < self.next_try {
            return;
        }
        let (association, deadline) = (Arc::clone(association), self.namespace.deadline);
        self.params.capsule_data_max = association.controller.capsule_data_max;
        match QueueConnection::begin(&self.ring, association, deadline, cx) {
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
                (self.next_try, self.back_off) = (Nanos(0), BACK_OFF);
                if self.connection.is_none() && !self.waiting.is_empty() {
                    self.connect(cx);
                }
            }
            None if matches!(self.state, AssociationState::Down) => self.fail_waiting(Status::Transport),
            None => {}
        }
    }

    /// Handles the loss of the connection. Its association ends, except if the controller refused
    /// the queue.
    #[cold]
    fn handle_loss(&mut self, loss: &DisconnectReason, cx: &mut Cx<'_>) {
        let is_refusal = loss.end == DisconnectKind::ShuttingDown;
        let number = match &self.state {
            AssociationState::Live(association) => Some(association.number),
            AssociationState::Connecting | AssociationState::Down => None,
        };
        let own = self.connection.as_ref().map(|connection| connection.association.number).or(number);
        let status = if loss.end == DisconnectKind::TimedOut { Status::Timeout } else { Status::Transport };
        self.fail_requests(status, cx);
        if is_refusal {
            self.next_try = cx.now() + self.back_off;
            self.back_off = (self.back_off + self.back_off).min(BACK_OFF_MAX);
            self.namespace.mark_down(&loss.why);
        } else if let Some(own) = own {
            self.namespace.end_association(own, &loss.why);
        }
    }

    fn fail_waiting(&mut self, status: Status) {
        for mut bio in self.waiting.drain(..) {
            bio.end_with(status);
            self.ready.push(bio);
        }
    }

    /// Drops the connection. All requests fail, except writes that the controller may still
    /// execute.
    #[cold]
    fn fail_requests(&mut self, status: Status, cx: &mut Cx<'_>) {
        let now = cx.now();
        self.fail_waiting(status);
        let mut slots = std::mem::take(&mut self.slots);
        for key in self.send_queue.take_unsent() {
            let mut bio = slots.remove(key).bio;
            bio.end_with(status);
            self.ready.push(bio);
        }
        for (_, key) in self.delayed.drain(..) {
            let mut bio = slots.remove(key).bio;
            bio.end_with(status);
            self.ready.push(bio);
        }
        let mut held = Vec::new();
        for mut slot in slots.drain() {
            if slot.may_still_apply() {
                held.push(slot.bio);
                continue;
            }
            slot.bio.end_with(status);
            self.ready.push(slot.bio);
        }
        if let Some(connection) = self.connection.take() {
            // Discards unsent data: it could arrive after the wait has ended.
            discard_unsent(connection.stream.socket());
            if !held.is_empty() {
                let association = &connection.association;
                let heard = Nanos(association.last_heard.load(Relaxed)).max(self.last_reply_at);
                let until = association.fence.ends_at(heard, now);
                let (uri, wait) = (self.namespace.uri.plain(), until.0.saturating_sub(now.0));
                let wait = TimeSpan(Nanos::from_millis(wait.div_ceil(1_000_000)));
                tracing::warn!("{uri}: {} unanswered writes wait for {wait}", held.len());
                self.held.add(held, until, &self.namespace);
            }
        }
        // The caller may have polled already.
        cx.wake_now();
    }

    /// Abandons the connection if its oldest request is overdue. The check is rare: later requests
    /// are due later, and every received byte moves the time of all.
    fn look_for_silence(&mut self, cx: &mut Cx<'_>) {
        if self.deadline_timer.is_none() || self.slots.is_empty() {
            return;
        }
        if cx.now() < self.next_check {
            return cx.wake_at(self.next_check);
        }
        let Some(oldest) = self.slots.iter().map(|(_, slot)| slot.since).min() else { return };
        let (now, Some(deadline_timer)) = (cx.now(), &mut self.deadline_timer) else { return };
        let why = match deadline_timer.check(oldest, self.last_reply_at, now) {
            UnansweredRequestState::Pending(due) => {
                self.next_check = due.max(now + Nanos(1));
                return cx.wake_at(self.next_check);
            }
            UnansweredRequestState::Silent(time) => format!("no answer for {}", TimeSpan(time)),
            UnansweredRequestState::Starved(time) => {
                format!("others are answered, and one request is not for {}", TimeSpan(time))
            }
        };
        self.handle_loss(&DisconnectReason::new(DisconnectKind::TimedOut, why), cx);
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
                if let Some(status) = status_without_controller(&bio, &self.limits) {
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
            (self.next_try, self.back_off) = (Nanos(0), BACK_OFF);
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
                        self.handle_error(key, status, cx);
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
    fn handle_error(&mut self, key: usize, status: NvmeStatus, cx: &mut Cx<'_>) {
        if is_ana_status(status) {
            self.namespace.doubt_ana();
        }
        let Some(connection) = &self.connection else { return };
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
        }
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
        let may_come = self.connection.is_some() || matches!(self.state, AssociationState::Connecting);
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
