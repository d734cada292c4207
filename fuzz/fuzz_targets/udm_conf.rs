//! `udm.toml`: see `udm_wire::fuzz::fuzz_udm_conf_parser`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_udm_conf_parser(data));
