//! Checks of I/O commands against their namespace, before any part reaches the device.

use super::TRANSFER_MAX;
use super::namespaces::NamespaceGeometry;
use udm_core::{BioFlags, Op};
use udm_wire::nvme::{
    DATASET_RANGE_SIZE, DataPointer, DatasetRequest, NvmOpcode, NvmeCommand, NvmeStatus, RwFlags, RwRequest,
    WriteZeroesFlags,
};

/// How to execute a valid command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CommandPlan {
    pub(super) op: Op,
    pub(super) flags: BioFlags,
    /// First byte.
    pub(super) start: u64,
    /// Length in bytes. 0 for a flush, and for discards, whose ranges are data.
    pub(super) len: u64,
    /// Limit of bytes per bio.
    pub(super) piece: u32,
    /// Data of the host, in bytes.
    pub(super) from_host: u32,
    /// A flush follows; for a read, it comes first.
    pub(super) flushes: bool,
}

/// Checks a command that has come with `capsule_data` bytes of data.
///
/// # Errors
/// The status of the command.
pub(super) fn plan_command(
    command: &NvmeCommand,
    capsule_data: usize,
    namespace: &NamespaceGeometry,
) -> Result<CommandPlan, NvmeStatus> {
    let plan = CommandPlan {
        op: Op::Flush,
        flags: BioFlags::empty(),
        start: 0,
        len: 0,
        piece: u32::MAX,
        from_host: 0,
        flushes: false,
    };
    let opcode = NvmOpcode::from_number(command.opcode());
    if command.is_fused() {
        return Err(NvmeStatus::INVALID_FIELD.permanent());
    }
    let changes = matches!(opcode, NvmOpcode::Write | NvmOpcode::WriteZeroes | NvmOpcode::DatasetManagement);
    if changes && namespace.is_read_only {
        return Err(NvmeStatus::WRITE_PROTECTED.permanent());
    }
    let has_data = matches!(opcode, NvmOpcode::Write | NvmOpcode::DatasetManagement);
    if capsule_data > 0 && !has_data {
        return Err(NvmeStatus::INVALID_FIELD.permanent());
    }
    match opcode {
        NvmOpcode::Flush => Ok(plan),
        NvmOpcode::Read => {
            let (start, len, request) = command_byte_range(command, namespace)?;
            match command.data_pointer() {
                DataPointer::Transport { len: pointed } => check_transfer(pointed, len)?,
                _ => return Err(NvmeStatus::SGL_DESCRIPTOR_TYPE_INVALID.permanent()),
            }
            // A read with FUA must not return data of a volatile cache; the flush makes it durable.
            let flushes = request.flags().contains(RwFlags::FUA);
            Ok(CommandPlan { op: Op::Read, start, len, piece: namespace.data_max, flushes, ..plan })
        }
        NvmOpcode::Write => {
            let (start, len, request) = command_byte_range(command, namespace)?;
            check_data(command, capsule_data, len)?;
            let fua = request.flags().contains(RwFlags::FUA);
            let flags = if fua { BioFlags::FUA } else { BioFlags::empty() };
            let from_host = len as u32;
            Ok(CommandPlan { op: Op::Write, flags, start, len, piece: namespace.data_max, from_host, ..plan })
        }
        NvmOpcode::WriteZeroes => {
            let (start, len, request) = command_byte_range(command, namespace)?;
            let flags = request.zeroes_flags();
            let deallocates = flags.contains(WriteZeroesFlags::DEALLOCATE);
            Ok(CommandPlan {
                op: Op::WriteZeroes,
                flags: if deallocates { BioFlags::empty() } else { BioFlags::NOUNMAP },
                start,
                len,
                piece: namespace.zeroes_max,
                flushes: flags.contains(WriteZeroesFlags::FUA),
                ..plan
            })
        }
        NvmOpcode::DatasetManagement => {
            let request = DatasetRequest::decode(command);
            let len = (request.ranges * DATASET_RANGE_SIZE) as u64;
            let pointed = check_data_at_least(command, capsule_data, len)?;
            let piece = namespace.discard_max;
            Ok(CommandPlan { op: Op::Discard, piece, from_host: pointed, ..plan })
        }
        NvmOpcode::Fabrics => Err(NvmeStatus::COMMAND_SEQUENCE_ERROR.permanent()),
        NvmOpcode::Other(_) => Err(NvmeStatus::INVALID_OPCODE.permanent()),
    }
}

