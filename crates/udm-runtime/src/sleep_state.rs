//! How a core goes to sleep without missing a letter.
//!
//! * sender: put the letter in; *fence*; if `sleeping` was set, clear it and ring;
//! * core: set `sleeping`; *fence*; if there is a letter, clear it and go on; else sleep until it
//!   rings.
//!
//! Whatever way the two interleave, either the core sees the letter or the sender sees `sleeping`:
//! the fences forbid the one case in which both look before the other has written. The loom tests
//! below try every interleaving. The fences are on the control path, and the core pays its own only
//! before it sleeps.
//!
//! A core that leaves for good does the same with another word: it says `gone`, then throws away
//! the letters that it sees; a sender that sees `gone` throws away its own. So no letter stays in
//! the inbox of a core that is gone.
//!
//! Where another core takes the place, a sender that is still throwing away could take one of the
//! new core's letters. It says that it does (`discarding`); *fence*; and looks again whether the core
//! is gone. Who joins says that it is there; *fence*; and waits until nobody does. So either the
//! sender sees that there is a core, or that waits for the sender, with no lane open yet that a
//! letter could be for.

#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicU8, AtomicUsize, Ordering, fence};
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering, fence};

const AWAKE: u8 = 0;
const SLEEPING: u8 = 1;
const DETACHED: u8 = 2;

/// What a sender has to do about the core that its letter is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReceiverState {
    /// Nothing: it looks by itself.
    Awake,
    /// Ring.
    Sleeping,
    /// Throw the letters away: nobody reads them any more.
    Detached,
}

/// What the core does, as its senders see it.
pub(crate) struct SleepState {
    state: AtomicU8,
    /// Senders that throw letters away.
    discarding: AtomicUsize,
}

impl SleepState {
    pub(crate) fn new() -> SleepState {
        SleepState { state: AtomicU8::new(AWAKE), discarding: AtomicUsize::new(0) }
    }

    /// The sender, after its letter is in. Of several senders one has to ring.
    pub(crate) fn after_send(&self) -> ReceiverState {
        fence(Ordering::SeqCst);
        match self.state.load(Ordering::Relaxed) {
            AWAKE => ReceiverState::Awake,
            SLEEPING => {
                let rings =
                    self.state.compare_exchange(SLEEPING, AWAKE, Ordering::Relaxed, Ordering::Relaxed);
                if rings.is_ok() { ReceiverState::Sleeping } else { ReceiverState::Awake }
            }
            _ => ReceiverState::Detached,
        }
    }

    /// The core: true when it may sleep, false when `has_messages` says that it must not.
    pub(crate) fn try_sleep(&self, has_messages: impl FnOnce() -> bool) -> bool {
        self.state.store(SLEEPING, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if has_messages() {
            self.set_awake();
            return false;
        }
        true
    }

    /// The core is awake again: nobody needs to ring.
    pub(crate) fn set_awake(&self) {
        self.state.store(AWAKE, Ordering::Relaxed);
    }

    /// The core reads no more letters. It has to throw away those that it sees from here on.
    pub(crate) fn stop_receiving(&self) {
        self.state.store(DETACHED, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// The sender that saw [`ReceiverState::Detached`]: throws away with `empty`, if the core still is. False
    /// when there is one again: the letter is still there, and is posted anew.
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

    /// A core takes the place of one that is gone, and has no lanes yet. From here on no letter is
    /// thrown away.
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

    /// The inbox with a counter for the queue and a counter for the bell.
    struct InboxModel {
        parking: SleepState,
        letters: AtomicUsize,
        rings: AtomicUsize,
    }

    fn send(m: &InboxModel) {
        m.letters.fetch_add(1, Ordering::Release);
        if m.parking.after_send() == ReceiverState::Sleeping {
            m.rings.fetch_add(1, Ordering::Release);
        }
    }

    /// With a core that decides to sleep while `senders` post, no letter is left behind a core that
    /// nobody wakes.
    fn check_no_lost_message(senders: usize) {
        loom::model(move || {
            let m = Arc::new(InboxModel {
                parking: SleepState::new(),
                letters: AtomicUsize::new(0),
                rings: AtomicUsize::new(0),
            });
            let threads: Vec<_> = (0..senders)
                .map(|_| {
                    let m = m.clone();
                    thread::spawn(move || send(&m))
                })
                .collect();
            let asleep = m.parking.try_sleep(|| m.letters.load(Ordering::Acquire) > 0);
            for t in threads {
                t.join().unwrap();
            }
            if asleep {
                assert_eq!(
                    m.rings.load(Ordering::Acquire),
                    1,
                    "asleep with a letter, and the bell rang not once"
                );
            }
        });
    }

    /// A core that leaves while two post: no letter stays.
    #[test]
    fn no_letter_stays_with_a_core_that_is_gone() {
        loom::model(|| {
            let m = Arc::new((SleepState::new(), AtomicUsize::new(0)));
            let empty = |m: &(SleepState, AtomicUsize)| m.1.swap(0, Ordering::AcqRel);
            let threads: Vec<_> = (0..2)
                .map(|_| {
                    let m = m.clone();
                    thread::spawn(move || {
                        m.1.fetch_add(1, Ordering::Release);
                        if m.0.after_send() == ReceiverState::Detached {
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
            assert_eq!(m.1.load(Ordering::Acquire), 0, "a letter that nobody will read");
        });
    }

    /// A core that takes the place of one that is gone, while a sender throws away what was for
    /// that: what comes for the new one stays.
    #[test]
    fn no_letter_is_lost_by_a_core_that_comes() {
        loom::model(|| {
            let m = Arc::new((SleepState::new(), AtomicUsize::new(0)));
            m.0.stop_receiving();
            let send = |m: &(SleepState, AtomicUsize)| {
                m.1.fetch_add(1, Ordering::AcqRel);
                while m.0.after_send() == ReceiverState::Detached {
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
            assert!(m.1.load(Ordering::Acquire) > 0, "a letter for the new core was thrown away");
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
