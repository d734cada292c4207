//! The error target: `error [<dev> <offset>]`. All I/O fails with EIO, except that a flush
//! succeeds, because there is nothing to make durable.
//!
//! Any arguments are accepted, and none are printed. Exactly two arguments name a device whose
//! limits the target reports, so that it can replace that device.

use std::sync::Arc;
use udm_core::{Batch, Bio, Cx, DeviceControlError, Lane, Limits, Op, Sector, Sectors, Status};
use udm_dm::TargetError;
use udm_dm::target::{
    DeviceRange, DmQueueMode, LowerLimits, Target, TargetArgs, TargetFeatures, parse_decimal_u64,
};

struct ErrorTarget {
    len: Sectors,
    like: Option<DeviceRange>,
}

/// Creates an error target.
///
/// # Errors
/// With two arguments: `Invalid device sector`, `Device lookup failed`.
pub fn create_error_target(args: &mut TargetArgs<'_>) -> Result<Arc<dyn Target>, TargetError> {
    let like = match args.args {
        [device, offset] => {
            let start = parse_decimal_u64(offset)
                .ok_or_else(|| TargetError::new("error: Invalid device sector").at(1))?;
            let device = args.resolver.get(device).map_err(|e| {
                TargetError::new("error: Device lookup failed").with_errno(e.errno).because(e.reason).at(0)
            })?;
            Some(DeviceRange::new(&device, Sector(start), args.len))
        }
        _ => None,
    };
    Ok(Arc::new(ErrorTarget { len: args.len, like }))
}

impl Target for ErrorTarget {
    fn type_name(&self) -> &'static str {
        "error"
    }

    fn open(&self, _cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Ok(Box::new(ImmediateCompletionLane { end: error_target_bio_status, done: Batch::new() }))
    }

    fn table(&self) -> String {
        String::new()
    }

    fn limits(&self, below: LowerLimits<'_>) -> Limits {
        let own = Limits { max_write_zeroes: Sectors::ZERO, ..Limits::new(self.len) };
        let limits = match &self.like {
            Some(used) => own.stack(&below.limits(&used.device)),
            None => own,
        };
        // As in the kernel, discards fail with EIO and not as unsupported.
        Limits { request_stackable: false, max_discard: own.max_discard, ..limits }
    }

    fn devices(&self) -> Vec<DeviceRange> {
        self.like.iter().cloned().collect()
    }

    fn features(&self) -> TargetFeatures {
        TargetFeatures { queue_mode: DmQueueMode::Any, ..TargetFeatures::default() }
    }
}

fn error_target_bio_status(bio: &mut Bio) -> Status {
    if bio.op == Op::Flush { Status::Ok } else { Status::IoErr }
}

/// A lane without a device below: each bio completes at once with the status of `end`.
struct ImmediateCompletionLane {
    end: fn(&mut Bio) -> Status,
    done: Batch,
}

impl Lane for ImmediateCompletionLane {
    fn submit(&mut self, batch: &mut Batch, _cx: &mut Cx<'_>) {
        for bio in &mut *batch {
            bio.status = (self.end)(bio);
        }
        self.done.append(batch);
    }

    fn poll(&mut self, done: &mut Batch, _cx: &mut Cx<'_>) {
        done.append(&mut self.done);
    }
}
