//! Sizes: see `udm_wire::fuzz::size`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::size(data));
