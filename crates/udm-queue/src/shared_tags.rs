//! Tags shared by several disks: blk-mq's shared tag sets, null_blk's `shared_tags`.
//!
//! Shared tags lie below the queues of the disks. A request with a tag of its own queue waits here,
//! on its core, for a tag of the set. So settings change disk by disk, and a disk whose tags change
//! takes nothing from the others.
//!
//! **Shares** are those of the kernel: while several disks are active, each may hold at most its
//! part of the depth, rounded up, and at least four tags. A disk is active while it holds or wants
//! tags, and for 5 s afterwards, so a disk between two requests keeps its share. Lanes that want
//! tags and may have more get one each in turn.
//!
//! *Price.* A lock per batch, each way, shared by the users of a hardware queue; a message if
//! another core waits. Only disks with shared tags pay it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use udm_core::{
    Batch, Bio, BioFlags, Cx, DeviceId, DiskSharedTagUsage, DrainMode, Lane, Nanos, OwnWork, Status,
    WaitQueue, WaitQueueSubscription,
};

use crate::settings::map_core_to_hw_queue;

/// Time for which a disk stays active after its last request: the request timeout of null_blk, by
/// which the kernel detects an idle disk.
const ACTIVE_TIME: Nanos = Nanos::from_millis(5_000);

/// The minimum share of a disk.
const MIN_SHARE: u32 = 4;

/// A set of tags shared by several disks.
pub struct SharedTagSet {
    nr_hw_queues: usize,
    depth: u32,
    /// Tags per hardware queue; created when the first lane is opened.
    queues: OnceLock<Box<[Mutex<SharedHwTags>]>>,
}

/// The tags of a hardware queue.
struct SharedHwTags {
    depth: u32,
    free: u32,
    users: Vec<SharedTagDisk>,
    waiters: Vec<SharedTagWaiter>,
    /// Index of the next waiter to get a tag.
    next: usize,
    /// Time of the last call.
    now: Nanos,
}

/// A disk that uses the tags.
struct SharedTagDisk {
    id: DeviceId,
    held: u32,
    /// End of its active time.
    until: Nanos,
}

/// A lane of a disk.
struct SharedTagWaiter {
    wait_queue: Arc<WaitQueue>,
    user: DeviceId,
    wanted: u32,
    /// Tags granted but not yet collected; its disk holds them.
    granted: u32,
}

impl SharedTagSet {
    /// Creates tags for `nr_hw_queues` hardware queues of `depth` tags each. 0 means one queue per
    /// core; there are never more queues than cores.
    #[must_use]
    pub fn new(nr_hw_queues: u32, depth: u32) -> Arc<SharedTagSet> {
        let queues = OnceLock::new();
        Arc::new(SharedTagSet { nr_hw_queues: nr_hw_queues as usize, depth: depth.max(1), queues })
    }

    /// Total number of tags, for `cores` cores.
    #[must_use]
    pub fn all(&self, cores: usize) -> u64 {
        self.count(cores) as u64 * u64::from(self.depth)
    }

    fn count(&self, cores: usize) -> usize {
        match self.nr_hw_queues {
            0 => cores.max(1),
            count => count.min(cores.max(1)),
        }
    }

    /// Opens a lane of the disk `user` on this core, above `below`.
    pub(crate) fn lane(
        self: &Arc<SharedTagSet>,
        user: DeviceId,
        below: Box<dyn Lane>,
        cx: &mut Cx<'_>,
    ) -> Box<dyn Lane> {
        let (cores, depth) = (cx.cores(), self.depth);
        let made = || {
            let (users, waiters) = (Vec::new(), Vec::new());
            Mutex::new(SharedHwTags { depth, free: depth, users, waiters, next: 0, now: Nanos(0) })
        };
        let all = self.queues.get_or_init(|| (0..self.count(cores)).map(|_| made()).collect());
        let nth = map_core_to_hw_queue(cx.core().index(), cores, all.len());
        let wait_queue = Arc::new(WaitQueue::new());
        let wait_handle = wait_queue.subscribe(cx);
        lock_shared_hw_tags(&all[nth]).waiters.push(SharedTagWaiter {
            wait_queue: Arc::clone(&wait_queue),
            user,
            wanted: 0,
            granted: 0,
        });
        let (set, waiting, ended, down) = (Arc::clone(self), VecDeque::new(), Batch::new(), Batch::new());
        Box::new(SharedTagGateLane { set, nth, wait_queue, wait_handle, below, waiting, out: 0, ended, down })
    }

