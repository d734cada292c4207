//! An NBD server's half of the handshake: see `udm_wire::fuzz::fuzz_nbd_option_reply`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_nbd_option_reply(data));
