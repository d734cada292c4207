//! Targets that produce faults on purpose: [`delay`], [`flakey`], [`dust`] and [`log_writes`].
//!
//! These targets test the software above them. All four take time from [`Cx::now`](udm_core::Cx)
//! and chance from [`Cx::rng`](udm_core::Cx::rng) alone, so the same seed gives the same faults.
//!
//! This file has their common parts: the parsing of numbers, and [`UnderlyingRange`], the range of
//! a device that a target uses.

mod clone_table;
pub mod delay;
pub mod dust;
pub mod flakey;
pub mod log_writes;

use udm_core::{Batch, Bio, Cx, DeviceControlError, DrainMode, Lane, Limits, Op, OwnWork, Sector, Sectors};
use udm_dm::TargetError;
use udm_dm::target::{DeviceNameResolver, DeviceRange, LowerLimits, ResolvedDevice, parse_decimal_u64};

/// Parses a decimal number that fits `T`.
fn parse_number<T: TryFrom<u64>>(word: &str) -> Option<T> {
    parse_decimal_u64(word)?.try_into().ok()
}

/// Resolves the device of argument `word`; `text` is the kernel's message if there is none.
fn look_up_device(
    resolver: &mut dyn DeviceNameResolver,
    args: &[String],
    word: usize,
    text: &str,
) -> Result<ResolvedDevice, TargetError> {
    resolver
        .get(&args[word])
        .map_err(|e| TargetError::new(text).with_errno(e.errno).because(e.reason).at(word))
}

/// The range of a device that a target uses: `<dev> <offset>` in a table.
struct UnderlyingRange {
    device: ResolvedDevice,
    start: Sector,
}

impl UnderlyingRange {
    fn open(&self, cx: &mut Cx<'_>) -> Result<SectorOffsetLane, DeviceControlError> {
        Ok(SectorOffsetLane { lane: self.device.device.open(cx)?, start: Sectors(self.start.0) })
    }

    fn used(&self, len: Sectors) -> DeviceRange {
        DeviceRange::new(&self.device, self.start, len)
    }

    /// The limits of a target of `len` that passes its requests on.
    fn limits(&self, len: Sectors, below: LowerLimits<'_>) -> Limits {
        Limits { request_stackable: false, ..Limits::new(len).stack(&below.limits(&self.device)) }
    }
}

/// A lane of an [`UnderlyingRange`]: adds the offset on the way down and subtracts it on the way
/// up.
struct SectorOffsetLane {
    lane: Box<dyn Lane>,
    start: Sectors,
}

impl SectorOffsetLane {
    fn undo(&self, bios: &mut [Box<Bio>]) {
        for bio in bios.iter_mut().filter(|bio| bio.op != Op::Flush) {
            bio.sector -= self.start;
        }
    }
}

impl Lane for SectorOffsetLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        if batch.is_empty() {
            return;
        }
        for bio in batch.iter_mut().filter(|bio| bio.op != Op::Flush) {
            bio.sector += self.start;
        }
        self.lane.submit(batch, cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let from = done.len();
        self.lane.poll(done, cx);
        self.undo(&mut done[from..]);
    }

    fn drain(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        let from = back.len();
        self.lane.drain(how, back, cx);
        self.undo(&mut back[from..]);
    }

    fn own_work(&self) -> OwnWork {
        self.lane.own_work()
    }
}
