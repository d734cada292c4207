//! Replies of the transmission phase: simple ones, and chunks of structured ones.

use super::{
    CHUNK_BLOCK_STATUS, CHUNK_BLOCK_STATUS_EXT, CHUNK_ERROR, CHUNK_ERROR_OFFSET, CHUNK_FLAG_ERROR,
    CHUNK_NONE, CHUNK_OFFSET_DATA, CHUNK_OFFSET_HOLE, ExtendedChunkHeader, MAGIC_SIMPLE_REPLY,
    MAGIC_STRUCTURED_REPLY, NbdProtocolError, ReplyFlags, be16_at, be32_at, be64_at, clip_nbd_string,
    decode_nbd_string,
};

/// A simple reply; the data of a successful read follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimpleReply {
    /// An NBD error ([`udm_core::errno::to_nbd`]), 0 for success.
    pub error: u32,
    /// Cookie of the request.
    pub cookie: u64,
}

impl SimpleReply {
    /// Bytes of the header.
    pub const SIZE: usize = 16;

    /// The header as the server sends it.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::SIZE] {
        let mut out = [0; Self::SIZE];
        out[..4].copy_from_slice(&MAGIC_SIMPLE_REPLY.to_be_bytes());
        out[4..8].copy_from_slice(&self.error.to_be_bytes());
        out[8..].copy_from_slice(&self.cookie.to_be_bytes());
        out
    }
}

/// The header of a chunk of a structured reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplyChunkHeader {
    /// Unknown bits are kept; a client ignores them.
    pub flags: ReplyFlags,
    /// The kind of chunk (`CHUNK_*`).
    pub kind: u16,
    /// Cookie of the request.
    pub cookie: u64,
    /// Bytes after the header.
    pub len: u32,
}

impl ReplyChunkHeader {
    /// Bytes of the header.
    pub const SIZE: usize = 20;

    /// The header as the server sends it.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::SIZE] {
        let mut out = [0; Self::SIZE];
        out[..4].copy_from_slice(&MAGIC_STRUCTURED_REPLY.to_be_bytes());
        out[4..6].copy_from_slice(&self.flags.bits().to_be_bytes());
        out[6..8].copy_from_slice(&self.kind.to_be_bytes());
        out[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        out[16..].copy_from_slice(&self.len.to_be_bytes());
        out
    }

    /// True if this is the last chunk of its reply.
    #[must_use]
    pub const fn is_done(&self) -> bool {
        self.flags.contains(ReplyFlags::DONE)
    }
}

/// A chunk header with the first `N - 20` bytes of its payload.
fn encode_reply_chunk_start<const N: usize>(
    kind: u16,
    cookie: u64,
    done: bool,
    len: u32,
    head: &[&[u8]],
) -> [u8; N] {
    let flags = if done { ReplyFlags::DONE } else { ReplyFlags::empty() };
    let mut out = [0; N];
    out[..ReplyChunkHeader::SIZE].copy_from_slice(&ReplyChunkHeader { flags, kind, cookie, len }.encode());
    let mut at = ReplyChunkHeader::SIZE;
    for piece in head {
        out[at..at + piece.len()].copy_from_slice(piece);
        at += piece.len();
    }
    out
}

/// The last chunk of a reply, without content: success, unless an error chunk was sent before.
#[must_use]
pub fn chunk_none(cookie: u64) -> [u8; 20] {
    encode_reply_chunk_start(CHUNK_NONE, cookie, true, 0, &[])
}

/// The head of a data chunk; `len` bytes of data at `offset` follow. `len` is 1..=`u32::MAX` - 8.
#[must_use]
pub fn chunk_data_header(cookie: u64, offset: u64, len: u32, done: bool) -> [u8; 28] {
    debug_assert!(len > 0 && len <= u32::MAX - 8, "a data chunk of {len} bytes");
    encode_reply_chunk_start(CHUNK_OFFSET_DATA, cookie, done, len.saturating_add(8), &[&offset.to_be_bytes()])
}

/// A complete hole chunk: `len` bytes at `offset` are zero. `len` is above 0.
#[must_use]
pub fn chunk_hole(cookie: u64, offset: u64, len: u32, done: bool) -> [u8; 32] {
    debug_assert!(len > 0, "an empty hole");
    encode_reply_chunk_start(
        CHUNK_OFFSET_HOLE,
        cookie,
        done,
        12,
        &[&offset.to_be_bytes(), &len.to_be_bytes()],
    )
}

/// The head of a block status chunk; `count` [`encode_block_status_descriptor`]s follow. `count` is
/// 1..=2^28.
#[must_use]
pub fn chunk_block_status_header(cookie: u64, context: u32, count: u32, done: bool) -> [u8; 24] {
    debug_assert!(count > 0 && count <= 1 << 28, "{count} descriptors");
    encode_reply_chunk_start(CHUNK_BLOCK_STATUS, cookie, done, 4 + 8 * count, &[&context.to_be_bytes()])
}

