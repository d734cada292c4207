//! The data path of an NBD export: turns requests into bytes on a connection, and replies into
//! results.

use super::abandoned::{
    ABANDONED_MAX, AbandonedConnectionWithHeldWrites, LaneResourcesForAbandonedConnections,
};
use super::connection::{ConnectionStage, NbdClientConnection};
use super::remote_export::RemoteExport;
use super::request::{NbdRequest, status_from_nbd_error};
use super::send_queue::SendQueue;
use crate::stream::{BACK_OFF, BACK_OFF_MAX, DisconnectKind, DisconnectReason, StreamEvent};
use slab::Slab;
use std::collections::VecDeque;
use std::sync::Arc;
use udm_core::{
    Batch, Bio, BufPool, Cx, DrainMode, Lane, Limits, Nanos, OwnWork, PauseAwareReplyDeadline, Status,
    UnansweredRequestState, WaitQueueSubscription, move_batch,
};
use udm_runtime::{Ring, RingCompletion};
use udm_wire::nbd::ESHUTDOWN;
use udm_wire::nbd::client::{ReplyEvent, ReplyParser};
use udm_wire::uri::{ServerStoppedProof, TimeSpan};

/// Upper limit of requests in flight per lane: more than any server works on at a time.
const SLOTS: usize = 1024;

/// Bytes of buffers that a lane keeps for reuse.
const KEEP: usize = 1 << 20;

/// The lane of an export on one core, with its current and abandoned connections.
pub(super) struct NbdLane {
    ring: Ring,
    server: Arc<RemoteExport>,
    limits: Limits,
    connection: Option<NbdClientConnection>,
    slots: Slab<NbdRequest>,
    /// Requests that wait for the connection to be ready, or for a slot.
    waiting: VecDeque<Box<Bio>>,
    send_queue: SendQueue,
    ready: Batch,
    pool: BufPool,
    finished: Vec<RingCompletion>,
    over: Vec<usize>,
    /// Number of attempts to connect.
    tries: usize,
    /// Earliest time of the next attempt, and the back-off after its failure.
    next_try: Nanos,
    back_off: Nanos,
    /// Number of connections of the server when this lane last lost one.
    made: u64,
    /// Earliest time at which the deadline of a request can have passed.
    next_check: Nanos,
    /// Time at which data last arrived, if there is a deadline.
    last_reply_at: Nanos,
    /// Deadline of requests, if there is one.
    deadline_timer: Option<PauseAwareReplyDeadline>,
    /// Abandoned connections with writes that the server may still execute.
    abandoned: Vec<AbandonedConnectionWithHeldWrites>,
    wait_handle: WaitQueueSubscription,
}

impl NbdLane {
    pub(super) fn new(ring: Ring, server: &Arc<RemoteExport>, cx: &mut Cx<'_>) -> NbdLane {
        let mut lane = NbdLane {
            ring,
            limits: server.limits(),
            server: Arc::clone(server),
            connection: None,
            slots: Slab::new(),
            waiting: VecDeque::new(),
            send_queue: SendQueue::default(),
            ready: Batch::new(),
            pool: BufPool::new(KEEP),
            finished: Vec::new(),
            over: Vec::new(),
            tries: 0,
            next_try: Nanos(0),
            back_off: BACK_OFF,
            made: 0,
            next_check: Nanos(0),
            last_reply_at: Nanos(0),
            deadline_timer: server.deadline.map(PauseAwareReplyDeadline::new),
            abandoned: Vec::new(),
            wait_handle: server.fencing.wait_queue().subscribe(cx),
        };
        lane.connect(cx);
        lane
    }

    #[cold]
    fn connect(&mut self, cx: &mut Cx<'_>) {
        match NbdClientConnection::begin(&self.ring, &self.server, self.tries, cx) {
            Ok(connection) => self.connection = Some(connection),
            Err(loss) => self.handle_loss(loss, cx),
        }
        self.tries += 1;
    }

    /// Returns whether the lane may connect now.
    #[cold]
    fn may_connect(&self, cx: &Cx<'_>) -> bool {
        let server = &self.server;
        let is_fencing =
            matches!(server.uri.silence.fence, ServerStoppedProof::Exec(_)) && server.fencing.is_running();
        let soon = cx.now() < self.next_try && server.connections_made() == self.made;
        !soon && !is_fencing && self.abandoned.len() < ABANDONED_MAX
    }

