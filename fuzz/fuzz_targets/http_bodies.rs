//! Bodies of requests on the control socket: see `udm_control::http::fuzz::fuzz_bodies`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_control::http::fuzz::fuzz_bodies(data));
