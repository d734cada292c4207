//! Executes the ring operations of a simulated core. They complete late, in any order, partly, with
//! errors, or cancelled.

use super::clock;
use super::net::{SimNetwork, SocketIoResult};
use crate::rng::SimRng;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use udm_core::{Nanos, errno};
use udm_runtime::{RingOp, SimulatedCqe, SimulatedKernel};

/// Minimum pause of a client before it sends again after a memory shortage.
const SHORTAGE_MIN: Nanos = Nanos::from_millis(1);

/// An operation in progress.
struct PendingRingOp {
    op: RingOp,
    /// Connection of the operation; `None` for the core's doorbell and other eventfds.
    link: Option<usize>,
    /// Bytes sent so far.
    done: usize,
    /// Earliest time of the completion.
    due: Nanos,
    called_off: bool,
}

/// The operations that a core has in progress.
pub(crate) struct SimRingState {
    net: Rc<RefCell<SimNetwork>>,
    chance: SimRng,
    /// Approximate duration of operations, in ns.
    latency: u64,
    pending: BTreeMap<u64, PendingRingOp>,
    ended: Vec<SimulatedCqe>,
    /// Number of cancelled operations.
    pub(crate) called_off: u64,
    /// First rule that the core violated.
    pub(crate) wrong: Option<String>,
}

/// The core's handle to its ring state.
pub(crate) struct SimKernel(pub(crate) Rc<RefCell<SimRingState>>);

impl SimRingState {
    pub(crate) fn new(
        net: &Rc<RefCell<SimNetwork>>,
        chance: SimRng,
        latency: u64,
    ) -> Rc<RefCell<SimRingState>> {
        Rc::new(RefCell::new(SimRingState {
            net: net.clone(),
            chance,
            latency,
            pending: BTreeMap::new(),
            ended: Vec::new(),
            called_off: 0,
            wrong: None,
        }))
    }

    fn later(&mut self) -> Nanos {
        // Half of the operations complete at once.
        if self.chance.one_in(2) {
            return clock::now();
        }
        clock::now() + Nanos(self.chance.span(self.latency))
    }

    /// True if a completion waits for the core.
    pub(crate) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Number of operations in progress on connections.
    pub(crate) fn in_flight(&self) -> usize {
        self.pending.values().filter(|pending| pending.link.is_some()).count()
    }

    /// Completes the operations that can complete now. Returns the earliest time of the next
    /// completion.
    pub(crate) fn go_on(&mut self) -> Nanos {
        let now = clock::now();
        let mut next = Nanos::NEVER;
        let net = self.net.clone();
        let mut net = net.borrow_mut();
        let keys: Vec<u64> = self.pending.keys().copied().collect();
        for key in keys {
            let Some(mut pending) = self.pending.remove(&key) else { continue };
            let can = match (&pending.op, pending.link) {
                (RingOp::Recv { .. }, Some(l)) => net.can_receive(l),
                (RingOp::Send { .. }, Some(l)) => net.can_send(l),
                (RingOp::Connect { .. }, Some(l)) => net.links[l].connected.is_some(),
                (RingOp::Read { fd, .. }, None) => is_fd_ready(fd, PollFlags::IN),
                (RingOp::Write { fd, .. }, None) => is_fd_ready(fd, PollFlags::OUT),
                _ => true,
            };
            if !can && !pending.called_off {
                self.pending.insert(key, pending);
                continue;
            }
            if pending.due > now {
                next = next.min(pending.due);
                self.pending.insert(key, pending);
                continue;
            }
            match self.try_one(&mut pending, can, &mut net) {
                SocketIoResult::Ended(result) => self.end(key, pending.op, Some(result)),
                SocketIoResult::Waits => {
                    pending.due = self.later();
                    // If there is still room, the operation was cut short and continues by itself.
                    if pending.link.is_some_and(|l| net.can_send(l)) {
                        next = next.min(pending.due);
                    }
                    self.pending.insert(key, pending);
                }
            }
        }
        next
    }

