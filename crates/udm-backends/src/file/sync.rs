//! Tracks the syncs through one descriptor of a disk that uses the page cache.
//!
//! If data could not be written back, the kernel reports that only once: to the next sync through
//! each descriptor. That sync fails, the next one succeeds, and the data is lost. So here a failure
//! is permanent ([`DescriptorSyncTracker::has_failed`]): all further syncs of the disk fail until
//! the disk is closed and opened again.
//!
//! If several syncs are in flight, the kernel may report the failure to one sync while another one
//! covers the lost data. So a sync that succeeded is confirmed only when all syncs in flight at
//! that moment have ended: [`DescriptorSyncTracker::end`] returns a [`EarlierSyncsBarrier`], and
//! [`DescriptorSyncTracker::verdict`] tells whether it is passed. A sync that was alone is
//! confirmed at once.
//!
//! A failed write with FUA does not show whether the write or the sync failed. So the write is
//! repeated without FUA, and then the disk is synced through a second descriptor, the *witness*.
//! The kernel reports lost data to the witness separately, and the witness is used for nothing
//! else.
//!
//! Cores have separate descriptors, up to a maximum, so that they do not wait for each other. The
//! failure is shared by the whole disk.
//!
//! This is a lock on the data path, taken twice per flush or FUA write of a buffered disk, and by
//! no other request.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The syncs through one descriptor.
#[derive(Default)]
pub(super) struct DescriptorSyncTracker {
    state: Mutex<InFlightSyncs>,
    /// Shared by all descriptors of a disk.
    failed: Arc<AtomicBool>,
}

#[derive(Default)]
struct InFlightSyncs {
    next: u64,
    /// In ascending order.
    in_flight: VecDeque<u64>,
}

/// A sync in flight, which must end.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a sync that never ends holds up all others"]
pub(super) struct InFlightSync(u64);

/// All syncs with lower numbers must have ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct EarlierSyncsBarrier(u64);

impl DescriptorSyncTracker {
    /// Creates a tracker for a descriptor of a disk.
    pub(super) fn new(failed: &Arc<AtomicBool>) -> DescriptorSyncTracker {
        DescriptorSyncTracker { state: Mutex::default(), failed: Arc::clone(failed) }
    }

    fn state(&self) -> MutexGuard<'_, InFlightSyncs> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a sync that is about to start.
    pub(super) fn begin(&self) -> InFlightSync {
        let mut state = self.state();
        let ticket = state.next;
        state.next += 1;
        state.in_flight.push_back(ticket);
        InFlightSync(ticket)
    }

    /// Registers that the sync succeeded. It is confirmed when the returned barrier is passed.
    pub(super) fn end(&self, ticket: &InFlightSync) -> EarlierSyncsBarrier {
        self.over(ticket, false).0
    }

    /// Registers that the sync failed. Returns true for the first failure of the disk.
    pub(super) fn fail(&self, ticket: &InFlightSync) -> bool {
        self.over(ticket, true).1
    }

    fn over(&self, ticket: &InFlightSync, failed: bool) -> (EarlierSyncsBarrier, bool) {
        let mut state = self.state();
        if let Ok(at) = state.in_flight.binary_search(&ticket.0) {
            state.in_flight.remove(at);
        }
        // Inside the lock, so that no verdict on this descriptor comes between.
        let first = failed && !self.failed.swap(true, Ordering::AcqRel);
        (EarlierSyncsBarrier(state.next), first)
    }

    /// Returns whether the data of a sync is durable; `None` while that is unknown.
    pub(super) fn verdict(&self, barrier: EarlierSyncsBarrier) -> Option<bool> {
        let state = self.state();
        if self.has_failed() {
            return Some(false);
        }
        state.in_flight.front().is_none_or(|&oldest| oldest >= barrier.0).then_some(true)
    }

    /// Returns true if a sync has failed: no data can be made durable any more.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_was_alone_is_believed_at_once() {
        let syncs = DescriptorSyncTracker::default();
        for _ in 0..3 {
            let ticket = syncs.begin();
            let barrier = syncs.end(&ticket);
            assert_eq!(syncs.verdict(barrier), Some(true));
        }
    }

    #[test]
    fn one_of_several_waits_for_those_that_were_under_way_and_for_no_others() {
        let syncs = DescriptorSyncTracker::default();
        let (a, b) = (syncs.begin(), syncs.begin());
        let barrier = syncs.end(&b);
        let c = syncs.begin();
        assert_eq!(syncs.verdict(barrier), None);
        let late = syncs.end(&a);
        assert_eq!(syncs.verdict(barrier), Some(true), "c began later");
        assert_eq!(syncs.verdict(late), None);
        let last = syncs.end(&c);
        assert_eq!((syncs.verdict(late), syncs.verdict(last)), (Some(true), Some(true)));
    }

    #[test]
    fn a_failure_is_every_ones_and_for_good() {
        let syncs = DescriptorSyncTracker::default();
        let (a, b) = (syncs.begin(), syncs.begin());
        let barrier = syncs.end(&b);
        assert!(syncs.fail(&a), "the first");
        assert_eq!(syncs.verdict(barrier), Some(false), "it may have been told of what b vouches for");
        let c = syncs.begin();
        let barrier = syncs.end(&c);
        assert_eq!(syncs.verdict(barrier), Some(false));
        assert!(syncs.has_failed());
        let d = syncs.begin();
        assert!(!syncs.fail(&d), "not the first");
    }
}
