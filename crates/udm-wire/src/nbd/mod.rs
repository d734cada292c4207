//! The NBD protocol, both sides, without I/O: numbers, handshake, requests, replies.
//!
//! Source: the protocol's public description (`doc/proto.md` of the nbd project). The handshake is
//! *fixed newstyle*. Transmission has compact headers, simple and structured replies, and metadata
//! contexts. Not supported: TLS, extended headers, resizing. Their options are answered with
//! [`REP_ERR_UNSUP`] or [`REP_ERR_POLICY`].
//!
//! A server sends [`greeting`], feeds received bytes to a [`HandshakeParser`], and answers each
//! [`ClientOption`] with the `put_*` functions. After a successful `EXPORT_NAME` or `GO` it reads
//! [`Request`]s of [`Request::SIZE`] bytes and sends [`SimpleReply`]s or chunks. [`client`] is the
//! other side.
//!
//! All integers are big-endian on the wire. No input from the peer causes a panic.

pub mod client;
mod consts;
mod handshake;
mod option;
mod option_reply;
mod reply;
mod request;

pub use consts::*;
pub use handshake::{
    ClientMessage, Greeting, HandshakeError, HandshakeParser, encode_client_flags, greeting,
};
pub use option::{ClientOption, InfoRequest, MalformedOption, MetaRequest};
pub use option_reply::{
    BlockSizes, ExportNameReply, Info, OptionReply, OptionReplyHeader, put_ack, put_error,
    put_export_name_reply, put_info, put_meta_context, put_reply, put_server,
};
pub use reply::{
    Chunk, ChunkHeader, Descriptors, ReplyHeader, SimpleReply, block_descriptor, chunk_block_status_header,
    chunk_data_header, chunk_error_header, chunk_hole, chunk_none, put_chunk_error,
};
pub use request::{Command, Request};

/// The peer sent an invalid message. The connection cannot be used any more, because the start of
/// the next message is unknown.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
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
fn string(bytes: &[u8]) -> Result<&str, &'static str> {
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
fn clip_string(text: &str) -> &str {
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
