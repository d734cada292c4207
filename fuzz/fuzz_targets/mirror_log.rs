//! Logs of mirrors: see `udm_wire::fuzz::fuzz_mirror_log`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_mirror_log(data));
