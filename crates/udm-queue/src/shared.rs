//! Tags that several disks share: blk-mq's shared tag sets, null_blk's `shared_tags`.
//!
//! They lie below the queues of the disks. A request that has a tag of its own queue waits here,
//! on its core, until there is one of the set for it too. So settings change disk by disk, and a
//! disk whose tags are changed takes nothing from the others.
//!
//! **Shares**, as the kernel has them: while several disks are active each may hold no more than
//! its part of the depth, rounded up, and at least four. A disk is active while it holds tags or
//! wants some, and for 5 s behind that: one that is between two requests keeps its part. Of those
//! that want tags and may have more, each lane gets one in turn.
//!
//! *Price.* A lock a batch, each way, of those who share a hardware queue; a letter where another
//! core waits. Only disks that share tags have it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use udm_core::bugs::{self, Bug};
use udm_core::{
    Batch, Bell, Bio, BioFlags, Busy, Cx, DeviceId, Drain, Lane, Listener, Nanos, SharedTags, Status,
};

use crate::settings::queue_of;

/// How long a disk stays active behind its last request: null_blk's time-out of a request, by which
/// the kernel finds out.
const IDLE: Nanos = Nanos::from_millis(5_000);

/// The least that a disk may hold.
const LEAST: u32 = 4;

/// See the module.
pub struct TagSet {
    nr_hw_queues: usize,
    depth: u32,
    /// There once a lane is opened: a hardware queue is that of its cores.
    queues: OnceLock<Box<[Mutex<HwTags>]>>,
}

/// The tags of a hardware queue.
struct HwTags {
    depth: u32,
    free: u32,
    users: Vec<User>,
    seats: Vec<Seat>,
    /// The seat that is next.
    next: usize,
    /// As somebody last said.
    now: Nanos,
}

/// A disk.
struct User {
    id: DeviceId,
    held: u32,
    /// It stays active until then.
    until: Nanos,
}

/// A lane of a disk.
struct Seat {
    bell: Arc<Bell>,
    user: DeviceId,
    wanted: u32,
    /// Those that it has not taken yet; its disk holds them.
    granted: u32,
}

impl TagSet {
    /// So many hardware queues, one a core at the most and where it is 0, of `depth` tags each.
    #[must_use]
    pub fn new(nr_hw_queues: u32, depth: u32) -> Arc<TagSet> {
        let queues = OnceLock::new();
        Arc::new(TagSet { nr_hw_queues: nr_hw_queues as usize, depth: depth.max(1), queues })
    }

    /// Tags of all hardware queues, where there are `cores` cores.
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

    /// A lane of the disk `user` on this core, above `below`.
    pub(crate) fn lane(
        self: &Arc<TagSet>,
        user: DeviceId,
        below: Box<dyn Lane>,
        cx: &mut Cx<'_>,
    ) -> Box<dyn Lane> {
        let (cores, depth) = (cx.cores(), self.depth);
        let made = || {
            let (users, seats) = (Vec::new(), Vec::new());
            Mutex::new(HwTags { depth, free: depth, users, seats, next: 0, now: Nanos(0) })
        };
        let all = self.queues.get_or_init(|| (0..self.count(cores)).map(|_| made()).collect());
        let nth = queue_of(cx.core().index(), cores, all.len());
        let bell = Arc::new(Bell::new());
        let listener = bell.listen(cx);
        lock(&all[nth]).seats.push(Seat { bell: Arc::clone(&bell), user, wanted: 0, granted: 0 });
        let (set, waiting, ended, down) = (Arc::clone(self), VecDeque::new(), Batch::new(), Batch::new());
        Box::new(SharedLane { set, nth, bell, listener, below, waiting, out: 0, ended, down })
    }

    /// What the disk `user` has of hardware queue `nth`, of `of` that it has itself: of all where
    /// that is one for all cores.
    pub(crate) fn look(&self, user: DeviceId, nth: usize, of: usize) -> Option<SharedTags> {
        let all = self.queues.get()?;
        let these = if of == all.len() { &all[nth..=nth] } else { &all[..] };
        let one = |tags: &Mutex<HwTags>| {
            let tags = lock(tags);
            let held = tags.users.iter().find(|one| one.id == user).map_or(0, |one| one.held);
            let disks = tags.active(tags.now) as u32;
            SharedTags { held, most: tags.share(disks), tags: tags.depth, disks }
        };
        these.iter().map(one).reduce(|a, b| SharedTags {
            held: a.held + b.held,
            most: a.most + b.most,
            tags: a.tags + b.tags,
            disks: a.disks.max(b.disks),
        })
    }
}

/// Held for a batch.
fn lock(tags: &Mutex<HwTags>) -> MutexGuard<'_, HwTags> {
    tags.lock().unwrap_or_else(PoisonError::into_inner)
}

impl HwTags {
    /// How many disks are active.
    fn active(&self, now: Nanos) -> usize {
        let wants = |id: DeviceId| self.seats.iter().any(|seat| seat.user == id && seat.wanted > 0);
        self.users.iter().filter(|one| one.held > 0 || one.until > now || wants(one.id)).count()
    }

    /// What a disk may hold of a set that `disks` use.
    fn share(&self, disks: u32) -> u32 {
        if self.depth == 1 { 1 } else { self.depth.div_ceil(disks.max(1)).max(LEAST).min(self.depth) }
    }

    fn user(&mut self, id: DeviceId) -> &mut User {
        let at = self.users.iter().position(|one| one.id == id).unwrap_or_else(|| {
            self.users.push(User { id, held: 0, until: Nanos(0) });
            self.users.len() - 1
        });
        &mut self.users[at]
    }

