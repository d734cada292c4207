//! Seeded bugs: mistakes that the simulator must find.
//!
//! Without the feature `seeded-bugs`, none of them is compiled: [`on`] is a constant `false`. With
//! the feature, one bug at a time can be switched on for the calling thread. Each bug is a mistake
//! that is easy to make at the place of its hook.

mod bio_faults;
mod list;

pub use bio_faults::{drop_echoes, duplicate_bio, leak_bios, record_echo, take_echoes};
pub use list::{Bug, SimWorld};

#[cfg(feature = "seeded-bugs")]
thread_local! {
    static ON: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// Switches `bug` on for this thread; `None` switches the current one off.
#[cfg(feature = "seeded-bugs")]
pub fn set(bug: Option<Bug>) {
    ON.set(bug);
    bio_faults::clear_echoes();
}

/// Returns true if `bug` is on.
#[cfg(feature = "seeded-bugs")]
pub fn on(bug: Bug) -> bool {
    ON.get() == Some(bug)
}

/// Always false without the feature `seeded-bugs`.
#[cfg(not(feature = "seeded-bugs"))]
#[inline(always)]
pub const fn on(_: Bug) -> bool {
    false
}
