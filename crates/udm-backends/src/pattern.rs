//! `pattern:SIZE`: a read-only device on which every byte is a function of its offset.
//!
//! The device is an array of 64-bit big-endian words. Each word holds its own byte offset, as in
//! `nbdkit pattern`, so the two can be compared byte for byte. Data read from a wrong offset shows
//! that offset. Writes fail with [`Status::ReadOnly`], flushes succeed.

use udm_core::errno::EINVAL;
use udm_core::{
    Bio, BioProgress, CpuBioHandler, CpuBudgetedLane, Cx, Device, DeviceControlError, DeviceId, Lane, Limits,
    Op, SECTOR_SIZE, Sectors, SharedDiskState, Status,
};

pub(crate) struct PatternDevice {
    id: DeviceId,
    limits: Limits,
    shared_disk_state: SharedDiskState,
}

impl PatternDevice {
    /// Creates a device of `size` bytes, rounded down to sectors. The device stores nothing, so the
    /// size has no upper bound.
    ///
    /// # Errors
    /// EINVAL for less than a sector.
    pub(crate) fn new(size: u64) -> Result<PatternDevice, DeviceControlError> {
        if size < 512 {
            return Err(DeviceControlError::new(
                EINVAL,
                format!("pattern of {size} bytes: less than a sector"),
            ));
        }
        let limits = Limits {
            read_only: true,
            max_discard: Sectors::ZERO,
            max_write_zeroes: Sectors::ZERO,
            ..Limits::new(Sectors::from_bytes(size))
        };
        Ok(PatternDevice { id: DeviceId::new(), limits, shared_disk_state: SharedDiskState::stateless() })
    }
}

impl Device for PatternDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, _cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Ok(Box::new(CpuBudgetedLane::new(PatternBioHandler { size: self.limits.size })))
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn shared_disk_state(&self) -> Option<&SharedDiskState> {
        Some(&self.shared_disk_state)
    }
}

struct PatternBioHandler {
    size: Sectors,
}

impl CpuBioHandler for PatternBioHandler {
    fn cost(&self, bio: &Bio) -> u64 {
        if bio.op == Op::Read { bio.sectors.0.saturating_mul(SECTOR_SIZE) } else { 0 }
    }

    fn serve(&mut self, bio: &mut Bio, part: &mut BioProgress) -> Status {
        match bio.op {
            Op::Read => {
                if let Some(status) = crate::invalid_bio_status(bio, self.size) {
                    return status;
                }
                let start = bio.sector.bytes();
                let (from, now) = (part.done, part.now());
                bio.data.produce(from as usize, now as usize, |at, piece| {
                    fill_with_offset_pattern(start + from + at as u64, piece);
                });
                part.advance(now);
                Status::Ok
            }
            Op::Flush => Status::Ok,
            Op::Write | Op::Discard | Op::WriteZeroes => Status::ReadOnly,
        }
    }
}

/// Fills `out` with the bytes of the device from byte `offset` on.
fn fill_with_offset_pattern(mut offset: u64, mut out: &mut [u8]) {
    // A piece may begin and end inside a word: the scatter list of a bio can be cut anywhere.
    let skip = (offset % 8) as usize;
    if skip != 0 {
        let n = out.len().min(8 - skip);
        let (head, rest) = out.split_at_mut(n);
        head.copy_from_slice(&(offset - skip as u64).to_be_bytes()[skip..skip + n]);
        out = rest;
        offset += n as u64;
    }
    // Words of constant length: a copy of variable length is a call of `memmove` for each of them.
    let (words, tail) = out.as_chunks_mut::<8>();
    for word in words {
        *word = offset.to_be_bytes();
        offset += 8;
    }
    tail.copy_from_slice(&offset.to_be_bytes()[..tail.len()]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{SingleLaneTestCore, bio_without_data, make_zeroed_segments};
    use udm_core::Sector;

    #[test]
    fn every_word_is_its_offset() {
        let mut core = SingleLaneTestCore::over(&PatternDevice::new(1 << 40).unwrap());
        for cuts in [vec![], vec![3, 8, 500], vec![1, 1, 1, 1021]] {
            let sector = Sector((1 << 31) - 2);
            let bio = core.run(Bio::read(sector, Sectors(2), make_zeroed_segments(1024, &cuts)));
            assert_eq!(bio.status, Status::Ok);
            let mut got = vec![0; 1024];
            bio.data.copy_to(&mut got);
            let want: Vec<u8> = (0..128u64).flat_map(|i| (sector.bytes() + 8 * i).to_be_bytes()).collect();
            assert_eq!(got, want, "{cuts:?}");
        }
    }

    #[test]
    fn nothing_but_reads_in_range() {
        let mut core = SingleLaneTestCore::over(&PatternDevice::new(1024).unwrap());
        let outside = core.run(Bio::read(Sector(1), Sectors(2), make_zeroed_segments(1024, &[])));
        assert_eq!(outside.status, Status::IoErr);
        for op in [Op::Write, Op::Discard, Op::WriteZeroes] {
            assert_eq!(core.run(bio_without_data(op, 0, 1)).status, Status::ReadOnly);
        }
        assert_eq!(core.run(bio_without_data(Op::Flush, 0, 0)).status, Status::Ok);
    }
}
