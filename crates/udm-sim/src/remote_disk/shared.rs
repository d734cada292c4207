//! State shared by the world and its front ends, which the cores own.

use super::model::RemoteDiskModel;
use crate::model::Violation;
use crate::nbd::clock;
use crate::rng::SimRng;
use crate::trace::Trace;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

/// Task of the front ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WorkloadPhase {
    /// Send random requests.
    Work,
    /// Send no requests.
    Rest,
    /// Read all data back.
    Check,
    /// Close the devices.
    Close,
}

/// State shared by the world and its front ends.
pub(crate) struct FrontEndSharedState {
    pub(crate) step: u64,
    pub(crate) trace: Trace,
    pub(crate) model: RemoteDiskModel,
    pub(crate) work: SimRng,
    pub(crate) phase: WorkloadPhase,
    /// Number of front ends that have closed their devices.
    pub(crate) closed: usize,
    /// The first violation.
    pub(crate) wrong: Option<Violation>,
}

/// Shared reference to the state.
pub(crate) type FrontEndSharedStateRef = Arc<Mutex<FrontEndSharedState>>;

/// Locks the state. The world has one thread, so waiting would mean a second lock by the same
/// thread.
///
/// # Panics
/// If the state is already locked.
pub(crate) fn lock_front_end_state(shared: &FrontEndSharedStateRef) -> MutexGuard<'_, FrontEndSharedState> {
    match shared.try_lock() {
        Ok(shared) => shared,
        Err(TryLockError::Poisoned(e)) => e.into_inner(),
        Err(TryLockError::WouldBlock) => panic!("the shared state is locked twice"),
    }
}

impl FrontEndSharedState {
    /// Adds a line to the trace.
    pub(crate) fn say(&mut self, text: impl Into<String>) {
        self.trace.say(clock::now(), text.into());
    }
}
