//! What runs covered.

use crate::counts::{Maximum, RunHash, count, counts, format_disturbance_counts, list, uncovered};
use crate::plan::{Disturbance, ExcludedDisturbances};
use udm_wire::nbd::Command;

counts! {
    /// What a run did, or several.
    pub struct NbdServerCounts {
        /// Steps taken.
        pub steps: u64,
        /// Requests answered and checked, by their number in the protocol; block statuses with what
        /// the protocol doesn't know at the end.
        pub requests: [u64; 8],
        /// Of those, answered with an error.
        pub errors: u64,
        /// Pieces of data compared with the model.
        pub compared: u64,
        /// Block statuses looked at.
        pub statuses: u64,
        /// Clients.
        pub clients: u64,
        /// Of those: gone without a word, sent nonsense.
        pub lost: u64,
        /// See there.
        pub nonsense: u64,
        /// Times that a client stopped reading and writing.
        pub stalls: u64,
        /// Reads and writes of connections that were cut short, that failed, and sends that found
        /// no room.
        pub cuts: u64,
        /// See there.
        pub failed: u64,
        /// See there.
        pub full: u64,
        /// Operations called off.
        pub called_off: u64,
        /// Clients that went on on another core.
        pub moves: u64,
        /// Suspends of devices in use.
        pub suspends: u64,
        /// Paths that were slow, hung or down.
        pub troubles: u64,
        /// Requests that disks and paths failed.
        pub faults: u64,
        /// Power cuts.
        pub crashes: u64,
        /// Ends of the server in good order.
        pub ends: u64,
        /// Times that all came to rest and was looked at.
        pub rests: u64,
        /// The most memory in bytes that a server had.
        pub memory: Maximum,
        /// Simulated time in ns.
        pub simulated: u64,
        /// The hash of all events.
        pub hash: RunHash,
    }
}

impl NbdServerCounts {
    /// Requests of every kind.
    #[must_use]
    pub fn all_requests(&self) -> u64 {
        self.requests.iter().sum()
    }

    /// Why these runs say nothing about what they ran: they did nothing, or compared nothing.
    #[must_use]
    pub fn nothing(&self) -> Option<&'static str> {
        match (self.all_requests(), self.compared) {
            (0, _) => Some("no request was answered"),
            (_, 0) => Some("no data was read and compared"),
            _ => None,
        }
    }

    /// The kinds of trouble, the class that makes each, and how often it came.
    fn trouble(&self) -> [(&'static str, Disturbance, u64); 12] {
        [
            ("cut short", Disturbance::Cuts, self.cuts),
            ("failed in the network", Disturbance::Lost, self.failed),
            ("clients lost", Disturbance::Lost, self.lost),
            ("stalls", Disturbance::Stalls, self.stalls),
            ("nonsense", Disturbance::Nonsense, self.nonsense),
            ("moves", Disturbance::Moves, self.moves),
            ("called off", Disturbance::Moves, self.called_off),
            ("suspends", Disturbance::Suspend, self.suspends),
            ("paths in trouble", Disturbance::Paths, self.troubles),
            ("faults of disks", Disturbance::Errors, self.faults),
            ("crashes", Disturbance::Crash, self.crashes),
            ("wild requests", Disturbance::Wild, self.requests[7]),
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
        let name = |number: usize| match Command::from_number(number as u16) {
            Command::BlockStatus => "block status and unknown".to_owned(),
            command => format!("{command:?}").to_lowercase(),
        };
        let commands = self.requests.iter().enumerate().filter(|(number, _)| *number != 2);
        format!(
            "requests: {}; {} of them with an error\ntrouble: {}\nchecked: {} pieces of data, {} block statuses, {} clients, {} full sockets, {} rests, {} ends; {} KiB of memory at the most\n",
            list(commands.map(|(number, n)| (name(number), *n))),
            count(self.errors),
            format_disturbance_counts(self.trouble()),
            count(self.compared),
            count(self.statuses),
            count(self.clients),
            count(self.full),
            count(self.rests),
            count(self.ends),
            count(self.memory.0 >> 10)
        )
    }
}
