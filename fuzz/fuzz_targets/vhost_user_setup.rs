//! The setup of a vhost-user session in another process: see `udm_wire::fuzz::fuzz_vhost_user_setup`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_vhost_user_setup(data));
