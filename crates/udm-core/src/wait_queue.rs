//! Wakeups of lanes across cores: an eventcount.
//!
//! A lane that waits for another core (a path that returns, log entries that are counted) queues
//! its bios and registers at a [`WaitQueue`]. The other core wakes the queue, and the lane is
//! polled once. No timer polls the condition, and no bio changes its core.
//!
//! ```text
//! waiter: seen = epoch;  check;  not yet: waiting = true;  *fence*;  epoch moved? check again
//! waker:  change;        epoch += 1;                       *fence*;  waiting? clear it, wake
//! ```
//!
//! In every interleaving, either the waiter sees that the epoch has moved, or the waker sees that a
//! lane waits: the fences forbid that both read before the other has written. The loom tests below
//! try the interleavings.
//!
//! Price of a wake: an atomic add, a fence, one load per core, and one message per core with
//! waiters. Price of a wait: a store and a fence. A lane that does not wait pays nothing.

use crate::{CoreCommandSender, CoreId, Cx, DeviceId, LaneInbox, interleave};
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::rc::Rc;
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};

/// Number of wakes of a [`WaitQueue`] so far. Read it before you check the condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WakeEpoch(u64);

/// A condition that lanes of several cores wait for. Waiters read the epoch, check the condition
/// and register; the core that changes the condition wakes them.
pub struct WaitQueue {
    /// The id under which waiters open their lane inboxes.
    id: DeviceId,
    epoch: WaitQueueEpoch,
    waiters: OnceLock<WakeableCores>,
}

/// The cores that can be woken: set by the first subscriber.
struct WakeableCores {
    cores: Arc<dyn CoreCommandSender>,
    waiting: CoreWaitingFlags,
}

impl WaitQueue {
    /// Creates a wait queue without subscribers.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "each call returns a different value")]
    pub fn new() -> WaitQueue {
        WaitQueue { id: DeviceId::new(), epoch: WaitQueueEpoch::new(), waiters: OnceLock::new() }
    }

    /// Creates a handle to wait with, for the lane stack or front end that runs in this turn.
    pub fn subscribe(self: &Arc<WaitQueue>, cx: &mut Cx<'_>) -> WaitQueueSubscription {
        let cores = cx.cores();
        self.waiters.get_or_init(|| WakeableCores {
            cores: Arc::clone(cx.all_cores()),
            waiting: CoreWaitingFlags::new(cores),
        });
        WaitQueueSubscription { queue: Arc::clone(self), core: cx.core(), _inbox: cx.open_inbox(self.id) }
    }

    /// Wakes all waiters. Call it after the change that they wait for, from any thread.
    pub fn wake_up(&self) {
        self.epoch.advance();
        if let Some(waiters) = self.waiters.get() {
            waiters.waiting.take(|core| waiters.cores.wake_up(CoreId(core as u16), self.id));
        }
    }
}

/// A subscription to a [`WaitQueue`], by which a lane waits.
pub struct WaitQueueSubscription {
    queue: Arc<WaitQueue>,
    core: CoreId,
    /// Lane inbox that marks its owner for a poll; the poll itself handles the message.
    _inbox: Rc<LaneInbox>,
}

impl WaitQueueSubscription {
    /// The current epoch. Read it before you check the condition.
    #[must_use]
    pub fn epoch(&self) -> WakeEpoch {
        self.queue.epoch.now()
    }

    /// Asks for one poll at the next wake, or at once if there was a wake since `seen`. A lane
    /// whose condition still does not hold calls it again.
    pub fn wait(&self, seen: WakeEpoch, cx: &mut Cx<'_>) {
        if !self.register_wait(seen) {
            cx.wake_now();
        }
    }

    /// As [`WaitQueueSubscription::wait`], for tasks. Returns false if there was a wake since
    /// `seen`: the caller then checks its condition again.
    #[must_use]
    pub fn register_wait(&self, seen: WakeEpoch) -> bool {
        interleave::mark_interleave_point();
        let waiters = self.queue.waiters.get().expect("set by the first subscriber");
        waiters.waiting.wait(self.core.index(), &self.queue.epoch, seen)
    }
}

/// Counter of wakes.
struct WaitQueueEpoch(AtomicU64);

impl WaitQueueEpoch {
    fn new() -> WaitQueueEpoch {
        WaitQueueEpoch(AtomicU64::new(0))
    }

    /// Acquire pairs with the release in `advance`: a waiter that sees the epoch sees the change
    /// before it.
    fn now(&self) -> WakeEpoch {
        WakeEpoch(self.0.load(Ordering::Acquire))
    }

    fn advance(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }
}

/// One flag per core: true if a lane of the core waits.
struct CoreWaitingFlags(Box<[AtomicBool]>);

impl CoreWaitingFlags {
    fn new(cores: usize) -> CoreWaitingFlags {
        CoreWaitingFlags((0..cores).map(|_| AtomicBool::new(false)).collect())
    }

    /// Marks `core` as waiting. Returns false if the epoch has moved since `seen`.
    fn wait(&self, core: usize, epoch: &WaitQueueEpoch, seen: WakeEpoch) -> bool {
        self.0[core].store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        epoch.now() == seen
    }

