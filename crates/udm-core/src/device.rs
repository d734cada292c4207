//! The control half of a device, and types of its interface.

use crate::errno::EOPNOTSUPP;
use crate::{
    Cx, DiskQueue, ExtentKind, Extents, Lane, Limits, RangeChangeStatus, Sector, Sectors, SharedDiskState,
};
use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// The control half of a device: shared by all cores, immutable or rarely changed.
pub trait Device: Send + Sync {
    /// The id of the device, from [`DeviceId::new`], constant for its whole life.
    fn id(&self) -> DeviceId;

    /// Opens a lane on the core that will own it.
    ///
    /// # Errors
    /// The device cannot be opened on this core.
    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError>;

    /// Current size and limits.
    fn limits(&self) -> Limits;

    /// Reads the current size, if it can change from outside. May block, so no core calls this.
    fn refresh_size(&self) {}

    /// Makes the device retry at once: an earlier failure is no reason to refuse the next request.
    fn retry_now(&self) {}

    /// True if another program may truncate the file. A later write would extend it again, with
    /// zeroes in place of the lost data. So a user that stores metadata must read the last block
    /// from time to time. If it is missing, the read fails, and [`Device::limits`] shows the new
    /// size.
    fn may_shrink(&self) -> bool {
        false
    }

    /// True if the device is one version of its content, and fails all reads of another version.
    /// Its user need not read it to recognise it, and must not while its server may be down: such a
    /// read waits.
    fn is_pinned_version(&self) -> bool {
        false
    }

    /// How the device grows when its user will soon need more space; `None` if it must not grow.
    fn growth(&self) -> Option<GrowthPolicy> {
        None
    }

    /// Asks the device to grow to at least `size`, with space allocated for the new part if
    /// possible. Returns at once. `then` gets the result, on a thread of the device or before this
    /// returns, and sees the new size. After an error the device may be larger than before, never
    /// smaller.
    fn grow(&self, size: Sectors, then: GrowResultCallback) {
        let _ = size;
        then(Err(DeviceControlError::new(EOPNOTSUPP, "udm can grow only a regular file")));
    }

    /// Appends the allocation state of `len` sectors from `from` on to `out`, in order and without
    /// gaps, until `out` is full. The range is within the device.
    ///
    /// May block, so no core calls this. Each extent was correct at some moment during the call: a
    /// write acknowledged before the call is never reported as a hole. If the state is unknown, the
    /// extent is [`ExtentKind::Data`].
    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        let _ = from;
        out.push(len, ExtentKind::Data);
    }

    /// The checkpoints since which the device knows its changes, each with another name. Cores call
    /// this, so it does not block. The list may be stale at once.
    fn checkpoints(&self) -> Vec<ChangeTrackingCheckpoint> {
        Vec::new()
    }

    /// As [`Device::extents`], for changes since a checkpoint of the device.
    ///
    /// A write acknowledged before the call is never reported as [`RangeChangeStatus::Same`]. If
    /// the checkpoint no longer exists, everything is reported as changed: a backup then copies too
    /// much and loses nothing.
    fn changed(
        &self,
        since: &ChangeTrackingCheckpoint,
        from: Sector,
        len: Sectors,
        out: &mut Extents<RangeChangeStatus>,
    ) {
        let _ = (since, from);
        out.push(len, RangeChangeStatus::Changed);
    }

    /// State shared with the other names of the disk. Every disk and every mapped device has it;
    /// others, such as a table, return `None`.
    fn shared_disk_state(&self) -> Option<&SharedDiskState> {
        None
    }

    /// Locks the disk against exclusive use by other programs, until the returned lock is dropped;
    /// `None` if there is nothing to lock.
    ///
    /// # Errors
    /// Another program has the disk.
    fn lock(&self) -> Result<Option<InterProcessDiskLock>, DiskInUseByOtherProgram> {
        Ok(None)
    }

    /// The reason why requests wait that the device can neither serve nor fail, in one line; `None`
    /// if none waits. May be stale at once.
    fn stall_reason(&self) -> Option<String> {
        None
    }

    /// The reason why a reconnected server is rejected, in one line: it has become another disk.
    /// `None` if none is known.
    fn rejection_reason(&self) -> Option<String> {
        None
    }

    /// The name of the disk that is the same on all its paths, as `wwid` in sysfs; `None` if the
    /// device reports none.
    fn wwid(&self) -> Option<String> {
        None
    }

    /// The priority of this path, as a prioritizer of multipath-tools would give it; `None` if the
    /// device reports none.
    fn path_priority(&self) -> Option<u32> {
        None
    }

    /// The request queue in front of the device; `None` if there is none.
    fn queue(&self) -> Option<&dyn DiskQueue> {
        None
    }

    /// The power switch of the device; `None` if it has none.
    fn power(&self) -> Option<&dyn PowerSwitch> {
        None
    }

    /// The device's place in a stack of devices; `None` for a backend, which is the bottom.
    fn stacked(&self) -> Option<&dyn StackedDevice> {
        None
    }
}

/// The power switch of a device.
pub trait PowerSwitch: Send + Sync {
    /// True if the power is on. May be stale at once.
    fn is_on(&self) -> bool;

    /// Switches the power. Without power every request fails, and data that is only in the volatile
    /// cache is lost. Data written before the last flush began is kept.
    fn turn(&self, on: bool);
}

/// A moment since which a device knows its changes.
///
/// A checkpoint stands for one moment: a later checkpoint with the same name is a different one.
/// Holding it keeps nothing alive.
#[derive(Clone)]
pub struct ChangeTrackingCheckpoint {
    /// Name for users.
    pub name: String,
    /// Identity, private to the device that returned it.
    pub key: Weak<dyn Any + Send + Sync>,
}

/// How a device grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrowthPolicy {
    /// Growth per step, above 0.
    pub step: Sectors,
    /// Maximum size.
    pub max: Sectors,
}

/// Receives the result of [`Device::grow`].
pub type GrowResultCallback = Box<dyn FnOnce(Result<(), DeviceControlError>) + Send>;

/// A lock of a disk against exclusive use by other programs, until it is dropped.
pub type InterProcessDiskLock = Arc<dyn Any + Send + Sync>;

/// Error: another program uses the disk exclusively.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskInUseByOtherProgram;

/// A device made of others, for the detection of cycles and the limits on stacks. A device returns
/// only its direct neighbours, and a caller walks from there. So deep stacks cause no deep
/// recursion.
pub trait StackedDevice {
    /// The current name of the device.
    fn name(&self) -> String;

    /// The uuid of the device, which any text may be; `None` if it has none.
    fn uuid(&self) -> Option<String> {
        None
    }

    /// The devices directly below, one entry per lower lane that a lane of this device may open.
    fn children(&self) -> Vec<Arc<dyn Device>>;

    /// The devices registered by [`StackedDevice::add_parent`], each once. Some may no longer use
    /// this device.
    fn parents(&self) -> Vec<Arc<dyn Device>>;

    /// Registers `parent`, with the id `id`, as a device that may use this device.
    fn add_parent(&self, id: DeviceId, parent: Weak<dyn Device>);
}

/// Identity of a device, unique in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(u64);

impl DeviceId {
    /// Creates a new id.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "each call returns a different value")]
    pub fn new() -> DeviceId {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        DeviceId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The error of opening a lane, and of other control operations.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct DeviceControlError {
    /// The errno, positive.
    pub errno: i32,
    /// Description for users.
    pub text: String,
}

impl DeviceControlError {
    /// Creates an error.
    pub fn new(errno: i32, text: impl Into<String>) -> DeviceControlError {
        DeviceControlError { errno, text: text.into() }
    }
}
