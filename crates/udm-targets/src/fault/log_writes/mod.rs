//! `log-writes`: records all writes to a device on a log device, in the order in which they became
//! durable.
//!
//! ```text
//! log-writes <dev> <log dev>
//! message: mark <text>
//! ```
//!
//! `udm log-writes replay` rebuilds the device as it was after any flush, which is a state that a
//! power cut could have left. The format is the kernel's, byte for byte ([`udm_wire::log_writes`]),
//! and so is the content:
//!
//! * A write or discard is copied on arrival and **held** when it completes. It is logged when a
//!   flush completes that arrived later; until then nothing promises that it is durable.
//! * A FUA write is logged when it completes. A flush is logged after the writes that it covers, a
//!   mark at the time of its message.
//! * Failed requests are not logged. Writes that a failed flush covers stay held for the next
//!   flush.
//!
//! udm does more than the kernel in these cases:
//!
//! * A flush or FUA write completes, and a mark is answered, when the superblock counts its
//!   entries. So the log of a killed server, or of a log device that lost power, has all that was
//!   acknowledged. The first resume writes an empty superblock, and requests wait for it; an old
//!   log is never read as the new one.
//! * **Entries that overlap are in the log in the order of their completion.** A FUA write is
//!   logged together with held writes that it overlaps. So are earlier held writes that those
//!   overlap. The kernel logs them after it, and a replay returns old data. Concurrent writes have
//!   no order, as on a disk. So each prefix of the log is a state that a power cut could have left.
//! * If two flushes are in flight, the one that completes first is logged after the writes that
//!   both cover.
//! * A suspend flushes the device, logs the held writes, and adds the mark `dm-log-writes-end`. The
//!   next entry after a resume replaces this mark.
//! * Copies are bounded: with [`HELD_MAX`] bytes in use, writes wait while the target itself
//!   flushes. Such a flush has no entry.
//!
//! If the log is full or fails, logging ends and I/O continues; `status` then prints
//! `logging_disabled`. Otherwise `status` is the number of entries and the last used sector of the
//! log. Loading a table starts a new log.
//!
//! # What the cores share
//! **This target takes a mutex on the data path**, per batch with a flush and per poll that
//! returned writes: the log has one order for all cores. The price is two lock operations per batch
//! and one copy of all written data. Allocations happen when the list of held writes grows. Reads
//! take no lock. Positions in the log are assigned under the mutex. Each core then writes its
//! entries with its own lane, and the superblock counts only entries before the first that is still
//! being written. A lane that waits for entries of other cores waits on a
//! [`WaitQueue`](udm_core::WaitQueue).

mod lane;
mod log_space;
mod shared;
mod unflushed;
mod writer;

use super::{UnderlyingRange, look_up_device};
use log_space::LogGeometry;
use shared::{LogRecord, SharedWriteLog};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use udm_core::errno::EACCES;
use udm_core::{ClaimSharingPolicy, Cx, DeviceControlError, Lane, Limits, SECTOR_SIZE, Sector, Sectors};
use udm_dm::TargetError;
use udm_dm::completion::TargetMessageWaitHandle;
use udm_dm::target::{
    DeviceNameResolver, DeviceRange, LowerLimits, ResolvedDevice, Target, TargetArgs, TargetFeatures,
};
use udm_wire::log_writes::HEADER_LEN;

const NAME: &str = "log-writes";

/// If this many bytes of copied writes are in use, further writes wait. A single write may be
/// larger.
pub const HELD_MAX: usize = 64 << 20;

/// The control half.
struct LogWritesTarget {
    under: UnderlyingRange,
    log: ResolvedDevice,
    len: Sectors,
    shared: Arc<SharedWriteLog>,
    /// The device supports discards, as of the last call of `limits`: lanes use the same value as
    /// the table's limits.
    discards: AtomicBool,
}

/// The constructor.
///
/// # Errors
/// The kernel's, for missing words or unknown devices; a read-only log device counts as one.
pub fn create_log_writes_target(args: &mut TargetArgs<'_>) -> Result<Arc<dyn Target>, TargetError> {
    let words = args.args;
    if words.len() < 2 {
        return Err(TargetError::new("log-writes: Invalid argument count").at(words.len()));
    }
    let device = look_up_device(args.resolver, words, 0, "log-writes: Device lookup failed")?;
    let log = look_up_device(args.resolver, words, 1, "log-writes: Log device lookup failed")?;
    let limits = log.device.limits();
    if limits.read_only {
        let error = TargetError::new("log-writes: Log device lookup failed").with_errno(EACCES);
        return Err(error.because("it is read-only").at(1));
    }
    let shared = Arc::new(SharedWriteLog::new(log_geometry(&device, &log, LowerLimits::NOW)));
    let discards = AtomicBool::new(device.device.limits().max_discard > Sectors::ZERO);
    let under = UnderlyingRange { device, start: Sector(0) };
    Ok(Arc::new(LogWritesTarget { under, log, len: args.len, shared, discards }))
}

