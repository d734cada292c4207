//! Why a controller cannot be used.

use super::queue::HostProtocolError;
use crate::nvme::NvmeStatus;

/// The reason why a controller cannot be used; prints as one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    /// The controller violates the protocol.
    #[error(transparent)]
    Protocol(#[from] HostProtocolError),
    /// The controller refuses a command.
    #[error("the controller refuses {what}: status {status}{}", describe_status(*.status))]
    Refused {
        /// What it refuses.
        what: &'static str,
        /// The status of the command.
        status: NvmeStatus,
    },
    /// The controller or the namespace cannot be used.
    #[error("{0}")]
    Unusable(String),
}

fn describe_status(status: NvmeStatus) -> &'static str {
    match NvmeStatus(status.0 & 0x7ff) {
        NvmeStatus::CONNECT_INVALID_HOST => {
            " (this host is not allowed: see hostnqn=; if the controller has secrets of hosts, it has none of \
             this one)"
        }
        NvmeStatus::CONNECT_INVALID_PARAMETERS => " (a parameter is wrong: is the subsystem's name right?)",
        NvmeStatus::CONNECT_CONTROLLER_BUSY => " (it is busy)",
        NvmeStatus::INVALID_NAMESPACE => " (there is no such namespace)",
        NvmeStatus::AUTHENTICATION_REQUIRED => " (the host must authenticate itself again)",
        _ => "",
    }
}

/// Returns an error if `status`, which answers `what`, is not success.
pub(super) fn check_status(status: NvmeStatus, what: &'static str) -> Result<(), HostError> {
    if status.is_ok() { Ok(()) } else { Err(HostError::Refused { what, status }) }
}
