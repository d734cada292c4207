//! A request on its way to a server.

use udm_core::bugs::{self, Bug};
use udm_core::errno::{self, EIO, from_nbd};
use udm_core::{Bio, BioFlags, Nanos, Op, Status};
use udm_wire::nbd::client::Asked;
use udm_wire::nbd::{Command, CommandFlags};

/// What a request ends with that was answered with an NBD error, 0 for success. EIO is the disk's,
/// whichever way one goes to it: the server has answered. ESHUTDOWN blames the path.
pub(super) fn status_of(error: u32) -> Status {
    match from_nbd(error) {
        0 => Status::Ok,
        EIO => Status::Medium,
        errno => errno::status(errno),
    }
}

/// A request on its way.
pub(super) struct Slot {
    pub(super) bio: Box<Bio>,
    /// The flush before the write (`PREFLUSH`) is under way.
    pub(super) flushing: bool,
    /// How it has ended, though its data is not all sent: a server that says no early.
    pub(super) early: Option<Status>,
    /// When it got here, where somebody asks.
    pub(super) since: Nanos,
}

impl Slot {
    /// `cached`: what is written has to be flushed to be durable.
    pub(super) fn new(bio: Box<Bio>, cached: bool, since: Nanos) -> Slot {
        let flushing = cached && bio.op != Op::Flush && bio.flags.contains(BioFlags::PREFLUSH);
        let flushing = flushing && !bugs::on(Bug::FlushFirstForgotten);
        Slot { bio, flushing, early: None, since }
    }

    /// What is asked of the server now.
    pub(super) fn asked(&self) -> Asked {
        let Bio { op, flags, sector, sectors, .. } = *self.bio;
        if self.flushing || op == Op::Flush {
            return Asked { command: Command::Flush, flags: CommandFlags::empty(), offset: 0, len: 0 };
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
        Asked { command, flags: modifiers, offset: sector.bytes(), len: sectors.bytes() as u32 }
    }

    /// True when data follow what is asked now.
    pub(super) fn sends_data(&self) -> bool {
        self.bio.op == Op::Write && !self.flushing
    }

    /// True when the server may still change blocks for it, now that what it is asked was sent. A
    /// write that waits for its flush was not sent; one that was refused is over.
    pub(super) fn may_land(&self) -> bool {
        self.bio.op.is_write() && !self.flushing && self.early.is_none()
    }
}
