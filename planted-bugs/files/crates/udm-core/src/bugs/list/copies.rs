//! Bugs of clones and mirrors.

macro_rules! copies_bugs {
    ({$($all:tt)*} $($next:ident)*) => {
        collect_bugs! { {
            $($all)*
            /// Bits of a clone are written to its metadata before their data is durable.
            CloneBitBeforeData: Clones,
            /// A write of a part of a region marks it as hydrated without a copy of the rest.
            ClonePartNotCopied: Clones,
            /// A discard marks regions that it covers only in part.
            CloneDiscardRoundsOut: Clones,
            /// A FUA write of a whole region completes before the metadata has its bit.
            CloneFuaNotCommitted: Clones,
            /// A suspend does not wait for a commit of the task, which reaches the metadata later.
            CloneLateCommit: Clones,
            /// A write of a part of a region marks it as copied without a copy of the rest.
            MirrorPartNotCopied: Mirrors,
            /// Writes of one place that are in flight together may end in another order on the destination.
            MirrorWritesUnordered: Mirrors,
            /// A write of a clean region goes to the devices before the log says that it is dirty.
            MirrorWriteBeforeLog: MirrorLogs,
            /// A write is sent when the log is written, and not when it is durable.
            MirrorLogNotFlushed: MirrorLogs,
            /// Regions become clean although the devices were not flushed.
            MirrorCleanUnflushed: MirrorLogs,
            /// A region becomes clean while a write of it is under way.
            MirrorCleanedInWrite: MirrorLogs,
            /// Regions become clean although the destination lacks writes.
            MirrorDegradedCleans: MirrorLogs,
            /// An answer with another ETag is taken.
            ObjectEtagIgnored: Objects,
            /// A body that is too short is taken.
            ObjectShortBodyTaken: Objects,
            /// An answer with another range of the same length is taken.
            ObjectOtherRangeTaken: Objects,
            /// A read of an object has no end.
            ObjectRetriesForEver: Objects,
            /// Each slow request of an object gets a second one.
            ObjectHedgesUnbounded: Objects,
            /// Zeroes of a source are not written over other data of the destination.
            CloneZeroesNotWritten: Objects,
        } $($next)* }
    };
}
