//! The tags of a hardware queue: how many requests may be with the disk.
//!
//! A tag is a permit, without a number: nobody here asks which one it is. Lanes take what they
//! need for a batch and give back what came home, each with one atomic. Where there are none left,
//! a lane gets in line, and from then on whoever gives back hands tags to those in line, one each
//! in turn, as a busy queue of the kernel takes one request of each CPU in turn. So nobody who
//! comes later, and nobody who had tags just now, goes first.
//!
//! ```text
//! who waits:     in_line += 1, in line;        *fence*;  any free now? take them
//! who gives:     nobody in line: free += n;    *fence*;  somebody in line now? take them back, hand out
//! ```
//!
//! The fences forbid that both miss the other: see the loom tests. Who is handed a tag and wants
//! more is out of line for a moment; so who puts it back looks again, as who gives does.
//!
//! **An end.** When other settings are to hold, all tags are wanted for good
//! ([`Tags::retire_all`]): by one in line like any other, so that requests go on while it gets
//! them. With the last of them nothing is with the disk, and the tags are retired: those in line
//! are told, and those who come later get in line and see it. Until then all of it can be taken back
//! ([`Tags::give_back`]).
//!
//! ```text
//! who waits:     in line;          *fence*;  retired? take others
//! who retires:   retired = true;   *fence*;  tell those in line
//! ```
//!
//! *Price.* Two atomic operations and a fence a batch. In line: a push and a pop of a shared queue
//! for each tag that is handed over, an allocation of its each 31 times, and a letter to the core
//! that waits. Whether tags are retired is looked at where a batch does not go straight down.

use std::sync::Arc;
use udm_core::bugs::{self, Bug};
use udm_core::{Cx, WaitHandle, WaitQueue, interleave};

#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

#[cfg(not(feature = "loom"))]
use crossbeam_queue::SegQueue as WaiterQueue;

/// See the module.
pub(crate) struct Tags {
    free: AtomicU32,
    waiters: WaiterQueue<Arc<TagWaiter>>,
    /// How many are in line, or about to be.
    in_line: AtomicU32,
    depth: u32,
    retired: AtomicBool,
}

/// Somebody who may get in line.
pub(crate) struct TagWaiter {
    /// [`QUEUED`], then 31 bits of how many are wanted, then 32 of how many were handed over.
    state: AtomicU64,
    bell: Arc<WaitQueue>,
    /// Called when it has all that it wants.
    then: Option<Box<dyn Fn() + Send + Sync>>,
}

const QUEUED: u64 = 1 << 63;
const WANTED: u64 = 1 << 32;

fn wanted(state: u64) -> u32 {
    ((state & !QUEUED) / WANTED) as u32
}

impl TagWaiter {
    fn new() -> TagWaiter {
        TagWaiter { state: AtomicU64::new(0), bell: Arc::new(WaitQueue::new()), then: None }
    }

    /// Changes the state and gives back what it was. Release and acquire: who is handed a tag sees
    /// what was done before.
    fn change(&self, to: impl Fn(u64) -> u64) -> u64 {
        let mut now = self.state.load(Ordering::Relaxed);
        loop {
            match self.state.compare_exchange(now, to(now), Ordering::AcqRel, Ordering::Relaxed) {
                Ok(was) => return was,
                Err(is) => now = is,
            }
        }
    }

    /// Hands over a tag, if one is wanted. Also, whether it stays in line.
    fn grant(&self) -> (bool, bool) {
        let was = self.change(|state| match wanted(state) {
            0 => state & !QUEUED,
            1 => (state - WANTED + 1) & !QUEUED,
            _ => state - WANTED + 1,
        });
        self.notify_if_satisfied(wanted(was), 1);
        (wanted(was) > 0, wanted(was) > 1)
    }

    /// It wanted `was`, and now `n` fewer.
    fn notify_if_satisfied(&self, was: u32, n: u32) {
        if (1..=n).contains(&was)
            && let Some(then) = &self.then
        {
            then();
        }
    }

    /// Takes what was handed over.
    fn collect(&self) -> u32 {
        let was = self.state.fetch_and(!(WANTED - 1), Ordering::AcqRel);
        (was % WANTED) as u32
    }

    /// Wants `n` from now on; false when it was in line already.
    fn request(&self, n: u32) -> bool {
        let was = self.change(|state| QUEUED | (u64::from(n) * WANTED) | (state % WANTED));
        was & QUEUED == 0
    }

    /// Wants `n` fewer, or none.
    fn request_less(&self, n: u32) {
        let was = self.change(|state| state - u64::from(wanted(state).min(n)) * WANTED);
        self.notify_if_satisfied(wanted(was), n);
    }
}

