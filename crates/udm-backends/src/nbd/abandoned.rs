//! An abandoned connection with writes that the server may still execute.
//!
//! No new request is sent on it. It is read as long as its data is trusted, because a late answer
//! completes a write. The rest of a partly sent write is still sent, so that the server can answer.
//! [`super::fence`] lists the other conditions that end the wait.

use super::connection::{ConnectionStage, NbdClientConnection};
use super::fence::{ExportFence, FenceStatus};
use super::lane::handle_nbd_reply;
use super::remote_export::RemoteExport;
use super::request::{NbdRequest, status_from_nbd_error};
use super::send_queue::SendQueue;
use crate::stream::{DisconnectKind, StreamEvent};
use slab::Slab;
use std::sync::Arc;
use udm_core::{Batch, BufPool, Cx, Nanos, Status, WaitQueueSubscription, WakeEpoch};
use udm_runtime::RingCompletion;
use udm_wire::nbd::client::ReplyEvent;
use udm_wire::uri::ServerStoppedProof;

/// The most abandoned connections per lane. A lane that has reached it does not connect.
pub(super) const ABANDONED_MAX: usize = 4;

/// An abandoned connection and its held writes.
pub(super) struct AbandonedConnectionWithHeldWrites {
    /// `None` if nothing more can be received on it.
    connection: Option<NbdClientConnection>,
    /// The local system dropped the connection.
    lost: bool,
    /// Received data is trusted.
    is_trusted: bool,
    /// The sending side was shut down.
    finished: bool,
    /// The held writes.
    slots: Slab<NbdRequest>,
    send_queue: SendQueue,
    /// Number of fence runs that the connection noted at the end of its handshake.
    runs: u64,
    /// Time at which the connection was abandoned.
    abandoned_at: Nanos,
    /// Epoch of the wait queue at the last check, and the time of the next check even without a
    /// wake.
    seen: Option<WakeEpoch>,
    next_check: Nanos,
    /// Number of writes at first, and of those that failed, so that they can fail over.
    all: usize,
    elsewhere: usize,
    /// Reason to log, if it is not logged yet.
    why: Option<&'static str>,
}

/// Resources of a lane that its abandoned connections use.
pub(super) struct LaneResourcesForAbandonedConnections<'a> {
    pub(super) server: &'a Arc<RemoteExport>,
    pub(super) wait_handle: &'a WaitQueueSubscription,
    pub(super) pool: &'a mut BufPool,
    pub(super) finished: &'a mut Vec<RingCompletion>,
    pub(super) over: &'a mut Vec<usize>,
    pub(super) ready: &'a mut Batch,
    /// The lane has another connection that works.
    pub(super) works: bool,
}

impl AbandonedConnectionWithHeldWrites {
    /// Creates an abandoned connection. `slots` has the held writes, and `send_queue` at most the
    /// rest of one of them.
    pub(super) fn new(
        mut connection: Option<NbdClientConnection>,
        end: DisconnectKind,
        slots: Slab<NbdRequest>,
        send_queue: SendQueue,
        (runs, abandoned_at): (u64, Nanos),
        resources: &mut LaneResourcesForAbandonedConnections<'_>,
    ) -> AbandonedConnectionWithHeldWrites {
        let listens = match end {
            DisconnectKind::TimedOut | DisconnectKind::ShuttingDown => true,
            // The close can still be seen.
            DisconnectKind::ProtocolError => resources.server.uri.silence.fence == ServerStoppedProof::Closed,
            DisconnectKind::Closed | DisconnectKind::LocalError => false,
        };
        if let Some(connection) = connection.take_if(|_| !listens) {
            // Discards unsent data: it could arrive after the wait has ended.
            resources.server.sockets.reset(connection.socket());
        }
        // These losses occurred while received data was handled, so no receive is in flight.
        if let (Some(connection), DisconnectKind::ProtocolError | DisconnectKind::ShuttingDown) =
            (&connection, end)
        {
            connection.receive(None, resources.pool);
            connection.set_defer_sends(end == DisconnectKind::ShuttingDown && send_queue.is_empty());
        }
        resources.server.fencing.add_held_writes(slots.len());
        let lost = end == DisconnectKind::LocalError;
        if lost {
            resources.server.fencing.add_lost_connection();
        }
        AbandonedConnectionWithHeldWrites {
            connection,
            lost,
            is_trusted: matches!(end, DisconnectKind::TimedOut | DisconnectKind::ShuttingDown),
            finished: false,
            all: slots.len(),
            slots,
            send_queue,
            runs,
            abandoned_at,
            seen: None,
            next_check: Nanos(0),
            elsewhere: 0,
            why: None,
        }
    }

