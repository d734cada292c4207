//! Messages: see `udm_wire::fuzz::message`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::message(data));
