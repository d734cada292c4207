//! Coverage counters of runs.

use crate::counts::{
    CombinedRunHash, RunReport, collect_disturbances, counts, format_count, format_counts,
    format_disturbance_counts,
};
use crate::plan::DisturbanceClass;
use udm_core::Op;

counts! {
    /// Counters of one or several runs.
    pub struct CloneCounts {
        /// True for runs of worlds of a mirror with a log.
        pub has_logs: bool,
        /// True for runs of worlds of a clone of an object.
        pub has_objects: bool,
        /// Steps taken.
        pub steps: u64,
        /// Completed and checked requests, by [`Op`].
        pub requests: [u64; Op::ALL.len()],
        /// Simulated time in ns.
        pub simulated: u64,
        /// Sectors compared with the model.
        pub sectors: u64,
        /// Starts and completions of writes and flushes on disks.
        pub changes: u64,
        /// Requests that disks and paths failed.
        pub faults: u64,
        /// Paths that became slow or failed.
        pub troubles: u64,
        /// Preemptions of a core's turn by another core.
        pub between: u64,
        /// Rests of the whole world with an inspection.
        pub rests: u64,
        /// Power cuts, and those while some but not all regions were hydrated.
        pub cuts: [u64; 2],
        /// Completed suspends.
        pub suspends: u64,
        /// Cancelled changes.
        pub cancels: u64,
        /// Live clones that a new table took over.
        pub reloads: u64,
        /// Clones that were removed and loaded again.
        pub removals: u64,
        /// Messages.
        pub messages: u64,
        /// Clones that were found with all regions hydrated.
        pub complete: u64,
        /// Clones that began again with blank metadata.
        pub renewals: u64,
        /// Clones whose metadata became read-only or failed.
        pub broken: u64,
        /// Mirrors that continued from a log with clean regions.
        pub continued: u64,
        /// Logs of mirrors that failed.
        pub lost_logs: u64,
        /// Bad answers of servers of objects.
        pub lies: u64,
        /// Requests that found the object replaced.
        pub replaced: u64,
        /// Second requests of slow ranges.
        pub hedges: u64,
        /// Linear tables that replaced a complete clone.
        pub linear: u64,
        /// The hash of all events.
        pub hash: CombinedRunHash,
    }
}

impl CloneCounts {
    /// The report of the runs.
    #[must_use]
    pub fn report(&self) -> RunReport {
        let requests = self.requests.iter().sum::<u64>();
        let trouble = [
            ("power cuts", DisturbanceClass::Crash, self.cuts[0]),
            ("of clones in part", DisturbanceClass::Crash, self.cuts[1]),
            ("suspends", DisturbanceClass::Suspend, self.suspends),
            ("cancelled", DisturbanceClass::Cancel, self.cancels),
            ("reloads", DisturbanceClass::Reload, self.reloads),
            ("removed", DisturbanceClass::Remove, self.removals),
            ("begun again", DisturbanceClass::Remove, self.renewals),
            ("messages", DisturbanceClass::Messages, self.messages),
            ("faults", DisturbanceClass::Errors, self.faults),
            ("metadata failed", DisturbanceClass::Errors, self.broken),
            ("logs failed", DisturbanceClass::Errors, self.lost_logs),
            ("continued from a log", DisturbanceClass::Crash, self.continued),
            ("bad answers", DisturbanceClass::Errors, self.lies),
            ("object replaced", DisturbanceClass::Errors, self.replaced),
            ("hedges", DisturbanceClass::Errors, self.hedges),
            ("paths in trouble", DisturbanceClass::Paths, self.troubles),
        ];
        let of_logs = ["logs failed", "continued from a log"];
        let of_objects = ["bad answers", "object replaced", "hedges"];
        let is_shown = |name: &str| {
            (self.has_logs || !of_logs.contains(&name)) && (self.has_objects || !of_objects.contains(&name))
        };
        let trouble = trouble.iter().filter(|(name, ..)| is_shown(name)).copied();
        let names = Op::ALL.iter().map(|op| format!("{op:?}").to_lowercase());
        RunReport {
            steps: self.steps,
            requests,
            simulated: self.simulated,
            nothing: match (requests, self.sectors, self.complete) {
                (0, ..) => Some("no request completed"),
                (_, 0, _) => Some("no data was read and compared"),
                (.., 0) => Some("no clone was hydrated"),
                _ => None,
            },
            disturbances: collect_disturbances(trouble.clone()),
            coverage: format!(
                "requests: {}\ntrouble: {}\nchecked: {} sectors, {} rests, {} complete clones, {} linear tables; {} turns inside turns\n",
                format_counts(names.zip(self.requests)),
                format_disturbance_counts(trouble),
                format_count(self.sectors),
                format_count(self.rests),
                format_count(self.complete),
                format_count(self.linear),
                format_count(self.between),
            ),
        }
    }
}
