//! One connection of a lane: a socket, the ring's operations on it, and where it stands.

use super::remote_export::RemoteExport;
use rustix::fd::OwnedFd;
use rustix::net::{Shutdown, shutdown};
use std::sync::Arc;
use udm_core::bugs::{self, Bug};
use udm_core::{Buf, BufPool, Cx, Nanos, Segments, errno};
use udm_runtime::{Done, Ring, RingOp, RingUser};
use udm_wire::nbd::client::{ClientHandshake, HandshakeOptions, ReplyParser, RequestParams};
use udm_wire::nbd::{Command, CommandFlags};

/// How long connecting and the handshake may take together, unless the path's deadline is shorter.
const PATIENCE: Nanos = Nanos(10_000_000_000);

/// What is received at once, in bytes: at first, and at the most.
const ROOM_MIN: usize = 16 << 10;
const ROOM_MAX: usize = 256 << 10;

/// How long nothing is asked of a system that is short of memory: at first, and at the most.
const SHORTAGE: Nanos = Nanos::from_millis(1);
const SHORTAGE_MAX: Nanos = Nanos::from_millis(100);

/// Tags of the ring's operations.
const CONNECT: u64 = 0;
const SEND: u64 = 1;
const RECEIVE: u64 = 2;

/// Where a connection stands.
pub(super) enum ConnectionStage {
    /// The socket is being connected.
    Connecting,
    /// The handshake is under way.
    Handshaking(Box<ClientHandshake>),
    /// Requests may be sent.
    Ready(Box<ReplyParser>),
}

/// Why a connection is given up.
pub(super) struct ConnectionLoss {
    /// One line.
    pub(super) why: String,
    pub(super) end: LossKind,
}

/// How it has ended, as far as what was sent on it can still be delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LossKind {
    /// The server has closed it.
    Closed,
    /// The server has broken the protocol: it is open, and what comes means nothing.
    ProtocolError,
    /// The server takes too long: it is open, and may be answered on yet.
    Silent,
    /// The server is about to end and wants nothing more (NBD's `ESHUTDOWN`): it is open, and what
    /// is under way may be answered yet.
    ShuttingDown,
    /// Our system has given it up.
    LocalError,
}

impl ConnectionLoss {
    pub(super) fn new(end: LossKind, why: impl Into<String>) -> ConnectionLoss {
        ConnectionLoss { why: why.into(), end }
    }

    /// `what` has failed. Of all errors these alone come from the other end; behind one that does
    /// not, the system says the same as behind one that does, so nothing more is heard.
    fn failed(what: &str, errno: i32) -> ConnectionLoss {
        let end = if matches!(errno, errno::ECONNRESET | errno::EPIPE) {
            LossKind::Closed
        } else {
            LossKind::LocalError
        };
        ConnectionLoss::new(end, format!("{what}: {}", errno::text(errno)))
    }
}

/// See the module's documentation.
pub(super) struct Connection {
    user: RingUser,
    fd: Arc<OwnedFd>,
    pub(super) stage: ConnectionStage,
    /// When it was begun.
    pub(super) begun: Nanos,
    /// How often its server had been fenced when the handshake was over.
    pub(super) fenced: u64,
    /// When the handshake must have ended.
    deadline: Nanos,
    sending: bool,
    /// What was taken and not looked at.
    back: Vec<Done>,
    /// What our system had no memory for is asked for again at that time. It says so at once, and a
    /// core would do nothing else.
    again_at: Nanos,
    again: Vec<(u64, RingOp)>,
    /// How long the next such wait is.
    shortage: Nanos,
    /// What of the handshake is to be sent.
    pub(super) raw: Vec<u8>,
    /// The size of the buffer that is received into.
    room: usize,
}

/// What an operation of the ring brought.
pub(super) enum ConnectionEvent {
    /// The socket is connected.
    Connected,
    /// What was to be sent has left; its buffer.
    Sent(Buf),
    /// So many bytes, at the front of the buffer.
    Bytes(Buf, usize),
    /// Nothing to look at.
    Nothing,
}

