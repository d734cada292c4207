//! A connection of a lane to a server: its socket and its ring operations, for any protocol.

use super::tls::{ConnectionTls, TLS_ROOM_MAX};
use rustix::fd::OwnedFd;
use rustix::net::{Shutdown, SocketAddrAny, shutdown};
use std::sync::Arc;
use udm_core::{Buf, BufPool, Cx, Nanos, Segments, errno};
use udm_runtime::{Ring, RingCompletion, RingOp, RingUser};
use udm_tls::TlsSession;

/// Time limit for connecting and the handshake together, unless the path's deadline is shorter.
pub(crate) const HANDSHAKE_TIMEOUT: Nanos = Nanos(10_000_000_000);

/// Size of the receive buffer in bytes: at first, and at most.
const ROOM_MIN: usize = 16 << 10;
const ROOM_MAX: usize = 256 << 10;

/// Wait before an operation is repeated after the system was short of memory: at first, and at
/// most.
const SHORTAGE: Nanos = Nanos::from_millis(1);
const SHORTAGE_MAX: Nanos = Nanos::from_millis(100);

/// Tags of the ring operations.
const CONNECT: u64 = 0;
const SEND: u64 = 1;
const RECEIVE: u64 = 2;

/// Reason why a connection is abandoned.
pub(crate) struct DisconnectReason {
    /// Text for messages, one line.
    pub(crate) why: String,
    pub(crate) end: DisconnectKind,
}

/// Kind of loss: it decides whether the server may still execute what was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DisconnectKind {
    /// The server closed the connection.
    Closed,
    /// The server violated the protocol. The connection is open, but its data is meaningless.
    ProtocolError,
    /// The server takes too long. The connection is open, and answers may still arrive.
    TimedOut,
    /// The server shuts down and accepts no more requests (NBD's `ESHUTDOWN`). The connection is
    /// open, and answers to requests in flight may still arrive.
    ShuttingDown,
    /// The local system dropped the connection.
    LocalError,
}

impl DisconnectReason {
    pub(crate) fn new(end: DisconnectKind, why: impl Into<String>) -> DisconnectReason {
        DisconnectReason { why: why.into(), end }
    }

    /// Loss after the operation `what` failed. Only these two errnos come from the server. After a
    /// local error, the system reports the same as after a close, so the connection is not read any
    /// more.
    fn failed(what: &str, errno: i32) -> DisconnectReason {
        let end = if matches!(errno, errno::ECONNRESET | errno::EPIPE) {
            DisconnectKind::Closed
        } else {
            DisconnectKind::LocalError
        };
        DisconnectReason::new(end, format!("{what}: {}", errno::describe_errno(errno)))
    }
}

/// A connection of a lane to its server, at any stage of its protocol.
pub(crate) struct StreamConnection {
    user: RingUser,
    fd: Arc<OwnedFd>,
    sending: bool,
    /// The send in flight continues after the connection is dropped.
    ends_with_send: bool,
    /// Completions that were taken but not handled.
    back: Vec<RingCompletion>,
    /// When the operations in `again` are repeated. They failed because the system was short of
    /// memory. Such failures come at once, so immediate repeats would keep the core busy.
    again_at: Nanos,
    again: Vec<(u64, RingOp)>,
    /// Length of the next such wait.
    shortage: Nanos,
    /// Handshake bytes to send.
    pub(crate) raw: Vec<u8>,
    /// `None` if the connection uses no TLS, or not yet.
    tls: Option<Box<ConnectionTls>>,
    /// Size of the receive buffer in bytes.
    room: usize,
}

/// Result of a ring operation.
pub(crate) enum StreamEvent {
    /// The socket is connected.
    Connected,
    /// A send is complete; contains its buffer.
    Sent(Buf),
    /// This many bytes arrived at the start of the buffer.
    Bytes(Buf, usize),
    /// Nothing to handle.
    Nothing,
}

impl StreamConnection {
    /// Starts to connect the socket `fd` to the address `to`.
    pub(crate) fn connect(
        ring: &Ring,
        (fd, to): (OwnedFd, SocketAddrAny),
        cx: &mut Cx<'_>,
    ) -> StreamConnection {
        let connection = StreamConnection {
            user: ring.watcher(cx),
            fd: Arc::new(fd),
            sending: false,
            ends_with_send: false,
            back: Vec::new(),
            again_at: Nanos(0),
            again: Vec::new(),
            shortage: SHORTAGE,
            raw: Vec::new(),
            tls: None,
            room: ROOM_MIN,
        };
        let fd = Arc::clone(&connection.fd);
        connection.user.push(CONNECT, RingOp::Connect { fd, to: Box::new(to) });
        connection
    }

