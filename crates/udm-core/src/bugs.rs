//! Bugs put in on purpose, to show that the simulator finds what it is there to find.
//!
//! Without the feature `seeded-bugs` nothing of them is compiled: [`on`] is a constant `false`.
//! With it, one at a time can be switched on for the calling thread. Each stands for a mistake that
//! is easily made in the place where its hook is.

mod bio_faults;
mod list;

pub use bio_faults::{drop_echoes, duplicate_bio, leak_bios, record_echo, take_echoes};
pub use list::{Bug, SimWorld};

#[cfg(feature = "seeded-bugs")]
thread_local! {
    static ON: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// Switches a bug on for this thread, or the one that is on off.
#[cfg(feature = "seeded-bugs")]
pub fn set(bug: Option<Bug>) {
    ON.set(bug);
    bio_faults::clear_echoes();
}

/// Is `bug` on?
#[cfg(feature = "seeded-bugs")]
pub fn on(bug: Bug) -> bool {
    ON.get() == Some(bug)
}

/// Is `bug` on? Never.
#[cfg(not(feature = "seeded-bugs"))]
#[inline(always)]
pub const fn on(_: Bug) -> bool {
    false
}
