//! What the world shares with its front ends, which its cores own.

use super::model::NbdClientModel;
use crate::model::Violation;
use crate::nbd::clock;
use crate::rng::SimRng;
use crate::trace::Trace;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

/// What the front ends are to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FrontEndPhase {
    /// Ask for whatever they like.
    Work,
    /// Ask for nothing.
    Rest,
    /// Read everything back.
    Check,
    /// Close their devices.
    Close,
}

/// See the module's documentation.
pub(super) struct SharedState {
    pub(super) step: u64,
    pub(super) trace: Trace,
    pub(super) model: NbdClientModel,
    pub(super) work: SimRng,
    pub(super) phase: FrontEndPhase,
    /// Front ends that have closed all.
    pub(super) closed: usize,
    /// The first thing that was wrong.
    pub(super) wrong: Option<Violation>,
}

/// A handle to it.
pub(super) type SharedStateRef = Arc<Mutex<SharedState>>;

/// Takes it. There is one thread, so nobody waits: who would has taken it twice.
pub(super) fn lock(shared: &SharedStateRef) -> MutexGuard<'_, SharedState> {
    match shared.try_lock() {
        Ok(shared) => shared,
        Err(TryLockError::Poisoned(e)) => e.into_inner(),
        Err(TryLockError::WouldBlock) => panic!("what is shared is taken twice"),
    }
}

impl SharedState {
    /// Puts words into the trace.
    pub(super) fn say(&mut self, text: impl Into<String>) {
        self.trace.say(clock::now(), text.into());
    }
}
