//! A hook that a thread runs instead of sleeping while its verb waits.
//!
//! Loads and verbs on snapshots block their thread. A simulator has only one thread, so it
//! registers a function that runs one of its turns. A verb that waits for another one further up
//! the same stack would wait for ever. So with a hook, a lock that another verb holds counts as one
//! that took too long.

use std::cell::Cell;

thread_local! {
    static TURN: Cell<Option<fn()>> = const { Cell::new(None) };
}

/// Sets the hook of this thread, called repeatedly instead of sleeping; `None` removes it.
pub fn set_wait_hook(turn: Option<fn()>) {
    TURN.set(turn);
}

/// True if this thread has a hook.
pub(crate) fn has_wait_hook() -> bool {
    TURN.get().is_some()
}

/// Runs the hook once; false if this thread has none.
pub(crate) fn run_wait_hook() -> bool {
    TURN.get().inspect(|turn| turn()).is_some()
}
