//! TLS of a connection: between the bytes of the socket and the protocol.
//!
//! A thread performs the handshake ([`crate::nbd::tls`]). Afterwards everything happens on the
//! core. The ring receives into a buffer of this part, and what it decrypts goes to the receive
//! side of the connection as if it had arrived there. A send of the connection is encrypted in
//! parts, of which one is in flight. rustls allocates a vector for each record of 16 KiB; a
//! connection without TLS pays one branch per receive and per send.

use super::{AcceptedNbdConnection, ConnectionPhase, REQUESTS_A_TURN};
use crate::nbd::receive::{ReceiveBlocked, ReceiveBuffer};
use crate::nbd::reply::return_buffers_to_pool;
use crate::nbd::stats::TlsConnectionGuard;
use crate::nbd::tls::{TlsHandshakeStep, TlsHandshakeStepDone};
use std::any::Any;
use std::sync::Arc;
use udm_core::{Buf, BufPool, DeviceId, Nanos, Segments};
use udm_runtime::FrontCx;
use udm_tls::{TlsOutputBuffer, TlsSession, TlsSessionError};

/// Size of the receive buffer in bytes: two records.
const ROOM: usize = 32 << 10;

/// Bytes of plaintext that are encrypted for one send.
const PART: usize = 256 << 10;

/// Bytes that headers of records add to a part, at most.
const OVERHEAD: usize = 8 << 10;

/// The TLS of a connection.
pub(super) struct ConnectionTls {
    /// `None` while the thread for handshakes has it, with what was received.
    session: Option<TlsSession>,
    /// The topic of its messages.
    topic: DeviceId,
    /// Memory for the next receive; `None` while the ring has it, or while `received` has it.
    room: Option<Buf>,
    /// Bytes that arrived, and how many of them are decrypted.
    received: Option<(Buf, usize)>,
    /// Plaintext of the send in progress, and how many bytes of it are encrypted.
    plaintext: Segments,
    encrypted: usize,
    output: TlsOutputBuffer,
    /// The peer was told that nothing follows.
    is_closed: bool,
    /// Counts the connection, once it is served.
    count: Option<TlsConnectionGuard>,
}

/// Result of a completed send.
pub(super) enum TlsSendResult {
    /// This rest of the same bytes must be sent at once.
    Rest(Segments),
    /// The plaintext has left: this many bytes of it. Its buffers come back.
    Sent(usize, Segments),
    /// A part has left.
    Part,
}

impl ConnectionTls {
    pub(super) fn new(session: TlsSession) -> ConnectionTls {
        ConnectionTls {
            session: Some(session),
            topic: DeviceId::new(),
            room: None,
            received: None,
            plaintext: Segments::new(),
            encrypted: 0,
            output: TlsOutputBuffer::default(),
            is_closed: false,
            count: None,
        }
    }

    /// Counts the connection from now on.
    pub(super) fn count(&mut self, guard: TlsConnectionGuard) {
        self.count = Some(guard);
    }

    /// True until both sides have proved what they must.
    pub(super) fn is_handshaking(&self) -> bool {
        self.session.as_ref().is_none_or(TlsSession::is_handshaking)
    }

    /// The names in the certificate of the client; none if it has shown none.
    pub(super) fn peer_names(&self) -> Vec<String> {
        self.session.as_ref().map(TlsSession::peer_names).unwrap_or_default()
    }

    /// Memory for the next receive; `None` while received bytes are not decrypted.
    pub(super) fn take_room(&mut self) -> Option<Segments> {
        let session = self.session.as_ref()?;
        if self.received.is_some() || session.has_plaintext() {
            return None;
        }
        let mut room = self.room.take().unwrap_or_else(|| Buf::zeroed(ROOM));
        room.reclaim();
        Some(room.into())
    }

    /// Takes the memory back from the ring, with `n` received bytes in it.
    pub(super) fn arrived(&mut self, n: usize, mut data: Segments) {
        let Some(mut buf) = data.pop() else { return };
        if n > 0 {
            buf.truncate(n);
            self.received = Some((buf, 0));
        } else {
            self.room = Some(buf);
        }
    }

    /// The next step of the handshake, if something for it has arrived.
    fn take_handshake_step(&mut self) -> Option<(TlsSession, (Buf, usize))> {
        if self.session.as_ref().is_some_and(TlsSession::is_handshaking) && self.received.is_some() {
            return self.session.take().zip(self.received.take());
        }
        None
    }

