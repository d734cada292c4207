//! Extended headers: every reply is a list of chunks whose headers have 32 bytes, and lengths have
//! 64 bits.
//!
//! Source: the branch `extension-ext-header` of the protocol's description. Requests are in
//! [`super::NbdRequestHeader`], which both styles share.

use super::{
    CHUNK_BLOCK_STATUS_EXT, CHUNK_ERROR, CHUNK_NONE, CHUNK_OFFSET_DATA, MAGIC_EXTENDED_REPLY,
    NbdProtocolError, ReplyFlags, be16_at, be32_at, be64_at,
};

/// The headers of the transmission phase, as negotiated in the handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NbdHeaderStyle {
    /// Compact requests and simple replies.
    #[default]
    Simple,
    /// Compact requests. Replies with data are chunks.
    Structured,
    /// Extended requests. All replies are extended chunks.
    Extended,
}

impl NbdHeaderStyle {
    /// True if reads are answered with chunks, so that metadata contexts and
    /// [`super::CommandFlags::DF`] are possible.
    #[must_use]
    pub const fn has_chunks(self) -> bool {
        matches!(self, NbdHeaderStyle::Structured | NbdHeaderStyle::Extended)
    }

    /// True if headers are extended.
    #[must_use]
    pub const fn is_extended(self) -> bool {
        matches!(self, NbdHeaderStyle::Extended)
    }
}

/// The header of a chunk of an extended reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExtendedChunkHeader {
    /// Unknown bits are kept; a client ignores them.
    pub flags: ReplyFlags,
    /// The kind of chunk (`CHUNK_*`).
    pub kind: u16,
    /// Cookie of the request.
    pub cookie: u64,
    /// Offset of the request.
    pub offset: u64,
    /// Bytes after the header.
    pub len: u64,
}

impl ExtendedChunkHeader {
    /// Bytes of the header.
    pub const SIZE: usize = 32;

    /// Decodes a header.
    ///
    /// # Errors
    /// A wrong magic number: the stream is out of sync and must be closed.
    pub fn decode(bytes: &[u8; Self::SIZE]) -> Result<ExtendedChunkHeader, NbdProtocolError> {
        if be32_at(bytes, 0) != MAGIC_EXTENDED_REPLY {
            return Err(NbdProtocolError::Magic { what: "extended reply", found: be32_at(bytes, 0).into() });
        }
        Ok(ExtendedChunkHeader {
            flags: ReplyFlags::from_bits_retain(be16_at(bytes, 4)),
            kind: be16_at(bytes, 6),
            cookie: be64_at(bytes, 8),
            offset: be64_at(bytes, 16),
            len: be64_at(bytes, 24),
        })
    }

    /// The header as the server sends it.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::SIZE] {
        let mut out = [0; Self::SIZE];
        out[..4].copy_from_slice(&MAGIC_EXTENDED_REPLY.to_be_bytes());
        out[4..6].copy_from_slice(&self.flags.bits().to_be_bytes());
        out[6..8].copy_from_slice(&self.kind.to_be_bytes());
        out[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        out[16..24].copy_from_slice(&self.offset.to_be_bytes());
        out[24..].copy_from_slice(&self.len.to_be_bytes());
        out
    }

    /// True if this is the last chunk of its reply.
    #[must_use]
    pub const fn is_done(&self) -> bool {
        self.flags.contains(ReplyFlags::DONE)
    }

    /// The header with the first `N - 32` bytes of its payload.
    fn with_payload_start<const N: usize>(&self, head: &[&[u8]]) -> [u8; N] {
        let mut out = [0; N];
        out[..Self::SIZE].copy_from_slice(&self.encode());
        let mut at = Self::SIZE;
        for piece in head {
            out[at..at + piece.len()].copy_from_slice(piece);
            at += piece.len();
        }
        out
    }
}

/// The request that a chunk answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnsweredRequest {
    /// Cookie of the request.
    pub cookie: u64,
    /// Offset of the request.
    pub offset: u64,
}

impl AnsweredRequest {
    fn header(self, kind: u16, done: bool, len: u64) -> ExtendedChunkHeader {
        let flags = if done { ReplyFlags::DONE } else { ReplyFlags::empty() };
        ExtendedChunkHeader { flags, kind, cookie: self.cookie, offset: self.offset, len }
    }
}

/// The last chunk of an extended reply, without content: success, unless an error chunk was sent
/// before.
#[must_use]
pub fn extended_chunk_none(request: AnsweredRequest) -> [u8; 32] {
    request.header(CHUNK_NONE, true, 0).encode()
}

/// The head of an extended data chunk; `len` (above 0) bytes of data at `offset` follow.
#[must_use]
pub fn extended_chunk_data_header(request: AnsweredRequest, offset: u64, len: u32, done: bool) -> [u8; 40] {
    debug_assert!(len > 0, "an empty data chunk");
    let header = request.header(CHUNK_OFFSET_DATA, done, u64::from(len) + 8);
    header.with_payload_start(&[&offset.to_be_bytes()])
}

/// The head of an extended block status chunk; `count` (above 0)
/// [`encode_extended_block_status_descriptor`]s follow.
#[must_use]
pub fn extended_chunk_block_status_header(
    request: AnsweredRequest,
    context: u32,
    count: u32,
    done: bool,
) -> [u8; 40] {
    debug_assert!(count > 0, "a block status without descriptors");
    let header = request.header(CHUNK_BLOCK_STATUS_EXT, done, 8 + 16 * u64::from(count));
    header.with_payload_start(&[&context.to_be_bytes(), &count.to_be_bytes()])
}

/// One descriptor of an extended block status: the flags of a context for the next `len` (above 0)
/// bytes.
#[must_use]
pub fn encode_extended_block_status_descriptor(len: u64, flags: u64) -> [u8; 16] {
    let mut out = [0; 16];
    out[..8].copy_from_slice(&len.to_be_bytes());
    out[8..].copy_from_slice(&flags.to_be_bytes());
    out
}

/// A complete extended error chunk without a text; it ends the reply. `error` is an NBD error, not
/// 0.
#[must_use]
pub fn encode_extended_error_chunk(request: AnsweredRequest, error: u32) -> [u8; 38] {
    debug_assert!(error != 0, "an error chunk without an error");
    request.header(CHUNK_ERROR, true, 6).with_payload_start(&[&error.to_be_bytes()])
}

/// The payload of a `BLOCK_STATUS` with [`super::CommandFlags::PAYLOAD_LEN`]: the status of some of
/// the chosen contexts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockStatusPayload {
    /// Length of the range in bytes.
    pub len: u64,
    /// Ids of the contexts, as sent, including unknown and repeated ones.
    pub contexts: Vec<u32>,
}

impl BlockStatusPayload {
    /// Bytes of a payload with this number of contexts.
    #[must_use]
    pub const fn size(contexts: usize) -> usize {
        8 + 4 * contexts
    }

    /// Decodes a payload; `None` if it is not a length and a list of at least one id.
    #[must_use]
    pub fn decode(payload: &[u8]) -> Option<BlockStatusPayload> {
        let (len, ids) = payload.split_first_chunk()?;
        let (ids, rest) = ids.as_chunks::<4>();
        let contexts: Vec<u32> = ids.iter().map(|id| u32::from_be_bytes(*id)).collect();
        let is_list = rest.is_empty() && !contexts.is_empty();
        is_list.then_some(BlockStatusPayload { len: u64::from_be_bytes(*len), contexts })
    }

    /// The payload as a client sends it.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let ids = self.contexts.iter().flat_map(|id| id.to_be_bytes());
        self.len.to_be_bytes().into_iter().chain(ids).collect()
    }
}
