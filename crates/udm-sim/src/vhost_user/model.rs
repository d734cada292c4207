//! The data that the disks of orderly guests may hold, and the results that their requests may
//! have.
//!
//! A disk is a list of registers ([`crate::register_model`]), one per sector. A request lasts from
//! its entry in the available ring until its guest has taken it from the used ring. A server that
//! was killed may have carried it out, and the next one may carry it out again; both are within
//! that time.

use super::memory::EXTRA;
use crate::model::Violation;
use crate::register_model::{ANY, SectorRegisterModel, stamp_text};
use crate::stamp;
use udm_core::Nanos;
use udm_wire::virtio::blk::{BLK_ID_SIZE, BLK_S_IOERR, BLK_S_OK, BLK_S_UNSUPP};

/// Bytes per sector.
pub(super) const SECTOR: usize = udm_core::SECTOR_SIZE as usize;

/// Byte with which a guest fills buffers that the device must write.
pub(super) const POISON: u8 = 0xee;

/// Kinds of requests, with their numbers in the specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum GuestOp {
    Read = 0,
    Write = 1,
    Flush = 4,
    GetId = 8,
    Discard = 11,
    WriteZeroes = 13,
    /// A type that no device has.
    Unknown = 77,
}

impl GuestOp {
    pub(super) const ALL: [GuestOp; 7] = [
        GuestOp::Read,
        GuestOp::Write,
        GuestOp::Flush,
        GuestOp::GetId,
        GuestOp::Discard,
        GuestOp::WriteZeroes,
        GuestOp::Unknown,
    ];
}

/// A request of an orderly guest.
#[derive(Clone, Debug)]
pub(super) struct GuestRequest {
    /// Number of the request, unique in a run.
    pub(super) id: u64,
    pub(super) op: GuestOp,
    /// Index of the disk.
    pub(super) disk: usize,
    /// The ranges: first sector and number of sectors.
    pub(super) ranges: Vec<(u64, u64)>,
    /// The buffers of the data: offset and length.
    pub(super) data: Vec<(usize, usize)>,
    /// Number of the place that holds the data.
    pub(super) place: usize,
    /// The descriptors, the head first.
    pub(super) descriptors: Vec<u16>,
    /// Twice the step in which the request was added.
    pub(super) start: u64,
    /// Time at which it was added.
    pub(super) at: Nanos,
    /// Faults of disks at that time.
    pub(super) faults: u64,
    /// The guest knew then that the write cache is off.
    pub(super) is_through: bool,
    /// The status that it must have, unless a disk fails.
    pub(super) must: u8,
    /// Its memory is being removed.
    pub(super) may_fail: bool,
}

impl GuestRequest {
    /// True if its data is in the region that is added and removed.
    pub(super) fn is_in_extra(&self) -> bool {
        self.data.iter().any(|(at, _)| *at >= EXTRA)
    }

    /// Describes the request, for a person.
    pub(super) fn describe(&self) -> String {
        let ranges: Vec<_> = self.ranges.iter().map(|(at, n)| format!("{at}+{n}")).collect();
        format!("request {}, a {:?} of d{} {}", self.id, self.op, self.disk, ranges.join(" "))
    }
}

/// A completed request, as its guest sees it.
pub(super) struct GuestCompletion {
    pub(super) status: u8,
    /// Bytes that the device reports as written.
    pub(super) written: u32,
    /// The bytes of the data buffers.
    pub(super) data: Vec<u8>,
    /// Faults of disks so far.
    pub(super) faults: u64,
    /// The write cache was off during the whole request.
    pub(super) is_durable: bool,
}

/// The model of the disks.
pub(super) struct GuestDiskModel {
    pub(super) cells: SectorRegisterModel,
    ids: u64,
    /// Checked requests, in the order of [`GuestOp::ALL`].
    pub(super) requests: [u64; 7],
    pub(super) errors: u64,
    pub(super) compared: u64,
    /// A hostile guest writes to the disk too, so its data is not known.
    unknown: Option<usize>,
}

impl GuestDiskModel {
    /// Disks of these sizes in sectors, filled with zeroes. A hostile guest also uses `unknown`.
    pub(super) fn new(sizes: &[u64], unknown: Option<usize>) -> GuestDiskModel {
        GuestDiskModel {
            cells: SectorRegisterModel::new(sizes, |_, _| 0),
            ids: 0,
            requests: [0; 7],
            errors: 0,
            compared: 0,
            unknown,
        }
    }

    /// Returns a number for a request.
    pub(super) fn next_id(&mut self) -> u64 {
        self.ids += 1;
        self.ids
    }

    /// The value that request `id` writes to its sector `nth`.
    fn stamp(id: u64, nth: u64) -> u64 {
        id << 10 | nth
    }

    /// The data of a write.
    pub(super) fn payload(id: u64, sectors: u64) -> Vec<u8> {
        (0..sectors).flat_map(|nth| GuestDiskModel::stamp(id, nth).to_le_bytes().repeat(SECTOR / 8)).collect()
    }

