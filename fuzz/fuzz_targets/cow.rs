//! Stores of snapshots: see `udm_wire::fuzz::fuzz_exception_store`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_exception_store(data));