impl Connection {
    /// Begins to connect.
    ///
    /// # Errors
    /// There is no socket to be had.
    pub(super) fn begin(
        ring: &Ring,
        server: &RemoteExport,
        turn: usize,
        cx: &mut Cx<'_>,
    ) -> Result<Connection, ConnectionLoss> {
        let address = &server.addresses[turn % server.addresses.len()];
        let (fd, to) = server
            .sockets
            .open(address)
            .map_err(|e| ConnectionLoss::new(LossKind::LocalError, e.to_string()))?;
        let (now, patience) = (cx.now(), server.deadline.unwrap_or(PATIENCE));
        let connection = Connection {
            user: ring.watcher(cx),
            fd: Arc::new(fd),
            stage: ConnectionStage::Connecting,
            begun: now,
            fenced: 0,
            deadline: now + patience.min(PATIENCE),
            sending: false,
            back: Vec::new(),
            again_at: Nanos(0),
            again: Vec::new(),
            shortage: SHORTAGE,
            raw: Vec::new(),
            room: ROOM_MIN,
        };
        let fd = Arc::clone(&connection.fd);
        connection.user.push(CONNECT, RingOp::Connect { fd, to: Box::new(to) });
        Ok(connection)
    }

    /// What has finished.
    pub(super) fn take(&mut self, out: &mut Vec<Done>, cx: &mut Cx<'_>) {
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

    /// An operation has failed for a reason that passes: asks for it again, at once or a little
    /// later.
    #[cold]
    fn passing(&mut self, errno: i32, tag: u64, op: RingOp, cx: &mut Cx<'_>) {
        if !errno::is_memory_shortage(errno) || bugs::on(Bug::ShortageSpins) {
            return self.user.push(tag, op);
        }
        if self.again.is_empty() {
            self.again_at = cx.now() + self.shortage;
            self.shortage = Nanos(self.shortage.0 * 2).min(SHORTAGE_MAX);
        }
        self.again.push((tag, op));
        cx.wake_at(self.again_at);
    }

    /// Gives back what of that nobody has looked at.
    pub(super) fn put_back(&mut self, rest: impl Iterator<Item = Done>) {
        self.back.extend(rest);
    }

    /// True once requests may be sent.
    pub(super) fn is_ready(&self) -> bool {
        matches!(self.stage, ConnectionStage::Ready(_))
    }

    /// True while nothing is being sent.
    pub(super) fn may_send(&self) -> bool {
        !self.sending
    }

    /// When it is given up, if it is not ready by then.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        (!self.is_ready() && !bugs::on(Bug::HandshakeUnwatched)).then_some(self.deadline)
    }

    /// Its socket.
    pub(super) fn socket(&self) -> &OwnedFd {
        &self.fd
    }

