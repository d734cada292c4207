//! Block requests and batches of them.

use crate::{Nanos, Sector, Sectors, Segments, Status};
use bitflags::bitflags;

/// Operation of a bio.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum Op {
    /// Reads from the device into the data.
    #[default]
    Read,
    /// Writes the data to the device.
    Write,
    /// Makes durable every write that completed before the flush was submitted. No range, no data.
    Flush,
    /// Discards the range: until it is written again, reads of it may return anything. No data.
    Discard,
    /// Fills the range with zeroes. No data.
    WriteZeroes,
}

impl Op {
    /// Every operation.
    pub const ALL: [Op; 5] = [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes];

    /// True for operations that change the contents of the device.
    #[must_use]
    pub const fn is_write(self) -> bool {
        matches!(self, Op::Write | Op::Discard | Op::WriteZeroes)
    }

    /// True for operations that carry data.
    #[must_use]
    pub const fn has_data(self) -> bool {
        matches!(self, Op::Read | Op::Write)
    }
}

bitflags! {
    /// Modifiers of an operation, with the kernel's meaning (`REQ_*`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct BioFlags: u16 {
        /// The write completes only when it is durable.
        const FUA = 1 << 0;
        /// A flush precedes the write.
        const PREFLUSH = 1 << 1;
        /// The bio fails with EAGAIN instead of waiting.
        const NOWAIT = 1 << 2;
        /// Read-ahead: the bio may fail at any time.
        const RAHEAD = 1 << 3;
        /// Write-zeroes must keep the blocks allocated.
        const NOUNMAP = 1 << 4;
        /// File system metadata.
        const META = 1 << 5;
    }
}

/// The lane or front end that made a bio; unique on its core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct BioOwnerId(pub u32);

/// A batch of requests. An emptied batch keeps its capacity for reuse. Bios are boxed, so moving
/// one moves a pointer.
pub type Batch = Vec<Box<Bio>>;

/// Appends all of `from` to `to`. If `to` is empty, as in nearly all calls, it swaps the vectors:
/// the cost does not depend on the length, and both keep their capacity.
#[inline]
pub fn move_batch(from: &mut Batch, to: &mut Batch) {
    if to.is_empty() {
        std::mem::swap(from, to);
    } else {
        append_batch_out_of_line(from, to);
    }
}

/// Not inlined, which keeps the fast path of [`move_batch`] short.
#[inline(never)]
fn append_batch_out_of_line(from: &mut Batch, to: &mut Batch) {
    to.append(from);
}

/// One block request. It is move-only: it is in exactly one place at a time.
///
/// A layer may change `sector` on the way down and must restore it on the way up. Only `status`,
/// `sent` and the data of a read may differ on completion. So a failed bio can be sent to another
/// path as it is.
#[derive(Debug, Default)]
pub struct Bio {
    /// Operation.
    pub op: Op,
    /// Result; valid once the bio came back from `poll`.
    pub status: Status,
    /// Modifiers.
    pub flags: BioFlags,
    /// The lane or front end that made the bio. A lane recognises its own bios by it.
    pub owner: BioOwnerId,
    /// First sector, relative to the device whose lane gets the bio. 0 for a flush.
    pub sector: Sector,
    /// Length. 0 for a flush only.
    pub sectors: Sectors,
    /// Private to the owner, such as a slot or a tag.
    pub cookie: u64,
    /// Time at which the front end received the request, on the core's clock.
    pub started: Nanos,
    /// Time at which the current path was chosen, for path selectors that use time. A nested
    /// selector overwrites it, and its value on completion is undefined.
    pub sent: Nanos,
    /// Data: as long as `sectors` for reads and writes, else empty. A device that stores nothing
    /// (`null`) ignores it, and a bio for such a device may have no data.
    pub data: Segments,
    in_flight: bool,
}

impl Bio {
    /// Creates an empty bio; the caller sets its fields.
    #[must_use]
    pub fn new() -> Box<Bio> {
        Box::default()
    }

    /// A read of `sectors` at `sector` into `data`.
    #[must_use]
    pub fn read(sector: Sector, sectors: Sectors, data: Segments) -> Box<Bio> {
        Box::new(Bio { op: Op::Read, sector, sectors, data, ..Bio::default() })
    }

    /// A write of `data` at `sector`.
    #[must_use]
    pub fn write(sector: Sector, sectors: Sectors, data: Segments) -> Box<Bio> {
        Box::new(Bio { op: Op::Write, sector, sectors, data, ..Bio::default() })
    }

    /// The first sector after the range.
    #[must_use]
    pub fn end(&self) -> Sector {
        self.sector + self.sectors
    }

    /// Marks the bio as in flight: dropping it before [`Bio::finish`] is a bug. The owner calls
    /// this before `submit`.
    pub fn start(&mut self) {
        debug_assert!(!self.in_flight, "a bio submitted twice: {self:?}");
        self.in_flight = true;
        self.status = Status::Ok;
    }

    /// Marks the bio as completed. The owner calls this for each bio that `poll` returned.
    pub fn finish(&mut self) {
        debug_assert!(self.in_flight, "a bio completed twice: {self:?}");
        self.in_flight = false;
    }

    /// True between [`Bio::start`] and [`Bio::finish`].
    #[must_use]
    pub fn is_in_flight(&self) -> bool {
        self.in_flight
    }

    /// Sets the result. The lane returns the bio from `poll` next.
    pub fn end_with(&mut self, status: Status) {
        self.status = status;
    }
}

#[cfg(debug_assertions)]
impl Drop for Bio {
    fn drop(&mut self) {
        // A panic during unwinding would abort and hide the first panic.
        if self.in_flight && !std::thread::panicking() {
            panic!("a bio was dropped in flight: {:?} at {} +{}", self.op, self.sector, self.sectors);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "dropped in flight")]
    fn a_lost_bio_is_loud() {
        let mut bio = Bio::new();
        bio.start();
        drop(bio);
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "completed twice")]
    fn completing_twice_is_loud() {
        Bio::new().finish();
    }

    /// A request should touch few cache lines.
    #[test]
    fn a_bio_fits_two_cache_lines() {
        assert!(size_of::<Bio>() <= 128, "{}", size_of::<Bio>());
    }
}
