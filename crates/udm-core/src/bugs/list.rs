//! Which bugs there are, and where each shows.

/// The simulator's worlds that a bug shows in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimWorld {
    /// Of mapped devices, their tables and paths.
    Devices,
    /// Of those in which disks have the faults of null devices.
    Faults,
    /// Of origins and their snapshots.
    Snapshots,
    /// Of the NBD server and its clients.
    Nbd,
    /// Of the registry and its verbs.
    Verbs,
    /// Of the NBD client and its servers.
    NbdClient,
    /// Of servers that follow each other.
    Lives,
}

/// Makes the type of the bugs, and the list of them, from one list.
macro_rules! bugs {
    ($($(#[$what:meta])* $bug:ident: $world:ident,)*) => {
        /// A bug.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Bug {
            $($(#[$what])* $bug,)*
        }

        impl Bug {
            /// Every bug, and the worlds that it shows in.
            pub const ALL: &[(Bug, SimWorld)] = &[$((Bug::$bug, SimWorld::$world),)*];
        }
    };
}

impl Bug {
    /// The bug whose name is `name`, in the spelling of the source.
    ///
    /// # Errors
    /// Which there are.
    pub fn find(name: &str) -> Result<Bug, String> {
        // By way of a list of names: comparing them in a chain of iterators takes LLVM minutes to
        // optimise.
        let names: Vec<String> = Bug::ALL.iter().map(|(bug, _)| format!("{bug:?}")).collect();
        match names.iter().position(|n| n == name) {
            Some(i) => Ok(Bug::ALL[i].0),
            None => Err(format!("no bug {name:?}; there are {}", names.join(", "))),
        }
    }
}

bugs! {
    /// A message changes what held bios wait for, and no lane is told.
    NoKick: Devices,
    /// A lane that is to hand a bio back goes to sleep over it.
    NoWakeForDrain: Devices,
    /// A path error sends all bios of a batch round again but one.
    RetryForgets: Devices,
    /// A bio goes down twice, as a copy.
    SubmitTwice: Devices,
    /// A flush goes to the first device of a table only.
    FlushNotFannedOut: Devices,
    /// A write that asks for a flush before it goes without.
    PreflushDropped: Devices,
    /// A write that must be durable goes to a device without FUA, and no flush follows.
    FuaDropped: Devices,
    /// An offset is not taken off a bio that failed.
    OffsetKeptOnError: Devices,
    /// A bio that comes back takes its place from another line of the table, which lies on the same
    /// device.
    NeighboursOffset: Devices,
    /// A suspend is called off, and bios that were to be handed back stay where they are.
    CancelStrandsReturned: Devices,
    /// A suspend is called off, and bios without a path go on failing.
    CancelKeepsDraining: Devices,
    /// A core says that it is suspended with bios still in flight.
    SuspendAcksEarly: Devices,
    /// A resume does not wait until the cores have stopped.
    SwapTooEarly: Devices,
    /// Bios that are parked when a table changes are gone after it.
    ReloadDropsParked: Devices,
    /// The old table goes on being used behind a reload.
    OldTableKept: Devices,
    /// A lane does not notice that a path has failed.
    StalePathGeneration: Devices,
    /// Held bios miss that a path returned, because a new one saw it first.
    ParkedMissReturn: Devices,
    /// A bio that no path can take fails although it may wait.
    HeldBioFails: Devices,
    /// The load of a path is not taken back when a bio fails.
    LoadKeptOnError: Devices,
    /// A path that has failed fails once more.
    FailCountedTwice: Devices,
    /// An error that blames the path goes up.
    PathErrorNotRetried: Devices,
    /// An error that blames the medium fails the path.
    MediumErrorFailsPath: Devices,
    /// The last of several pieces is never sent.
    SplitLosesTail: Devices,
    /// What lies below a table and has nothing in flight is never polled, though it may have been
    /// told something.
    IdleLegForgotten: Devices,
    /// A piece that failed does not fail the whole.
    PieceErrorLost: Devices,
    /// The last stripe of a row lies one sector further.
    StripeShifted: Devices,
    /// The log of writes is counted, and the count stays in memory.
    SuperblockNotSent: Devices,
    /// The log of writes is counted behind the poll of the log device, and nobody looks whether
    /// that ended as it went down.
    SuperblockUnpolled: Devices,
    /// The log of writes is counted, and who waits for that on other cores is not woken.
    CountNotRung: Devices,
    /// A disk that a target needs alone is not claimed for it.
    DiskNotClaimed: Devices,
    /// A lane that was prepared has begun its log, passes for idle, and is closed.
    PreparedNotBusy: Devices,
    /// A lane is closed with work of its own under way, since another table takes its place.
    OwnWorkDropped: Devices,
    /// A path fails, and the checker is not told.
    FailNotRung: Devices,
    /// A path works, a check of it fails, and nobody draws the conclusion.
    BadCheckIgnored: Devices,
    /// A check of a path that works is not answered, and is waited for.
    HungCheckIgnored: Devices,
    /// A FUA write is logged before a held write that it overlaps and that completed first.
    HeldWriteOvertaken: Devices,
    /// A flush is acknowledged when it is on the log, before the superblock counts it.
    FlushBeforeCount: Devices,
    /// The superblock counts entries that are in the cache of the log device.
    CountedBeforeFlushed: Devices,
    /// Entries are written where the superblock still counts older ones.
    CountedEntryOverwritten: Devices,
    /// The end of a read from nowhere is not filled.
    ZeroesTooShort: Devices,
    /// A table keeps the limits that the devices below had when it was loaded.
    StaleLimits: Devices,
    /// A request that is not whole blocks is passed on.
    BlocksIgnored: Devices,
    /// A table over a read-only device says that it can be written.
    ReadOnlyLost: Devices,
    /// A resume is refused, and the lanes that were prepared for it stay open.
    PrepareNotUndone: Devices,
    /// A table that was replaced is held on to.
    LeavingTableKept: Devices,
    /// A core could not open its lane of the new table, and the resume goes on.
    OpenFailureIgnored: Devices,
    /// A suspend that is called off goes on waiting for what hangs.
    CancelWaits: Devices,
    /// A piece that a full lane handed back, unstarted, passes for done.
    HandedBackIsDone: Devices,
    /// A bio that is handed back keeps the sector of the device below.
    MovedWhenHandedBack: Devices,
    /// A stripe fails, and no event is raised.
    StripeEventLost: Devices,
    /// The error target lets writes succeed.
    ErrorForgiven: Devices,
    /// A delay target asks for turns though nothing waits in it.
    StirsAtRest: Devices,
    /// A delay target does not ask to be woken for what waits in it.
    DelaySleeps: Devices,
    /// Lanes go on with the set of bad blocks that they saw first.
    BadBlocksStale: Devices,
    /// Bad blocks are counted from the start of the target, and not of the device below.
    BadBlockMisplaced: Devices,
    /// A write that is to be dropped goes down.
    DroppedWriteSent: Devices,
    /// A read that is to be changed comes back as it is.
    CorruptionForgotten: Devices,
    /// The data of who writes is changed, and not a copy.
    CorruptsOwnData: Devices,
    /// A lane waits until the mark at the end of its log is counted, which a resume has taken away.
    EndMarkWaits: Devices,
    /// A write that was tried again on another path takes effect once more, later.
    LandsAfterRetry: Devices,
    /// The load of a path is not taken back when a full lane hands a bio back.
    LoadKeptOnHandBack: Devices,
    /// An event is raised for each round of retries, whether a path failed or not.
    EventForEachError: Devices,
    /// A bio that fails is not counted among what its path has served.
    ErrorsNotServed: Devices,
    /// Several devices are resumed together, and the upper ones wait for what one of them holds
    /// that is suspended.
    SetWaitsForItself: Devices,
    /// Several devices that change together are called off, and only the first hears of it.
    SetHalfCalledOff: Devices,
    /// Of several devices that change together the first go on before all have come to rest.
    SetNotInStep: Devices,
    /// Tables that become live together take the limits of those that were live before them.
    LimitsToComeIgnored: Devices,
    /// A path is looked at and then marked as failed, as if no other core could have failed it in
    /// between.
    FailNotAtomic: Devices,
    /// A lane takes for seen what has changed since it looked at the paths.
    SeenTooLate: Devices,
    /// A copy is said to be in the store of a snapshot before its data is.
    CopyBeforeData: Snapshots,
    /// The records of copies are written while their data is in a cache.
    RecordsUnflushed: Snapshots,
    /// A copy is published when its record is written, and that may be in a cache.
    RecordsBelieved: Snapshots,
    /// A write of an origin does not wait for reads of its snapshot that are under way.
    ReaderOvertaken: Snapshots,
    /// A chunk is copied, and who waits for it is not woken.
    CopyNotRung: Snapshots,
    /// The write that a chunk is copied for is not laid over the copy.
    OverlayLost: Snapshots,
    /// The last chunk of an origin is copied whole, though the origin ends within it.
    LastChunkWhole: Snapshots,
    /// A merge forgets its chunks while they are in the cache of the origin.
    MergeUnflushed: Snapshots,
    /// A snapshot loses a copy, and its store is not told.
    InvalidUnmarked: Snapshots,
    /// A snapshot becomes live, and its origin goes on as before.
    OriginNotRenewed: Snapshots,
    /// A merge that goes on behind a suspend called off begins a run beside the one under way.
    MergeTwice: Snapshots,
    /// A merge takes what its snapshot had copied for what is being merged.
    HandoverUnsettled: Snapshots,
    /// A discard of a snapshot goes on to its origin though nobody has asked for that.
    DiscardPassedDown: Snapshots,
    /// A discard that goes on to the origin is longer than that takes.
    DiscardTooLong: Snapshots,
    /// A store has grown, and what waits for room in it is not told.
    GrownUnheard: Snapshots,
    /// A store is used as a table that ends in the middle of a block.
    EndInMidBlock: Snapshots,
    /// What copies is handed back by each turn of a suspend, and begins anew.
    CopyHandedBack: Snapshots,
    /// The memory of a copy is not given back.
    CopyMemoryKept: Snapshots,
    /// A merge writes to the origin past the other snapshots.
    MergePastOthers: Snapshots,
    /// A store that is becoming larger passes for full.
    FullWhileGrowing: Snapshots,
    /// A store has become larger, and who waits for that is not told.
    GrownNotRung: Snapshots,
    /// What was written to a snapshot is missing in its map since another one.
    MapLacksOwn: Snapshots,
    /// A map since an instant that nobody keeps any more is given all the same.
    MapOutlives: Snapshots,
    /// A store that can't be told that it is invalid is marked nowhere.
    MarkNotKept: Snapshots,
    /// A write ends for want of room, and who waits for the chunk that it had claimed is not told.
    GivenUpUnheard: Snapshots,
    /// An answer that comes after its read was given up passes for that of another.
    LateAnswerBelieved: Devices,
    /// A write that is past its deadline is sent to another path while the first has it still.
    WriteGivenUp: Devices,
    /// A read that was given up is still on its path, and a suspend does not wait for it.
    LateNotOwed: Devices,
    /// A hedge is sent whether reads have earned it or not.
    HedgeUnpaid: Devices,
    /// A read was answered by its hedge, and the answer of the path that was chosen is taken too.
    LoserTaken: Devices,
    /// A path is put out of use for being slower than the others, however little.
    MerelySlower: Devices,
    /// A path that is out of use for being slow goes on being chosen.
    OutStillUsed: Devices,
    /// A path that is out of use for being slow is not used where nothing else is left.
    OutIsFailed: Devices,
    /// A path that was put out of use for being slow is never tried again.
    OutForEver: Devices,
    /// A path that was put out of use for being slow comes back whatever its trial says.
    TrialBelieved: Devices,
    /// What straddles the end of a receive's memory loses a byte on its way into the next.
    CutLosesByte: Nbd,
    /// The rest of a send that was short begins where the send began.
    AnswerSentTwice: Nbd,
    /// A send was short, and the memory of the rest goes back to the pool before it has left.
    BufferBackEarly: Nbd,
    /// A connection that may pass its core's budget of memory, and needs that no more, keeps others
    /// from it.
    PassKept: Nbd,
    /// What a connection gives back of its core's budget of memory goes on being counted.
    BudgetKept: Nbd,
    /// A connection that waited for memory, and needs none any more, keeps its place in the line.
    LineKept: Nbd,
    /// A connection that has nothing else under way answers a flush by itself.
    FlushWhenIdle: Nbd,
    /// A write of a part of a block does not wait until it has the block to itself.
    HoldSkipped: Nbd,
    /// A connection goes on on another core without what had arrived and was not looked at.
    UnreadLeftBehind: Nbd,
    /// A connection ends, and its core keeps its lane of the device open.
    LaneKept: Nbd,
    /// A request whose client is gone goes on being counted among those that its device has.
    InFlightKept: Nbd,
    /// A block status tells of blocks beyond what was asked about.
    StatusTooLong: Nbd,
    /// A connection that went on on another core keeps its place on the first.
    PlaceKept: Nbd,
    /// No flush follows a write-zeroes or a trim that must be durable.
    ZeroesFuaForgotten: Nbd,
    /// Writes that wait for a hold are not looked at when it is over.
    ParkedForgotten: Nbd,
    /// A removal takes the registry's entry away of whoever has its device's number by now.
    EntryOfAnother: Verbs,
    /// A table is gone, and the device below it goes on being counted as used.
    HoldKept: Verbs,
    /// A device could not be made, and its name stays taken.
    MadeKept: Verbs,
    /// A device is removed, and its number stays taken.
    NumberKept: Verbs,
    /// A removal is refused, and its device is not found any more.
    LeavingKept: Verbs,
    /// A removal is refused, and clients do not find its device any more.
    ExportLost: Verbs,
    /// A table lets go of a device whose removal was deferred, and nobody is told.
    DeferredUnheard: Verbs,
    /// A removal that was deferred comes although that was undone while it waited its turn.
    DeferredAnyway: Verbs,
    /// A number of a disk is followed to where its name leads by the time it is opened.
    NumberElsewhere: Verbs,
    /// A table is loaded into a device that was removed while its names were looked up.
    LoadIntoGone: Verbs,
    /// A verb is done before what it let go is closed.
    LetGoUnwaited: Verbs,
    /// A device has another name, and its old one stays taken.
    OldNameKept: Verbs,
    /// A device has another name, and clients find it by its old one.
    ExportNotRenamed: Verbs,
    /// A device is renamed while it is being removed.
    RenamedLeaving: Verbs,
    /// Who waits for an event listens only behind the look at what has come already.
    EventBetween: Verbs,
    /// A device is removed, and who waits for its events is not told.
    GoneUnheard: Verbs,
    /// Somebody waits no more for an event, and no other who does is counted either.
    WaitersForgotten: Verbs,
    /// A multipath device can't be made for one of its paths, and its name stays taken.
    RefusedPathKept: Verbs,
    /// A path that is given twice, by two names of one, makes two paths of a multipath device.
    PathTwice: Verbs,
    /// An NBD server's answer to a request that is not under way is passed over.
    AnswerToNothing: NbdClient,
    /// An NBD server's answer is taken for the request that has the place of its own by now.
    AnswerToAnother: NbdClient,
    /// A read of which an NBD server has sent a part passes for whole.
    PartTaken: NbdClient,
    /// A write that an NBD server refuses before it has all its data ends while the rest is being
    /// sent.
    EarlyEnds: NbdClient,
    /// Of a write that does not fit into one send the rest is not sent.
    RestOfWriteLost: NbdClient,
    /// Of a short send the rest is not sent.
    RestNotSent: NbdClient,
    /// A send that was interrupted ends the connection to an NBD server.
    InterruptedLost: NbdClient,
    /// What our system had no memory to send to an NBD server is sent again at once, and again.
    ShortageSpins: NbdClient,
    /// A connection to an NBD server that has said that it shuts down is kept, and asked again.
    ShutdownStays: NbdClient,
    /// A write that must be durable is asked of an NBD server as any other.
    FuaNotAsked: NbdClient,
    /// An NBD server that comes back with another size is taken for what it was.
    SizeChangeTaken: NbdClient,
    /// Nobody looks whether a handshake with an NBD server takes for ever.
    HandshakeUnwatched: NbdClient,
    /// A write that an NBD server may still deliver goes elsewhere at once.
    RetryBeforeFence: NbdClient,
    /// A write that asks an NBD server for a flush before it goes without.
    FlushFirstForgotten: NbdClient,
    /// A lane that can't connect tries again at once.
    NoBackOff: NbdClient,
    /// Requests that wait when a connection is lost are lost with it.
    LostWithConnection: NbdClient,
    /// A tag is handed to a lane of another core, which is not woken for it.
    TagNotRung: Devices,
    /// Other settings of a queue hold, and a lane that waits for a tag of the old ones is not told.
    RetiredNotRung: Devices,
    /// Other settings of a queue hold while requests have tags of the old ones.
    TagsNotAwaited: Devices,
    /// What waits in a queue whose settings change is lost.
    WaitingNotMoved: Devices,
    /// Other settings of a queue hold, and what a lane had sent to the core with the one order does
    /// not come home.
    WayLeftEarly: Devices,
    /// What a mapped device will refuse is merged in its queue with what it would serve.
    MergedUnsound: Devices,
    /// A queue has a tag again for what waits, sends it down, and does not look whether it ended
    /// there at once.
    SentUnpolled: Devices,
    /// Other settings of a queue hold, and what moves to them is sent by the move itself: a poll
    /// that it is made in does not learn that something went down, and does not look whether it
    /// ended there.
    MovedUnpolled: Devices,
    /// A lane sends waiting requests to the core with the one order when settings have changed, and
    /// does not ask to be told of the answers.
    WayNotAwaited: Devices,
    /// What a disk hands back to a suspend keeps the tag that it had of the disk's queue.
    HandedBackKeepsTag: Devices,
    /// What waits on the core with the one order is not handed back to a suspend.
    WayNotDrained: Devices,
    /// A lane is drained, and the core with the one order is not woken for it.
    DrainNotRung: Devices,
    /// What the core with the one order hands back when the suspend has been called off is lost.
    LateHandBackLost: Devices,
    /// What a drain on the core with the one order hands back of those that are not suspended is
    /// lost.
    OthersNotSentAgain: Devices,
    /// A suspend is over, and the core with the one order goes on handing back what is sent to it.
    DrainOutlives: Devices,
    /// Each lane of a request-based device has a queue to itself.
    QueueForEachLane: Devices,
    /// A tag that disks share is handed over, and who waits for it is not told.
    SharedTagNotRung: Devices,
    /// Of the tags that disks share each batch that comes home gives one back too many.
    SharedTagTwice: Devices,
    /// A write that must be durable is merged into one that need not be.
    MergedFlags: Devices,
    /// A request that was merged fails, and the first of its parts does not.
    MergedErrorLost: Devices,
    /// The parts of a read that was merged get each other's data.
    MergedReadShifted: Devices,
    /// A reconfigure suspends a device before it has another table, and leaves it so when that is
    /// refused.
    SuspendedForLoad: Verbs,
    /// A table that can't be put to use stays in the inactive slot.
    RefusedTableKept: Verbs,
    /// A reconfigure goes on to the next device though its client has hung up.
    HangUpUnheard: Verbs,
    /// A reconfigure that failed counts as done, and is not tried again.
    RefusedTakenForDone: Verbs,
    /// What others loaded into an inactive slot is cleared with a table that was refused.
    OthersTableCleared: Verbs,
    /// A removal that calls off one device of a reconfigure calls off all behind it.
    OneCallsOffAll: Verbs,
    /// A request of a null device that was lost keeps its tag when it has timed out.
    LostTagKept: Faults,
    /// A null device does not ask for the turn in which a request that found no resources goes
    /// again.
    RequeueSleeps: Faults,
    /// A null device with faults starts what waited in a poll, and nobody looks whether that ended
    /// as it went down.
    StartedUnpolled: Faults,
    /// A null device that has used up its bandwidth does not ask to be woken when there is more.
    BudgetSleeps: Faults,
    /// A null device moves more than its bandwidth.
    BudgetPassed: Faults,
    /// A request that ends in the first of several bad blocks of a null device is served.
    BadEndServed: Faults,
    /// A flush of a null device leaves the first page in its cache.
    FlushMissesPage: Faults,
    /// A FUA write goes past the cache, which keeps what it had there.
    FuaKeepsCached: Faults,
    /// Persistent snapshots become live, and are not recorded.
    SnapshotNotRecorded: Lives,
    /// A disk is opened for writing without a snapshot that a killed server had.
    KilledNotWaitedFor: Lives,
    /// A snapshot is given up, and goes on being recorded as one that is its instant.
    GivenUpNotLost: Lives,
    /// A table that was loaded while nobody had its store becomes live while another one has it.
    StoreTakenTwice: Lives,
    /// Whatever is at the path of a store that was made is removed with its snapshot.
    OtherFileRemoved: Lives,
    /// It is not recorded that a snapshot is being merged.
    MergeNotRecorded: Lives,
    /// A table that waits for a handover keeps a snapshot listed whose device is removed.
    HandoverOutlivesDevice: Lives,
    /// A table whose snapshot was taken over counts as one that has it.
    SpentTableCounts: Lives,
}
