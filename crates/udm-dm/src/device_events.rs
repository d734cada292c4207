//! What has changed, for who listens: devices, paths and snapshots that come, go, fail and return.
//!
//! Contract: telling waits for nobody, cores tell too; and nothing is put into words where nobody
//! listens.

use std::sync::Arc;
use udm_core::DevNo;

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $text:literal,)*) => {
        /// A kind of change.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum EventKind {
            $($(#[$doc])* $kind,)*
        }

        impl EventKind {
            /// Each.
            pub const ALL: &[EventKind] = &[$(EventKind::$kind),*];

            /// What programs call it.
            #[must_use]
            pub const fn text(self) -> &'static str {
                match self {
                    $(EventKind::$kind => $text,)*
                }
            }
        }
    };
}

kinds! {
    /// A device is there.
    Created = "created",
    /// A table was loaded into its inactive slot.
    Loaded = "loaded",
    /// That slot was emptied.
    Cleared = "cleared",
    /// It takes no requests.
    Suspended = "suspended",
    /// It takes requests, with the table that was loaded if there was one.
    Resumed = "resumed",
    /// It has another name, or a uuid.
    Renamed = "renamed",
    /// It is gone.
    Removed = "removed",
    /// Its event counter went up.
    Event = "event",
    /// A path failed.
    PathFailed = "path-failed",
    /// An administrator holds a path that had failed before: no check brings it back.
    PathHeld = "path-held",
    /// A path that failed answers, and is not used; or it keeps failing, and is held back.
    PathRefused = "path-refused",
    /// A path is in use again.
    PathReinstated = "path-reinstated",
    /// A path is out of use for being slow.
    PathEjected = "path-ejected",
    /// It is in use again.
    PathAdmitted = "path-admitted",
    /// A check of a path found another state.
    PathChecked = "path-checked",
    /// Requests go to another group.
    PathGroup = "path-group",
    /// A better group than the one in use has a path again, and is gone back to.
    Failback = "failback",
    /// Some requests have no path, and this becomes of them.
    NoPath = "no-path",
    /// A device of a striped target failed a request.
    StripeFailed = "stripe-failed",
    /// A store is filled so far, or can't grow.
    SnapshotFilling = "snapshot-filling",
    /// A write found no room in the store.
    SnapshotOverflow = "snapshot-overflow",
    /// A snapshot can't be read any more.
    SnapshotInvalid = "snapshot-invalid",
    /// All of a snapshot is in its origin.
    MergeDone = "merge-done",
    /// A merge stopped.
    MergeFailed = "merge-failed",
}

/// What has changed in a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateChange {
    /// Of which kind.
    pub kind: EventKind,
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
    pub fn new(kind: EventKind, line: impl Into<String>) -> StateChange {
        StateChange { kind, path: None, group: None, line: line.into() }
    }
}

/// A change and whose it is, as of then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceEvent {
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
pub type EventSink = Arc<dyn Fn(&dyn Fn() -> DeviceEvent) + Send + Sync>;
