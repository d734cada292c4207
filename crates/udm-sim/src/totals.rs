//! What runs did: the coverage that a verdict stands on.

use crate::counts::{count, counts, format_disturbance_counts, list, uncovered};
use crate::environment::EnvCounters;
use crate::plan::{Disturbance, ExcludedDisturbances};
use crate::snapshots::SnapshotCounts;
use crate::tables::{LineKind, PassThrough};
use udm_core::Op;

/// The targets that worlds are made of, by their names in tables.
pub const TARGETS: [&str; 9] =
    ["multipath", "linear", "striped", "zero", "error", "delay", "flakey", "dust", "log-writes"];

counts! {
    /// What one run did, or several.
    pub struct RunTotals {
        /// Steps taken.
        pub steps: u64,
        /// Requests that came back and were checked, by [`Op`].
        pub requests: [u64; Op::ALL.len()],
        /// Simulated time in ns.
        pub simulated: u64,
        /// Sectors compared with the model.
        pub sectors: u64,
        /// Writes and flushes that disks have begun or ended.
        pub changes: u64,
        /// Requests that disks and paths failed.
        pub faults: u64,
        /// Paths lost.
        pub losses: u64,
        /// Power failures.
        pub crashes: u64,
        /// Tables swapped under load.
        pub reloads: u64,
        /// Changes of the settings of queues.
        pub queue_changes: u64,
        /// Worlds in which disks share their tags.
        pub shared_tags: u64,
        /// Disks that keep what they hold as null devices with a cache do.
        pub null_caches: u64,
        /// Mapped devices with queues of their own.
        pub own_queues: u64,
        /// Suspends.
        pub suspends: u64,
        /// Suspends of several devices at once.
        pub together: u64,
        /// Resumes of several devices at once.
        pub resumed_together: u64,
        /// Times that nothing failed, and all requests ended while others went on coming.
        pub crowds: u64,
        /// Times that a core acted in the middle of another's turn.
        pub between: u64,
        /// Suspends and resumes called off.
        pub cancels: u64,
        /// Messages.
        pub messages: u64,
        /// Paths that a checker reinstated.
        pub reinstated: u64,
        /// Paths that a checker failed.
        pub checked_out: u64,
        /// Times that all came to rest and was looked at.
        pub rests: u64,
        /// Looks at a log of writes.
        pub logs: u64,
        /// Times that all came to rest but what needed storage that hung.
        pub hung_rests: u64,
        /// Resumes that were refused, since a lane could not be opened.
        pub refused: u64,
        /// Changes of what a disk can take.
        pub limits: u64,
        /// Devices that grew.
        pub grown: u64,
        /// Messages about bad blocks.
        pub dust: u64,
        /// Loads of multipath over mapped devices, and of tables that lose or change data.
        pub stacks: u64,
        /// See there.
        pub lossy: u64,
        /// Hedges that watched paths had, as seen at rests.
        pub hedges: u64,
        /// Times that a slow path was put out of use, as seen at rests.
        pub ejections: u64,
        /// Times that a path was slow, and one that was put out of use came back.
        pub slow_paths: u64,
        /// See there.
        pub admitted: u64,
        /// What the outside counted.
        pub seen: EnvCounters,
        /// What was done in worlds of snapshots.
        pub snap: SnapshotCounts,
        /// Lines of tables that were in use, by [`TARGETS`].
        pub targets: [u64; TARGETS.len()],
    }
}

/// The trouble that worlds of snapshots have as well.
const COMMON: [&str; 7] =
    ["faults", "paths lost", "hangs", "full lanes", "handed back", "done at once", "turns inside turns"];

impl RunTotals {
    /// A line of a table is in use.
    pub fn see(&mut self, kind: &LineKind) {
        self.stacks += u64::from(matches!(kind, LineKind::Multipath { via, .. } if !via.is_empty()));
        let flaw = match kind {
            LineKind::PassThrough(PassThrough::Flakey(_, _, flaw), ..) => Some(flaw),
            _ => None,
        };
        self.lossy += u64::from(flaw.is_some_and(|f| f.is_lossy()));
        let name = match kind {
            LineKind::Multipath { .. } => "multipath",
            LineKind::Linear(..) => "linear",
            LineKind::Striped { .. } => "striped",
            LineKind::Zero => "zero",
            LineKind::Error => "error",
            LineKind::PassThrough(PassThrough::Delay(..), ..) => "delay",
            LineKind::PassThrough(PassThrough::Flakey(..), ..) => "flakey",
            LineKind::PassThrough(PassThrough::Dust(..), ..) => "dust",
            LineKind::PassThrough(PassThrough::LogWrites(..), ..) => "log-writes",
        };
        if let Some(at) = TARGETS.iter().position(|t| *t == name) {
            self.targets[at] += 1;
        }
    }

