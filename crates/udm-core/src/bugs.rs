//! Bugs put in on purpose, to show that the simulator finds what it is there to find.
//!
//! Without the feature `seeded-bugs` nothing of them is compiled: [`on`] is a constant `false`.
//! With it, one at a time can be switched on for the calling thread. Each stands for a mistake that
//! is easily made in the place where its hook is.

mod all;
mod bios;

pub use all::World;
pub use bios::{bury, echoes, lose, remember, twin};

/// A bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// A message changes what held bios wait for, and no lane is told.
    NoKick,
    /// A lane that is to hand a bio back goes to sleep over it.
    NoWakeForDrain,
    /// A path error sends all bios of a batch round again but one.
    RetryForgets,
    /// A bio goes down twice, as a copy.
    SubmitTwice,
    /// A flush goes to the first device of a table only.
    FlushNotFannedOut,
    /// A write that asks for a flush before it goes without.
    PreflushDropped,
    /// A write that must be durable goes to a device without FUA, and no flush follows.
    FuaDropped,
    /// An offset is not taken off a bio that failed.
    OffsetKeptOnError,
    /// A bio that comes back takes its place from another line of the table, which lies on the same
    /// device.
    NeighboursOffset,
    /// A suspend is called off, and bios that were to be handed back stay where they are.
    CancelStrandsReturned,
    /// A suspend is called off, and bios without a path go on failing.
    CancelKeepsDraining,
    /// A core says that it is suspended with bios still in flight.
    SuspendAcksEarly,
    /// A resume does not wait until the cores have stopped.
    SwapTooEarly,
    /// Bios that are parked when a table changes are gone after it.
    ReloadDropsParked,
    /// The old table goes on being used behind a reload.
    OldTableKept,
    /// A lane does not notice that a path has failed.
    StalePathGeneration,
    /// Held bios miss that a path returned, because a new one saw it first.
    ParkedMissReturn,
    /// A bio that no path can take fails although it may wait.
    HeldBioFails,
    /// The load of a path is not taken back when a bio fails.
    LoadKeptOnError,
    /// A path that has failed fails once more.
    FailCountedTwice,
    /// An error that blames the path goes up.
    PathErrorNotRetried,
    /// An error that blames the medium fails the path.
    MediumErrorFailsPath,
    /// The last of several pieces is never sent.
    SplitLosesTail,
    /// What lies below a table and has nothing in flight is never polled, though it may have been
    /// told something.
    IdleLegForgotten,
    /// A piece that failed does not fail the whole.
    PieceErrorLost,
    /// The last stripe of a row lies one sector further.
    StripeShifted,
    /// The log of writes is counted, and the count stays in memory.
    SuperblockNotSent,
    /// The log of writes is counted, and who waits for that on other cores is not woken.
    CountNotRung,
    /// A disk that a target needs alone is not claimed for it.
    DiskNotClaimed,
    /// A lane that was prepared has begun its log, passes for idle, and is closed.
    PreparedNotBusy,
    /// A path fails, and the checker is not told.
    FailNotRung,
    /// A path works, a check of it fails, and nobody draws the conclusion.
    BadCheckIgnored,
    /// A check of a path that works is not answered, and is waited for.
    HungCheckIgnored,
    /// A FUA write is logged before a held write that it overlaps and that completed first.
    HeldWriteOvertaken,
    /// A flush is acknowledged when it is on the log, before the superblock counts it.
    FlushBeforeCount,
    /// The superblock counts entries that are in the cache of the log device.
    CountedBeforeFlushed,
    /// Entries are written where the superblock still counts older ones.
    CountedEntryOverwritten,
    /// The end of a read from nowhere is not filled.
    ZeroesTooShort,
    /// A table keeps the limits that the devices below had when it was loaded.
    StaleLimits,
    /// A request that is not whole blocks is passed on.
    BlocksIgnored,
    /// A table over a read-only device says that it can be written.
    ReadOnlyLost,
    /// A resume is refused, and the lanes that were prepared for it stay open.
    PrepareNotUndone,
    /// A table that was replaced is held on to.
    LeavingTableKept,
    /// A core could not open its lane of the new table, and the resume goes on.
    OpenFailureIgnored,
    /// A suspend that is called off goes on waiting for what hangs.
    CancelWaits,
    /// A piece that a full lane handed back, unstarted, passes for done.
    HandedBackIsDone,
    /// A bio that is handed back keeps the sector of the device below.
    MovedWhenHandedBack,
    /// A stripe fails, and no event is raised.
    StripeEventLost,
    /// The error target lets writes succeed.
    ErrorForgiven,
    /// A delay target asks for turns though nothing waits in it.
    StirsAtRest,
    /// A delay target does not ask to be woken for what waits in it.
    DelaySleeps,
    /// Lanes go on with the set of bad blocks that they saw first.
    BadBlocksStale,
    /// Bad blocks are counted from the start of the target, and not of the device below.
    BadBlockMisplaced,
    /// A write that is to be dropped goes down.
    DroppedWriteSent,
    /// A read that is to be changed comes back as it is.
    CorruptionForgotten,
    /// The data of who writes is changed, and not a copy.
    CorruptsOwnData,
    /// A lane waits until the mark at the end of its log is counted, which a resume has taken away.
    EndMarkWaits,
    /// A write that was tried again on another path takes effect once more, later.
    LandsAfterRetry,
    /// The load of a path is not taken back when a full lane hands a bio back.
    LoadKeptOnHandBack,
    /// An event is raised for each round of retries, whether a path failed or not.
    EventForEachError,
    /// A bio that fails is not counted among what its path has served.
    ErrorsNotServed,
    /// Several devices are resumed together, and the upper ones wait for what one of them holds
    /// that is suspended.
    SetWaitsForItself,
    /// Several devices that change together are called off, and only the first hears of it.
    SetHalfCalledOff,
    /// Of several devices that change together the first go on before all have come to rest.
    SetNotInStep,
    /// Tables that become live together take the limits of those that were live before them.
    LimitsToComeIgnored,
    /// A path is looked at and then marked as failed, as if no other core could have failed it in
    /// between.
    FailNotAtomic,
    /// A lane takes for seen what has changed since it looked at the paths.
    SeenTooLate,
    /// A copy is said to be in the store of a snapshot before its data is.
    CopyBeforeData,
    /// The records of copies are written while their data is in a cache.
    RecordsUnflushed,
    /// A copy is published when its record is written, and that may be in a cache.
    RecordsBelieved,
    /// A write of an origin does not wait for reads of its snapshot that are under way.
    ReaderOvertaken,
    /// A chunk is copied, and who waits for it is not woken.
    CopyNotRung,
    /// The write that a chunk is copied for is not laid over the copy.
    OverlayLost,
    /// The last chunk of an origin is copied whole, though the origin ends within it.
    LastChunkWhole,
    /// A merge forgets its chunks while they are in the cache of the origin.
    MergeUnflushed,
    /// A snapshot loses a copy, and its store is not told.
    InvalidUnmarked,
    /// A snapshot becomes live, and its origin goes on as before.
    OriginNotRenewed,
    /// A merge that goes on behind a suspend called off begins a run beside the one under way.
    MergeTwice,
    /// A merge takes what its snapshot had copied for what is being merged.
    HandoverUnsettled,
    /// A discard of a snapshot goes on to its origin though nobody has asked for that.
    DiscardPassedDown,
    /// A discard that goes on to the origin is longer than that takes.
    DiscardTooLong,
    /// A store has grown, and what waits for room in it is not told.
    GrownUnheard,
    /// A store is used as a table that ends in the middle of a block.
    EndInMidBlock,
    /// What copies is handed back by each turn of a suspend, and begins anew.
    CopyHandedBack,
    /// The memory of a copy is not given back.
    CopyMemoryKept,
    /// A merge writes to the origin past the other snapshots.
    MergePastOthers,
    /// A store that is becoming larger passes for full.
    FullWhileGrowing,
    /// A store has become larger, and who waits for that is not told.
    GrownNotRung,
    /// What was written to a snapshot is missing in its map since another one.
    MapLacksOwn,
    /// A map since an instant that nobody keeps any more is given all the same.
    MapOutlives,
    /// A store that can't be told that it is invalid is marked nowhere.
    MarkNotKept,
    /// A write ends for want of room, and who waits for the chunk that it had claimed is not told.
    GivenUpUnheard,
    /// An answer that comes after its read was given up passes for that of another.
    LateAnswerBelieved,
    /// A write that is past its deadline is sent to another path while the first has it still.
    WriteGivenUp,
    /// A read that was given up is still on its path, and a suspend does not wait for it.
    LateNotOwed,
    /// A hedge is sent whether reads have earned it or not.
    HedgeUnpaid,
    /// A read was answered by its hedge, and the answer of the path that was chosen is taken too.
    LoserTaken,
    /// A path is put out of use for being slower than the others, however little.
    MerelySlower,
    /// A path that is out of use for being slow goes on being chosen.
    OutStillUsed,
    /// A path that is out of use for being slow is not used where nothing else is left.
    OutIsFailed,
    /// A path that was put out of use for being slow is never tried again.
    OutForEver,
    /// A path that was put out of use for being slow comes back whatever its trial says.
    TrialBelieved,
    /// What straddles the end of a receive's memory loses a byte on its way into the next.
    CutLosesByte,
    /// The rest of a send that was short begins where the send began.
    AnswerSentTwice,
    /// A send was short, and the memory of the rest goes back to the pool before it has left.
    BufferBackEarly,
    /// A connection that may pass its core's budget of memory, and needs that no more, keeps others
    /// from it.
    PassKept,
    /// What a connection gives back of its core's budget of memory goes on being counted.
    BudgetKept,
    /// A connection that waited for memory, and needs none any more, keeps its place in the line.
    LineKept,
    /// A connection that has nothing else under way answers a flush by itself.
    FlushWhenIdle,
    /// A write of a part of a block does not wait until it has the block to itself.
    HoldSkipped,
    /// A connection goes on on another core without what had arrived and was not looked at.
    UnreadLeftBehind,
    /// A connection ends, and its core keeps its lane of the device open.
    LaneKept,
    /// A request whose client is gone goes on being counted among those that its device has.
    InFlightKept,
    /// A block status tells of blocks beyond what was asked about.
    StatusTooLong,
    /// A connection that went on on another core keeps its place on the first.
    PlaceKept,
    /// No flush follows a write-zeroes or a trim that must be durable.
    ZeroesFuaForgotten,
    /// Writes that wait for a hold are not looked at when it is over.
    ParkedForgotten,
    /// A removal takes the registry's entry away of whoever has its device's number by now.
    EntryOfAnother,
    /// A table is gone, and the device below it goes on being counted as used.
    HoldKept,
    /// A device could not be made, and its name stays taken.
    MadeKept,
    /// A device is removed, and its number stays taken.
    NumberKept,
    /// A removal is refused, and its device is not found any more.
    LeavingKept,
    /// A removal is refused, and clients do not find its device any more.
    ExportLost,
    /// A table lets go of a device whose removal was deferred, and nobody is told.
    DeferredUnheard,
    /// A removal that was deferred comes although that was undone while it waited its turn.
    DeferredAnyway,
    /// A number of a disk is followed to where its name leads by the time it is opened.
    NumberElsewhere,
    /// A table is loaded into a device that was removed while its names were looked up.
    LoadIntoGone,
    /// A verb is done before what it let go is closed.
    LetGoUnwaited,
    /// A device has another name, and its old one stays taken.
    OldNameKept,
    /// A device has another name, and clients find it by its old one.
    ExportNotRenamed,
    /// A device is renamed while it is being removed.
    RenamedLeaving,
    /// Who waits for an event listens only behind the look at what has come already.
    EventBetween,
    /// A device is removed, and who waits for its events is not told.
    GoneUnheard,
    /// Somebody waits no more for an event, and no other who does is counted either.
    WaitersForgotten,
    /// A multipath device can't be made for one of its paths, and its name stays taken.
    RefusedPathKept,
    /// A path that is given twice, by two names of one, makes two paths of a multipath device.
    PathTwice,
    /// An NBD server's answer to a request that is not under way is passed over.
    AnswerToNothing,
    /// An NBD server's answer is taken for the request that has the place of its own by now.
    AnswerToAnother,
    /// A read of which an NBD server has sent a part passes for whole.
    PartTaken,
    /// A write that an NBD server refuses before it has all its data ends while the rest is being
    /// sent.
    EarlyEnds,
    /// Of a write that does not fit into one send the rest is not sent.
    RestOfWriteLost,
    /// Of a short send the rest is not sent.
    RestNotSent,
    /// A send that was interrupted ends the connection to an NBD server.
    InterruptedLost,
    /// What our system had no memory to send to an NBD server is sent again at once, and again.
    ShortageSpins,
    /// A write that must be durable is asked of an NBD server as any other.
    FuaNotAsked,
    /// An NBD server that comes back with another size is taken for what it was.
    SizeChangeTaken,
    /// Nobody looks whether a handshake with an NBD server takes for ever.
    HandshakeUnwatched,
    /// A write that an NBD server may still deliver goes elsewhere at once.
    RetryBeforeFence,
    /// A write that asks an NBD server for a flush before it goes without.
    FlushFirstForgotten,
    /// A lane that can't connect tries again at once.
    NoBackOff,
    /// Requests that wait when a connection is lost are lost with it.
    LostWithConnection,
    /// A tag is handed to a lane of another core, which is not woken for it.
    TagNotRung,
    /// A write that must be durable is merged into one that need not be.
    MergedFlags,
    /// A request that was merged fails, and the first of its parts does not.
    MergedErrorLost,
    /// The parts of a read that was merged get each other's data.
    MergedReadShifted,
}

#[cfg(feature = "seeded-bugs")]
thread_local! {
    static ON: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// Switches a bug on for this thread, or the one that is on off.
#[cfg(feature = "seeded-bugs")]
pub fn set(bug: Option<Bug>) {
    ON.set(bug);
    bios::forget();
}

/// Is `bug` on?
#[cfg(feature = "seeded-bugs")]
pub fn on(bug: Bug) -> bool {
    ON.get() == Some(bug)
}

/// Is `bug` on? Never.
#[cfg(not(feature = "seeded-bugs"))]
#[inline(always)]
pub const fn on(_: Bug) -> bool {
    false
}
