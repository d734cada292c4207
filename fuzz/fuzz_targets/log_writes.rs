//! Logs of writes: see `udm_wire::fuzz::fuzz_log_writes_cursor`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_log_writes_cursor(data));
