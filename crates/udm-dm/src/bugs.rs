//! Bugs put in on purpose, to show that the simulator finds what it is there to find.
//!
//! Without the feature `seeded-bugs` nothing of them is compiled: [`on`] is a constant `false`. With it, one at a time can be switched
//! on for the calling thread. Each stands for a mistake that is easily made in the place where its hook is.

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
    /// What lies below a table and has nothing in flight is never polled, though it may have been told something.
    IdleLegForgotten,
    /// A piece that failed does not fail the whole.
    PieceErrorLost,
    /// The last stripe of a row lies one sector further.
    StripeShifted,
    /// The log of writes is counted, and the count stays in memory.
    SuperblockNotSent,
    /// The log of writes is counted, and who waits for that on other cores is not woken.
    CountNotRung,
    /// A lane that was prepared has begun its log, passes for idle, and is closed.
    PreparedNotBusy,
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
}

impl Bug {
    /// Every bug.
    pub const ALL: [Bug; 33] = [
        Bug::NoKick,
        Bug::NoWakeForDrain,
        Bug::RetryForgets,
        Bug::SubmitTwice,
        Bug::FlushNotFannedOut,
        Bug::PreflushDropped,
        Bug::FuaDropped,
        Bug::OffsetKeptOnError,
        Bug::CancelStrandsReturned,
        Bug::CancelKeepsDraining,
        Bug::SuspendAcksEarly,
        Bug::SwapTooEarly,
        Bug::ReloadDropsParked,
        Bug::OldTableKept,
        Bug::StalePathGeneration,
        Bug::ParkedMissReturn,
        Bug::HeldBioFails,
        Bug::LoadKeptOnError,
        Bug::FailCountedTwice,
        Bug::PathErrorNotRetried,
        Bug::MediumErrorFailsPath,
        Bug::SplitLosesTail,
        Bug::IdleLegForgotten,
        Bug::PieceErrorLost,
        Bug::StripeShifted,
        Bug::SuperblockNotSent,
        Bug::CountNotRung,
        Bug::PreparedNotBusy,
        Bug::HeldWriteOvertaken,
        Bug::FlushBeforeCount,
        Bug::CountedBeforeFlushed,
        Bug::CountedEntryOverwritten,
        Bug::ZeroesTooShort,
    ];

    /// The bug whose name is `name`, in the spelling of the source.
    ///
    /// # Errors
    /// Which there are.
    pub fn find(name: &str) -> Result<Bug, String> {
        // By way of a list of names: comparing them in a chain of iterators takes LLVM minutes to optimise.
        let names: Vec<String> = Bug::ALL.iter().map(|b| format!("{b:?}")).collect();
        match names.iter().position(|n| n == name) {
            Some(i) => Ok(Bug::ALL[i]),
            None => Err(format!("no bug {name:?}; there are {}", names.join(", "))),
        }
    }
}

#[cfg(feature = "seeded-bugs")]
thread_local! {
    static ON: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// Switches a bug on for this thread, or the one that is on off.
#[cfg(feature = "seeded-bugs")]
pub fn set(bug: Option<Bug>) {
    ON.set(bug);
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

/// Loses bios, without the panic that dropping one in flight is.
pub fn lose(bios: impl IntoIterator<Item = Box<udm_core::Bio>>) {
    for bio in bios {
        Box::leak(bio);
    }
}

/// A copy of a bio, on its way too.
pub fn twin(bio: &udm_core::Bio) -> Box<udm_core::Bio> {
    let mut data = udm_core::Segments::new();
    for piece in &bio.data {
        let mut copy = udm_core::Buf::zeroed(piece.len());
        copy.copy_from_slice(piece);
        data.push(copy);
    }
    let mut twin = udm_core::Bio::new();
    (twin.op, twin.flags, twin.owner, twin.cookie) = (bio.op, bio.flags, bio.owner, bio.cookie);
    (twin.sector, twin.sectors, twin.started, twin.data) = (bio.sector, bio.sectors, bio.started, data);
    twin.start();
    twin
}
