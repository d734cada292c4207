//! Bodies of requests on the control socket: see `udm_control::http::fuzz::fuzz_request_body_round_trip`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_control::http::fuzz::fuzz_request_body_round_trip(data));