    /// Handles the loss of the connection: all its requests fail, except writes that the server may
    /// still execute.
    #[cold]
    fn handle_loss(&mut self, DisconnectReason { mut why, end }: DisconnectReason, cx: &mut Cx<'_>) {
        let now = cx.now();
        let reason = why.clone();
        self.made = self.server.connections_made();
        self.next_try = now + self.back_off;
        self.back_off = (self.back_off + self.back_off).min(BACK_OFF_MAX);
        let status = if end == DisconnectKind::TimedOut { Status::Timeout } else { Status::Transport };
        let mut over: Vec<_> = self.waiting.drain(..).map(|bio| (bio, status)).collect();
        let (connection, mut slots) = (self.connection.take(), std::mem::take(&mut self.slots));
        let mut send_queue = std::mem::take(&mut self.send_queue);
        over.extend(send_queue.take_unsent().map(|key| (slots.remove(key).bio, status)));
        let runs = connection.as_ref().map_or(0, |connection| connection.fenced);
        let fence = &self.server.uri.silence.fence;
        let is_dead = end == DisconnectKind::Closed && *fence == ServerStoppedProof::Closed
            || self.server.fencing.covers(runs);
        let ends = |(key, slot): (usize, &NbdRequest)| (is_dead || !slot.may_still_apply()).then_some(key);
        for key in slots.iter().filter_map(ends).collect::<Vec<_>>() {
            let slot = slots.remove(key);
            over.push((slot.bio, slot.early.unwrap_or(status)));
        }
        for (mut bio, status) in over {
            bio.end_with(status);
            self.ready.push(bio);
        }
        send_queue.keep_only(&slots);
        if !slots.is_empty() {
            why += &format!(": {} writes wait until {}", slots.len(), self.server.fencing.until(fence));
            let (abandoned, mut resources) = self.split_resources();
            abandoned.push(AbandonedConnectionWithHeldWrites::new(
                connection,
                end,
                slots,
                send_queue,
                (runs, now),
                &mut resources,
            ));
            // The abandoned connection needs a first poll.
            cx.wake_now();
        }
        self.server.mark_down(&reason, &why);
    }

    /// Returns the abandoned connections, and the lane's resources that they use.
    fn split_resources(
        &mut self,
    ) -> (&mut Vec<AbandonedConnectionWithHeldWrites>, LaneResourcesForAbandonedConnections<'_>) {
        let resources = LaneResourcesForAbandonedConnections {
            server: &self.server,
            wait_handle: &self.wait_handle,
            pool: &mut self.pool,
            finished: &mut self.finished,
            over: &mut self.over,
            ready: &mut self.ready,
            works: self.connection.as_ref().is_some_and(NbdClientConnection::is_ready),
        };
        (&mut self.abandoned, resources)
    }

    /// Polls the abandoned connections.
    #[cold]
    fn poll_abandoned(&mut self, cx: &mut Cx<'_>) {
        let (abandoned, mut resources) = self.split_resources();
        abandoned.iter_mut().for_each(|one| one.poll(&mut resources, cx));
        let answered = abandoned.iter().any(AbandonedConnectionWithHeldWrites::is_answered);
        abandoned.retain(|one| !one.is_over());
        if answered {
            // The server answers again, so the back-off ends.
            (self.next_try, self.back_off) = (cx.now(), BACK_OFF);
        }
    }

    /// Abandons the connection if its oldest request is overdue. The check is rare: later requests
    /// are due later, and every received byte moves the time of all.
    fn look_for_silence(&mut self, cx: &mut Cx<'_>) {
        if self.deadline_timer.is_none() {
            return;
        }
        let Some(oldest) = self.oldest(cx) else { return };
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
        self.handle_loss(DisconnectReason::new(DisconnectKind::TimedOut, why), cx);
    }

    /// Returns the time of the oldest request; `None` if no request can be overdue yet.
    fn oldest(&self, cx: &mut Cx<'_>) -> Option<Nanos> {
        if self.slots.is_empty() {
            return None;
        }
        if cx.now() < self.next_check {
            cx.wake_at(self.next_check);
            return None;
        }
        self.slots.iter().map(|(_, slot)| slot.since).min()
    }

