//! One block request.

use crate::{Nanos, Sector, Sectors, Segments, Status};
use bitflags::bitflags;

/// What a bio asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum Op {
    /// Fill the data from the device.
    #[default]
    Read,
    /// Put the data on the device.
    Write,
    /// Make every write that completed before this was submitted durable. No range, no data.
    Flush,
    /// The range is of no more use; reads of it may return anything until it is written. No data.
    Discard,
    /// The range reads as zeroes from now on. No data.
    WriteZeroes,
}

impl Op {
    /// Every operation.
    pub const ALL: [Op; 5] = [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes];

    /// True for operations that change what the device holds.
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
        /// Complete only when this write is durable.
        const FUA = 1 << 0;
        /// Flush before the data is written.
        const PREFLUSH = 1 << 1;
        /// Fail with EAGAIN instead of waiting.
        const NOWAIT = 1 << 2;
        /// Read-ahead: may fail at will.
        const RAHEAD = 1 << 3;
        /// Write-zeroes must leave the blocks allocated.
        const NOUNMAP = 1 << 4;
        /// Metadata of a file system.
        const META = 1 << 5;
    }
}

/// Which lane or front end made a bio, unique on its core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct OwnerId(pub u32);

/// A batch of requests. Recycled: a batch that was emptied keeps its room. Boxed, so that a bio
/// changes hands by its pointer.
pub type Batch = Vec<Box<Bio>>;

/// Moves all of `from` behind what `to` holds: by a swap where `to` is empty, which it is in nearly
/// all calls, so that a batch costs the same whatever its length, and both keep their room.
#[inline]
pub fn move_batch(from: &mut Batch, to: &mut Batch) {
    if to.is_empty() {
        std::mem::swap(from, to);
    } else {
        append(from, to);
    }
}

/// Out of line: a call of its own is what keeps the short way short.
#[inline(never)]
fn append(from: &mut Batch, to: &mut Batch) {
    to.append(from);
}

/// One block request. Move-only: it is in exactly one place at a time, and whoever holds it owns
/// it.
///
/// A layer may change `sector` on the way down and must undo it on the way up; every other field
/// but `status` and the bytes of a read comes back as it was submitted. So a bio that comes back
/// with an error is the bio to try elsewhere.
#[derive(Debug, Default)]
pub struct Bio {
    /// What to do.
    pub op: Op,
    /// How it ended; valid once it came back from `poll`.
    pub status: Status,
    /// Modifiers.
    pub flags: BioFlags,
    /// Who made it. A lane knows its own bios from those that pass through by this.
    pub owner: OwnerId,
    /// First sector, on the device whose lane is given the bio. 0 for a flush.
    pub sector: Sector,
    /// Length. 0 for a flush only.
    pub sectors: Sectors,
    /// The maker's own: a slot, a tag. Nobody else reads it.
    pub cookie: u64,
    /// When the front end took it in, on the core's clock.
    pub started: Nanos,
    /// When the path that it is on was chosen, for a path selector that goes by time. A selector
    /// below another writes it too; nobody else reads it, and it comes back as whatever.
    pub sent: Nanos,
    /// The data: as long as `sectors` for reads and writes, empty otherwise. A device that stores
    /// nothing (`null`) leaves it alone, and a bio for it may come without.
    pub data: Segments,
    in_flight: bool,
}

impl Bio {
    /// A bio of no use yet; fill it in.
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

    /// The first sector behind the range.
    #[must_use]
    pub fn end(&self) -> Sector {
        self.sector + self.sectors
    }

    /// Marks the bio as on its way: from here to [`Bio::finish`] dropping it is a bug. The maker
    /// calls it before `submit`.
    pub fn start(&mut self) {
        debug_assert!(!self.in_flight, "a bio submitted twice: {self:?}");
        self.in_flight = true;
        self.status = Status::Ok;
    }

    /// Marks the bio as home again. The maker calls it on what `poll` returned.
    pub fn finish(&mut self) {
        debug_assert!(self.in_flight, "a bio completed twice: {self:?}");
        self.in_flight = false;
    }

    /// True between [`Bio::start`] and [`Bio::finish`].
    #[must_use]
    pub fn is_in_flight(&self) -> bool {
        self.in_flight
    }

    /// Ends the bio with `status`, for the lane that returns it from `poll` next.
    pub fn end_with(&mut self, status: Status) {
        self.status = status;
    }
}

#[cfg(debug_assertions)]
impl Drop for Bio {
    fn drop(&mut self) {
        // A second panic while one unwinds would abort and hide the first.
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

    /// What a request costs in cache lines is part of what udm is for.
    #[test]
    fn a_bio_fits_two_cache_lines() {
        assert!(size_of::<Bio>() <= 128, "{}", size_of::<Bio>());
    }
}