/// The range of a command in bytes.
fn command_byte_range(
    command: &NvmeCommand,
    namespace: &NamespaceGeometry,
) -> Result<(u64, u64, RwRequest), NvmeStatus> {
    let request = RwRequest::decode(command);
    let end = request.start.checked_add(request.blocks.into());
    if end.is_none_or(|end| end > namespace.blocks) {
        return Err(NvmeStatus::LBA_OUT_OF_RANGE.permanent());
    }
    let log2 = namespace.block_log2;
    Ok((request.start << log2, u64::from(request.blocks) << log2, request))
}

/// Checks that the data in data PDUs has the length of the command, which must not be too long.
fn check_transfer(pointed: u32, len: u64) -> Result<(), NvmeStatus> {
    if len > u64::from(TRANSFER_MAX) {
        return Err(NvmeStatus::INVALID_FIELD.permanent());
    }
    if u64::from(pointed) != len {
        return Err(NvmeStatus::DATA_SGL_LENGTH_INVALID.permanent());
    }
    Ok(())
}

/// As [`check_data_at_least`], for data of exactly `len` bytes.
fn check_data(command: &NvmeCommand, capsule_data: usize, len: u64) -> Result<(), NvmeStatus> {
    let pointed = check_data_at_least(command, capsule_data, len)?;
    check_transfer(pointed, len)
}

