//! Sessions of a vhost-user front end: see `udm_frontends::vhost_user::fuzz::fuzz_session`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_frontends::vhost_user::fuzz::fuzz_session(data));
