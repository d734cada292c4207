//! qcow2 images: see `udm_wire::fuzz::fuzz_qcow2_image`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_qcow2_image(data));
