//! Coverage counters of runs of snapshot worlds.

use crate::counts::counts;
use crate::plan::DisturbanceClass;

counts! {
    /// Counters of one or several runs of snapshot worlds.
    pub struct SnapshotCounts {
        /// Snapshots that became live.
        pub made: u64,
        /// Snapshots that became live in a change of several.
        pub grouped: u64,
        /// Snapshots of snapshots.
        pub stacked: u64,
        /// Snapshots that became live while their origin was merged.
        pub amid: u64,
        /// Snapshots taken over by a new table.
        pub reloaded: u64,
        /// Live snapshots that were removed.
        pub removed: u64,
        /// Completed suspends.
        pub suspends: u64,
        /// Cancelled changes.
        pub cancels: u64,
        /// Started merges.
        pub merges: u64,
        /// Completed merges.
        pub merged: u64,
        /// Snapshots that became invalid.
        pub invalid: u64,
        /// Stores that reported an overflow.
        pub overflowed: u64,
        /// Writes that failed because a store was full.
        pub refused: u64,
        /// Stores that the world enlarged for requests that waited for space.
        pub grown: u64,
        /// Marks recorded outside of the store.
        pub marked: u64,
        /// Steps of automatic growth of stores.
        pub grew: u64,
        /// Successful discards of snapshots.
        pub discards: u64,
        /// Successful discards that were passed to the origin.
        pub passed_down: u64,
        /// Power cuts.
        pub cuts: u64,
        /// Power cuts during a merge.
        pub cut_merges: u64,
        /// Power cuts while snapshots of one change were live or becoming live.
        pub cut_groups: u64,
        /// Snapshots that were valid after a power cut.
        pub survived: u64,
        /// Maps of changes that were compared.
        pub maps: u64,
        /// Worlds with blocks of 4 KiB.
        pub blocks: u64,
    }
}

impl SnapshotCounts {
    /// All events that many runs must have, with the class that causes them.
    pub(crate) fn all(&self) -> [(&'static str, Option<DisturbanceClass>, u64); 24] {
        [
            ("made", None, self.made),
            ("made together", None, self.grouped),
            ("of snapshots", Some(DisturbanceClass::Stacks), self.stacked),
            ("made amid a merge", Some(DisturbanceClass::Merge), self.amid),
            ("reloaded", Some(DisturbanceClass::Reload), self.reloaded),
            ("removed", Some(DisturbanceClass::Remove), self.removed),
            ("suspends", Some(DisturbanceClass::Suspend), self.suspends),
            ("cancelled", Some(DisturbanceClass::Cancel), self.cancels),
            ("merges", Some(DisturbanceClass::Merge), self.merges),
            ("merged", Some(DisturbanceClass::Merge), self.merged),
            ("invalid", Some(DisturbanceClass::Small), self.invalid),
            ("overflowed", Some(DisturbanceClass::Small), self.overflowed),
            ("writes without room", Some(DisturbanceClass::Small), self.refused),
            ("grown", Some(DisturbanceClass::Small), self.grown),
            ("marked", Some(DisturbanceClass::Errors), self.marked),
            ("grown by themselves", Some(DisturbanceClass::Small), self.grew),
            ("discards", Some(DisturbanceClass::Trim), self.discards),
            ("passed down", Some(DisturbanceClass::Trim), self.passed_down),
            ("cuts", Some(DisturbanceClass::Crash), self.cuts),
            ("amid a merge", Some(DisturbanceClass::Crash), self.cut_merges),
            ("with groups", Some(DisturbanceClass::Crash), self.cut_groups),
            ("survived", Some(DisturbanceClass::Crash), self.survived),
            ("maps", None, self.maps),
            ("4 KiB blocks", Some(DisturbanceClass::Limits), self.blocks),
        ]
    }
}
