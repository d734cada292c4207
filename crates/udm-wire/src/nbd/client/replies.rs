//! Requests in flight, and the server's replies to them.

use super::super::{
    CHUNK_BLOCK_STATUS, CHUNK_FLAG_ERROR, CHUNK_OFFSET_DATA, CommandFlags, NbdCommand, NbdRequestHeader,
    ReplyChunk, ReplyChunkHeader, ReplyHeader, STRING_MAX, SimpleReply, be64_at,
};
use super::received_ranges::ReceivedRanges;
use super::{NbdClientProtocolError, NegotiatedExportInfo};
use slab::Slab;

/// The longest payload of a chunk without data, in bytes: an error with a text and an offset.
const CHUNK_MAX: u32 = 6 + STRING_MAX as u32 + 8;
/// The longest block status in bytes: its context and 128 Ki descriptors.
const STATUS_MAX: u32 = 4 + (8 << 17);

/// Parameters of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NbdRequestParams {
    /// The command.
    pub command: NbdCommand,
    /// Flags of the command.
    pub flags: CommandFlags,
    /// First byte.
    pub offset: u64,
    /// Length in bytes; a read needs at least 1.
    pub len: u32,
}

/// An event of a server's reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplyEvent<'a> {
    /// Bytes of a read. Each byte arrives once, in any order.
    Data {
        /// Tag of the request.
        tag: u64,
        /// Offset of the bytes in the read.
        at: u32,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// Zeroes of a read.
    Zeroes {
        /// Tag of the request.
        tag: u64,
        /// Offset of the zeroes in the read.
        at: u32,
        /// Number of zeroes.
        len: u32,
    },
    /// Block status of one context, from the start of the requested range.
    Status {
        /// Tag of the request.
        tag: u64,
        /// The context.
        context: u32,
        /// Lengths in bytes, above 0, and the context's flags. They may reach beyond the range.
        descriptors: Vec<(u32, u32)>,
    },
    /// The request has completed. If a read succeeded, all of its bytes have arrived.
    Completed {
        /// Tag of the request.
        tag: u64,
        /// An NBD error, 0 for success.
        error: u32,
    },
}

/// The requests in flight on a connection, and the state of parsing their replies.
#[derive(Debug)]
pub struct ReplyParser {
    structured: bool,
    contexts: Vec<u32>,
    pending: Slab<SentNbdRequest>,
    /// Makes the cookies of successive requests with the same slab key distinct.
    generation: u32,
    stage: ReplyParserStage,
    /// Received bytes of an incomplete header or chunk.
    held: Vec<u8>,
}

#[derive(Debug)]
struct SentNbdRequest {
    cookie: u64,
    tag: u64,
    asked: NbdRequestParams,
    /// The error from a chunk; 0 if there was none.
    error: u32,
    received_ranges: ReceivedRanges,
}

/// The next part of the stream.
#[derive(Clone, Copy, Debug)]
enum ReplyParserStage {
    Header,
    /// The offset at the start of a data chunk.
    Offset {
        key: usize,
        header: ReplyChunkHeader,
    },
    /// Bytes of a read.
    Data {
        key: usize,
        at: u32,
        left: u32,
        done: bool,
    },
    /// The payload of any other chunk.
    Payload {
        key: usize,
        header: ReplyChunkHeader,
    },
    /// No bytes: the request has completed.
    End {
        key: usize,
    },
}

impl ReplyParser {
    /// The parser at the start of transmission on `export`.
    #[must_use]
    pub fn new(export: &NegotiatedExportInfo) -> ReplyParser {
        ReplyParser {
            structured: export.structured,
            contexts: export.contexts.iter().map(|(id, _)| *id).collect(),
            pending: Slab::new(),
            generation: 0,
            stage: ReplyParserStage::Header,
            held: Vec::new(),
        }
    }