    /// Looks at a finished operation.
    ///
    /// # Errors
    /// Why the connection is lost.
    pub(super) fn finished(
        &mut self,
        done: Done,
        pool: &mut BufPool,
        cx: &mut Cx<'_>,
    ) -> Result<ConnectionEvent, ConnectionLoss> {
        let failed = |what, errno| Err(ConnectionLoss::failed(what, errno));
        match (done.tag, done.result) {
            (CONNECT, Ok(_)) => Ok(ConnectionEvent::Connected),
            (CONNECT, Err(errno)) => failed("connect", errno),
            (SEND, Err(errno)) if errno::is_transient(errno) && !bugs::on(Bug::InterruptedLost) => {
                // Nothing of it has left.
                self.passing(errno, SEND, self.sends(done.data), cx);
                Ok(ConnectionEvent::Nothing)
            }
            (SEND, Err(errno)) => failed("send", errno),
            (SEND, Ok(n)) => {
                let mut data = done.data;
                if (n as usize) < data.len() && !bugs::on(Bug::RestNotSent) {
                    drop(data.split_to(n as usize));
                    self.push_send(data);
                    return Ok(ConnectionEvent::Nothing);
                }
                (self.sending, self.shortage) = (false, SHORTAGE);
                Ok(data.pop().map_or(ConnectionEvent::Nothing, ConnectionEvent::Sent))
            }
            (_, Ok(0)) => Err(ConnectionLoss::new(LossKind::Closed, "the server closed the connection")),
            (_, Ok(n)) => {
                let n = n as usize;
                if n == self.room && self.room < ROOM_MAX {
                    self.room *= 2;
                }
                let mut data = done.data;
                Ok(data.pop().map_or(ConnectionEvent::Nothing, |buf| ConnectionEvent::Bytes(buf, n)))
            }
            (_, Err(errno)) if errno::is_transient(errno) => {
                let buf = self.room_of(done.data.into_iter().next(), pool);
                self.passing(errno, RECEIVE, self.receives(buf), cx);
                Ok(ConnectionEvent::Nothing)
            }
            (_, Err(errno)) => failed("receive", errno),
        }
    }

    /// The socket is connected: the handshake begins.
    pub(super) fn shake(&mut self, export: &str, pool: &mut BufPool) {
        let wish =
            HandshakeOptions { export: export.to_owned(), structured: true, ..HandshakeOptions::default() };
        self.stage = ConnectionStage::Handshaking(Box::new(ClientHandshake::new(wish)));
        self.receive(None, pool);
    }

    /// Receives what comes next, into `buf` if it is large enough.
    pub(super) fn receive(&self, buf: Option<Buf>, pool: &mut BufPool) {
        let buf = self.room_of(buf, pool);
        self.user.push(RECEIVE, self.receives(buf));
    }

    /// What is received into: `buf` if it is large enough.
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

    /// Sends what of the handshake waits.
    pub(super) fn send_raw(&mut self) {
        if !self.raw.is_empty() {
            let mut buf = Buf::zeroed(self.raw.len());
            buf.copy_from_slice(&self.raw);
            self.raw.clear();
            self.send(buf);
        }
    }

    /// Tells the server that nothing more comes, so that it ends what it has begun and closes. Not
    /// while something is being sent, which would fail as if the server had closed.
    pub(super) fn finish(&self) {
        debug_assert!(!self.sending);
        // Fails where the connection is gone, and then that is heard.
        let _ = shutdown(&self.fd, Shutdown::Write);
    }

    /// Says whether nobody waits for the end of the send that is under way.
    pub(super) fn set_defer_sends(&self, patient: bool) {
        self.user.set_defer_sends(patient);
    }

    /// Sends `buf`. One send at a time.
    pub(super) fn send(&mut self, buf: Buf) {
        debug_assert!(!self.sending);
        self.sending = true;
        self.push_send(buf.into());
    }

    fn push_send(&self, data: Segments) {
        self.user.push(SEND, self.sends(data));
    }

    fn sends(&self, data: Segments) -> RingOp {
        // In parts, so that an error of our system is heard, and not taken for a close.
        RingOp::Send { fd: Arc::clone(&self.fd), data, whole: false }
    }
}

impl Drop for Connection {
    /// Nothing of it is left: what is under way is called off, so that the socket is closed. A
    /// server that is well is told; what it still answers nobody hears.
    fn drop(&mut self) {
        if let (ConnectionStage::Ready(replies), false) = (&mut self.stage, self.sending)
            && replies.in_flight() == 0
        {
            let asked = RequestParams {
                command: Command::Disconnect,
                flags: CommandFlags::empty(),
                offset: 0,
                len: 0,
            };
            let header = replies.ask(0, asked);
            let mut buf = Buf::zeroed(header.len());
            buf.copy_from_slice(&header);
            self.push_send(buf.into());
        } else {
            self.user.cancel(SEND);
        }
        self.user.cancel(CONNECT);
        self.user.cancel(RECEIVE);
    }
}