    /// Calls `each` with the registers that a request changes, and the value.
    fn for_each_change(&self, request: &GuestRequest, mut each: impl FnMut(u32, u64)) {
        let changes = matches!(request.op, GuestOp::Write | GuestOp::Discard | GuestOp::WriteZeroes);
        if !changes || request.must != BLK_S_OK {
            return;
        }
        for (at, sectors) in &request.ranges {
            for nth in 0..*sectors {
                let value = match request.op {
                    GuestOp::Write => GuestDiskModel::stamp(request.id, nth),
                    GuestOp::Discard => ANY,
                    _ => 0,
                };
                each(self.cells.index(request.disk, at + nth), value);
            }
        }
    }

    /// Records that a guest adds a request.
    pub(super) fn begin(&mut self, request: &GuestRequest) {
        let mut changes = Vec::new();
        self.for_each_change(request, |cell, value| changes.push((cell, value)));
        for (cell, value) in changes {
            self.cells.begin(cell, request.id, value, request.start);
        }
    }

    fn finish(&mut self, request: &GuestRequest, now: u64, sure: bool, durable: bool) {
        let mut changes = Vec::new();
        self.for_each_change(request, |cell, _| changes.push(cell));
        changes.into_iter().for_each(|cell| self.cells.end(cell, request.id, now, sure, durable));
    }

    /// Records that a guest has given a request up, which may have happened.
    pub(super) fn abandon(&mut self, request: &GuestRequest, step: u64) {
        self.finish(request, 2 * step + 1, false, false);
    }

    /// Records a power cut.
    pub(super) fn crash(&mut self, step: u64) {
        self.cells.crash(2 * step + 1);
    }

    /// Checks a completed request.
    ///
    /// # Errors
    /// The result is not permitted.
    pub(super) fn complete(
        &mut self,
        request: &GuestRequest,
        done: &GuestCompletion,
        step: u64,
    ) -> Result<(), Violation> {
        let now = 2 * step + 1;
        let at = GuestOp::ALL.iter().position(|op| *op == request.op).unwrap_or_default();
        self.requests[at] += 1;
        self.errors += u64::from(done.status != BLK_S_OK);
        let what = || request.describe();
        let is_excused = done.status == BLK_S_IOERR && (done.faults > request.faults || request.may_fail);
        if done.status != request.must && !(request.must == BLK_S_OK && is_excused) {
            return Err(format!(
                "{} completed with status {}, and must have {}",
                what(),
                done.status,
                request.must
            ));
        }
        let len = done.data.len() as u32;
        let written = match (request.op, done.status) {
            (GuestOp::Read | GuestOp::GetId, BLK_S_OK) => len + 1,
            (_, BLK_S_OK | BLK_S_UNSUPP) => 1,
            _ => done.written.clamp(1, len + 1),
        };
        if done.written != written {
            return Err(format!("{} completed with {} bytes written, not {written}", what(), done.written));
        }
        if request.must != BLK_S_OK {
            return Ok(());
        }
        self.finish(request, now, done.status == BLK_S_OK, done.is_durable);
        match request.op {
            _ if done.status != BLK_S_OK => Ok(()),
            GuestOp::Flush => {
                self.cells.flushed(request.disk, request.start);
                Ok(())
            }
            GuestOp::Read => self.compare(request, &done.data, now),
            GuestOp::GetId if done.data[..2] != *b"d0" && done.data[..2] != *b"d1" => {
                Err(format!("{} returned {:?}", what(), &done.data[..BLK_ID_SIZE]))
            }
            _ => Ok(()),
        }
    }

    fn compare(&mut self, request: &GuestRequest, data: &[u8], now: u64) -> Result<(), Violation> {
        let first = request.ranges.first().map_or(0, |(at, _)| *at);
        for (bytes, sector) in data.chunks_exact(SECTOR).zip(first..) {
            let (stamp, cell) = (stamp::read_sector_stamp(bytes), self.cells.index(request.disk, sector));
            self.compared += 1;
            let is_any = self.unknown == Some(request.disk) || self.cells.allows(cell, ANY, request.start);
            match stamp {
                Some(stamp) if self.cells.allows(cell, stamp, request.start) => {
                    self.cells.seen(cell, stamp, request.start, now);
                }
                _ if is_any && bytes.iter().any(|byte| *byte != POISON) => {}
                _ => {
                    let got = match stamp {
                        Some(stamp) if stamp == u64::from_le_bytes([POISON; 8]) => "nothing".to_owned(),
                        Some(stamp) => stamp_text(stamp),
                        None => format!("{:x?}", &bytes[..16]),
                    };
                    return Err(format!(
                        "{} brought {got} for sector {sector}, which may hold{}",
                        request.describe(),
                        self.cells.describe(cell)
                    ));
                }
            }
        }
        Ok(())
    }
}
