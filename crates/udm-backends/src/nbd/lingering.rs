//! A connection that was given up with writes that the server may still deliver.
//!
//! Nothing more is asked on it. It is read on, for as long as what it says is believed, because a
//! late answer settles a write; and what is left of a write that was sent in part goes on, so that
//! the server can answer. What else settles them is in [`super::fence`].

use super::connection::{Brought, Connection, End, Stage};
use super::fence::{Fencing, Look};
use super::lane::answered;
use super::outgoing::Outgoing;
use super::server::Server;
use super::slot::{Slot, status_of};
use slab::Slab;
use std::sync::Arc;
use udm_core::{Batch, BufPool, Cx, Epoch, Listener, Nanos, Status};
use udm_runtime::Done;
use udm_wire::nbd::client::Event;
use udm_wire::uri::Fence;

/// The most of them in a lane. Behind them it takes no more requests.
pub(super) const LINGERING_MAX: usize = 4;

/// See the module's documentation.
pub(super) struct Lingering {
    /// While something may be heard on it.
    connection: Option<Connection>,
    /// Our system has lost it.
    lost: bool,
    /// What is heard is believed.
    believed: bool,
    /// The server was told that nothing more comes.
    finished: bool,
    /// The held writes.
    slots: Slab<Slot>,
    outgoing: Outgoing,
    /// How often the server had been fenced when the connection was there.
    runs: u64,
    /// When it was given up.
    given_up: Nanos,
    /// When the bell was last rung that was looked at, and the time to look whether it rings or
    /// not.
    seen: Option<Epoch>,
    look_at: Nanos,
    /// How many writes there were, and how many of them go elsewhere.
    all: usize,
    elsewhere: usize,
    /// Why, where nobody has said so yet.
    why: Option<&'static str>,
}

/// What a lane lends.
pub(super) struct Lent<'a> {
    pub(super) server: &'a Arc<Server>,
    pub(super) listener: &'a Listener,
    pub(super) pool: &'a mut BufPool,
    pub(super) finished: &'a mut Vec<Done>,
    pub(super) over: &'a mut Vec<usize>,
    pub(super) ready: &'a mut Batch,
    /// The lane has another connection that works.
    pub(super) works: bool,
}

