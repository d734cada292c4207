//! An NBD client's half of the handshake: see `udm_wire::fuzz::fuzz_nbd_handshake_parser`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_nbd_handshake_parser(data));
