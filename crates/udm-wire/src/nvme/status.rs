//! Result of a command: status code type and status code (*Base* 3.3.3.2.1).

use std::fmt;

/// The status of a completion, without the phase bit: the status code in bits 0 to 7, its type in
/// bits 8 to 10, *do not retry* in bit 14.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct NvmeStatus(pub u16);

impl NvmeStatus {
    /// Successful completion.
    pub const SUCCESS: NvmeStatus = NvmeStatus(0);
    /// The opcode is not supported.
    pub const INVALID_OPCODE: NvmeStatus = NvmeStatus(0x01);
    /// A field of the command has a value that is not supported.
    pub const INVALID_FIELD: NvmeStatus = NvmeStatus(0x02);
    /// Another command with this identifier is in progress.
    pub const COMMAND_ID_CONFLICT: NvmeStatus = NvmeStatus(0x03);
    /// The controller failed internally.
    pub const INTERNAL_ERROR: NvmeStatus = NvmeStatus(0x06);
    /// The host aborted the command.
    pub const ABORT_REQUESTED: NvmeStatus = NvmeStatus(0x07);
    /// The namespace does not exist, or the format is wrong.
    pub const INVALID_NAMESPACE: NvmeStatus = NvmeStatus(0x0b);
    /// The command came at a wrong time, such as before the controller was enabled.
    pub const COMMAND_SEQUENCE_ERROR: NvmeStatus = NvmeStatus(0x0c);
    /// The length of the data does not fit the command.
    pub const DATA_SGL_LENGTH_INVALID: NvmeStatus = NvmeStatus(0x0f);
    /// The type of the data pointer is not supported here.
    pub const SGL_DESCRIPTOR_TYPE_INVALID: NvmeStatus = NvmeStatus(0x11);
    /// The offset of data in the capsule is wrong.
    pub const SGL_OFFSET_INVALID: NvmeStatus = NvmeStatus(0x16);
    /// The host identifier differs from that of the association.
    pub const HOST_ID_INCONSISTENT: NvmeStatus = NvmeStatus(0x18);
    /// The namespace is write protected.
    pub const WRITE_PROTECTED: NvmeStatus = NvmeStatus(0x20);
    /// The transport failed, such as with a wrong data digest; a retry may succeed.
    pub const TRANSIENT_TRANSPORT_ERROR: NvmeStatus = NvmeStatus(0x22);
    /// A block is beyond the end of the namespace.
    pub const LBA_OUT_OF_RANGE: NvmeStatus = NvmeStatus(0x80);
    /// No space is left.
    pub const CAPACITY_EXCEEDED: NvmeStatus = NvmeStatus(0x81);
    /// The namespace cannot serve the command yet.
    pub const NAMESPACE_NOT_READY: NvmeStatus = NvmeStatus(0x82);
    /// A reservation conflicts.
    pub const RESERVATION_CONFLICT: NvmeStatus = NvmeStatus(0x83);
    /// More asynchronous event requests than [`crate::nvme::IdentifyController`] allows.
    pub const ASYNC_EVENT_LIMIT_EXCEEDED: NvmeStatus = NvmeStatus(0x105);
    /// There is no such log page.
    pub const INVALID_LOG_PAGE: NvmeStatus = NvmeStatus(0x109);
    /// The controller is being reset by another command already.
    pub const CROSS_CONTROLLER_RESET_IN_PROGRESS: NvmeStatus = NvmeStatus(0x13f);
    /// The log page of resets is full.
    pub const CROSS_CONTROLLER_RESET_LOG_FULL: NvmeStatus = NvmeStatus(0x140);
    /// More resets at a time than the controller allows.
    pub const CROSS_CONTROLLER_RESET_LIMIT_EXCEEDED: NvmeStatus = NvmeStatus(0x141);
    /// The format of the Connect command is not supported.
    pub const CONNECT_INCOMPATIBLE_FORMAT: NvmeStatus = NvmeStatus(0x180);
    /// The controller accepts no connection now.
    pub const CONNECT_CONTROLLER_BUSY: NvmeStatus = NvmeStatus(0x181);
    /// A parameter of the Connect command is wrong.
    pub const CONNECT_INVALID_PARAMETERS: NvmeStatus = NvmeStatus(0x182);
    /// The host is not allowed to connect.
    pub const CONNECT_INVALID_HOST: NvmeStatus = NvmeStatus(0x184);
    /// The host must authenticate itself on this queue first.
    pub const AUTHENTICATION_REQUIRED: NvmeStatus = NvmeStatus(0x191);
    /// Data could not be written to the medium.
    pub const WRITE_FAULT: NvmeStatus = NvmeStatus(0x280);
    /// Data could not be read from the medium.
    pub const UNRECOVERED_READ_ERROR: NvmeStatus = NvmeStatus(0x281);
    /// A check of the data failed.
    pub const GUARD_CHECK_ERROR: NvmeStatus = NvmeStatus(0x282);
    /// The controller has lost its way to the namespace; another path may work.
    pub const INTERNAL_PATH_ERROR: NvmeStatus = NvmeStatus(0x300);
    /// The namespace will not be accessible through this controller again (ANA).
    pub const ANA_PERSISTENT_LOSS: NvmeStatus = NvmeStatus(0x301);
    /// The namespace is not accessible through this controller at the moment (ANA).
    pub const ANA_INACCESSIBLE: NvmeStatus = NvmeStatus(0x302);
    /// The state of the namespace on this controller changes (ANA).
    pub const ANA_TRANSITION: NvmeStatus = NvmeStatus(0x303);

    const DO_NOT_RETRY: u16 = 1 << 14;

    /// The same status with *do not retry*.
    #[must_use]
    pub const fn permanent(self) -> NvmeStatus {
        NvmeStatus(self.0 | NvmeStatus::DO_NOT_RETRY)
    }

    /// True if the host must not retry the command.
    #[must_use]
    pub const fn is_permanent(self) -> bool {
        self.0 & NvmeStatus::DO_NOT_RETRY != 0
    }

    /// True for success.
    #[must_use]
    pub const fn is_ok(self) -> bool {
        self.0 & 0x7ff == 0
    }

    /// The status code type: 0 generic, 1 command specific, 2 media, 3 path.
    #[must_use]
    pub const fn code_type(self) -> u16 {
        self.0 >> 8 & 7
    }
}

impl fmt::Display for NvmeStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}/{:#04x}", self.code_type(), self.0 & 0xff)
    }
}
