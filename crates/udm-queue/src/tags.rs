//! The tags of a hardware queue: they limit the number of requests with the disk.
//!
//! A tag is a permit without a number. A lane takes the tags for a batch, and returns those of
//! completed requests, with one atomic each. If no tag is free, the lane joins a line. From then
//! on, returned tags are granted to the lanes in line, one each in turn. A busy queue of the kernel
//! takes requests of its CPUs in the same way. So no lane that comes later, or that just had tags,
//! goes first.
//!
//! ```text
//! waiter:     in_line += 1, enqueue;   *fence*;  any tag free now? take it
//! returner:   line empty: free += n;   *fence*;  anyone in line now? take tags back, grant
//! ```
//!
//! The fences forbid that both miss each other; see the loom tests. A waiter that gets one of
//! several wanted tags is out of the line for a moment. So a granter that puts it back must check
//! again for free tags, as a returner does.
//!
//! **Retiring.** A change of settings wants all tags permanently ([`HwQueueTags::retire_all`]). It
//! waits in line like a lane, so requests continue meanwhile. When it has the last tag, no request
//! is with the disk, and the tags are retired: lanes in line are woken, and later lanes join the
//! line and see it. Until then the change can return its tags ([`HwQueueTags::give_back`]).
//!
//! ```text
//! waiter:     enqueue;          *fence*;  retired? use the new tags
//! retirer:    retired = true;   *fence*;  wake the line
//! ```
//!
//! *Price.* Two atomic operations and a fence per batch. In line: a push and a pop of a shared
//! queue per granted tag, an allocation every 31 pushes, and a message to the waiting core. The
//! retired flag is checked only for batches that do not go straight to the disk.

use std::sync::Arc;
use udm_core::{Cx, WaitQueue, WaitQueueSubscription, interleave};

#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

#[cfg(not(feature = "loom"))]
use crossbeam_queue::SegQueue as TagWaiterQueue;

/// The tags of a hardware queue, and the waiters for them in their order.
pub(crate) struct HwQueueTags {
    free: AtomicU32,
    waiters: TagWaiterQueue<Arc<TagWaiter>>,
    /// Number of waiters in line or about to join it.
    waiting: AtomicU32,
    depth: u32,
    retired: AtomicBool,
}

/// A waiter for tags: a lane, or a change of settings.
pub(crate) struct TagWaiter {
    /// [`QUEUED`], then 31 bits for the number of wanted tags, then 32 bits for the number of
    /// granted tags.
    state: AtomicU64,
    wait_queue: Arc<WaitQueue>,
    /// Called when the waiter has all tags that it wants.
    then: Option<Box<dyn Fn() + Send + Sync>>,
}

const QUEUED: u64 = 1 << 63;
const WANTED: u64 = 1 << 32;

fn wanted_tag_count(state: u64) -> u32 {
    ((state & !QUEUED) / WANTED) as u32
}

impl TagWaiter {
    fn new() -> TagWaiter {
        TagWaiter { state: AtomicU64::new(0), wait_queue: Arc::new(WaitQueue::new()), then: None }
    }

    /// Changes the state and returns the previous one. Release and acquire: a lane that gets a tag
    /// sees all earlier accesses of the granter.
    fn change(&self, to: impl Fn(u64) -> u64) -> u64 {
        let mut now = self.state.load(Ordering::Relaxed);
        loop {
            match self.state.compare_exchange(now, to(now), Ordering::AcqRel, Ordering::Relaxed) {
                Ok(was) => return was,
                Err(is) => now = is,
            }
        }
    }

    /// Grants a tag, if one is wanted. Returns whether a tag was granted, and whether the waiter
    /// stays in line.
    fn grant(&self) -> (bool, bool) {
        let was = self.change(|state| match wanted_tag_count(state) {
            0 => state & !QUEUED,
            1 => (state - WANTED + 1) & !QUEUED,
            _ => state - WANTED + 1,
        });
        self.notify_if_satisfied(wanted_tag_count(was), 1);
        (wanted_tag_count(was) > 0, wanted_tag_count(was) > 1)
    }

    /// Calls `then` if the waiter wanted `was` tags and now wants no more, after a reduction by
    /// `n`.
    fn notify_if_satisfied(&self, was: u32, n: u32) {
        if (1..=n).contains(&was)
            && let Some(then) = &self.then
        {
            then();
        }
    }