    /// Requests of every kind.
    #[must_use]
    pub fn all_requests(&self) -> u64 {
        self.requests.iter().sum()
    }

    /// Why these runs say nothing about what they ran: they did nothing, or compared nothing, or
    /// had no snapshot where it was for `snapshots`.
    #[must_use]
    pub fn nothing(&self, snapshots: bool) -> Option<&'static str> {
        match (self.all_requests(), self.sectors, self.snap.made) {
            (0, ..) => Some("no request came back"),
            (_, 0, _) => Some("no sector was read and compared"),
            (_, _, 0) if snapshots => Some("no snapshot was made"),
            _ => None,
        }
    }

    /// The kinds of trouble, the class that makes each, and how often it came.
    fn trouble(&self) -> [(&'static str, Disturbance, u64); 28] {
        [
            ("faults", Disturbance::Errors, self.faults),
            ("paths lost", Disturbance::Paths, self.losses),
            ("crashes", Disturbance::Crash, self.crashes),
            ("suspends", Disturbance::Suspend, self.suspends),
            ("suspends together", Disturbance::Suspend, self.together),
            ("resumes together", Disturbance::Reload, self.resumed_together),
            ("reloads", Disturbance::Reload, self.reloads),
            ("queues changed", Disturbance::Queues, self.queue_changes),
            ("queues of devices", Disturbance::Queues, self.own_queues),
            ("called off", Disturbance::Cancel, self.cancels),
            ("messages", Disturbance::Messages, self.messages),
            ("hangs", Disturbance::Hang, self.seen.hangs),
            ("full lanes", Disturbance::Full, self.seen.full),
            ("handed back", Disturbance::Full, self.seen.handed_back),
            ("done at once", Disturbance::Prompt, self.seen.prompt),
            ("opens failed", Disturbance::Opens, self.seen.refused),
            ("resumes refused", Disturbance::Opens, self.refused),
            ("limits changed", Disturbance::Limits, self.limits),
            ("devices grown", Disturbance::Limits, self.grown),
            ("multipath over devices", Disturbance::Stacks, self.stacks),
            ("bad blocks", Disturbance::Dust, self.dust),
            ("lossy tables", Disturbance::Lossy, self.lossy),
            ("hedges", Disturbance::Watch, self.hedges),
            ("paths put out", Disturbance::Watch, self.ejections),
            ("slow paths", Disturbance::Watch, self.slow_paths),
            ("paths back from probation", Disturbance::Watch, self.admitted),
            ("turns inside turns", Disturbance::Between, self.between),
            ("late writes", Disturbance::Late, self.seen.landed),
        ]
    }

    /// What was not left out and never came all the same: the runs were too short for it.
    #[must_use]
    pub fn uncovered(&self, without: ExcludedDisturbances, snapshots: bool) -> Vec<&'static str> {
        let there = |class| class != Disturbance::Between || cfg!(feature = "interleave");
        let all = self.trouble().into_iter().filter(|(_, class, _)| there(*class));
        if snapshots {
            let common = all.filter(|(name, ..)| COMMON.contains(name));
            return uncovered(common, without).into_iter().chain(self.snap.uncovered(without)).collect();
        }
        uncovered(all, without)
    }

    /// What was covered, for a person: requests by operation, disturbances, targets. One line each.
    #[must_use]
    pub fn coverage(&self, snapshots: bool) -> String {
        let ops = Op::ALL.iter().map(|op| (crate::trace::op_name(*op), self.requests[*op as usize]));
        if snapshots {
            let trouble = self.trouble().into_iter().filter(|(name, ..)| COMMON.contains(name));
            return format!(
                "requests: {}\ntrouble: {}\nsnapshots: {}\nchecked: {} sectors read, {} rests, {} crowds\n",
                list(ops),
                format_disturbance_counts(trouble),
                self.snap.coverage(),
                count(self.sectors),
                count(self.rests),
                count(self.crowds)
            );
        }
        let seen = TARGETS.into_iter().zip(self.targets).filter(|(_, n)| *n > 0);
        format!(
            "requests: {}\ntrouble: {}\ntargets: {}\nchecked: {} sectors read, {} rests, {} of them beside what hung, {} crowds, {} logs, {} paths back, {} out by a check\n",
            list(ops),
            format_disturbance_counts(self.trouble()),
            list(seen),
            count(self.sectors),
            count(self.rests),
            count(self.hung_rests),
            count(self.crowds),
            count(self.logs),
            count(self.reinstated),
            count(self.checked_out)
        )
    }
}
