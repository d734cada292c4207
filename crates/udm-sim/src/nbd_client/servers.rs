//! The servers: what each says of its export, and how it behaves.

use crate::plan::{Disturbance, ExcludedDisturbances};
use crate::rng::SimRng;
use udm_core::Nanos;
use udm_wire::nbd::client::Export;
use udm_wire::nbd::{BlockSizes, ExportFlags};

/// How a server behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServerMode {
    /// As it should.
    Up,
    /// Stopped, as by SIGSTOP: its system goes on, and takes connections and bytes.
    Stopped,
    /// Nothing comes through to it or from it, connections neither.
    Hole,
    /// Nobody listens.
    Refuses,
    /// New connections are taken, and nothing is said on them.
    Mute,
    /// It has come back as something else.
    Other,
}

/// What a server says of its export.
#[derive(Clone, Debug)]
pub(super) struct ExportDescription {
    pub(super) size: u64,
    pub(super) flags: ExportFlags,
    pub(super) blocks: Option<BlockSizes>,
    /// Has structured replies.
    pub(super) structured: bool,
    /// Is of before `GO`.
    pub(super) old: bool,
}

impl ExportDescription {
    /// Draws an export of `sectors`.
    pub(super) fn draw(c: &mut SimRng, sectors: u64, without: ExcludedDisturbances) -> ExportDescription {
        let mut flags = ExportFlags::HAS_FLAGS;
        flags.set(ExportFlags::SEND_FLUSH, c.below(4) > 0);
        flags.set(ExportFlags::SEND_FUA, c.one_in(2));
        flags.set(ExportFlags::SEND_TRIM, !without.has(Disturbance::Trim) && c.one_in(2));
        flags.set(ExportFlags::SEND_WRITE_ZEROES, !without.has(Disturbance::Trim) && c.one_in(2));
        flags.set(ExportFlags::CAN_MULTI_CONN, c.below(4) > 0);
        let minimum = c.pick(&[1, 512, 512, 4096]);
        let preferred = c.pick(&[512, 4096, 65536]).max(minimum);
        let maximum = c.pick(&[u32::MAX, 32 << 20, 64 << 10]);
        let old = c.one_in(8);
        // Who is not asked by `GO` has no way to tell.
        let told = !old && c.below(3) > 0;
        let blocks = told.then_some(BlockSizes { minimum, preferred, maximum });
        ExportDescription { size: sectors * 512, flags, blocks, structured: c.one_in(2), old }
    }

    /// As a client knows it.
    pub(super) fn export(&self) -> Export {
        Export {
            size: self.size,
            flags: self.flags,
            blocks: self.blocks.unwrap_or(Export::BLOCKS_ASSUMED),
            structured: false,
            contexts: Vec::new(),
        }
    }

    /// As something that whoever knew it must not take for it.
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

/// How a server treats a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct ServerBehavior {
    /// Bytes that it sends, and reads, at a time, at the most.
    pub(super) piece: u64,
    /// Mean time for a request in ns.
    pub(super) latency: u64,
    /// One request in so many takes until somebody does something about it; fails; is answered with
    /// a lie; is the last, because the connection is closed. 0 for none.
    pub(super) hangs: u64,
    pub(super) errors: u64,
    /// One write in so many is refused before its data are there.
    pub(super) early: u64,
    pub(super) lies: u64,
    pub(super) closes: u64,
    /// It says nothing, ever.
    pub(super) mute: bool,
}

/// A server.
pub(super) struct SimServer {
    /// Its export.
    pub(super) export: usize,
    pub(super) mode: ServerMode,
    /// What it says while it is [`ServerMode::Other`].
    pub(super) other: Option<ExportDescription>,
    /// When its trouble began, and when it is well again.
    pub(super) since: Nanos,
    pub(super) until: Nanos,
    /// It flaps: so often it will be in this trouble yet, and when the next time.
    pub(super) flaps: u64,
    pub(super) again: (ServerMode, Nanos),
    /// Mean time for a request in ns.
    pub(super) latency: u64,
}

impl SimServer {
    pub(super) fn new(export: usize, latency: u64) -> SimServer {
        let again = (ServerMode::Up, Nanos::NEVER);
        SimServer {
            export,
            mode: ServerMode::Up,
            other: None,
            since: Nanos(0),
            until: Nanos(0),
            flaps: 0,
            again,
            latency,
        }
    }

    /// Does it do anything now?
    pub(super) fn is_awake(&self) -> bool {
        !matches!(self.mode, ServerMode::Stopped | ServerMode::Hole)
    }
}
