//! The NBD protocol, both sides, without I/O: numbers, handshake, requests, replies.
//!
//! Source: the protocol's public description (`doc/proto.md` of the nbd project). The handshake is
//! *fixed newstyle*. Transmission has compact and extended headers, simple and structured replies,
//! and metadata contexts. The client side has no extended headers. Not supported: resizing. TLS is
//! above this module.
//!
//! A server sends [`encode_nbd_server_greeting`], feeds received bytes to a
//! [`ClientHandshakeMessageParser`], and answers each [`NbdOption`] with the `put_*` functions.
//! After a successful `EXPORT_NAME` or `GO` it reads [`NbdRequestHeader`]s of
//! [`NbdRequestHeader::SIZE`] (or [`NbdRequestHeader::EXTENDED_SIZE`]) bytes and sends
//! [`SimpleReply`]s or chunks. [`client`] is the other side.
//!
//! All integers are big-endian on the wire. No input from the peer causes a panic.

pub mod client;
mod consts;
mod extended;
mod handshake;
mod option;
mod option_reply;
mod reply;
mod request;

pub use consts::*;
pub use extended::{
    AnsweredRequest, BlockStatusPayload, ExtendedChunkHeader, NbdHeaderStyle,
    encode_extended_block_status_descriptor, encode_extended_error_chunk, extended_chunk_block_status_header,
    extended_chunk_data_header, extended_chunk_none,
};
pub use handshake::{
    ClientHandshakeMessage, ClientHandshakeMessageParser, FatalHandshakeError, NbdServerGreeting,
    encode_client_flags, encode_nbd_server_greeting,
};
pub use option::{ExportInfoRequest, MalformedOption, MetaContextRequest, NbdOption};
pub use option_reply::{
    BlockSizes, ExportInfoItem, ExportNameReply, OptionReply, OptionReplyHeader, put_export_info_reply,
    put_export_name_reply, put_meta_context_reply, put_option_ack_reply, put_option_error_reply,
    put_option_reply, put_rep_server,
};
pub use reply::{
    BlockStatusDescriptors, ExtendedBlockStatusDescriptors, ReplyChunk, ReplyChunkHeader, ReplyHeader,
    SimpleReply, chunk_block_status_header, chunk_data_header, chunk_hole, chunk_none,
    encode_block_status_descriptor, encode_textless_error_chunk, put_error_chunk_with_text,
};
pub use request::{NbdCommand, NbdRequestHeader};

/// The peer sent an invalid message. The connection cannot be used any more, because the start of
/// the next message is unknown.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NbdProtocolError {
    /// The message has a wrong magic number.
    #[error("bad {what} magic {found:#x}")]
    Magic {
        /// The kind of message.
        what: &'static str,
        /// The number that was found.
        found: u64,
    },
    /// A length, count or text that contradicts the protocol.
    #[error("bad {what}: {why}")]
    Malformed {
        /// The kind of message.
        what: &'static str,
        /// The rule that it breaks.
        why: &'static str,
    },
}

/// A string of the protocol: UTF-8, no NUL, at most [`STRING_MAX`] bytes.
fn decode_nbd_string(bytes: &[u8]) -> Result<&str, &'static str> {
    if bytes.len() > STRING_MAX {
        return Err("a string is longer than 4096 bytes");
    }
    match std::str::from_utf8(bytes) {
        Ok(s) if !s.contains('\0') => Ok(s),
        Ok(_) => Err("a string contains NUL"),
        Err(_) => Err("a string is not UTF-8"),
    }
}

/// The longest prefix of `text` that fits the protocol's limit for strings, so udm never sends an
/// invalid string.
fn clip_nbd_string(text: &str) -> &str {
    let text = text.split('\0').next().unwrap_or_default();
    let mut end = text.len().min(STRING_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// The 16-bit integer at byte `at`. The caller has checked the length, as for `be32_at` and
/// `be64_at`.
fn be16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// The 32-bit integer at byte `at`.
fn be32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(be16_at(bytes, at)) << 16 | u32::from(be16_at(bytes, at + 2))
}

/// The 64-bit integer at byte `at`.
fn be64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(be32_at(bytes, at)) << 32 | u64::from(be32_at(bytes, at + 4))
}
