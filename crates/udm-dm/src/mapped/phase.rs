//! What a change is for, how far it is, and where it waits for others.

/// What a change is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Goal {
    /// To suspend the device.
    Rest,
    /// To resume it.
    GoOn,
    /// To renew it in the change of a partner.
    Renew,
    /// To have it stand still for good.
    Leave,
}

/// What to do at the next step, once the cores have answered the last one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Ask the targets that are to go on.
    Ask,
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
    Tell,
    /// Have the cores go on with the table that is live now.
    Resume,
    /// They do.
    Resumed,
    /// Nothing is left to do.
    Done,
    /// The device is free for the next change.
    Over,
}

/// Where a change waits for others that go in step with it ([`super::changes`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    /// The targets that are to go on have nothing against it.
    Asked,
    /// Everything that can fail is over, and nothing has stopped for it.
    Prepared,
    /// The device stands still.
    Still,
    /// The tables have changed places, and those that are gone know.
    Swapped,
    /// Those that are live know, and only the cores have yet to be told.
    Told,
    /// The end.
    Over,
}

impl Phase {
    /// The last stage that was reached.
    pub fn stage(self) -> Option<Stage> {
        match self {
            Phase::Ask => None,
            Phase::Prepare | Phase::Prepared => Some(Stage::Asked),
            Phase::Suspend | Phase::Suspended => Some(Stage::Prepared),
            Phase::Swap => Some(Stage::Still),
            Phase::Tell => Some(Stage::Swapped),
            Phase::Resume | Phase::Resumed | Phase::Done => Some(Stage::Told),
            Phase::Over => Some(Stage::Over),
        }
    }
}