    /// Returns true if no write is held any more.
    pub(super) fn is_over(&self) -> bool {
        self.slots.is_empty()
    }

    /// Number of held writes.
    pub(super) fn held_writes(&self) -> usize {
        self.slots.len()
    }

    /// Returns true if the server has answered all writes.
    pub(super) fn is_answered(&self) -> bool {
        self.is_over() && self.elsewhere == 0
    }

    /// Handles received data, and checks whether the writes can still be executed.
    pub(super) fn poll(&mut self, resources: &mut LaneResourcesForAbandonedConnections<'_>, cx: &mut Cx<'_>) {
        let before = self.slots.len();
        self.receive(resources, cx);
        self.send_rest(resources);
        if !self.is_over() {
            self.check(resources, cx);
        }
        resources.server.fencing.remove_held_writes(before - self.slots.len());
        if self.is_over() {
            self.end(resources);
        }
    }

    fn receive(&mut self, resources: &mut LaneResourcesForAbandonedConnections<'_>, cx: &mut Cx<'_>) {
        let Some(connection) = &mut self.connection else { return };
        let mut finished = std::mem::take(resources.finished);
        connection.take(&mut finished, cx);
        let mut ended = None;
        for done in finished.drain(..) {
            let Some(connection) = &mut self.connection else { break };
            match connection.finished(done, resources.pool, cx) {
                Ok(StreamEvent::Bytes(buf, n)) => {
                    cx.set_cpu_budget(cx.cpu_budget().saturating_sub(n as u64));
                    if self.is_trusted && self.parse_replies(&buf[..n], resources.ready).is_err() {
                        self.is_trusted = false;
                    }
                    if let Some(connection) = &self.connection {
                        connection.receive(Some(buf), resources.pool);
                        connection.set_defer_sends(self.is_trusted && self.send_queue.is_empty());
                    }
                }
                Ok(StreamEvent::Sent(buf)) => resources.pool.put(buf),
                Ok(StreamEvent::Connected | StreamEvent::Nothing) => {}
                Err(loss) if loss.end == DisconnectKind::ProtocolError => {
                    // TLS is broken; the end of the connection can still be seen.
                    self.is_trusted = false;
                    connection.receive(None, resources.pool);
                }
                Err(loss) => {
                    ended = Some(loss.end);
                    break;
                }
            }
        }
        finished.clear();
        *resources.finished = finished;
        if let Some(end) = ended {
            self.connection = None;
            if end == DisconnectKind::LocalError {
                self.lost = true;
                resources.server.fencing.add_lost_connection();
            }
            if end == DisconnectKind::Closed
                && resources.server.uri.silence.fence == ServerStoppedProof::Closed
            {
                self.go_elsewhere(Some("the server closed the connection"), resources);
            }
        }
    }

