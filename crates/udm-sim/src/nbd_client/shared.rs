//! What the world shares with its front ends, which its cores own.

use super::model::Model;
use crate::chance::Chance;
use crate::model::Wrong;
use crate::nbd::clock;
use crate::trace::Trace;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

/// What the front ends are to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
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
pub(super) struct Shared {
    pub(super) step: u64,
    pub(super) trace: Trace,
    pub(super) model: Model,
    pub(super) work: Chance,
    pub(super) phase: Phase,
    /// Front ends that have closed all.
    pub(super) closed: usize,
    /// The first thing that was wrong.
    pub(super) wrong: Option<Wrong>,
}

/// A handle to it.
pub(super) type SharedRef = Arc<Mutex<Shared>>;

/// Takes it. There is one thread, so nobody waits: who would has taken it twice.
pub(super) fn lock(shared: &SharedRef) -> MutexGuard<'_, Shared> {
    match shared.try_lock() {
        Ok(shared) => shared,
        Err(TryLockError::Poisoned(e)) => e.into_inner(),
        Err(TryLockError::WouldBlock) => panic!("what is shared is taken twice"),
    }
}

impl Shared {
    /// Puts words into the trace.
    pub(super) fn say(&mut self, text: impl Into<String>) {
        self.trace.say(clock::now(), text.into());
    }
}
