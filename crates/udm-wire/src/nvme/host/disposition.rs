//! What a host does with the status of a command, as Linux does it (`nvme_decide_disposition`,
//! `nvme_error_status`).

use crate::nvme::NvmeStatus;
use udm_core::{Nanos, Status};

/// Number of times that a command is repeated on the same path (Linux `nvme_max_retries`).
pub const RETRIES_MAX: u8 = 5;

/// The times in steps of 100 ms for which a controller may ask to wait before a retry (CRDT1 to 3).
pub type RetryDelays = [u16; 3];

/// What the host does with a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// It is complete, with this status. A path error makes multipath use another path.
    Complete(Status),
    /// It is sent again on this path after this time.
    Retry(Nanos),
    /// It failed on this path, and the association must be made again: the controller asks the host
    /// to authenticate itself again.
    Reconnect,
}

/// Decides about a command that was repeated `retries` times.
///
/// * A status of type 3 blames the path, also with *do not retry*: another path may work.
/// * *Do not retry* and too many retries end the command.
/// * Anything else is repeated, after the delay of the controller.
#[must_use]
pub fn decide(status: NvmeStatus, retries: u8, delays: &RetryDelays) -> Disposition {
    if status.is_ok() {
        return Disposition::Complete(Status::Ok);
    }
    if NvmeStatus(status.0 & 0x7ff) == NvmeStatus::AUTHENTICATION_REQUIRED {
        return Disposition::Reconnect;
    }
    if status.code_type() == 3 {
        return Disposition::Complete(Status::Transport);
    }
    if status.is_permanent() || retries >= RETRIES_MAX {
        return Disposition::Complete(block_status(status));
    }
    let delay = match status.0 >> 11 & 3 {
        0 => 0,
        n => delays[usize::from(n) - 1],
    };
    Disposition::Retry(Nanos::from_millis(u64::from(delay) * 100))
}

/// True if the status tells of an ANA state: the host reads the ANA log again.
#[must_use]
pub fn is_ana_status(status: NvmeStatus) -> bool {
    let code = NvmeStatus(status.0 & 0x7ff);
    [NvmeStatus::ANA_PERSISTENT_LOSS, NvmeStatus::ANA_INACCESSIBLE, NvmeStatus::ANA_TRANSITION]
        .contains(&code)
}

/// The status of a bio (Linux `nvme_error_status`).
fn block_status(status: NvmeStatus) -> Status {
    match status.0 & 0x7ff {
        0x000 => Status::Ok,
        // CAPACITY_EXCEEDED.
        0x081 => Status::NoSpace,
        // LBA_OUT_OF_RANGE, COMMAND_INTERRUPTED, NAMESPACE_NOT_READY.
        0x080 | 0x021 | 0x082 => Status::Target,
        // INVALID_OPCODE, INVALID_FIELD, INVALID_NAMESPACE, conflicting attributes.
        0x001 | 0x002 | 0x00b | 0x180 => Status::NotSupp,
        // Write fault, read error, compare failure, access denied, unwritten block; a range that is
        // read-only.
        0x280 | 0x281 | 0x285 | 0x286 | 0x287 | 0x182 => Status::Medium,
        // The checks of protection information.
        0x282..=0x284 | 0x181 => Status::Protection,
        0x083 => Status::ResvConflict,
        // WRITE_PROTECTED: no path may write.
        0x020 => Status::ReadOnly,
        _ => Status::IoErr,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_error_goes_to_another_path_at_once() {
        for status in [NvmeStatus::INTERNAL_PATH_ERROR, NvmeStatus::ANA_INACCESSIBLE] {
            for status in [status, status.permanent()] {
                assert_eq!(decide(status, 0, &[0; 3]), Disposition::Complete(Status::Transport));
            }
        }
        assert!(is_ana_status(NvmeStatus::ANA_TRANSITION.permanent()));
        assert!(!is_ana_status(NvmeStatus::INTERNAL_PATH_ERROR) && Status::Transport.is_path_error());
    }

    #[test]
    fn others_are_repeated_unless_the_controller_forbids_it() {
        let not_ready = NvmeStatus::NAMESPACE_NOT_READY;
        assert_eq!(decide(not_ready, 0, &[7, 0, 0]), Disposition::Retry(Nanos(0)));
        let delayed = NvmeStatus(not_ready.0 | 1 << 11);
        assert_eq!(decide(delayed, 4, &[7, 0, 0]), Disposition::Retry(Nanos::from_millis(700)));
        assert_eq!(decide(delayed, 5, &[7, 0, 0]), Disposition::Complete(Status::Target));
        assert_eq!(decide(not_ready.permanent(), 0, &[0; 3]), Disposition::Complete(Status::Target));
        let medium = NvmeStatus::UNRECOVERED_READ_ERROR.permanent();
        assert_eq!(decide(medium, 0, &[0; 3]), Disposition::Complete(Status::Medium));
        assert!(!Status::Medium.is_path_error());
        assert_eq!(decide(NvmeStatus::SUCCESS, 0, &[0; 3]), Disposition::Complete(Status::Ok));
        for status in [NvmeStatus::AUTHENTICATION_REQUIRED, NvmeStatus::AUTHENTICATION_REQUIRED.permanent()] {
            assert_eq!(decide(status, 0, &[0; 3]), Disposition::Reconnect);
        }
    }
}
