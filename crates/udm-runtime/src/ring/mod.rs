//! The io_uring of a core, shared by its lanes and front ends.
//!
//! Contract: a [`RingOp`] passes its memory and its file to the ring. Both stay there until the
//! kernel is done with them; the memory comes back in [`RingCompletion`]. If a [`RingUser`] is
//! dropped, its operations continue, and their memory is freed when they complete. So backends and
//! front ends need no `unsafe`. Operations may complete in any order. [`Ring::enter`] enters the
//! kernel once per turn for all users.
//!
//! A small send is *quick*: if the socket has room, the kernel posts no completion for it (Linux
//! 6.1). After the system call that submits it, the data is sent, or a completion gives the error.
//! So on a core that sleeps, a request to a null device costs one `io_uring_enter`, and one to a
//! file costs two. [`RingUser::set_defer_sends`] declares that a user need not know when a send has
//! completed. For all other users, the core checks before it sleeps whether a send has completed.
//!
//! In the simulator a [`SimulatedKernel`] executes the operations. All other code of the ring is
//! the same.

mod op;
mod simulated;
mod sys;
mod ublk_control;
mod ublk_device;
pub(crate) mod unavailable;

pub use op::{RingCompletion, RingOp};
pub use simulated::{SimulatedCqe, SimulatedKernel};
pub use ublk_control::UblkControl;
pub use ublk_device::{UblkDevice, UblkDeviceQueue};

use simulated::RingBackend;
use slab::Slab;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;
use sys::{Cqe, RingOpKernelArgs};
use udm_core::{Cx, PolledUnitId, errno};

/// The longest quick send in bytes: a socket has room for this much, unless its client is slow.
const QUICK_MAX: u32 = 64 << 10;

/// Entries of the submission queue. If a turn has more operations, it costs one more system call.
const ENTRIES: u32 = 512;

/// A handle to the core's ring. Clones refer to the same ring; it never leaves its core.
#[derive(Clone)]
pub struct Ring(Rc<RefCell<RingOpsAndUsers>>);

struct RingOpsAndUsers {
    kernel: RingBackend,
    entries: Slab<InFlightOp>,
    users: Slab<RingUserState>,
    /// Users with completions since the reactor last took them.
    ready: Vec<usize>,
    /// Operations that did not fit the submission queue.
    backlog: VecDeque<usize>,
    /// Recycled entries, with the capacity of their lists.
    #[expect(clippy::vec_box, reason = "the kernel holds pointers into an entry: it must not move")]
    free_entries: Vec<Box<RingOpKernelArgs>>,
    completions: Vec<Cqe>,
    /// Quick sends, oldest first: the kernel posts a completion only if they fail.
    quick: Vec<usize>,
    /// True if an operation completed since the turn began.
    progress: bool,
}

struct InFlightOp {
    user: usize,
    tag: u64,
    entry: Box<RingOpKernelArgs>,
    /// A send that does not wait for room. If there is no room, it is submitted again as a normal
    /// send.
    quick: bool,
}

#[derive(Default)]
struct RingUserState {
    done: Vec<RingCompletion>,
    in_flight: usize,
    dropped: bool,
    ready: bool,
    /// The wake target to run when an operation completes, even if it has nothing in flight.
    wake_target: Option<PolledUnitId>,
    /// The user does not need to know when a send has completed.
    defers_sends: bool,
}

/// A user of the ring: a lane or a front end. Each user has its own tags.
pub struct RingUser {
    ring: Ring,
    id: usize,
}

impl Ring {
    /// Creates a ring for the calling thread.
    ///
    /// # Errors
    /// The kernel has no io_uring, or denies it to this process.
    pub(crate) fn new() -> io::Result<Ring> {
        RingBackend::new().map(Ring::with_backend)
    }

    /// Creates a ring whose operations `kernel` executes, with a submission queue of `room`
    /// entries.
    pub(crate) fn simulated(kernel: Box<dyn SimulatedKernel>, room: usize) -> Ring {
        Ring::with_backend(RingBackend::simulated(kernel, room))
    }

    fn with_backend(kernel: RingBackend) -> Ring {
        Ring(Rc::new(RefCell::new(RingOpsAndUsers {
            kernel,
            entries: Slab::with_capacity(ENTRIES as usize),
            users: Slab::new(),
            ready: Vec::new(),
            backlog: VecDeque::new(),
            free_entries: Vec::new(),
            completions: Vec::new(),
            quick: Vec::new(),
            progress: false,
        })))
    }

    /// The ring of the core that `cx` belongs to; `None` if the core has none.
    #[must_use]
    pub fn of(cx: &Cx<'_>) -> Option<Ring> {
        cx.io()?.downcast_ref::<Ring>().cloned()
    }

    /// Creates a user.
    #[must_use]
    pub fn user(&self) -> RingUser {
        let id = self.0.borrow_mut().users.insert(RingUserState::default());
        RingUser { ring: self.clone(), id }
    }

    /// Creates a user whose completions always cause a poll of the lane stack that is being opened.
    /// For a lane that waits for events while it is idle.
    #[must_use]
    pub fn watcher(&self, cx: &Cx<'_>) -> RingUser {
        let user = self.user();
        user.set_wake_target(cx.current_target());
        user
    }

    /// Registers `file`: the kernel keeps it open until no operation of the ring is in flight.
    ///
    /// # Errors
    /// The error of the kernel; EBUSY if a file is registered already.
    pub(crate) fn register_file(&self, file: &OwnedFd) -> io::Result<()> {
        self.0.borrow().kernel.register_file(file)
    }

    /// True if operations wait to be submitted or completions to be reaped.
    pub(crate) fn has_work(&self) -> bool {
        let mut inner = self.0.borrow_mut();
        inner.kernel.has_submissions() || !inner.backlog.is_empty() || inner.kernel.has_completions()
    }

