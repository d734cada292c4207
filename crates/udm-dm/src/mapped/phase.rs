//! Kind, phase and synchronization points of a change.

/// The purpose of a change.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TransitionKind {
    /// Suspend the device.
    Suspend,
    /// Resume the device.
    Resume,
    /// Renew the device in the change of a partner.
    ReopenLanes,
    /// Stop the device for its removal.
    Remove,
}

/// The next step of a change, after the cores have answered the previous one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TransitionPhase {
    /// Ask the targets that are to become live or continue.
    Preresume,
    /// Check the new table, and let the cores open it.
    Prepare,
    /// The cores have answered the prepare.
    Prepared,
    /// Stop the cores.
    Suspend,
    /// The cores have stopped.
    Suspended,
    /// The device is quiesced; swap the tables.
    Swap,
    /// The tables are swapped; call the resume hooks.
    RunResumeHooks,
    /// Let the cores continue with the live table.
    Resume,
    /// The cores continue.
    Resumed,
    /// No step is left.
    Done,
    /// The device is free for the next change.
    Finished,
}

/// Points at which a change waits for the other devices of its set ([`super::device_set`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TransitionSyncPoint {
    /// The targets that are to become live or continue agreed.
    Preresumed,
    /// All steps that can fail are done, and nothing has stopped.
    Prepared,
    /// The device has no request in flight.
    Quiesced,
    /// The tables are swapped, and the hooks of the old tables have run.
    Swapped,
    /// The resume hooks have run; only the cores do not know yet.
    HooksRun,
    /// The change is finished.
    Finished,
}

impl TransitionPhase {
    /// The last synchronization point that was reached.
    pub fn stage(self) -> Option<TransitionSyncPoint> {
        match self {
            TransitionPhase::Preresume => None,
            TransitionPhase::Prepare | TransitionPhase::Prepared => Some(TransitionSyncPoint::Preresumed),
            TransitionPhase::Suspend | TransitionPhase::Suspended => Some(TransitionSyncPoint::Prepared),
            TransitionPhase::Swap => Some(TransitionSyncPoint::Quiesced),
            TransitionPhase::RunResumeHooks => Some(TransitionSyncPoint::Swapped),
            TransitionPhase::Resume | TransitionPhase::Resumed | TransitionPhase::Done => {
                Some(TransitionSyncPoint::HooksRun)
            }
            TransitionPhase::Finished => Some(TransitionSyncPoint::Finished),
        }
    }
}