    /// Tags of the disk `user` in hardware queue `nth` of its own `of` queues. If the set has
    /// another number of queues, the sum of all queues of the set.
    pub(crate) fn usage(&self, user: DeviceId, nth: usize, of: usize) -> Option<DiskSharedTagUsage> {
        let all = self.queues.get()?;
        let these = if of == all.len() { &all[nth..=nth] } else { &all[..] };
        let one = |tags: &Mutex<SharedHwTags>| {
            let tags = lock_shared_hw_tags(tags);
            let held = tags.users.iter().find(|one| one.id == user).map_or(0, |one| one.held);
            let disks = tags.active(tags.now) as u32;
            DiskSharedTagUsage { held, most: tags.share(disks), tags: tags.depth, disks }
        };
        these.iter().map(one).reduce(|a, b| DiskSharedTagUsage {
            held: a.held + b.held,
            most: a.most + b.most,
            tags: a.tags + b.tags,
            disks: a.disks.max(b.disks),
        })
    }
}

/// Locks the tags, for one batch.
fn lock_shared_hw_tags(tags: &Mutex<SharedHwTags>) -> MutexGuard<'_, SharedHwTags> {
    tags.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SharedHwTags {
    /// Number of active disks.
    fn active(&self, now: Nanos) -> usize {
        let wants = |id: DeviceId| self.waiters.iter().any(|waiter| waiter.user == id && waiter.wanted > 0);
        self.users.iter().filter(|one| one.held > 0 || one.until > now || wants(one.id)).count()
    }

    /// Maximum number of tags per disk if `disks` disks are active.
    fn share(&self, disks: u32) -> u32 {
        if self.depth == 1 { 1 } else { self.depth.div_ceil(disks.max(1)).max(MIN_SHARE).min(self.depth) }
    }

    fn user(&mut self, id: DeviceId) -> &mut SharedTagDisk {
        let at = self.users.iter().position(|one| one.id == id).unwrap_or_else(|| {
            self.users.push(SharedTagDisk { id, held: 0, until: Nanos(0) });
            self.users.len() - 1
        });
        &mut self.users[at]
    }

    /// Returns `completed` tags of the lane with the wait queue `wait_queue`, and sets its demand
    /// to `wanted`. Returns the tags granted to the lane. Appends the wait queues of other lanes
    /// that got tags to `to_wake`.
    fn return_and_request(
        &mut self,
        wait_queue: &Arc<WaitQueue>,
        completed: u32,
        wanted: u32,
        now: Nanos,
        to_wake: &mut Vec<Arc<WaitQueue>>,
    ) -> u32 {
        let at = self
            .waiters
            .iter()
            .position(|waiter| Arc::ptr_eq(&waiter.wait_queue, wait_queue))
            .expect("the lane has a waiter");
        let id = self.waiters[at].user;
        self.now = now;
        let user = self.user(id);
        user.held -= completed;
        user.until = now + ACTIVE_TIME;
        self.free += completed;
        let waiter = &mut self.waiters[at];
        waiter.wanted = wanted.saturating_sub(waiter.granted);
        self.grant_tags(Some(wait_queue), to_wake);
        std::mem::take(&mut self.waiters[at].granted)
    }

    /// Grants tags to waiters that may have more, one each in turn.
    fn grant_tags(&mut self, me: Option<&Arc<WaitQueue>>, to_wake: &mut Vec<Arc<WaitQueue>>) {
        let most = self.share(self.active(self.now) as u32);
        let mut passed = 0;
        while self.free > 0 && passed < self.waiters.len() {
            let at = self.next % self.waiters.len();
            self.next = at + 1;
            passed += 1;
            let (id, wanted) = (self.waiters[at].user, self.waiters[at].wanted);
            if wanted == 0 || self.user(id).held >= most {
                continue;
            }
            passed = 0;
            self.free -= 1;
            self.user(id).held += 1;
            let waiter = &mut self.waiters[at];
            (waiter.wanted, waiter.granted) = (wanted - 1, waiter.granted + 1);
            if waiter.granted == 1 && me.is_none_or(|me| !Arc::ptr_eq(me, &waiter.wait_queue)) {
                to_wake.push(Arc::clone(&waiter.wait_queue));
            }
        }
    }

    /// Removes the waiter of a closed lane that had `out` tags.
    fn remove_waiter(&mut self, wait_queue: &Arc<WaitQueue>, out: u32, to_wake: &mut Vec<Arc<WaitQueue>>) {
        let Some(at) = self.waiters.iter().position(|waiter| Arc::ptr_eq(&waiter.wait_queue, wait_queue))
        else {
            return;
        };
        let waiter = self.waiters.swap_remove(at);
        let back = out + waiter.granted;
        self.free += back;
        self.user(waiter.user).held -= back;
        if self.waiters.iter().all(|other| other.user != waiter.user) {
            self.users.retain(|one| one.id != waiter.user);
        }
        self.grant_tags(None, to_wake);
    }
}

