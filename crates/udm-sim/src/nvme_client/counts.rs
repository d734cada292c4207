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
    pub struct NvmeClientCounts {
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
        /// Attempts to connect that a target refused.
        pub refusals: u64,
        /// Controllers that were created.
        pub associations: u64,
        /// I/O queues that a target refused.
        pub refused_queues: u64,
        /// Ring operations that were cut short.
        pub cuts: u64,
        /// Ring operations that failed.
        pub failed: u64,
        /// Failures that end a connection.
        pub lost: u64,
        /// Commands without an answer for a while, and Keep Alives without one.
        pub hangs: u64,
        /// Commands that were answered with an error.
        pub refused: u64,
        /// Writes that were refused before their data came.
        pub early: u64,
        /// Parts of writes that targets asked for.
        pub transfers: u64,
        /// Violations of the protocol.
        pub violations: u64,
        /// Bits that were flipped on the way to or from udm's own target.
        pub flipped: u64,
        /// Connections that a target closed.
        pub closed: u64,
        /// Controllers that their keep-alive timer ended.
        pub expired: u64,
        /// Writes that landed after the end of their controller or connection.
        pub landed: u64,
        /// Lost controllers that another controller has reset while writes waited.
        pub resets: u64,
        /// Resets that a model target has reported as successful.
        pub model_resets: u64,
        /// Resets that were refused or failed.
        pub refused_resets: u64,
        /// Reports of writes that wait, or waited.
        pub waited: u64,
        /// Targets that were stopped.
        pub stopped: u64,
        /// Targets that were cut off.
        pub unreachable: u64,
        /// Targets of which nothing was delivered.
        pub one_way: u64,
        /// Targets that refused connections.
        pub refusing: u64,
        /// Targets that accepted connections and were silent.
        pub silent: u64,
        /// Targets that returned with another namespace.
        pub others: u64,
        /// Targets that were killed.
        pub killed: u64,
        /// Power cuts.
        pub crashes: u64,
        /// Changes of ANA states.
        pub ana: u64,
        /// Commands that were refused because of an ANA state.
        pub inaccessible: u64,
        /// Namespaces that grew.
        pub grown: u64,
        /// Events that were reported.
        pub events: u64,
        /// Paths that were reinstated by message.
        pub messages: u64,
        /// Times at which all trouble ended.
        pub rests: u64,
        /// Lines of the log.
        pub lines: u64,
        /// Memory of udm in bytes, at most.
        pub memory: MaxOverRuns,
        /// Simulated time in ns.
        pub simulated: u64,
        /// The hash of all events.
        pub hash: CombinedRunHash,
    }
}

impl NvmeClientCounts {
    /// The report of the runs.
    #[must_use]
    pub fn report(&self) -> RunReport {
        use DisturbanceClass as Class;
        let trouble = [
            ("operations cut short", Class::Cuts, self.cuts),
            ("operations failed", Class::Lost, self.failed),
            ("connections closed by a target", Class::Lost, self.closed),
            ("hangs", Class::Hang, self.hangs),
            ("errors", Class::Errors, self.refused),
            ("writes refused early", Class::Errors, self.early),
            ("queues refused", Class::Errors, self.refused_queues),
            ("violations", Class::Nonsense, self.violations),
            ("flipped bits", Class::Nonsense, self.flipped),
            ("timers expired", Class::Stalls, self.expired),
            ("late writes", Class::Late, self.landed),
            ("writes that waited", Class::Stalls, self.waited),
            ("controllers reset", Class::Stalls, self.resets),
            ("resets by a model target", Class::Stalls, self.model_resets),
            ("resets refused", Class::Stalls, self.refused_resets),
            ("targets stopped", Class::Stalls, self.stopped),
            ("targets cut off", Class::Stalls, self.unreachable),
            ("targets whose answers were cut off", Class::Stalls, self.one_way),
            ("targets that refuse", Class::Paths, self.refusing),
            ("silent targets", Class::Paths, self.silent),
            ("other namespaces", Class::Limits, self.others),
            ("namespaces grown", Class::Limits, self.grown),
            ("targets killed", Class::Paths, self.killed),
            ("power cuts", Class::Crash, self.crashes),
            ("ANA changes", Class::Paths, self.ana),
            ("refused because of an ANA state", Class::Paths, self.inaccessible),
            ("events", Class::Paths, self.events),
            ("messages", Class::Messages, self.messages),
        ];
        let requests: u64 = self.requests.iter().sum();
        let by_op = format_counts(Op::ALL.iter().map(|op| (op_name(*op), self.requests[*op as usize])));
        RunReport {
            steps: self.steps,
            requests,
            simulated: self.simulated,
            nothing: match (requests, self.compared) {
                (0, _) => Some("no request completed"),
                (_, 0) => Some("no data was read and compared"),
                _ => None,
            },
            coverage: format!(
                "requests: {by_op}; {} of them with an error\ntrouble: {}\nchecked: {} sectors read, {} attempts to connect and {} controllers, {} parts of writes, {} rests, {} lines of the log; {} KiB of memory at the most\n",
                format_count(self.errors),
                format_disturbance_counts(trouble),
                format_count(self.compared),
                format_count(self.connects),
                format_count(self.associations),
                format_count(self.transfers),
                format_count(self.rests),
                format_count(self.lines),
                self.memory.0 >> 10
            ),
            disturbances: collect_disturbances(trouble),
        }
    }
}
