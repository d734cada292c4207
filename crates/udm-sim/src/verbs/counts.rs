//! Coverage counters of runs.

use super::verb_jobs::{ControlVerb, KINDS};
use crate::counts::{
    CombinedRunHash, RunReport, collect_disturbances, counts, format_count, format_counts,
    format_disturbance_counts,
};
use crate::plan::DisturbanceClass;

counts! {
    /// Counters of one or several runs.
    pub struct RegistryCounts {
        /// Steps taken.
        pub steps: u64,
        /// Completed verbs, by kind.
        pub verbs: [u64; KINDS],
        /// Refused verbs.
        pub refused: u64,
        /// Clients that disconnected during a verb.
        pub hung_up: u64,
        /// Cancelled verbs.
        pub called_off: u64,
        /// Verbs that began on a device that another verb was about to change.
        pub met: u64,
        /// Verbs that ran while a load resolved a name.
        pub beside_loads: u64,
        /// Deferred removals that were performed.
        pub deferred: u64,
        /// Names that could not be opened.
        pub not_opened: u64,
        /// Lanes that could not be opened.
        pub no_lanes: u64,
        /// Names that were changed to lead to another disk.
        pub moved: u64,
        /// Paths that hung.
        pub hangs: u64,
        /// Messages that targets accepted.
        pub messages: u64,
        /// Tables over mapped devices.
        pub stacks: u64,
        /// Completed requests of clients.
        pub requests: u64,
        /// Clients of devices.
        pub clients: u64,
        /// Inspections of the whole registry.
        pub looks: u64,
        /// Quiescences of the whole world with an inspection.
        pub rests: u64,
        /// Simulated time in ns.
        pub simulated: u64,
        /// The hash of all events.
        pub hash: CombinedRunHash,
    }
}

impl RegistryCounts {
    /// The report of the runs.
    #[must_use]
    pub fn report(&self) -> RunReport {
        let verbs = self.verbs.iter().sum::<u64>();
        let trouble = [
            ("met others", DisturbanceClass::Suspend, self.met),
            ("clients hung up", DisturbanceClass::Cancel, self.hung_up),
            ("cancelled", DisturbanceClass::Cancel, self.called_off),
            ("beside loads", DisturbanceClass::Reload, self.beside_loads),
            ("deferred removals", DisturbanceClass::Remove, self.deferred),
            ("names not opened", DisturbanceClass::Opens, self.not_opened),
            ("lanes not opened", DisturbanceClass::Opens, self.no_lanes),
            ("names moved", DisturbanceClass::Paths, self.moved),
            ("hangs", DisturbanceClass::Hang, self.hangs),
            ("messages taken", DisturbanceClass::Messages, self.messages),
            ("tables over devices", DisturbanceClass::Stacks, self.stacks),
        ];
        RunReport {
            steps: self.steps,
            requests: verbs,
            simulated: self.simulated,
            nothing: match (verbs - self.refused, self.rests) {
                (0, _) => Some("no verb did anything"),
                (_, 0) => Some("the registry was never checked at rest"),
                _ => None,
            },
            disturbances: collect_disturbances(trouble),
            coverage: format!(
                "verbs: {}; {} of them refused\ntrouble: {}\nchecked: {} looks at the registry, {} rests, {} requests of {} clients\n",
                format_counts(ControlVerb::NAMES.into_iter().zip(self.verbs)),
                format_count(self.refused),
                format_disturbance_counts(trouble),
                format_count(self.looks),
                format_count(self.rests),
                format_count(self.requests),
                format_count(self.clients)
            ),
        }
    }
}
