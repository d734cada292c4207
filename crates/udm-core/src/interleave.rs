//! The points at which lanes of several cores meet: each access to what they share.
//!
//! Without the feature `interleave` a point is nothing. With it the simulator can have other cores
//! act there, in the middle of a lane's call, which nobody sees who steps whole turns. A point is
//! never inside of a lock.

#[cfg(feature = "interleave")]
thread_local! {
    static AT: std::cell::Cell<Option<fn()>> = const { std::cell::Cell::new(None) };
}

/// What is done at each point on this thread from now on. It meets no points itself.
#[cfg(feature = "interleave")]
pub fn set(at: Option<fn()>) {
    AT.set(at);
}

/// Another core may act before what comes next.
#[cfg(feature = "interleave")]
pub fn point() {
    if let Some(at) = AT.take() {
        at();
        AT.set(Some(at));
    }
}

/// Another core may act before what comes next. Nothing, without the feature.
#[cfg(not(feature = "interleave"))]
#[inline(always)]
pub const fn point() {}
