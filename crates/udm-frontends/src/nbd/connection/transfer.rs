//! Receives and sends of a connection, and what follows from their ends.

use super::tls::TlsSendResult;
use super::{AcceptedNbdConnection, ConnectionPhase, RECV, SEND};
use crate::nbd::receive::ReceiveBlocked;
use crate::nbd::reply::return_buffers_to_pool;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use udm_core::Segments;
use udm_core::errno::ECANCELED;
use udm_runtime::{FrontCx, RingCompletion, RingOp};

impl AcceptedNbdConnection {
    /// Handles the end of a receive.
    pub(super) fn received(&mut self, done: RingCompletion) {
        self.receiving = false;
        if matches!(self.phase, ConnectionPhase::Dead) {
            return return_buffers_to_pool(done.data, &mut self.writes);
        }
        match done.result {
            Ok(n) if n > 0 => {
                self.admission_slot.mark_active();
                self.arrived(n as usize, done.data);
                // Nothing more is taken in.
                self.read_eof |= matches!(self.phase, ConnectionPhase::Draining);
            }
            Ok(_) => {
                self.arrived(0, done.data);
                // The client sends nothing more, but may still read its answers.
                match self.phase {
                    ConnectionPhase::Serving if self.is_cut() => self.phase = ConnectionPhase::Dead,
                    ConnectionPhase::Serving => {
                        (self.phase, self.read_eof) = (ConnectionPhase::Draining, true);
                    }
                    ConnectionPhase::Handshake(_) => self.phase = ConnectionPhase::Dead,
                    ConnectionPhase::Draining => self.read_eof = true,
                    ConnectionPhase::Dead | ConnectionPhase::Moved => {}
                }
            }
            // Cancelled for a move, which may itself have been cancelled since.
            Err(ECANCELED) => self.arrived(0, done.data),
            Err(errno) => {
                self.arrived(0, done.data);
                tracing::debug!(errno, "nbd: receive failed");
                self.phase = ConnectionPhase::Dead;
            }
        }
    }

    /// Takes the memory of a receive back, with `n` bytes in it.
    fn arrived(&mut self, n: usize, data: Segments) {
        match &mut self.tls {
            None => self.rx.arrived(n, data),
            Some(tls) => tls.arrived(n, data),
        }
    }

    /// Returns true if the client does not read answers either. TCP reports that only when a send
    /// fails.
    fn is_cut(&self) -> bool {
        let Some(fd) = &self.fd else { return true };
        let mut fds = [PollFd::new(fd, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }

    /// Handles the end of a send.
    pub(super) fn sent(&mut self, done: RingCompletion, cx: &mut FrontCx<'_, '_>) {
        self.sending = false;
        let dead = matches!(self.phase, ConnectionPhase::Dead);
        let n = match done.result {
            Ok(n) if n > 0 && !dead => n as usize,
            other => {
                tracing::debug!(?other, "nbd: send failed");
                self.phase = ConnectionPhase::Dead;
                return_buffers_to_pool(done.data, &mut self.reads);
                return;
            }
        };
        let (n, data) = match &mut self.tls {
            None => (n, done.data),
            Some(tls) => match tls.sent(n, done.data) {
                TlsSendResult::Rest(rest) => return self.send(rest, cx),
                TlsSendResult::Part => return,
                TlsSendResult::Sent(n, plaintext) => (n, plaintext),
            },
        };
        match self.tx.sent(n, data, &mut self.reads) {
            Ok(sent) => {
                self.open -= sent.answers;
                self.open_bytes -= sent.charge;
            }
            Err(rest) => match &mut self.tls {
                Some(tls) => tls.begin_send(rest),
                None => self.send(rest, cx),
            },
        }
    }

    /// Sends `data`. No other send is in flight.
    pub(super) fn send(&mut self, data: Segments, cx: &mut FrontCx<'_, '_>) {
        let Some(fd) = self.fd.clone() else { return };
        self.sending = true;
        self.client_at = cx.now();
        cx.push(SEND, RingOp::Send { fd, data, whole: true });
    }

    /// Starts a receive, if there is memory for it.
    pub(super) fn receive(&mut self, cx: &mut FrontCx<'_, '_>) {
        let room = self.tls.as_mut().map(|tls| tls.take_room());
        let data = match room {
            Some(room) => room,
            None => self.receive_room(cx),
        };
        if let (Some(data), Some(fd)) = (data, self.fd.clone()) {
            self.leave_line(cx);
            self.receiving = true;
            self.client_at = cx.now();
            cx.push(RECV, RingOp::Recv { fd, data });
        }
    }

    /// Memory for a receive, if there is some.
    fn receive_room(&mut self, cx: &mut FrontCx<'_, '_>) -> Option<Segments> {
        let may = self.allowance();
        let mut room = self.rx.room(&mut self.writes, may);
        if let Err(ReceiveBlocked::Memory(need)) = room
            && self.try_reserve(need, cx)
        {
            let may = self.allowance();
            room = self.rx.room(&mut self.writes, may);
        }
        room.ok()
    }
}
