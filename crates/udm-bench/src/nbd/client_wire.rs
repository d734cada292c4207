//! The wire format of one connection: sends requests and receives replies. It reads no clock and
//! counts nothing.
//!
//! Neither direction waits for the other. Replies are read even while the server accepts no
//! requests, so two full sockets cannot block each other.

use crate::connection::{ConnectionRequest, RequestConnection, WAIT};
use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::time::Duration;
use udm_core::{Op, errno};
use udm_wire::nbd::{CommandFlags, NbdCommand, NbdRequestHeader, ReplyHeader};

/// Bytes per receive.
const RECEIVE: usize = 256 << 10;

/// Bytes of requests that are gathered for one send.
const SEND: usize = 256 << 10;

/// The client side of a connection.
pub struct NbdClientWire {
    fd: OwnedFd,
    /// Encoded requests. The bytes from `sent` on have not been sent.
    out: Vec<u8>,
    sent: usize,
    input: Box<[u8]>,
    /// The bytes of `input` that have arrived and have not been read.
    arrived: std::ops::Range<usize>,
    /// Bytes of read data that have not arrived, and the cookie of their reply.
    data: Option<(usize, u64)>,
    /// The data of writes.
    payload: Vec<u8>,
}

impl NbdClientWire {
    /// Creates a wire whose writes carry `payload`.
    ///
    /// # Errors
    /// If `fd` is not a socket.
    pub fn new(fd: OwnedFd, payload: Vec<u8>) -> Result<NbdClientWire> {
        set_socket_timeout(&fd, Timeout::Recv, Some(WAIT))?;
        let out = Vec::with_capacity(SEND + payload.len() + NbdRequestHeader::SIZE);
        let input = vec![0; RECEIVE].into_boxed_slice();
        Ok(NbdClientWire { fd, out, sent: 0, input, arrived: 0..0, data: None, payload })
    }

    /// Waits until data arrives or can be sent. Returns false if no data arrived.
    fn receive(&mut self, most: Option<Duration>) -> Result<bool> {
        // Usually only the reply is missing, and this is the only call.
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

impl RequestConnection for NbdClientWire {
    fn has_room(&self) -> bool {
        self.out.len() < SEND
    }

    fn put(&mut self, asked: ConnectionRequest) -> Result<()> {
        let command = match asked.op {
            Op::Write => NbdCommand::Write,
            Op::Discard => NbdCommand::Trim,
            _ => NbdCommand::Read,
        };
        let ConnectionRequest { cookie, offset, len, .. } = asked;
        let flags = CommandFlags::empty();
        let request = NbdRequestHeader { flags, command, cookie, offset, len: len.into() };
        self.out.extend_from_slice(&request.encode());
        if asked.op == Op::Write {
            self.out.extend_from_slice(&self.payload[..len as usize]);
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
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

    fn replies(
        &mut self,
        most: Option<Duration>,
        op: impl Fn(u64) -> Option<(Op, u32)>,
        mut done: impl FnMut(u64, i32),
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
            let ReplyHeader::Simple(reply) = header else { bail!("unexpected structured reply") };
            let (op, len) = op(reply.cookie).context("a reply without a request")?;
            if op == Op::Read && reply.error == 0 {
                self.data = Some((len as usize, reply.cookie));
            } else {
                done(reply.cookie, errno::errno_from_nbd_error(reply.error));
            }
        }
        // The rest is less than a header.
        self.input.copy_within(self.arrived.clone(), 0);
        self.arrived = 0..self.arrived.len();
        Ok(())
    }
}
