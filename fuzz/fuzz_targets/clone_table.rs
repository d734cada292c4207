//! Lines of clones: see `udm_wire::fuzz::fuzz_clone_table`. Begin with the lines in
//! `seeds/clone_table`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_clone_table(data));
