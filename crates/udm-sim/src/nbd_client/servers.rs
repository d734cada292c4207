//! The servers: their description of the export, and their behaviour.

use crate::plan::{DisturbanceClass, ExcludedDisturbances};
use crate::rng::SimRng;
use udm_core::Nanos;
use udm_wire::nbd::client::NegotiatedExportInfo;
use udm_wire::nbd::{BlockSizes, ExportFlags};

/// Behaviour of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServerAvailability {
    /// The server works.
    Up,
    /// The server is stopped, as by SIGSTOP. Its system still accepts connections and bytes.
    Stopped,
    /// The network drops everything to and from the server, connects included.
    Unreachable,
    /// The server refuses connections.
    Refuses,
    /// The server accepts connections and sends nothing.
    Silent,
    /// The server has returned with another export.
    Other,
}

/// Description of an export by its server.
#[derive(Clone, Debug)]
pub(super) struct ExportDescription {
    pub(super) size: u64,
    pub(super) flags: ExportFlags,
    pub(super) blocks: Option<BlockSizes>,
    /// True if the server supports structured replies.
    pub(super) structured: bool,
    /// True if the server does not know `GO`.
    pub(super) old: bool,
}

impl ExportDescription {
    /// Draws the description of an export of `sectors` sectors.
    pub(super) fn draw(c: &mut SimRng, sectors: u64, without: ExcludedDisturbances) -> ExportDescription {
        let mut flags = ExportFlags::HAS_FLAGS;
        flags.set(ExportFlags::SEND_FLUSH, c.below(4) > 0);
        flags.set(ExportFlags::SEND_FUA, c.one_in(2));
        flags.set(ExportFlags::SEND_TRIM, !without.has(DisturbanceClass::Trim) && c.one_in(2));
        flags.set(ExportFlags::SEND_WRITE_ZEROES, !without.has(DisturbanceClass::Trim) && c.one_in(2));
        flags.set(ExportFlags::CAN_MULTI_CONN, c.below(4) > 0);
        let minimum = c.pick(&[1, 512, 512, 4096]);
        let preferred = c.pick(&[512, 4096, 65536]).max(minimum);
        let maximum = c.pick(&[u32::MAX, 32 << 20, 64 << 10]);
        let old = c.one_in(8);
        // Without `GO` a server cannot send its block sizes.
        let sends_sizes = !old && c.below(3) > 0;
        let blocks = sends_sizes.then_some(BlockSizes { minimum, preferred, maximum });
        ExportDescription { size: sectors * 512, flags, blocks, structured: c.one_in(2), old }
    }

    /// Returns the export as a client sees it.
    pub(super) fn export(&self) -> NegotiatedExportInfo {
        NegotiatedExportInfo {
            size: self.size,
            flags: self.flags,
            blocks: self.blocks.unwrap_or(NegotiatedExportInfo::BLOCKS_ASSUMED),
            structured: false,
            contexts: Vec::new(),
        }
    }

    /// Returns a description that a client of this export must refuse.
    pub(super) fn other(&self, c: &mut SimRng) -> ExportDescription {
        let mut other = self.clone();
        let could = self.flags - ExportFlags::HAS_FLAGS;
        match c.below(4) {
            0 if !could.is_empty() => {
                let all: Vec<ExportFlags> = could.iter().collect();
                other.flags -= c.pick(&all);
            }
            1 => other.flags |= ExportFlags::READ_ONLY,
            2 => other.size += 4096,
            _ => other.size -= 4096,
        }
        other
    }
}

/// Behaviour of a server on one connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct ServerBehavior {
    /// Maximum number of bytes per send and per receive.
    pub(super) piece: u64,
    /// Mean time of a request, in ns.
    pub(super) latency: u64,
    /// One of this many requests hangs. `errors`, `violations` and `closes` are the same for
    /// errors, invalid replies and closed connections. 0 means none.
    pub(super) hangs: u64,
    pub(super) errors: u64,
    /// One of this many writes is refused before its data has arrived.
    pub(super) early: u64,
    pub(super) violations: u64,
    pub(super) closes: u64,
    /// True if the server never sends anything.
    pub(super) silent: bool,
}

/// A server.
pub(super) struct SimServer {
    /// Index of the export.
    pub(super) export: usize,
    pub(super) mode: ServerAvailability,
    /// Description while the mode is [`ServerAvailability::Other`].
    pub(super) other: Option<ExportDescription>,
    /// Start of the present fault; `until` is its end.
    pub(super) since: Nanos,
    pub(super) until: Nanos,
    /// Number of repetitions left of the fault in `again`.
    pub(super) flaps: u64,
    pub(super) again: (ServerAvailability, Nanos),
    /// Mean time of a request, in ns.
    pub(super) latency: u64,
}

impl SimServer {
    pub(super) fn new(export: usize, latency: u64) -> SimServer {
        let again = (ServerAvailability::Up, Nanos::NEVER);
        SimServer {
            export,
            mode: ServerAvailability::Up,
            other: None,
            since: Nanos(0),
            until: Nanos(0),
            flaps: 0,
            again,
            latency,
        }
    }

    /// True if the server makes progress now.
    pub(super) fn is_awake(&self) -> bool {
        !matches!(self.mode, ServerAvailability::Stopped | ServerAvailability::Unreachable)
    }
}
