//! Messages: see `udm_wire::fuzz::fuzz_message_words`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_message_words(data));
