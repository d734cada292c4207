//! Tables: see `udm_wire::fuzz::fuzz_table_parser`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_table_parser(data));
