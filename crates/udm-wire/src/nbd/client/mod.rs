//! A client of an NBD server, without I/O: bytes in, events out.
//!
//! [`ClientHandshake`] covers the time from the server's greeting to transmission, [`ReplyParser`] the
//! transmission. Both accept bytes cut anywhere, and trust no server. A reply without a request,
//! one that does not fit its request, or one that omits a part of a read is an error. After an
//! error the connection cannot be used.

mod client_handshake;
mod received_ranges;
mod replies;

pub use client_handshake::{ClientHandshake, HandshakeOptions};
pub use replies::{ReplyEvent, ReplyParser, RequestParams};

use super::{
    BlockSizes, ExportFlags, OPT_EXPORT_NAME, OPT_GO, OPT_SET_META_CONTEXT, OPT_STRUCTURED_REPLY,
    PAYLOAD_MAX_DEFAULT, ProtocolError, REP_ERR_BLOCK_SIZE_REQD, REP_ERR_INVALID, REP_ERR_PLATFORM,
    REP_ERR_POLICY, REP_ERR_SHUTDOWN, REP_ERR_TLS_REQD, REP_ERR_UNKNOWN, REP_ERR_UNSUP,
};
use crate::words::shown;
use udm_core::{Limits, SECTOR_SIZE, Sectors};

/// What a server says of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// Size in bytes.
    pub size: u64,
    /// What it can do.
    pub flags: ExportFlags,
    /// What lengths and alignments it takes; what the protocol has every client assume where the
    /// server says nothing.
    pub blocks: BlockSizes,
    /// Structured replies were agreed on.
    pub structured: bool,
    /// The metadata contexts that were agreed on: what each is called in a block status, and its
    /// name.
    pub contexts: Vec<(u32, String)>,
}

impl Export {
    /// The block sizes of a server that says nothing of them (proto.md, "Block size constraints").
    pub const BLOCKS_ASSUMED: BlockSizes =
        BlockSizes { minimum: 1, preferred: 4096, maximum: PAYLOAD_MAX_DEFAULT };

    /// As a device's: whole blocks of 512 bytes at least.
    #[must_use]
    pub fn limits(&self) -> Limits {
        let BlockSizes { minimum, preferred, maximum } = self.blocks;
        let block = minimum.max(SECTOR_SIZE as u32);
        let whole = |bytes: u64| Sectors::from_bytes(bytes / u64::from(block) * u64::from(block));
        let range = |flag| if self.flags.contains(flag) { whole(RANGE_MAX) } else { Sectors::ZERO };
        Limits {
            logical_block: block,
            physical_block: preferred.clamp(block, block.max(4096)),
            io_min: preferred.max(block),
            max_sectors: whole(maximum.clamp(block, PAYLOAD_MAX_DEFAULT).into()),
            max_discard: range(ExportFlags::SEND_TRIM),
            max_write_zeroes: range(ExportFlags::SEND_WRITE_ZEROES),
            write_cache: self.flags.contains(ExportFlags::SEND_FLUSH),
            fua: self.flags.contains(ExportFlags::SEND_FUA),
            read_only: self.flags.contains(ExportFlags::READ_ONLY),
            ..Limits::new(whole(self.size))
        }
    }
}

/// The longest range without data that is asked for at once, in bytes.
const RANGE_MAX: u64 = 1 << 30;

/// Why a connection to a server is of no (more) use; prints as one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// What came is not the protocol.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    /// The handshake of a server of before 2011.
    #[error("the server does not speak the fixed newstyle handshake")]
    Oldstyle,
    /// The server says no.
    #[error("the server refuses {}: {}{}", option_name(*option), reason(*error), parenthesized(text))]
    Refused {
        /// What was asked for (`OPT_*`).
        option: u32,
        /// Why not (`REP_ERR_*`).
        error: u32,
        /// The server's own words; may be empty.
        text: String,
    },
    /// The answer to one question does not fit it.
    #[error("the server answers option {asked} with {why}")]
    Handshake {
        /// The option.
        asked: u32,
        /// What is wrong.
        why: &'static str,
    },
    /// A reply to a request that is not under way.
    #[error("a reply to nothing: cookie {0:#x}")]
    UnknownCookie(u64),
    /// A reply that does not fit its request.
    #[error("a reply that does not fit its request: {0}")]
    Mismatch(&'static str),
}

fn option_name(option: u32) -> &'static str {
    match option {
        OPT_EXPORT_NAME | OPT_GO => "the export",
        OPT_STRUCTURED_REPLY => "structured replies",
        OPT_SET_META_CONTEXT => "metadata contexts",
        _ => "an option",
    }
}

/// What a refusal means.
fn reason(error: u32) -> &'static str {
    match error {
        REP_ERR_UNSUP => "it does not know the option",
        REP_ERR_POLICY => "not allowed",
        REP_ERR_INVALID => "malformed",
        REP_ERR_PLATFORM => "not on its platform",
        REP_ERR_TLS_REQD => "it wants TLS, which udm does not do",
        REP_ERR_UNKNOWN => "no such export",
        REP_ERR_SHUTDOWN => "it is shutting down",
        REP_ERR_BLOCK_SIZE_REQD => "it wants to be asked for its block sizes",
        _ => "another error",
    }
}

/// A server's words behind what they explain.
fn parenthesized(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(" ({})", shown(text)) }
}