    /// Appends completed operations to `out`.
    pub(crate) fn take(&mut self, out: &mut Vec<RingCompletion>, cx: &mut Cx<'_>) {
        if !self.again.is_empty() {
            self.ask_again(cx);
        }
        out.append(&mut self.back);
        self.user.take(out);
    }

    #[cold]
    fn ask_again(&mut self, cx: &mut Cx<'_>) {
        if cx.now() < self.again_at {
            return cx.wake_at(self.again_at);
        }
        self.again.drain(..).for_each(|(tag, op)| self.user.push(tag, op));
    }

    /// Repeats an operation that failed with a transient error, at once or after a wait.
    #[cold]
    fn passing(&mut self, errno: i32, tag: u64, op: RingOp, cx: &mut Cx<'_>) {
        if !errno::is_memory_shortage(errno) {
            return self.user.push(tag, op);
        }
        if self.again.is_empty() {
            self.again_at = cx.now() + self.shortage;
            self.shortage = Nanos(self.shortage.0 * 2).min(SHORTAGE_MAX);
        }
        self.again.push((tag, op));
        cx.wake_at(self.again_at);
    }

    /// Returns completions that were not handled.
    pub(crate) fn put_back(&mut self, rest: impl Iterator<Item = RingCompletion>) {
        self.back.extend(rest);
    }

    /// Returns true if no send is in flight.
    pub(crate) fn may_send(&self) -> bool {
        !self.sending
    }

    /// The socket.
    pub(crate) fn socket(&self) -> &OwnedFd {
        &self.fd
    }

    /// Handles a completed operation.
    ///
    /// # Errors
    /// The reason why the connection is lost.
    pub(crate) fn finished(
        &mut self,
        done: RingCompletion,
        pool: &mut BufPool,
        cx: &mut Cx<'_>,
    ) -> Result<StreamEvent, DisconnectReason> {
        let failed = |what, errno| Err(DisconnectReason::failed(what, errno));
        match (done.tag, done.result) {
            (CONNECT, Ok(_)) => Ok(StreamEvent::Connected),
            (CONNECT, Err(errno)) => failed("connect", errno),
            (SEND, Err(errno)) if errno::is_transient_socket_errno(errno) => {
                // Nothing was sent.
                self.passing(errno, SEND, self.sends(done.data), cx);
                Ok(StreamEvent::Nothing)
            }
            (SEND, Err(errno)) => failed("send", errno),
            (SEND, Ok(n)) => {
                let mut data = done.data;
                if (n as usize) < data.len() {
                    drop(data.split_to(n as usize));
                    self.push_send(data);
                    return Ok(StreamEvent::Nothing);
                }
                (self.sending, self.shortage) = (false, SHORTAGE);
                if let Some(tls) = &mut self.tls {
                    let sent = tls.take_sent(data.pop());
                    return Ok(sent.map_or(StreamEvent::Nothing, StreamEvent::Sent));
                }
                Ok(data.pop().map_or(StreamEvent::Nothing, StreamEvent::Sent))
            }
            (_, Ok(0)) => {
                Err(DisconnectReason::new(DisconnectKind::Closed, "the server closed the connection"))
            }
            (_, Ok(n)) => {
                let n = n as usize;
                let max = if self.tls.is_none() { ROOM_MAX } else { TLS_ROOM_MAX };
                if n == self.room && self.room < max {
                    self.room *= 2;
                }
                let mut data = done.data;
                let Some(buf) = data.pop() else { return Ok(StreamEvent::Nothing) };
                if self.tls.is_some() { self.decrypt(buf, n, pool) } else { Ok(StreamEvent::Bytes(buf, n)) }
            }
            (_, Err(errno)) if errno::is_transient_socket_errno(errno) => {
                let buf = self.room_of(done.data.into_iter().next(), pool);
                self.passing(errno, RECEIVE, self.receives(buf), cx);
                Ok(StreamEvent::Nothing)
            }
            (_, Err(errno)) => failed("receive", errno),
        }
    }

