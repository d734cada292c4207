//! Planted bugs: mistakes that the simulator must find.
//!
//! One bug at a time can be switched on for the calling thread. Each bug is a mistake that is easy
//! to make at its place. The program that users run has none of them: they are patches that a test
//! applies to a copy of the source tree (`planted-bugs/README.md`).

mod bio_faults;
mod list;

pub use bio_faults::{
    duplicate_bio, leak_bios, remove_duplicate_completions, schedule_duplicate_write,
    take_due_duplicate_writes,
};
pub use list::{Bug, SimWorldKind};

thread_local! {
    static ON: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// Switches `bug` on for this thread; `None` switches the current one off.
pub fn plant_bug(bug: Option<Bug>) {
    ON.set(bug);
    bio_faults::leak_scheduled_duplicate_writes();
}

/// Returns true if `bug` is on.
pub fn is_bug_planted(bug: Bug) -> bool {
    ON.get() == Some(bug)
}
