//! What a change is for, how far it is, and where it waits for others.

/// What a change is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TransitionKind {
    /// To suspend the device.
    Suspend,
    /// To resume it.
    Resume,
    /// To renew it in the change of a partner.
    ReopenLanes,
    /// To have it stand still for good.
    Remove,
}

/// What to do at the next step, once the cores have answered the last one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TransitionPhase {
    /// Ask the targets that are to go on.
    Preresume,
    /// Check the new table and have the cores open it.
    Prepare,
    /// The cores have tried.
    Prepared,
    /// Have the cores stop.
    Suspend,
    /// They have stopped.
    Suspended,
    /// The device stands still, for the tables to change places.
    Swap,
    /// They have: tell what is live now.
    RunResumeHooks,
    /// Have the cores go on with the table that is live now.
    Resume,
    /// They do.
    Resumed,
    /// Nothing is left to do.
    Done,
    /// The device is free for the next change.
    Finished,
}

/// Where a change waits for others that go in step with it ([`super::device_set`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SyncPoint {
    /// The targets that are to go on have nothing against it.
    Asked,
    /// Everything that can fail is over, and nothing has stopped for it.
    Prepared,
    /// The device stands still.
    Quiesced,
    /// The tables have changed places, and those that are gone know.
    Swapped,
    /// Those that are live know, and only the cores have yet to be told.
    HooksRun,
    /// The end.
    Finished,
}

impl TransitionPhase {
    /// The last stage that was reached.
    pub fn stage(self) -> Option<SyncPoint> {
        match self {
            TransitionPhase::Preresume => None,
            TransitionPhase::Prepare | TransitionPhase::Prepared => Some(SyncPoint::Asked),
            TransitionPhase::Suspend | TransitionPhase::Suspended => Some(SyncPoint::Prepared),
            TransitionPhase::Swap => Some(SyncPoint::Quiesced),
            TransitionPhase::RunResumeHooks => Some(SyncPoint::Swapped),
            TransitionPhase::Resume | TransitionPhase::Resumed | TransitionPhase::Done => {
                Some(SyncPoint::HooksRun)
            }
            TransitionPhase::Finished => Some(SyncPoint::Finished),
        }
    }
}
