//! What a thread does while a verb that it runs waits: it sleeps, or takes turns of something else.
//!
//! Verbs on snapshots block their thread, and so does a load. A simulator has one thread for all:
//! it registers a function that takes one of its turns. What waits for another verb further up the
//! same stack would wait for ever, so a lock that another verb holds counts as one that was held
//! for too long.

use std::cell::Cell;

thread_local! {
    static TURN: Cell<Option<fn()>> = const { Cell::new(None) };
}

/// Has this thread call `turn` again and again wherever it would sleep, or sleep again.
pub fn set_wait_hook(turn: Option<fn()>) {
    TURN.set(turn);
}

/// True if this thread takes turns instead of sleeping.
pub(crate) fn has_wait_hook() -> bool {
    TURN.get().is_some()
}

/// Takes a turn; false if this thread sleeps.
pub(crate) fn run_wait_hook() -> bool {
    TURN.get().inspect(|turn| turn()).is_some()
}
