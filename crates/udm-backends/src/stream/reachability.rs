//! Whether a server can be reached, shared by all its lanes, and the log lines about it.

use std::fmt::Display;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use udm_core::Nanos;

/// Back-off after a failure to connect: at first, and at most.
pub(crate) const BACK_OFF: Nanos = Nanos(100_000_000);
pub(crate) const BACK_OFF_MAX: Nanos = Nanos(5_000_000_000);

/// The connections to a server, as all lanes see them.
#[derive(Default)]
pub(crate) struct ServerReachability {
    /// Reasons why connections were lost since one last worked, each as a bit by its hash; 0 if the
    /// last event of a connection was not its loss.
    down: AtomicU64,
    /// Number of connections made. A new one ends the back-off of the other lanes.
    made: AtomicU64,
}

impl ServerReachability {
    /// Returns true if the last event of a connection was its loss.
    pub(crate) fn is_down(&self) -> bool {
        self.down.load(Relaxed) != 0
    }

    /// Records that a connection to `server` works.
    pub(crate) fn mark_up(&self, server: &impl Display) {
        self.made.fetch_add(1, Relaxed);
        if self.down.swap(0, Relaxed) != 0 {
            tracing::warn!("{server}: connected again");
        }
    }

    /// Ends the back-off of all lanes, because an administrator reports that the server works.
    pub(crate) fn retry_now(&self) {
        self.made.fetch_add(1, Relaxed);
    }

    /// Number of connections made, plus the number of calls of [`ServerReachability::retry_now`].
    pub(crate) fn connections_made(&self) -> u64 {
        self.made.load(Relaxed)
    }

    /// Records that a connection to `server` was lost or could not be made, because of `reason`.
    /// Logs `why` once for each reason, until a connection works again: after the end of a server,
    /// its successor may have another certificate.
    pub(crate) fn mark_down(&self, server: &impl Display, reason: &str, why: &str) {
        let mut hasher = DefaultHasher::new();
        reason.hash(&mut hasher);
        // Two reasons may share a bit; then the second is not logged.
        let bit = 1 << (hasher.finish() % u64::from(u64::BITS));
        if self.down.fetch_or(bit, Relaxed) & bit == 0 {
            tracing::warn!("{server}: {why}");
        }
    }
}
