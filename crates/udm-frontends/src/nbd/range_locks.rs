//! Ranges of a device that one request has to itself while it changes a part of a block.
//!
//! A request that writes a part of a block reads the block, changes it and writes it back; a write
//! by another in between would be lost. So such a request first takes a *hold* of the blocks that
//! it touches, and nobody else writes there until it is released. Writes of whole blocks know
//! nothing of this: they test whether their connection has been told of a hold, and mostly it has
//! not.
//!
//! The protocol, over all connections that may write to a device (its *members*), whichever export
//! or core they came by:
//! 1. *Acquire*: the hold gets in line. It becomes active when it is the first in line and overlaps
//!    no active one: the line is strict, so nobody starves, and holds never wait for each other in
//!    a circle.
//! 2. *Hold*: an active hold is told to every core with a member. From then on each member parks
//!    new writes that overlap. A member that has such a write on its way keeps a clone of the
//!    letter's token until that write has ended.
//! 3. *Granted*: the last token is gone, so nothing that overlaps is in flight anywhere. The owner
//!    does its work.
//! 4. *Release*: every core with a member, or that was told, hears that it is over, and what was
//!    parked goes on.
//!
//! A member that joins while holds are active is given them with its membership, and owes no
//! answer: it has nothing in flight. So a connection that writes nothing leaves after some
//! letters, and joins again with its next write: of thousands of idle ones nobody has to be told
//! anything. Everything that changes what a letter means happens under one lock, and the letters
//! are posted under it: so all inboxes see them in the same order. The lock is taken when a member
//! joins or leaves, and twice for each hold; for a write of whole blocks only when it is the first
//! of its connection, or the first after 16 letters or more without one.
//!
//! What is *not* ordered: writers that do not come through this server, and those that reach the
//! same disk through another device (two mapped devices over one file).

use std::any::Any;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use udm_core::{Ack, CoreId, DeviceId};
use udm_runtime::CoreSet;

/// Holds of a device that are active at a time. Each write of whole blocks is compared with so many
/// at the most.
const ACTIVE_MAX: usize = 64;
/// Holds of one member that are active or in line.
pub(super) const OWN_MAX: usize = 16;

/// So many letters without a write of its own, and a member is idle: joining again costs a lock and
/// an allocation, which who writes now and then does not pay.
const IDLE_LETTERS: u32 = 16;

/// A hold's name, unique for its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RangeLockId(u64);

/// What members are told.
#[derive(Clone)]
pub(super) enum RangeLockMessage {
    /// A hold is active. Whoever writes there keeps a clone of the token until it has ended.
    RangeLock { id: RangeLockId, range: Range<u64>, token: Ack },
    /// For its owner alone: nobody writes there any more.
    Granted(RangeLockId),
    /// It is over.
    Release(RangeLockId),
}

/// How letters reach all members on a core.
pub(super) trait LockMessenger: Send + Sync {
    /// Posts `message` to those who listen to `topic` on `core`. Never waits for them. The order of
    /// calls is the order of delivery.
    fn post(&self, core: CoreId, topic: DeviceId, message: RangeLockMessage);
}

impl LockMessenger for CoreSet {
    fn post(&self, core: CoreId, topic: DeviceId, message: RangeLockMessage) {
        self.send_message(core, topic, Box::new(message) as Box<dyn Any + Send>);
    }
}

/// The holds of a device. See the module's documentation.
pub(super) struct RangeLocks {
    topic: DeviceId,
    state: Mutex<LockTable>,
}

#[derive(Default)]
struct LockTable {
    last: u64,
    /// Members by core.
    members: Vec<usize>,
    active: Vec<RangeLock>,
    waiting: VecDeque<RangeLock>,
}

struct RangeLock {
    id: RangeLockId,
    /// In bytes, whole blocks.
    range: Range<u64>,
    owner: CoreId,
    /// The cores that were sent its letter: each must hear of its end, though its members may have
    /// left, because others may come.
    told: Vec<CoreId>,
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl RangeLocks {
    /// The holds of a device, none yet.
    pub(super) fn new() -> RangeLocks {
        RangeLocks { topic: DeviceId::new(), state: Mutex::default() }
    }

    /// What its members listen to.
    pub(super) fn topic(&self) -> DeviceId {
        self.topic
    }

    fn state(&self) -> MutexGuard<'_, LockTable> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl LockTable {
    /// Makes active what can be, and tells the members.
    fn advance(&mut self, topic: DeviceId, post: &Arc<dyn LockMessenger>) {
        while self.active.len() < ACTIVE_MAX
            && let Some(first) = self.waiting.front()
            && !self.active.iter().any(|a| overlap(&a.range, &first.range))
            && let Some(mut hold) = self.waiting.pop_front()
        {
            let (id, owner, grant) = (hold.id, hold.owner, post.clone());
            let token = Ack::new(move || grant.post(owner, topic, RangeLockMessage::Granted(id)));
            hold.told = self.cores().collect();
            for &core in &hold.told {
                let message =
                    RangeLockMessage::RangeLock { id, range: hold.range.clone(), token: token.clone() };
                post.post(core, topic, message);
            }
            self.active.push(hold);
        }
    }

    /// The cores with members.
    fn cores(&self) -> impl Iterator<Item = CoreId> + '_ {
        self.members.iter().enumerate().filter(|(_, n)| **n > 0).map(|(core, _)| CoreId(core as u16))
    }
}

