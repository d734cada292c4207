//! Range locks: exclusive writes to some blocks of a device, across cores and connections.
//!
//! A request that writes a part of a block reads the block, changes it and writes it back. A write
//! of another request in between would be lost. So such a request first takes a *range lock* on the
//! blocks that it touches. No other request writes there until the lock is released. Writes of
//! whole blocks take no lock. They only check whether their connection knows of a lock, and mostly
//! it knows of none.
//!
//! The protocol covers all connections that may write to a device (its *members*), on any core and
//! through any export:
//! 1. *Acquire*: the lock is queued. It becomes active when it is first in the queue and overlaps
//!    no active lock. The queue is strict, so no request starves and there are no deadlocks.
//! 2. *Lock*: every core with a member gets a message about the active lock. From then on, each
//!    member parks new writes that overlap. A member that has such a write in flight keeps a clone
//!    of the message's token until that write has ended.
//! 3. *Granted*: the last token was dropped, so no overlapping write is in flight anywhere. The
//!    owner does its work.
//! 4. *Release*: every core with a member, or that got the first message, is notified, and blocked
//!    writes continue.
//!
//! A member that joins while locks are active gets them at once, and keeps no tokens because it has
//! nothing in flight. So a connection that does not write leaves after some messages, and joins
//! again with its next write. Thousands of idle connections need no messages. All changes are made
//! under one mutex, and messages are sent under it. So all inboxes get them in the same order. The
//! mutex is taken when a member joins or leaves, and twice per range lock. A write of whole blocks
//! takes it only if it is the first write of its connection, or the first after 16 or more
//! messages.
//!
//! Not covered: writers outside of this server, and writers to the same disk through another device
//! (two mapped devices over one file).

use std::any::Any;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use udm_core::{AckOnLastDrop, CoreId, DeviceId};
use udm_runtime::ProcessCores;

/// Limit of active locks per device. Each write of whole blocks is compared with at most this many.
const ACTIVE_MAX: usize = 64;
/// Limit of active and queued locks per member.
pub(super) const OWN_MAX: usize = 16;

/// A member is idle if it has received this many messages since its own last write. Joining again
/// costs a mutex and an allocation, so a member that writes now and then stays.
const IDLE_MESSAGES: u32 = 16;

/// Number of a range lock, unique for its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RangeLockId(u64);

/// Messages to members.
#[derive(Clone)]
pub(super) enum RangeLockMessage {
    /// A lock is active. A member with an overlapping write in flight keeps a clone of the token
    /// until the write ends.
    RangeLock { id: RangeLockId, range: Range<u64>, token: AckOnLastDrop },
    /// For the owner only: no overlapping write is in flight.
    Granted(RangeLockId),
    /// The lock is released.
    Release(RangeLockId),
}

/// Sends messages to all members on a core.
pub(super) trait RangeLockMessenger: Send + Sync {
    /// Sends `message` to the subscribers of `topic` on `core`, without blocking. Messages are
    /// delivered in the order of the calls.
    fn post(&self, core: CoreId, topic: DeviceId, message: RangeLockMessage);
}

impl RangeLockMessenger for ProcessCores {
    fn post(&self, core: CoreId, topic: DeviceId, message: RangeLockMessage) {
        self.send_message(core, topic, Box::new(message) as Box<dyn Any + Send>);
    }
}

/// The range locks of a device.
pub(super) struct RangeLocks {
    topic: DeviceId,
    state: Mutex<RangeLockTable>,
}

#[derive(Default)]
struct RangeLockTable {
    last: u64,
    /// Number of members by core.
    members: Vec<usize>,
    active: Vec<RangeLock>,
    waiting: VecDeque<RangeLock>,
}

struct RangeLock {
    id: RangeLockId,
    /// Range in bytes, whole blocks.
    range: Range<u64>,
    owner: CoreId,
    /// Cores that got the message about the lock. Each must get its release, even if its members
    /// have left, because others may join.
    informed: Vec<CoreId>,
}

fn ranges_overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl RangeLocks {
    /// Creates the range locks of a device.
    pub(super) fn new() -> RangeLocks {
        RangeLocks { topic: DeviceId::new(), state: Mutex::default() }
    }

    /// Topic that members subscribe to.
    pub(super) fn topic(&self) -> DeviceId {
        self.topic
    }

    fn state(&self) -> MutexGuard<'_, RangeLockTable> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl RangeLockTable {
    /// Activates queued locks as far as possible, and notifies the members.
    fn advance(&mut self, topic: DeviceId, post: &Arc<dyn RangeLockMessenger>) {
        while self.active.len() < ACTIVE_MAX
            && let Some(first) = self.waiting.front()
            && !self.active.iter().any(|a| ranges_overlap(&a.range, &first.range))
            && let Some(mut hold) = self.waiting.pop_front()
        {
            let (id, owner, grant) = (hold.id, hold.owner, post.clone());
            let token = AckOnLastDrop::new(move || grant.post(owner, topic, RangeLockMessage::Granted(id)));
            hold.informed = self.cores().collect();
            for &core in &hold.informed {
                let message =
                    RangeLockMessage::RangeLock { id, range: hold.range.clone(), token: token.clone() };
                post.post(core, topic, message);
            }
            self.active.push(hold);
        }
    }

    /// Cores with members.
    fn cores(&self) -> impl Iterator<Item = CoreId> + '_ {
        self.members.iter().enumerate().filter(|(_, n)| **n > 0).map(|(core, _)| CoreId(core as u16))
    }
}

