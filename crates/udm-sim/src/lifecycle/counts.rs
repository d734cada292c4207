//! What runs covered.

use super::ask::{KINDS, ServerVerb};
use crate::counts::{RunHash, count, counts, format_disturbance_counts, list, uncovered};
use crate::plan::{Disturbance, ExcludedDisturbances};

counts! {
    /// What a run did, or several.
    pub struct LifecycleCounts {
        /// Steps taken.
        pub steps: u64,
        /// Servers that were started.
        pub lives: u64,
        /// Those that ended in order.
        pub ended: u64,
        /// Those that were killed.
        pub killed: u64,
        /// Of those, while they made the devices of their file.
        pub killed_starting: u64,
        /// Of those, while a verb was under way.
        pub killed_in_verbs: u64,
        /// Of those, while a merge went on.
        pub killed_in_merges: u64,
        /// Merges that another server went on with.
        pub merges_went_on: u64,
        /// Stores that were away at a start.
        pub away: u64,
        /// Those that came back while the server ran.
        pub returned: u64,
        /// Devices that a server has refused to make at its start.
        pub refused_at_start: u64,
        /// Snapshots that came back with a server.
        pub attached_again: u64,
        /// Snapshots that were made.
        pub made: u64,
        /// Snapshots that were given up, and the log said so.
        pub lost: u64,
        /// Snapshots that were taken away from an origin in use.
        pub released: u64,
        /// Snapshots that another table has taken over.
        pub handed_over: u64,
        /// Files that were put where a store had been.
        pub replaced: u64,
        /// Verbs that ended, by kind.
        pub verbs: [u64; KINDS],
        /// Of those, refused.
        pub refused: u64,
        /// Verbs that went on while another one waited below them.
        pub nested: u64,
        /// Requests of clients that came back.
        pub requests: u64,
        /// Clients of devices.
        pub clients: u64,
        /// Sectors that were compared.
        pub sectors: u64,
        /// Times that all came to rest and was read back.
        pub rests: u64,
        /// Simulated time in ns.
        pub simulated: u64,
        /// The hash of all events.
        pub hash: RunHash,
    }
}

impl LifecycleCounts {
    /// Verbs of every kind.
    #[must_use]
    pub fn all_verbs(&self) -> u64 {
        self.verbs.iter().sum()
    }

    /// Why these runs say nothing about what they ran.
    #[must_use]
    pub fn nothing(&self) -> Option<&'static str> {
        match (self.sectors, self.ended + self.killed) {
            (0, _) => Some("no sector was compared"),
            (_, 0) => Some("no server ended"),
            _ => None,
        }
    }

    /// The kinds of trouble, the class that makes each, and how often it came.
    fn trouble(&self) -> [(&'static str, Disturbance, u64); 15] {
        [
            ("killed", Disturbance::Crash, self.killed),
            ("killed while they started", Disturbance::Crash, self.killed_starting),
            ("killed in verbs", Disturbance::Crash, self.killed_in_verbs),
            ("killed in merges", Disturbance::Merge, self.killed_in_merges),
            ("merges went on", Disturbance::Merge, self.merges_went_on),
            ("stores away", Disturbance::Paths, self.away),
            ("stores returned", Disturbance::Paths, self.returned),
            ("devices refused at a start", Disturbance::Paths, self.refused_at_start),
            ("attached again", Disturbance::Crash, self.attached_again),
            ("snapshots made", Disturbance::Reload, self.made),
            ("given up", Disturbance::Paths, self.lost),
            ("released", Disturbance::Remove, self.released),
            ("handed over", Disturbance::Reload, self.handed_over),
            ("files replaced", Disturbance::Paths, self.replaced),
            ("verbs within verbs", Disturbance::Reload, self.nested),
        ]
    }

    /// What was not left out and never came all the same: the runs were too short for it.
    #[must_use]
    pub fn uncovered(&self, without: ExcludedDisturbances) -> Vec<&'static str> {
        uncovered(self.trouble(), without)
    }

    /// What was covered, for a person, one line each.
    #[must_use]
    pub fn coverage(&self) -> String {
        format!(
            "lives: {}, {} ended in order\nverbs: {}; {} of them refused\ntrouble: {}\nchecked: {} sectors read by {} clients, {} rests\n",
            count(self.lives),
            count(self.ended),
            list(ServerVerb::NAMES.into_iter().zip(self.verbs)),
            count(self.refused),
            format_disturbance_counts(self.trouble()),
            count(self.sectors),
            count(self.clients),
            count(self.rests)
        )
    }
}