    /// Adds a request. Returns its header; the data of a write follow it on the wire. Events of the
    /// reply carry `tag`.
    pub fn ask(&mut self, tag: u64, asked: NbdRequestParams) -> [u8; NbdRequestHeader::SIZE] {
        self.generation = self.generation.wrapping_add(1);
        let place = self.pending.vacant_entry();
        let cookie = u64::from(self.generation) << 32 | place.key() as u64;
        place.insert(SentNbdRequest {
            cookie,
            tag,
            asked,
            error: 0,
            received_ranges: ReceivedRanges::default(),
        });
        let NbdRequestParams { command, flags, offset, len } = asked;
        NbdRequestHeader { flags, command, cookie, offset, len: len.into() }.encode()
    }

    /// Number of requests in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.pending.len()
    }

    /// Consumes bytes from the front of `input` up to the next event, and returns this event.
    /// Returns `None` if more bytes are needed; `input` is then empty.
    ///
    /// # Errors
    /// The connection must be closed; requests in flight get no reply.
    pub fn take<'a>(
        &mut self,
        input: &mut &'a [u8],
    ) -> Result<Option<ReplyEvent<'a>>, NbdClientProtocolError> {
        loop {
            match self.stage {
                ReplyParserStage::Header => match self.header(input)? {
                    None => return Ok(None),
                    Some(ReplyHeader::Simple(reply)) => self.simple(reply)?,
                    Some(ReplyHeader::Chunk(header)) => self.chunk(header)?,
                },
                ReplyParserStage::Offset { key, header } => {
                    let Some(offset) = self.gather(input, 8) else { return Ok(None) };
                    let offset = be64_at(&offset, 0);
                    let len = header.len - 8;
                    let at = self.receive_range(key, offset, len)?;
                    self.stage = ReplyParserStage::Data { key, at, left: len, done: header.is_done() };
                }
                ReplyParserStage::Data { key, at, left, done } => {
                    let now = (left as usize).min(input.len());
                    if now == 0 {
                        return Ok(None);
                    }
                    let (bytes, rest) = input.split_at(now);
                    *input = rest;
                    let (at_next, left) = (at + now as u32, left - now as u32);
                    self.stage = match left {
                        0 => ReplyParserStage::after(key, done),
                        _ => ReplyParserStage::Data { key, at: at_next, left, done },
                    };
                    return Ok(Some(ReplyEvent::Data { tag: self.pending[key].tag, at, bytes }));
                }
                ReplyParserStage::Payload { key, header } => {
                    let Some(payload) = self.gather(input, header.len as usize) else { return Ok(None) };
                    self.stage = ReplyParserStage::after(key, header.is_done());
                    if let Some(event) = self.payload(key, header, &payload)? {
                        return Ok(Some(event));
                    }
                }
                ReplyParserStage::End { key } => {
                    self.stage = ReplyParserStage::Header;
                    let SentNbdRequest { tag, asked, error, received_ranges, .. } = self.pending.remove(key);
                    let whole = received_ranges.is_whole(asked.len);
                    if error == 0 && asked.command == NbdCommand::Read && !whole {
                        return Err(NbdClientProtocolError::Mismatch("a read that comes in part"));
                    }
                    return Ok(Some(ReplyEvent::Completed { tag, error }));
                }
            }
        }
    }

    /// The next header, when it is complete.
    fn header(&mut self, input: &mut &[u8]) -> Result<Option<ReplyHeader>, NbdClientProtocolError> {
        if self.held.is_empty()
            && let Some(header) = ReplyHeader::decode(input)?
        {
            return Ok(Some(header));
        }
        // The header arrived in pieces. Its first bytes determine its length.
        while let Some((&byte, rest)) = input.split_first() {
            *input = rest;
            self.held.push(byte);
            if let Some(header) = ReplyHeader::decode(&mut &self.held[..])? {
                self.held.clear();
                return Ok(Some(header));
            }
        }
        Ok(None)
    }

    /// The next `len` bytes, when all have arrived.
    fn gather(&mut self, input: &mut &[u8], len: usize) -> Option<Vec<u8>> {
        let now = (len - self.held.len()).min(input.len());
        self.held.extend_from_slice(&input[..now]);
        *input = &input[now..];
        (self.held.len() == len).then(|| std::mem::take(&mut self.held))
    }

    /// The request with this cookie.
    fn find(&self, cookie: u64) -> Result<usize, NbdClientProtocolError> {
        let key = cookie as u32 as usize;
        match self.pending.get(key) {
            Some(request) if request.cookie == cookie => Ok(key),
            _ => Err(NbdClientProtocolError::UnknownCookie(cookie)),
        }
    }

    fn simple(&mut self, reply: SimpleReply) -> Result<(), NbdClientProtocolError> {
        let key = self.find(reply.cookie)?;
        let asked = self.pending[key].asked;
        self.pending[key].error = reply.error;
        self.stage = match (asked.command, reply.error) {
            (NbdCommand::Read | NbdCommand::BlockStatus, 0) if self.structured => {
                return Err(NbdClientProtocolError::Mismatch(
                    "a simple reply where structured ones were agreed on",
                ));
            }
            (NbdCommand::Read, 0) => {
                self.receive_range(key, asked.offset, asked.len)?;
                ReplyParserStage::Data { key, at: 0, left: asked.len, done: true }
            }
            _ => ReplyParserStage::End { key },
        };
        Ok(())
    }

    fn chunk(&mut self, header: ReplyChunkHeader) -> Result<(), NbdClientProtocolError> {
        let misfit = |why| Err(NbdClientProtocolError::Mismatch(why));
        let key = self.find(header.cookie)?;
        let command = self.pending[key].asked.command;
        if !self.structured {
            return misfit("a structured reply, which nobody agreed on");
        }
        let max = if header.kind == CHUNK_BLOCK_STATUS { STATUS_MAX } else { CHUNK_MAX };
        self.stage = match (header.kind, command) {
            (CHUNK_OFFSET_DATA, NbdCommand::Read) if header.len <= 8 => {
                return misfit("a data chunk without data");
            }
            (CHUNK_OFFSET_DATA, NbdCommand::Read) => ReplyParserStage::Offset { key, header },
            (CHUNK_OFFSET_DATA, _) => return misfit("data that nobody asked for"),
            _ if header.len > max => return misfit("a chunk longer than any of its kind"),
            _ => ReplyParserStage::Payload { key, header },
        };
        Ok(())
    }

    /// Handles the complete payload of a chunk without data.
    fn payload(
        &mut self,
        key: usize,
        header: ReplyChunkHeader,
        payload: &[u8],
    ) -> Result<Option<ReplyEvent<'static>>, NbdClientProtocolError> {
        let request = &mut self.pending[key];
        let (tag, command) = (request.tag, request.asked.command);
        match ReplyChunk::decode(header, payload)? {
            ReplyChunk::None => Ok(None),
            ReplyChunk::Error { error, .. } => {
                debug_assert!(header.kind & CHUNK_FLAG_ERROR != 0);
                if request.error == 0 {
                    request.error = error;
                }
                Ok(None)
            }
            ReplyChunk::Hole { offset, len } if command == NbdCommand::Read => {
                let at = self.receive_range(key, offset, len)?;
                Ok(Some(ReplyEvent::Zeroes { tag, at, len }))
            }
            ReplyChunk::BlockStatus { context, descriptors }
                if command == NbdCommand::BlockStatus && self.contexts.contains(&context) =>
            {
                Ok(Some(ReplyEvent::Status { tag, context, descriptors: descriptors.iter().collect() }))
            }
            _ => Err(NbdClientProtocolError::Mismatch("a chunk of another command, or context")),
        }
    }

    /// Records received bytes of a read. Returns their offset in the read.
    fn receive_range(&mut self, key: usize, offset: u64, len: u32) -> Result<u32, NbdClientProtocolError> {
        let SentNbdRequest { asked, received_ranges, .. } = &mut self.pending[key];
        let at = offset.checked_sub(asked.offset).filter(|at| *at <= u64::from(asked.len));
        let at = at.map(|at| at as u32).filter(|at| len <= asked.len - at);
        let at = at.ok_or(NbdClientProtocolError::Mismatch("bytes from outside of its range"))?;
        received_ranges.add(at, len).map_err(NbdClientProtocolError::Mismatch)?;
        Ok(at)
    }
}

impl ReplyParserStage {
    /// The stage after a chunk.
    fn after(key: usize, done: bool) -> ReplyParserStage {
        if done { ReplyParserStage::End { key } } else { ReplyParserStage::Header }
    }
}
