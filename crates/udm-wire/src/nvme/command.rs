//! Commands and completions.

use super::NvmeStatus;
use crate::bytes::{u16_at, u32_at, u64_at};

/// Bytes of a command.
pub const SQE_SIZE: usize = 64;

/// The opcode of all fabrics commands, on every queue (*Base* 6).
pub const OPCODE_FABRICS: u8 = 0x7f;

/// A command of the admin queue (*Base* 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminOpcode {
    /// Reads a log page.
    GetLogPage,
    /// Reads a data structure about the controller or a namespace.
    Identify,
    /// Asks to abort a command.
    Abort,
    /// Sets a feature.
    SetFeatures,
    /// Reads a feature.
    GetFeatures,
    /// Completes when an event occurs.
    AsyncEventRequest,
    /// Restarts the keep-alive timer.
    KeepAlive,
    /// Resets another controller of the subsystem.
    CrossControllerReset,
    /// A command of fabrics.
    Fabrics,
    /// A command that udm does not know.
    Other(u8),
}

impl AdminOpcode {
    /// The command with this opcode.
    #[must_use]
    pub const fn from_number(opcode: u8) -> AdminOpcode {
        match opcode {
            0x02 => AdminOpcode::GetLogPage,
            0x06 => AdminOpcode::Identify,
            0x08 => AdminOpcode::Abort,
            0x09 => AdminOpcode::SetFeatures,
            0x0a => AdminOpcode::GetFeatures,
            0x0c => AdminOpcode::AsyncEventRequest,
            0x18 => AdminOpcode::KeepAlive,
            super::OPCODE_CROSS_CONTROLLER_RESET => AdminOpcode::CrossControllerReset,
            OPCODE_FABRICS => AdminOpcode::Fabrics,
            other => AdminOpcode::Other(other),
        }
    }
}

/// A command of an I/O queue (*NVM* 3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NvmOpcode {
    /// Makes completed writes durable.
    Flush,
    /// Writes blocks.
    Write,
    /// Reads blocks.
    Read,
    /// Fills blocks with zeroes.
    WriteZeroes,
    /// Gives hints about ranges, such as that they are not needed any more.
    DatasetManagement,
    /// A command of fabrics.
    Fabrics,
    /// A command that udm does not know.
    Other(u8),
}

impl NvmOpcode {
    /// The command with this opcode.
    #[must_use]
    pub const fn from_number(opcode: u8) -> NvmOpcode {
        match opcode {
            0x00 => NvmOpcode::Flush,
            0x01 => NvmOpcode::Write,
            0x02 => NvmOpcode::Read,
            0x08 => NvmOpcode::WriteZeroes,
            0x09 => NvmOpcode::DatasetManagement,
            OPCODE_FABRICS => NvmOpcode::Fabrics,
            other => NvmOpcode::Other(other),
        }
    }
}

/// Where the data of a command is (*TCP* 3.3.2.1.2, *Base* 4.3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataPointer {
    /// In the capsule, at this offset of its data.
    InCapsule {
        /// Offset in bytes.
        offset: u64,
        /// Length in bytes.
        len: u32,
    },
    /// In data PDUs.
    Transport {
        /// Length in bytes.
        len: u32,
    },
    /// Another descriptor type.
    Other(u8),
}

/// A command of 64 bytes (*Base* 3.3.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmeCommand {
    bytes: [u8; SQE_SIZE],
}

impl NvmeCommand {
    /// The command in these bytes. Every value is a command.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; SQE_SIZE]) -> NvmeCommand {
        NvmeCommand { bytes }
    }

    /// The bytes.
    #[must_use]
    pub const fn bytes(&self) -> &[u8; SQE_SIZE] {
        &self.bytes
    }

    /// The opcode.
    #[must_use]
    pub const fn opcode(&self) -> u8 {
        self.bytes[0]
    }

    /// True for a part of a fused operation.
    #[must_use]
    pub const fn is_fused(&self) -> bool {
        self.bytes[1] & 0b11 != 0
    }

    /// The host's identifier of the command.
    #[must_use]
    pub fn id(&self) -> u16 {
        u16_at(&self.bytes, 2)
    }

    /// The namespace.
    #[must_use]
    pub fn nsid(&self) -> u32 {
        u32_at(&self.bytes, 4)
    }

    /// Where the data is.
    #[must_use]
    pub fn data_pointer(&self) -> DataPointer {
        let len = u32_at(&self.bytes, 32);
        match self.bytes[39] {
            // Data block, offset.
            0x01 => DataPointer::InCapsule { offset: u64_at(&self.bytes, 24), len },
            // Transport data block, transport specific.
            0x5a => DataPointer::Transport { len },
            // An empty descriptor of a command without data.
            0x00 if len == 0 => DataPointer::Transport { len: 0 },
            other => DataPointer::Other(other),
        }
    }

    /// Command dword `number`, 10 to 15.
    ///
    /// # Panics
    /// If there is no such dword.
    #[must_use]
    pub fn dword(&self, number: usize) -> u32 {
        assert!((10..=15).contains(&number));
        u32_at(&self.bytes, number * 4)
    }

    /// Command dwords `number` and `number + 1` as one integer.
    ///
    /// # Panics
    /// If there are no such dwords.
    #[must_use]
    pub fn dwords(&self, number: usize) -> u64 {
        u64::from(self.dword(number)) | u64::from(self.dword(number + 1)) << 32
    }
}

/// A completion of 16 bytes (*Base* 3.3.3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Completion {
    /// Dwords 0 and 1, whose meaning depends on the command.
    pub result: u64,
    /// Head of the submission queue; 0xffff without flow control.
    pub sq_head: u16,
    /// The host's identifier of the command.
    pub id: u16,
    /// The result.
    pub status: NvmeStatus,
}

impl Completion {
    /// Bytes of a completion.
    pub const SIZE: usize = 16;

    /// The bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; Completion::SIZE] {
        let mut bytes = [0; Completion::SIZE];
        bytes[..8].copy_from_slice(&self.result.to_le_bytes());
        bytes[8..10].copy_from_slice(&self.sq_head.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.id.to_le_bytes());
        bytes[14..].copy_from_slice(&(self.status.0 << 1).to_le_bytes());
        bytes
    }

    /// The completion in these bytes.
    #[must_use]
    pub fn decode(bytes: &[u8; Completion::SIZE]) -> Completion {
        Completion {
            result: u64_at(bytes, 0),
            sq_head: u16_at(bytes, 8),
            id: u16_at(bytes, 12),
            status: NvmeStatus(u16_at(bytes, 14) >> 1),
        }
    }
}
