//! Waking the lanes of other cores.
//!
//! A lane that waits for what another core will do (entries counted, a path that returned) parks
//! its bios, says so to a [`WaitQueue`] that both know, and is polled once after the other has rung it.
//! Nobody looks again by a timer, and no bio changes its core.
//!
//! ```text
//! who waits: seen = epoch;  look;  not yet: waiting = true;  *fence*;  epoch moved since? look again
//! who rings: change it;     epoch += 1;                      *fence*;  waiting taken back? a letter to that core
//! ```
//!
//! Whatever way the two interleave, either the one sees that the epoch has moved or the other sees
//! that somebody waits: the fences forbid that both look before the other has written. The loom
//! tests below try the interleavings.
//!
//! *Price.* Ringing: an atomic add, a fence, and a load a core; a letter to each core with somebody
//! who waits, of all who wait there one. Waiting: a store and a fence. Both only where there is
//! something to wait for.

use crate::{CoreId, Cores, Cx, DeviceId, LaneInbox, interleave};
#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::rc::Rc;
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};

/// How often a [`WaitQueue`] has been rung. Taken before one looks at what one waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WakeEpoch(u64);

/// Something that lanes of several cores wait for. See the module's documentation.
pub struct WaitQueue {
    /// The address of those who listen.
    id: DeviceId,
    epoch: EpochCounter,
    waiters: OnceLock<CoreWaiters>,
}

/// Who can be woken: known from the first that listens.
struct CoreWaiters {
    cores: Arc<dyn Cores>,
    waiting: WaitFlags,
}

impl WaitQueue {
    /// A bell that nobody listens to yet.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "each call gives another")]
    pub fn new() -> WaitQueue {
        WaitQueue { id: DeviceId::new(), epoch: EpochCounter::new(), waiters: OnceLock::new() }
    }

    /// A place from which to wait, for whoever is visited in this turn of the core.
    pub fn subscribe(self: &Arc<WaitQueue>, cx: &mut Cx<'_>) -> WaitHandle {
        let cores = cx.cores();
        self.waiters.get_or_init(|| CoreWaiters {
            cores: Arc::clone(cx.all_cores()),
            waiting: WaitFlags::new(cores),
        });
        WaitHandle { bell: Arc::clone(self), core: cx.core(), _port: cx.open_inbox(self.id) }
    }

    /// Wakes all that wait. To be called behind the change that they wait for, from any thread.
    pub fn wake_up(&self) {
        self.epoch.advance();
        if let Some(waiters) = self.waiters.get() {
            waiters.waiting.take(|core| waiters.cores.wake_up(CoreId(core as u16), self.id));
        }
    }
}

/// A place from which to wait for a [`WaitQueue`].
pub struct WaitHandle {
    bell: Arc<WaitQueue>,
    core: CoreId,
    /// Where the letter arrives: it has been answered when its owner is polled.
    _port: Rc<LaneInbox>,
}

impl WaitHandle {
    /// To be taken before the look.
    #[must_use]
    pub fn epoch(&self) -> WakeEpoch {
        self.bell.epoch.now()
    }

    /// Asks for a poll when the bell is rung, or at once if it has been since `seen`. Holds until
    /// then: whoever looks in vain asks again.
    pub fn wait(&self, seen: WakeEpoch, cx: &mut Cx<'_>) {
        if !self.register_wait(seen) {
            cx.wake_now();
        }
    }

    /// As [`WaitHandle::wait`], for tasks: false when the bell has been rung since `seen`, and one
    /// should look again.
    #[must_use]
    pub fn register_wait(&self, seen: WakeEpoch) -> bool {
        interleave::point();
        let waiters = self.bell.waiters.get().expect("known since the first listener");
        waiters.waiting.wait(self.core.index(), &self.bell.epoch, seen)
    }
}

/// The epoch.
struct EpochCounter(AtomicU64);

impl EpochCounter {
    fn new() -> EpochCounter {
        EpochCounter(AtomicU64::new(0))
    }

    /// Acquire pairs with the release in `advance`: who sees the epoch sees the change before it.
    fn now(&self) -> WakeEpoch {
        WakeEpoch(self.0.load(Ordering::Acquire))
    }

    fn advance(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }
}

