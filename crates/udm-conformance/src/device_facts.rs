//! The properties of a device, and the expected result of each request.

use crate::{InitialContent, TestRequest};
use udm_core::errno::{EAGAIN, EINVAL, EIO, ENOSPC, EOPNOTSUPP, EPERM};
use udm_core::{BioFlags, Limits, Op, SECTOR_SIZE, Sectors};

/// The layer that checks requests before they reach the lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestCheckingLayer {
    /// No layer: a backend's own lane. It refuses requests that it cannot serve. The caller must
    /// keep alignment and length.
    Backend,
    /// A table: it checks all requests and splits long ones.
    Table,
    /// An NBD server: it checks all requests, with the errors of the protocol, and splits them.
    Nbd,
    /// A vhost-user server or an NVMe host: as an NBD server, with the two errors of virtio. A
    /// Linux host reports those of NVMe in the same way.
    VhostUser,
}

/// The properties of a device under test.
#[derive(Clone, Debug)]
pub struct DeviceFacts {
    /// Size, blocks, lengths, supported operations. Of a server, as negotiated with the client.
    pub limits: Limits,
    /// The layer that checks requests.
    pub boundary: RequestCheckingLayer,
    /// The content before the first write.
    pub fresh: InitialContent,
    /// Atomic unit in bytes: a read of such a unit returns the data of one write, even if writes
    /// overlap in time.
    pub atom: usize,
    /// The flags that reach the device. Protocols cannot express some flags.
    pub flags: BioFlags,
}

/// The allowed results of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExpectedResult {
    /// Success only.
    Served,
    /// Success, or one of these errors.
    May(Vec<i32>),
    /// One of these errors, and nothing has changed.
    Refused(Vec<i32>),
    /// The request is not allowed: the layer above must prevent it.
    Unasked,
}

impl DeviceFacts {
    /// Sectors per block.
    #[must_use]
    pub fn block(&self) -> u64 {
        u64::from(self.limits.logical_block).div_ceil(SECTOR_SIZE)
    }

    /// Size of the device in sectors.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.limits.size.0
    }

    /// Whether the device supports `op`.
    #[must_use]
    pub fn can(&self, op: Op) -> bool {
        !(op.is_write() && self.limits.read_only) && self.limits.max_for(op) > Sectors::ZERO
    }

    /// The allowed results of `request`.
    #[must_use]
    pub fn verdict(&self, request: &TestRequest) -> ExpectedResult {
        if request.op == Op::Flush {
            return ExpectedResult::Served;
        }
        let nbd = self.boundary == RequestCheckingLayer::Nbd;
        let virtio = self.boundary == RequestCheckingLayer::VhostUser;
        let mut errors = Vec::new();
        if request.op.is_write() && self.limits.read_only {
            // VIRTIO 1.2, 5.2.6.2: a write to a read-only device is an I/O error.
            errors.push(if virtio { EIO } else { EPERM });
        } else if !self.can(request.op) {
            // NBD: a client must not send commands that the server does not offer.
            errors.push(if nbd { EINVAL } else { EOPNOTSUPP });
        }
        if request.sector.checked_add(request.sectors).is_none_or(|end| end > self.size()) {
            // proto.md: a server SHOULD use ENOSPC for writes beyond the end, else EINVAL.
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
            RequestCheckingLayer::Backend if unaligned || long || request.sectors == 0 => {
                return if errors.is_empty() { ExpectedResult::Unasked } else { ExpectedResult::May(errors) };
            }
            RequestCheckingLayer::Backend => {}
            RequestCheckingLayer::Table if unaligned || request.sectors == 0 => errors.push(EINVAL),
            RequestCheckingLayer::Table => {}
            // proto.md leaves empty requests undefined; udm refuses them.
            RequestCheckingLayer::Nbd if request.sectors == 0 => errors.push(EINVAL),
            // proto.md: a request above the maximum payload may be refused.
            RequestCheckingLayer::Nbd if errors.is_empty() && long && request.op.has_data() => {
                return ExpectedResult::May(vec![EINVAL]);
            }
            RequestCheckingLayer::Nbd => {}
            RequestCheckingLayer::VhostUser if unaligned || request.sectors == 0 => errors.push(EIO),
            // VIRTIO 1.2, 5.2.6.1: a driver must keep the maximum lengths of the configuration.
            RequestCheckingLayer::VhostUser if errors.is_empty() && long => {
                return ExpectedResult::May(vec![EIO]);
            }
            RequestCheckingLayer::VhostUser => {}
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