    /// Takes the granted tags.
    fn collect(&self) -> u32 {
        let was = self.state.fetch_and(!(WANTED - 1), Ordering::AcqRel);
        (was % WANTED) as u32
    }

    /// Sets the number of wanted tags to `n`. Returns false if the waiter was in line already.
    fn request(&self, n: u32) -> bool {
        let was = self.change(|state| QUEUED | (u64::from(n) * WANTED) | (state % WANTED));
        was & QUEUED == 0
    }

    /// Reduces the number of wanted tags by `n`, at most to 0.
    fn request_less(&self, n: u32) {
        let was = self.change(|state| state - u64::from(wanted_tag_count(state).min(n)) * WANTED);
        self.notify_if_satisfied(wanted_tag_count(was), n);
    }
}

impl HwQueueTags {
    /// Creates `depth` tags, at least one.
    pub fn new(depth: u32) -> HwQueueTags {
        let depth = depth.max(1);
        let (free, waiting, retired) = (AtomicU32::new(depth), AtomicU32::new(0), AtomicBool::new(false));
        HwQueueTags { free, waiters: TagWaiterQueue::new(), waiting, depth, retired }
    }

    /// Takes all tags permanently. Calls `then` when all are taken, perhaps at once. Pass the
    /// returned waiter to [`HwQueueTags::give_back`] to cancel.
    pub fn retire_all(&self, then: Box<dyn Fn() + Send + Sync>) -> Arc<TagWaiter> {
        let waiter = Arc::new(TagWaiter { then: Some(then), ..TagWaiter::new() });
        self.enqueue(&waiter, self.depth);
        waiter
    }

    /// Returns the tags that `waiter` has taken so far and takes no more. Not for retired tags.
    pub fn give_back(&self, waiter: &TagWaiter) {
        let was = waiter.change(|state| state & !(QUEUED - WANTED));
        self.give(self.depth - wanted_tag_count(was));
    }

    /// Retires the tags: wakes all waiters in line, and later waiters see the flag.
    pub fn retire(&self) {
        self.retired.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        interleave::mark_interleave_point();
        while let Some(first) = self.waiters.pop() {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            first.wait_queue.wake_up();
        }
    }

    /// True if the tags are retired.
    pub fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Acquire)
    }

    /// Current numbers of free tags and of waiters in line.
    pub fn usage(&self) -> (u32, u32) {
        (self.free.load(Ordering::Relaxed), self.waiting.load(Ordering::Relaxed))
    }

    /// Takes up to `most` tags.
    fn take(&self, most: u32) -> u32 {
        interleave::mark_interleave_point();
        let mut free = self.free.load(Ordering::Relaxed);
        while free > 0 {
            let n = free.min(most);
            match self.free.compare_exchange(free, free - n, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return n,
                Err(is) => free = is,
            }
        }
        0
    }

    /// Returns `n` tags.
    #[inline]
    fn give(&self, n: u32) {
        interleave::mark_interleave_point();
        if self.waiting.load(Ordering::Relaxed) == 0 {
            self.free.fetch_add(n, Ordering::Release);
            fence(Ordering::SeqCst);
            interleave::mark_interleave_point();
            if self.waiting.load(Ordering::Relaxed) == 0 {
                return;
            }
            // A lane that took them meanwhile returns them later, and then sees the line.
            let n = self.take(n);
            return self.grant_tags(n);
        }
        self.grant_tags(n);
    }

    /// Grants `n` tags to the waiters in line, and frees the rest.
    #[inline(never)]
    fn grant_tags(&self, mut n: u32) {
        while n > 0 {
            while n > 0
                && let Some(first) = self.waiters.pop()
            {
                let (handed, stays) = first.grant();
                n -= u32::from(handed);
                let wait_queue = Arc::clone(&first.wait_queue);
                if stays {
                    self.waiters.push(first);
                } else {
                    self.waiting.fetch_sub(1, Ordering::Relaxed);
                }
                if handed {
                    wait_queue.wake_up();
                }
            }
            // Also if `n` is 0: while a waiter was out of the line, a returner may have found the
            // line empty.
            if n > 0 {
                self.free.fetch_add(n, Ordering::Release);
            }
            fence(Ordering::SeqCst);
            interleave::mark_interleave_point();
            if self.waiters.is_empty() {
                return;
            }
            n = self.take(u32::MAX);
        }
    }

    /// Makes `waiter` want `n` tags. Returns the number of free tags taken at once.
    fn enqueue(&self, waiter: &Arc<TagWaiter>, n: u32) -> u32 {
        interleave::mark_interleave_point();
        if waiter.request(n) {
            self.waiting.fetch_add(1, Ordering::Relaxed);
            self.waiters.push(Arc::clone(waiter));
        }
        fence(Ordering::SeqCst);
        let got = self.take(n);
        waiter.request_less(got);
        got
    }
}

