//! Rings of a guest and their chains: see `udm_frontends::vhost_user::fuzz::fuzz_descriptor_chains`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_frontends::vhost_user::fuzz::fuzz_descriptor_chains(data));