    /// Takes back what was given to the thread for handshakes.
    fn handshake_step_done(&mut self, session: TlsSession, (buf, at): (Buf, usize)) {
        self.session = Some(session);
        if at < buf.len() {
            self.received = Some((buf, at));
        } else {
            self.room = Some(buf);
        }
    }

    /// Decrypts received bytes into the memory of `rx`, of which at most `may` bytes are new.
    /// Returns the number of bytes that have arrived there.
    ///
    /// # Errors
    /// The client violates the protocol, or its certificate is refused.
    pub(super) fn decrypt(
        &mut self,
        rx: &mut ReceiveBuffer,
        pool: &mut BufPool,
        may: usize,
    ) -> Result<Result<usize, ReceiveBlocked>, TlsSessionError> {
        let Some(session) = &mut self.session else { return Ok(Ok(0)) };
        while !session.has_plaintext() {
            let Some((buf, at)) = &mut self.received else { return Ok(Ok(0)) };
            let mut input = &buf[*at..];
            session.receive(&mut input)?;
            *at = buf.len() - input.len();
            if *at == buf.len() {
                self.room = self.received.take().map(|(buf, _)| buf);
            }
        }
        let mut room = match rx.room(pool, may) {
            Ok(room) => room,
            Err(blocked) => return Ok(Err(blocked)),
        };
        let mut done = 0;
        for buf in room.iter_mut() {
            let mut at = 0;
            while at < buf.len() && session.has_plaintext() {
                at += session.read(&mut buf[at..]);
            }
            done += at;
        }
        rx.arrived(done, room);
        Ok(Ok(done))
    }

    /// The next bytes to send: those of TLS itself, or the next part of the plaintext.
    pub(super) fn next_send(&mut self) -> Option<Segments> {
        let left = self.plaintext.len() - self.encrypted;
        let session = self.session.as_mut()?;
        if left > 0 && !session.is_handshaking() {
            self.plaintext.consume(self.encrypted, left.min(PART), |_, part| session.write(part));
            self.encrypted += left.min(PART);
        }
        self.output.take(session).map(Into::into)
    }

    /// Begins to send `plaintext`. The last one has left.
    pub(super) fn begin_send(&mut self, plaintext: Segments) {
        debug_assert!(self.plaintext.is_empty());
        (self.plaintext, self.encrypted) = (plaintext, 0);
    }

    /// True if no plaintext waits or is being sent, and TLS itself has nothing to send.
    pub(super) fn is_idle(&self) -> bool {
        self.plaintext.is_empty() && !self.has_output()
    }

    /// Handles the end of a send after `n` bytes.
    pub(super) fn sent(&mut self, n: usize, mut data: Segments) -> TlsSendResult {
        if n < data.len() {
            drop(data.split_to(n));
            return TlsSendResult::Rest(data);
        }
        self.output.put_back(data.pop());
        if self.plaintext.is_empty() || self.encrypted < self.plaintext.len() {
            return TlsSendResult::Part;
        }
        let plaintext = std::mem::take(&mut self.plaintext);
        TlsSendResult::Sent(std::mem::take(&mut self.encrypted), plaintext)
    }

    /// True if nothing waits for the send in flight.
    pub(super) fn is_all_out(&self) -> bool {
        self.encrypted == self.plaintext.len() && !self.has_output()
    }

    fn has_output(&self) -> bool {
        self.session.as_ref().is_some_and(TlsSession::has_output)
    }

    /// Tells the client that nothing follows. Returns false if it was told before.
    pub(super) fn close(&mut self) -> bool {
        let closes = !std::mem::replace(&mut self.is_closed, true);
        if let Some(session) = self.session.as_mut().filter(|_| closes) {
            session.close();
        }
        closes
    }

    /// Bytes of memory, at most.
    pub(super) fn held(&self) -> usize {
        let sending = if self.plaintext.is_empty() { 0 } else { 2 * (PART + OVERHEAD) };
        ROOM + sending.max(self.output.held())
    }

    /// Frees memory that is only kept for reuse.
    pub(super) fn trim(&mut self) {
        self.output.trim();
    }

    /// Returns the buffers of a send that is not completed.
    pub(super) fn clear(&mut self, pool: &mut BufPool) {
        return_buffers_to_pool(std::mem::take(&mut self.plaintext), pool);
        self.encrypted = 0;
    }
}

