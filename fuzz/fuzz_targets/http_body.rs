//! One body at every route of the control socket: see `udm_control::http::fuzz::fuzz_body_on_all_routes`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_control::http::fuzz::fuzz_body_on_all_routes(data));