    /// Calls `wake` for each waiting core. If several wakers run at once, only one of them wakes a
    /// core.
    fn take(&self, mut wake: impl FnMut(usize)) {
        fence(Ordering::SeqCst);
        for (core, waits) in self.0.iter().enumerate() {
            if waits.load(Ordering::Relaxed) && waits.swap(false, Ordering::Relaxed) {
                wake(core);
            }
        }
    }
}

#[cfg(all(test, feature = "loom"))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicUsize;
    use loom::thread;

    struct WaitQueueModel {
        /// The condition of the waiter.
        done: AtomicUsize,
        epoch: WaitQueueEpoch,
        waiting: CoreWaitingFlags,
        wakes: AtomicUsize,
    }

    fn wake_up(m: &WaitQueueModel) {
        m.done.fetch_add(1, Ordering::Relaxed);
        m.epoch.advance();
        m.waiting.take(|_| {
            m.wakes.fetch_add(1, Ordering::Release);
        });
    }

    /// One lane goes to sleep while `rings` wakers each finish one step. The lane must be woken
    /// after the last step, and must then see all steps.
    fn check_no_lost_wakeup(rings: usize) {
        let mut model = loom::model::Builder::new();
        // Without the bound, two wakers take minutes.
        model.preemption_bound = Some(3);
        model.check(move || {
            let m = Arc::new(WaitQueueModel {
                done: AtomicUsize::new(0),
                epoch: WaitQueueEpoch::new(),
                waiting: CoreWaitingFlags::new(1),
                wakes: AtomicUsize::new(0),
            });
            let threads: Vec<_> = (0..rings)
                .map(|_| {
                    let m = m.clone();
                    thread::spawn(move || wake_up(&m))
                })
                .collect();
            let mut wakes = 0;
            let seen = m.epoch.now();
            let looked = m.done.load(Ordering::Relaxed);
            let asleep = looked < rings && m.waiting.wait(0, &m.epoch, seen);
            threads.into_iter().for_each(|t| t.join().unwrap());
            if asleep {
                wakes = m.wakes.load(Ordering::Acquire);
                assert!(wakes > 0, "the lane has waited since before the last step and was not woken");
            }
            assert!(wakes <= 1, "at most one wakeup per wait");
            assert_eq!(m.done.load(Ordering::Relaxed), rings);
        });
    }

    #[test]
    fn one_that_rings() {
        check_no_lost_wakeup(1);
    }

    #[test]
    fn two_that_ring() {
        check_no_lost_wakeup(2);
    }

    /// A waiter that sees the new epoch sees the change before it.
    #[test]
    fn an_epoch_shows_its_change() {
        loom::model(|| {
            let m = Arc::new((AtomicUsize::new(0), WaitQueueEpoch::new()));
            let other = m.clone();
            let thread = thread::spawn(move || {
                other.0.store(1, Ordering::Relaxed);
                other.1.advance();
            });
            if m.1.now() != WakeEpoch(0) {
                assert_eq!(m.0.load(Ordering::Relaxed), 1);
            }
            thread.join().unwrap();
        });
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;
    use crate::{BioTaskFactory, BioTaskHandle, CoreLaneState, LaneCommand, Nanos};
    use std::sync::Mutex;

    #[derive(Default)]
    struct RecordedWakes(Mutex<Vec<u16>>);

    impl CoreCommandSender for RecordedWakes {
        fn broadcast(&self, _: DeviceId, _: LaneCommand) {}

        fn wake_up(&self, core: CoreId, _: DeviceId) {
            self.0.lock().unwrap().push(core.0);
        }

        fn start(&self, _: BioTaskFactory) -> BioTaskHandle {
            BioTaskHandle::new(drop)
        }
    }

    #[test]
    fn who_waits_is_woken_once_and_nobody_else() {
        let wakes = Arc::new(RecordedWakes::default());
        let queue = Arc::new(WaitQueue::new());
        queue.wake_up();
        let core = |n| {
            CoreLaneState::new(CoreId(n), 3, 0, None)
                .with_cores(Arc::clone(&wakes) as Arc<dyn CoreCommandSender>)
        };
        let mut states = [core(0), core(1), core(2)];
        let handles: Vec<WaitQueueSubscription> =
            states.iter_mut().map(|state| queue.subscribe(&mut state.cx(Nanos(5)))).collect();
        for n in [0, 2] {
            let mut cx = states[n].cx(Nanos(5));
            let seen = handles[n].epoch();
            handles[n].wait(seen, &mut cx);
            assert_eq!(cx.wake(), Nanos::NEVER, "nothing has happened");
        }
        queue.wake_up();
        queue.wake_up();
        assert_eq!(*wakes.0.lock().unwrap(), [0, 2]);
        let mut cx = states[1].cx(Nanos(5));
        let seen = handles[1].epoch();
        queue.wake_up();
        handles[1].wait(seen, &mut cx);
        assert_eq!(cx.wake(), Nanos(5), "woken between the check and the wait");
    }
}
