//! Records of the state folder: see `udm_control::state_folder::fuzz::fuzz_state_record`. Begin
//! with the records in `seeds/state_records`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    udm_control::state_folder::fuzz::fuzz_state_record(data);
});