    /// Sends waiting requests, if no send is in flight.
    fn send(&mut self, cx: &Cx<'_>) {
        let Some(connection) = &mut self.connection else { return };
        if connection.is_ready() && !self.waiting.is_empty() {
            // The time is needed only for a deadline.
            let now = self.server.deadline.map_or(Nanos(0), |_| cx.now());
            while self.slots.len() < SLOTS {
                let Some(bio) = self.waiting.pop_front() else { break };
                queue_or_complete_bio(
                    bio,
                    now,
                    &self.limits,
                    &mut self.slots,
                    &mut self.send_queue,
                    &mut self.ready,
                );
            }
        }
        if !connection.may_send() {
            // If more waits to be sent, the lane must be woken when the current send completes.
            return connection.set_defer_sends(self.send_queue.is_empty());
        }
        let ConnectionStage::Ready(replies) = &mut connection.stage else { return connection.send_raw() };
        if self.send_queue.is_empty() {
            return;
        }
        let buf = self.send_queue.gather(&self.slots, replies, &mut self.pool, &mut self.over);
        connection.set_defer_sends(self.send_queue.is_empty());
        connection.send(buf);
        for key in self.over.drain(..) {
            let mut slot = self.slots.remove(key);
            slot.bio.end_with(slot.early.unwrap_or_default());
            self.ready.push(slot.bio);
        }
    }

    /// Handles the completed operations of the ring.
    fn collect(&mut self, cx: &mut Cx<'_>) {
        let Some(connection) = &mut self.connection else { return };
        let mut finished = std::mem::take(&mut self.finished);
        connection.take(&mut finished, cx);
        let mut rest = finished.drain(..);
        while let Some(done) = rest.next() {
            let Err(loss) = self.operation_done(done, cx) else { continue };
            // The abandoned connection will handle the other completions.
            if let Some(connection) = &mut self.connection {
                connection.put_back(rest.by_ref());
            }
            self.handle_loss(loss, cx);
        }
        drop(rest);
        self.finished = finished;
    }

    fn operation_done(&mut self, done: RingCompletion, cx: &mut Cx<'_>) -> Result<(), DisconnectReason> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        match connection.finished(done, &mut self.pool, cx)? {
            StreamEvent::Connected => connection.shake(&self.server, &mut self.pool),
            StreamEvent::Sent(buf) => self.pool.put(buf),
            StreamEvent::Bytes(buf, n) => {
                if self.server.deadline.is_some() {
                    self.last_reply_at = cx.now();
                }
                cx.set_cpu_budget(cx.cpu_budget().saturating_sub(n as u64));
                let more = self
                    .parse_replies(&buf[..n], cx)
                    .map_err(|why| DisconnectReason::new(DisconnectKind::ProtocolError, why))?;
                if !more {
                    self.server.note_shutdown(cx.now());
                    return Err(DisconnectReason::new(DisconnectKind::ShuttingDown, "the server shuts down"));
                }
                if let Some(connection) = &self.connection {
                    connection.receive(Some(buf), &mut self.pool);
                }
            }
            StreamEvent::Nothing => {}
        }
        Ok(())
    }

    /// Handles received bytes. Returns false if the server sent ESHUTDOWN.
    fn parse_replies(&mut self, mut input: &[u8], cx: &mut Cx<'_>) -> Result<bool, String> {
        let Some(connection) = &mut self.connection else { return Ok(true) };
        let mut more = true;
        if let ConnectionStage::Handshaking(shake) = &mut connection.stage {
            let Some(export) = shake.take(&mut input).map_err(|e| e.to_string())? else {
                let tls = shake.awaits_tls().then(|| self.server.begin_tls()).transpose()?;
                if tls.is_some() {
                    shake.tls_begun();
                }
                let out = shake.take_out();
                connection.raw.extend(out);
                tls.into_iter().for_each(|session| connection.begin_tls(session));
                return Ok(true);
            };
            self.server.accept(&export)?;
            // The run count is noted before the first request is sent. A time would not do: the
            // core's time is older than the received data.
            connection.fenced = self.server.fencing.runs();
            self.server.mark_up();
            // The address that answers is tried first the next time.
            self.tries -= 1;
            connection.stage = ConnectionStage::Ready(Box::new(ReplyParser::new(&export)));
        }
        let ConnectionStage::Ready(replies) = &mut connection.stage else { return Ok(true) };
        while let Some(event) = replies.take(&mut input).map_err(|e| e.to_string())? {
            match event {
                ReplyEvent::Data { tag, at, bytes } => {
                    let slot = &mut self.slots[tag as usize];
                    if slot.probe.is_none() {
                        slot.bio.data.copy_from_at(at as usize, bytes);
                    }
                }
                ReplyEvent::Zeroes { tag, at, len } => {
                    let slot = &mut self.slots[tag as usize];
                    if slot.probe.is_none() {
                        slot.bio.data.produce(at as usize, len as usize, |_, part| part.fill(0));
                    }
                }
                ReplyEvent::Status { .. } => return Err("a block status that nobody asked for".into()),
                ReplyEvent::Completed { tag, error } => {
                    self.back_off = BACK_OFF;
                    more &= error != ESHUTDOWN;
                    let (key, slot) = (tag as usize, &mut self.slots[tag as usize]);
                    let status = slot.verdict(status_from_nbd_error(error));
                    if !self.send_queue.is_sending(key) && slot.needs_probe(status, &self.limits, cx.rng()) {
                        self.send_queue.push(key);
                        continue;
                    }
                    handle_nbd_reply(key, status, &mut self.slots, &mut self.send_queue, &mut self.ready);
                }
            }
        }
        Ok(more)
    }

    /// Closes an idle connection if the server has sent ESHUTDOWN on another one since. The server
    /// that listens now may be another one.
    #[cold]
    fn leave_idle(&mut self) {
        let is_idle = self.slots.is_empty() && self.waiting.is_empty();
        if is_idle && self.connection.take_if(|connection| connection.is_ready()).is_some() {
            // The next connection is made at once, and counts as a normal attempt.
            self.next_try = Nanos(0);
            self.back_off = (self.back_off + self.back_off).min(BACK_OFF_MAX);
        }
    }
}

