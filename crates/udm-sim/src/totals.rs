//! Counters of runs, as the coverage for the verdict.

use crate::counts::{
    RunReport, collect_disturbances, counts, format_count, format_counts, format_disturbance_counts,
};
use crate::environment::EnvCounters;
use crate::plan::DisturbanceClass;
use crate::snapshots::SnapshotCounts;
use crate::tables::{PassThroughTarget, TableLineTarget};
use udm_core::Op;

/// The targets of worlds, by their names in tables.
pub const TARGETS: [&str; 9] =
    ["multipath", "linear", "striped", "zero", "error", "delay", "flakey", "dust", "log-writes"];

counts! {
    /// Counters of one or several runs.
    pub struct RunTotals {
        /// True for runs of worlds of snapshots.
        pub snapshots: bool,
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
        /// Paths that failed because of requests.
        pub losses: u64,
        /// Power cuts.
        pub crashes: u64,
        /// Tables swapped under load.
        pub reloads: u64,
        /// Changes of queue settings.
        pub queue_changes: u64,
        /// Worlds in which disks share tags.
        pub shared_tags: u64,
        /// Disks in the memory and cache of a null device.
        pub null_caches: u64,
        /// Mapped devices with queues of their own.
        pub own_queues: u64,
        /// Changes of the limits of requests and bytes per second of devices.
        pub throttles: u64,
        /// Suspended devices.
        pub suspends: u64,
        /// Suspends of several devices together.
        pub together: u64,
        /// Resumes of several devices together.
        pub resumed_together: u64,
        /// Periods without faults in which all requests completed under constant load.
        pub crowds: u64,
        /// Preemptions of a core's turn by another core.
        pub between: u64,
        /// Cancelled suspends and resumes.
        pub cancels: u64,
        /// Messages.
        pub messages: u64,
        /// Paths that a checker reinstated.
        pub reinstated: u64,
        /// Paths that a checker failed.
        pub checked_out: u64,
        /// Quiescences of the whole world with an inspection.
        pub rests: u64,
        /// Checks of a write log.
        pub logs: u64,
        /// Quiescences of all work that does not need a disk that hangs.
        pub hung_rests: u64,
        /// Resumes that were refused because a lane could not be opened.
        pub refused: u64,
        /// Changes of disk limits.
        pub limits: u64,
        /// Devices that grew.
        pub grown: u64,
        /// Messages about bad blocks.
        pub dust: u64,
        /// Lines with multipath over mapped devices.
        pub stacks: u64,
        /// Lines with a target that loses or changes data.
        pub lossy: u64,
        /// Hedges, as counted at quiescence.
        pub hedges: u64,
        /// Ejections of slow paths, as counted at quiescence.
        pub ejections: u64,
        /// Tests with a slow path.
        pub slow_paths: u64,
        /// Ejected paths that returned.
        pub admitted: u64,
        /// Counters of the environment.
        pub seen: EnvCounters,
        /// Counters of worlds of snapshots.
        pub snap: SnapshotCounts,
        /// Lines of live tables, by [`TARGETS`].
        pub targets: [u64; TARGETS.len()],
    }
}

/// Disturbances that also occur in worlds of snapshots.
const COMMON: [&str; 7] =
    ["faults", "paths lost", "hangs", "full lanes", "handed back", "done at once", "turns inside turns"];

impl RunTotals {
    /// Counts a line of a table that became live.
    pub fn see(&mut self, kind: &TableLineTarget) {
        self.stacks += u64::from(matches!(kind, TableLineTarget::Multipath { via, .. } if !via.is_empty()));
        let flaw = match kind {
            TableLineTarget::PassThrough(PassThroughTarget::Flakey(_, _, flaw), ..) => Some(flaw),
            _ => None,
        };
        self.lossy += u64::from(flaw.is_some_and(|f| f.is_lossy()));
        let name = match kind {
            TableLineTarget::Multipath { .. } => "multipath",
            TableLineTarget::Linear(..) => "linear",
            TableLineTarget::Striped { .. } => "striped",
            TableLineTarget::Zero => "zero",
            TableLineTarget::Error => "error",
            TableLineTarget::PassThrough(PassThroughTarget::Delay(..), ..) => "delay",
            TableLineTarget::PassThrough(PassThroughTarget::Flakey(..), ..) => "flakey",
            TableLineTarget::PassThrough(PassThroughTarget::Dust(..), ..) => "dust",
            TableLineTarget::PassThrough(PassThroughTarget::LogWrites(..), ..) => "log-writes",
        };
        if let Some(at) = TARGETS.iter().position(|t| *t == name) {
            self.targets[at] += 1;
        }
    }

