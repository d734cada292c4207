//! The io_uring of a core, shared by its lanes and front ends.
//!
//! Contract: a [`RingOp`] passes its memory and its file to the ring. Both stay there until the
//! kernel is done with them; the memory comes back in [`Done`]. If a [`RingUser`] is dropped, its
//! operations become orphans, and their memory is freed when they end. So backends and front ends
//! need no `unsafe`. Operations may end in any order. [`Ring::enter`] enters the kernel once per
//! turn for all users.
//!
//! A small send is *quick*: if the socket has room, the kernel posts no completion for it (Linux
//! 6.1). After the system call that submits it, the send has left, or a completion gives the reason
//! why not. So on a core that sleeps, a request to a null device costs one `io_uring_enter`, and
//! one to a file costs two. [`RingUser::set_defer_sends`] says that a user need not know when a send
//! has left. For all other users the core checks before it sleeps.
//!
//! In the simulator a [`SimulatedKernel`] executes the operations. All other code of the ring is the
//! same.

mod op;
mod simulated;
mod sys;
pub(crate) mod unavailable;

pub use op::{Done, RingOp};
pub use simulated::{FinishedOp, SimulatedKernel};

use crate::inbox::Inbox;
use simulated::RingBackend;
use slab::Slab;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use sys::{Cqe, Entry};
use udm_core::{Buf, Cx, Segments, WakeTarget, errno};

/// The longest send in bytes that is first tried without waiting for room. A socket has room for so
/// much, or its client is slow.
const QUICK_MAX: u32 = 64 << 10;

/// Entries of the submission queue. More operations than that in one turn cost one more system
/// call.
const ENTRIES: u32 = 512;

/// A handle to the core's ring. Clones are the same ring; it never leaves its core.
#[derive(Clone)]
pub struct Ring(Rc<RefCell<RingState>>);

struct RingState {
    kernel: RingBackend,
    entries: Slab<InFlightOp>,
    users: Slab<RingUserState>,
    /// Clients that got completions since the reactor last looked.
    ready: Vec<usize>,
    /// Operations that did not fit the submission queue.
    backlog: VecDeque<usize>,
    /// Recycled entries, with the room of their lists.
    #[expect(clippy::vec_box, reason = "the kernel holds pointers into an entry: it must not move")]
    spare: Vec<Box<Entry>>,
    completions: Vec<Cqe>,
    /// Quick sends that the kernel says nothing of unless they fail, oldest first.
    quick: Vec<usize>,
    /// Something finished since the turn began.
    progress: bool,
}

struct InFlightOp {
    user: usize,
    tag: u64,
    entry: Box<Entry>,
    /// It is a send that does not wait for room. One that has to is sent again, patiently.
    quick: bool,
}

#[derive(Default)]
struct RingUserState {
    done: Vec<Done>,
    in_flight: usize,
    dropped: bool,
    ready: bool,
    /// Who is visited when something of its finished, though it has nothing under way.
    visit: Option<WakeTarget>,
    /// It has nothing to do when a send of its has left.
    defers_sends: bool,
}

/// A user of the ring: a lane or a front end. Its tags are its own.
pub struct RingUser {
    ring: Ring,
    id: usize,
}

impl Ring {
    /// Sets up a ring for the calling thread.
    ///
    /// # Errors
    /// When the kernel has no io_uring, or does not let this process have one.
    pub(crate) fn new() -> io::Result<Ring> {
        RingBackend::new().map(Ring::with_backend)
    }

    /// A ring whose operations `kernel` runs, with a submission queue of `room` entries.
    pub(crate) fn simulated(kernel: Box<dyn SimulatedKernel>, room: usize) -> Ring {
        Ring::with_backend(RingBackend::simulated(kernel, room))
    }

    fn with_backend(kernel: RingBackend) -> Ring {
        Ring(Rc::new(RefCell::new(RingState {
            kernel,
            entries: Slab::with_capacity(ENTRIES as usize),
            users: Slab::new(),
            ready: Vec::new(),
            backlog: VecDeque::new(),
            spare: Vec::new(),
            completions: Vec::new(),
            quick: Vec::new(),
            progress: false,
        })))
    }

    /// The ring of the core that `cx` belongs to; `None` in a world without one.
    #[must_use]
    pub fn of(cx: &Cx<'_>) -> Option<Ring> {
        cx.io()?.downcast_ref::<Ring>().cloned()
    }

    /// A new user.
    #[must_use]
    pub fn user(&self) -> RingUser {
        let id = self.0.borrow_mut().users.insert(RingUserState::default());
        RingUser { ring: self.clone(), id }
    }

    /// A new user that is visited whenever something of its has finished: for a lane that watches
    /// something while it is idle. It is the lane that is being opened.
    #[must_use]
    pub fn watcher(&self, cx: &Cx<'_>) -> RingUser {
        let user = self.user();
        user.set_wake_target(cx.current_target());
        user
    }

