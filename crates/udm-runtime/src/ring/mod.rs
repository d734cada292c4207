//! The core's io_uring, shared by the lanes and front ends of one core.
//!
//! Contract: a [`RingOp`] hands its memory and its file to the ring; both stay there until the kernel is done with them, and the memory comes
//! back in [`Done`]. A [`Client`] that is dropped orphans its operations: their memory is freed when they end, not before.
//! Operations may end in any order. The ring enters the kernel once a turn ([`Ring::enter`]), for all clients together.

pub(crate) mod missing;
mod op;
mod sys;

pub use op::{Done, RingOp};

use crate::inbox::Inbox;
use slab::Slab;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use sys::{Completion, Entry, Uring};
use udm_core::{Buf, Cx, Segments};

/// Entries of the submission queue. More operations than that in one turn cost one more system call.
const ENTRIES: u32 = 512;

/// A handle to the core's ring. Clones are the same ring; it never leaves its core.
#[derive(Clone)]
pub struct Ring(Rc<RefCell<Inner>>);

struct Inner {
    uring: Uring,
    entries: Slab<InFlight>,
    clients: Slab<ClientState>,
    /// Clients that got completions since the reactor last looked.
    ready: Vec<usize>,
    /// Operations that did not fit the submission queue.
    backlog: VecDeque<usize>,
    /// Recycled entries, with the room of their lists.
    #[expect(clippy::vec_box, reason = "the kernel holds pointers into an entry: it must not move")]
    spare: Vec<Box<Entry>>,
    completions: Vec<Completion>,
    /// Something finished since the turn began.
    fresh: bool,
}

struct InFlight {
    client: usize,
    tag: u64,
    entry: Box<Entry>,
}

#[derive(Default)]
struct ClientState {
    done: Vec<Done>,
    in_flight: usize,
    dropped: bool,
    ready: bool,
}

/// A user of the ring: a lane or a front end. Its tags are its own.
pub struct Client {
    ring: Ring,
    id: usize,
}

impl Ring {
    /// Sets up a ring for the calling thread.
    ///
    /// # Errors
    /// When the kernel has no io_uring, or does not let this process have one.
    pub(crate) fn new() -> io::Result<Ring> {
        Ok(Ring(Rc::new(RefCell::new(Inner {
            uring: Uring::new(ENTRIES)?,
            entries: Slab::with_capacity(ENTRIES as usize),
            clients: Slab::new(),
            ready: Vec::new(),
            backlog: VecDeque::new(),
            spare: Vec::new(),
            completions: Vec::new(),
            fresh: false,
        }))))
    }

    /// The ring of the core that `cx` belongs to; `None` in a world without one.
    #[must_use]
    pub fn of(cx: &Cx<'_>) -> Option<Ring> {
        cx.io()?.downcast_ref::<Ring>().cloned()
    }

    /// A new client.
    #[must_use]
    pub fn client(&self) -> Client {
        let id = self.0.borrow_mut().clients.insert(ClientState::default());
        Client { ring: self.clone(), id }
    }

    /// True when something is to be submitted or reaped: a turn must enter or look.
    pub(crate) fn has_work(&self) -> bool {
        let mut inner = self.0.borrow_mut();
        inner.uring.has_submissions() || !inner.backlog.is_empty() || inner.uring.has_completions()
    }

    /// Says whether something finished since the last call: lanes and front ends have yet to look.
    pub(crate) fn take_fresh(&self) -> bool {
        std::mem::take(&mut self.0.borrow_mut().fresh)
    }

    /// Submits what is queued, without waiting, and takes in what has finished.
    pub(crate) fn enter(&self) {
        let mut inner = self.0.borrow_mut();
        inner.flush_backlog();
        inner.uring.submit();
        inner.reap();
    }

    /// Submits, then sleeps until something finishes or `timeout` is over.
    pub(crate) fn wait(&self, timeout: Option<Duration>) {
        let mut inner = self.0.borrow_mut();
        inner.flush_backlog();
        inner.uring.wait(timeout);
        inner.reap();
    }

    /// Calls `f` for each client that got completions since the last call.
    pub(crate) fn take_ready(&self, out: &mut Vec<usize>) {
        let mut inner = self.0.borrow_mut();
        let Inner { ready, clients, .. } = &mut *inner;
        for id in ready.drain(..) {
            if let Some(client) = clients.get_mut(id) {
                client.ready = false;
                out.push(id);
            }
        }
    }
}

