//! Requests and I/O commands: `struct ublksrv_io_desc` and `struct ublksrv_io_cmd`.

use super::{READ_WRITE, ioctl_number, write_ints};
use bitflags::bitflags;

/// Bytes of an encoded I/O command.
pub const IO_SIZE: usize = 16;
/// Words of 64 bits of a descriptor.
pub const DESCRIPTOR_WORDS: usize = 3;
/// The result of a fetch that was ended without a request (ENODEV).
pub const RESULT_ABORT: i32 = 19;

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UblkIoOp {
    /// Read into the buffer.
    Read,
    /// Write the buffer.
    Write,
    /// Make completed writes durable.
    Flush,
    /// Discard the range.
    Discard,
    /// Fill the range with zeroes.
    WriteZeroes,
    /// Not offered by udm's devices: operations of zones.
    Unknown(u8),
}

bitflags! {
    /// Flags of a request.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct UblkIoFlags: u32 {
        /// File system metadata.
        const META = 1 << 11;
        /// The write completes when it is durable.
        const FUA = 1 << 13;
        /// Zeroes must keep the blocks allocated.
        const NOUNMAP = 1 << 15;
    }
}

/// A request, as the driver describes it in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UblkIoDescriptor {
    /// Operation.
    pub op: UblkIoOp,
    /// Flags.
    pub flags: UblkIoFlags,
    /// Length in sectors of 512 bytes.
    pub sectors: u32,
    /// First sector.
    pub sector: u64,
}

impl UblkIoDescriptor {
    /// Decodes the words of a descriptor. The last one is the address of the buffer, which the
    /// server knows.
    #[must_use]
    pub const fn decode(words: [u64; DESCRIPTOR_WORDS]) -> UblkIoDescriptor {
        let bytes = words[0].to_ne_bytes();
        let first = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let sectors = u32::from_ne_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        let op = match first & 0xff {
            0 => UblkIoOp::Read,
            1 => UblkIoOp::Write,
            2 => UblkIoOp::Flush,
            3 => UblkIoOp::Discard,
            5 => UblkIoOp::WriteZeroes,
            other => UblkIoOp::Unknown(other as u8),
        };
        UblkIoDescriptor { op, flags: UblkIoFlags::from_bits_truncate(first), sectors, sector: words[1] }
    }
}

/// A command to one tag of a queue. The owner of the tag's buffer writes its address at
/// [`UblkIoCommand::ADDRESS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UblkIoCommand {
    /// Queue.
    pub queue: u16,
    /// Tag.
    pub tag: u16,
    /// `None` for the first fetch. Otherwise the result of the last request, bytes or a negative
    /// errno, and a fetch of the next one.
    pub result: Option<i32>,
}

impl UblkIoCommand {
    /// Byte offset of the address of the buffer (64 bits).
    pub const ADDRESS: usize = 8;

    /// The number of the command for the kernel.
    #[must_use]
    pub const fn code(&self) -> u32 {
        let number = if self.result.is_some() { 0x21 } else { 0x20 };
        ioctl_number(READ_WRITE, number, IO_SIZE)
    }

    /// Encodes the command without a buffer.
    #[must_use]
    pub fn encode(&self) -> [u8; IO_SIZE] {
        let mut out = [0; IO_SIZE];
        write_ints!(out, 0 => self.queue, 2 => self.tag, 4 => self.result.unwrap_or(0));
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_has_the_layout_of_the_kernel() {
        let command = UblkIoCommand { queue: 0x0201, tag: 0x0403, result: Some(0x1413_1211) };
        assert_eq!(command.encode(), [1, 2, 3, 4, 0x11, 0x12, 0x13, 0x14, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(command.code(), 0xc010_7521);
        assert_eq!(UblkIoCommand { result: None, ..command }.code(), 0xc010_7520);
        assert_eq!(UblkIoCommand { result: Some(-5), ..command }.encode()[4..8], [0xfb, 0xff, 0xff, 0xff]);
    }

    #[test]
    fn a_descriptor_has_the_layout_of_the_kernel() {
        let word = |bytes| u64::from_ne_bytes(bytes);
        // op_flags with FUA and NOUNMAP, nr_sectors, start_sector, addr.
        let words = [word([5, 0xa0, 0, 0, 8, 1, 0, 0]), word([1, 2, 3, 4, 5, 6, 7, 8]), 99];
        let expected = UblkIoDescriptor {
            op: UblkIoOp::WriteZeroes,
            flags: UblkIoFlags::FUA | UblkIoFlags::NOUNMAP,
            sectors: 0x108,
            sector: 0x0807_0605_0403_0201,
        };
        assert_eq!(UblkIoDescriptor::decode(words), expected);
        let ops = [0, 1, 2, 3, 4].map(|op| UblkIoDescriptor::decode([op, 0, 0]).op);
        use UblkIoOp as O;
        assert_eq!(ops, [O::Read, O::Write, O::Flush, O::Discard, O::Unknown(4)]);
    }
}
