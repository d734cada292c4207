//! The report of the work in flight on the cores.

use std::collections::{BTreeMap, BTreeSet};
use udm_core::DeviceId;

/// Work in flight on the cores.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CoreWorkInFlightReport {
    /// Number of requests of front ends per device; devices without requests are missing.
    pub requests: BTreeMap<DeviceId, usize>,
    /// Devices with required own work.
    pub busy: BTreeSet<DeviceId>,
    /// Number of front ends that are not closed.
    pub front_ends: usize,
    /// Number of cores that did not reply.
    pub unanswered: usize,
}
