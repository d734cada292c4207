//! What a subject says of itself, and what follows for each request.

use crate::{InitialContent, Request};
use udm_core::errno::{EAGAIN, EINVAL, EIO, ENOSPC, EOPNOTSUPP, EPERM};
use udm_core::{BioFlags, Limits, Op, SECTOR_SIZE, Sectors};

/// Who stands in front of the lane and checks what comes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckingLayer {
    /// Nobody: a backend's own lane. It refuses what it can't serve; alignment and length are the
    /// duty of who calls it.
    Backend,
    /// A table: checks all and splits what is too long.
    Table,
    /// An NBD server: checks all, with the protocol's errors, and splits.
    Nbd,
}

/// What a subject declares.
#[derive(Clone, Debug)]
pub struct DeviceFacts {
    /// Size, blocks, lengths, abilities. Over NBD, as the client was told.
    pub limits: Limits,
    /// Who checks.
    pub boundary: CheckingLayer,
    /// What is there before the first write.
    pub fresh: InitialContent,
    /// So many bytes of a sector are from one write when several write it at the same time.
    pub atom: usize,
    /// Every flag reaches the subject; NBD has no word for some.
    pub flags: BioFlags,
}

/// What a request may end with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExpectedResult {
    /// Success alone.
    Served,
    /// Success, or one of these errors.
    May(Vec<i32>),
    /// One of these errors, and nothing has changed.
    Refused(Vec<i32>),
    /// Nobody may ask this: the layer above has to see to it.
    Unasked,
}

impl DeviceFacts {
    /// Sectors in a block.
    #[must_use]
    pub fn block(&self) -> u64 {
        u64::from(self.limits.logical_block).div_ceil(SECTOR_SIZE)
    }

    /// Sectors in the device.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.limits.size.0
    }

    /// True when `op` is one that the device can do.
    #[must_use]
    pub fn can(&self, op: Op) -> bool {
        !(op.is_write() && self.limits.read_only) && self.limits.max_for(op) > Sectors::ZERO
    }

    /// What `request` may end with.
    #[must_use]
    pub fn verdict(&self, request: &Request) -> ExpectedResult {
        if request.op == Op::Flush {
            return ExpectedResult::Served;
        }
        let nbd = self.boundary == CheckingLayer::Nbd;
        let mut errors = Vec::new();
        if request.op.is_write() && self.limits.read_only {
            errors.push(EPERM);
        } else if !self.can(request.op) {
            // NBD: a client may not send what was not offered.
            errors.push(if nbd { EINVAL } else { EOPNOTSUPP });
        }
        if request.sector.checked_add(request.sectors).is_none_or(|end| end > self.size()) {
            // proto.md: a server SHOULD say ENOSPC where bytes would be put behind the end, else
            // EINVAL.
            let puts = matches!(request.op, Op::Write | Op::WriteZeroes);
            errors.push(match (nbd, puts) {
                (false, _) => EIO,
                (true, true) => ENOSPC,
                (true, false) => EINVAL,
            });
        }
        let unaligned =
            !request.sector.is_multiple_of(self.block()) || !request.sectors.is_multiple_of(self.block());
        let long = self.can(request.op) && self.limits.max_for(request.op) < Sectors(request.sectors);
        match self.boundary {
            CheckingLayer::Backend if unaligned || long || request.sectors == 0 => {
                return if errors.is_empty() { ExpectedResult::Unasked } else { ExpectedResult::May(errors) };
            }
            CheckingLayer::Backend => {}
            CheckingLayer::Table if unaligned || request.sectors == 0 => errors.push(EINVAL),
            CheckingLayer::Table => {}
            // proto.md leaves a request for nothing open; udm refuses it.
            CheckingLayer::Nbd if request.sectors == 0 => errors.push(EINVAL),
            // proto.md: one beyond the payload's maximum may be refused.
            CheckingLayer::Nbd if errors.is_empty() && long && request.op.has_data() => {
                return ExpectedResult::May(vec![EINVAL]);
            }
            CheckingLayer::Nbd => {}
        }
        if !errors.is_empty() {
            return ExpectedResult::Refused(errors);
        }
        let flags = request.flags & self.flags;
        let mut may = Vec::new();
        if flags.contains(BioFlags::RAHEAD) {
            may.push(EIO);
        }
        if flags.contains(BioFlags::NOWAIT) {
            may.push(EAGAIN);
        }
        if may.is_empty() { ExpectedResult::Served } else { ExpectedResult::May(may) }
    }
}
