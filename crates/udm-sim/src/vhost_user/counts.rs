//! Coverage counters of runs.

use super::model::GuestOp;
use crate::counts::{
    CombinedRunHash, RunReport, collect_disturbances, counts, format_count, format_counts,
    format_disturbance_counts,
};
use crate::plan::DisturbanceClass;

counts! {
    /// Counters of one or several runs.
    pub struct VhostUserCounts {
        /// Steps taken.
        pub steps: u64,
        /// Checked requests: read, write, flush, ID, discard, write zeroes, unknown.
        pub requests: [u64; 7],
        /// Requests that completed with an error.
        pub errors: u64,
        /// Sectors compared with the model.
        pub compared: u64,
        /// Connections of front ends.
        pub connections: u64,
        /// Connections of machines with split rings, and with packed ones.
        pub kinds: [u64; 2],
        /// Connections that a front end closed.
        pub lost: u64,
        /// Connections that ended in the middle of a message.
        pub cut: u64,
        /// Messages that no front end sends.
        pub nonsense: u64,
        /// Actions of hostile guests.
        pub acts: u64,
        /// Rings of hostile guests that were stopped.
        pub broken: u64,
        /// Rings that were stopped and started again.
        pub restarts: u64,
        /// Machines that began again with empty rings.
        pub resets: u64,
        /// Regions that were added and removed.
        pub memory_changes: u64,
        /// Notifications of guests, and those that the device did not want.
        pub kicks: [u64; 2],
        /// Actions of guests in the middle of a core's turn.
        pub interleaved: u64,
        /// Kills of the server, and those in the middle of a core's turn.
        pub kills: [u64; 2],
        /// Requests in flight at a kill.
        pub in_flight: u64,
        /// Power cuts.
        pub crashes: u64,
        /// Orderly ends of the server.
        pub ends: u64,
        /// Paths that became slow, hung or failed.
        pub troubles: u64,
        /// Requests that disks and paths failed.
        pub faults: u64,
        /// Rests of the whole world with an inspection.
        pub rests: u64,
        /// Simulated time in ns.
        pub simulated: u64,
        /// The hash of all events.
        pub hash: CombinedRunHash,
    }
}

impl VhostUserCounts {
    /// The report of the runs.
    #[must_use]
    pub fn report(&self) -> RunReport {
        let requests = self.requests.iter().sum::<u64>();
        let trouble = [
            ("kills", DisturbanceClass::Crash, self.kills[0]),
            ("power cuts", DisturbanceClass::Crash, self.crashes),
            ("connections closed", DisturbanceClass::Lost, self.lost),
            ("messages cut short", DisturbanceClass::Cuts, self.cut),
            ("nonsense", DisturbanceClass::Nonsense, self.nonsense),
            ("hostile actions", DisturbanceClass::Wild, self.acts),
            ("rings stopped for them", DisturbanceClass::Wild, self.broken),
            ("rings restarted", DisturbanceClass::Reopen, self.restarts),
            ("machines reset", DisturbanceClass::Reopen, self.resets),
            ("paths in trouble", DisturbanceClass::Paths, self.troubles),
            ("faults of disks", DisturbanceClass::Errors, self.faults),
        ];
        let names = GuestOp::ALL.iter().map(|op| format!("{op:?}").to_lowercase());
        RunReport {
            steps: self.steps,
            requests,
            simulated: self.simulated,
            nothing: match (requests, self.compared) {
                (0, _) => Some("no request completed"),
                (_, 0) => Some("no data was read and compared"),
                _ => None,
            },
            disturbances: collect_disturbances(trouble),
            coverage: format!(
                "requests: {}; {} of them with an error\ntrouble: {}\nchecked: {} sectors, {} connections ({} with split rings, {} with packed ones), {} memory changes, {} rests, {} ends; {} kicks, {} not wanted; in the middle of turns: {} actions of guests, {} kills; {} requests in flight at kills\n",
                format_counts(names.zip(self.requests)),
                format_count(self.errors),
                format_disturbance_counts(trouble),
                format_count(self.compared),
                format_count(self.connections),
                format_count(self.kinds[0]),
                format_count(self.kinds[1]),
                format_count(self.memory_changes),
                format_count(self.rests),
                format_count(self.ends),
                format_count(self.kicks[0]),
                format_count(self.kicks[1]),
                format_count(self.interleaved),
                format_count(self.kills[1]),
                format_count(self.in_flight),
            ),
        }
    }
}
