//! A request to an NBD server.

use rand::{Rng, RngExt as _};
use udm_core::errno::{self, EIO, errno_from_nbd_error};
use udm_core::{Bio, BioFlags, Limits, Nanos, Op, Status};
use udm_wire::nbd::client::NbdRequestParams;
use udm_wire::nbd::{CommandFlags, NbdCommand};

/// Returns the status for an NBD error; 0 is success. EIO is a medium error, because all paths lead
/// to the same disk, unless a probe shows otherwise ([`NbdRequest::probe`]). ESHUTDOWN is a path
/// error.
pub(super) fn status_from_nbd_error(error: u32) -> Status {
    match errno_from_nbd_error(error) {
        0 => Status::Ok,
        EIO => Status::Medium,
        errno => errno::status(errno),
    }
}

/// A request in flight.
pub(super) struct NbdRequest {
    pub(super) bio: Box<Bio>,
    /// The flush before the write (`PREFLUSH`) is in flight.
    pub(super) flushing: bool,
    /// Status of a request that the server answered before all its data was sent.
    pub(super) early: Option<Status>,
    /// Offset and length of the block that is read after EIO, to find out whether the block or the
    /// path has failed. A server whose storage is gone still answers.
    pub(super) probe: Option<(u64, u32)>,
    /// Time of arrival, if there is a deadline.
    pub(super) since: Nanos,
}

impl NbdRequest {
    /// Creates a request. `cached` means that written data needs a flush to be durable.
    pub(super) fn new(bio: Box<Bio>, cached: bool, since: Nanos) -> NbdRequest {
        let flushing = cached && bio.op != Op::Flush && bio.flags.contains(BioFlags::PREFLUSH);
        NbdRequest { bio, flushing, early: None, probe: None, since }
    }

    /// Returns the current request to the server.
    pub(super) fn asked(&self) -> NbdRequestParams {
        let Bio { op, flags, sector, sectors, .. } = *self.bio;
        if let Some((offset, len)) = self.probe {
            return NbdRequestParams { command: NbdCommand::Read, flags: CommandFlags::empty(), offset, len };
        }
        if self.flushing || op == Op::Flush {
            return NbdRequestParams {
                command: NbdCommand::Flush,
                flags: CommandFlags::empty(),
                offset: 0,
                len: 0,
            };
        }
        let command = match op {
            Op::Read => NbdCommand::Read,
            Op::Write => NbdCommand::Write,
            Op::Discard => NbdCommand::Trim,
            Op::WriteZeroes | Op::Flush => NbdCommand::WriteZeroes,
        };
        let mut modifiers = CommandFlags::empty();
        modifiers.set(CommandFlags::FUA, op != Op::Read && flags.contains(BioFlags::FUA));
        let keeps = op == Op::WriteZeroes && flags.contains(BioFlags::NOUNMAP);
        modifiers.set(CommandFlags::NO_HOLE, keeps);
        NbdRequestParams { command, flags: modifiers, offset: sector.bytes(), len: sectors.bytes() as u32 }
    }

    /// Handles EIO. Returns true if another block must be read first to find the cause.
    pub(super) fn needs_probe(&mut self, status: Status, limits: &Limits, rng: &mut dyn Rng) -> bool {
        let first_answer = self.probe.is_none() && !self.flushing && self.bio.op != Op::Flush;
        if status != Status::Medium || !first_answer {
            return false;
        }
        let block = u64::from(limits.logical_block);
        let (first, end) = (self.bio.sector.bytes() / block, self.bio.end().bytes().div_ceil(block));
        let others = (limits.size.bytes() / block).saturating_sub(end - first);
        if others > 0 {
            let n = rng.random_range(0..others);
            let at = if n < first { n } else { n + (end - first) };
            self.probe = Some((at * block, limits.logical_block));
        }
        others > 0
    }

    /// Returns the final status of the request, given the status of the current answer.
    pub(super) fn verdict(&self, status: Status) -> Status {
        match (self.probe, status) {
            (None, status) => status,
            (Some(_), Status::Ok) => Status::Medium,
            (Some(_), Status::Medium) => Status::IoErr,
            (Some(_), status) if status.is_path_error() => status,
            (Some(_), _) => Status::IoErr,
        }
    }

    /// Returns true if data follows the current request.
    pub(super) fn sends_data(&self) -> bool {
        self.bio.op == Op::Write && !self.flushing && self.probe.is_none()
    }

    /// Returns true if the server may still change blocks after the current request was sent. A
    /// write that waits for its flush was not sent, and a refused write is complete.
    pub(super) fn may_still_apply(&self) -> bool {
        self.bio.op.is_write() && !self.flushing && self.early.is_none() && self.probe.is_none()
    }
}
