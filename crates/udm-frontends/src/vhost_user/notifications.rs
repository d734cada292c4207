//! Notifications of a split ring (VIRTIO 1.2, sections 2.7.7 and 2.7.10): an index that one side
//! advances, and the wish of the other side for a notification.
//!
//! * The side that adds entries: write the entries; write the index; *fence*; notify if the other
//!   side wants it.
//! * The side that goes to sleep: write the wish; *fence*; read the index; sleep if nothing was
//!   added.
//!
//! In every interleaving, at least one of both sees what the other has written: the fences forbid
//! that both read before the other has written. The loom tests below try every interleaving of a
//! device with a driver that keeps these rules.

#[cfg(feature = "loom")]
use loom::sync::atomic::fence;
#[cfg(not(feature = "loom"))]
use std::sync::atomic::fence;
use std::sync::atomic::{AtomicU16, Ordering};
use udm_core::interleave;
use udm_wire::virtio::ring::{AVAIL_F_NO_INTERRUPT, USED_F_NO_NOTIFY, needs_event};

/// The flag has the same value in both rings.
const NO_NOTIFICATION: u16 = USED_F_NO_NOTIFY;
const _: () = assert!(USED_F_NO_NOTIFY == AVAIL_F_NO_INTERRUPT);

/// A 16-bit word of a ring.
pub(super) trait RingWord {
    /// Loads the word.
    fn load(&self, order: Ordering) -> u16;

    /// Stores the word.
    fn store(&self, value: u16, order: Ordering);
}

impl RingWord for AtomicU16 {
    #[inline(always)]
    fn load(&self, order: Ordering) -> u16 {
        AtomicU16::load(self, order)
    }

    #[inline(always)]
    fn store(&self, value: u16, order: Ordering) {
        AtomicU16::store(self, value, order);
    }
}

