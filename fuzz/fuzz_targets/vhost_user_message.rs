//! Messages of a vhost-user front end: see `udm_wire::fuzz::fuzz_vhost_user_message`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_vhost_user_message(data));
