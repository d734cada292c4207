//! Every message of extended headers, byte for byte as the protocol's description has it (branch
//! `extension-ext-header` of `doc/proto.md`), and what is not such a message.

use udm_wire::nbd::{
    self, AnsweredRequest, BlockStatusPayload, ClientHandshakeMessage, ClientHandshakeMessageParser,
    CommandFlags, ExtendedChunkHeader, MalformedOption, NbdCommand, NbdHeaderStyle, NbdOption,
    NbdProtocolError, NbdRequestHeader, ReplyChunk, ReplyFlags,
};

/// Bytes of a text of hexadecimal digits, in which spaces are for readers.
fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

const REQUEST: AnsweredRequest = AnsweredRequest { cookie: 0x0102_0304_0506_0708, offset: 1 << 40 };

#[test]
fn the_option_and_its_answers() {
    let mut bytes = Vec::new();
    NbdOption::ExtendedHeaders.encode(&mut bytes);
    assert_eq!(bytes, hex("49484156454f5054 0000000b 00000000"));
    let mut out = Vec::new();
    nbd::put_option_ack_reply(&mut out, nbd::OPT_EXTENDED_HEADERS);
    assert_eq!(out, hex("0003e889045565a9 0000000b 00000001 00000000"));
    out.clear();
    nbd::put_option_error_reply(&mut out, nbd::OPT_STRUCTURED_REPLY, nbd::REP_ERR_EXT_HEADER_REQD, "");
    assert_eq!(out, hex("0003e889045565a9 00000008 8000000a 00000000"));
}

#[test]
fn the_option_takes_no_data() {
    let bytes = hex("00000001 49484156454f5054 0000000b 00000001 ff");
    let (mut parser, mut input) = (ClientHandshakeMessageParser::new(), &bytes[..]);
    parser.next(&mut input).unwrap();
    let refused = MalformedOption {
        option: nbd::OPT_EXTENDED_HEADERS,
        reply: nbd::REP_ERR_INVALID,
        why: "the option takes no data",
    };
    let expected = ClientHandshakeMessage::Option(NbdOption::Bad(refused));
    assert_eq!(parser.next(&mut input), Ok(Some(expected)));
}

#[test]
fn requests() {
    let write = NbdRequestHeader {
        flags: CommandFlags::FUA | CommandFlags::PAYLOAD_LEN,
        command: NbdCommand::Write,
        cookie: REQUEST.cookie,
        offset: 0x1000,
        len: 512,
    };
    let bytes = hex("21e41c71 0021 0001 0102030405060708 0000000000001000 0000000000000200");
    assert_eq!(write.encode_extended()[..], bytes);
    let trim = NbdRequestHeader {
        flags: CommandFlags::empty(),
        command: NbdCommand::Trim,
        cookie: 1,
        offset: 0,
        len: 5 << 40,
    };
    let bytes = hex("21e41c71 0000 0004 0000000000000001 0000000000000000 0000050000000000");
    assert_eq!(trim.encode_extended()[..], bytes);
    let style = NbdHeaderStyle::Extended;
    for (request, payload) in [(write, 512), (trim, 0)] {
        assert_eq!(NbdRequestHeader::decode_extended(&request.encode_extended()), Ok(request));
        assert_eq!((request.payload_len(style), request.flags_fit(style)), (payload, true));
    }
    // Without the flag, the length says nothing about a payload.
    let bare = NbdRequestHeader { flags: CommandFlags::FUA, ..write };
    assert_eq!((bare.payload_len(style), bare.flags_fit(style)), (0, false));
    assert_eq!(
        (bare.payload_len(NbdHeaderStyle::Simple), bare.flags_fit(NbdHeaderStyle::Simple)),
        (512, true)
    );
}

#[test]
fn a_compact_request_is_no_extended_one() {
    let read = NbdRequestHeader {
        flags: CommandFlags::empty(),
        command: NbdCommand::Read,
        cookie: 1,
        offset: 0,
        len: 512,
    };
    let mut bytes = [0; NbdRequestHeader::EXTENDED_SIZE];
    bytes[..NbdRequestHeader::SIZE].copy_from_slice(&read.encode());
    let error = NbdProtocolError::Magic { what: "extended request", found: nbd::MAGIC_REQUEST.into() };
    assert_eq!(NbdRequestHeader::decode_extended(&bytes), Err(error));
    let bytes = read.encode_extended();
    assert!(NbdRequestHeader::decode(bytes.first_chunk().unwrap()).is_err());
}

