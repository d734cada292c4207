//! Sizes: see `udm_wire::fuzz::fuzz_size_parser`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_size_parser(data));