/// The tags of one lane.
pub(crate) struct LaneTags {
    tags: Arc<HwQueueTags>,
    waiter: Arc<TagWaiter>,
    wait_handle: WaitQueueSubscription,
    /// Tags without a request.
    free: u32,
    /// Tags with a request.
    out: u32,
    waits: bool,
}

impl LaneTags {
    /// Creates the state of a lane without tags.
    pub fn new(tags: Arc<HwQueueTags>, cx: &mut Cx<'_>) -> LaneTags {
        let waiter = Arc::new(TagWaiter::new());
        let wait_handle = waiter.wait_queue.subscribe(cx);
        LaneTags { tags, waiter, wait_handle, free: 0, out: 0, waits: false }
    }

    /// Takes a tag for each of `n` requests. Returns false, and takes none for them, if there are
    /// not enough.
    #[inline]
    pub fn take_all(&mut self, n: usize) -> bool {
        let n = n as u32;
        if self.free < n {
            self.free += self.tags.take(n - self.free);
        }
        let all = self.free >= n;
        if all {
            (self.free, self.out) = (self.free - n, self.out + n);
        }
        all
    }

    /// Takes a tag for one of `wanted` requests.
    pub fn take_one(&mut self, wanted: usize) -> bool {
        if self.free == 0 {
            self.collect();
        }
        if self.free == 0 && !self.waits {
            self.free = self.tags.take(u32::try_from(wanted).unwrap_or(u32::MAX));
        }
        let one = self.free > 0;
        if one {
            (self.free, self.out) = (self.free - 1, self.out + 1);
        }
        one
    }

    /// True if the tags are retired.
    pub fn are_retired(&self) -> bool {
        self.tags.is_retired()
    }

    fn collect(&mut self) {
        if self.waits {
            self.free += self.waiter.collect();
        }
    }

    /// True if a request has a tag.
    #[inline]
    pub fn any_out(&self) -> bool {
        self.out > 0
    }

    /// Handles `n` completed requests. Their tags go to the waiters in line. If only this lane
    /// waits, it keeps them.
    #[inline]
    pub fn completed(&mut self, n: usize) {
        let n = n as u32;
        self.out -= n;
        if self.waits && self.tags.waiting.load(Ordering::Relaxed) <= 1 {
            self.free += n;
        } else {
            self.tags.give(n);
        }
    }

    /// If `wanted` requests lack a tag, joins the line for them, and returns true if more tags are
    /// available at once. If `wanted` is 0, leaves the line and returns excess tags.
    pub fn update_wait(&mut self, wanted: usize, cx: &mut Cx<'_>) -> bool {
        let wanted = u32::try_from(wanted).unwrap_or(u32::MAX).min(u32::MAX >> 1);
        if wanted == 0 {
            if self.waits {
                self.waits = false;
                self.waiter.request_less(u32::MAX);
                self.free += self.waiter.collect();
            }
            if self.free > 0 {
                self.tags.give(std::mem::take(&mut self.free));
            }
            return false;
        }
        let seen = self.wait_handle.epoch();
        self.waits = true;
        self.free += self.tags.enqueue(&self.waiter, wanted);
        self.collect();
        if self.free == 0 {
            self.wait_handle.wait(seen, cx);
        }
        self.free > 0
    }
}

impl Drop for LaneTags {
    fn drop(&mut self) {
        debug_assert!(self.out == 0 || std::thread::panicking(), "closed with requests in flight");
        self.waiter.request_less(u32::MAX);
        self.tags.give(self.free + self.out + self.waiter.collect());
    }
}

/// A queue that loom can model.
#[cfg(feature = "loom")]
struct TagWaiterQueue<T>(loom::sync::Mutex<std::collections::VecDeque<T>>);