    /// True if completions wait to be reaped.
    pub(crate) fn has_completions(&self) -> bool {
        self.0.borrow_mut().kernel.has_completions()
    }

    /// True if a user waits for a quick send that is queued. The kernel posts no completion for it,
    /// so the core must check before it sleeps.
    pub(crate) fn has_waiter(&self) -> bool {
        let inner = self.0.borrow();
        let defers_sends =
            |&key: &usize| inner.users.get(inner.entries[key].user).is_some_and(|c| c.defers_sends);
        !inner.backlog.is_empty() || !inner.quick.iter().all(defers_sends)
    }

    /// Returns whether an operation completed since the last call: lanes and front ends have yet to
    /// see it.
    pub(crate) fn take_progress(&self) -> bool {
        std::mem::take(&mut self.0.borrow_mut().progress)
    }

    /// Submits queued operations, without waiting, and reaps completions.
    pub(crate) fn enter(&self) {
        let mut inner = self.0.borrow_mut();
        inner.flush_backlog();
        inner.kernel.submit();
        inner.reap();
    }

    /// Submits queued operations, without reaping.
    pub(crate) fn submit(&self) {
        let mut inner = self.0.borrow_mut();
        inner.flush_backlog();
        inner.kernel.submit();
    }

    /// Submits, then sleeps until a completion or the end of `timeout`.
    pub(crate) fn wait(&self, timeout: Option<Duration>) {
        let mut inner = self.0.borrow_mut();
        inner.flush_backlog();
        inner.kernel.wait(timeout);
        inner.reap();
    }

    /// Appends the wake targets of completions since the last call.
    pub(crate) fn take_ready(&self, out: &mut Vec<PolledUnitId>) {
        let mut inner = self.0.borrow_mut();
        let RingOpsAndUsers { ready, users, .. } = &mut *inner;
        for id in ready.drain(..) {
            if let Some(user) = users.get_mut(id) {
                user.ready = false;
                out.extend(user.wake_target);
            }
        }
    }
}

impl RingOpsAndUsers {
    fn push(&mut self, user: usize, tag: u64, op: RingOp) {
        let mut entry = self.free_entries.pop().unwrap_or_default();
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

    /// Reaps completions.
    fn reap(&mut self) {
        // Checked before the completions are taken, so that no failed send is missed.
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

    /// Handles a quick send that was short or failed. Returns false if it is submitted again, to
    /// wait for room.
    #[cold]
    fn quick_failed(&mut self, key: usize, result: i32) -> bool {
        self.quick.retain(|&quick| quick != key);
        self.entries[key].quick = false;
        if result == -errno::EAGAIN {
            self.backlog.push_back(key);
        }
        result != -errno::EAGAIN
    }

    /// Completes quick sends for which the kernel posted no completion: they have sent all their
    /// data.
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
        if self.free_entries.len() < ENTRIES as usize {
            self.free_entries.push(entry);
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
        state.done.push(RingCompletion { tag, result, data });
        if !state.ready {
            state.ready = true;
            self.ready.push(user);
        }
    }
}

impl Drop for RingOpsAndUsers {
    fn drop(&mut self) {
        // Operations that the kernel does not have are dropped. Queued submissions are submitted,
        // so that they can be cancelled.
        for key in self.backlog.drain(..) {
            self.entries.remove(key);
        }
        self.kernel.submit();
        if !self.kernel.cancel_all() {
            return;
        }
        // Waits for operations that the kernel has. A file system that hangs must not block the
        // exit. So after a limit the memory is leaked, and a late completion does no harm.
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
            if self.entries.iter().all(|(_, op)| op.entry.is_endless()) {
                break;
            }
            self.kernel.wait(Some(Duration::from_millis(10)));
        }
        Box::leak(Box::new(std::mem::take(&mut self.entries)));
    }
}

impl RingUser {
    /// Cancels the operations in flight with `tag`. Each still completes: with ECANCELED, or with
    /// its result if the cancel came too late. If the ring has no room for the cancel, the
    /// operation continues.
    pub fn cancel(&self, tag: u64) {
        self.ring.0.borrow_mut().cancel(self.id, tag);
    }

    /// Queues an operation, which is submitted at the end of the turn. Its result carries `tag`.
    pub fn push(&self, tag: u64, op: RingOp) {
        self.ring.0.borrow_mut().push(self.id, tag, op);
    }

    /// Sets whether the user has nothing to do when its sends complete. Their completion may then
    /// be reported late, with another event on the core, which saves a system call. Initially
    /// false.
    pub fn set_defer_sends(&self, defers_sends: bool) {
        self.ring.0.borrow_mut().users[self.id].defers_sends = defers_sends;
    }

    /// Appends the operations that completed since the last call.
    pub fn take(&self, out: &mut Vec<RingCompletion>) {
        out.append(&mut self.ring.0.borrow_mut().users[self.id].done);
    }

    /// Number of operations in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.ring.0.borrow().users[self.id].in_flight
    }

    /// Sets the wake target to run when an operation completes.
    pub(crate) fn set_wake_target(&self, wake_target: Option<PolledUnitId>) {
        self.ring.0.borrow_mut().users[self.id].wake_target = wake_target;
    }
}

impl Drop for RingUser {
    fn drop(&mut self) {
        // During its drop, the ring drops the state of its users itself.
        let Ok(mut inner) = self.ring.0.try_borrow_mut() else { return };
        let state = &mut inner.users[self.id];
        state.dropped = true;
        state.done.clear();
        if state.in_flight == 0 {
            inner.users.remove(self.id);
        }
    }
}

#[cfg(test)]
mod tests;
