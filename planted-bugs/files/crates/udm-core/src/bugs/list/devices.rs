//! Bugs of mapped devices, and of disks with faults.

macro_rules! devices_bugs {
    ({$($all:tt)*} $($next:ident)*) => {
        collect_bugs! { {
            $($all)*
            /// A message changes what held bios depend on, and no lane is woken.
            NoKick: Devices,
            /// A lane that must hand a bio back during a drain goes to sleep.
            NoWakeForDrain: Devices,
            /// After a path error, one bio of the batch is not retried.
            RetryForgets: Devices,
            /// A bio is submitted twice: the second time as a copy.
            SubmitTwice: Devices,
            /// A flush is sent only to the first device of a table.
            FlushNotFannedOut: Devices,
            /// A write with a preflush is sent without the flush.
            PreflushDropped: Devices,
            /// A FUA write goes to a device without FUA, and no flush follows.
            FuaDropped: Devices,
            /// The offset is not subtracted from the sector of a bio that failed.
            OffsetKeptOnError: Devices,
            /// The sector of a completed bio is restored with the offset of another line of the table that
            /// lies on the same device.
            NeighboursOffset: Devices,
            /// A suspend is cancelled, and bios that a lane was to hand back are not submitted again.
            CancelStrandsReturned: Devices,
            /// A suspend is cancelled, and bios without a path still fail.
            CancelKeepsDraining: Devices,
            /// A core acknowledges a suspend while bios are in flight.
            SuspendAcksEarly: Devices,
            /// A resume swaps the tables before the cores are suspended.
            SwapTooEarly: Devices,
            /// Bios that are held when a table is replaced are lost.
            ReloadDropsParked: Devices,
            /// A device has no limits any more, and bios that waited for one are held until a resume.
            ThrottleEndHolds: Devices,
            /// A batch passes the limits of its device without counting in them.
            ThrottleUncounted: Devices,
            /// A lane whose bios wait for a limit does not ask for a poll.
            ThrottleNotWoken: Devices,
            /// The old table stays in use after a reload.
            OldTableKept: Devices,
            /// A lane does not notice that a path has failed.
            StalePathGeneration: Devices,
            /// Held bios are not retried when a path returns, because a new bio saw the change first.
            ParkedMissReturn: Devices,
            /// A bio without a usable path fails, although it should be queued.
            HeldBioFails: Devices,
            /// The load of a path is not reduced when a bio fails.
            LoadKeptOnError: Devices,
            /// The failure of a path is counted again when the path has already failed.
            FailCountedTwice: Devices,
            /// A path error completes the bio instead of a retry.
            PathErrorNotRetried: Devices,
            /// A medium error fails the path.
            MediumErrorFailsPath: Devices,
            /// The last fragment of a split bio is never sent.
            SplitLosesTail: Devices,
            /// A lane below a table that has nothing in flight is never polled, even if a message arrived
            /// for it.
            IdleLegForgotten: Devices,
            /// A fragment fails, and the whole bio succeeds.
            PieceErrorLost: Devices,
            /// The last stripe of a row is mapped one sector too far.
            StripeShifted: Devices,
            /// The superblock of a write log is prepared and never sent.
            SuperblockNotSent: Devices,
            /// The superblock of a write log is sent after the poll of the log device, and a completion
            /// within the submit is not noticed.
            SuperblockUnpolled: Devices,
            /// The superblock of a write log is written, and waiting lanes on other cores are not woken.
            CountNotRung: Devices,
            /// A disk that a target needs exclusively is not claimed.
            DiskNotClaimed: Devices,
            /// A prepared lane that has begun its log reports that it is idle, and is closed.
            PreparedNotBusy: Devices,
            /// A lane with own work in flight is closed when another table replaces its table.
            OwnWorkDropped: Devices,
            /// A path fails, and the checker is not notified.
            FailNotRung: Devices,
            /// The check of a working path fails, and the path is not failed.
            BadCheckIgnored: Devices,
            /// The check of a working path is never answered, and the checker waits for it forever.
            HungCheckIgnored: Devices,
            /// A FUA write is logged before a held write that overlaps it and completed first.
            HeldWriteOvertaken: Devices,
            /// A flush completes when its entry is on the log, before the superblock counts the entry.
            FlushBeforeCount: Devices,
            /// The superblock counts entries that are still in the cache of the log device.
            CountedBeforeFlushed: Devices,
            /// New entries overwrite old ones that the superblock still counts.
            CountedEntryOverwritten: Devices,
            /// The last byte of a read from a zero target is not cleared.
            ZeroesTooShort: Devices,
            /// A table keeps the limits that the devices below had when it was loaded.
            StaleLimits: Devices,
            /// A request that is not made of whole blocks is passed on.
            BlocksIgnored: Devices,
            /// A table over a read-only device reports that it is writable.
            ReadOnlyLost: Devices,
            /// A resume is refused, and the lanes prepared for it stay open.
            PrepareNotUndone: Devices,
            /// A reference to a replaced table is kept.
            LeavingTableKept: Devices,
            /// A core cannot open its lane of the new table, and the resume continues.
            OpenFailureIgnored: Devices,
            /// A cancelled suspend still waits for requests that hang.
            CancelWaits: Devices,
            /// A fragment that a full lane handed back unstarted counts as completed.
            HandedBackIsDone: Devices,
            /// A bio that is handed back keeps the sector of the lower device.
            MovedWhenHandedBack: Devices,
            /// A stripe fails, and no event is raised.
            StripeEventLost: Devices,
            /// The error target completes writes successfully.
            ErrorForgiven: Devices,
            /// A delay target that holds nothing asks for turns.
            StirsAtRest: Devices,
            /// A delay target does not ask to be woken for the requests that it holds.
            DelaySleeps: Devices,
            /// Lanes keep using the first set of bad blocks that they saw.
            BadBlocksStale: Devices,
            /// Bad blocks are counted from the start of the target instead of the start of the lower
            /// device.
            BadBlockMisplaced: Devices,
            /// A write that must be dropped is sent to the lower device.
            DroppedWriteSent: Devices,
            /// A read that must be corrupted returns unchanged data.
            CorruptionForgotten: Devices,
            /// The data of a write is corrupted in the submitter's buffer instead of in a copy.
            CorruptsOwnData: Devices,
            /// A lane waits until the end mark of its log is counted, but a resume has removed the mark.
            EndMarkWaits: Devices,
            /// A write that was retried on another path takes effect again later.
            LandsAfterRetry: Devices,
            /// The load of a path is not reduced when a full lane hands a bio back.
            LoadKeptOnHandBack: Devices,
            /// Each round of retries raises an event, even if no path failed.
            EventForEachError: Devices,
            /// A bio that fails is not counted in the I/O counters of its path.
            ErrorsNotServed: Devices,
            /// Several devices resume together, and upper devices wait for bios that a suspended device of
            /// the set holds.
            SetWaitsForItself: Devices,
            /// A change of several devices is cancelled, and only the first device is notified.
            SetHalfCalledOff: Devices,
            /// In a change of several devices, the first devices resume before all are suspended.
            SetNotInStep: Devices,
            /// Tables that become live together use the limits of the previous tables of the set.
            LimitsToComeIgnored: Devices,
            /// The state of a path is read and then written without a check that another core has failed
            /// the path in between.
            FailNotAtomic: Devices,
            /// A lane records path changes as seen that happened after it read the paths.
            SeenTooLate: Devices,
            /// A late reply of an abandoned read is taken for the reply to another read.
            LateAnswerBelieved: Devices,
            /// A write past its deadline is sent to another path while the first path still has it.
            WriteGivenUp: Devices,
            /// A suspend does not wait for an abandoned read that is still on its path.
            LateNotOwed: Devices,
            /// A hedge is sent even if the hedge budget is used up.
            HedgeUnpaid: Devices,
            /// A hedge has answered a read, and the reply of the original path is also used.
            LoserTaken: Devices,
            /// A path is ejected for being slower than the others by any amount.
            MerelySlower: Devices,
            /// An ejected path is still chosen.
            OutStillUsed: Devices,
            /// An ejected path is not used even if no other path is left.
            OutIsFailed: Devices,
            /// An ejected path is never tried again.
            OutForEver: Devices,
            /// An ejected path returns regardless of the result of its trial.
            TrialBelieved: Devices,
            /// A tag is granted to a lane of another core, and that lane is not woken.
            TagNotRung: Devices,
            /// The settings of a queue change, and a lane that waits for a tag of the old set is not woken.
            RetiredNotRung: Devices,
            /// New queue settings take effect while requests still have tags of the old set.
            TagsNotAwaited: Devices,
            /// The settings of a queue change, and its waiting requests are lost.
            WaitingNotMoved: Devices,
            /// The settings of a queue change, and requests that a lane sent to the owner lane do not
            /// complete.
            WayLeftEarly: Devices,
            /// A request that the mapped device will refuse is merged in its queue with a valid one.
            MergedUnsound: Devices,
            /// A queue sends a waiting request when it gets a tag, and a completion within the submit is
            /// not noticed.
            SentUnpolled: Devices,
            /// The settings of a queue change during a poll. The moved requests are sent by the move
            /// itself, and a completion within the submit is not noticed.
            MovedUnpolled: Devices,
            /// After a change of settings, a lane sends waiting requests to the owner lane and does not
            /// register for the replies.
            WayNotAwaited: Devices,
            /// A request that a disk hands back to a suspend keeps its tag of the disk's queue.
            HandedBackKeepsTag: Devices,
            /// Requests that wait in the owner lane are not handed back to a suspend.
            WayNotDrained: Devices,
            /// A lane is drained, and the owner lane is not woken.
            DrainNotRung: Devices,
            /// Requests that the owner lane hands back after a suspend was cancelled are lost.
            LateHandBackLost: Devices,
            /// A drain of the owner lane loses requests of lanes that are not suspended.
            OthersNotSentAgain: Devices,
            /// After a suspend ends, the owner lane still hands back the requests that it receives.
            DrainOutlives: Devices,
            /// Each lane of a request-based device has a queue of its own.
            QueueForEachLane: Devices,
            /// A shared tag is granted to a waiting lane, and the lane is not woken.
            SharedTagNotRung: Devices,
            /// Each batch that completes returns one shared tag too many.
            SharedTagTwice: Devices,
            /// A FUA write is merged into a write without FUA.
            MergedFlags: Devices,
            /// A merged request fails, and its first part succeeds.
            MergedErrorLost: Devices,
            /// The parts of a merged read get each other's data.
            MergedReadShifted: Devices,
            /// A lost request of a null device keeps its tag after its timeout.
            LostTagKept: Faults,
            /// A null device does not ask for the turn in which it retries a requeued request.
            RequeueSleeps: Faults,
            /// A null device with faults starts waiting requests in a poll, and a completion within the
            /// start is not noticed.
            StartedUnpolled: Faults,
            /// A null device that has used up its bandwidth does not ask to be woken when more is
            /// available.
            BudgetSleeps: Faults,
            /// A null device exceeds its bandwidth.
            BudgetPassed: Faults,
            /// A request that ends in the first of several bad blocks of a null device succeeds.
            BadEndServed: Faults,
            /// A flush of a null device leaves the first page in its cache.
            FlushMissesPage: Faults,
            /// A FUA write bypasses the cache of a null device, and the cache keeps its old data.
            FuaKeepsCached: Faults,
        } $($next)* }
    };
}
