//! Seeded bugs and the simulator worlds in which each shows.

/// A kind of world of the simulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimWorld {
    /// Mapped devices, their tables and paths.
    Devices,
    /// As `Devices`, and some disks have the faults of null devices.
    Faults,
    /// Origins and their snapshots.
    Snapshots,
    /// The NBD server and its clients.
    Nbd,
    /// The registry and its verbs.
    Verbs,
    /// The NBD client and its servers.
    NbdClient,
    /// Servers that follow each other.
    Lives,
}

/// Defines the enum `Bug` and the list `Bug::ALL` from one list.
macro_rules! bugs {
    ($($(#[$what:meta])* $bug:ident: $world:ident,)*) => {
        /// A seeded bug.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Bug {
            $($(#[$what])* $bug,)*
        }

        impl Bug {
            /// All bugs, each with the world in which it shows.
            pub const ALL: &[(Bug, SimWorld)] = &[$((Bug::$bug, SimWorld::$world),)*];
        }
    };
}

impl Bug {
    /// Finds a bug by its name in the source, such as `NoKick`.
    ///
    /// # Errors
    /// An unknown name. The error lists all names.
    pub fn find(name: &str) -> Result<Bug, String> {
        // Compares a list of names: LLVM takes minutes to optimise a chain of iterators here.
        let names: Vec<String> = Bug::ALL.iter().map(|(bug, _)| format!("{bug:?}")).collect();
        match names.iter().position(|n| n == name) {
            Some(i) => Ok(Bug::ALL[i].0),
            None => Err(format!("no bug {name:?}; there are {}", names.join(", "))),
        }
    }
}

bugs! {
    /// A message changes a condition that queued bios wait for, and no lane is woken.
    NoKick: Devices,
    /// A lane that must hand back a bio goes to sleep without doing so.
    NoWakeForDrain: Devices,
    /// After a path error, one bio of the batch is not retried.
    RetryForgets: Devices,
    /// A bio is submitted twice: once itself, once as a copy.
    SubmitTwice: Devices,
    /// A flush goes only to the first device of a table.
    FlushNotFannedOut: Devices,
    /// A write with `PREFLUSH` is sent without the flush before it.
    PreflushDropped: Devices,
    /// A FUA write goes to a device without FUA, and no flush follows.
    FuaDropped: Devices,
    /// The offset of a failed bio is not subtracted again.
    OffsetKeptOnError: Devices,
    /// A completed bio is restored with the offset of another table line over the same device.
    NeighboursOffset: Devices,
    /// A suspend is cancelled, and bios that were to be handed back are stuck.
    CancelStrandsReturned: Devices,
    /// A suspend is cancelled, and bios without a path still fail.
    CancelKeepsDraining: Devices,
    /// A core acknowledges a suspend with bios still in flight.
    SuspendAcksEarly: Devices,
    /// A resume swaps the tables before all cores have stopped.
    SwapTooEarly: Devices,
    /// Queued bios are lost when the table changes.
    ReloadDropsParked: Devices,
    /// The old table stays in use after a reload.
    OldTableKept: Devices,
    /// A lane does not notice that a path has failed.
    StalePathGeneration: Devices,
    /// A returned path is seen first by a new bio, and queued bios are not retried.
    ParkedMissReturn: Devices,
    /// A bio without a usable path fails although it may wait.
    HeldBioFails: Devices,
    /// The load of a path is not reduced when a bio fails.
    LoadKeptOnError: Devices,
    /// A failed path is counted as failed a second time.
    FailCountedTwice: Devices,
    /// A path error is returned to the caller instead of being retried.
    PathErrorNotRetried: Devices,
    /// A medium error fails the path.
    MediumErrorFailsPath: Devices,
    /// The last of several fragments is never sent.
    SplitLosesTail: Devices,
    /// A leg with nothing in flight is never polled, though it may have a message.
    IdleLegForgotten: Devices,
    /// The error of a fragment does not fail the whole bio.
    PieceErrorLost: Devices,
    /// The last stripe of a row starts one sector too late.
    StripeShifted: Devices,
    /// `log-writes` counts an entry in memory but does not write the superblock.
    SuperblockNotSent: Devices,
    /// `log-writes` sends the superblock after it polled the log device, and does not poll again.
    /// The write may have completed at once.
    SuperblockUnpolled: Devices,
    /// `log-writes` counts an entry, and waiting lanes of other cores are not woken.
    CountNotRung: Devices,
    /// A target needs a disk exclusively and does not claim it.
    DiskNotClaimed: Devices,
    /// A prepared lane that has begun its log reports no own work and is closed.
    PreparedNotBusy: Devices,
    /// A lane of an old table is closed while its required own work is pending.
    OwnWorkDropped: Devices,
    /// A path fails, and the path checker is not woken.
    FailNotRung: Devices,
    /// The check of a working path fails, and the path is not failed.
    BadCheckIgnored: Devices,
    /// The check of a working path gets no answer, and the path is not failed.
    HungCheckIgnored: Devices,
    /// A FUA write is logged before an overlapping held write that completed first.
    HeldWriteOvertaken: Devices,
    /// A flush is acknowledged before the superblock counts its log entry.
    FlushBeforeCount: Devices,
    /// The superblock counts entries that are still in the cache of the log device.
    CountedBeforeFlushed: Devices,
    /// Log entries overwrite older entries that the superblock still counts.
    CountedEntryOverwritten: Devices,
    /// The end of a read is not filled with zeroes.
    ZeroesTooShort: Devices,
    /// A table keeps the limits that the lower devices had when it was loaded.
    StaleLimits: Devices,
    /// A request that is not made of whole blocks is passed on.
    BlocksIgnored: Devices,
    /// A table over a read-only device reports that it is writable.
    ReadOnlyLost: Devices,
    /// A resume is refused, and the lanes prepared for it stay open.
    PrepareNotUndone: Devices,
    /// A reference to a replaced table is never dropped.
    LeavingTableKept: Devices,
    /// A core fails to open its lane of the new table, and the resume continues.
    OpenFailureIgnored: Devices,
    /// A cancelled suspend still waits for a bio that hangs.
    CancelWaits: Devices,
    /// A fragment handed back unstarted by a full lane counts as completed.
    HandedBackIsDone: Devices,
    /// A bio that is handed back keeps the sector of the lower device.
    MovedWhenHandedBack: Devices,
    /// A stripe fails, and no event is raised.
    StripeEventLost: Devices,
    /// The error target lets writes succeed.
    ErrorForgiven: Devices,
    /// An idle delay target asks for turns.
    StirsAtRest: Devices,
    /// A delay target does not ask to be woken for its queued bios.
    DelaySleeps: Devices,
    /// Lanes keep using the first set of bad blocks that they read.
    BadBlocksStale: Devices,
    /// Bad blocks are counted from the start of the target instead of the lower device.
    BadBlockMisplaced: Devices,
    /// A write that must be dropped is sent.
    DroppedWriteSent: Devices,
    /// A read that must be corrupted is returned unchanged.
    CorruptionForgotten: Devices,
    /// The writer's own buffer is corrupted instead of a copy.
    CorruptsOwnData: Devices,
    /// A lane waits until the end mark of its log is counted, though a resume removed the mark.
    EndMarkWaits: Devices,
    /// A write that was retried on another path takes effect a second time, later.
    LandsAfterRetry: Devices,
    /// The load of a path is not reduced when a full lane hands back a bio.
    LoadKeptOnHandBack: Devices,
    /// Each round of retries raises an event, even if no path failed.
    EventForEachError: Devices,
    /// A failed bio is missing in the counters of its path.
    ErrorsNotServed: Devices,
    /// Several devices resume together, and an upper one waits for bios that a suspended lower one
    /// holds back.
    SetWaitsForItself: Devices,
    /// A change of several devices is cancelled, and only the first device is notified.
    SetHalfCalledOff: Devices,
    /// In a change of several devices, the first continue before all have quiesced.
    SetNotInStep: Devices,
    /// Tables that become live together use the limits of the previous live tables.
    LimitsToComeIgnored: Devices,
    /// A path is read and then marked as failed, without a check for a concurrent failure.
    FailNotAtomic: Devices,
    /// A lane records a state of the paths that is newer than the state that it read.
    SeenTooLate: Devices,
    /// A chunk is published in the snapshot store before its data is written.
    CopyBeforeData: Snapshots,
    /// Records of copies are written while the copied data is still in a cache.
    RecordsUnflushed: Snapshots,
    /// A copy is published when its record is written, though the record may be in a cache.
    RecordsBelieved: Snapshots,
    /// A write of the origin does not wait for earlier reads of its snapshot.
    ReaderOvertaken: Snapshots,
    /// A chunk is copied, and lanes that wait for it are not woken.
    CopyNotRung: Snapshots,
    /// A chunk is copied for a write, and the data of the write is missing in the copy.
    OverlayLost: Snapshots,
    /// The last chunk is copied whole, though the origin ends within it.
    LastChunkWhole: Snapshots,
    /// A merge drops chunks from the store while their data is in the cache of the origin.
    MergeUnflushed: Snapshots,
    /// A snapshot loses a copy, and its store is not marked invalid.
    InvalidUnmarked: Snapshots,
    /// A snapshot becomes live, and its origin is not renewed.
    OriginNotRenewed: Snapshots,
    /// After a cancelled suspend, a merge starts a second unit while the first is running.
    MergeTwice: Snapshots,
    /// A merge treats chunks that the previous owner copied as chunks being merged.
    HandoverUnsettled: Snapshots,
    /// A discard of a snapshot is passed to its origin without `discard_passdown_origin`.
    DiscardPassedDown: Snapshots,
    /// A discard passed to the origin exceeds the origin's limit.
    DiscardTooLong: Snapshots,
    /// A store has grown, and writes that wait for space are not woken.
    GrownUnheard: Snapshots,
    /// A store used as a whole device ends in the middle of a block.
    EndInMidBlock: Snapshots,
    /// Each turn of a suspend hands back the requests of a copy, so the copy starts again and
    /// again.
    CopyHandedBack: Snapshots,
    /// The memory of a copy is not freed.
    CopyMemoryKept: Snapshots,
    /// A merge writes to the origin without copying the old data for other snapshots.
    MergePastOthers: Snapshots,
    /// A store that is growing is reported as full.
    FullWhileGrowing: Snapshots,
    /// A store has grown, and the lanes waiting for the growth are not woken.
    GrownNotRung: Snapshots,
    /// The map of changes since another snapshot lacks writes to this snapshot itself.
    MapLacksOwn: Snapshots,
    /// A map of changes is returned although its checkpoint no longer exists.
    MapOutlives: Snapshots,
    /// A store cannot be marked invalid in its header, and the state folder does not record it
    /// either.
    MarkNotKept: Snapshots,
    /// A write fails for lack of space, and lanes that wait for its claimed chunk are not woken.
    GivenUpUnheard: Snapshots,
    /// A late answer to an abandoned read is taken for the answer to another read.
    LateAnswerBelieved: Devices,
    /// A write past its deadline is sent to another path while the first path still has it.
    WriteGivenUp: Devices,
    /// A suspend does not wait for an abandoned read that is still on its path.
    LateNotOwed: Devices,
    /// A hedge is sent although the hedge budget is empty.
    HedgeUnpaid: Devices,
    /// A read completes by its hedge, and the answer of the first path is used as well.
    LoserTaken: Devices,
    /// A path is ejected for being only slightly slower than the others.
    MerelySlower: Devices,
    /// An ejected path is still chosen.
    OutStillUsed: Devices,
    /// An ejected path is not used even if no other path is left.
    OutIsFailed: Devices,
    /// An ejected path is never tried again.
    OutForEver: Devices,
    /// An ejected path returns whatever the result of its trial.
    TrialBelieved: Devices,
    /// A message that crosses the end of a receive buffer loses a byte in the copy.
    CutLosesByte: Nbd,
    /// After a short send, the next send starts at the beginning again.
    AnswerSentTwice: Nbd,
    /// After a short send, the buffer of the rest returns to the pool before it is sent.
    BufferBackEarly: Nbd,
    /// A connection keeps its permission to exceed the memory budget after it needs that no more,
    /// and blocks others.
    PassKept: Nbd,
    /// Memory that a connection returns stays counted in the core's budget.
    BudgetKept: Nbd,
    /// A connection that no longer waits for memory stays in the line.
    LineKept: Nbd,
    /// A connection with no pending request answers a flush without sending it to the device.
    FlushWhenIdle: Nbd,
    /// A write of a partial block does not wait for its range lock.
    HoldSkipped: Nbd,
    /// A connection moves to another core without its received but unparsed bytes.
    UnreadLeftBehind: Nbd,
    /// A connection ends, and its core keeps its lane of the device open.
    LaneKept: Nbd,
    /// A request of a disconnected client stays in the in-flight count of its device.
    InFlightKept: Nbd,
    /// A block status reply covers blocks beyond the requested range.
    StatusTooLong: Nbd,
    /// A connection that moved to another core keeps its slot on the first core.
    PlaceKept: Nbd,
    /// No flush follows a write-zeroes or trim with FUA.
    ZeroesFuaForgotten: Nbd,
    /// Writes that wait for a range lock are not retried when it is released.
    ParkedForgotten: Nbd,
    /// A removal deletes the registry entry of another device that has the same number by now.
    EntryOfAnother: Verbs,
    /// A table is dropped, and the use count of its lower device stays.
    HoldKept: Verbs,
    /// Creating a device fails, and its name stays taken.
    MadeKept: Verbs,
    /// A device is removed, and its number stays taken.
    NumberKept: Verbs,
    /// A removal is refused, and its device is no longer found.
    LeavingKept: Verbs,
    /// A removal is refused, and clients no longer find the device.
    ExportLost: Verbs,
    /// A table closes a device with a deferred removal, and the remover is not woken.
    DeferredUnheard: Verbs,
    /// A deferred removal is carried out although it was cancelled while it waited.
    DeferredAnyway: Verbs,
    /// A disk number is resolved by name, and the name leads to another disk when it is opened.
    NumberElsewhere: Verbs,
    /// A table is loaded into a device that was removed while its names were resolved.
    LoadIntoGone: Verbs,
    /// A verb returns before the devices that it released are closed.
    LetGoUnwaited: Verbs,
    /// A device is renamed, and its old name stays taken.
    OldNameKept: Verbs,
    /// A device is renamed, and clients find it by its old name.
    ExportNotRenamed: Verbs,
    /// A device is renamed during its removal.
    RenamedLeaving: Verbs,
    /// A waiter subscribes to events only after it checked the event counter.
    EventBetween: Verbs,
    /// A device is removed, and waiters for its events are not woken.
    GoneUnheard: Verbs,
    /// One waiter for an event leaves, and the other waiters are no longer counted.
    WaitersForgotten: Verbs,
    /// Creating a multipath device fails because of one path, and its name stays taken.
    RefusedPathKept: Verbs,
    /// One path given by two names becomes two paths of a multipath device.
    PathTwice: Verbs,
    /// A reply of an NBD server to an unknown request is ignored.
    AnswerToNothing: NbdClient,
    /// A reply of an NBD server is taken for the newer request in the same slot.
    AnswerToAnother: NbdClient,
    /// A read counts as complete although the NBD server sent only a part of its data.
    PartTaken: NbdClient,
    /// A write that the NBD server refuses early completes while its data is still being sent.
    EarlyEnds: NbdClient,
    /// The rest of a write that does not fit into one send is not sent.
    RestOfWriteLost: NbdClient,
    /// The rest of a short send is not sent.
    RestNotSent: NbdClient,
    /// An interrupted send closes the connection to the NBD server.
    InterruptedLost: NbdClient,
    /// A send that fails for lack of memory is retried without a pause.
    ShortageSpins: NbdClient,
    /// A connection is still used after the NBD server reported a shutdown.
    ShutdownStays: NbdClient,
    /// A FUA write is sent to the NBD server without FUA.
    FuaNotAsked: NbdClient,
    /// An NBD server that returns with another size is accepted.
    SizeChangeTaken: NbdClient,
    /// A handshake with an NBD server has no timeout.
    HandshakeUnwatched: NbdClient,
    /// A write that an NBD server may still carry out is retried elsewhere at once.
    RetryBeforeFence: NbdClient,
    /// A write with `PREFLUSH` is sent to the NBD server without the flush.
    FlushFirstForgotten: NbdClient,
    /// A lane that cannot connect retries at once.
    NoBackOff: NbdClient,
    /// Requests that wait when a connection is lost are dropped.
    LostWithConnection: NbdClient,
    /// A tag is granted to a lane of another core, and the lane is not woken.
    TagNotRung: Devices,
    /// Queue settings change, and a lane that waits for an old tag is not woken.
    RetiredNotRung: Devices,
    /// New queue settings take effect while requests still have old tags.
    TagsNotAwaited: Devices,
    /// Waiting requests are lost when the settings of their queue change.
    WaitingNotMoved: Devices,
    /// Queue settings change, and requests that a lane sent to the owner core never complete.
    WayLeftEarly: Devices,
    /// A request that the mapped device will refuse is merged with valid requests.
    MergedUnsound: Devices,
    /// A queue gets a tag, sends a waiting request, and does not poll afterwards. The request may
    /// have completed at once.
    SentUnpolled: Devices,
    /// The move to new queue settings sends requests itself. The poll that made the move does not
    /// know about them and does not poll again.
    MovedUnpolled: Devices,
    /// After a change of settings, a lane sends waiting requests to the owner core and does not
    /// register for the replies.
    WayNotAwaited: Devices,
    /// A request that a disk hands back to a suspend keeps its tag.
    HandedBackKeepsTag: Devices,
    /// Requests that wait on the owner core are not handed back to a suspend.
    WayNotDrained: Devices,
    /// A lane is drained, and the owner core is not woken.
    DrainNotRung: Devices,
    /// The owner core hands back requests after the suspend was cancelled, and they are lost.
    LateHandBackLost: Devices,
    /// A drain on the owner core hands back requests of lanes that are not suspended, and they are
    /// lost.
    OthersNotSentAgain: Devices,
    /// After the end of a suspend, the owner core still hands back new requests.
    DrainOutlives: Devices,
    /// Each lane of a request-based device has a queue of its own.
    QueueForEachLane: Devices,
    /// A shared tag is granted, and the waiting lane is not woken.
    SharedTagNotRung: Devices,
    /// Each completed batch returns one shared tag too many.
    SharedTagTwice: Devices,
    /// A FUA write is merged into a write without FUA.
    MergedFlags: Devices,
    /// A merged request fails, and its first part does not.
    MergedErrorLost: Devices,
    /// The parts of a merged read get each other's data.
    MergedReadShifted: Devices,
    /// A reconfigure suspends a device before the new table is loaded, and leaves it suspended if
    /// the load fails.
    SuspendedForLoad: Verbs,
    /// A table that cannot become live stays in the inactive slot.
    RefusedTableKept: Verbs,
    /// A reconfigure continues with the next device after its client has disconnected.
    HangUpUnheard: Verbs,
    /// A failed reconfigure counts as done and is not retried.
    RefusedTakenForDone: Verbs,
    /// Clearing a refused table also clears a table that another client loaded.
    OthersTableCleared: Verbs,
    /// A removal that cancels one device of a reconfigure cancels all later devices too.
    OneCallsOffAll: Verbs,
    /// A lost request of a null device keeps its tag after its timeout.
    LostTagKept: Faults,
    /// A null device does not ask for the turn in which it retries a requeued request.
    RequeueSleeps: Faults,
    /// A null device with faults starts queued requests in a poll, and does not poll again. They
    /// may have completed at once.
    StartedUnpolled: Faults,
    /// A null device that has used up its bandwidth does not ask to be woken.
    BudgetSleeps: Faults,
    /// A null device exceeds its bandwidth.
    BudgetPassed: Faults,
    /// A request that ends in the first of several bad blocks of a null device succeeds.
    BadEndServed: Faults,
    /// A flush of a null device leaves the first page in its cache.
    FlushMissesPage: Faults,
    /// A FUA write bypasses the cache, and the cache keeps the old data.
    FuaKeepsCached: Faults,
    /// Persistent snapshots become live without a record.
    SnapshotNotRecorded: Lives,
    /// A disk is opened for writing without the snapshot that a killed server had.
    KilledNotWaitedFor: Lives,
    /// A snapshot is abandoned, and its record still says that it is valid.
    GivenUpNotLost: Lives,
    /// A table loaded while its store was free becomes live although another table uses the store
    /// now.
    StoreTakenTwice: Lives,
    /// Removing a snapshot deletes any file at the path of its store, even another one.
    OtherFileRemoved: Lives,
    /// The start of a merge is not recorded.
    MergeNotRecorded: Lives,
    /// A snapshot of a removed device stays listed because another table waits for its handover.
    HandoverOutlivesDevice: Lives,
    /// A table whose snapshot was handed over still counts as the table that has it.
    SpentTableCounts: Lives,
}
