//! The control half of a device.

use crate::{Cx, Lane, Limits};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

/// The control half of a device: shared by all cores, immutable or slow to change.
pub trait Device: Send + Sync {
    /// Its identity, from [`DeviceId::new`], the same for its whole life.
    fn id(&self) -> DeviceId;

    /// Opens the data-path half, on the core that will own it.
    ///
    /// # Errors
    /// When the device can't be opened on this core.
    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError>;

    /// Size and limits, as of now.
    fn limits(&self) -> Limits;

    /// The devices below, directly and through others, for the check against cycles. Empty for a backend.
    fn below(&self) -> Vec<DeviceId> {
        let mut seen = BTreeSet::new();
        self.add_below(&mut seen);
        seen.into_iter().collect()
    }

    /// Adds to `seen` the devices directly below, and what is below those that were not in it: each is visited once.
    fn add_below(&self, seen: &mut BTreeSet<DeviceId>) {
        let _ = seen;
    }

    /// How many mapped devices lie on top of each other here, itself included; 0 for a backend. Calls go down that deep, so
    /// it is bounded when a table is loaded.
    fn depth(&self) -> usize {
        0
    }
}

/// Tells devices apart, within one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(u64);

impl DeviceId {
    /// A new identity.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "each call gives another")]
    pub fn new() -> DeviceId {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        DeviceId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Why a lane could not be opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct OpenError {
    /// The errno, positive.
    pub errno: i32,
    /// What went wrong, for a person.
    pub text: String,
}

impl OpenError {
    /// An error with `errno` and a text.
    pub fn new(errno: i32, text: impl Into<String>) -> OpenError {
        OpenError { errno, text: text.into() }
    }
}