/// Checks the data of the host, of at least `len` bytes. Returns the length.
fn check_data_at_least(command: &NvmeCommand, capsule_data: usize, len: u64) -> Result<u32, NvmeStatus> {
    let pointed = match command.data_pointer() {
        DataPointer::InCapsule { offset, .. } if offset != 0 => {
            return Err(NvmeStatus::SGL_OFFSET_INVALID.permanent());
        }
        DataPointer::InCapsule { len, .. } if len as usize == capsule_data => len,
        DataPointer::Transport { len } if capsule_data == 0 => len,
        DataPointer::InCapsule { .. } | DataPointer::Transport { .. } => {
            return Err(NvmeStatus::DATA_SGL_LENGTH_INVALID.permanent());
        }
        DataPointer::Other(_) => return Err(NvmeStatus::SGL_DESCRIPTOR_TYPE_INVALID.permanent()),
    };
    if u64::from(pointed) < len {
        return Err(NvmeStatus::DATA_SGL_LENGTH_INVALID.permanent());
    }
    if pointed > TRANSFER_MAX {
        return Err(NvmeStatus::INVALID_FIELD.permanent());
    }
    Ok(pointed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use udm_core::{Limits, Sectors};

    fn geometry() -> NamespaceGeometry {
        NamespaceGeometry::new(&Limits { logical_block: 4096, ..Limits::new(Sectors(8 * 1000)) }, false)
    }

    /// A command with this opcode, range in blocks, and data pointer.
    fn command(opcode: u8, start: u64, blocks: u32, pointer: u8, len: u32) -> NvmeCommand {
        let mut bytes = [0; 64];
        (bytes[0], bytes[39]) = (opcode, pointer);
        bytes[32..36].copy_from_slice(&len.to_le_bytes());
        bytes[40..48].copy_from_slice(&start.to_le_bytes());
        bytes[48..52].copy_from_slice(&(blocks - 1).to_le_bytes());
        NvmeCommand::from_bytes(bytes)
    }

    const READ: u8 = 2;
    const WRITE: u8 = 1;
    const ZEROES: u8 = 8;
    const DISCARD: u8 = 9;

    fn status(command: &NvmeCommand, capsule_data: usize) -> Result<Op, NvmeStatus> {
        let plan = plan_command(command, capsule_data, &geometry());
        plan.map(|plan| plan.op).map_err(|status| {
            assert!(status.is_permanent());
            NvmeStatus(status.0 & 0x7ff)
        })
    }

    #[test]
    fn ranges_are_within_the_namespace() {
        let end = NvmeStatus::LBA_OUT_OF_RANGE;
        for (start, blocks, expected) in [
            (0, 1, Ok(Op::Read)),
            (999, 1, Ok(Op::Read)),
            (999, 2, Err(end)),
            (1000, 1, Err(end)),
            (u64::MAX, 2, Err(end)),
            (u64::MAX / 4096, 1, Err(end)),
        ] {
            assert_eq!(status(&command(READ, start, blocks, 0x5a, blocks * 4096), 0), expected);
        }
        assert_eq!(status(&command(ZEROES, 0, 1000, 0, 0), 0), Ok(Op::WriteZeroes));
        assert_eq!(status(&command(ZEROES, 1, 1000, 0, 0), 0), Err(end));
    }

    #[test]
    fn data_has_the_length_of_the_command() {
        let wrong = NvmeStatus::DATA_SGL_LENGTH_INVALID;
        for (opcode, pointer, len, capsule, expected) in [
            (WRITE, 0x01, 8192, 8192, Ok(Op::Write)),
            (WRITE, 0x01, 8192, 4096, Err(wrong)),
            (WRITE, 0x01, 4096, 4096, Err(wrong)),
            (WRITE, 0x01, 12_288, 12_288, Err(wrong)),
            (WRITE, 0x5a, 8192, 0, Ok(Op::Write)),
            (WRITE, 0x5a, 8192, 8192, Err(wrong)),
            (WRITE, 0x40, 8192, 0, Err(NvmeStatus::SGL_DESCRIPTOR_TYPE_INVALID)),
            (READ, 0x5a, 4096, 0, Err(wrong)),
            (READ, 0x01, 8192, 0, Err(NvmeStatus::SGL_DESCRIPTOR_TYPE_INVALID)),
            (READ, 0x5a, 8192, 8192, Err(NvmeStatus::INVALID_FIELD)),
        ] {
            assert_eq!(status(&command(opcode, 0, 2, pointer, len), capsule), expected, "{opcode} {len}");
        }
        let long = command(READ, 0, 257, 0x5a, 257 * 4096);
        assert_eq!(status(&long, 0), Err(NvmeStatus::INVALID_FIELD), "longer than the limit");
        let mut offset = *command(WRITE, 0, 1, 0x01, 4096).bytes();
        offset[24] = 4;
        assert_eq!(status(&NvmeCommand::from_bytes(offset), 4096), Err(NvmeStatus::SGL_OFFSET_INVALID));
    }

    #[test]
    fn discards_have_ranges_as_data() {
        let discard = |ranges: u32, len| {
            let mut bytes = *command(DISCARD, 0, 1, 0x01, len).bytes();
            bytes[40..48].copy_from_slice(&(u64::from(ranges - 1) | 4 << 32).to_le_bytes());
            NvmeCommand::from_bytes(bytes)
        };
        assert_eq!(status(&discard(256, 4096), 4096), Ok(Op::Discard));
        assert_eq!(status(&discard(2, 16), 16), Err(NvmeStatus::DATA_SGL_LENGTH_INVALID));
        let plan = plan_command(&discard(1, 16), 16, &geometry()).unwrap();
        assert_eq!((plan.from_host, plan.len), (16, 0));
    }

    #[test]
    fn flags_and_opcodes() {
        let with = |opcode, flags: u32| {
            let mut bytes = *command(opcode, 0, 1, if opcode == ZEROES { 0 } else { 0x5a }, 4096).bytes();
            if opcode == ZEROES {
                bytes[32..36].fill(0);
            }
            bytes[48..52].copy_from_slice(&flags.to_le_bytes());
            plan_command(&NvmeCommand::from_bytes(bytes), 0, &geometry()).unwrap()
        };
        assert_eq!(with(WRITE, 1 << 30).flags, BioFlags::FUA);
        assert_eq!(
            (with(ZEROES, 0).flags, with(ZEROES, 1 << 25).flags),
            (BioFlags::NOUNMAP, BioFlags::empty())
        );
        assert!(with(ZEROES, 1 << 30).flushes && !with(ZEROES, 0).flushes);
        for opcode in [0x05, 0x0c, 0x0d, 0x19, 0xff] {
            assert_eq!(status(&command(opcode, 0, 1, 0, 0), 0), Err(NvmeStatus::INVALID_OPCODE));
        }
        let mut fused = *command(READ, 0, 1, 0x5a, 4096).bytes();
        fused[1] = 1;
        assert_eq!(status(&NvmeCommand::from_bytes(fused), 0), Err(NvmeStatus::INVALID_FIELD));
        let frozen = NamespaceGeometry { is_read_only: true, ..geometry() };
        for opcode in [WRITE, ZEROES, DISCARD] {
            let refused = plan_command(&command(opcode, 0, 1, 0x5a, 4096), 0, &frozen);
            assert_eq!(refused, Err(NvmeStatus::WRITE_PROTECTED.permanent()));
        }
        assert!(plan_command(&command(READ, 0, 1, 0x5a, 4096), 0, &frozen).is_ok());
    }
}