/// The word by which a side of a ring asks for notifications.
pub(super) enum NotificationWish<'a, W> {
    /// `used_event` or `avail_event`: a notification is wanted when the entry of this index was
    /// added.
    Event(&'a W),
    /// `flags`: no notification is wanted if [`NO_NOTIFICATION`] is set.
    Flags(&'a W),
}

impl<W: RingWord> NotificationWish<'_, W> {
    /// Publishes `index`, which was `old` and becomes `new`. Returns true if the other side, whose
    /// wish this is, wants a notification.
    #[inline]
    pub(super) fn publish(&self, index: &W, old: u16, new: u16) -> bool {
        interleave::mark_interleave_point();
        index.store(new.to_le(), Ordering::Release);
        fence(Ordering::SeqCst);
        interleave::mark_interleave_point();
        match self {
            NotificationWish::Event(event) => {
                needs_event(u16::from_le(event.load(Ordering::Relaxed)), new, old)
            }
            NotificationWish::Flags(flags) => {
                u16::from_le(flags.load(Ordering::Relaxed)) & NO_NOTIFICATION == 0
            }
        }
    }

    /// Asks for a notification of the entry of index `next`, as this side's wish. Returns true if
    /// `index`, which the other side publishes, has passed it already.
    #[inline(always)]
    pub(super) fn request(&self, index: &W, next: u16) -> bool {
        interleave::mark_interleave_point();
        match self {
            NotificationWish::Event(event) => event.store(next.to_le(), Ordering::Relaxed),
            NotificationWish::Flags(flags) => flags.store(0, Ordering::Relaxed),
        }
        fence(Ordering::SeqCst);
        interleave::mark_interleave_point();
        u16::from_le(index.load(Ordering::Acquire)) != next
    }

    /// Asks for no notification. An event index that was passed asks for none.
    #[inline]
    pub(super) fn withdraw(&self) {
        if let NotificationWish::Flags(flags) = self {
            flags.store(NO_NOTIFICATION.to_le(), Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, feature = "loom"))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU16 as LoomWord;
    use loom::thread;

    impl RingWord for LoomWord {
        fn load(&self, order: Ordering) -> u16 {
            LoomWord::load(self, order)
        }

        fn store(&self, value: u16, order: Ordering) {
            LoomWord::store(self, value, order);
        }
    }

    /// The words of one direction of a ring of two entries. One side adds entries, the other one
    /// sleeps until it is notified.
    struct RingModel {
        has_event_index: bool,
        index: LoomWord,
        event: LoomWord,
        flags: LoomWord,
        entries: [LoomWord; 2],
        notifications: LoomWord,
    }

    /// The first index: the second entry is beyond the wrap.
    const START: u16 = u16::MAX;

    impl RingModel {
        /// A ring whose waiting side is awake and has asked for no notification.
        fn new(has_event_index: bool) -> Arc<RingModel> {
            Arc::new(RingModel {
                has_event_index,
                index: LoomWord::new(START),
                event: LoomWord::new(START.wrapping_sub(1)),
                flags: LoomWord::new(NO_NOTIFICATION),
                entries: [LoomWord::new(0), LoomWord::new(0)],
                notifications: LoomWord::new(0),
            })
        }

        fn wish(&self) -> NotificationWish<'_, LoomWord> {
            match self.has_event_index {
                true => NotificationWish::Event(&self.event),
                false => NotificationWish::Flags(&self.flags),
            }
        }

        fn write_entry(&self, index: u16) {
            self.entries[usize::from(index % 2)].store(index, Ordering::Relaxed);
        }

        fn notify_if(&self, is_wanted: bool) {
            if is_wanted {
                self.notifications.store(1, Ordering::Release);
            }
        }

        /// Reads the notifications, then takes the entries from `next` on; returns the next index.
        fn take(&self, mut next: u16) -> u16 {
            self.notifications.swap(0, Ordering::AcqRel);
            let index = self.index.load(Ordering::Acquire);
            while next != index {
                let entry = self.entries[usize::from(next % 2)].load(Ordering::Relaxed);
                assert_eq!(entry, next, "an entry that is not written yet");
                next = next.wrapping_add(1);
            }
            next
        }

        /// A side that has gone to sleep at `next` has all entries, or a new notification.
        fn check_sleeper(&self, next: u16) {
            let is_notified = self.notifications.load(Ordering::Acquire) > 0;
            assert!(is_notified || next == self.index.load(Ordering::Acquire), "lost a notification");
        }
    }

    /// A driver adds two requests, as the specification says (2.7.13.4.1), while the device takes
    /// requests until it goes to sleep.
    fn check_kicks(has_event_index: bool) {
        loom::model(move || {
            let ring = RingModel::new(has_event_index);
            let driver = {
                let ring = ring.clone();
                thread::spawn(move || {
                    for old in [START, START.wrapping_add(1)] {
                        let new = old.wrapping_add(1);
                        ring.write_entry(old);
                        ring.index.store(new, Ordering::Release);
                        fence(Ordering::SeqCst);
                        ring.notify_if(match ring.has_event_index {
                            true => needs_event(ring.event.load(Ordering::Relaxed), new, old),
                            false => ring.flags.load(Ordering::Relaxed) & USED_F_NO_NOTIFY == 0,
                        });
                    }
                })
            };
            let mut next = START;
            loop {
                ring.wish().withdraw();
                next = ring.take(next);
                if !ring.wish().request(&ring.index, next) {
                    break;
                }
            }
            driver.join().unwrap();
            ring.check_sleeper(next);
        });
    }

    /// A device completes two requests, while the driver takes them until it goes to sleep, as the
    /// specification says (2.7.14).
    fn check_calls(has_event_index: bool) {
        loom::model(move || {
            let ring = RingModel::new(has_event_index);
            let driver = {
                let ring = ring.clone();
                thread::spawn(move || {
                    let mut next = START;
                    loop {
                        ring.flags.store(AVAIL_F_NO_INTERRUPT, Ordering::Relaxed);
                        next = ring.take(next);
                        match ring.has_event_index {
                            true => ring.event.store(next, Ordering::Relaxed),
                            false => ring.flags.store(0, Ordering::Relaxed),
                        }
                        fence(Ordering::SeqCst);
                        if ring.index.load(Ordering::Acquire) == next {
                            return next;
                        }
                    }
                })
            };
            for old in [START, START.wrapping_add(1)] {
                ring.write_entry(old);
                ring.notify_if(ring.wish().publish(&ring.index, old, old.wrapping_add(1)));
            }
            let next = driver.join().unwrap();
            ring.check_sleeper(next);
        });
    }

    #[test]
    fn no_kick_is_lost_with_event_indices() {
        check_kicks(true);
    }

    #[test]
    fn no_kick_is_lost_with_flags() {
        check_kicks(false);
    }

    #[test]
    fn no_call_is_lost_with_event_indices() {
        check_calls(true);
    }

    #[test]
    fn no_call_is_lost_with_flags() {
        check_calls(false);
    }
}
