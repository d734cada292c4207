//! Stores of snapshots: see `udm_wire::fuzz::cow`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::cow(data));