    /// The lane of `bell` gives `home` tags back and wants `wanted` in all: those that it gets now.
    /// Whoever else got some is to be told.
    fn exchange(
        &mut self,
        bell: &Arc<Bell>,
        home: u32,
        wanted: u32,
        now: Nanos,
        tell: &mut Vec<Arc<Bell>>,
    ) -> u32 {
        let at = self.seats.iter().position(|seat| Arc::ptr_eq(&seat.bell, bell)).expect("it has a seat");
        let id = self.seats[at].user;
        self.now = now;
        let user = self.user(id);
        user.held -= home;
        user.until = now + IDLE;
        self.free += home + u32::from(home > 0 && bugs::on(Bug::SharedTagTwice));
        let seat = &mut self.seats[at];
        seat.wanted = wanted.saturating_sub(seat.granted);
        self.hand_out(Some(bell), tell);
        std::mem::take(&mut self.seats[at].granted)
    }

    /// Hands tags to those that want some and may have more, one each in turn.
    fn hand_out(&mut self, me: Option<&Arc<Bell>>, tell: &mut Vec<Arc<Bell>>) {
        let most = self.share(self.active(self.now) as u32);
        let mut passed = 0;
        while self.free > 0 && passed < self.seats.len() {
            let at = self.next % self.seats.len();
            self.next = at + 1;
            passed += 1;
            let (id, wanted) = (self.seats[at].user, self.seats[at].wanted);
            if wanted == 0 || self.user(id).held >= most {
                continue;
            }
            passed = 0;
            self.free -= 1;
            self.user(id).held += 1;
            let seat = &mut self.seats[at];
            (seat.wanted, seat.granted) = (wanted - 1, seat.granted + 1);
            if seat.granted == 1 && me.is_none_or(|me| !Arc::ptr_eq(me, &seat.bell)) {
                tell.push(Arc::clone(&seat.bell));
            }
        }
    }

    /// The lane of `bell` is gone, with `out` tags.
    fn leave(&mut self, bell: &Arc<Bell>, out: u32, tell: &mut Vec<Arc<Bell>>) {
        let Some(at) = self.seats.iter().position(|seat| Arc::ptr_eq(&seat.bell, bell)) else { return };
        let seat = self.seats.swap_remove(at);
        let back = out + seat.granted;
        self.free += back;
        self.user(seat.user).held -= back;
        if self.seats.iter().all(|other| other.user != seat.user) {
            self.users.retain(|one| one.id != seat.user);
        }
        self.hand_out(None, tell);
    }
}

/// See the module.
struct SharedLane {
    set: Arc<TagSet>,
    nth: usize,
    bell: Arc<Bell>,
    listener: Listener,
    below: Box<dyn Lane>,
    /// Requests without a tag.
    waiting: VecDeque<Box<Bio>>,
    /// Those with one.
    out: u32,
    /// Those that were not to wait, for the next `poll`.
    ended: Batch,
    down: Batch,
}

impl SharedLane {
    /// The lock is let go of before anybody is told.
    fn with_tags<T>(&self, f: impl FnOnce(&mut HwTags, &mut Vec<Arc<Bell>>) -> T) -> T {
        let mut tell = Vec::new();
        let queues = self.set.queues.get().expect("a lane is open");
        let result = f(&mut lock(&queues[self.nth]), &mut tell);
        if !bugs::on(Bug::SharedTagNotRung) {
            tell.iter().for_each(|bell| bell.ring());
        }
        result
    }

    /// `home` requests have come home. Sends what there are tags for; true when that is any.
    fn go_on(&mut self, mut home: u32, cx: &mut Cx<'_>) -> bool {
        let now = cx.now();
        self.out -= home;
        loop {
            let seen = self.listener.epoch();
            let wanted = u32::try_from(self.waiting.len()).unwrap_or(u32::MAX);
            let got = self.with_tags(|tags, tell| tags.exchange(&self.bell, home, wanted, now, tell));
            let sent = got.min(wanted);
            self.out += sent;
            self.down.extend(self.waiting.drain(..sent as usize));
            // What it has over goes back; what was not to wait wants nothing more.
            home = got - sent;
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
            if home == 0 && self.waiting.len() == before {
                if before > 0 {
                    self.listener.wait(seen, cx);
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

impl Lane for SharedLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.waiting.extend(batch.drain(..));
        self.go_on(0, cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        loop {
            let from = done.len();
            self.below.poll(done, cx);
            let home = (done.len() - from) as u32;
            done.append(&mut self.ended);
            // What goes down here is polled for as what a submit sends: it may have ended in that.
            if home == 0 && self.waiting.is_empty() || !self.go_on(home, cx) {
                break;
            }
        }
    }

    fn drain(&mut self, how: Drain, back: &mut Batch, cx: &mut Cx<'_>) {
        if how == Drain::NoFlush {
            back.extend(self.waiting.drain(..));
        }
        let from = back.len();
        self.below.drain(how, back, cx);
        if self.go_on((back.len() - from) as u32, cx) {
            cx.wake_now();
        }
    }

    fn busy(&self) -> Busy {
        self.below.busy()
    }
}

impl Drop for SharedLane {
    fn drop(&mut self) {
        debug_assert!(self.out == 0 || std::thread::panicking(), "closed with requests under way");
        self.with_tags(|tags, tell| tags.leave(&self.bell, self.out, tell));
    }
}
