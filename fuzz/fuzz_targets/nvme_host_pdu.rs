//! PDUs of a hostile NVMe/TCP controller: see `udm_wire::fuzz::fuzz_nvme_host_pdu`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_nvme_host_pdu(data));
