//! A request on its way to a server.

use rand::{Rng, RngExt as _};
use udm_core::bugs::{self, Bug};
use udm_core::errno::{self, EIO, from_nbd};
use udm_core::{Bio, BioFlags, Limits, Nanos, Op, Status};
use udm_wire::nbd::client::RequestParams;
use udm_wire::nbd::{Command, CommandFlags};

/// What a request ends with that was answered with an NBD error, 0 for success. EIO is the disk's,
/// whichever way one goes to it, unless a probe says otherwise ([`NbdRequest::probe`]). ESHUTDOWN blames
/// the path.
pub(super) fn status_of(error: u32) -> Status {
    match from_nbd(error) {
        0 => Status::Ok,
        EIO => Status::Medium,
        errno => errno::status(errno),
    }
}

/// A request on its way.
pub(super) struct NbdRequest {
    pub(super) bio: Box<Bio>,
    /// The flush before the write (`PREFLUSH`) is under way.
    pub(super) flushing: bool,
    /// How it has ended, though its data is not all sent: a server that says no early.
    pub(super) early: Option<Status>,
    /// The request was answered with EIO, and the block at this byte is read to find out whether
    /// the block or the way to the disk is to blame: a server whose storage is gone answers, too.
    pub(super) probe: Option<(u64, u32)>,
    /// When it got here, where somebody asks.
    pub(super) since: Nanos,
}

impl NbdRequest {
    /// `cached`: what is written has to be flushed to be durable.
    pub(super) fn new(bio: Box<Bio>, cached: bool, since: Nanos) -> NbdRequest {
        let flushing = cached && bio.op != Op::Flush && bio.flags.contains(BioFlags::PREFLUSH);
        let flushing = flushing && !bugs::on(Bug::FlushFirstForgotten);
        NbdRequest { bio, flushing, early: None, probe: None, since }
    }

    /// What is asked of the server now.
    pub(super) fn asked(&self) -> RequestParams {
        let Bio { op, flags, sector, sectors, .. } = *self.bio;
        if let Some((offset, len)) = self.probe {
            return RequestParams { command: Command::Read, flags: CommandFlags::empty(), offset, len };
        }
        if self.flushing || op == Op::Flush {
            return RequestParams {
                command: Command::Flush,
                flags: CommandFlags::empty(),
                offset: 0,
                len: 0,
            };
        }
        let command = match op {
            Op::Read => Command::Read,
            Op::Write => Command::Write,
            Op::Discard => Command::Trim,
            Op::WriteZeroes | Op::Flush => Command::WriteZeroes,
        };
        let mut modifiers = CommandFlags::empty();
        modifiers.set(CommandFlags::FUA, op != Op::Read && flags.contains(BioFlags::FUA));
        let keeps = op == Op::WriteZeroes && flags.contains(BioFlags::NOUNMAP);
        modifiers.set(CommandFlags::NO_HOLE, keeps);
        RequestParams { command, flags: modifiers, offset: sector.bytes(), len: sectors.bytes() as u32 }
    }

    /// The request was answered with `status`. True when the server is asked for another block
    /// before that is believed.
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

    /// What the request ends with, now that this was answered with `status`.
    pub(super) fn verdict(&self, status: Status) -> Status {
        match (self.probe, status) {
            (None, status) => status,
            (Some(_), Status::Ok) => Status::Medium,
            (Some(_), Status::Medium) => Status::IoErr,
            (Some(_), status) if status.is_path_error() => status,
            (Some(_), _) => Status::IoErr,
        }
    }

    /// True when data follow what is asked now.
    pub(super) fn sends_data(&self) -> bool {
        self.bio.op == Op::Write && !self.flushing && self.probe.is_none()
    }

    /// True when the server may still change blocks for it, now that what it is asked was sent. A
    /// write that waits for its flush was not sent; one that was refused is over.
    pub(super) fn may_still_apply(&self) -> bool {
        self.bio.op.is_write() && !self.flushing && self.early.is_none() && self.probe.is_none()
    }
}
