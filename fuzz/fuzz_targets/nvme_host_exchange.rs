//! Answers of a hostile NVMe/TCP controller to this host: see
//! `udm_wire::fuzz::fuzz_nvme_host_exchange`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_nvme_host_exchange(data));
