//! `log-writes`: everything that is written to a device, in the order in which it became durable,
//! on a log device.
//!
//! ```text
//! log-writes <dev> <log dev>
//! message: mark <text>
//! ```
//!
//! `udm log-writes replay` rebuilds the device as it was after any flush, which is what a power cut
//! could have left. The log is the kernel's, byte for byte ([`udm_wire::log_writes`]), and so is
//! what goes in:
//!
//! * A write or discard is copied when it comes in and **held** when it completes. It is logged
//!   when a flush completes that came in after that: until then nothing promises that it is
//!   durable.
//! * A FUA write is logged when it completes. A flush is logged behind the writes that it covered,
//!   marks where they are given.
//! * What fails is not logged; what a failed flush covered stays held for the next one.
//!
//! Where udm does more than the kernel:
//!
//! * A flush or FUA write is returned when the superblock counts its entries, and a mark is
//!   answered then: a killed server leaves a log of all that was acknowledged, and so does a power
//!   cut of the log device. An empty superblock is written at the first resume, and requests wait
//!   for it, so that an old log is not taken for the new one.
//! * **Entries that overlap stand in the log in the order in which they completed.** A FUA write
//!   takes held writes that it overlaps with it, and those that these overlap and that completed
//!   before them; the kernel logs them behind it, and a replay gives old data over new. Writes that
//!   are under way at the same time have no order, on a disk as here. So each beginning of the log
//!   is a state that a power cut could have left.
//! * When two flushes are under way, the one that completes first is logged behind the writes that
//!   both covered.
//! * At a suspend the target flushes the device by itself, logs what was held, and puts the mark
//!   `dm-log-writes-end` behind it. The next entry after a resume takes the place of that mark.
//! * Copies are bounded: with [`HELD_MAX`] bytes in use, writes wait while the target flushes by
//!   itself. Such a flush has no entry.
//!
//! When the log is full or fails, logging ends and I/O goes on; `status` then says
//! `logging_disabled`. `status` is otherwise the number of entries and the last sector of the log
//! that they use. Loading a table starts the log anew.
//!
//! # What the cores share
//! **This target takes a mutex on the data path**, for each batch that contains a flush and for
//! each poll that returned writes: the log has one order, so the cores have to agree on it. The
//! price is two lock operations a batch and one copy of all that is written; allocations happen
//! when the held list grows. It is a tester's tool and no fast path. Reads take no lock. Positions
//! in the log are given out under the mutex; each core then writes its own entries with its own
//! lane, and the superblock counts only what lies before the first entry that is still being
//! written.

mod held;
mod lane;
mod shared;
mod space;
mod writer;

use super::{Underlay, look_up};
use shared::{Append, Shared};
use space::Geometry;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use udm_core::errno::EACCES;
use udm_core::{Alone, Cx, Lane, Limits, OpenError, SECTOR_SIZE, Sector, Sectors};
use udm_dm::TargetError;
use udm_dm::pending::Pending;
use udm_dm::target::{Below, DeviceRef, Resolver, Target, TargetArgs, Used};
use udm_wire::log_writes::HEADER_LEN;

const NAME: &str = "log-writes";

/// Bytes of copied writes from which on further writes wait. One write alone may be larger.
pub const HELD_MAX: usize = 64 << 20;

/// The control half.
struct LogWrites {
    under: Underlay,
    log: DeviceRef,
    len: Sectors,
    shared: Arc<Shared>,
    /// The device takes discards, as of the check of the table: its lanes go by what the table's
    /// limits came from.
    discards: AtomicBool,
}

/// The constructor.
///
/// # Errors
/// The kernel's, for missing words or unknown devices; a read-only log device counts as one.
pub fn new(args: &mut TargetArgs<'_>) -> Result<Arc<dyn Target>, TargetError> {
    let words = args.args;
    if words.len() < 2 {
        return Err(TargetError::new("log-writes: Invalid argument count").at(words.len()));
    }
    let device = look_up(args.resolver, words, 0, "log-writes: Device lookup failed")?;
    let log = look_up(args.resolver, words, 1, "log-writes: Log device lookup failed")?;
    let limits = log.device.limits();
    if limits.read_only {
        let error = TargetError::new("log-writes: Log device lookup failed").with_errno(EACCES);
        return Err(error.because("it is read-only").at(1));
    }
    let shared = Arc::new(Shared::new(geometry(&device, &log, Below::NOW)));
    let discards = AtomicBool::new(device.device.limits().max_discard > Sectors::ZERO);
    let under = Underlay { device, start: Sector(0) };
    Ok(Arc::new(LogWrites { under, log, len: args.len, shared, discards }))
}

/// The blocks and the size of the log, with the devices as `below` says.
fn geometry(device: &DeviceRef, log: &DeviceRef, below: Below<'_>) -> Geometry {
    let (device, log) = (below.limits(device), below.limits(log));
    Geometry { sector_size: log.logical_block.max(device.logical_block), size: log.size }
}

impl LogWrites {
    /// Bytes in a sector of the log, from the devices as `below` says; from the first resume on, as
    /// they were then.
    fn sector_size(&self, below: Below<'_>) -> u32 {
        self.shared.measure(geometry(&self.under.device, &self.log, below)).sector_size
    }
}

impl Target for LogWrites {
    fn type_name(&self) -> &'static str {
        NAME
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
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

    fn limits(&self, below: Below<'_>) -> Limits {
        let limits = self.under.limits(self.len, below);
        // An entry goes to the log in one piece: a sector of its own and the data.
        let sector_size = self.sector_size(below);
        let header = u64::from(sector_size) / SECTOR_SIZE;
        let entry = below.limits(&self.log).max_sectors.0.saturating_sub(header).max(header);
        let takes_discards = limits.max_discard > Sectors::ZERO;
        // Relaxed: lanes are opened behind this, by a letter or under the same lock as the limits.
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

    fn devices(&self) -> Vec<Used> {
        let size = self.log.device.limits().size;
        let log = Used { alone: Some(Alone::Device), ..Used::new(&self.log, Sector(0), size) };
        vec![self.under.used(self.len), log]
    }

    fn message(&self, words: &[String], _: &mut dyn Resolver) -> Result<String, TargetError> {
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
        // One byte less than there is room for, as the kernel's terminated string.
        let room = self.sector_size(Below::NOW) as usize - HEADER_LEN - 1;
        let text = &text.as_bytes()[..text.len().min(room)];
        self.shared.post(Append::mark(text))?;
        Ok(String::new())
    }

    fn under_way(&self) -> Option<Pending> {
        self.shared.marks_pending()
    }

    fn works_unasked(&self) -> bool {
        true
    }

    fn presuspend(&self, _noflush: bool) {
        self.shared.set_closing(true);
    }

    fn resume(&self) {
        self.shared.set_closing(false);
    }
}
