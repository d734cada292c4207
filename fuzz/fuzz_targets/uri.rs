//! Names of devices: see `udm_wire::fuzz::fuzz_device_uri_parser`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_device_uri_parser(data));