    /// Decrypts the `n` bytes in `received`.
    fn decrypt(
        &mut self,
        received: Buf,
        n: usize,
        pool: &mut BufPool,
    ) -> Result<StreamEvent, DisconnectReason> {
        let Some(tls) = self.tls.as_mut().filter(|tls| !tls.is_broken()) else {
            // Its owner does not trust the bytes, and waits for the end of the connection.
            return Ok(StreamEvent::Bytes(received, n));
        };
        let decrypted = tls.decrypt(&received[..n], pool);
        let (plaintext, n) = decrypted
            .map_err(|error| DisconnectReason::new(DisconnectKind::ProtocolError, error.to_string()))?;
        if n > 0 {
            pool.put(received);
            return Ok(StreamEvent::Bytes(plaintext, n));
        }
        // A part of a record, or a message of TLS itself.
        pool.put(plaintext);
        self.receive(Some(received), pool);
        Ok(StreamEvent::Nothing)
    }

    /// Begins TLS: all bytes from now on are encrypted.
    pub(crate) fn begin_tls(&mut self, session: TlsSession) {
        self.tls = Some(Box::new(ConnectionTls::new(session)));
    }

    /// Starts the next receive, into `buf` if its size fits.
    pub(crate) fn receive(&self, buf: Option<Buf>, pool: &mut BufPool) {
        let buf = self.room_of(buf, pool);
        self.user.push(RECEIVE, self.receives(buf));
    }

    /// Returns a receive buffer: `buf` if its size fits.
    fn room_of(&self, buf: Option<Buf>, pool: &mut BufPool) -> Buf {
        match buf {
            Some(buf) if buf.len() == self.room => buf,
            Some(old) => {
                pool.put(old);
                pool.get(self.room)
            }
            None => pool.get(self.room),
        }
    }

    fn receives(&self, buf: Buf) -> RingOp {
        RingOp::Recv { fd: Arc::clone(&self.fd), data: buf.into() }
    }

    /// Sends the waiting handshake bytes.
    pub(crate) fn send_raw(&mut self) {
        if let Some(tls) = self.tls.as_mut().filter(|tls| tls.is_handshaking()) {
            if let Some(output) = tls.take_output() {
                self.sending = true;
                self.push_send(output.into());
            }
            return;
        }
        if !self.raw.is_empty() {
            let mut buf = Buf::zeroed(self.raw.len());
            buf.copy_from_slice(&self.raw);
            self.raw.clear();
            self.send(buf);
        }
    }

    /// Shuts down the sending side, so that the server finishes its work and closes. No send may be
    /// in flight: it would fail as if the server had closed.
    pub(crate) fn finish(&self) {
        debug_assert!(!self.sending);
        // If the connection is gone, this fails, and the receive reports the loss.
        let _ = shutdown(&self.fd, Shutdown::Write);
    }

    /// Sets whether send completions may be deferred: true if nothing waits for the send in flight.
    pub(crate) fn set_defer_sends(&self, defers_sends: bool) {
        self.user.set_defer_sends(defers_sends);
    }

    /// Sends `buf`. Only one send may be in flight.
    pub(crate) fn send(&mut self, buf: Buf) {
        debug_assert!(!self.sending);
        self.sending = true;
        let buf = if let Some(tls) = &mut self.tls { tls.encrypt(buf) } else { buf };
        self.push_send(buf.into());
    }

    /// Sends `bytes` as the last ones: the connection is dropped next. Without effect while a send
    /// is in flight, or after TLS was violated.
    pub(crate) fn send_last(&mut self, bytes: &[u8]) {
        if self.sending || self.tls.as_ref().is_some_and(|tls| tls.is_broken()) {
            return;
        }
        let last = if let Some(tls) = &mut self.tls {
            tls.encrypt_last(bytes)
        } else {
            let mut buf = Buf::zeroed(bytes.len());
            buf.copy_from_slice(bytes);
            Some(buf)
        };
        self.ends_with_send = true;
        last.into_iter().for_each(|last| self.push_send(last.into()));
    }

    fn push_send(&self, data: Segments) {
        self.user.push(SEND, self.sends(data));
    }

    fn sends(&self, data: Segments) -> RingOp {
        // Partial sends are allowed, so that a local error is reported and not taken for a close.
        RingOp::Send { fd: Arc::clone(&self.fd), data, whole: false }
    }
}

impl Drop for StreamConnection {
    /// Cancels the operations in flight, so that the socket is closed.
    fn drop(&mut self) {
        if !self.ends_with_send {
            self.user.cancel(SEND);
        }
        self.user.cancel(CONNECT);
        self.user.cancel(RECEIVE);
    }
}
