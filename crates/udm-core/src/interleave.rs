//! Interleaving points: places at which a lane accesses state shared with other cores.
//!
//! Without the feature `interleave`, a point does nothing. With it, the simulator can run other
//! cores there, in the middle of a lane's call. Simulating whole turns alone would miss such
//! interleavings. A point is never inside a lock.

#[cfg(feature = "interleave")]
thread_local! {
    static AT: std::cell::Cell<Option<fn()>> = const { std::cell::Cell::new(None) };
}

/// Sets the function to call at each point on this thread. Points inside this function do nothing.
#[cfg(feature = "interleave")]
pub fn set_interleave_hook(at: Option<fn()>) {
    AT.set(at);
}

/// Marks a point: another core may run before the next statement.
#[cfg(feature = "interleave")]
pub fn mark_interleave_point() {
    if let Some(at) = AT.take() {
        at();
        AT.set(Some(at));
    }
}

/// A point: another core may run before the next statement. Does nothing without the feature.
#[cfg(not(feature = "interleave"))]
#[inline(always)]
pub const fn mark_interleave_point() {}