    /// True when something is to be submitted or reaped: a turn must enter or look.
    pub(crate) fn has_work(&self) -> bool {
        let mut inner = self.0.borrow_mut();
        inner.kernel.has_submissions() || !inner.backlog.is_empty() || inner.kernel.has_completions()
    }

    /// True when something is to be reaped.
    pub(crate) fn has_completions(&self) -> bool {
        self.0.borrow_mut().kernel.has_completions()
    }

    /// True when somebody goes on as soon as a send that is queued has left. The kernel says
    /// nothing of one that left at once, so the core must not sleep before it has looked.
    pub(crate) fn has_waiter(&self) -> bool {
        let inner = self.0.borrow();
        let defers_sends =
            |&key: &usize| inner.users.get(inner.entries[key].user).is_some_and(|c| c.defers_sends);
        !inner.backlog.is_empty() || !inner.quick.iter().all(defers_sends)
    }

    /// Says whether something finished since the last call: lanes and front ends have yet to look.
    pub(crate) fn take_progress(&self) -> bool {
        std::mem::take(&mut self.0.borrow_mut().progress)
    }

    /// Submits what is queued, without waiting, and takes in what has finished.
    pub(crate) fn enter(&self) {
        let mut inner = self.0.borrow_mut();
        inner.flush_backlog();
        inner.kernel.submit();
        inner.reap();
    }

    /// Submits what is queued, and takes nothing in.
    pub(crate) fn submit(&self) {
        let mut inner = self.0.borrow_mut();
        inner.flush_backlog();
        inner.kernel.submit();
    }

    /// Submits, then sleeps until something finishes or `timeout` is over.
    pub(crate) fn wait(&self, timeout: Option<Duration>) {
        let mut inner = self.0.borrow_mut();
        inner.flush_backlog();
        inner.kernel.wait(timeout);
        inner.reap();
    }

    /// Appends who is to be visited for completions since the last call.
    pub(crate) fn take_ready(&self, out: &mut Vec<WakeTarget>) {
        let mut inner = self.0.borrow_mut();
        let RingState { ready, users, .. } = &mut *inner;
        for id in ready.drain(..) {
            if let Some(user) = users.get_mut(id) {
                user.ready = false;
                out.extend(user.visit);
            }
        }
    }
}

impl RingState {
    fn push(&mut self, user: usize, tag: u64, op: RingOp) {
        let mut entry = self.spare.pop().unwrap_or_default();
        entry.fill(op);
        self.users[user].in_flight += 1;
        let quick = self.kernel.supports_quick_send() && entry.is_send() && entry.bytes() <= QUICK_MAX;
        let key = self.entries.insert(InFlightOp { user, tag, entry, quick });
        if !self.backlog.is_empty() || !self.queue(key) {
            self.backlog.push_back(key);
        }
    }

    /// Puts an operation into the submission queue, if there is room.
    fn queue(&mut self, key: usize) -> bool {
        let op = &mut self.entries[key];
        let queued = self.kernel.push(&mut op.entry, key as u64, op.quick);
        if queued && op.quick {
            self.quick.push(key);
        }
        queued
    }

    fn cancel(&mut self, user: usize, tag: u64) {
        let of = |op: &InFlightOp| op.user == user && op.tag == tag;
        let keys: Vec<usize> = self.entries.iter().filter(|(_, op)| of(op)).map(|(key, _)| key).collect();
        for key in keys {
            if let Some(at) = self.backlog.iter().position(|&waiting| waiting == key) {
                self.backlog.remove(at);
                self.progress = true;
                self.finished(key, -errno::ECANCELED);
            } else if !self.kernel.push_cancel(key as u64) {
                self.kernel.submit();
                self.kernel.push_cancel(key as u64);
            }
        }
    }

    fn flush_backlog(&mut self) {
        while let Some(&key) = self.backlog.front() {
            if !self.queue(key) {
                self.kernel.submit();
                if !self.queue(key) {
                    return;
                }
            }
            self.backlog.pop_front();
        }
    }

    /// Takes in what has finished.
    fn reap(&mut self) {
        // Asked before, so that no failure is overlooked.
        let settled = self.kernel.is_flushed();
        self.kernel.completions(&mut self.entries, &mut self.completions);
        let mut completions = std::mem::take(&mut self.completions);
        for c in completions.drain(..) {
            self.progress = true;
            let key = c.user_data as usize;
            if self.entries.get(key).is_some_and(|op| op.quick) && !self.quick_failed(key, c.result) {
                continue;
            }
            self.finished(key, c.result);
        }
        self.completions = completions;
        if settled && !self.quick.is_empty() {
            self.reap_quick();
        }
    }

    /// A quick send was short, or failed. False when it is sent again, and waits for room.
    #[cold]
    fn quick_failed(&mut self, key: usize, result: i32) -> bool {
        self.quick.retain(|&quick| quick != key);
        self.entries[key].quick = false;
        if result == -errno::EAGAIN {
            self.backlog.push_back(key);
        }
        result != -errno::EAGAIN
    }

