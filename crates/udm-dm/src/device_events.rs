//! Device events: devices, paths and snapshots are created, removed, fail and recover.
//!
//! Contract: sending an event never blocks, because cores send events too. The text of an event is
//! formatted only if a client listens.

use std::sync::Arc;
use udm_core::DevNo;

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $text:literal,)*) => {
        /// The kind of an event.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum EventKind {
            $($(#[$doc])* $kind,)*
        }

        impl EventKind {
            /// All kinds.
            pub const ALL: &[EventKind] = &[$(EventKind::$kind),*];

            /// The name of the kind in the API.
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
    /// The device was created.
    Created = "created",
    /// A table was loaded into its inactive slot.
    Loaded = "loaded",
    /// The inactive slot was cleared.
    Cleared = "cleared",
    /// The device was suspended.
    Suspended = "suspended",
    /// The device was resumed, with the inactive table if there was one.
    Resumed = "resumed",
    /// The device has a new name or uuid.
    Renamed = "renamed",
    /// The device was removed.
    Removed = "removed",
    /// The event counter of the device increased.
    Event = "event",
    /// A path failed.
    PathFailed = "path-failed",
    /// An administrator failed a path that was already failed. No check reinstates it.
    PathHeld = "path-held",
    /// A failed path answers, but it is not reinstated: its device is refused, or the path is held
    /// back because it keeps failing.
    PathRefused = "path-refused",
    /// A path is in use again.
    PathReinstated = "path-reinstated",
    /// A path was ejected because it is slow.
    PathEjected = "path-ejected",
    /// An ejected path is in use again.
    PathAdmitted = "path-admitted",
    /// A check of a path found another state.
    PathChecked = "path-checked",
    /// Requests go to another path group.
    PathGroup = "path-group",
    /// A better group than the current one has a usable path again, and requests return to it.
    Failback = "failback",
    /// No path is usable. The event says whether requests are queued or fail.
    NoPath = "no-path",
    /// A device of a striped target failed a request.
    StripeFailed = "stripe-failed",
    /// A store reached a fill level, or cannot grow.
    SnapshotFilling = "snapshot-filling",
    /// A write found no free chunk in the store.
    SnapshotOverflow = "snapshot-overflow",
    /// A snapshot became invalid.
    SnapshotInvalid = "snapshot-invalid",
    /// A merge copied all chunks of a snapshot into its origin.
    MergeDone = "merge-done",
    /// A merge stopped.
    MergeFailed = "merge-failed",
    /// A clone copied all of its source into its destination.
    CloneHydrated = "clone-hydrated",
    /// The metadata of a clone cannot be written, or not even read.
    CloneMetadataFailed = "clone-metadata-failed",
    /// The device is being moved to another place.
    MoveStarted = "move-started",
    /// The device was moved to another place.
    Moved = "moved",
    /// A move has ended, and the device is where it was.
    MoveFailed = "move-failed",
}

/// A change of a device, without the identity of the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceEventDetails {
    /// The kind of the event.
    pub kind: EventKind,
    /// Number of the path that the event is about.
    pub path: Option<DevNo>,
    /// Number of the path group, from 1, that the event is about.
    pub group: Option<usize>,
    /// One line for a person, without the name of the device. Words of tables are quoted unchanged.
    pub line: String,
}

impl DeviceEventDetails {
    /// A change that concerns the whole device.
    #[must_use]
    pub fn new(kind: EventKind, line: impl Into<String>) -> DeviceEventDetails {
        DeviceEventDetails { kind, path: None, group: None, line: line.into() }
    }
}

/// A change and the identity of its device at that time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceEvent {
    /// Name of the device; its number if the name is being changed.
    pub device: String,
    /// Uuid of the device.
    pub uuid: Option<String>,
    /// Number of the device.
    pub number: DevNo,
    /// Event counter of the device.
    pub event_nr: u32,
    /// The change.
    pub change: DeviceEventDetails,
}

/// Receives events. Cores call it too, so it must not block. It calls its argument, which formats
/// the event, only if a client listens.
pub type EventSink = Arc<dyn Fn(&dyn Fn() -> DeviceEvent) + Send + Sync>;
