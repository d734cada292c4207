//! Bugs of snapshots, and of the verbs and lives of servers.

macro_rules! snapshots_bugs {
    ({$($all:tt)*} $($next:ident)*) => {
        collect_bugs! { {
            $($all)*
            /// A copy is published before its data is in the snapshot store.
            CopyBeforeData: Snapshots,
            /// The records of copies are written while the copied data is still in a cache.
            RecordsUnflushed: Snapshots,
            /// A copy is published when its record is written, while the record may still be in a cache.
            RecordsBelieved: Snapshots,
            /// A write of an origin does not wait for reads of its snapshot that are in flight.
            ReaderOvertaken: Snapshots,
            /// A chunk is copied, and the lanes that wait for it are not woken.
            CopyNotRung: Snapshots,
            /// A write that caused a copy is not merged into the copied chunk.
            OverlayLost: Snapshots,
            /// The last chunk of an origin is copied as a whole chunk, although the origin ends within it.
            LastChunkWhole: Snapshots,
            /// A merge removes chunks from the snapshot while their data is still in the cache of the
            /// origin.
            MergeUnflushed: Snapshots,
            /// A snapshot becomes invalid, and its store is not marked.
            InvalidUnmarked: Snapshots,
            /// A snapshot becomes live, and its origin is not renewed.
            OriginNotRenewed: Snapshots,
            /// After a cancelled suspend, a merge starts a second run while the first is in progress.
            MergeTwice: Snapshots,
            /// After a handover, a merge takes chunks that the snapshot had copied for chunks that are
            /// being merged.
            HandoverUnsettled: Snapshots,
            /// A discard of a snapshot is passed to the origin, although the table does not ask for it.
            DiscardPassedDown: Snapshots,
            /// A discard that is passed to the origin exceeds the origin's limit.
            DiscardTooLong: Snapshots,
            /// A message reports that a store has grown, and requests that wait for space are not woken.
            GrownUnheard: Snapshots,
            /// The table over a store ends in the middle of a block.
            EndInMidBlock: Snapshots,
            /// Each turn of a suspend hands the copy's own requests back, and they start again.
            CopyHandedBack: Snapshots,
            /// The memory of a copy is not released.
            CopyMemoryKept: Snapshots,
            /// A merge writes to the origin without a copy for the other snapshots.
            MergePastOthers: Snapshots,
            /// A store that is being grown counts as full.
            FullWhileGrowing: Snapshots,
            /// A store has grown itself, and lanes that wait for space are not woken.
            GrownNotRung: Snapshots,
            /// The map of changes between two snapshots lacks the writes to the later snapshot itself.
            MapLacksOwn: Snapshots,
            /// A map of changes since a snapshot is returned, although the snapshot no longer exists.
            MapOutlives: Snapshots,
            /// A store cannot be marked invalid on disk, and the state folder does not record the mark
            /// either.
            MarkNotKept: Snapshots,
            /// A write fails for lack of space, and lanes that wait for the chunk it claimed are not woken.
            GivenUpUnheard: Snapshots,
            /// A removal deletes the registry entry of another device that has reused the device number.
            EntryOfAnother: Verbs,
            /// A table is dropped, and the device below still counts as in use.
            HoldKept: Verbs,
            /// The creation of a device fails, and its name stays taken.
            MadeKept: Verbs,
            /// A device is removed, and its number stays taken.
            NumberKept: Verbs,
            /// A removal is refused, and its device can no longer be found.
            LeavingKept: Verbs,
            /// A removal is refused, and clients can no longer find the export of the device.
            ExportLost: Verbs,
            /// A table releases a device whose removal was deferred, and the remover is not notified.
            DeferredUnheard: Verbs,
            /// A deferred removal happens, although it was cancelled while it waited for its turn.
            DeferredAnyway: Verbs,
            /// A disk is opened by its number, and the name behind the number leads to another disk by
            /// then.
            NumberElsewhere: Verbs,
            /// A table is loaded into a device that was removed during the lookup of its names.
            LoadIntoGone: Verbs,
            /// A verb completes before the objects that it released are closed.
            LetGoUnwaited: Verbs,
            /// A device is renamed, and its old name stays taken.
            OldNameKept: Verbs,
            /// A device is renamed, and clients find it by its old name.
            ExportNotRenamed: Verbs,
            /// A device is renamed while it is being removed.
            RenamedLeaving: Verbs,
            /// A client that waits for events registers only after it has checked for past events.
            EventBetween: Verbs,
            /// A device is removed, and clients that wait for its events are not woken.
            GoneUnheard: Verbs,
            /// One client stops waiting for events, and the other waiting clients are no longer counted.
            WaitersForgotten: Verbs,
            /// The creation of a multipath device fails because of one path, and the device name stays
            /// taken.
            RefusedPathKept: Verbs,
            /// One path given under two of its names becomes two paths of a multipath device.
            PathTwice: Verbs,
            /// A reconfigure suspends a device before the new table is loaded. If the table is refused, the
            /// device stays suspended.
            SuspendedForLoad: Verbs,
            /// A table that cannot become live stays in the inactive slot.
            RefusedTableKept: Verbs,
            /// A reconfigure continues with the next device, although its client has disconnected.
            HangUpUnheard: Verbs,
            /// A reconfigure that failed counts as done and is not retried.
            RefusedTakenForDone: Verbs,
            /// When a table is refused, a table that another client loaded into the inactive slot is
            /// cleared.
            OthersTableCleared: Verbs,
            /// A removal that cancels the step for one device of a reconfigure cancels all later steps.
            OneCallsOffAll: Verbs,
            /// Persistent snapshots become live and are not recorded in the state folder.
            SnapshotNotRecorded: Lives,
            /// A disk is opened for writing without the snapshot that a killed server had attached.
            KilledNotWaitedFor: Lives,
            /// A snapshot is abandoned, and its record does not say that it is lost.
            GivenUpNotLost: Lives,
            /// A table that was loaded while its store was unused becomes live while another table uses the
            /// store.
            StoreTakenTwice: Lives,
            /// The removal of a snapshot deletes whatever file is at the path of its store.
            OtherFileRemoved: Lives,
            /// The start of a merge is not recorded in the state folder.
            MergeNotRecorded: Lives,
            /// A table that waits for a handover keeps its snapshot listed after its device is removed.
            HandoverOutlivesDevice: Lives,
            /// A table whose snapshot was handed over still counts as a user of its store.
            SpentTableCounts: Lives,
        } $($next)* }
    };
}
