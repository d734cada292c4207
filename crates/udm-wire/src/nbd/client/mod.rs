//! A client of an NBD server, without I/O: bytes in, events out.
//!
//! [`ClientHandshake`] covers the time from the server's greeting to transmission, [`ReplyParser`]
//! the transmission. Both accept bytes cut anywhere, and trust no server. A reply without a
//! request, one that does not fit its request, or one that omits a part of a read is an error.
//! After an error the connection cannot be used.

mod client_handshake;
mod received_ranges;
mod replies;

pub use client_handshake::{ClientHandshake, HandshakeOptions};
pub use replies::{NbdRequestParams, ReplyEvent, ReplyParser};

use super::{
    BlockSizes, ExportFlags, NbdProtocolError, OPT_EXPORT_NAME, OPT_GO, OPT_SET_META_CONTEXT, OPT_STARTTLS,
    OPT_STRUCTURED_REPLY, PAYLOAD_MAX_DEFAULT, REP_ERR_BLOCK_SIZE_REQD, REP_ERR_INVALID, REP_ERR_PLATFORM,
    REP_ERR_POLICY, REP_ERR_SHUTDOWN, REP_ERR_TLS_REQD, REP_ERR_UNKNOWN, REP_ERR_UNSUP,
};
use crate::words::quote_for_error_line;
use udm_core::{Limits, SECTOR_SIZE, Sectors};

/// An export, as the server describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NegotiatedExportInfo {
    /// Size in bytes.
    pub size: u64,
    /// Capabilities of the export.
    pub flags: ExportFlags,
    /// Accepted lengths and alignments. If the server sends none, the values that the protocol
    /// prescribes.
    pub blocks: BlockSizes,
    /// True if structured replies were negotiated.
    pub structured: bool,
    /// The negotiated metadata contexts: the id in a block status, and the name.
    pub contexts: Vec<(u32, String)>,
}

impl NegotiatedExportInfo {
    /// The block sizes to assume if the server sends none (proto.md, "Block size constraints").
    pub const BLOCKS_ASSUMED: BlockSizes =
        BlockSizes { minimum: 1, preferred: 4096, maximum: PAYLOAD_MAX_DEFAULT };

    /// The limits of a device on this export. Blocks have at least 512 bytes.
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

/// The longest request without data, in bytes.
const RANGE_MAX: u64 = 1 << 30;

/// The reason why a connection to a server cannot be used; prints as one line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NbdClientProtocolError {
    /// The server sent an invalid message.
    #[error(transparent)]
    Protocol(#[from] NbdProtocolError),
    /// The server uses a handshake from before 2011.
    #[error("the server does not speak the fixed newstyle handshake")]
    Oldstyle,
    /// The server refuses an option.
    #[error("the server refuses {}: {}{}", describe_refused_option(*option), describe_refusal_reason(*error), parenthesize_server_text(text))]
    Refused {
        /// The refused option (`OPT_*`).
        option: u32,
        /// The reason (`REP_ERR_*`).
        error: u32,
        /// The server's text; may be empty.
        text: String,
    },
    /// A reply does not fit its option.
    #[error("the server answers option {asked} with {why}")]
    Handshake {
        /// The option that was sent.
        asked: u32,
        /// The kind of mismatch.
        why: &'static str,
    },
    /// A reply to a request that is not in flight.
    #[error("a reply to no request: cookie {0:#x}")]
    UnknownCookie(u64),
    /// A reply that does not fit its request.
    #[error("a reply that does not fit its request: {0}")]
    Mismatch(&'static str),
}

fn describe_refused_option(option: u32) -> &'static str {
    match option {
        OPT_EXPORT_NAME | OPT_GO => "the export",
        OPT_STARTTLS => "TLS",
        OPT_STRUCTURED_REPLY => "structured replies",
        OPT_SET_META_CONTEXT => "metadata contexts",
        _ => "an option",
    }
}

/// The meaning of a refusal.
fn describe_refusal_reason(error: u32) -> &'static str {
    match error {
        REP_ERR_UNSUP => "it does not know the option",
        REP_ERR_POLICY => "not allowed",
        REP_ERR_INVALID => "malformed",
        REP_ERR_PLATFORM => "not supported on its platform",
        REP_ERR_TLS_REQD => "it requires TLS; write nbds: and tls-certificates=FOLDER",
        REP_ERR_UNKNOWN => "no such export",
        REP_ERR_SHUTDOWN => "it is shutting down",
        REP_ERR_BLOCK_SIZE_REQD => "it requires a request for its block sizes",
        _ => "another error",
    }
}

/// A server's text in parentheses, or nothing.
fn parenthesize_server_text(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(" ({})", quote_for_error_line(text)) }
}
