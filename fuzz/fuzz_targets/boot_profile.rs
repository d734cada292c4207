//! Boot profiles: see `udm_wire::fuzz::fuzz_boot_profile`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_boot_profile(data));
