//! What runs covered.

use crate::counts::{Maximum, RunHash, count, counts, format_disturbance_counts, list, uncovered};
use crate::plan::{Disturbance, ExcludedDisturbances};
use crate::trace::op_name;
use udm_core::Op;

counts! {
    /// What a run did, or several.
    pub struct NbdClientCounts {
        /// Steps taken.
        pub steps: u64,
        /// Requests that came back and were checked, by operation; with an error.
        pub requests: [u64; 5],
        /// See there.
        pub errors: u64,
        /// Sectors read and compared.
        pub compared: u64,
        /// Attempts to connect; those that servers refused; handshakes that came to their end.
        pub connects: u64,
        /// See there.
        pub refusals: u64,
        /// See there.
        pub handshakes: u64,
        /// Operations of the ring that were cut short, that failed, and sends that found no room.
        pub cuts: u64,
        /// See there.
        pub failed: u64,
        /// See there.
        pub full: u64,
        /// Of those that failed, what ends a connection.
        pub lost: u64,
        /// Operations called off.
        pub called_off: u64,
        /// Requests that servers answered with an error, with a lie (one answered before, once
        /// more), in another order than they came; connections that were given up with writes of
        /// which some were answered then; requests that took too long, and that were done when
        /// their client was gone.
        pub refused: u64,
        /// See there.
        pub lies: u64,
        /// See there.
        pub twice: u64,
        /// See there.
        pub reordered: u64,
        /// See there.
        pub late: u64,
        /// See there.
        pub hangs: u64,
        /// See there.
        pub landed: u64,
        /// Connections that servers closed in the middle of something.
        pub closed: u64,
        /// Servers that were stopped, cut off, that refused, said nothing, came back as another,
        /// went again within a second, or were killed.
        pub stopped: u64,
        /// See there.
        pub holes: u64,
        /// See there.
        pub deaf: u64,
        /// See there.
        pub mute: u64,
        /// See there.
        pub others: u64,
        /// See there.
        pub flaps: u64,
        /// See there.
        pub killed: u64,
        /// Paths that failed, and reinstated by message.
        pub failures: u64,
        /// See there.
        pub messages: u64,
        /// Commands that fenced a server, and lines that tell of writes that waited.
        pub fenced: u64,
        /// See there.
        pub waited: u64,
        /// Power cuts.
        pub crashes: u64,
        /// Times that all came to rest and was looked at.
        pub rests: u64,
        /// Lines that udm logged.
        pub lines: u64,
        /// The most memory in bytes that udm had beside that of requests.
        pub memory: Maximum,
        /// Simulated time in ns.
        pub simulated: u64,
        /// The hash of all events.
        pub hash: RunHash,
    }
}

impl NbdClientCounts {
    /// Requests of every kind.
    #[must_use]
    pub fn all_requests(&self) -> u64 {
        self.requests.iter().sum()
    }

    /// Why these runs say nothing about what they ran: they did nothing, or compared nothing.
    #[must_use]
    pub fn nothing(&self) -> Option<&'static str> {
        match (self.all_requests(), self.compared) {
            (0, _) => Some("no request came back"),
            (_, 0) => Some("no sector was read and compared"),
            _ => None,
        }
    }

    /// The kinds of trouble, the class that makes each, and how often it came.
    fn trouble(&self) -> [(&'static str, Disturbance, u64); 23] {
        [
            ("cut short", Disturbance::Cuts, self.cuts),
            ("failed in the network", Disturbance::Lost, self.failed),
            ("refused connections", Disturbance::Paths, self.refusals),
            ("errors", Disturbance::Errors, self.refused),
            ("lies", Disturbance::Nonsense, self.lies),
            ("answered twice", Disturbance::Nonsense, self.twice),
            ("reordered", Disturbance::Hang, self.reordered),
            ("answered late", Disturbance::Stalls, self.late),
            ("hangs", Disturbance::Hang, self.hangs),
            ("done too late", Disturbance::Late, self.landed),
            ("connections closed", Disturbance::Lost, self.closed),
            ("servers stopped", Disturbance::Stalls, self.stopped),
            ("cut off", Disturbance::Stalls, self.holes),
            ("deaf", Disturbance::Paths, self.deaf),
            ("mute", Disturbance::Paths, self.mute),
            ("changed", Disturbance::Limits, self.others),
            ("flapped", Disturbance::Paths, self.flaps),
            ("killed", Disturbance::Paths, self.killed),
            ("paths failed", Disturbance::Paths, self.failures),
            ("messages", Disturbance::Messages, self.messages),
            ("servers fenced", Disturbance::Stalls, self.fenced),
            ("writes that waited", Disturbance::Stalls, self.waited),
            ("crashes", Disturbance::Crash, self.crashes),
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
            "requests: {}; {} of them with an error\ntrouble: {}\nchecked: {} sectors read, {} attempts to connect and {} handshakes, {} full sockets, {} operations called off, {} rests, {} lines of the log; {} KiB of memory at the most\n",
            list(Op::ALL.iter().map(|op| (op_name(*op), self.requests[*op as usize]))),
            count(self.errors),
            format_disturbance_counts(self.trouble()),
            count(self.compared),
            count(self.connects),
            count(self.handshakes),
            count(self.full),
            count(self.called_off),
            count(self.rests),
            count(self.lines),
            count(self.memory.0 >> 10)
        )
    }
}
