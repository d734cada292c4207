//! NBD replies: see `udm_wire::fuzz::fuzz_nbd_reply`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_nbd_reply(data));
