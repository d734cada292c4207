//! Job files of `udm bench`: see `udm_bench::fuzz`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_bench::fuzz::fuzz_job_file_parser(data));