/// Gives a request a slot and queues it, or completes it if it needs no server.
fn queue_or_complete_bio(
    mut bio: Box<Bio>,
    now: Nanos,
    limits: &Limits,
    slots: &mut Slab<NbdRequest>,
    send_queue: &mut SendQueue,
    ready: &mut Batch,
) {
    if let Some(status) = crate::status_without_server(&bio, limits) {
        bio.end_with(status);
        return ready.push(bio);
    }
    send_queue.push(slots.insert(NbdRequest::new(bio, limits.write_cache, now)));
}

/// Handles the server's answer to the current request of a slot.
pub(super) fn handle_nbd_reply(
    key: usize,
    status: Status,
    slots: &mut Slab<NbdRequest>,
    send_queue: &mut SendQueue,
    ready: &mut Batch,
) {
    let slot = &mut slots[key];
    if slot.flushing && status.is_ok() {
        slot.flushing = false;
        return send_queue.push(key);
    }
    if send_queue.is_sending(key) {
        slot.early = Some(status);
        return;
    }
    let mut bio = slots.remove(key).bio;
    bio.end_with(status);
    ready.push(bio);
}

impl Lane for NbdLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.limits.size = self.server.size();
        if self.connection.as_ref().is_some_and(|connection| self.server.was_shut_down(connection.begun)) {
            self.leave_idle();
        }
        if self.connection.is_none() && self.may_connect(cx) {
            self.connect(cx);
        }
        if self.connection.is_some() {
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
        self.send(cx);
        self.look_for_silence(cx);
        if !self.abandoned.is_empty() {
            self.poll_abandoned(cx);
        }
        if let Some(deadline) = self.connection.as_ref().and_then(NbdClientConnection::deadline) {
            if deadline <= cx.now() {
                self.handle_loss(
                    DisconnectReason::new(DisconnectKind::LocalError, "the server does not answer"),
                    cx,
                );
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
        self.abandoned.iter().map(AbandonedConnectionWithHeldWrites::held_writes).sum()
    }

    /// The lane needs turns while it connects, so that a slow attempt is abandoned in time.
    fn own_work(&self) -> OwnWork {
        match self.connection.as_ref().and_then(NbdClientConnection::deadline) {
            Some(_) => OwnWork::Background,
            None => OwnWork::Idle,
        }
    }
}