    fn try_one(&mut self, pending: &mut PendingRingOp, can: bool, net: &mut SimNetwork) -> SocketIoResult {
        if pending.called_off && (!can || self.chance.one_in(2)) {
            let done = pending.done as i32;
            return SocketIoResult::Ended(if done > 0 { done } else { -errno::ECANCELED });
        }
        match (&mut pending.op, pending.link) {
            (RingOp::Recv { data, .. }, Some(l)) => net.receive(l, data),
            (RingOp::Send { data, .. }, Some(l)) => net.send(l, data, &mut pending.done, false),
            (RingOp::Connect { .. }, Some(l)) => {
                net.links[l].connected.map_or(SocketIoResult::Waits, SocketIoResult::Ended)
            }
            (RingOp::Read { fd, data, .. }, None) => {
                let mut count = [0; 8];
                let read = rustix::io::read(&**fd, &mut count);
                for piece in data.iter_mut() {
                    let n = piece.len();
                    piece.copy_from_slice(&count[..n]);
                }
                SocketIoResult::Ended(read.map_or(-errno::EIO, |n| n as i32))
            }
            (RingOp::Write { fd, data, .. }, None) => {
                let mut count = [0; 8];
                let len = data.copy_to(&mut count);
                let written = rustix::io::write(&**fd, &count[..len]);
                SocketIoResult::Ended(written.map_or(-errno::EIO, |n| n as i32))
            }
            _ => SocketIoResult::Ended(-errno::EINVAL),
        }
    }

    /// Queues a completion at a random position.
    fn end(&mut self, key: u64, op: RingOp, result: Option<i32>) {
        let at = self.chance.below(self.ended.len() as u64 + 1) as usize;
        self.ended.insert(at, SimulatedCqe { key, op, result });
    }
}

fn is_fd_ready(fd: &Arc<OwnedFd>, how: PollFlags) -> bool {
    let mut fds = [PollFd::new(fd, how)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|n| n > 0)
}

impl SimulatedKernel for SimKernel {
    fn begin(&mut self, key: u64, op: RingOp, quick: bool) {
        let mut outside = self.0.borrow_mut();
        let link = match &op {
            RingOp::Recv { fd, .. } | RingOp::Send { fd, .. } | RingOp::Connect { fd, .. } => {
                outside.net.borrow_mut().adopt();
                let link = outside.net.borrow().of(fd);
                if link.is_none() {
                    outside.wrong = Some("an operation on an unknown socket".into());
                }
                link
            }
            _ => None,
        };
        let short = match (&op, link) {
            (RingOp::Send { .. }, Some(l)) => outside.net.borrow_mut().links[l].short_at.take(),
            _ => None,
        };
        if short.is_some_and(|short| clock::now().since(short) < SHORTAGE_MIN) {
            outside.wrong = Some("a send too soon after a memory shortage".into());
        }
        if let (true, RingOp::Send { data, .. }, Some(l)) = (quick, &op, link) {
            let mut done = 0;
            let io = outside.net.borrow_mut().send(l, data, &mut done, true);
            let SocketIoResult::Ended(result) = io else { unreachable!("a quick send does not wait") };
            let silent = result == data.len() as i32;
            return outside.end(key, op, (!silent).then_some(result));
        }
        let twin = |p: &PendingRingOp| {
            p.link == link && std::mem::discriminant(&p.op) == std::mem::discriminant(&op)
        };
        if link.is_some() && outside.pending.values().any(twin) {
            outside.wrong = Some(format!("two operations of one kind at once on connection {link:?}"));
        }
        let due = outside.later();
        outside.pending.insert(key, PendingRingOp { op, link, done: 0, due, called_off: false });
    }

    fn cancel(&mut self, key: u64) {
        let mut outside = self.0.borrow_mut();
        let due = outside.later();
        if let Some(pending) = outside.pending.get_mut(&key) {
            (pending.called_off, pending.due) = (true, due);
            outside.called_off += 1;
        }
    }

    fn has_finished(&self) -> bool {
        self.0.borrow().has_ended()
    }

    fn finished(&mut self, out: &mut Vec<SimulatedCqe>) {
        out.append(&mut self.0.borrow_mut().ended);
    }
}