impl Tags {
    /// `depth` tags, at least one.
    pub fn new(depth: u32) -> Tags {
        let depth = depth.max(1);
        let (free, in_line, retired) = (AtomicU32::new(depth), AtomicU32::new(0), AtomicBool::new(false));
        Tags { free, waiters: WaiterQueue::new(), in_line, depth, retired }
    }

    /// Takes all tags, for good; `then` is called once they are all taken, perhaps at once. What it
    /// returns is for [`Tags::give_back`].
    pub fn retire_all(&self, then: Box<dyn Fn() + Send + Sync>) -> Arc<TagWaiter> {
        let waiter = Arc::new(TagWaiter { then: Some(then), ..TagWaiter::new() });
        self.enqueue(&waiter, self.depth);
        waiter
    }

    /// Gives back what `waiter` has taken for good so far, and takes no more. Not for tags that are
    /// retired.
    pub fn give_back(&self, waiter: &TagWaiter) {
        let was = waiter.change(|state| state & !(QUEUED - WANTED));
        self.give(self.depth - wanted(was));
    }

    /// Tells those in line, and those who come, that there will be no more.
    pub fn retire(&self) {
        self.retired.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        interleave::point();
        while let Some(first) = self.waiters.pop() {
            self.in_line.fetch_sub(1, Ordering::Relaxed);
            if !bugs::on(Bug::RetiredNotRung) {
                first.bell.wake_up();
            }
        }
    }