/// Whether somebody waits, a core each.
struct WaitFlags(Box<[AtomicBool]>);

impl WaitFlags {
    fn new(cores: usize) -> WaitFlags {
        WaitFlags((0..cores).map(|_| AtomicBool::new(false)).collect())
    }

    /// Says that somebody on `core` waits. False when the epoch has moved since `seen`.
    fn wait(&self, core: usize, epoch: &EpochCounter, seen: WakeEpoch) -> bool {
        self.0[core].store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        epoch.now() == seen
    }

    /// Calls `wake` for each core with somebody who waits; of several who ring, one does.
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
        /// What is waited for.
        done: AtomicUsize,
        epoch: EpochCounter,
        waiting: WaitFlags,
        letters: AtomicUsize,
    }

    fn wake_up(m: &WaitQueueModel) {
        m.done.fetch_add(1, Ordering::Relaxed);
        m.epoch.advance();
        m.waiting.take(|_| {
            m.letters.fetch_add(1, Ordering::Release);
        });
    }

    /// With a lane that goes to sleep while `rings` others finish one thing each, and that is woken
    /// by letters alone, the last is not slept over, and whoever is woken sees what was done.
    fn check_no_lost_wakeup(rings: usize) {
        let mut model = loom::model::Builder::new();
        // With more, two that ring take minutes.
        model.preemption_bound = Some(3);
        model.check(move || {
            let m = Arc::new(WaitQueueModel {
                done: AtomicUsize::new(0),
                epoch: EpochCounter::new(),
                waiting: WaitFlags::new(1),
                letters: AtomicUsize::new(0),
            });
            let threads: Vec<_> = (0..rings)
                .map(|_| {
                    let m = m.clone();
                    thread::spawn(move || wake_up(&m))
                })
                .collect();
            let mut letters = 0;
            let seen = m.epoch.now();
            let looked = m.done.load(Ordering::Relaxed);
            let asleep = looked < rings && m.waiting.wait(0, &m.epoch, seen);
            threads.into_iter().for_each(|t| t.join().unwrap());
            if asleep {
                letters = m.letters.load(Ordering::Acquire);
                assert!(letters > 0, "asleep before the last is done, and no letter came");
            }
            assert!(letters <= 1, "one letter to one that waited once");
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

    /// Who sees that the epoch moved sees what was done before.
    #[test]
    fn an_epoch_shows_its_change() {
        loom::model(|| {
            let m = Arc::new((AtomicUsize::new(0), EpochCounter::new()));
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
    use crate::{CoreState, LaneCommand, Nanos, TaskFactory, TaskHandle};
    use std::sync::Mutex;

    #[derive(Default)]
    struct RecordedWakes(Mutex<Vec<u16>>);

    impl Cores for RecordedWakes {
        fn broadcast(&self, _: DeviceId, _: LaneCommand) {}

        fn wake_up(&self, core: CoreId, _: DeviceId) {
            self.0.lock().unwrap().push(core.0);
        }

        fn start(&self, _: TaskFactory) -> TaskHandle {
            TaskHandle::new(drop)
        }
    }

    #[test]
    fn who_waits_is_woken_once_and_nobody_else() {
        let letters = Arc::new(RecordedWakes::default());
        let bell = Arc::new(WaitQueue::new());
        bell.wake_up();
        let core =
            |n| CoreState::new(CoreId(n), 3, 0, None).with_cores(Arc::clone(&letters) as Arc<dyn Cores>);
        let mut states = [core(0), core(1), core(2)];
        let handles: Vec<WaitHandle> =
            states.iter_mut().map(|state| bell.subscribe(&mut state.cx(Nanos(5)))).collect();
        for n in [0, 2] {
            let mut cx = states[n].cx(Nanos(5));
            let seen = handles[n].epoch();
            handles[n].wait(seen, &mut cx);
            assert_eq!(cx.wake(), Nanos::NEVER, "nothing has happened");
        }
        bell.wake_up();
        bell.wake_up();
        assert_eq!(*letters.0.lock().unwrap(), [0, 2]);
        let mut cx = states[1].cx(Nanos(5));
        let seen = handles[1].epoch();
        bell.wake_up();
        handles[1].wait(seen, &mut cx);
        assert_eq!(cx.wake(), Nanos(5), "rung between the look and the wait");
    }
}