impl Lingering {
    /// `slots` has the writes that are held, and `outgoing` at the most a rest of one of them.
    pub(super) fn new(
        mut connection: Option<Connection>,
        end: End,
        slots: Slab<Slot>,
        outgoing: Outgoing,
        (runs, given_up): (u64, Nanos),
        lent: &mut Lent<'_>,
    ) -> Lingering {
        let listens = match end {
            End::Silent | End::Leaves => true,
            // Its end may still be heard.
            End::Lied => lent.server.uri.silence.fence == Fence::Closed,
            End::Closed | End::Dead => false,
        };
        if let Some(connection) = connection.take_if(|_| !listens) {
            // What our system has yet to send is sent no more: its time would not be over.
            lent.server.sockets.reset(connection.socket());
        }
        // These ended in the middle of what was received.
        if let (Some(connection), End::Lied | End::Leaves) = (&connection, end) {
            connection.receive(None, lent.pool);
            connection.set_patient(end == End::Leaves && outgoing.is_empty());
        }
        lent.server.fencing.hold(slots.len());
        let lost = end == End::Dead;
        if lost {
            lent.server.fencing.lose();
        }
        Lingering {
            connection,
            lost,
            believed: matches!(end, End::Silent | End::Leaves),
            finished: false,
            all: slots.len(),
            slots,
            outgoing,
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
    pub(super) fn poll(&mut self, lent: &mut Lent<'_>, cx: &mut Cx<'_>) {
        let before = self.slots.len();
        self.hear(lent, cx);
        self.send_rest(lent);
        if !self.is_over() {
            self.look(lent, cx);
        }
        lent.server.fencing.settled(before - self.slots.len());
        if self.is_over() {
            self.end(lent);
        }
    }

    fn hear(&mut self, lent: &mut Lent<'_>, cx: &mut Cx<'_>) {
        let Some(connection) = &mut self.connection else { return };
        let mut finished = std::mem::take(lent.finished);
        connection.take(&mut finished, cx);
        let mut ended = None;
        for done in finished.drain(..) {
            let Some(connection) = &mut self.connection else { break };
            match connection.finished(done, lent.pool, cx) {
                Ok(Brought::Bytes(buf, n)) => {
                    cx.set_work_left(cx.work_left().saturating_sub(n as u64));
                    if self.believed && self.take_in(&buf[..n], lent.ready).is_err() {
                        self.believed = false;
                    }
                    if let Some(connection) = &self.connection {
                        connection.receive(Some(buf), lent.pool);
                        connection.set_patient(self.believed && self.outgoing.is_empty());
                    }
                }
                Ok(Brought::Sent(buf)) => lent.pool.put(buf),
                Ok(Brought::Connected | Brought::Nothing) => {}
                Err(loss) => {
                    ended = Some(loss.end);
                    break;
                }
            }
        }
        finished.clear();
        *lent.finished = finished;
        if let Some(end) = ended {
            self.connection = None;
            if end == End::Dead {
                self.lost = true;
                lent.server.fencing.lose();
            }
            if end == End::Closed && lent.server.uri.silence.fence == Fence::Closed {
                self.go_elsewhere(Some("the server closed the connection"), lent);
            }
        }
    }

    /// Bytes of the server.
    fn take_in(&mut self, mut input: &[u8], ready: &mut Batch) -> Result<(), ()> {
        let Some(Connection { stage: Stage::Ready(replies), .. }) = &mut self.connection else {
            return Err(());
        };
        while let Some(event) = replies.take(&mut input).map_err(drop)? {
            // What was read is nobody's any more.
            if let Event::Done { tag, error } = event
                && self.slots.contains(tag as usize)
            {
                answered(tag as usize, status_of(error), &mut self.slots, &mut self.outgoing, ready);
            }
        }
        Ok(())
    }

    /// Sends the rest of a write that was sent in part, and tells a server that is not believed
    /// that nothing more comes.
    fn send_rest(&mut self, lent: &mut Lent<'_>) {
        let Some(connection) = self.connection.as_mut().filter(|connection| connection.may_send()) else {
            return;
        };
        if !self.believed && !std::mem::replace(&mut self.finished, true) {
            connection.finish();
        }
        if !self.believed || self.outgoing.is_empty() {
            return;
        }
        let Stage::Ready(replies) = &mut connection.stage else { return };
        let buf = self.outgoing.gather(&self.slots, replies, lent.pool, lent.over);
        connection.set_patient(self.outgoing.is_empty());
        connection.send(buf);
        for key in lent.over.drain(..) {
            let mut slot = self.slots.remove(key);
            slot.bio.end_with(slot.early.unwrap_or_default());
            lent.ready.push(slot.bio);
        }
    }

    /// Whether they can be delivered any more.
    fn look(&mut self, lent: &mut Lent<'_>, cx: &mut Cx<'_>) {
        match &lent.server.uri.silence.fence {
            Fence::Closed => {}
            Fence::Wait(time) => {
                let until = self.given_up + *time;
                if until <= cx.now() {
                    self.go_elsewhere(Some("its time is over"), lent);
                } else {
                    cx.wake_at(until);
                }
            }
            Fence::Exec(command) => {
                let epoch = lent.listener.epoch();
                if self.seen != Some(epoch) || self.look_at <= cx.now() {
                    self.seen = Some(epoch);
                    self.look_at = match Fencing::look(lent.server, command, self.runs, cx.now()) {
                        Look::Fenced => return self.go_elsewhere(None, lent),
                        Look::Runs => Nanos::NEVER,
                        Look::Again(at) => at,
                    };
                }
                lent.listener.wait(epoch, cx);
                cx.wake_at(self.look_at);
            }
        }
    }

    /// They can't be delivered any more. What is sent now goes by another connection: where that
    /// works their end is no reason to fail the path.
    fn go_elsewhere(&mut self, why: Option<&'static str>, lent: &mut Lent<'_>) {
        let status = if lent.works { Status::Requeue } else { Status::Transport };
        self.elsewhere = self.slots.len();
        self.why = why;
        for mut slot in self.slots.drain() {
            slot.bio.end_with(status);
            lent.ready.push(slot.bio);
        }
    }

    /// Nothing is held any more.
    fn end(&mut self, lent: &mut Lent<'_>) {
        let Lingering { all, elsewhere, why, .. } = *self;
        let (uri, answered) = (lent.server.uri.plain(), all - elsewhere);
        if elsewhere == 0 {
            tracing::warn!("{uri}: all {all} writes that waited were answered");
        } else if let Some(why) = why {
            tracing::warn!(
                "{uri}: {why}: {elsewhere} writes that waited go elsewhere, {answered} were answered"
            );
        }
        if let Some(connection) = self.connection.take().filter(|_| elsewhere > 0) {
            // What our system has yet to send is sent no more.
            lent.server.sockets.reset(connection.socket());
        }
        lent.server.fencing.release(self.lost);
    }
}
