//! Settings of a snapshot, set by messages. The kernel's snapshots take no messages.
//!
//! ```text
//! message: set on_full invalidate|pause|fail
//! message: set watermark 0-100
//! message: set copy_memory BYTES
//! message: set map_memory BYTES
//! message: set grow SIZE
//! message: set grow_max SIZE
//! message: grown
//! ```
//!
//! The settings belong to the snapshot, not to its table, and are kept in a handover.

use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering::Relaxed};
use udm_dm::TargetError;
use udm_wire::size;

/// The policy for a write if the store has no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum FullStoreWritePolicy {
    /// The snapshot becomes invalid, or overflowed (`PO`), as in the kernel; writes of the origin
    /// continue.
    Invalidate,
    /// The write waits until the store has grown.
    Pause,
    /// The write fails with ENOSPC, and the snapshot stays valid.
    Fail,
}

/// Minimum copy memory. If less is in flight, a lane may start a copy of any length.
const COPY_MEMORY_MIN: usize = 64 << 10;

/// The settings of one snapshot. Relaxed: the values are independent.
pub(super) struct SnapshotSettings {
    on_full: AtomicU8,
    /// Percent of the store in use at which an event is raised; 0 for none.
    watermark: AtomicU8,
    copy_memory: AtomicUsize,
    map_memory: AtomicU64,
}

impl SnapshotSettings {
    /// The kernel's behaviour, with at most `copy_memory` bytes of copies per lane.
    pub(super) fn new(copy_memory: usize) -> SnapshotSettings {
        SnapshotSettings {
            on_full: AtomicU8::new(FullStoreWritePolicy::Invalidate as u8),
            watermark: AtomicU8::new(0),
            copy_memory: AtomicUsize::new(copy_memory),
            map_memory: AtomicU64::new(u64::MAX),
        }
    }

    pub(super) fn on_full(&self) -> FullStoreWritePolicy {
        match self.on_full.load(Relaxed) {
            0 => FullStoreWritePolicy::Invalidate,
            1 => FullStoreWritePolicy::Pause,
            _ => FullStoreWritePolicy::Fail,
        }
    }

    /// Maximum bytes of copies in flight per lane.
    pub(super) fn copy_memory(&self) -> usize {
        self.copy_memory.load(Relaxed)
    }

    /// Maximum bytes of the exception map. Above it nothing is copied: the store counts as full.
    pub(super) fn map_memory(&self) -> u64 {
        self.map_memory.load(Relaxed)
    }

    /// True if the watermark is between two fill levels of a store of `size`.
    pub(super) fn crosses(&self, before: u64, now: u64, size: u64) -> bool {
        let percent = u64::from(self.watermark.load(Relaxed));
        let mark = size * percent / 100;
        percent > 0 && before < mark && mark <= now
    }

    /// Handles `set KEY VALUE`.
    ///
    /// # Errors
    /// EINVAL for an unknown key or an invalid value.
    pub(super) fn set(&self, key: &str, value: &str) -> Result<(), TargetError> {
        let refuse = |wanted: &str| {
            let text = format!("Invalid value for {key}: {value:?}");
            Err(TargetError::new(text).because(wanted.to_owned()).at(2))
        };
        match key {
            "on_full" => {
                let policy = match value {
                    "invalidate" => FullStoreWritePolicy::Invalidate,
                    "pause" => FullStoreWritePolicy::Pause,
                    "fail" => FullStoreWritePolicy::Fail,
                    _ => return refuse("invalidate, pause or fail"),
                };
                self.on_full.store(policy as u8, Relaxed);
            }
            "watermark" => match value.parse() {
                Ok(percent @ 0..=100) => self.watermark.store(percent, Relaxed),
                _ => return refuse("0 to 100 percent"),
            },
            "copy_memory" => match size::parse_size_with_unit(value).map(usize::try_from) {
                Ok(Ok(bytes @ COPY_MEMORY_MIN..)) => self.copy_memory.store(bytes, Relaxed),
                _ => return refuse("64k or more bytes"),
            },
            "map_memory" => match size::parse_size_with_unit(value) {
                Ok(bytes) => self.map_memory.store(bytes, Relaxed),
                Err(_) => return refuse("a number of bytes"),
            },
            _ => {
                let text = format!("Unrecognised snapshot setting: {key}");
                return Err(TargetError::new(text)
                    .because("on_full, watermark, copy_memory, map_memory, grow or grow_max")
                    .at(1));
            }
        }
        Ok(())
    }
}