    /// Handles received bytes.
    fn parse_replies(&mut self, mut input: &[u8], ready: &mut Batch) -> Result<(), ()> {
        let Some(NbdClientConnection { stage: ConnectionStage::Ready(replies), .. }) = &mut self.connection
        else {
            return Err(());
        };
        while let Some(event) = replies.take(&mut input).map_err(drop)? {
            // Data of reads is ignored: the reads have already failed.
            if let ReplyEvent::Completed { tag, error } = event
                && self.slots.contains(tag as usize)
            {
                handle_nbd_reply(
                    tag as usize,
                    status_from_nbd_error(error),
                    &mut self.slots,
                    &mut self.send_queue,
                    ready,
                );
            }
        }
        Ok(())
    }

    /// Sends the rest of a partly sent write. If received data is not trusted, shuts down the
    /// sending side.
    fn send_rest(&mut self, resources: &mut LaneResourcesForAbandonedConnections<'_>) {
        let Some(connection) = self.connection.as_mut().filter(|connection| connection.may_send()) else {
            return;
        };
        if !self.is_trusted && !std::mem::replace(&mut self.finished, true) {
            connection.finish();
        }
        if !self.is_trusted || self.send_queue.is_empty() {
            return;
        }
        let ConnectionStage::Ready(replies) = &mut connection.stage else { return };
        let buf = self.send_queue.gather(&self.slots, replies, resources.pool, resources.over);
        connection.set_defer_sends(self.send_queue.is_empty());
        connection.send(buf);
        for key in resources.over.drain(..) {
            let mut slot = self.slots.remove(key);
            slot.bio.end_with(slot.early.unwrap_or_default());
            resources.ready.push(slot.bio);
        }
    }

    /// Checks whether the held writes can still be executed.
    fn check(&mut self, resources: &mut LaneResourcesForAbandonedConnections<'_>, cx: &mut Cx<'_>) {
        match &resources.server.uri.silence.fence {
            ServerStoppedProof::Closed => {}
            ServerStoppedProof::Wait(time) => {
                let until = self.abandoned_at + *time;
                if until <= cx.now() {
                    self.go_elsewhere(Some("the fence time has passed"), resources);
                } else {
                    cx.wake_at(until);
                }
            }
            ServerStoppedProof::Exec(command) => {
                let epoch = resources.wait_handle.epoch();
                if self.seen != Some(epoch) || self.next_check <= cx.now() {
                    self.seen = Some(epoch);
                    self.next_check = match ExportFence::check(resources.server, command, self.runs, cx.now())
                    {
                        FenceStatus::Done => return self.go_elsewhere(None, resources),
                        FenceStatus::Running => Nanos::NEVER,
                        FenceStatus::Again(at) => at,
                    };
                }
                resources.wait_handle.wait(epoch, cx);
                cx.wake_at(self.next_check);
            }
        }
    }

    /// Fails the held writes, because the server cannot execute them any more. If the lane has
    /// another working connection, they are retried without a path error.
    fn go_elsewhere(
        &mut self,
        why: Option<&'static str>,
        resources: &mut LaneResourcesForAbandonedConnections<'_>,
    ) {
        let status = if resources.works { Status::Requeue } else { Status::Transport };
        self.elsewhere = self.slots.len();
        self.why = why;
        for mut slot in self.slots.drain() {
            slot.bio.end_with(status);
            resources.ready.push(slot.bio);
        }
    }

    /// Ends the connection after its last held write.
    fn end(&mut self, resources: &mut LaneResourcesForAbandonedConnections<'_>) {
        let AbandonedConnectionWithHeldWrites { all, elsewhere, why, .. } = *self;
        let (uri, answered) = (resources.server.uri.plain(), all - elsewhere);
        if elsewhere == 0 {
            tracing::warn!("{uri}: all {all} writes that waited were answered");
        } else if let Some(why) = why {
            tracing::warn!("{uri}: {why}: waiting writes that fail over: {elsewhere}, answered: {answered}");
        }
        if let Some(connection) = self.connection.take().filter(|_| elsewhere > 0) {
            // Discards unsent data.
            resources.server.sockets.reset(connection.socket());
        }
        resources.server.fencing.release(self.lost);
    }
}
