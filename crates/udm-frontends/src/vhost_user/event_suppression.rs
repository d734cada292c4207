//! Notifications of a packed ring (VIRTIO 1.2, section 2.8.10): the flags of a descriptor that one
//! side changes, and the event suppression structure of the other side.
//!
//! The rule is that of `notifications`: write, *fence*, read what the other side has written. A
//! structure has 32 bits and is written and read at once, so a position never belongs to another
//! kind of wish.

#[cfg(feature = "loom")]
use loom::sync::atomic::fence;
#[cfg(not(feature = "loom"))]
use std::sync::atomic::fence;
use std::sync::atomic::{AtomicU32, Ordering};
use udm_core::interleave;
use udm_wire::virtio::packed::{
    EVENT_F_DESC, EVENT_F_DISABLE, EVENT_F_ENABLE, EventSuppression, PackedPosition,
};

/// An event suppression structure in memory.
pub(super) trait EventWord {
    /// Loads the structure. The fences order the access.
    fn load(&self) -> u32;

    /// Stores the structure.
    fn store(&self, value: u32);
}

impl EventWord for AtomicU32 {
    #[inline(always)]
    fn load(&self) -> u32 {
        AtomicU32::load(self, Ordering::Relaxed)
    }

    #[inline(always)]
    fn store(&self, value: u32) {
        AtomicU32::store(self, value, Ordering::Relaxed);
    }
}

/// Called after `count` descriptors before `new` were published in a ring of `size`. Returns true
/// if the other side, whose structure `event` is, wants a notification.
#[inline]
pub(super) fn is_notification_wanted(
    event: &impl EventWord,
    has_event_index: bool,
    new: PackedPosition,
    count: u16,
    size: u16,
) -> bool {
    fence(Ordering::SeqCst);
    interleave::mark_interleave_point();
    let event = EventSuppression::from_word(u32::from_le(event.load()));
    match has_event_index {
        true => event.is_notified(new, count, size),
        false => event.flags != EVENT_F_DISABLE,
    }
}

/// Asks for a notification of the descriptor at `next`, in this side's structure. Returns true if
/// it `is_available` already.
#[inline(always)]
pub(super) fn request_notification(
    event: &impl EventWord,
    has_event_index: bool,
    next: PackedPosition,
    is_available: impl FnOnce() -> bool,
) -> bool {
    interleave::mark_interleave_point();
    let flags = if has_event_index { EVENT_F_DESC } else { EVENT_F_ENABLE };
    event.store(EventSuppression { position: next, flags }.to_word().to_le());
    fence(Ordering::SeqCst);
    interleave::mark_interleave_point();
    is_available()
}

/// Asks for no notification.
#[inline]
pub(super) fn suppress_notifications(event: &impl EventWord) {
    let none = EventSuppression { position: PackedPosition::START, flags: EVENT_F_DISABLE };
    event.store(none.to_word().to_le());
}

#[cfg(all(test, feature = "loom"))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU16 as LoomFlags, AtomicU32 as LoomWord};
    use loom::thread;

    impl EventWord for LoomWord {
        fn load(&self) -> u32 {
            LoomWord::load(self, Ordering::Relaxed)
        }

        fn store(&self, value: u32) {
            LoomWord::store(self, value, Ordering::Relaxed);
        }
    }

    const SIZE: u16 = 2;

    /// The first position: the second descriptor is in the next round.
    const START: PackedPosition = PackedPosition { index: 1, wrap: true };

    /// One direction of a ring of two descriptors. One side changes them, the other one sleeps
    /// until it is notified.
    struct PackedRingModel {
        has_event_index: bool,
        flags: [LoomFlags; 2],
        entries: [LoomWord; 2],
        event: LoomWord,
        notifications: LoomWord,
    }

    impl PackedRingModel {
        /// A ring whose waiting side is awake and has asked for no notification.
        fn new(has_event_index: bool) -> Arc<PackedRingModel> {
            let none = EventSuppression { position: START, flags: EVENT_F_DISABLE };
            Arc::new(PackedRingModel {
                has_event_index,
                flags: [LoomFlags::new(PackedPosition::START.used_flags()), LoomFlags::new(0)],
                entries: [LoomWord::new(0), LoomWord::new(0)],
                event: LoomWord::new(none.to_word()),
                notifications: LoomWord::new(0),
            })
        }

        fn is_available(&self, at: PackedPosition) -> bool {
            at.is_available(self.flags[usize::from(at.index)].load(Ordering::Acquire))
        }

        fn add(&self, at: PackedPosition) {
            EventWord::store(&self.entries[usize::from(at.index)], at.encode().into());
            self.flags[usize::from(at.index)].store(at.available_flags(), Ordering::Release);
        }
    }

    /// One side adds two descriptors, each with its own look at the wish of the other side, which
    /// takes them until it sleeps. Driver and device do the same in both directions.
    fn check(has_event_index: bool) {
        loom::model(move || {
            let ring = PackedRingModel::new(has_event_index);
            let adding = {
                let ring = ring.clone();
                thread::spawn(move || {
                    for at in [START, START.advanced(1, SIZE)] {
                        ring.add(at);
                        let new = at.advanced(1, SIZE);
                        if is_notification_wanted(&ring.event, ring.has_event_index, new, 1, SIZE) {
                            EventWord::store(&ring.notifications, 1);
                        }
                    }
                })
            };
            let mut next = START;
            loop {
                suppress_notifications(&ring.event);
                ring.notifications.swap(0, Ordering::AcqRel);
                while ring.is_available(next) {
                    let entry = EventWord::load(&ring.entries[usize::from(next.index)]);
                    assert_eq!(entry, u32::from(next.encode()), "a descriptor that is not written yet");
                    next = next.advanced(1, SIZE);
                }
                let is_available = || ring.is_available(next);
                if !request_notification(&ring.event, ring.has_event_index, next, is_available) {
                    break;
                }
            }
            adding.join().unwrap();
            let is_notified = ring.notifications.load(Ordering::Acquire) > 0;
            assert!(is_notified || !ring.is_available(next), "lost a notification");
        });
    }

    #[test]
    fn no_notification_of_a_packed_ring_is_lost_with_event_indices() {
        check(true);
    }

    #[test]
    fn no_notification_of_a_packed_ring_is_lost_with_flags() {
        check(false);
    }
}
