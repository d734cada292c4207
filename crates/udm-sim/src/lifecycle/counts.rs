//! Coverage counters of runs.

use super::verb_jobs::{KINDS, ServerVerb};
use crate::counts::{
    CombinedRunHash, RunReport, collect_disturbances, counts, format_count, format_counts,
    format_disturbance_counts,
};
use crate::plan::DisturbanceClass;

counts! {
    /// Counters of one or several runs.
    pub struct LifecycleCounts {
        /// Steps taken.
        pub steps: u64,
        /// Servers that were started.
        pub lives: u64,
        /// Servers that ended in order.
        pub ended: u64,
        /// Servers that were killed.
        pub killed: u64,
        /// Servers that were killed while they created the devices of their file.
        pub killed_starting: u64,
        /// Servers that were killed during a verb.
        pub killed_in_verbs: u64,
        /// Servers that were killed during a merge.
        pub killed_in_merges: u64,
        /// Merges that a later server continued.
        pub merges_went_on: u64,
        /// Stores that were missing at a start.
        pub away: u64,
        /// Missing stores that returned while the server ran.
        pub returned: u64,
        /// Devices that a server refused to create at its start.
        pub refused_at_start: u64,
        /// Snapshots that a new server attached again.
        pub attached_again: u64,
        /// Snapshots that were created.
        pub made: u64,
        /// Snapshots that were abandoned, with a log line.
        pub lost: u64,
        /// Snapshots that were detached from an active origin.
        pub released: u64,
        /// Snapshots that another table took over.
        pub handed_over: u64,
        /// Files that were placed at the path of a store.
        pub replaced: u64,
        /// Completed verbs, by kind.
        pub verbs: [u64; KINDS],
        /// Refused verbs.
        pub refused: u64,
        /// Verbs that ran while another one waited below them.
        pub nested: u64,
        /// Completed requests of clients.
        pub requests: u64,
        /// Clients of devices.
        pub clients: u64,
        /// Sectors that were compared.
        pub sectors: u64,
        /// Quiescences of the whole world in which all data was read back.
        pub rests: u64,
        /// Simulated time in ns.
        pub simulated: u64,
        /// The hash of all events.
        pub hash: CombinedRunHash,
    }
}

impl LifecycleCounts {
    /// The report of the runs.
    #[must_use]
    pub fn report(&self) -> RunReport {
        let trouble = [
            ("killed", DisturbanceClass::Crash, self.killed),
            ("killed while they started", DisturbanceClass::Crash, self.killed_starting),
            ("killed in verbs", DisturbanceClass::Crash, self.killed_in_verbs),
            ("killed in merges", DisturbanceClass::Merge, self.killed_in_merges),
            ("merges went on", DisturbanceClass::Merge, self.merges_went_on),
            ("stores away", DisturbanceClass::Paths, self.away),
            ("stores returned", DisturbanceClass::Paths, self.returned),
            ("devices refused at a start", DisturbanceClass::Paths, self.refused_at_start),
            ("attached again", DisturbanceClass::Crash, self.attached_again),
            ("snapshots made", DisturbanceClass::Reload, self.made),
            ("given up", DisturbanceClass::Paths, self.lost),
            ("released", DisturbanceClass::Remove, self.released),
            ("handed over", DisturbanceClass::Reload, self.handed_over),
            ("files replaced", DisturbanceClass::Paths, self.replaced),
            ("verbs within verbs", DisturbanceClass::Reload, self.nested),
        ];
        RunReport {
            steps: self.steps,
            requests: self.requests,
            simulated: self.simulated,
            nothing: match (self.sectors, self.ended + self.killed) {
                (0, _) => Some("no sector was compared"),
                (_, 0) => Some("no server ended"),
                _ => None,
            },
            disturbances: collect_disturbances(trouble),
            coverage: format!(
                "lives: {}, {} ended in order\nverbs: {}; {} of them refused\ntrouble: {}\nchecked: {} sectors read by {} clients, {} rests\n",
                format_count(self.lives),
                format_count(self.ended),
                format_counts(ServerVerb::NAMES.into_iter().zip(self.verbs)),
                format_count(self.refused),
                format_disturbance_counts(trouble),
                format_count(self.sectors),
                format_count(self.clients),
                format_count(self.rests)
            ),
        }
    }
}