/// One descriptor: the flags of a context for the next `len` bytes (above 0).
#[must_use]
pub fn encode_block_status_descriptor(len: u32, flags: u32) -> [u8; 8] {
    let mut out = [0; 8];
    out[..4].copy_from_slice(&len.to_be_bytes());
    out[4..].copy_from_slice(&flags.to_be_bytes());
    out
}

/// A complete error chunk without a text; it ends the reply. `error` is an NBD error, not 0.
#[must_use]
pub fn encode_textless_error_chunk(cookie: u64, error: u32) -> [u8; 26] {
    debug_assert!(error != 0, "an error chunk without an error");
    encode_reply_chunk_start(CHUNK_ERROR, cookie, true, 6, &[&error.to_be_bytes()])
}

/// Appends an error chunk with a text for people (cut at [`super::STRING_MAX`] bytes); it ends the
/// reply.
pub fn put_error_chunk_with_text(out: &mut Vec<u8>, cookie: u64, error: u32, text: &str) {
    let text = clip_nbd_string(text).as_bytes();
    let head: [u8; 26] = encode_reply_chunk_start(
        CHUNK_ERROR,
        cookie,
        true,
        6 + text.len() as u32,
        &[&error.to_be_bytes(), &(text.len() as u16).to_be_bytes()],
    );
    out.extend_from_slice(&head);
    out.extend_from_slice(text);
}

/// The header of a reply, as a client receives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyHeader {
    /// A simple reply. Data follow if the request was a read and there is no error.
    Simple(SimpleReply),
    /// A chunk; `len` bytes of payload follow.
    Chunk(ReplyChunkHeader),
}

impl ReplyHeader {
    /// Consumes a header from the front of `input`. Returns `None` if it is incomplete; `input` is
    /// then unchanged.
    ///
    /// # Errors
    /// A wrong magic number: the stream is out of sync and must be closed.
    pub fn decode(input: &mut &[u8]) -> Result<Option<ReplyHeader>, NbdProtocolError> {
        let Some(magic) = input.first_chunk() else { return Ok(None) };
        match u32::from_be_bytes(*magic) {
            MAGIC_SIMPLE_REPLY => {
                let Some((bytes, rest)) = input.split_first_chunk::<{ SimpleReply::SIZE }>() else {
                    return Ok(None);
                };
                *input = rest;
                Ok(Some(ReplyHeader::Simple(SimpleReply {
                    error: be32_at(bytes, 4),
                    cookie: be64_at(bytes, 8),
                })))
            }
            MAGIC_STRUCTURED_REPLY => {
                let Some((bytes, rest)) = input.split_first_chunk::<{ ReplyChunkHeader::SIZE }>() else {
                    return Ok(None);
                };
                *input = rest;
                Ok(Some(ReplyHeader::Chunk(ReplyChunkHeader {
                    flags: ReplyFlags::from_bits_retain(be16_at(bytes, 4)),
                    kind: be16_at(bytes, 6),
                    cookie: be64_at(bytes, 8),
                    len: be32_at(bytes, 16),
                })))
            }
            found => Err(NbdProtocolError::Magic { what: "reply", found: found.into() }),
        }
    }
}

/// A chunk of a structured or extended reply, as a client receives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyChunk<'a> {
    /// A chunk without content.
    None,
    /// Bytes of a read.
    Data {
        /// Offset on the export.
        offset: u64,
        /// The data; at least one byte.
        data: &'a [u8],
    },
    /// Zeroes of a read.
    Hole {
        /// Offset on the export.
        offset: u64,
        /// Number of zeroes; not 0.
        len: u32,
    },
    /// Block status of one metadata context, from the start of the requested range.
    BlockStatus {
        /// The context.
        context: u32,
        /// At least one descriptor: [`BlockStatusDescriptors`].
        descriptors: BlockStatusDescriptors<'a>,
    },
    /// As `BlockStatus`, with extended headers.
    BlockStatusExt {
        /// The context.
        context: u32,
        /// At least one descriptor.
        descriptors: ExtendedBlockStatusDescriptors<'a>,
    },
    /// The request failed.
    Error {
        /// An NBD error, not 0.
        error: u32,
        /// Text for people; may be empty.
        text: &'a str,
        /// Offset of the error, if the server sends it.
        offset: Option<u64>,
    },
}

/// The descriptors of a block status: a number of bytes, above 0, and the context's flags for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockStatusDescriptors<'a>(&'a [u8]);

impl BlockStatusDescriptors<'_> {
    /// The descriptors in order.
    pub fn iter(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.0.chunks_exact(8).map(|pair| (be32_at(pair, 0), be32_at(pair, 4)))
    }
}

/// The descriptors of an extended block status: a number of bytes, above 0, and the context's flags
/// for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExtendedBlockStatusDescriptors<'a>(&'a [u8]);

