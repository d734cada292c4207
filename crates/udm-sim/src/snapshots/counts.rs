//! What runs of snapshot worlds were worth.

use crate::counts::{counts, format_disturbance_counts, uncovered};
use crate::plan::{Disturbance, ExcludedDisturbances};

counts! {
    /// See the module. Where not said otherwise, how often it happened.
    pub struct SnapshotCounts {
        /// Snapshots that became live.
        pub made: u64,
        /// In changes of several.
        pub grouped: u64,
        /// Of snapshots.
        pub stacked: u64,
        /// While their origin was merged.
        pub amid: u64,
        /// Snapshots that took over from a table before.
        pub reloaded: u64,
        /// Snapshots removed while they were live.
        pub removed: u64,
        /// Suspends that ended.
        pub suspends: u64,
        /// Changes that were called off.
        pub cancels: u64,
        /// Merges begun.
        pub merges: u64,
        /// And ended.
        pub merged: u64,
        /// Snapshots that became invalid.
        pub invalid: u64,
        /// Stores that said that they are full.
        pub overflowed: u64,
        /// Writes that failed, since a store was full.
        pub refused: u64,
        /// Stores that grew, as what waited for room needed.
        pub grown: u64,
        /// Stores that were marked elsewhere.
        pub marked: u64,
        /// Steps by which stores grew by themselves.
        pub grew: u64,
        /// Discards of snapshots that ended well.
        pub discards: u64,
        /// Of those, such that went on to the origin.
        pub passed_down: u64,
        /// Power cuts.
        pub cuts: u64,
        /// While something was merged.
        pub cut_merges: u64,
        /// While snapshots of one change were live, or becoming so.
        pub cut_groups: u64,
        /// Snapshots that a power cut left, valid.
        pub survived: u64,
        /// Maps of what has changed that were compared.
        pub maps: u64,
        /// Worlds with blocks of 4 KiB.
        pub blocks: u64,
    }
}

impl SnapshotCounts {
    /// What must come in many runs, and the class that brings it.
    fn all(&self) -> [(&'static str, Option<Disturbance>, u64); 24] {
        [
            ("made", None, self.made),
            ("made together", None, self.grouped),
            ("of snapshots", Some(Disturbance::Stacks), self.stacked),
            ("made amid a merge", Some(Disturbance::Merge), self.amid),
            ("reloaded", Some(Disturbance::Reload), self.reloaded),
            ("removed", Some(Disturbance::Remove), self.removed),
            ("suspends", Some(Disturbance::Suspend), self.suspends),
            ("called off", Some(Disturbance::Cancel), self.cancels),
            ("merges", Some(Disturbance::Merge), self.merges),
            ("merged", Some(Disturbance::Merge), self.merged),
            ("invalid", Some(Disturbance::Small), self.invalid),
            ("overflowed", Some(Disturbance::Small), self.overflowed),
            ("writes without room", Some(Disturbance::Small), self.refused),
            ("grown", Some(Disturbance::Small), self.grown),
            ("marked", Some(Disturbance::Errors), self.marked),
            ("grown by themselves", Some(Disturbance::Small), self.grew),
            ("discards", Some(Disturbance::Trim), self.discards),
            ("passed down", Some(Disturbance::Trim), self.passed_down),
            ("cuts", Some(Disturbance::Crash), self.cuts),
            ("amid a merge", Some(Disturbance::Crash), self.cut_merges),
            ("with groups", Some(Disturbance::Crash), self.cut_groups),
            ("survived", Some(Disturbance::Crash), self.survived),
            ("maps", None, self.maps),
            ("4 KiB blocks", Some(Disturbance::Limits), self.blocks),
        ]
    }

    /// What was not left out and never came all the same.
    #[must_use]
    pub fn uncovered(&self, without: ExcludedDisturbances) -> Vec<&'static str> {
        uncovered(self.all(), without)
    }

    /// What was covered, for a person.
    #[must_use]
    pub fn coverage(&self) -> String {
        format_disturbance_counts(self.all())
    }
}