impl Inner {
    fn push(&mut self, client: usize, tag: u64, op: RingOp) {
        let mut entry = self.spare.pop().unwrap_or_default();
        entry.fill(op);
        self.clients[client].in_flight += 1;
        let key = self.entries.insert(InFlight { client, tag, entry });
        if !self.backlog.is_empty() || !self.uring.push(&mut self.entries[key].entry, key as u64) {
            self.backlog.push_back(key);
        }
    }

    fn flush_backlog(&mut self) {
        while let Some(&key) = self.backlog.front() {
            if !self.uring.push(&mut self.entries[key].entry, key as u64) {
                self.uring.submit();
                if !self.uring.push(&mut self.entries[key].entry, key as u64) {
                    return;
                }
            }
            self.backlog.pop_front();
        }
    }

    fn reap(&mut self) {
        self.uring.completions(&mut self.completions);
        let mut completions = std::mem::take(&mut self.completions);
        for c in completions.drain(..) {
            self.fresh = true;
            let Some(InFlight { client, tag, mut entry }) = self.entries.try_remove(c.user_data as usize)
            else {
                continue;
            };
            let data = entry.take_data();
            if self.spare.len() < ENTRIES as usize {
                self.spare.push(entry);
            }
            let Some(state) = self.clients.get_mut(client) else { continue };
            state.in_flight -= 1;
            if state.dropped {
                if state.in_flight == 0 {
                    self.clients.remove(client);
                }
                continue;
            }
            let result = u32::try_from(c.result).map_err(|_| -c.result);
            state.done.push(Done { tag, result, data });
            if !state.ready {
                state.ready = true;
                self.ready.push(client);
            }
        }
        self.completions = completions;
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // What the kernel has not been given is simply dropped; what is queued for it is sent, so that it can be cancelled.
        for key in self.backlog.drain(..) {
            self.entries.remove(key);
        }
        self.uring.submit();
        self.uring.cancel_all();
        // Only what the kernel has seen must be waited for. A file system that hangs must not hang the exit: after the
        // bound the memory is leaked, so that a late completion writes into nobody's memory.
        for _ in 0..500 {
            self.uring.completions(&mut self.completions);
            for c in self.completions.drain(..) {
                self.entries.try_remove(c.user_data as usize);
            }
            if self.entries.is_empty() {
                return;
            }
            self.uring.wait(Some(Duration::from_millis(10)));
        }
        Box::leak(Box::new(std::mem::take(&mut self.entries)));
    }
}

impl Client {
    /// Queues an operation; it goes to the kernel at the end of the turn. `tag` comes back with its result.
    pub fn push(&self, tag: u64, op: RingOp) {
        self.ring.0.borrow_mut().push(self.id, tag, op);
    }

    /// Appends what has finished since the last call.
    pub fn take(&self, out: &mut Vec<Done>) {
        out.append(&mut self.ring.0.borrow_mut().clients[self.id].done);
    }

    /// Operations under way.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.ring.0.borrow().clients[self.id].in_flight
    }

    /// Its number among the clients of the ring.
    pub(crate) fn id(&self) -> usize {
        self.id
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // A ring that is being torn down drops its clients' state itself.
        let Ok(mut inner) = self.ring.0.try_borrow_mut() else { return };
        let state = &mut inner.clients[self.id];
        state.dropped = true;
        state.done.clear();
        if state.in_flight == 0 {
            inner.clients.remove(self.id);
        }
    }
}

/// The read of the inbox's eventfd that is always under way, so that a sleeping core hears a knock.
pub(crate) struct Doorbell {
    client: Client,
    fd: Arc<OwnedFd>,
    done: Vec<Done>,
}

impl Doorbell {
    pub(crate) fn new(ring: &Ring, inbox: &Inbox) -> Doorbell {
        let bell = Doorbell { client: ring.client(), fd: inbox.eventfd(), done: Vec::new() };
        bell.arm(Segments::from(Buf::zeroed(8)));
        bell
    }

    fn arm(&self, data: Segments) {
        self.client.push(0, RingOp::Read { fd: self.fd.clone(), offset: 0, data, cached: false });
    }