#[cfg(feature = "loom")]
impl<T> TagWaiterQueue<T> {
    fn new() -> TagWaiterQueue<T> {
        TagWaiterQueue(loom::sync::Mutex::new(std::collections::VecDeque::new()))
    }
    fn push(&self, one: T) {
        self.0.lock().unwrap().push_back(one);
    }
    fn pop(&self) -> Option<T> {
        self.0.lock().unwrap().pop_front()
    }
    fn is_empty(&self) -> bool {
        self.0.lock().unwrap().is_empty()
    }
}

#[cfg(all(test, feature = "loom"))]
mod loom_tests {
    use super::*;
    use loom::thread;

    fn check(model: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(model);
    }

    /// With one tag and two lanes, no lane waits for a free tag, and the tag exists once.
    #[test]
    fn loom_no_tag_is_lost_and_nobody_waits_for_one_that_is_free() {
        check(|| {
            let tags = Arc::new(HwQueueTags::new(1));
            assert_eq!(tags.take(1), 1);
            let waiter = Arc::new(TagWaiter::new());
            let (of_other, of_waiter) = (Arc::clone(&tags), Arc::clone(&waiter));
            let other = thread::spawn(move || of_other.give(1));
            let got = tags.enqueue(&of_waiter, 1);
            other.join().unwrap();
            let got = got + waiter.collect();
            assert_eq!(got + tags.take(2), 1, "there is exactly one tag");
            assert_eq!(got, 1, "the waiter has the tag");
        });
    }

    /// All tags are taken permanently while one is in use and a lane joins the line. The lane is
    /// woken or sees the flag, but only when no request is with the disk.
    #[test]
    fn loom_who_waits_for_tags_that_retire_sees_it() {
        check(|| {
            let tags = Arc::new(HwQueueTags::new(1));
            assert_eq!(tags.take(1), 1);
            let (of_other, of_then) = (Arc::clone(&tags), Arc::downgrade(&tags));
            let other = thread::spawn(move || of_other.give(1));
            tags.retire_all(Box::new(move || of_then.upgrade().unwrap().retire()));
            let waiter = Arc::new(TagWaiter::new());
            let got = tags.enqueue(&waiter, 1);
            let sees = tags.is_retired();
            assert!(got == 0 || !sees, "retired although a request has a tag");
            other.join().unwrap();
            tags.give(got + waiter.collect());
            assert!(tags.is_retired());
            assert!(sees || tags.waiters.is_empty(), "removed from the line and woken");
        });
    }

    /// Two lanes return a tag each while all tags are taken permanently. Both find the waiter, even
    /// if one of them is just putting it back in line.
    #[test]
    fn loom_who_takes_all_tags_for_good_gets_the_last() {
        check(|| {
            let tags = Arc::new(HwQueueTags::new(2));
            assert_eq!(tags.take(2), 2);
            let of_then = Arc::downgrade(&tags);
            tags.retire_all(Box::new(move || of_then.upgrade().unwrap().retire()));
            let of_other = Arc::clone(&tags);
            let other = thread::spawn(move || of_other.give(1));
            tags.give(1);
            other.join().unwrap();
            assert!(tags.is_retired(), "{} tags are free, and none of them was taken", tags.usage().0);
        });
    }

    /// A retirement is cancelled while a request returns its tag: afterwards all tags are free.
    #[test]
    fn loom_tags_that_are_given_back_are_all_there() {
        check(|| {
            let tags = Arc::new(HwQueueTags::new(2));
            assert_eq!(tags.take(1), 1);
            let waiter = tags.retire_all(Box::new(|| {}));
            let of_other = Arc::clone(&tags);
            let other = thread::spawn(move || of_other.give(1));
            tags.give_back(&waiter);
            other.join().unwrap();
            assert_eq!(tags.take(3), 2);
        });
    }

    /// A waiter leaves while it is granted a tag.
    #[test]
    fn loom_a_tag_handed_to_who_leaves_comes_back() {
        check(|| {
            let tags = Arc::new(HwQueueTags::new(1));
            assert_eq!(tags.take(1), 1);
            let waiter = Arc::new(TagWaiter::new());
            assert_eq!(tags.enqueue(&waiter, 1), 0);
            let of_other = Arc::clone(&tags);
            let other = thread::spawn(move || of_other.give(1));
            waiter.request_less(u32::MAX);
            tags.give(waiter.collect());
            other.join().unwrap();
            assert_eq!(tags.take(2), 1);
        });
    }
}
