//! Arbitrary bytes as messages with extended headers.

use super::assert_one_line_error;
use crate::nbd::{
    AnsweredRequest, BlockStatusPayload, CommandFlags, ExtendedChunkHeader, NbdCommand, NbdHeaderStyle,
    NbdRequestHeader, ReplyChunk, encode_extended_block_status_descriptor, encode_extended_error_chunk,
    extended_chunk_block_status_header, extended_chunk_data_header, extended_chunk_none,
};

/// An extended request, and what follows it as the payload of a `BLOCK_STATUS`.
pub(super) fn check_request(data: &[u8]) {
    let Some((bytes, payload)) = data.split_first_chunk() else { return };
    let request = match NbdRequestHeader::decode_extended(bytes) {
        Err(error) => return assert_one_line_error(&error),
        Ok(request) => request,
    };
    assert_eq!(&request.encode_extended(), bytes);
    let has_payload = request.flags.contains(CommandFlags::PAYLOAD_LEN);
    let payload_len = request.payload_len(NbdHeaderStyle::Extended);
    assert_eq!(payload_len, if has_payload { request.len } else { 0 });
    if request.command == NbdCommand::Write && !has_payload {
        assert!(!request.flags_fit(NbdHeaderStyle::Extended), "a write needs its flag");
    }
    if let Some(decoded) = BlockStatusPayload::decode(payload) {
        assert_eq!(decoded.encode(), payload);
        assert_eq!(payload.len(), BlockStatusPayload::size(decoded.contexts.len()));
    }
}

/// A chunk of an extended reply.
pub(super) fn check_reply(data: &[u8]) {
    let Some((bytes, rest)) = data.split_first_chunk() else { return };
    let header = match ExtendedChunkHeader::decode(bytes) {
        Err(error) => return assert_one_line_error(&error),
        Ok(header) => header,
    };
    assert_eq!(&header.encode(), bytes);
    let payload = &rest[..rest.len().min(usize::try_from(header.len).unwrap_or(usize::MAX))];
    let chunk = match ReplyChunk::decode_extended(header, payload) {
        Err(error) => return assert_one_line_error(&error),
        Ok(chunk) => chunk,
    };
    let request = AnsweredRequest { cookie: header.cookie, offset: header.offset };
    let mut again = Vec::new();
    match chunk {
        ReplyChunk::None => again.extend(extended_chunk_none(request)),
        ReplyChunk::Data { offset, data } => {
            again.extend(extended_chunk_data_header(request, offset, data.len() as u32, header.is_done()));
            again.extend(data);
        }
        ReplyChunk::BlockStatusExt { context, descriptors } => {
            let n = descriptors.iter().count() as u32;
            again.extend(extended_chunk_block_status_header(request, context, n, header.is_done()));
            descriptors.iter().for_each(|(len, flags)| {
                again.extend(encode_extended_block_status_descriptor(len, flags));
            });
        }
        ReplyChunk::Error { error, text: "", offset: None } => {
            again.extend(encode_extended_error_chunk(request, error));
        }
        // The server sends none of these.
        ReplyChunk::Hole { .. } | ReplyChunk::Error { .. } => return,
        ReplyChunk::BlockStatus { .. } => panic!("a compact block status with extended headers"),
    }
    let (bytes, payload) = again.split_first_chunk().expect("a header");
    let header = ExtendedChunkHeader::decode(bytes).expect("a header reads back");
    assert_eq!(ReplyChunk::decode_extended(header, payload).expect("a chunk reads back"), chunk);
}