    /// Quick sends that the kernel said nothing of have sent all they had.
    fn reap_quick(&mut self) {
        let mut quick = std::mem::take(&mut self.quick);
        for key in quick.drain(..) {
            let bytes = self.entries[key].entry.bytes();
            self.progress = true;
            self.finished(key, bytes as i32);
        }
        self.quick = quick;
    }

    fn finished(&mut self, key: usize, result: i32) {
        let Some(InFlightOp { user, tag, mut entry, .. }) = self.entries.try_remove(key) else { return };
        let data = entry.take_data();
        if self.spare.len() < ENTRIES as usize {
            self.spare.push(entry);
        }
        let Some(state) = self.users.get_mut(user) else { return };
        state.in_flight -= 1;
        if state.dropped {
            if state.in_flight == 0 {
                self.users.remove(user);
            }
            return;
        }
        let result = u32::try_from(result).map_err(|_| -result);
        state.done.push(Done { tag, result, data });
        if !state.ready {
            state.ready = true;
            self.ready.push(user);
        }
    }
}

impl Drop for RingState {
    fn drop(&mut self) {
        // What the kernel has not been given is simply dropped; what is queued for it is sent, so
        // that it can be cancelled.
        for key in self.backlog.drain(..) {
            self.entries.remove(key);
        }
        self.kernel.submit();
        if !self.kernel.cancel_all() {
            return;
        }
        // Only what the kernel has seen must be waited for. A file system that hangs must not hang
        // the exit: after the bound the memory is leaked, so that a late completion writes into
        // nobody's memory.
        for _ in 0..500 {
            self.kernel.completions(&mut self.entries, &mut self.completions);
            for c in self.completions.drain(..) {
                self.entries.try_remove(c.user_data as usize);
            }
            if self.kernel.is_flushed() {
                for key in self.quick.drain(..) {
                    self.entries.try_remove(key);
                }
            }
            if self.entries.is_empty() {
                return;
            }
            self.kernel.wait(Some(Duration::from_millis(10)));
        }
        Box::leak(Box::new(std::mem::take(&mut self.entries)));
    }
}

impl RingUser {
    /// Calls off the operations under way with `tag`. Each comes back all the same: with ECANCELED,
    /// or with what it did when it was too late. One that the ring has no room to call off goes on.
    pub fn cancel(&self, tag: u64) {
        self.ring.0.borrow_mut().cancel(self.id, tag);
    }

    /// Queues an operation; it goes to the kernel at the end of the turn. `tag` comes back with its
    /// result.
    pub fn push(&self, tag: u64, op: RingOp) {
        self.ring.0.borrow_mut().push(self.id, tag, op);
    }

    /// Says whether this user has nothing to do when its sends have left: then it may hear of them
    /// later, when something else happens on the core, which saves a system call. At first it is
    /// not so.
    pub fn set_defer_sends(&self, defers_sends: bool) {
        self.ring.0.borrow_mut().users[self.id].defers_sends = defers_sends;
    }

    /// Appends what has finished since the last call.
    pub fn take(&self, out: &mut Vec<Done>) {
        out.append(&mut self.ring.0.borrow_mut().users[self.id].done);
    }

    /// Operations under way.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.ring.0.borrow().users[self.id].in_flight
    }

    /// Who is visited when something of its has finished.
    pub(crate) fn set_wake_target(&self, visit: Option<WakeTarget>) {
        self.ring.0.borrow_mut().users[self.id].visit = visit;
    }
}

impl Drop for RingUser {
    fn drop(&mut self) {
        // A ring that is being torn down drops its users' state itself.
        let Ok(mut inner) = self.ring.0.try_borrow_mut() else { return };
        let state = &mut inner.users[self.id];
        state.dropped = true;
        state.done.clear();
        if state.in_flight == 0 {
            inner.users.remove(self.id);
        }
    }
}

/// The read of the inbox's eventfd that is always under way, so that a sleeping core hears a knock.
pub(crate) struct EventFdRead {
    user: RingUser,
    fd: Arc<OwnedFd>,
    done: Vec<Done>,
}

impl EventFdRead {
    pub(crate) fn new(ring: &Ring, inbox: &Inbox) -> EventFdRead {
        let bell = EventFdRead { user: ring.user(), fd: inbox.eventfd(), done: Vec::new() };
        bell.arm(Segments::from(Buf::zeroed(8)));
        bell
    }

    fn arm(&self, data: Segments) {
        self.user.push(0, RingOp::Read { fd: self.fd.clone(), offset: 0, data, cached: false });
    }

    /// Arms the bell again after it rang.
    pub(crate) fn rearm(&mut self) {
        self.user.take(&mut self.done);
        if let Some(done) = self.done.pop() {
            self.arm(done.data);
        }
    }
}

#[cfg(test)]
mod tests;