impl AcceptedNbdConnection {
    /// Decrypts what has arrived, if the connection uses TLS. Returns true if there is new input.
    pub(super) fn decrypt(&mut self, cx: &mut FrontCx<'_, '_>) -> bool {
        if self.tls.is_none() || self.taken >= REQUESTS_A_TURN || self.is_backpressured() || !self.listens() {
            return false;
        }
        if self.tls.as_ref().is_some_and(|tls| tls.is_handshaking()) {
            self.begin_handshake_step(cx);
            return false;
        }
        let mut result = self.decrypt_within_allowance();
        if let Ok(Err(ReceiveBlocked::Memory(need))) = result
            && self.try_reserve(need, cx)
        {
            result = self.decrypt_within_allowance();
        }
        match result {
            Ok(moved) => moved.is_ok_and(|n| n > 0),
            Err(error) => {
                self.fail_tls(&error);
                false
            }
        }
    }

    fn fail_tls(&mut self, error: &TlsSessionError) {
        tracing::warn!("nbd: the client {} is disconnected: {error}", self.admission_slot.peer());
        let shakes = matches!(self.phase, ConnectionPhase::Handshake(_));
        // Before anything is served, the client is told why.
        self.phase = if shakes { ConnectionPhase::Draining } else { ConnectionPhase::Dead };
    }

    /// Begins TLS: the answer to STARTTLS has left.
    pub(super) fn begin_tls(&mut self, cx: &mut FrontCx<'_, '_>) {
        if let Some(tls) = self.next_tls.take() {
            cx.subscribe(tls.topic);
            self.tls = Some(tls);
        }
    }

    /// Gives what has arrived to the thread for handshakes.
    fn begin_handshake_step(&mut self, cx: &mut FrontCx<'_, '_>) {
        let (Some(tls), Some(fd)) = (&mut self.tls, &self.fd) else { return };
        let Some((session, received)) = tls.take_handshake_step() else { return };
        let (core_set, core, topic) = (Arc::clone(&self.core_set), cx.core(), tls.topic);
        let step = TlsHandshakeStep { session, received, fd: Arc::clone(fd), core_set, core, topic };
        if !self.server_tls.as_ref().is_some_and(|server| server.run(step)) {
            let client = self.admission_slot.peer();
            tracing::warn!("nbd: the client {client} is disconnected: too many begin TLS");
            self.phase = ConnectionPhase::Dead;
        }
    }

    /// Handles the end of a step of the handshake. Returns true if `message` is one.
    pub(super) fn on_tls_message(&mut self, message: &(dyn Any + Send), cx: &mut FrontCx<'_, '_>) -> bool {
        let Some(done) = message.downcast_ref::<TlsHandshakeStepDone>() else { return false };
        let Some(tls) = &mut self.tls else { return false };
        let Some((session, received, result)) = done.take() else {
            self.phase = ConnectionPhase::Dead;
            return true;
        };
        tls.handshake_step_done(session, received);
        if !tls.is_handshaking() {
            cx.unsubscribe(tls.topic);
        }
        if let Err(error) = result {
            self.fail_tls(&error);
        }
        true
    }

    fn decrypt_within_allowance(&mut self) -> Result<Result<usize, ReceiveBlocked>, TlsSessionError> {
        let may = self.allowance();
        let Some(tls) = &mut self.tls else { return Ok(Ok(0)) };
        tls.decrypt(&mut self.rx, &mut self.writes, may)
    }

    /// The next bytes to send, if none are in flight.
    pub(super) fn next_send(&mut self) -> Option<Segments> {
        let Some(tls) = &mut self.tls else { return self.tx.next(&mut self.delta) };
        if tls.is_idle()
            && let Some(plaintext) = self.tx.next(&mut self.delta)
        {
            tls.begin_send(plaintext);
        }
        tls.next_send()
    }

    /// Tells a client of TLS that nothing follows, once all is answered.
    pub(super) fn close_tls(&mut self, cx: &mut FrontCx<'_, '_>) {
        let is_over = matches!(self.phase, ConnectionPhase::Draining) && self.are_all_answered();
        if let Some(tls) = self.tls.as_mut().filter(|_| is_over && self.tx.is_idle())
            && tls.close()
        {
            // A client that reads nothing must not keep the connection.
            self.deadline = self.deadline.min(cx.now() + Nanos(self.options.stop_max.as_nanos() as u64));
        }
    }
}
