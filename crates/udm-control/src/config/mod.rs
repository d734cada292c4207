//! Devices that a file wants: made at the start, and brought to what the file says by then whenever
//! somebody asks.
//!
//! Contract: what the file made is the file's, and nothing else: a device that a verb made is left
//! alone until the file has one of its name. Compared is what the file says with what it said when
//! it was last applied: what verbs have changed since stays, until the file changes there. Each
//! device gets all of its change or none; what can't be done is said, and the others go on. What
//! verbs have removed is made again.

mod apply;
mod plan;

pub use apply::{reconfigure, start, wait_for_snapshots};
pub use plan::{Plan, Step, Wanted, plan};

use crate::registry::Folder;
use apply::Applied;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a file says.
#[derive(Clone)]
pub struct Wish {
    /// The devices, each with a name of its own.
    pub devices: Vec<Wanted>,
    /// From where relative paths in their tables count.
    pub folder: Folder,
    /// What else has changed, for a person, a line each.
    pub notes: Vec<String>,
}

/// Reads the file; an error is its first fault. May block.
pub type Read = Box<dyn Fn() -> Result<Wish, String> + Send + Sync>;

/// The file of a server, and what of it is applied.
pub(crate) struct Config {
    read: Read,
    /// Held by whoever changes what the file wants: one at a time.
    applied: tokio::sync::Mutex<State>,
    /// Some of it waits for a snapshot.
    is_blocked: tokio::sync::Notify,
    ends: AtomicBool,
}

/// What of a file is applied.
#[derive(Default)]
struct State {
    devices: Vec<Applied>,
    /// The file, where some of it waits for a snapshot that can't be attached.
    blocked: Option<Wish>,
}

impl Config {
    /// The file that `read` reads, with nothing of it applied.
    pub fn new(read: Read) -> Config {
        let is_blocked = tokio::sync::Notify::new();
        Config { read, applied: tokio::sync::Mutex::default(), is_blocked, ends: AtomicBool::new(false) }
    }

    /// The server ends: nothing more is begun.
    pub fn end(&self) {
        self.ends.store(true, Ordering::Relaxed);
    }
}
