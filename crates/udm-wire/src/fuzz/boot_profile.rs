//! Properties of boot profiles.

use super::{assert_one_line_error, decode_lossy_utf8};
use crate::boot_profile::{BootProfile, HydrationOrder, RANGES_MAX};

/// Boot profiles: one that is read is printed as it was, its ranges are within its size, and its
/// order is within the regions of any size.
pub fn fuzz_boot_profile(data: &[u8]) {
    let text = decode_lossy_utf8(data);
    if let Err(error) = HydrationOrder::parse(&text, 1 << 20) {
        assert!(!error.contains('\n') && error.len() < 2000, "{error}");
    }
    match BootProfile::parse(&text) {
        Err(error) => assert_one_line_error(&error),
        Ok(profile) => {
            assert!(profile.ranges.len() <= RANGES_MAX);
            assert_eq!(BootProfile::parse(&profile.to_string()), Ok(profile.clone()));
            for region in [4096, 1 << 16, 1 << 30] {
                let order = profile.hydration_order(region);
                let word = order.to_string();
                if !order.runs.is_empty() {
                    assert_eq!(HydrationOrder::parse(&word, profile.size.div_ceil(region)), Ok(order));
                }
            }
        }
    }
}
