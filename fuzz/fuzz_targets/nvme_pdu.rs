//! PDUs of an NVMe/TCP host: see `udm_wire::fuzz::fuzz_nvme_pdu`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_nvme_pdu(data));
