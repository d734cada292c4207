//! What has changed, for who listens: devices, paths and snapshots that come, go, fail and return.
//!
//! Contract: telling waits for nobody, cores tell too; and nothing is put into words where nobody
//! listens.

use std::sync::Arc;
use udm_core::DevNo;

/// A kind of change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewsKind {
    /// A device is there.
    Created,
    /// A table was loaded into its inactive slot.
    Loaded,
    /// That slot was emptied.
    Cleared,
    /// It takes no requests.
    Suspended,
    /// It takes requests, with the table that was loaded if there was one.
    Resumed,
    /// It has another name, or a uuid.
    Renamed,
    /// It is gone.
    Removed,
    /// Its event counter went up.
    Event,
    /// A path failed.
    PathFailed,
    /// An administrator holds a path that had failed before: no check brings it back.
    PathHeld,
    /// A path that failed answers, and is not used.
    PathRefused,
    /// A path is in use again.
    PathReinstated,
    /// A path is out of use for being slow.
    PathEjected,
    /// It is in use again.
    PathAdmitted,
    /// A check of a path found another state.
    PathChecked,
    /// Requests go to another group.
    PathGroup,
    /// Some requests have no path, and this becomes of them.
    NoPath,
    /// A device of a striped target failed a request.
    StripeFailed,
    /// A store is filled so far, or can't grow.
    SnapshotFilling,
    /// A write found no room in the store.
    SnapshotOverflow,
    /// A snapshot can't be read any more.
    SnapshotInvalid,
    /// All of a snapshot is in its origin.
    MergeDone,
    /// A merge stopped.
    MergeFailed,
}

impl NewsKind {
    /// Each.
    pub const ALL: [NewsKind; 23] = {
        use NewsKind::*;
        [
            Created,
            Loaded,
            Cleared,
            Suspended,
            Resumed,
            Renamed,
            Removed,
            Event,
            PathFailed,
            PathHeld,
            PathRefused,
            PathReinstated,
            PathEjected,
            PathAdmitted,
            PathChecked,
            PathGroup,
            NoPath,
            StripeFailed,
            SnapshotFilling,
            SnapshotOverflow,
            SnapshotInvalid,
            MergeDone,
            MergeFailed,
        ]
    };

    /// What programs call it.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            NewsKind::Created => "created",
            NewsKind::Loaded => "loaded",
            NewsKind::Cleared => "cleared",
            NewsKind::Suspended => "suspended",
            NewsKind::Resumed => "resumed",
            NewsKind::Renamed => "renamed",
            NewsKind::Removed => "removed",
            NewsKind::Event => "event",
            NewsKind::PathFailed => "path-failed",
            NewsKind::PathHeld => "path-held",
            NewsKind::PathRefused => "path-refused",
            NewsKind::PathReinstated => "path-reinstated",
            NewsKind::PathEjected => "path-ejected",
            NewsKind::PathAdmitted => "path-admitted",
            NewsKind::PathChecked => "path-checked",
            NewsKind::PathGroup => "path-group",
            NewsKind::NoPath => "no-path",
            NewsKind::StripeFailed => "stripe-failed",
            NewsKind::SnapshotFilling => "snapshot-filling",
            NewsKind::SnapshotOverflow => "snapshot-overflow",
            NewsKind::SnapshotInvalid => "snapshot-invalid",
            NewsKind::MergeDone => "merge-done",
            NewsKind::MergeFailed => "merge-failed",
        }
    }
}

/// What has changed in a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateChange {
    /// Of which kind.
    pub kind: NewsKind,
    /// The number of the path that it is about.
    pub path: Option<DevNo>,
    /// The group, from 1, that it is about.
    pub group: Option<usize>,
    /// For a person, in one line without the device's name. Words of tables stand in it as they
    /// are.
    pub line: String,
}

impl StateChange {
    /// One that is about the whole device.
    #[must_use]
    pub fn new(kind: NewsKind, line: impl Into<String>) -> StateChange {
        StateChange { kind, path: None, group: None, line: line.into() }
    }
}

/// A change and whose it is, as of then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct News {
    /// The device's name; its number where the name is being changed.
    pub device: String,
    /// Its uuid.
    pub uuid: Option<String>,
    /// Its number.
    pub number: DevNo,
    /// How many events it has raised.
    pub event_nr: u32,
    /// What has changed.
    pub change: StateChange,
}

/// Hears news. It is called by cores too and waits for nobody; it has the news put into words only
/// where somebody wants them, and must not call back otherwise.
pub type Listener = Arc<dyn Fn(&dyn Fn() -> News) + Send + Sync>;
