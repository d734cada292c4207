//! What users see of a namespace in use: its association, and what happened to it so far.

use super::remote_namespace::{AssociationState, RemoteNamespace, ana_name};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Events of a namespace. They are rare, so all cores count in one place.
#[derive(Default)]
pub(super) struct NvmePathCounters {
    /// Associations that worked.
    associations: AtomicU64,
    /// Associations that were lost.
    losses: AtomicU64,
    /// Writes of lost associations that were sent elsewhere after a reset of their controller.
    writes_after_reset: AtomicU64,
    /// The same, after the time in which the controller must have ended them.
    writes_after_time: AtomicU64,
    /// Lost controllers that were reset through this path.
    resets: AtomicU64,
    /// Resets that this path has refused, or that have failed.
    failed_resets: AtomicU64,
}

impl NvmePathCounters {
    pub(super) fn count_association(&self) {
        self.associations.fetch_add(1, Relaxed);
    }

    pub(super) fn count_loss(&self) {
        self.losses.fetch_add(1, Relaxed);
    }

    /// Counts writes of a lost association that may be sent elsewhere.
    pub(super) fn count_released_writes(&self, writes: usize, is_reset: bool) {
        let counter = if is_reset { &self.writes_after_reset } else { &self.writes_after_time };
        counter.fetch_add(writes as u64, Relaxed);
    }

    /// Counts the end of a reset of another controller.
    pub(super) fn count_reset(&self, has_succeeded: bool) {
        let counter = if has_succeeded { &self.resets } else { &self.failed_resets };
        counter.fetch_add(1, Relaxed);
    }
}

/// A namespace in use with its association. The fields are recent, but not of one instant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmePathReport {
    /// Its URI without parameters.
    pub uri: String,
    /// `connecting` for the first time, `live` or `down`.
    pub state: &'static str,
    /// Number of the controller, if it is live.
    pub controller: Option<u16>,
    /// ANA state, as Linux names it.
    pub ana: &'static str,
    /// Open lanes, one per core and table that use the namespace.
    pub lanes: usize,
    /// Associations so far.
    pub associations: u64,
    /// Associations that were lost.
    pub losses: u64,
    /// Writes of lost associations that wait.
    pub held_writes: u64,
    /// Writes of lost associations that were sent elsewhere after a reset of their controller.
    pub writes_after_reset: u64,
    /// The same, after the time in which the controller must have ended them.
    pub writes_after_time: u64,
    /// Lost controllers that were reset through this path.
    pub resets: u64,
    /// Resets that this path has refused, or that have failed.
    pub failed_resets: u64,
}

impl RemoteNamespace {
    /// The namespace as users see it.
    pub(super) fn report(&self) -> NvmePathReport {
        let (state, controller) = match self.state() {
            AssociationState::Connecting => ("connecting", None),
            AssociationState::Live(association) => ("live", Some(association.controller.id)),
            AssociationState::Down => ("down", None),
        };
        let counters = &self.counters;
        NvmePathReport {
            uri: self.uri.plain().to_string(),
            state,
            controller,
            ana: ana_name(self.ana()),
            lanes: self.open_lanes(),
            associations: counters.associations.load(Relaxed),
            losses: counters.losses.load(Relaxed),
            held_writes: self.held_writes() as u64,
            writes_after_reset: counters.writes_after_reset.load(Relaxed),
            writes_after_time: counters.writes_after_time.load(Relaxed),
            resets: counters.resets.load(Relaxed),
            failed_resets: counters.failed_resets.load(Relaxed),
        }
    }
}
