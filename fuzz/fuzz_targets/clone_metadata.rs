//! Metadata of clones: see `udm_wire::fuzz::fuzz_clone_metadata`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_clone_metadata(data));
