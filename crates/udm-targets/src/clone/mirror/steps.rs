//! The steps of a write of a mirror.

use crate::clone::engine::{DESTINATION, SOURCE};

/// Where a tracked request is, and what follows.
#[derive(Clone, Copy)]
pub(super) enum MirrorStep {
    /// On the source; the destination is next.
    Source,
    /// On the destination.
    Destination,
    /// On the destination as a write of zeroes, because it has no request for them.
    ZeroFill,
    /// A write of a whole region that is not copied and is claimed: on the source.
    OverwriteSource { region: u64 },
    /// The same on the destination.
    OverwriteDestination { region: u64 },
    /// A write with the claims of those of its regions that are not copied: on the source.
    ClaimedSource,
    /// The same on the destination.
    ClaimedDestination,
}

impl MirrorStep {
    /// The device of a request in this step.
    pub(super) fn device(self) -> usize {
        match self {
            MirrorStep::Source | MirrorStep::OverwriteSource { .. } | MirrorStep::ClaimedSource => SOURCE,
            MirrorStep::Destination
            | MirrorStep::ZeroFill
            | MirrorStep::OverwriteDestination { .. }
            | MirrorStep::ClaimedDestination => DESTINATION,
        }
    }
}
