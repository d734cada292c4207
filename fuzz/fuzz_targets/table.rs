//! Tables: see `udm_wire::fuzz::table`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::table(data));
