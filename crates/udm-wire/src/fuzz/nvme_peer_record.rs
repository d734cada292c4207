//! Properties of the records of servers of one NVMe subsystem.

use super::assert_one_line_error;
use crate::nvme::PeerRecord;

/// Records of servers: one that is read is valid and reads back, and an error is one line.
pub fn fuzz_nvme_peer_record(data: &[u8]) {
    match PeerRecord::parse(data) {
        Err(error) => assert_one_line_error(&error),
        Ok(record) => {
            assert!(record.is_valid());
            let again = PeerRecord::parse(record.to_string().as_bytes()).expect("a record reads back");
            assert_eq!(again.remote.is_some(), record.remote.is_some());
            let without_remote = |record| PeerRecord { remote: None, ..record };
            assert_eq!(without_remote(again), without_remote(record));
        }
    }
}
