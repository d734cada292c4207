//! `udm.toml`: see `udm_wire::fuzz::udm_conf`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::udm_conf(data));