    /// Arms the bell again after it rang.
    pub(crate) fn rearm(&mut self) {
        self.client.take(&mut self.done);
        if let Some(done) = self.done.pop() {
            self.arm(done.data);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    fn pair() -> (Arc<OwnedFd>, Arc<OwnedFd>) {
        let (a, b) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        (Arc::new(a), Arc::new(b))
    }

    fn text(s: &str) -> Segments {
        let mut b = Buf::zeroed(s.len());
        b.copy_from_slice(s.as_bytes());
        b.into()
    }

    fn wait_for(ring: &Ring, client: &Client, n: usize) -> Vec<Done> {
        let mut out = Vec::new();
        for _ in 0..1000 {
            client.take(&mut out);
            if out.len() >= n {
                break;
            }
            ring.wait(Some(Duration::from_millis(10)));
        }
        out
    }

    #[test]
    fn gathered_send_and_scattered_receive() {
        let ring = Ring::new().unwrap();
        let client = ring.client();
        let (a, b) = pair();
        let mut data = text("hello ");
        data.push(Buf::zeroed(1));
        data.append(text("world"));
        client.push(1, RingOp::Send { fd: a, data });
        let mut room = Segments::from(Buf::zeroed(3));
        room.push(Buf::zeroed(100));
        client.push(2, RingOp::Recv { fd: b, data: room });
        let mut done = wait_for(&ring, &client, 2);
        done.sort_by_key(|d| d.tag);
        assert_eq!(done[0].result, Ok(12));
        assert_eq!(done[1].result, Ok(12));
        let mut out = [0; 12];
        done[1].data.copy_to(&mut out);
        assert_eq!(&out, b"hello \0world");
        assert_eq!(client.in_flight(), 0);
    }

    #[test]
    fn a_dropped_client_leaves_nothing_behind() {
        let ring = Ring::new().unwrap();
        let (a, b) = pair();
        {
            let client = ring.client();
            client.push(1, RingOp::Recv { fd: b, data: Buf::zeroed(100).into() });
            ring.enter();
        }
        assert_eq!(ring.0.borrow().entries.len(), 1, "the memory stays until the kernel is done");
        let other = ring.client();
        other.push(2, RingOp::Send { fd: a, data: text("x") });
        for _ in 0..100 {
            ring.wait(Some(Duration::from_millis(10)));
            if ring.0.borrow().entries.is_empty() {
                break;
            }
        }
        assert!(ring.0.borrow().entries.is_empty());
        assert_eq!(ring.0.borrow().clients.len(), 1);
    }

    #[test]
    fn dropping_the_ring_ends_what_is_under_way() {
        let ring = Ring::new().unwrap();
        let (_a, b) = pair();
        let client = ring.client();
        client.push(1, RingOp::Recv { fd: b, data: Buf::zeroed(100).into() });
        ring.enter();
        drop(client);
        drop(ring);
    }

    #[test]
    fn more_than_the_queue_holds() {
        let ring = Ring::new().unwrap();
        let client = ring.client();
        let file = Arc::new(OwnedFd::from(tempfile::tempfile().unwrap()));
        let n = u64::from(ENTRIES) * 3;
        for i in 0..n {
            client
                .push(i, RingOp::Write { fd: file.clone(), offset: i * 4, data: text("abcd"), dsync: false });
        }
        let done = wait_for(&ring, &client, n as usize);
        assert_eq!(done.len() as u64, n);
        assert!(done.iter().all(|d| d.result == Ok(4)));
    }

    /// A core that never sleeps, and one that is too busy to, only looks and enters. Completions that found no room in the queue wait in
    /// the kernel, and nothing else tells of them.
    #[test]
    fn a_full_completion_queue_is_emptied_without_sleeping() {
        let ring = Ring::new().unwrap();
        let client = ring.client();
        let file = Arc::new(OwnedFd::from(tempfile::tempfile().unwrap()));
        let n = u64::from(ENTRIES) * 20;
        for i in 0..n {
            let data = Buf::zeroed(1).into();
            client.push(i, RingOp::Read { fd: file.clone(), offset: 0, data, cached: false });
        }
        // All at once, as many as the kernel takes: more than the queue of completions has room for.
        ring.enter();
        let begin = std::time::Instant::now();
        let mut out = Vec::new();
        while (out.len() as u64) < n && begin.elapsed() < Duration::from_secs(20) {
            if ring.has_work() {
                ring.enter();
            }
            client.take(&mut out);
        }
        assert_eq!(out.len() as u64, n);
    }

    #[test]
    fn errors_keep_their_errno() {
        let ring = Ring::new().unwrap();
        let client = ring.client();
        let (r, _w) = rustix::pipe::pipe().unwrap();
        client.push(9, RingOp::Fsync { fd: Arc::new(r), data_only: true });
        let done = wait_for(&ring, &client, 1);
        assert_eq!(done[0].result, Err(22));
    }
}
