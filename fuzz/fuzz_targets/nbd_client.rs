//! Data from a server to an NBD client: see `udm_wire::fuzz::fuzz_nbd_client`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_nbd_client(data));