    /// All disturbances with their class and count.
    fn trouble(&self) -> [(&'static str, DisturbanceClass, u64); 29] {
        [
            ("faults", DisturbanceClass::Errors, self.faults),
            ("paths lost", DisturbanceClass::Paths, self.losses),
            ("crashes", DisturbanceClass::Crash, self.crashes),
            ("suspends", DisturbanceClass::Suspend, self.suspends),
            ("suspends together", DisturbanceClass::Suspend, self.together),
            ("resumes together", DisturbanceClass::Reload, self.resumed_together),
            ("reloads", DisturbanceClass::Reload, self.reloads),
            ("queues changed", DisturbanceClass::Queues, self.queue_changes),
            ("queues of devices", DisturbanceClass::Queues, self.own_queues),
            ("throttles changed", DisturbanceClass::Throttles, self.throttles),
            ("cancelled", DisturbanceClass::Cancel, self.cancels),
            ("messages", DisturbanceClass::Messages, self.messages),
            ("hangs", DisturbanceClass::Hang, self.seen.hangs),
            ("full lanes", DisturbanceClass::Full, self.seen.full),
            ("handed back", DisturbanceClass::Full, self.seen.handed_back),
            ("done at once", DisturbanceClass::Prompt, self.seen.prompt),
            ("opens failed", DisturbanceClass::Opens, self.seen.refused),
            ("resumes refused", DisturbanceClass::Opens, self.refused),
            ("limits changed", DisturbanceClass::Limits, self.limits),
            ("devices grown", DisturbanceClass::Limits, self.grown),
            ("multipath over devices", DisturbanceClass::Stacks, self.stacks),
            ("bad blocks", DisturbanceClass::Dust, self.dust),
            ("lossy tables", DisturbanceClass::Lossy, self.lossy),
            ("hedges", DisturbanceClass::Watch, self.hedges),
            ("paths put out", DisturbanceClass::Watch, self.ejections),
            ("slow paths", DisturbanceClass::Watch, self.slow_paths),
            ("paths back from probation", DisturbanceClass::Watch, self.admitted),
            ("turns inside turns", DisturbanceClass::Between, self.between),
            ("late writes", DisturbanceClass::Late, self.seen.landed),
        ]
    }

    /// The report of the runs. Those of worlds of snapshots have other disturbances.
    #[must_use]
    pub fn report(&self) -> RunReport {
        let requests = self.requests.iter().sum::<u64>();
        let nothing = match (requests, self.sectors, self.snap.made) {
            (0, ..) => Some("no request came back"),
            (_, 0, _) => Some("no sector was read and compared"),
            (_, _, 0) if self.snapshots => Some("no snapshot was made"),
            _ => None,
        };
        let of_kind = |name: &str| !self.snapshots || COMMON.contains(&name);
        let trouble = || self.trouble().into_iter().filter(|(name, ..)| of_kind(name));
        let there = |class| class != DisturbanceClass::Between || cfg!(feature = "interleave");
        let mut disturbances = collect_disturbances(trouble().filter(|(_, class, _)| there(*class)));
        if self.snapshots {
            disturbances.extend(self.snap.all());
        }
        let ops = Op::ALL.iter().map(|op| (crate::trace::op_name(*op), self.requests[*op as usize]));
        let common =
            format!("requests: {}\ntrouble: {}\n", format_counts(ops), format_disturbance_counts(trouble()));
        let coverage = match self.snapshots {
            true => format!(
                "{common}snapshots: {}\nchecked: {} sectors read, {} rests, {} crowds\n",
                format_disturbance_counts(self.snap.all()),
                format_count(self.sectors),
                format_count(self.rests),
                format_count(self.crowds)
            ),
            false => format!(
                "{common}targets: {}\nchecked: {} sectors read, {} rests, {} of them with a disk that hung, {} crowds, {} logs, {} paths back, {} out by a check\n",
                format_counts(TARGETS.into_iter().zip(self.targets).filter(|(_, n)| *n > 0)),
                format_count(self.sectors),
                format_count(self.rests),
                format_count(self.hung_rests),
                format_count(self.crowds),
                format_count(self.logs),
                format_count(self.reinstated),
                format_count(self.checked_out)
            ),
        };
        RunReport { steps: self.steps, requests, simulated: self.simulated, nothing, disturbances, coverage }
    }
}
