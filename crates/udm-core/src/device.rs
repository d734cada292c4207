//! The control half of a device.

use crate::errno::EOPNOTSUPP;
use crate::{
    ChangeStatus, Cx, DiskQueue, ExtentKind, Extents, Lane, Limits, Sector, Sectors, SharedDiskState,
};
use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// The control half of a device: shared by all cores, immutable or slow to change.
pub trait Device: Send + Sync {
    /// Its identity, from [`DeviceId::new`], the same for its whole life.
    fn id(&self) -> DeviceId;

    /// Opens the data-path half, on the core that will own it.
    ///
    /// # Errors
    /// When the device can't be opened on this core.
    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError>;

    /// Size and limits, as of now.
    fn limits(&self) -> Limits;

    /// Looks how large it is now, where that can change without it. It may block, so no core calls
    /// it.
    fn refresh_size(&self) {}

    /// Somebody says that it works again: that it failed a moment ago is no reason to refuse the
    /// next request.
    fn retry_now(&self) {}

    /// True when others can make it shorter, and a write of ours would then make it longer again,
    /// with zeroes where data was. Who keeps something in it looks now and then whether its last
    /// block is there: a read of that fails when it is not, and then its limits say how much is.
    fn may_shrink(&self) -> bool {
        false
    }

    /// How it is to grow when whoever keeps something in it is about to need more; `None` where
    /// nobody has said so.
    fn growth(&self) -> Option<Growth> {
        None
    }

    /// Asks it to become at least as large as `size`, with room for what is new set aside where
    /// that can be had. Returns at once; `then` is told what came of it, from a thread of the
    /// device's own or before this returns, and sees the new size. After an error it may be larger
    /// than before all the same, and never shorter.
    fn grow(&self, size: Sectors, then: GrowCallback) {
        let _ = size;
        then(Err(OpenError::new(EOPNOTSUPP, "only a regular file grows by itself")));
    }

    /// Appends to `out` what the `len` sectors from `from` on hold, in order and without gaps,
    /// until it is full. The range is within the device.
    ///
    /// It may block, so no core calls it. What it says was so at some moment during the call: a
    /// write that was acknowledged before the call is no hole. Who does not know says data.
    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        let _ = from;
        out.push(len, ExtentKind::Data);
    }

    /// The instants since which it knows what has changed, each under another name. Asked by cores,
    /// so it waits for nobody; it may be stale the moment it is told.
    fn checkpoints(&self) -> Vec<Checkpoint> {
        Vec::new()
    }

    /// As [`Device::extents`], what of it may have changed since one of its checkpoints.
    ///
    /// What was acknowledged before the call is never told as the same. Who does not know any more,
    /// because what kept the instant is gone, says that all has changed: whoever copies what
    /// changed then copies too much, and loses nothing.
    fn changed(&self, since: &Checkpoint, from: Sector, len: Sectors, out: &mut Extents<ChangeStatus>) {
        let _ = (since, from);
        out.push(len, ChangeStatus::Changed);
    }

    /// What it shares with the other names of its disk: every disk and every mapped device has it.
    /// `None` for what is neither, as a table.
    fn shared_disk_state(&self) -> Option<&SharedDiskState> {
        None
    }

    /// Keeps other programs from having its disk alone, for as long as what is returned is held;
    /// `None` where there is nothing to keep.
    ///
    /// # Errors
    /// Another program has it.
    fn lock(&self) -> Result<Option<DiskLock>, DiskBusy> {
        Ok(None)
    }

    /// Why requests of it wait that it can neither serve nor give up, in one line; `None` while
    /// none do. May be stale the moment it is told.
    fn waits(&self) -> Option<String> {
        None
    }

    /// Why what answers in its place is not taken for it, in one line: it came back as another
    /// disk. `None` while nothing of the kind is known.
    fn refused(&self) -> Option<String> {
        None
    }

    /// The queue in front of it; `None` where there is none.
    fn queue(&self) -> Option<&dyn DiskQueue> {
        None
    }

    /// The switch of its power; `None` where it has none.
    fn power(&self) -> Option<&dyn PowerSwitch> {
        None
    }

    /// Its place among devices that lie on each other; `None` for a backend, which is the end.
    fn stacked(&self) -> Option<&dyn StackedDevice> {
        None
    }
}

/// The power of a device.
pub trait PowerSwitch: Send + Sync {
    /// Is it on? May be stale the moment it is told.
    fn is_on(&self) -> bool;

    /// Turns it on or off. Without power every request fails, and what was in a volatile cache
    /// alone is lost: what was written before the last flush began is not.
    fn turn(&self, on: bool);
}

/// An instant of a device, since which it knows what has changed.
///
/// It means that instant for good: another one that takes its name later is another checkpoint, and
/// holding it keeps nothing alive.
#[derive(Clone)]
pub struct Checkpoint {
    /// What people call it.
    pub name: String,
    /// What it is to the device that gave it.
    pub key: Weak<dyn Any + Send + Sync>,
}

/// How a device grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// By how much at a time, above 0.
    pub step: Sectors,
    /// How large at the most.
    pub max: Sectors,
}

/// Is told what came of [`Device::grow`].
pub type GrowCallback = Box<dyn FnOnce(Result<(), OpenError>) + Send>;

/// A disk that no other program has alone, until it is dropped.
pub type DiskLock = Arc<dyn Any + Send + Sync>;

/// Another program has the disk alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskBusy;

/// A device made of others: what circles are found by, and the limits on stacks counted by. Each
/// answers for its neighbours alone; who wants more walks, so that no shape of a stack is a depth
/// of calls.
pub trait StackedDevice {
    /// What it is called now.
    fn name(&self) -> String;

    /// The devices directly below, one for each lane that a lane of this device may have open of
    /// it.
    fn below(&self) -> Vec<Arc<dyn Device>>;

    /// The devices that have said to [`StackedDevice::add_parent`] that they may lie directly on this one,
    /// each once; some may have another table by now.
    fn above(&self) -> Vec<Arc<dyn Device>>;

    /// From now on `above`, whose identity is `id`, may have this device below it.
    fn add_parent(&self, id: DeviceId, above: Weak<dyn Device>);
}

/// Tells devices apart, within one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(u64);

impl DeviceId {
    /// A new identity.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "each call gives another")]
    pub fn new() -> DeviceId {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        DeviceId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Why a lane could not be opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct OpenError {
    /// The errno, positive.
    pub errno: i32,
    /// What went wrong, for a person.
    pub text: String,
}

impl OpenError {
    /// An error with `errno` and a text.
    pub fn new(errno: i32, text: impl Into<String>) -> OpenError {
        OpenError { errno, text: text.into() }
    }
}
