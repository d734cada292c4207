//! Coverage counters of runs.

use crate::counts::{
    CombinedRunHash, MaxOverRuns, RunReport, collect_disturbances, counts, format_count, format_counts,
    format_disturbance_counts,
};
use crate::plan::DisturbanceClass;
use crate::trace::op_name;
use udm_core::Op;

counts! {
    /// Counters of one or several runs.
    pub struct NbdClientCounts {
        /// Steps taken.
        pub steps: u64,
        /// Completed and checked requests, by operation.
        pub requests: [u64; 5],
        /// Requests that completed with an error.
        pub errors: u64,
        /// Sectors read and compared.
        pub compared: u64,
        /// Attempts to connect.
        pub connects: u64,
        /// Attempts to connect that a server refused.
        pub refusals: u64,
        /// Completed handshakes.
        pub handshakes: u64,
        /// Ring operations that were cut short.
        pub cuts: u64,
        /// Ring operations that failed.
        pub failed: u64,
        /// Sends that found a full socket.
        pub full: u64,
        /// Failures that end a connection.
        pub lost: u64,
        /// Cancelled operations.
        pub called_off: u64,
        /// Requests that servers answered with an error.
        pub refused: u64,
        /// Invalid replies of servers.
        pub violations: u64,
        /// Replies that servers sent twice.
        pub twice: u64,
        /// Replies that servers sent in another order than the requests.
        pub reordered: u64,
        /// Abandoned connections on which writes were answered later.
        pub late: u64,
        /// Requests that hung.
        pub hangs: u64,
        /// Requests that were executed after their client had disconnected.
        pub landed: u64,
        /// Connections that servers closed in the middle of a reply.
        pub closed: u64,
        /// Servers that were stopped.
        pub stopped: u64,
        /// Servers that were cut off from the network.
        pub unreachable: u64,
        /// Servers that refused connections.
        pub refusing: u64,
        /// Servers that did not send a greeting.
        pub silent: u64,
        /// Servers that returned with another export.
        pub others: u64,
        /// Servers that failed again within a second.
        pub flaps: u64,
        /// Servers that were killed.
        pub killed: u64,
        /// Failed paths.
        pub failures: u64,
        /// Paths that were reinstated by message.
        pub messages: u64,
        /// Successful fence commands.
        pub fenced: u64,
        /// Log lines about writes that waited.
        pub waited: u64,
        /// Power cuts.
        pub crashes: u64,
        /// Quiescences of the whole world with an inspection.
        pub rests: u64,
        /// Log lines of udm.
        pub lines: u64,
        /// Maximum memory of udm in bytes, without the memory of requests.
        pub memory: MaxOverRuns,
        /// Simulated time in ns.
        pub simulated: u64,
        /// The hash of all events.
        pub hash: CombinedRunHash,
    }
}

impl NbdClientCounts {
    /// The report of the runs.
    #[must_use]
    pub fn report(&self) -> RunReport {
        let requests = self.requests.iter().sum::<u64>();
        let trouble = [
            ("cut short", DisturbanceClass::Cuts, self.cuts),
            ("failed in the network", DisturbanceClass::Lost, self.failed),
            ("refused connections", DisturbanceClass::Paths, self.refusals),
            ("errors", DisturbanceClass::Errors, self.refused),
            ("violations", DisturbanceClass::Nonsense, self.violations),
            ("answered twice", DisturbanceClass::Nonsense, self.twice),
            ("reordered", DisturbanceClass::Hang, self.reordered),
            ("answered late", DisturbanceClass::Stalls, self.late),
            ("hangs", DisturbanceClass::Hang, self.hangs),
            ("done too late", DisturbanceClass::Late, self.landed),
            ("connections closed", DisturbanceClass::Lost, self.closed),
            ("servers stopped", DisturbanceClass::Stalls, self.stopped),
            ("cut off", DisturbanceClass::Stalls, self.unreachable),
            ("refusing", DisturbanceClass::Paths, self.refusing),
            ("silent", DisturbanceClass::Paths, self.silent),
            ("changed", DisturbanceClass::Limits, self.others),
            ("flapped", DisturbanceClass::Paths, self.flaps),
            ("killed", DisturbanceClass::Paths, self.killed),
            ("paths failed", DisturbanceClass::Paths, self.failures),
            ("messages", DisturbanceClass::Messages, self.messages),
            ("servers fenced", DisturbanceClass::Stalls, self.fenced),
            ("writes that waited", DisturbanceClass::Stalls, self.waited),
            ("crashes", DisturbanceClass::Crash, self.crashes),
        ];
        RunReport {
            steps: self.steps,
            requests,
            simulated: self.simulated,
            nothing: match (requests, self.compared) {
                (0, _) => Some("no request came back"),
                (_, 0) => Some("no sector was read and compared"),
                _ => None,
            },
            disturbances: collect_disturbances(trouble),
            coverage: format!(
                "requests: {}; {} of them with an error\ntrouble: {}\nchecked: {} sectors read, {} attempts to connect and {} handshakes, {} full sockets, {} cancelled operations, {} rests, {} lines of the log; {} KiB of memory at the most\n",
                format_counts(Op::ALL.iter().map(|op| (op_name(*op), self.requests[*op as usize]))),
                format_count(self.errors),
                format_disturbance_counts(trouble),
                format_count(self.compared),
                format_count(self.connects),
                format_count(self.handshakes),
                format_count(self.full),
                format_count(self.called_off),
                format_count(self.rests),
                format_count(self.lines),
                format_count(self.memory.0 >> 10)
            ),
        }
    }
}
