//! A connection that was given up with writes that the server may still deliver.
//!
//! Nothing more is asked on it. It is read on, for as long as what it says is believed, because a
//! late answer settles a write; and what is left of a write that was sent in part goes on, so that
//! the server can answer. What else settles them is in [`super::fence`].

use super::connection::{Connection, ConnectionEvent, ConnectionStage, LossKind};
use super::fence::{ExportFence, FenceStatus};
use super::lane::answered;
use super::remote_export::RemoteExport;
use super::request::{NbdRequest, status_of};
use super::send_queue::SendQueue;
use slab::Slab;
use std::sync::Arc;
use udm_core::{Batch, BufPool, Cx, Nanos, Status, WaitHandle, WakeEpoch};
use udm_runtime::Done;
use udm_wire::nbd::client::ReplyEvent;
use udm_wire::uri::Fence;

/// The most of them in a lane. Behind them it takes no more requests.
pub(super) const ABANDONED_MAX: usize = 4;

/// See the module's documentation.
pub(super) struct AbandonedConnection {
    /// While something may be heard on it.
    connection: Option<Connection>,
    /// Our system has lost it.
    lost: bool,
    /// What is heard is believed.
    believed: bool,
    /// The server was told that nothing more comes.
    finished: bool,
    /// The held writes.
    slots: Slab<NbdRequest>,
    send_queue: SendQueue,
    /// How often the server had been fenced when the connection was there.
    runs: u64,
    /// When it was given up.
    given_up: Nanos,
    /// When the bell was last rung that was looked at, and the time to look whether it rings or
    /// not.
    seen: Option<WakeEpoch>,
    look_at: Nanos,
    /// How many writes there were, and how many of them go elsewhere.
    all: usize,
    elsewhere: usize,
    /// Why, where nobody has said so yet.
    why: Option<&'static str>,
}

/// What a lane lends.
pub(super) struct LaneResources<'a> {
    pub(super) server: &'a Arc<RemoteExport>,
    pub(super) listener: &'a WaitHandle,
    pub(super) pool: &'a mut BufPool,
    pub(super) finished: &'a mut Vec<Done>,
    pub(super) over: &'a mut Vec<usize>,
    pub(super) ready: &'a mut Batch,
    /// The lane has another connection that works.
    pub(super) works: bool,
}

impl AbandonedConnection {
    /// `slots` has the writes that are held, and `send_queue` at the most a rest of one of them.
    pub(super) fn new(
        mut connection: Option<Connection>,
        end: LossKind,
        slots: Slab<NbdRequest>,
        send_queue: SendQueue,
        (runs, given_up): (u64, Nanos),
        resources: &mut LaneResources<'_>,
    ) -> AbandonedConnection {
        let listens = match end {
            LossKind::Silent | LossKind::ShuttingDown => true,
            // Its end may still be heard.
            LossKind::ProtocolError => resources.server.uri.silence.fence == Fence::Closed,
            LossKind::Closed | LossKind::LocalError => false,
        };
        if let Some(connection) = connection.take_if(|_| !listens) {
            // What our system has yet to send is sent no more: its time would not be over.
            resources.server.sockets.reset(connection.socket());
        }
        // These ended in the middle of what was received.
        if let (Some(connection), LossKind::ProtocolError | LossKind::ShuttingDown) = (&connection, end) {
            connection.receive(None, resources.pool);
            connection.set_defer_sends(end == LossKind::ShuttingDown && send_queue.is_empty());
        }
        resources.server.fencing.hold(slots.len());
        let lost = end == LossKind::LocalError;
        if lost {
            resources.server.fencing.lose();
        }
        AbandonedConnection {
            connection,
            lost,
            believed: matches!(end, LossKind::Silent | LossKind::ShuttingDown),
            finished: false,
            all: slots.len(),
            slots,
            send_queue,
            runs,
            given_up,
            seen: None,
            look_at: Nanos(0),
            elsewhere: 0,
            why: None,
        }
    }

    /// True when nothing is held any more.
    pub(super) fn is_over(&self) -> bool {
        self.slots.is_empty()
    }

    /// Writes that are held.
    pub(super) fn held(&self) -> usize {
        self.slots.len()
    }

    /// True when the server has answered all.
    pub(super) fn is_answered(&self) -> bool {
        self.is_over() && self.elsewhere == 0
    }

    /// Takes in what is heard, and looks whether the writes can be delivered any more.
    pub(super) fn poll(&mut self, resources: &mut LaneResources<'_>, cx: &mut Cx<'_>) {
        let before = self.slots.len();
        self.hear(resources, cx);
        self.send_rest(resources);
        if !self.is_over() {
            self.look(resources, cx);
        }
        resources.server.fencing.settled(before - self.slots.len());
        if self.is_over() {
            self.end(resources);
        }
    }

