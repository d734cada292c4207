//! Records of servers of one NVMe subsystem: see `udm_wire::fuzz::fuzz_nvme_peer_record`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| udm_wire::fuzz::fuzz_nvme_peer_record(data));
