//! A request to a controller.

use udm_core::{Bio, BioFlags, Nanos, Op};
use udm_wire::nvme::host::{HostCommand, HostData, NamespaceFacts, encode_dataset_range};

/// A request in flight.
pub(super) struct NvmeRequest {
    pub(super) bio: Box<Bio>,
    /// The flush before the write (`PREFLUSH`) is in flight.
    pub(super) flushing: bool,
    /// Number of times that the command was repeated.
    pub(super) retries: u8,
    /// Time of arrival, if there is a deadline.
    pub(super) since: Nanos,
}

/// Properties of a namespace that its commands need.
#[derive(Clone, Copy)]
pub(super) struct CommandParams {
    pub(super) nsid: u32,
    pub(super) block_log2: u8,
    /// The longest data in a capsule in bytes.
    pub(super) capsule_data_max: u32,
    pub(super) zeroes_deallocate: bool,
}

impl CommandParams {
    pub(super) fn new(nsid: u32, facts: &NamespaceFacts) -> CommandParams {
        let NamespaceFacts { block_log2, zeroes_deallocate, .. } = *facts;
        CommandParams { nsid, block_log2, capsule_data_max: 0, zeroes_deallocate }
    }
}

impl NvmeRequest {
    /// Creates a request. `cached` means that written data needs a flush to be durable.
    pub(super) fn new(bio: Box<Bio>, cached: bool, since: Nanos) -> NvmeRequest {
        let flushing = cached && bio.op != Op::Flush && bio.flags.contains(BioFlags::PREFLUSH);
        NvmeRequest { bio, flushing, retries: 0, since }
    }

    /// Returns the current command.
    pub(super) fn command(&self, params: &CommandParams) -> HostCommand {
        let Bio { op, flags, sector, sectors, .. } = *self.bio;
        let CommandParams { nsid, block_log2, capsule_data_max, zeroes_deallocate } = *params;
        if self.flushing || op == Op::Flush {
            return HostCommand::flush(nsid);
        }
        let (bytes, start) = (sectors.bytes() as u32, sector.bytes() >> block_log2);
        let (blocks, fua) = (bytes >> block_log2, op != Op::Read && flags.contains(BioFlags::FUA));
        match op {
            Op::Read => HostCommand::read_write(nsid, start, blocks, false, HostData::Read(bytes)),
            Op::Write if bytes <= capsule_data_max => {
                HostCommand::read_write(nsid, start, blocks, fua, HostData::InCapsule(bytes))
            }
            Op::Write => HostCommand::read_write(nsid, start, blocks, fua, HostData::Write(bytes)),
            Op::Discard => HostCommand::deallocate(nsid, capsule_data_max),
            Op::WriteZeroes | Op::Flush => {
                let deallocates = zeroes_deallocate && !flags.contains(BioFlags::NOUNMAP);
                HostCommand::write_zeroes(nsid, start, blocks, fua, deallocates)
            }
        }
    }

    /// Copies data of the current command from byte `from` on, as much as fits into `room`.
    pub(super) fn copy_data(&self, from: usize, params: &CommandParams, room: &mut [u8]) -> usize {
        if self.bio.op == Op::Discard {
            let start = self.bio.sector.bytes() >> params.block_log2;
            let blocks = (self.bio.sectors.bytes() >> params.block_log2) as u32;
            let range = encode_dataset_range(start, blocks);
            let n = room.len().min(range.len() - from);
            room[..n].copy_from_slice(&range[from..from + n]);
            return n;
        }
        self.bio.data.copy_to_at(from, room)
    }

    /// Returns true if the controller may still change blocks after the current command was sent.
    pub(super) fn may_still_apply(&self) -> bool {
        self.bio.op.is_write() && !self.flushing
    }
}