#[test]
fn the_payload_of_a_block_status() {
    let payload = BlockStatusPayload { len: 6 << 40, contexts: vec![1, 3] };
    let bytes = hex("0000060000000000 00000001 00000003");
    assert_eq!((payload.encode(), BlockStatusPayload::size(2)), (bytes.clone(), 16));
    assert_eq!(BlockStatusPayload::decode(&bytes), Some(payload));
    for len in (0..12).chain(13..16) {
        assert_eq!(BlockStatusPayload::decode(&bytes[..len]), None, "{len} bytes");
    }
}

#[test]
fn chunks() {
    let head = |flags: &str, kind: &str, len: &str| {
        hex(&format!("6e8a278c {flags} {kind} 0102030405060708 0000010000000000 {len}"))
    };
    assert_eq!(nbd::extended_chunk_none(REQUEST)[..], head("0001", "0000", "0000000000000000"));
    let data = nbd::extended_chunk_data_header(REQUEST, REQUEST.offset + 512, 1024, false);
    let expected = [head("0000", "0001", "0000000000000408"), hex("0000010000000200")].concat();
    assert_eq!(data[..], expected);
    let error = nbd::encode_extended_error_chunk(REQUEST, nbd::EINVAL);
    assert_eq!(error[..], [head("0001", "8001", "0000000000000006"), hex("00000016 0000")].concat());
    let status = nbd::extended_chunk_block_status_header(REQUEST, 7, 2, true);
    let expected = [head("0001", "0006", "0000000000000028"), hex("00000007 00000002")].concat();
    assert_eq!(status[..], expected);
    let descriptor = nbd::encode_extended_block_status_descriptor(6 << 40, 3);
    assert_eq!(descriptor[..], hex("0000060000000000 0000000000000003"));
}

/// The payload as a client decodes it.
fn decode(kind: u16, payload: &[u8]) -> Result<ReplyChunk<'_>, NbdProtocolError> {
    let (flags, len) = (ReplyFlags::DONE, payload.len() as u64);
    let header = ExtendedChunkHeader { flags, kind, cookie: 1, offset: 0, len };
    assert_eq!(ExtendedChunkHeader::decode(&header.encode()), Ok(header));
    ReplyChunk::decode_extended(header, payload)
}

#[test]
fn chunks_of_a_client() {
    let status = hex("00000007 00000002 0000060000000000 0000000000000003 0000000000000001 0000000000000000");
    let Ok(ReplyChunk::BlockStatusExt { context: 7, descriptors }) =
        decode(nbd::CHUNK_BLOCK_STATUS_EXT, &status)
    else {
        panic!("no block status")
    };
    assert_eq!(descriptors.iter().collect::<Vec<_>>(), [(6 << 40, 3), (1, 0)]);
    assert_eq!(decode(nbd::CHUNK_NONE, &[]), Ok(ReplyChunk::None));
    let hole = hex("0000000000000200 00000400");
    assert_eq!(decode(nbd::CHUNK_OFFSET_HOLE, &hole), Ok(ReplyChunk::Hole { offset: 512, len: 1024 }));
    // A count that does not fit, half a descriptor, an empty one, none at all.
    let mut three = status.clone();
    three[7] = 3;
    let mut empty = status.clone();
    empty[8..16].fill(0);
    for wrong in [&three, &status[..32].to_vec(), &empty, &status[..8].to_vec(), &vec![0; 7]] {
        assert!(decode(nbd::CHUNK_BLOCK_STATUS_EXT, wrong).is_err(), "{wrong:?}");
    }
    // Each style has its own block status.
    assert!(decode(nbd::CHUNK_BLOCK_STATUS, &hex("00000007 00000200 00000000")).is_err());
    let header = nbd::ReplyChunkHeader {
        flags: ReplyFlags::DONE,
        kind: nbd::CHUNK_BLOCK_STATUS_EXT,
        cookie: 1,
        len: status.len() as u32,
    };
    assert!(ReplyChunk::decode(header, &status).is_err());
    let header = ExtendedChunkHeader {
        flags: ReplyFlags::DONE,
        kind: nbd::CHUNK_NONE,
        cookie: 1,
        offset: 0,
        len: u64::MAX,
    };
    assert!(ReplyChunk::decode_extended(header, &[]).is_err());
    assert!(ExtendedChunkHeader::decode(&[0; 32]).is_err());
}
