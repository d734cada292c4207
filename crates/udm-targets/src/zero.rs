//! The zero target: `zero`. Reads return zeroes; writes and discards succeed and store nothing.

use std::sync::Arc;
use udm_core::{
    Bio, BioFlags, BioProgress, CpuBioHandler, CpuBudgetedLane, Cx, DeviceControlError, ExtentKind, Extents,
    Lane, Limits, Op, SECTOR_SIZE, Sector, Sectors, Status,
};
use udm_dm::TargetError;
use udm_dm::target::{DeviceRange, LowerLimits, Target, TargetArgs};

struct ZeroTarget {
    len: Sectors,
}

/// Creates a zero target.
///
/// # Errors
/// `No arguments required`.
pub fn create_zero_target(args: &mut TargetArgs<'_>) -> Result<Arc<dyn Target>, TargetError> {
    if !args.args.is_empty() {
        return Err(TargetError::new("zero: No arguments required").at(0));
    }
    Ok(Arc::new(ZeroTarget { len: args.len }))
}

impl Target for ZeroTarget {
    fn type_name(&self) -> &'static str {
        "zero"
    }

    fn open(&self, _cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Ok(Box::new(CpuBudgetedLane::new(ZeroBioHandler)))
    }

    fn table(&self) -> String {
        String::new()
    }

    fn limits(&self, _below: LowerLimits<'_>) -> Limits {
        // The kernel's zero target supports discards but no write-zeroes.
        Limits { request_stackable: false, max_write_zeroes: Sectors::ZERO, ..Limits::new(self.len) }
    }

    fn extents(&self, _: Sector, len: Sectors, out: &mut Extents) {
        out.push(len, ExtentKind::Hole);
    }

    fn devices(&self) -> Vec<DeviceRange> {
        Vec::new()
    }
}

struct ZeroBioHandler;

impl CpuBioHandler for ZeroBioHandler {
    fn cost(&self, bio: &Bio) -> u64 {
        if bio.op == Op::Read && !bio.data.is_empty() { bio.sectors.0.saturating_mul(SECTOR_SIZE) } else { 0 }
    }

    fn serve(&mut self, bio: &mut Bio, part: &mut BioProgress) -> Status {
        match bio.op {
            // Read-ahead of zeroes would only fill a cache (kernel).
            Op::Read if bio.flags.contains(BioFlags::RAHEAD) => Status::IoErr,
            Op::Read if !bio.data.is_empty() => {
                fill_bio_with_zeroes(bio, part);
                Status::Ok
            }
            Op::Read | Op::Write | Op::Discard | Op::Flush => {
                part.finish();
                Status::Ok
            }
            Op::WriteZeroes => Status::NotSupp,
        }
    }
}

fn fill_bio_with_zeroes(bio: &mut Bio, part: &mut BioProgress) {
    let now = part.now();
    bio.data.produce(part.done as usize, now as usize, |_, piece| piece.fill(0));
    part.advance(now);
}
