//! What a server says to a client of NBD: see `udm_wire::fuzz::nbd_client`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::nbd_client(data));
