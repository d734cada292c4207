//! `multipath.conf`: see `udm_wire::fuzz::fuzz_multipath_conf_parser`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_multipath_conf_parser(data));
