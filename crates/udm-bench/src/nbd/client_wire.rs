//! The bytes of one connection: requests out, replies in. No clock, and no counting.
//!
//! Neither direction waits for the other: while the server takes no requests its replies are read,
//! so that two full sockets do not wait for each other.

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::time::Duration;
use udm_core::Op;
use udm_wire::nbd::{Command, CommandFlags, ReplyHeader, Request};

/// What is received at once, in bytes.
const RECEIVE: usize = 256 << 10;

/// Requests are put together up to so many bytes and then sent.
const SEND: usize = 256 << 10;

/// How long a call waits for the server before its caller may look at the clock.
const WAIT: Duration = Duration::from_millis(100);

/// One side of a connection: the client's.
pub struct NbdClientWire {
    fd: OwnedFd,
    /// Requests that are not sent yet, from `sent` on.
    out: Vec<u8>,
    sent: usize,
    input: Box<[u8]>,
    /// What has arrived and is not read yet.
    arrived: std::ops::Range<usize>,
    /// Bytes of data that belong to the reply of the cookie, and have not arrived.
    data: Option<(usize, u64)>,
    /// What writes carry.
    payload: Vec<u8>,
}

/// A request of the load.
#[derive(Clone, Copy, Debug)]
pub struct NbdWireRequest {
    pub op: Op,
    pub cookie: u64,
    pub offset: u64,
    pub len: u32,
}

impl NbdClientWire {
    /// A wire whose writes carry `payload`.
    ///
    /// # Errors
    /// When `fd` is no socket.
    pub fn new(fd: OwnedFd, payload: Vec<u8>) -> Result<NbdClientWire> {
        set_socket_timeout(&fd, Timeout::Recv, Some(WAIT))?;
        let out = Vec::with_capacity(SEND + payload.len() + Request::SIZE);
        let input = vec![0; RECEIVE].into_boxed_slice();
        Ok(NbdClientWire { fd, out, sent: 0, input, arrived: 0..0, data: None, payload })
    }

    /// True while another request may be put.
    pub fn has_room(&self) -> bool {
        self.out.len() < SEND
    }

    /// Puts a request with those that are to be sent.
    pub fn put(&mut self, asked: NbdWireRequest) {
        let command = match asked.op {
            Op::Write => Command::Write,
            Op::Discard => Command::Trim,
            _ => Command::Read,
        };
        let NbdWireRequest { cookie, offset, len, .. } = asked;
        let request = Request { flags: CommandFlags::empty(), command, cookie, offset, len };
        self.out.extend_from_slice(&request.encode());
        if asked.op == Op::Write {
            self.out.extend_from_slice(&self.payload[..len as usize]);
        }
    }

    /// Sends what the server takes now.
    ///
    /// # Errors
    /// When the connection is gone.
    pub fn flush(&mut self) -> Result<()> {
        while self.sent < self.out.len() {
            match send(&self.fd, &self.out[self.sent..], SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(n) => self.sent += n,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error).context("send"),
            }
        }
        self.out.clear();
        self.sent = 0;
        Ok(())
    }

    /// Waits for replies, not for ever and no longer than `most`, and calls `done` with each: its
    /// cookie and error. `op` says what a cookie that is in flight asked for, and how many bytes.
    ///
    /// # Errors
    /// When the connection is gone, or what comes is no reply.
    pub fn replies(
        &mut self,
        most: Option<Duration>,
        op: impl Fn(u64) -> Option<(Op, u32)>,
        mut done: impl FnMut(u64, u32),
    ) -> Result<()> {
        if !self.receive(most)? {
            return Ok(());
        }
        loop {
            if let Some((left, cookie)) = self.data {
                let now = left.min(self.arrived.len());
                self.arrived.start += now;
                if now < left {
                    self.data = Some((left - now, cookie));
                    break;
                }
                self.data = None;
                done(cookie, 0);
            }
            let mut unread = &self.input[self.arrived.clone()];
            let before = unread.len();
            let Some(header) = ReplyHeader::decode(&mut unread)? else { break };
            self.arrived.start += before - unread.len();
            let ReplyHeader::Simple(reply) = header else {
                bail!("a structured reply, which nobody asked for")
            };
            let (op, len) = op(reply.cookie).context("a reply to nothing")?;
            if op == Op::Read && reply.error == 0 {
                self.data = Some((len as usize, reply.cookie));
            } else {
                done(reply.cookie, reply.error);
            }
        }
        // What is left is less than a header.
        self.input.copy_within(self.arrived.clone(), 0);
        self.arrived = 0..self.arrived.len();
        Ok(())
    }

    /// Waits until something has arrived, or something can be sent; false when nothing came.
    fn receive(&mut self, most: Option<Duration>) -> Result<bool> {
        // Mostly the reply is what is waited for, and this is the only call.
        let sends = self.sent < self.out.len();
        let wait = if sends || most.is_some() { RecvFlags::DONTWAIT } else { RecvFlags::empty() };
        match recv(&self.fd, &mut self.input[self.arrived.end..], wait) {
            Ok((_, n)) => {
                ensure!(n > 0, "the server closed the connection");
                self.arrived.end += n;
                return Ok(true);
            }
            Err(Errno::INTR) => return Ok(false),
            Err(Errno::AGAIN) if wait.is_empty() => return Ok(false),
            Err(Errno::AGAIN) => {}
            Err(error) => return Err(error).context("receive"),
        }
        let events = if sends { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let mut fds = [PollFd::new(&self.fd, events)];
        let wait = most.map_or(WAIT, |most| most.min(WAIT));
        let wait = Timespec { tv_sec: 0, tv_nsec: wait.subsec_nanos().into() };
        match poll(&mut fds, Some(&wait)) {
            Ok(_) | Err(Errno::INTR) => Ok(false),
            Err(error) => Err(error).context("poll"),
        }
    }
}
