//! The list of planted bugs, and the simulated world that finds each.

/// A kind of world of the simulator in which a bug shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimWorldKind {
    /// Mapped devices with their tables and paths.
    Devices,
    /// Mapped devices over disks that have the faults of null devices.
    Faults,
    /// Origins and their snapshots.
    Snapshots,
    /// The NBD server and its clients.
    Nbd,
    /// The registry and its verbs.
    Verbs,
    /// The NBD client and its servers.
    NbdClient,
    /// Servers that run one after another over the same disks and state folder.
    Lives,
    /// Disks of virtual machines.
    VhostUser,
    /// A clone of a source.
    Clones,
    /// A mirror that is switched to its destination.
    Mirrors,
    /// The NVMe/TCP target and its hosts.
    Nvme,
    /// The NVMe/TCP initiator, against model targets and udm's own.
    NvmeClient,
    /// A mirror that continues from its log.
    MirrorLogs,
}

/// Generates `Bug` and `Bug::ALL` from one list.
macro_rules! bugs {
    ($($(#[$what:meta])* $bug:ident: $world:ident,)*) => {
        /// A planted bug.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Bug {
            $($(#[$what])* $bug,)*
        }

        impl Bug {
            /// All bugs, each with the kind of world in which it shows.
            pub const ALL: &[(Bug, SimWorldKind)] = &[$((Bug::$bug, SimWorldKind::$world),)*];
        }
    };
}

impl Bug {
    /// Finds a bug by its name in the source.
    ///
    /// # Errors
    /// If no bug has this name. The error lists all names.
    pub fn find(name: &str) -> Result<Bug, String> {
        // LLVM takes minutes to optimise a chain of iterators that compares the names.
        let names: Vec<String> = Bug::ALL.iter().map(|(bug, _)| format!("{bug:?}")).collect();
        match names.iter().position(|n| n == name) {
            Some(i) => Ok(Bug::ALL[i].0),
            None => Err(format!("no bug {name:?}; the bugs are {}", names.join(", "))),
        }
    }
}

bugs! {
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
    /// Received bytes that cross the end of a buffer lose a byte when they are copied to the next
    /// buffer.
    CutLosesByte: Nbd,
    /// After a short send, the rest is sent from the start of the send.
    AnswerSentTwice: Nbd,
    /// After a short send, the buffer of the rest returns to the pool before the rest is sent.
    BufferBackEarly: Nbd,
    /// A connection that may exceed the memory budget of its core keeps this right when it no
    /// longer needs it.
    PassKept: Nbd,
    /// Memory that a connection releases still counts against the budget of its core.
    BudgetKept: Nbd,
    /// A connection that no longer waits for memory keeps its place in the queue.
    LineKept: Nbd,
    /// A connection with nothing in flight answers a flush without sending it to the device.
    FlushWhenIdle: Nbd,
    /// A write of a partial block does not wait for its range lock.
    HoldSkipped: Nbd,
    /// A connection moves to another core without the bytes that were received and not yet parsed.
    UnreadLeftBehind: Nbd,
    /// A connection ends, and its core keeps its lane of the device open.
    LaneKept: Nbd,
    /// A request whose client has disconnected still counts as in flight on its device.
    InFlightKept: Nbd,
    /// A block status reply describes blocks beyond the requested range.
    StatusTooLong: Nbd,
    /// A connection that moved to another core keeps its slot on the first core.
    PlaceKept: Nbd,
    /// No flush follows a FUA write-zeroes or a FUA trim.
    ZeroesFuaForgotten: Nbd,
    /// Writes that wait for a range lock are not retried when the lock is released.
    ParkedForgotten: Nbd,
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
    /// A reply of an NBD server to a request that is not in flight is ignored.
    AnswerToNothing: NbdClient,
    /// A reply of an NBD server is taken for the request that has reused the slot.
    AnswerToAnother: NbdClient,
    /// A read of which an NBD server sent only a part completes as whole.
    PartTaken: NbdClient,
    /// An NBD server refuses a write before it has all the data, and the write completes while its
    /// data is being sent.
    EarlyEnds: NbdClient,
    /// If a write does not fit into one send, its rest is not sent.
    RestOfWriteLost: NbdClient,
    /// After a short send, the rest is not sent.
    RestNotSent: NbdClient,
    /// An interrupted send closes the connection to an NBD server.
    InterruptedLost: NbdClient,
    /// A send that fails with ENOMEM or ENOBUFS is retried at once, without a pause.
    ShortageSpins: NbdClient,
    /// An NBD server announces its shutdown, and the connection is kept and used.
    ShutdownStays: NbdClient,
    /// A FUA write is sent to an NBD server without the FUA flag.
    FuaNotAsked: NbdClient,
    /// An NBD server that returns with another size is accepted.
    SizeChangeTaken: NbdClient,
    /// A handshake with an NBD server has no timeout.
    HandshakeUnwatched: NbdClient,
    /// A write that an NBD server may still carry out is retried elsewhere at once.
    RetryBeforeFence: NbdClient,
    /// A write with a preflush is sent to an NBD server without the flush.
    FlushFirstForgotten: NbdClient,
    /// A lane that cannot connect retries at once.
    NoBackOff: NbdClient,
    /// Requests that wait are lost when their connection is lost.
    LostWithConnection: NbdClient,
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
    /// A completed request of a virtual machine gets two used entries.
    UsedTwice: VhostUser,
    /// The index of a used ring is published before the entry is written.
    UsedIndexEarly: VhostUser,
    /// The first request of an idle queue is not marked as in flight before it is started.
    FirstNotMarked: VhostUser,
    /// A new server forgets the last request that was in flight.
    InFlightForgotten: VhostUser,
    /// A new server takes the requests that were in flight from the available ring again.
    InFlightTakenAgain: VhostUser,
    /// A core goes to sleep without a second look at a ring.
    NoSecondLook: VhostUser,
    /// A server reads if the guest wants a notification before it publishes what it completed.
    WishReadEarly: VhostUser,
    /// A flush of a virtual machine is answered without waiting for the disk.
    FlushAnsweredEarly: VhostUser,
    /// A region of memory is reported as removed while requests use it.
    MemoryReturnedEarly: VhostUser,
    /// A write is answered before the flush that makes it durable, while the write cache is off.
    FlushAfterWriteForgotten: VhostUser,
    /// The wrap counter of a packed ring stays the same at the end of the ring.
    PackedWrapKept: VhostUser,
    /// The flags of a used descriptor are written before its ID and length.
    PackedFlagsEarly: VhostUser,
    /// A batch of used descriptors is published with its first one before the others are written.
    PackedFirstNotLast: VhostUser,
    /// A used descriptor has the number of the slot instead of the ID of the chain.
    PackedIdIsSlot: VhostUser,
    /// The marks of completed requests of a packed ring are cleared before they are published.
    PackedMarksClearedEarly: VhostUser,
    /// A chain is taken off the free entries of the record before it is marked.
    PackedTakenBeforeMarked: VhostUser,
    /// A new server does not see that the last batch of a packed ring was published.
    PackedBatchForgotten: VhostUser,
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
    /// A write that an NVMe controller may still carry out is sent elsewhere at once.
    NvmeRetryBeforeFence: NvmeClient,
    /// A completion of no command in flight is ignored by an NVMe initiator.
    NvmeUnknownIdIgnored: NvmeClient,
    /// A read completes although the digest of its data is wrong.
    NvmeDataDigestBelieved: NvmeClient,
    /// A read completes with success although data is missing.
    NvmeShortReadTaken: NvmeClient,
    /// An ANA change while another page is read is forgotten.
    NvmeAnaEventLost: NvmeClient,
    /// A namespace event while another page is read does not make the initiator read its log.
    NvmeChangedLogNotRead: NvmeClient,
    /// A controller that returns with another namespace is accepted.
    NvmeOtherNamespaceTaken: NvmeClient,
    /// A discard has its range in the capsule, whatever the controller takes there.
    NvmeRangeInCapsule: NvmeClient,
    /// Only the first PDU of the data of an R2T is sent.
    NvmeRestOfDataNotSent: NvmeClient,
    /// A command that is to be repeated after a delay is not repeated.
    NvmeDelayedLost: NvmeClient,
    /// A reset of another controller is complete although its requests are at a device.
    NvmeResetAnsweredEarly: Nvme,
    /// A shutdown is complete although writes are at a device.
    NvmeShutdownAnsweredEarly: Nvme,
    /// The end of an association does not reach its I/O queues.
    NvmeEndUnheard: Nvme,
    /// The end of a reset that took long raises no event.
    NvmeResetEventForgotten: Nvme,
    /// A command is answered twice: with its data, and with a response.
    NvmeAnsweredTwice: Nvme,
    /// Data with a wrong digest is written.
    NvmeDigestNotChecked: NvmeClient,
    /// A change of an ANA state raises no event.
    NvmeAnaEventNotRaised: NvmeClient,
    /// A host has read a page, and its event is not reported any more.
    NvmeEventStaysSilent: NvmeClient,
    /// A write is answered when its data has come, before it is at the disk.
    NvmeWriteAnsweredEarly: NvmeClient,
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
}
