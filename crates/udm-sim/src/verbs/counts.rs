//! What runs covered.

use super::ask::{ControlVerb, KINDS};
use crate::counts::{RunHash, count, counts, format_disturbance_counts, list, uncovered};
use crate::plan::{Disturbance, ExcludedDisturbances};

counts! {
    /// What a run did, or several.
    pub struct RegistryCounts {
        /// Steps taken.
        pub steps: u64,
        /// Verbs that ended, by kind.
        pub verbs: [u64; KINDS],
        /// Of those, refused.
        pub refused: u64,
        /// Clients that hung up in the middle.
        pub hung_up: u64,
        /// Verbs that were called off.
        pub called_off: u64,
        /// Verbs that began on a device that another one was about to change.
        pub met: u64,
        /// Verbs that went on while a load was asking what a name leads to.
        pub beside_loads: u64,
        /// Removals that were deferred, and came.
        pub deferred: u64,
        /// Names that could not be opened.
        pub not_opened: u64,
        /// Lanes that could not be opened.
        pub no_lanes: u64,
        /// Names that led to another disk from then on.
        pub moved: u64,
        /// Times that paths hung.
        pub hangs: u64,
        /// Messages that targets took.
        pub messages: u64,
        /// Tables over mapped devices.
        pub stacks: u64,
        /// Requests of clients that came back.
        pub requests: u64,
        /// Clients of devices.
        pub clients: u64,
        /// Looks at the whole registry.
        pub looks: u64,
        /// Times that all came to rest and was looked at.
        pub rests: u64,
        /// Simulated time in ns.
        pub simulated: u64,
        /// The hash of all events.
        pub hash: RunHash,
    }
}

impl RegistryCounts {
    /// Verbs of every kind.
    #[must_use]
    pub fn all_verbs(&self) -> u64 {
        self.verbs.iter().sum()
    }

    /// Why these runs say nothing about what they ran.
    #[must_use]
    pub fn nothing(&self) -> Option<&'static str> {
        match (self.all_verbs() - self.refused, self.rests) {
            (0, _) => Some("no verb did anything"),
            (_, 0) => Some("nobody looked at the registry at rest"),
            _ => None,
        }
    }

    /// The kinds of trouble, the class that makes each, and how often it came.
    fn trouble(&self) -> [(&'static str, Disturbance, u64); 11] {
        [
            ("met others", Disturbance::Suspend, self.met),
            ("clients hung up", Disturbance::Cancel, self.hung_up),
            ("called off", Disturbance::Cancel, self.called_off),
            ("beside loads", Disturbance::Reload, self.beside_loads),
            ("deferred removals", Disturbance::Remove, self.deferred),
            ("names not opened", Disturbance::Opens, self.not_opened),
            ("lanes not opened", Disturbance::Opens, self.no_lanes),
            ("names moved", Disturbance::Paths, self.moved),
            ("hangs", Disturbance::Hang, self.hangs),
            ("messages taken", Disturbance::Messages, self.messages),
            ("tables over devices", Disturbance::Stacks, self.stacks),
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
            "verbs: {}; {} of them refused\ntrouble: {}\nchecked: {} looks at the registry, {} rests, {} requests of {} clients\n",
            list(ControlVerb::NAMES.into_iter().zip(self.verbs)),
            count(self.refused),
            format_disturbance_counts(self.trouble()),
            count(self.looks),
            count(self.rests),
            count(self.requests),
            count(self.clients)
        )
    }
}