impl ExtendedBlockStatusDescriptors<'_> {
    /// The descriptors in order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.chunks_exact(16).map(|pair| (be64_at(pair, 0), be64_at(pair, 8)))
    }
}

impl ReplyChunk<'_> {
    /// Decodes a payload. The caller has checked that `header.len` is possible for the request.
    ///
    /// # Errors
    /// A payload that does not fit its kind, or an unknown kind that is not an error. The
    /// connection must be closed.
    pub fn decode(header: ReplyChunkHeader, payload: &[u8]) -> Result<ReplyChunk<'_>, NbdProtocolError> {
        let bad = |why| NbdProtocolError::Malformed { what: "chunk", why };
        if payload.len() != header.len as usize {
            return Err(bad("not as long as its header says"));
        }
        match header.kind {
            CHUNK_BLOCK_STATUS => {
                let (context, list) = payload.split_first_chunk().ok_or(bad("a status without a context"))?;
                let descriptors = BlockStatusDescriptors(list);
                if list.is_empty() || !list.len().is_multiple_of(8) || descriptors.iter().any(|d| d.0 == 0) {
                    return Err(bad("a status without descriptors, with half a one or an empty one"));
                }
                Ok(ReplyChunk::BlockStatus { context: u32::from_be_bytes(*context), descriptors })
            }
            kind => ReplyChunk::decode_common(kind, header.is_done(), payload),
        }
    }

    /// As [`ReplyChunk::decode`], for an extended header.
    ///
    /// # Errors
    /// A payload that does not fit its kind, or an unknown kind that is not an error. The
    /// connection must be closed.
    pub fn decode_extended(
        header: ExtendedChunkHeader,
        payload: &[u8],
    ) -> Result<ReplyChunk<'_>, NbdProtocolError> {
        let bad = |why| NbdProtocolError::Malformed { what: "extended chunk", why };
        if payload.len() as u64 != header.len {
            return Err(bad("not as long as its header says"));
        }
        match header.kind {
            CHUNK_BLOCK_STATUS_EXT => {
                let (head, list) =
                    payload.split_first_chunk::<8>().ok_or(bad("a status without a context"))?;
                let descriptors = ExtendedBlockStatusDescriptors(list);
                let is_list = !list.is_empty() && list.len() as u64 == 16 * u64::from(be32_at(head, 4));
                if !is_list || descriptors.iter().any(|d| d.0 == 0) {
                    return Err(bad("a status without descriptors, with another number or an empty one"));
                }
                Ok(ReplyChunk::BlockStatusExt { context: be32_at(head, 0), descriptors })
            }
            kind => ReplyChunk::decode_common(kind, header.is_done(), payload),
        }
    }

    /// Decodes a payload of the kinds that structured and extended replies share.
    fn decode_common(kind: u16, is_done: bool, payload: &[u8]) -> Result<ReplyChunk<'_>, NbdProtocolError> {
        let bad = |why| NbdProtocolError::Malformed { what: "chunk", why };
        match kind {
            CHUNK_NONE if payload.is_empty() && is_done => Ok(ReplyChunk::None),
            CHUNK_NONE => Err(bad("an empty chunk that has a payload or is not the last")),
            CHUNK_OFFSET_DATA if payload.len() > 8 => {
                Ok(ReplyChunk::Data { offset: be64_at(payload, 0), data: &payload[8..] })
            }
            CHUNK_OFFSET_DATA => Err(bad("a data chunk without data")),
            CHUNK_OFFSET_HOLE if payload.len() == 12 && be32_at(payload, 8) != 0 => {
                Ok(ReplyChunk::Hole { offset: be64_at(payload, 0), len: be32_at(payload, 8) })
            }
            CHUNK_OFFSET_HOLE => Err(bad("an empty hole, or one that is not 12 bytes")),
            kind if kind & CHUNK_FLAG_ERROR != 0 => {
                let (head, rest) =
                    payload.split_first_chunk::<6>().ok_or(bad("an error of less than 6 bytes"))?;
                let text_len = usize::from(be16_at(head, 4));
                let (text, rest) =
                    rest.split_at_checked(text_len).ok_or(bad("a text longer than its chunk"))?;
                let offset = match (kind, rest.len()) {
                    (CHUNK_ERROR_OFFSET, 8) => Some(be64_at(rest, 0)),
                    (CHUNK_ERROR_OFFSET, _) => return Err(bad("an error without its offset")),
                    _ => None,
                };
                if be32_at(head, 0) == 0 {
                    return Err(bad("an error chunk without an error"));
                }
                Ok(ReplyChunk::Error {
                    error: be32_at(head, 0),
                    text: decode_nbd_string(text).map_err(bad)?,
                    offset,
                })
            }
            _ => Err(bad("a kind that was not asked for")),
        }
    }
}
