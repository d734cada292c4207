//! How a core goes to sleep without missing a letter.
//!
//! * sender: put the letter in; *fence*; if `sleeping` was set, clear it and ring;
//! * core: set `sleeping`; *fence*; if there is a letter, clear it and go on; else sleep until it rings.
//!
//! Whatever way the two interleave, either the core sees the letter or the sender sees `sleeping`: the fences forbid the one case in which
//! both look before the other has written. The loom test below tries every interleaving. The fences are on the control path, and
//! the core pays its own only before it sleeps.

#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicBool, Ordering, fence};
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// Whether the core sleeps, as its senders see it.
pub(crate) struct Parking {
    sleeping: AtomicBool,
}

impl Parking {
    pub(crate) fn new() -> Parking {
        Parking { sleeping: AtomicBool::new(false) }
    }

    /// The sender, after its letter is in: true when it must ring. Of several senders one does.
    pub(crate) fn must_ring(&self) -> bool {
        fence(Ordering::SeqCst);
        self.sleeping.load(Ordering::Relaxed) && self.sleeping.swap(false, Ordering::Relaxed)
    }

    /// The core: true when it may sleep, false when `has_mail` says that it must not.
    pub(crate) fn try_sleep(&self, has_mail: impl FnOnce() -> bool) -> bool {
        self.sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if has_mail() {
            self.awake();
            return false;
        }
        true
    }

    /// The core is awake again: nobody needs to ring.
    pub(crate) fn awake(&self) {
        self.sleeping.store(false, Ordering::Relaxed);
    }
}

#[cfg(all(test, feature = "loom"))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicUsize;
    use loom::thread;

    /// The inbox with a counter for the queue and a counter for the bell.
    struct Model {
        parking: Parking,
        letters: AtomicUsize,
        rings: AtomicUsize,
    }

    fn post(m: &Model) {
        m.letters.fetch_add(1, Ordering::Release);
        if m.parking.must_ring() {
            m.rings.fetch_add(1, Ordering::Release);
        }
    }

    /// With a core that decides to sleep while `senders` post, no letter is left behind a core that nobody wakes.
    fn no_letter_is_slept_over(senders: usize) {
        loom::model(move || {
            let m = Arc::new(Model {
                parking: Parking::new(),
                letters: AtomicUsize::new(0),
                rings: AtomicUsize::new(0),
            });
            let threads: Vec<_> = (0..senders)
                .map(|_| {
                    let m = m.clone();
                    thread::spawn(move || post(&m))
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

    #[test]
    fn one_sender() {
        no_letter_is_slept_over(1);
    }

    #[test]
    fn two_senders() {
        no_letter_is_slept_over(2);
    }
}