/// A lane that waits for shared tags.
struct SharedTagGateLane {
    set: Arc<SharedTagSet>,
    nth: usize,
    wait_queue: Arc<WaitQueue>,
    wait_handle: WaitQueueSubscription,
    below: Box<dyn Lane>,
    /// Requests without a tag.
    waiting: VecDeque<Box<Bio>>,
    /// Number of requests with a tag.
    out: u32,
    /// Requests that failed because they must not wait, for the next `poll`.
    ended: Batch,
    down: Batch,
}

impl SharedTagGateLane {
    /// Calls `f` under the lock. Wakes other lanes after the lock is released.
    fn with_tags<T>(&self, f: impl FnOnce(&mut SharedHwTags, &mut Vec<Arc<WaitQueue>>) -> T) -> T {
        let mut to_wake = Vec::new();
        let queues = self.set.queues.get().expect("a lane is open");
        let result = f(&mut lock_shared_hw_tags(&queues[self.nth]), &mut to_wake);
        to_wake.iter().for_each(|wait_queue| wait_queue.wake_up());
        result
    }

    /// Returns the tags of `completed` requests and sends requests for which tags are available.
    /// Returns true if any was sent.
    fn run_queued(&mut self, mut completed: u32, cx: &mut Cx<'_>) -> bool {
        let now = cx.now();
        self.out -= completed;
        loop {
            let seen = self.wait_handle.epoch();
            let wanted = u32::try_from(self.waiting.len()).unwrap_or(u32::MAX);
            let got = self.with_tags(|tags, to_wake| {
                tags.return_and_request(&self.wait_queue, completed, wanted, now, to_wake)
            });
            let sent = got.min(wanted);
            self.out += sent;
            self.down.extend(self.waiting.drain(..sent as usize));
            // Excess tags are returned. Requests that must not wait fail and want no tag any more.
            completed = got - sent;
            let before = self.waiting.len();
            let is_refused = |bio: &Bio| bio.flags.contains(BioFlags::NOWAIT);
            if self.waiting.iter().any(|bio| is_refused(bio)) {
                let all = std::mem::take(&mut self.waiting);
                let (mut refused, rest): (Batch, Batch) = all.into_iter().partition(|bio| is_refused(bio));
                self.waiting = rest.into();
                refused.iter_mut().for_each(|bio| bio.end_with(Status::Again));
                self.ended.append(&mut refused);
                cx.wake_now();
            }
            if completed == 0 && self.waiting.len() == before {
                if before > 0 {
                    self.wait_handle.wait(seen, cx);
                }
                break;
            }
        }
        let any = !self.down.is_empty();
        if any {
            self.below.submit(&mut self.down, cx);
        }
        any
    }
}

impl Lane for SharedTagGateLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.waiting.extend(batch.drain(..));
        self.run_queued(0, cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        loop {
            let from = done.len();
            self.below.poll(done, cx);
            let completed = (done.len() - from) as u32;
            done.append(&mut self.ended);
            // Requests sent here may have completed at once, so the lower lane is polled again.
            if completed == 0 && self.waiting.is_empty() || !self.run_queued(completed, cx) {
                break;
            }
        }
    }

    fn drain(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        if how == DrainMode::NoFlush {
            back.extend(self.waiting.drain(..));
        }
        let from = back.len();
        self.below.drain(how, back, cx);
        if self.run_queued((back.len() - from) as u32, cx) {
            cx.wake_now();
        }
    }

    fn own_work(&self) -> OwnWork {
        self.below.own_work()
    }
}

impl Drop for SharedTagGateLane {
    fn drop(&mut self) {
        debug_assert!(self.out == 0 || std::thread::panicking(), "closed with requests in flight");
        self.with_tags(|tags, to_wake| tags.remove_waiter(&self.wait_queue, self.out, to_wake));
    }
}
