//! Syncs through one descriptor of a disk that is behind the page cache.
//!
//! The kernel tells of data that could not be written back once: to the next sync through each
//! descriptor. That sync fails, the one after it succeeds, and the data is gone. So a failure is
//! for good here ([`SyncTracker::has_failed`]): no sync of the disk is believed any more until it is
//! closed and opened anew.
//!
//! And where several syncs are under way, the failure may be told to one, for data that another one
//! vouches for. So a sync that succeeded is believed only when all that were under way at that
//! moment have ended: [`SyncTracker::end`] gives a [`SyncBarrier`], and [`SyncTracker::verdict`] says whether it is
//! passed. A sync that was alone is believed at once.
//!
//! Whether a write with FUA failed as a write or as a sync does not show. So it is done without
//! FUA, and then the disk is synced through a second descriptor, the *witness*, which the kernel
//! tells of lost data apart from the first and which is asked at no other time.
//!
//! Cores have descriptors of their own, as far as there are enough, so that they do not wait for
//! each other; the failure is the disk's.
//!
//! This is a lock on the data path, taken twice a flush or FUA write of a buffered disk and by
//! nothing else.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The syncs through a descriptor.
#[derive(Default)]
pub(super) struct SyncTracker {
    state: Mutex<SyncState>,
    /// All descriptors of a disk have this in common.
    failed: Arc<AtomicBool>,
}

#[derive(Default)]
struct SyncState {
    next: u64,
    /// Ascending.
    under_way: VecDeque<u64>,
}

/// A sync that has begun and must end.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a sync that never ends holds up all others"]
pub(super) struct SyncTicket(u64);

/// All that began before it must have ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct SyncBarrier(u64);

impl SyncTracker {
    /// For a descriptor of a disk.
    pub(super) fn new(failed: &Arc<AtomicBool>) -> SyncTracker {
        SyncTracker { state: Mutex::default(), failed: Arc::clone(failed) }
    }

    fn state(&self) -> MutexGuard<'_, SyncState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A sync is about to go to the kernel.
    pub(super) fn begin(&self) -> SyncTicket {
        let mut state = self.state();
        let ticket = state.next;
        state.next += 1;
        state.under_way.push_back(ticket);
        SyncTicket(ticket)
    }

    /// The kernel says that it is done.
    pub(super) fn end(&self, ticket: &SyncTicket) -> SyncBarrier {
        self.over(ticket, false).0
    }

    /// The kernel says that it failed. True when it is the first to fail.
    pub(super) fn fail(&self, ticket: &SyncTicket) -> bool {
        self.over(ticket, true).1
    }

    fn over(&self, ticket: &SyncTicket, failed: bool) -> (SyncBarrier, bool) {
        let mut state = self.state();
        if let Ok(at) = state.under_way.binary_search(&ticket.0) {
            state.under_way.remove(at);
        }
        // Within the lock, so that no verdict on this descriptor comes between.
        let first = failed && !self.failed.swap(true, Ordering::AcqRel);
        (SyncBarrier(state.next), first)
    }

    /// Whether what a sync vouched for is durable; `None` while that can't be said.
    pub(super) fn verdict(&self, barrier: SyncBarrier) -> Option<bool> {
        let state = self.state();
        if self.has_failed() {
            return Some(false);
        }
        state.under_way.front().is_none_or(|&oldest| oldest >= barrier.0).then_some(true)
    }

    /// True when one has failed: nothing can be made durable any more.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_was_alone_is_believed_at_once() {
        let syncs = SyncTracker::default();
        for _ in 0..3 {
            let ticket = syncs.begin();
            let barrier = syncs.end(&ticket);
            assert_eq!(syncs.verdict(barrier), Some(true));
        }
    }

    #[test]
    fn one_of_several_waits_for_those_that_were_under_way_and_for_no_others() {
        let syncs = SyncTracker::default();
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
        let syncs = SyncTracker::default();
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