    /// There will be no more of these.
    pub fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Acquire)
    }

    /// How many have no request, and how many lanes are in line, as of now.
    pub fn usage(&self) -> (u32, u32) {
        (self.free.load(Ordering::Relaxed), self.in_line.load(Ordering::Relaxed))
    }

    /// Takes up to `most`.
    fn take(&self, most: u32) -> u32 {
        interleave::point();
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

    /// Gives `n` back.
    #[inline]
    fn give(&self, n: u32) {
        interleave::point();
        if self.in_line.load(Ordering::Relaxed) == 0 {
            self.free.fetch_add(n, Ordering::Release);
            fence(Ordering::SeqCst);
            interleave::point();
            if self.in_line.load(Ordering::Relaxed) == 0 {
                return;
            }
            // Who took them meanwhile gives them back one day, and finds the line then.
            let n = self.take(n);
            return self.grant_tags(n);
        }
        self.grant_tags(n);
    }

    /// Hands `n` to those in line, and puts back what nobody wants.
    #[inline(never)]
    fn grant_tags(&self, mut n: u32) {
        while n > 0 {
            while n > 0
                && let Some(first) = self.waiters.pop()
            {
                let (handed, stays) = first.grant();
                n -= u32::from(handed);
                let bell = Arc::clone(&first.bell);
                if stays {
                    self.waiters.push(first);
                } else {
                    self.in_line.fetch_sub(1, Ordering::Relaxed);
                }
                if handed && !bugs::on(Bug::TagNotRung) {
                    bell.wake_up();
                }
            }
            // Also with none to put back: who gave while one was out of line may have found nobody.
            if n > 0 {
                self.free.fetch_add(n, Ordering::Release);
            }
            fence(Ordering::SeqCst);
            interleave::point();
            if self.waiters.is_empty() {
                return;
            }
            n = self.take(u32::MAX);
        }
    }

    /// `waiter` wants `n`. What is free now it gets at once.
    fn enqueue(&self, waiter: &Arc<TagWaiter>, n: u32) -> u32 {
        interleave::point();
        if waiter.request(n) {
            self.in_line.fetch_add(1, Ordering::Relaxed);
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
    tags: Arc<Tags>,
    waiter: Arc<TagWaiter>,
    listener: WaitHandle,
    /// Those without a request.
    free: u32,
    /// Those with one.
    out: u32,
    waits: bool,
}

impl LaneTags {
    /// None yet.
    pub fn new(tags: Arc<Tags>, cx: &mut Cx<'_>) -> LaneTags {
        let waiter = Arc::new(TagWaiter::new());
        let listener = waiter.bell.subscribe(cx);
        LaneTags { tags, waiter, listener, free: 0, out: 0, waits: false }
    }

    /// A tag for each of `n` requests; false, and none, where there are not so many.
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

    /// A tag for one request, of `wanted` that want one.
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

    /// There will be no more.
    pub fn are_retired(&self) -> bool {
        self.tags.is_retired()
    }

    fn collect(&mut self) {
        if self.waits {
            self.free += self.waiter.collect();
        }
    }

    /// True when a request has a tag.
    #[inline]
    pub fn any_out(&self) -> bool {
        self.out > 0
    }

    /// `n` requests came home. Their tags go to those in line, this lane among them; where nobody
    /// else is, they stay.
    #[inline]
    pub fn completed(&mut self, n: usize) {
        let n = n as u32;
        self.out -= n;
        if self.waits && self.tags.in_line.load(Ordering::Relaxed) <= 1 {
            self.free += n;
        } else {
            self.tags.give(n);
        }
    }

    /// `wanted` requests have no tag, as far as the lane got. What it has over goes back. True when
    /// there may be more tags at once.
    pub fn settle(&mut self, wanted: usize, cx: &mut Cx<'_>) -> bool {
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
        let seen = self.listener.epoch();
        self.waits = true;
        self.free += self.tags.enqueue(&self.waiter, wanted);
        self.collect();
        if self.free == 0 {
            self.listener.wait(seen, cx);
        }
        self.free > 0
    }
}

impl Drop for LaneTags {
    fn drop(&mut self) {
        debug_assert!(self.out == 0 || std::thread::panicking(), "closed with requests under way");
        self.waiter.request_less(u32::MAX);
        self.tags.give(self.free + self.out + self.waiter.collect());
    }
}

/// What loom can look into.
#[cfg(feature = "loom")]
struct WaiterQueue<T>(loom::sync::Mutex<std::collections::VecDeque<T>>);

#[cfg(feature = "loom")]
impl<T> WaiterQueue<T> {
    fn new() -> WaiterQueue<T> {
        WaiterQueue(loom::sync::Mutex::new(std::collections::VecDeque::new()))
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

    /// One tag, two who want it: nobody waits when it is free, and it is there once.
    #[test]
    fn loom_no_tag_is_lost_and_nobody_waits_for_one_that_is_free() {
        check(|| {
            let tags = Arc::new(Tags::new(1));
            assert_eq!(tags.take(1), 1);
            let waiter = Arc::new(TagWaiter::new());
            let (of_other, of_waiter) = (Arc::clone(&tags), Arc::clone(&waiter));
            let other = thread::spawn(move || of_other.give(1));
            let got = tags.enqueue(&of_waiter, 1);
            other.join().unwrap();
            let got = got + waiter.collect();
            assert_eq!(got + tags.take(2), 1, "there is one");
            assert_eq!(got, 1, "who waited has it");
        });
    }

    /// All tags are taken for good while one is out and a lane gets in line: that lane is told, or
    /// sees it, once, and only when nothing is with the disk.
    #[test]
    fn loom_who_waits_for_tags_that_retire_sees_it() {
        check(|| {
            let tags = Arc::new(Tags::new(1));
            assert_eq!(tags.take(1), 1);
            let (of_other, of_then) = (Arc::clone(&tags), Arc::downgrade(&tags));
            let other = thread::spawn(move || of_other.give(1));
            tags.retire_all(Box::new(move || of_then.upgrade().unwrap().retire()));
            let waiter = Arc::new(TagWaiter::new());
            let got = tags.enqueue(&waiter, 1);
            let sees = tags.is_retired();
            assert!(got == 0 || !sees, "a tag is with somebody");
            other.join().unwrap();
            tags.give(got + waiter.collect());
            assert!(tags.is_retired());
            assert!(sees || tags.waiters.is_empty(), "taken out of line, and its bell rung");
        });
    }

    /// Two give back a tag each while all are taken for good: both find who takes them, also where
    /// one of them is just putting it back in line.
    #[test]
    fn loom_who_takes_all_tags_for_good_gets_the_last() {
        check(|| {
            let tags = Arc::new(Tags::new(2));
            assert_eq!(tags.take(2), 2);
            let of_then = Arc::downgrade(&tags);
            tags.retire_all(Box::new(move || of_then.upgrade().unwrap().retire()));
            let of_other = Arc::clone(&tags);
            let other = thread::spawn(move || of_other.give(1));
            tags.give(1);
            other.join().unwrap();
            assert!(tags.is_retired(), "{} free, and nobody has them", tags.usage().0);
        });
    }

    /// Tags that are being taken for good are given back while a request returns its own: all are
    /// free then, or all were taken before.
    #[test]
    fn loom_tags_that_are_given_back_are_all_there() {
        check(|| {
            let tags = Arc::new(Tags::new(2));
            assert_eq!(tags.take(1), 1);
            let waiter = tags.retire_all(Box::new(|| {}));
            let of_other = Arc::clone(&tags);
            let other = thread::spawn(move || of_other.give(1));
            tags.give_back(&waiter);
            other.join().unwrap();
            assert_eq!(tags.take(3), 2);
        });
    }

    /// Who waits goes away while a tag is handed over.
    #[test]
    fn loom_a_tag_handed_to_who_leaves_comes_back() {
        check(|| {
            let tags = Arc::new(Tags::new(1));
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
