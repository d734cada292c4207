//! Logs of writes: see `udm_wire::fuzz::log_writes`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::log_writes(data));
