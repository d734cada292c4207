//! What runs did: the coverage that a verdict stands on.

use crate::counts::{count, counts, list, list_trouble, missed};
use crate::env::Seen;
use crate::plan::{Class, Without};
use crate::snap::Counts;
use crate::tables::{Kind, Through};
use udm_core::Op;

/// The targets that worlds are made of, by their names in tables.
pub const TARGETS: [&str; 9] =
    ["multipath", "linear", "striped", "zero", "error", "delay", "flakey", "dust", "log-writes"];

counts! {
    /// What one run did, or several.
    pub struct Totals {
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
        pub seen: Seen,
        /// What was done in worlds of snapshots.
        pub snap: Counts,
        /// Lines of tables that were in use, by [`TARGETS`].
        pub targets: [u64; TARGETS.len()],
    }
}

/// The trouble that worlds of snapshots have as well.
const COMMON: [&str; 7] =
    ["faults", "paths lost", "hangs", "full lanes", "handed back", "done at once", "turns inside turns"];

impl Totals {
    /// A line of a table is in use.
    pub fn see(&mut self, kind: &Kind) {
        self.stacks += u64::from(matches!(kind, Kind::Multipath { via, .. } if !via.is_empty()));
        let flaw = match kind {
            Kind::Through(Through::Flakey(_, _, flaw), ..) => Some(flaw),
            _ => None,
        };
        self.lossy += u64::from(flaw.is_some_and(|f| f.is_lossy()));
        let name = match kind {
            Kind::Multipath { .. } => "multipath",
            Kind::Linear(..) => "linear",
            Kind::Striped { .. } => "striped",
            Kind::Zero => "zero",
            Kind::Error => "error",
            Kind::Through(Through::Delay(..), ..) => "delay",
            Kind::Through(Through::Flakey(..), ..) => "flakey",
            Kind::Through(Through::Dust(..), ..) => "dust",
            Kind::Through(Through::LogWrites(..), ..) => "log-writes",
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
    fn trouble(&self) -> [(&'static str, Class, u64); 28] {
        [
            ("faults", Class::Errors, self.faults),
            ("paths lost", Class::Paths, self.losses),
            ("crashes", Class::Crash, self.crashes),
            ("suspends", Class::Suspend, self.suspends),
            ("suspends together", Class::Suspend, self.together),
            ("resumes together", Class::Reload, self.resumed_together),
            ("reloads", Class::Reload, self.reloads),
            ("queues changed", Class::Queues, self.queue_changes),
            ("queues of devices", Class::Queues, self.own_queues),
            ("called off", Class::Cancel, self.cancels),
            ("messages", Class::Messages, self.messages),
            ("hangs", Class::Hang, self.seen.hangs),
            ("full lanes", Class::Full, self.seen.full),
            ("handed back", Class::Full, self.seen.handed_back),
            ("done at once", Class::Prompt, self.seen.prompt),
            ("opens failed", Class::Opens, self.seen.refused),
            ("resumes refused", Class::Opens, self.refused),
            ("limits changed", Class::Limits, self.limits),
            ("devices grown", Class::Limits, self.grown),
            ("multipath over devices", Class::Stacks, self.stacks),
            ("bad blocks", Class::Dust, self.dust),
            ("lossy tables", Class::Lossy, self.lossy),
            ("hedges", Class::Watch, self.hedges),
            ("paths put out", Class::Watch, self.ejections),
            ("slow paths", Class::Watch, self.slow_paths),
            ("paths back from probation", Class::Watch, self.admitted),
            ("turns inside turns", Class::Between, self.between),
            ("late writes", Class::Late, self.seen.landed),
        ]
    }

    /// What was not left out and never came all the same: the runs were too short for it.
    #[must_use]
    pub fn missed(&self, without: Without, snapshots: bool) -> Vec<&'static str> {
        let there = |class| class != Class::Between || cfg!(feature = "interleave");
        let all = self.trouble().into_iter().filter(|(_, class, _)| there(*class));
        if snapshots {
            let common = all.filter(|(name, ..)| COMMON.contains(name));
            return missed(common, without).into_iter().chain(self.snap.missed(without)).collect();
        }
        missed(all, without)
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
                list_trouble(trouble),
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
            list_trouble(self.trouble()),
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