/// A member: one connection's view of the range locks of its device. When dropped, it leaves and
/// releases its own locks.
pub(super) struct RangeLockMember {
    range_locks: Arc<RangeLocks>,
    post: Arc<dyn RangeLockMessenger>,
    core: CoreId,
    /// Locks that are active, as far as this member knows.
    held: Vec<KnownActiveRangeLock>,
    /// Its own locks, queued or active, with the request of each.
    own: Vec<(RangeLockId, usize)>,
    /// Messages since its last write.
    idle_messages: u32,
}

struct KnownActiveRangeLock {
    id: RangeLockId,
    range: Range<u64>,
    /// Token, kept while a write of this member overlaps.
    owed: Option<AckOnLastDrop>,
}

/// Effect of a message on the member's requests.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RangeLockEvent {
    /// Nothing.
    None,
    /// The range lock of this request is granted.
    Granted(usize),
    /// Parked requests may be able to continue.
    Released,
}

impl RangeLockMember {
    /// Joins on `core`. The connection has no write in flight.
    pub(super) fn join(
        range_locks: &Arc<RangeLocks>,
        post: Arc<dyn RangeLockMessenger>,
        core: CoreId,
    ) -> RangeLockMember {
        let mut state = range_locks.state();
        if state.members.len() <= core.index() {
            state.members.resize(core.index() + 1, 0);
        }
        state.members[core.index()] += 1;
        let held = state
            .active
            .iter()
            .map(|h| KnownActiveRangeLock { id: h.id, range: h.range.clone(), owed: None })
            .collect();
        drop(state);
        RangeLockMember {
            range_locks: range_locks.clone(),
            post,
            core,
            held,
            own: Vec::new(),
            idle_messages: 0,
        }
    }

    /// Returns true if a write to `range`, in bytes, must wait.
    pub(super) fn is_locked(&self, range: &Range<u64>) -> bool {
        !self.held.is_empty() && self.held.iter().any(|h| ranges_overlap(&h.range, range))
    }

    /// Topic that the member subscribes to.
    pub(super) fn topic(&self) -> DeviceId {
        self.range_locks.topic
    }

    /// Records a write of this member.
    pub(super) fn note_write(&mut self) {
        self.idle_messages = 0;
    }

    /// Returns true if the member got many messages since its last write.
    pub(super) fn is_idle(&self) -> bool {
        self.idle_messages >= IDLE_MESSAGES
    }

    /// Returns true if another lock may be requested.
    pub(super) fn may_acquire(&self) -> bool {
        self.own.len() < OWN_MAX
    }

    /// Requests a lock on `range` for request `key`, which continues at
    /// [`RangeLockEvent::Granted`].
    pub(super) fn acquire(&mut self, key: usize, range: Range<u64>) {
        let mut state = self.range_locks.state();
        state.last += 1;
        let id = RangeLockId(state.last);
        self.own.push((id, key));
        state.waiting.push_back(RangeLock { id, range, owner: self.core, informed: Vec::new() });
        state.advance(self.range_locks.topic, &self.post);
    }

    /// Releases the lock of request `key`, granted or not. Its work, if any, has ended.
    pub(super) fn release(&mut self, key: usize) {
        if let Some(at) = self.own.iter().position(|(_, k)| *k == key) {
            let (id, _) = self.own.swap_remove(at);
            self.release_id(id);
        }
    }

    fn release_id(&self, id: RangeLockId) {
        let mut state = self.range_locks.state();
        if let Some(at) = state.active.iter().position(|h| h.id == id) {
            let hold = state.active.swap_remove(at);
            let late = state.cores().filter(|core| !hold.informed.contains(core));
            for core in hold.informed.iter().copied().chain(late) {
                self.post.post(core, self.range_locks.topic, RangeLockMessage::Release(id));
            }
        } else {
            state.waiting.retain(|h| h.id != id);
        }
        state.advance(self.range_locks.topic, &self.post);
    }

    /// Handles a message. `in_flight` returns whether a write of this member that overlaps a range
    /// is in flight.
    pub(super) fn message(
        &mut self,
        message: &RangeLockMessage,
        in_flight: impl FnOnce(&Range<u64>) -> bool,
    ) -> RangeLockEvent {
        self.idle_messages = self.idle_messages.saturating_add(1);
        match message {
            RangeLockMessage::RangeLock { id, range, token } => {
                // A lock that was received when joining may arrive as a message, too.
                if !self.held.iter().any(|h| h.id == *id) {
                    let owed = in_flight(range).then(|| token.clone());
                    self.held.push(KnownActiveRangeLock { id: *id, range: range.clone(), owed });
                }
                RangeLockEvent::None
            }
            RangeLockMessage::Granted(id) => match self.own.iter().find(|(own, _)| own == id) {
                Some((_, key)) => RangeLockEvent::Granted(*key),
                None => RangeLockEvent::None,
            },
            RangeLockMessage::Release(id) => {
                self.held.retain(|h| h.id != *id);
                RangeLockEvent::Released
            }
        }
    }

    /// Returns true if a lock waits for a write of this member.
    pub(super) fn is_waited_for(&self) -> bool {
        self.held.iter().any(|h| h.owed.is_some())
    }

    /// Drops the tokens that no write in flight needs any more, after a write of this member has
    /// ended.
    pub(super) fn write_ended(&mut self, in_flight: impl Fn(&Range<u64>) -> bool) {
        for held in self.held.iter_mut().filter(|h| h.owed.is_some()) {
            if !in_flight(&held.range) {
                held.owed = None;
            }
        }
    }
}

impl Drop for RangeLockMember {
    fn drop(&mut self) {
        for (id, _) in std::mem::take(&mut self.own) {
            self.release_id(id);
        }
        self.range_locks.state().members[self.core.index()] -= 1;
    }
}

#[cfg(test)]
#[path = "holds_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "idle_clients_tests.rs"]
mod idle_clients;