/// The geometry of the log, with the limits in `below`.
fn log_geometry(device: &ResolvedDevice, log: &ResolvedDevice, below: LowerLimits<'_>) -> LogGeometry {
    let (device, log) = (below.limits(device), below.limits(log));
    LogGeometry { sector_size: log.logical_block.max(device.logical_block), size: log.size }
}

impl LogWritesTarget {
    /// Bytes in a sector of the log, with the limits in `below`. From the first resume on the value
    /// is fixed.
    fn sector_size(&self, below: LowerLimits<'_>) -> u32 {
        self.shared.measure(log_geometry(&self.under.device, &self.log, below)).sector_size
    }
}

impl Target for LogWritesTarget {
    fn type_name(&self) -> &'static str {
        NAME
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Ok(Box::new(lane::LogWritesLane::open(self, cx)?))
    }

    fn table(&self) -> String {
        format!("{} {}", self.under.device.number, self.log.number)
    }

    fn status(&self) -> String {
        let state = self.shared.lock();
        let disabled = if self.shared.is_enabled() { "" } else { " logging_disabled" };
        format!("{} {}{disabled}", state.space.entries(), state.space.next() - 1)
    }

    fn state_outside_table(&self) -> Option<String> {
        Some("a log that a new table would begin again".into())
    }

    fn limits(&self, below: LowerLimits<'_>) -> Limits {
        let limits = self.under.limits(self.len, below);
        // An entry is one request: a sector for its header, and the data.
        let sector_size = self.sector_size(below);
        let header = u64::from(sector_size) / SECTOR_SIZE;
        let entry = below.limits(&self.log).max_sectors.0.saturating_sub(header).max(header);
        let takes_discards = limits.max_discard > Sectors::ZERO;
        // Relaxed: lanes are opened afterwards, by a message or under the same lock as the limits.
        self.discards.store(takes_discards, Ordering::Relaxed);
        let max_discard = if takes_discards { limits.max_discard } else { Limits::new(self.len).max_discard };
        Limits {
            logical_block: sector_size,
            physical_block: limits.physical_block.max(sector_size),
            io_min: limits.io_min.max(sector_size),
            max_sectors: Sectors(limits.max_sectors.0.min(entry)),
            max_discard,
            max_write_zeroes: Sectors::ZERO,
            ..limits
        }
    }

    fn devices(&self) -> Vec<DeviceRange> {
        let size = self.log.device.limits().size;
        let log = DeviceRange {
            alone: Some(ClaimSharingPolicy::Device),
            ..DeviceRange::new(&self.log, Sector(0), size)
        };
        vec![self.under.used(self.len), log]
    }

    fn message(&self, words: &[String], _: &mut dyn DeviceNameResolver) -> Result<String, TargetError> {
        let [name, text] = words else {
            return Err(TargetError::new(format!(
                "log-writes: Invalid log-writes message arguments, expect 2 arguments, got {}",
                words.len()
            )));
        };
        if !name.eq_ignore_ascii_case("mark") {
            let text = format!("log-writes: Unrecognised log writes target message received: {name}");
            return Err(TargetError::new(text).at(0));
        }
        // One byte less than the room, as the kernel's terminated string.
        let room = self.sector_size(LowerLimits::NOW) as usize - HEADER_LEN - 1;
        let text = &text.as_bytes()[..text.len().min(room)];
        self.shared.post(LogRecord::mark(text))?;
        Ok(String::new())
    }

    fn pending_completion(&self) -> Option<TargetMessageWaitHandle> {
        self.shared.marks_pending()
    }

    fn features(&self) -> TargetFeatures {
        TargetFeatures { needs_own_lane: true, ..TargetFeatures::default() }
    }

    fn presuspend(&self, _noflush: bool) {
        self.shared.set_closing(true);
    }

    fn resume(&self) {
        self.shared.set_closing(false);
    }
}
