//! NBD requests: see `udm_wire::fuzz::fuzz_nbd_request`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_nbd_request(data));
