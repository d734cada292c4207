//! Coverage counters of runs.

use crate::counts::{
    CombinedRunHash, MaxOverRuns, RunReport, collect_disturbances, counts, format_count, format_counts,
    format_disturbance_counts,
};
use crate::plan::DisturbanceClass;
use udm_wire::nbd::NbdCommand;

counts! {
    /// Counters of one or several runs.
    pub struct NbdServerCounts {
        /// Steps taken.
        pub steps: u64,
        /// Checked replies, by the command number of the protocol. The last entry counts block
        /// statuses and unknown commands.
        pub requests: [u64; 8],
        /// Replies with an error.
        pub errors: u64,
        /// Pieces of data compared with the model.
        pub compared: u64,
        /// Block statuses checked.
        pub statuses: u64,
        /// Chunks with extended headers.
        pub extended: u64,
        /// Clients.
        pub clients: u64,
        /// Clients that vanished without a close.
        pub lost: u64,
        /// Clients that sent invalid data.
        pub nonsense: u64,
        /// Stalls of clients.
        pub stalls: u64,
        /// Short reads and writes of connections.
        pub cuts: u64,
        /// Failed reads and writes of connections.
        pub failed: u64,
        /// Sends that found a full socket.
        pub full: u64,
        /// Cancelled operations.
        pub called_off: u64,
        /// Connections that moved to another core.
        pub moves: u64,
        /// Suspends of active devices.
        pub suspends: u64,
        /// Paths that became slow, hung or failed.
        pub troubles: u64,
        /// Requests that disks and paths failed.
        pub faults: u64,
        /// Power cuts.
        pub crashes: u64,
        /// Orderly shutdowns of the server.
        pub ends: u64,
        /// Quiescences of the whole world with an inspection.
        pub rests: u64,
        /// Maximum memory of a server, in bytes.
        pub memory: MaxOverRuns,
        /// Simulated time in ns.
        pub simulated: u64,
        /// The hash of all events.
        pub hash: CombinedRunHash,
    }
}

impl NbdServerCounts {
    /// The report of the runs.
    #[must_use]
    pub fn report(&self) -> RunReport {
        let requests = self.requests.iter().sum::<u64>();
        let trouble = [
            ("cut short", DisturbanceClass::Cuts, self.cuts),
            ("failed in the network", DisturbanceClass::Lost, self.failed),
            ("clients lost", DisturbanceClass::Lost, self.lost),
            ("stalls", DisturbanceClass::Stalls, self.stalls),
            ("nonsense", DisturbanceClass::Nonsense, self.nonsense),
            ("moves", DisturbanceClass::Moves, self.moves),
            ("cancelled", DisturbanceClass::Moves, self.called_off),
            ("suspends", DisturbanceClass::Suspend, self.suspends),
            ("paths in trouble", DisturbanceClass::Paths, self.troubles),
            ("faults of disks", DisturbanceClass::Errors, self.faults),
            ("crashes", DisturbanceClass::Crash, self.crashes),
            ("wild requests", DisturbanceClass::Wild, self.requests[7]),
        ];
        let name = |number: usize| match NbdCommand::from_number(number as u16) {
            NbdCommand::BlockStatus => "block status and unknown commands".to_owned(),
            command => format!("{command:?}").to_lowercase(),
        };
        let commands = self.requests.iter().enumerate().filter(|(number, _)| *number != 2);
        RunReport {
            steps: self.steps,
            requests,
            simulated: self.simulated,
            nothing: match (requests, self.compared) {
                (0, _) => Some("no request was answered"),
                (_, 0) => Some("no data was read and compared"),
                _ => None,
            },
            disturbances: collect_disturbances(trouble),
            coverage: format!(
                "requests: {}; {} of them with an error\ntrouble: {}\nchecked: {} pieces of data, {} block statuses, {} extended chunks, {} clients, {} full sockets, {} rests, {} ends; {} KiB of memory at the most\n",
                format_counts(commands.map(|(number, n)| (name(number), *n))),
                format_count(self.errors),
                format_disturbance_counts(trouble),
                format_count(self.compared),
                format_count(self.statuses),
                format_count(self.extended),
                format_count(self.clients),
                format_count(self.full),
                format_count(self.rests),
                format_count(self.ends),
                format_count(self.memory.0 >> 10)
            ),
        }
    }
}
