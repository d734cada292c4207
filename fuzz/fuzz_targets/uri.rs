//! Names of devices: see `udm_wire::fuzz::uri`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::uri(data));
