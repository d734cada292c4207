//! How a core goes to sleep without missing a message.
//!
//! * sender: queue the message; *fence*; if the state is SLEEPING, set AWAKE and wake the core;
//! * core: set SLEEPING; *fence*; if a message is queued, set AWAKE and continue; else sleep.
//!
//! In every interleaving, either the core sees the message or the sender sees SLEEPING: the fences
//! forbid that both read before the other has written. The loom tests below try every interleaving.
//! The fences are on the control path, and the core executes its own only before it sleeps.
//!
//! A core that detaches uses the same protocol with DETACHED: it sets the state, then drops all
//! queued messages. A sender that sees DETACHED drops the queued messages too. So no message stays
//! in the inbox of a detached core.
//!
//! If a new core attaches, a late sender could still drop messages of the new core. So the sender
//! first increments `discarding`, then *fence*, then reads the state again. The new core sets
//! AWAKE, then *fence*, then waits until `discarding` is 0. Either the sender sees AWAKE, or the
//! core waits for the sender. The core has no lanes open at this time, so it loses no message.

#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicU8, AtomicUsize, Ordering, fence};
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering, fence};

const AWAKE: u8 = 0;
const SLEEPING: u8 = 1;
const DETACHED: u8 = 2;

/// State of the receiving core. It decides whether the sender must wake the core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReceivingCoreState {
    /// The core sees the message by itself.
    Awake,
    /// The sender must wake the core.
    Sleeping,
    /// The sender must drop the queued messages, since no core reads them.
    Detached,
}

/// Sleep state of a core, shared with its senders.
pub(crate) struct CoreSleepState {
    state: AtomicU8,
    /// Number of senders that are dropping messages.
    discarding: AtomicUsize,
}

impl CoreSleepState {
    pub(crate) fn new() -> CoreSleepState {
        CoreSleepState { state: AtomicU8::new(AWAKE), discarding: AtomicUsize::new(0) }
    }

    /// Called by the sender after it queued a message. Of several senders, one gets `Sleeping` and
    /// must wake the core.
    pub(crate) fn after_send(&self) -> ReceivingCoreState {
        fence(Ordering::SeqCst);
        match self.state.load(Ordering::Relaxed) {
            AWAKE => ReceivingCoreState::Awake,
            SLEEPING => {
                let rings =
                    self.state.compare_exchange(SLEEPING, AWAKE, Ordering::Relaxed, Ordering::Relaxed);
                if rings.is_ok() { ReceivingCoreState::Sleeping } else { ReceivingCoreState::Awake }
            }
            _ => ReceivingCoreState::Detached,
        }
    }

    /// Called by the core. Returns true if it may sleep, false if `has_messages` returns true.
    pub(crate) fn try_sleep(&self, has_messages: impl FnOnce() -> bool) -> bool {
        self.state.store(SLEEPING, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if has_messages() {
            self.set_awake();
            return false;
        }
        true
    }

    /// Called by the core when it is awake: senders need not wake it.
    pub(crate) fn set_awake(&self) {
        self.state.store(AWAKE, Ordering::Relaxed);
    }

    /// Called by the core when it detaches. Afterwards it must drop the queued messages.
    pub(crate) fn stop_receiving(&self) {
        self.state.store(DETACHED, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Called by a sender that saw [`ReceivingCoreState::Detached`]. Calls `empty` if the core is
    /// still detached. Returns false if a new core has attached: the message may still be queued,
    /// and the sender calls `after_send` again.
    pub(crate) fn discard_if_detached(&self, empty: impl FnOnce()) -> bool {
        self.discarding.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let gone = self.state.load(Ordering::Relaxed) == DETACHED;
        if gone {
            empty();
        }
        self.discarding.fetch_sub(1, Ordering::Release);
        gone
    }

    /// Called by a new core that attaches, before it opens lanes. When this returns, no sender
    /// drops messages any more.
    pub(crate) fn join(&self) {
        self.state.store(AWAKE, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        while self.discarding.load(Ordering::Acquire) > 0 {
            #[cfg(feature = "loom")]
            loom::thread::yield_now();
            #[cfg(not(feature = "loom"))]
            std::thread::yield_now();
        }
    }
}

#[cfg(all(test, feature = "loom"))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// An inbox with counters in place of the queue and the eventfd.
    struct InboxModel {
        sleep_state: CoreSleepState,
        messages: AtomicUsize,
        rings: AtomicUsize,
    }

    fn send(m: &InboxModel) {
        m.messages.fetch_add(1, Ordering::Release);
        if m.sleep_state.after_send() == ReceivingCoreState::Sleeping {
            m.rings.fetch_add(1, Ordering::Release);
        }
    }

    /// If a core goes to sleep while `senders` send, it never sleeps with a message queued and no
    /// wakeup.
    fn check_no_lost_message(senders: usize) {
        loom::model(move || {
            let m = Arc::new(InboxModel {
                sleep_state: CoreSleepState::new(),
                messages: AtomicUsize::new(0),
                rings: AtomicUsize::new(0),
            });
            let threads: Vec<_> = (0..senders)
                .map(|_| {
                    let m = m.clone();
                    thread::spawn(move || send(&m))
                })
                .collect();
            let asleep = m.sleep_state.try_sleep(|| m.messages.load(Ordering::Acquire) > 0);
            for t in threads {
                t.join().unwrap();
            }
            if asleep {
                assert_eq!(
                    m.rings.load(Ordering::Acquire),
                    1,
                    "asleep with a message, and not exactly one wakeup"
                );
            }
        });
    }

    /// If a core detaches while two threads send, no message stays queued.
    #[test]
    fn no_letter_stays_with_a_core_that_is_gone() {
        loom::model(|| {
            let m = Arc::new((CoreSleepState::new(), AtomicUsize::new(0)));
            let empty = |m: &(CoreSleepState, AtomicUsize)| m.1.swap(0, Ordering::AcqRel);
            let threads: Vec<_> = (0..2)
                .map(|_| {
                    let m = m.clone();
                    thread::spawn(move || {
                        m.1.fetch_add(1, Ordering::Release);
                        if m.0.after_send() == ReceivingCoreState::Detached {
                            empty(&m);
                        }
                    })
                })
                .collect();
            m.0.stop_receiving();
            empty(&m);
            for t in threads {
                t.join().unwrap();
            }
            assert_eq!(m.1.load(Ordering::Acquire), 0, "a message that no core will read");
        });
    }

    /// If a core attaches while a late sender drops messages of the detached core, messages to the
    /// new core stay.
    #[test]
    fn no_letter_is_lost_by_a_core_that_comes() {
        loom::model(|| {
            let m = Arc::new((CoreSleepState::new(), AtomicUsize::new(0)));
            m.0.stop_receiving();
            let send = |m: &(CoreSleepState, AtomicUsize)| {
                m.1.fetch_add(1, Ordering::AcqRel);
                while m.0.after_send() == ReceivingCoreState::Detached {
                    if m.0.discard_if_detached(|| m.1.store(0, Ordering::Release)) {
                        break;
                    }
                }
            };
            let late = {
                let m = m.clone();
                thread::spawn(move || send(&m))
            };
            m.0.join();
            m.1.store(0, Ordering::Release);
            send(&m);
            assert!(m.1.load(Ordering::Acquire) > 0, "a message to the new core was dropped");
            late.join().unwrap();
        });
    }

    #[test]
    fn one_sender() {
        check_no_lost_message(1);
    }

    #[test]
    fn two_senders() {
        check_no_lost_message(2);
    }
}