/// A member: one connection's view of the holds of its device. Dropping it leaves, and releases
/// what it owns.
pub(super) struct LockMember {
    range_locks: Arc<RangeLocks>,
    post: Arc<dyn LockMessenger>,
    core: CoreId,
    /// Active, as far as this member was told.
    held: Vec<KnownLock>,
    /// Its own, in line or active, with the request that each is for.
    own: Vec<(RangeLockId, usize)>,
    /// Letters since its last write.
    letters: u32,
}

struct KnownLock {
    id: RangeLockId,
    range: Range<u64>,
    /// Kept while a write of this member overlaps.
    owed: Option<Ack>,
}

/// What a letter means for the requests of the member.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum LockEvent {
    /// Nothing.
    None,
    /// This request has its blocks to itself.
    Granted(usize),
    /// What is parked may be able to go on.
    Released,
}

impl LockMember {
    /// Joins, on `core`, with nothing in flight.
    pub(super) fn join(
        range_locks: &Arc<RangeLocks>,
        post: Arc<dyn LockMessenger>,
        core: CoreId,
    ) -> LockMember {
        let mut state = range_locks.state();
        if state.members.len() <= core.index() {
            state.members.resize(core.index() + 1, 0);
        }
        state.members[core.index()] += 1;
        let held =
            state.active.iter().map(|h| KnownLock { id: h.id, range: h.range.clone(), owed: None }).collect();
        drop(state);
        LockMember { range_locks: range_locks.clone(), post, core, held, own: Vec::new(), letters: 0 }
    }

    /// True when a write to `range` has to wait. `range` is in bytes.
    pub(super) fn is_locked(&self, range: &Range<u64>) -> bool {
        !self.held.is_empty() && self.held.iter().any(|h| overlap(&h.range, range))
    }

    /// What it listens to.
    pub(super) fn topic(&self) -> DeviceId {
        self.range_locks.topic
    }

    /// It writes.
    pub(super) fn writes(&mut self) {
        self.letters = 0;
    }

    /// True when it has been told for long of what others write, and writes nothing itself.
    pub(super) fn is_idle(&self) -> bool {
        self.letters >= IDLE_LETTERS
    }

    /// True when another hold may be asked for.
    pub(super) fn may_acquire(&self) -> bool {
        self.own.len() < OWN_MAX
    }

    /// Asks for a hold of `range` for request `key`, which goes on at [`LockEvent::Granted`].
    pub(super) fn acquire(&mut self, key: usize, range: Range<u64>) {
        let mut state = self.range_locks.state();
        state.last += 1;
        let id = RangeLockId(state.last);
        self.own.push((id, key));
        state.waiting.push_back(RangeLock { id, range, owner: self.core, told: Vec::new() });
        state.advance(self.range_locks.topic, &self.post);
    }

    /// Gives up the hold of request `key`, granted or not. Its work, if any, has ended.
    pub(super) fn release(&mut self, key: usize) {
        if let Some(at) = self.own.iter().position(|(_, k)| *k == key) {
            let (id, _) = self.own.swap_remove(at);
            self.give_up(id);
        }
    }

    fn give_up(&self, id: RangeLockId) {
        let mut state = self.range_locks.state();
        if let Some(at) = state.active.iter().position(|h| h.id == id) {
            let hold = state.active.swap_remove(at);
            let late = state.cores().filter(|core| !hold.told.contains(core));
            for core in hold.told.iter().copied().chain(late) {
                self.post.post(core, self.range_locks.topic, RangeLockMessage::Release(id));
            }
        } else {
            state.waiting.retain(|h| h.id != id);
        }
        state.advance(self.range_locks.topic, &self.post);
    }

    /// Takes a letter. `in_flight` says whether a write of this member that overlaps a range is on
    /// its way.
    pub(super) fn message(
        &mut self,
        message: &RangeLockMessage,
        in_flight: impl FnOnce(&Range<u64>) -> bool,
    ) -> LockEvent {
        self.letters = self.letters.saturating_add(1);
        match message {
            RangeLockMessage::RangeLock { id, range, token } => {
                // One that was given at joining was posted before that.
                if !self.held.iter().any(|h| h.id == *id) {
                    let owed = in_flight(range).then(|| token.clone());
                    self.held.push(KnownLock { id: *id, range: range.clone(), owed });
                }
                LockEvent::None
            }
            RangeLockMessage::Granted(id) => match self.own.iter().find(|(own, _)| own == id) {
                Some((_, key)) => LockEvent::Granted(*key),
                None => LockEvent::None,
            },
            RangeLockMessage::Release(id) => {
                self.held.retain(|h| h.id != *id);
                LockEvent::Released
            }
        }
    }

    /// True when somebody waits for a write of this member to end.
    pub(super) fn owes(&self) -> bool {
        self.held.iter().any(|h| h.owed.is_some())
    }

    /// A write of this member has ended: gives back the tokens that nothing in flight asks for any
    /// more.
    pub(super) fn ended(&mut self, in_flight: impl Fn(&Range<u64>) -> bool) {
        for held in self.held.iter_mut().filter(|h| h.owed.is_some()) {
            if !in_flight(&held.range) {
                held.owed = None;
            }
        }
    }
}

impl Drop for LockMember {
    fn drop(&mut self) {
        for (id, _) in std::mem::take(&mut self.own) {
            self.give_up(id);
        }
        self.range_locks.state().members[self.core.index()] -= 1;
    }
}

#[cfg(test)]
#[path = "holds_tests.rs"]
mod tests;
