//! How much memory slabs take, for a simulator that checks the bounds of what it runs. Counted a
//! thread: there a world has one.

use std::cell::Cell;

thread_local! {
    static LIVE: Cell<i64> = const { Cell::new(0) };
}

pub(crate) fn add(bytes: i64) {
    LIVE.set(LIVE.get() + bytes);
}

/// Bytes of the slabs that this thread has made, less those that it has freed.
#[must_use]
pub fn live() -> i64 {
    LIVE.get()
}
