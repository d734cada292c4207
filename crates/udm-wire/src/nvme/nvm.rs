//! Arguments of the commands of the NVM command set (*NVM* 3.2).

use super::NvmeCommand;
use crate::bytes::{u32_at, u64_at};
use bitflags::bitflags;

bitflags! {
    /// Flags in dword 12 of a read or write.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct RwFlags: u32 {
        /// The host retries little. Without effect in udm.
        const LIMITED_RETRY = 1 << 31;
        /// Forced unit access: a write is durable when it completes.
        const FUA = 1 << 30;
        const _ = !0;
    }
}

bitflags! {
    /// Flags in dword 12 of a Write Zeroes command.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct WriteZeroesFlags: u32 {
        /// The zeroes are durable when the command completes.
        const FUA = 1 << 30;
        /// The blocks may be deallocated, if they then read as zeroes.
        const DEALLOCATE = 1 << 25;
        const _ = !0;
    }
}

/// The range of a read, write or Write Zeroes command, in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RwRequest {
    /// First block.
    pub start: u64,
    /// Number of blocks, 1 to 65536.
    pub blocks: u32,
    /// Dword 12, with the flags of the command.
    flags: u32,
}

impl RwRequest {
    /// The range of `command`.
    #[must_use]
    pub fn decode(command: &NvmeCommand) -> RwRequest {
        let flags = command.dword(12);
        RwRequest { start: command.dwords(10), blocks: (flags & 0xffff) + 1, flags }
    }

    /// The flags of a read or write.
    #[must_use]
    pub const fn flags(&self) -> RwFlags {
        RwFlags::from_bits_retain(self.flags)
    }

    /// The flags of a Write Zeroes command.
    #[must_use]
    pub const fn zeroes_flags(&self) -> WriteZeroesFlags {
        WriteZeroesFlags::from_bits_retain(self.flags)
    }
}

/// Bytes of a range of a Dataset Management command.
pub const DATASET_RANGE_SIZE: usize = 16;

/// Most ranges of a Dataset Management command.
pub const DATASET_RANGES_MAX: usize = 256;

/// The arguments of a Dataset Management command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatasetRequest {
    /// Number of ranges, 1 to 256.
    pub ranges: usize,
    /// The ranges are not needed any more.
    pub deallocates: bool,
}

impl DatasetRequest {
    /// The arguments of `command`.
    #[must_use]
    pub fn decode(command: &NvmeCommand) -> DatasetRequest {
        let ranges = (command.dword(10) & 0xff) as usize + 1;
        DatasetRequest { ranges, deallocates: command.dword(11) & 1 << 2 != 0 }
    }
}

/// A range of a Dataset Management command, in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatasetRange {
    /// First block.
    pub start: u64,
    /// Number of blocks; may be 0.
    pub blocks: u32,
}

impl DatasetRange {
    /// The range in these bytes.
    #[must_use]
    pub fn decode(bytes: &[u8; DATASET_RANGE_SIZE]) -> DatasetRange {
        DatasetRange { blocks: u32_at(bytes, 4), start: u64_at(bytes, 8) }
    }
}
