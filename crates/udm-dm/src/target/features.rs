//! The fixed features of a target: how the table treats it.

/// What a table must know of a target besides its devices. The values of a target never change. By
/// default a target is bio-based and has no special feature.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TargetFeatures {
    /// How requests reach the target. The first table of a device fixes its mode.
    pub queue_mode: DmQueueMode,
    /// The type must be alone in its table (kernel `DM_TARGET_SINGLETON`). While such a target is
    /// live, its device takes only tables of the same type, or tables that fit every mode
    /// ([`DmQueueMode::Any`]).
    pub singleton: bool,
    /// Discards are also cut at multiples of [`Target::max_io_len`](super::Target::max_io_len).
    pub cuts_discards: bool,
    /// A flush may bypass the map and go to each device below once, whatever else uses the device
    /// (kernel `flush_bypasses_map`). A table with only such targets sends one flush per distinct
    /// device.
    pub flush_bypasses_map: bool,
    /// The devices are paths to one disk, so a write through one path is read through another.
    pub is_over_one_disk: bool,
    /// A message fails with EBUSY while the device is suspended. The kernel leaves this to each
    /// target; only multipath does it.
    pub refuses_messages_while_suspended: bool,
    /// The lanes have work at a resume and a suspend even if the device is not used, such as
    /// beginning and ending a log. A lane is then opened for this work.
    pub needs_own_lane: bool,
}

/// How requests reach a target, in the kernel's terms. udm always passes bios; the mode only
/// decides which table may replace which.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DmQueueMode {
    /// Bio-based: nearly all targets, and multipath with `queue_mode bio`.
    #[default]
    Bio,
    /// Request-based: multipath by default.
    Request,
    /// Fits every mode (the error target).
    Any,
}

impl DmQueueMode {
    /// The kernel's number (`enum dm_queue_mode`), as error texts print it.
    #[must_use]
    pub const fn number(self) -> u32 {
        match self {
            DmQueueMode::Any => 0,
            DmQueueMode::Bio => 1,
            DmQueueMode::Request => 2,
        }
    }
}
