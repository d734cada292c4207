//! The linear target: `linear <dev> <offset>`, a range of one device.
//!
//! The target has no lane: the lane of the table adds the offset itself
//! ([`TargetDataPath::Linear`]).

use std::sync::Arc;
use udm_core::{Extents, Limits, Sector, Sectors};
use udm_dm::TargetError;
use udm_dm::target::{
    DeviceRange, LowerLimits, ResolvedDevice, Target, TargetArgs, TargetDataPath, TargetFeatures,
    parse_decimal_u64,
};

struct LinearTarget {
    device: ResolvedDevice,
    offset: Sector,
    len: Sectors,
}

/// Creates a linear target.
///
/// # Errors
/// The kernel's: `Invalid argument count`, `Invalid device sector`, `Device lookup failed`. An
/// offset beyond 64 bits, which the kernel takes modulo 2^64, is refused.
pub fn create_linear_target(args: &mut TargetArgs<'_>) -> Result<Arc<dyn Target>, TargetError> {
    let [device, offset] = args.args else {
        return Err(TargetError::new("linear: Invalid argument count").at(args.args.len().min(2)));
    };
    let offset = Sector(
        parse_decimal_u64(offset).ok_or_else(|| TargetError::new("linear: Invalid device sector").at(1))?,
    );
    let device = args.resolver.get(device).map_err(|e| {
        TargetError::new("linear: Device lookup failed").with_errno(e.errno).because(e.reason).at(0)
    })?;
    Ok(Arc::new(LinearTarget { device, offset, len: args.len }))
}

impl Target for LinearTarget {
    fn type_name(&self) -> &'static str {
        "linear"
    }

    fn table(&self) -> String {
        format!("{} {}", self.device.number, self.offset)
    }

    fn limits(&self, below: LowerLimits<'_>) -> Limits {
        let below = below.limits(&self.device);
        Limits { request_stackable: false, ..Limits::new(self.len).stack(&below) }
    }

    fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
        self.device.device.extents(Sector(self.offset.0 + from.0), len, out);
    }

    fn devices(&self) -> Vec<DeviceRange> {
        vec![DeviceRange::new(&self.device, self.offset, self.len)]
    }

    fn data_path(&self) -> TargetDataPath {
        TargetDataPath::Linear(self.device.clone(), self.offset)
    }

    fn features(&self) -> TargetFeatures {
        TargetFeatures { flush_bypasses_map: true, ..TargetFeatures::default() }
    }
}
