//! Counts the memory of slabs, so that the simulator can check memory bounds. The count is per
//! thread, since a simulated world runs on one thread.

use std::cell::Cell;

thread_local! {
    static LIVE: Cell<i64> = const { Cell::new(0) };
}

pub(crate) fn adjust_live_slab_bytes(bytes: i64) {
    LIVE.set(LIVE.get() + bytes);
}

/// Bytes of all slabs that this thread has allocated, minus those that it has freed.
#[must_use]
pub fn thread_live_slab_bytes() -> i64 {
    LIVE.get()
}