    fn hear(&mut self, resources: &mut LaneResources<'_>, cx: &mut Cx<'_>) {
        let Some(connection) = &mut self.connection else { return };
        let mut finished = std::mem::take(resources.finished);
        connection.take(&mut finished, cx);
        let mut ended = None;
        for done in finished.drain(..) {
            let Some(connection) = &mut self.connection else { break };
            match connection.finished(done, resources.pool, cx) {
                Ok(ConnectionEvent::Bytes(buf, n)) => {
                    cx.set_cpu_budget(cx.cpu_budget().saturating_sub(n as u64));
                    if self.believed && self.take_in(&buf[..n], resources.ready).is_err() {
                        self.believed = false;
                    }
                    if let Some(connection) = &self.connection {
                        connection.receive(Some(buf), resources.pool);
                        connection.set_defer_sends(self.believed && self.send_queue.is_empty());
                    }
                }
                Ok(ConnectionEvent::Sent(buf)) => resources.pool.put(buf),
                Ok(ConnectionEvent::Connected | ConnectionEvent::Nothing) => {}
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
            if end == LossKind::LocalError {
                self.lost = true;
                resources.server.fencing.lose();
            }
            if end == LossKind::Closed && resources.server.uri.silence.fence == Fence::Closed {
                self.go_elsewhere(Some("the server closed the connection"), resources);
            }
        }
    }

    /// Bytes of the server.
    fn take_in(&mut self, mut input: &[u8], ready: &mut Batch) -> Result<(), ()> {
        let Some(Connection { stage: ConnectionStage::Ready(replies), .. }) = &mut self.connection else {
            return Err(());
        };
        while let Some(event) = replies.take(&mut input).map_err(drop)? {
            // What was read is nobody's any more.
            if let ReplyEvent::Done { tag, error } = event
                && self.slots.contains(tag as usize)
            {
                answered(tag as usize, status_of(error), &mut self.slots, &mut self.send_queue, ready);
            }
        }
        Ok(())
    }

    /// Sends the rest of a write that was sent in part, and tells a server that is not believed
    /// that nothing more comes.
    fn send_rest(&mut self, resources: &mut LaneResources<'_>) {
        let Some(connection) = self.connection.as_mut().filter(|connection| connection.may_send()) else {
            return;
        };
        if !self.believed && !std::mem::replace(&mut self.finished, true) {
            connection.finish();
        }
        if !self.believed || self.send_queue.is_empty() {
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

    /// Whether they can be delivered any more.
    fn look(&mut self, resources: &mut LaneResources<'_>, cx: &mut Cx<'_>) {
        match &resources.server.uri.silence.fence {
            Fence::Closed => {}
            Fence::Wait(time) => {
                let until = self.given_up + *time;
                if until <= cx.now() {
                    self.go_elsewhere(Some("its time is over"), resources);
                } else {
                    cx.wake_at(until);
                }
            }
            Fence::Exec(command) => {
                let epoch = resources.listener.epoch();
                if self.seen != Some(epoch) || self.look_at <= cx.now() {
                    self.seen = Some(epoch);
                    self.look_at = match ExportFence::look(resources.server, command, self.runs, cx.now()) {
                        FenceStatus::FenceDone => return self.go_elsewhere(None, resources),
                        FenceStatus::FenceCommandRuns => Nanos::NEVER,
                        FenceStatus::Again(at) => at,
                    };
                }
                resources.listener.wait(epoch, cx);
                cx.wake_at(self.look_at);
            }
        }
    }

    /// They can't be delivered any more. What is sent now goes by another connection: where that
    /// works their end is no reason to fail the path.
    fn go_elsewhere(&mut self, why: Option<&'static str>, resources: &mut LaneResources<'_>) {
        let status = if resources.works { Status::Requeue } else { Status::Transport };
        self.elsewhere = self.slots.len();
        self.why = why;
        for mut slot in self.slots.drain() {
            slot.bio.end_with(status);
            resources.ready.push(slot.bio);
        }
    }

    /// Nothing is held any more.
    fn end(&mut self, resources: &mut LaneResources<'_>) {
        let AbandonedConnection { all, elsewhere, why, .. } = *self;
        let (uri, answered) = (resources.server.uri.plain(), all - elsewhere);
        if elsewhere == 0 {
            tracing::warn!("{uri}: all {all} writes that waited were answered");
        } else if let Some(why) = why {
            tracing::warn!(
                "{uri}: {why}: {elsewhere} writes that waited go elsewhere, {answered} were answered"
            );
        }
        if let Some(connection) = self.connection.take().filter(|_| elsewhere > 0) {
            // What our system has yet to send is sent no more.
            resources.server.sockets.reset(connection.socket());
        }
        resources.server.fencing.release(self.lost);
    }
}
