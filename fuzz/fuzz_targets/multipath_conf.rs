//! `multipath.conf`: see `udm_wire::fuzz::multipath_conf`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::multipath_conf(data));
