//! Recorded conversations of a real client and a real server. Each side is decoded, and encoded to
//! the same bytes.

use udm_wire::nbd::{
    self, BlockSizes, ClientFlags, ClientHandshakeMessage, ClientHandshakeMessageParser, CommandFlags,
    ExportFlags, ExportInfoItem, ExportInfoRequest, HandshakeFlags, MetaContextRequest, NbdCommand,
    NbdHeaderStyle, NbdOption, NbdRequestHeader, NbdServerGreeting, OptionReply, OptionReplyHeader,
    ReplyChunk, ReplyHeader,
};

/// The requests of both recordings are compact.
const STYLE: NbdHeaderStyle = NbdHeaderStyle::Structured;

/// All bytes of the client, and all bytes of the server.
fn conversation(recording: &str) -> (Vec<u8>, Vec<u8>) {
    let (mut client, mut server) = (Vec::new(), Vec::new());
    for line in recording.lines().filter(|line| !line.starts_with('#')) {
        let (who, hex) = line.split_once(' ').unwrap();
        let bytes = hex
            .as_bytes()
            .chunks(2)
            .map(|d| u8::from_str_radix(std::str::from_utf8(d).unwrap(), 16).unwrap());
        if who == "C" { client.extend(bytes) } else { server.extend(bytes) }
    }
    (client, server)
}

fn options_of(mut client: &[u8]) -> (ClientFlags, Vec<NbdOption>, &[u8]) {
    let mut parser = ClientHandshakeMessageParser::new();
    let mut encoded = Vec::new();
    let whole = client;
    let Some(ClientHandshakeMessage::Flags(flags)) = parser.next(&mut client).unwrap() else {
        panic!("no flags")
    };
    encoded.extend(nbd::encode_client_flags(flags));
    let mut options = Vec::new();
    while let Some(ClientHandshakeMessage::Option(option)) = parser.next(&mut client).unwrap() {
        option.encode(&mut encoded);
        options.push(option);
        if matches!(options.last(), Some(NbdOption::Go(_))) {
            break;
        }
    }
    assert_eq!(encoded, whole[..whole.len() - client.len()]);
    (flags, options, client)
}

fn requests_of(mut client: &[u8]) -> Vec<(NbdRequestHeader, Vec<u8>)> {
    let mut requests = Vec::new();
    while let Some((header, rest)) = client.split_first_chunk() {
        let request = NbdRequestHeader::decode(header).unwrap();
        assert_eq!(&request.encode(), header);
        assert!(request.flags_fit(STYLE));
        let (data, rest) = rest.split_at(request.payload_len(STYLE) as usize);
        requests.push((request, data.to_vec()));
        client = rest;
    }
    assert!(client.is_empty());
    requests
}

fn option_replies_of(mut server: &[u8], until: u32) -> (Vec<(u32, OptionReply)>, &[u8]) {
    let mut replies = Vec::new();
    loop {
        let (header, rest) = server.split_first_chunk().unwrap();
        let header = OptionReplyHeader::decode(header).unwrap();
        let (data, rest) = rest.split_at(header.len as usize);
        let reply = OptionReply::decode(header.reply, data).unwrap();
        let mut again = Vec::new();
        match &reply {
            OptionReply::Ack => nbd::put_option_ack_reply(&mut again, header.option),
            OptionReply::Server { name, description } => {
                nbd::put_rep_server(&mut again, name, description);
            }
            OptionReply::Error { error, text } => {
                nbd::put_option_error_reply(&mut again, header.option, *error, text);
            }
            OptionReply::Info(info) => nbd::put_export_info_reply(&mut again, header.option, info),
            OptionReply::MetaContext { id, name } => {
                nbd::put_meta_context_reply(&mut again, header.option, *id, name);
            }
            OptionReply::Other(_) => panic!("{reply:?}"),
        }
        assert_eq!(again, server[..server.len() - rest.len()]);
        server = rest;
        let last = header.option == until && reply == OptionReply::Ack;
        replies.push((header.option, reply));
        if last {
            return (replies, server);
        }
    }
}

fn request(command: NbdCommand, flags: CommandFlags, cookie: u64, offset: u64, len: u32) -> NbdRequestHeader {
    NbdRequestHeader { flags, command, cookie, offset, len: len.into() }
}

/// The client's requests after the handshake, which are the same with both kinds of reply.
fn check_requests(client: &[u8]) {
    let none = CommandFlags::empty();
    let want = [
        request(NbdCommand::Read, none, 1, 0, 8192),
        request(NbdCommand::Write, CommandFlags::FUA, 2, 512, 16),
        request(NbdCommand::Read, none, 3, 8192, 512),
        request(NbdCommand::WriteZeroes, CommandFlags::NO_HOLE, 4, 0, 512),
        request(NbdCommand::Trim, none, 5, 4096, 4096),
        request(NbdCommand::Flush, none, 6, 0, 0),
        request(NbdCommand::Disconnect, none, 7, 0, 0),
    ];
    let requests = requests_of(client);
    assert_eq!(requests.iter().map(|(request, _)| *request).collect::<Vec<_>>(), want);
    assert_eq!(requests[1].1, [7; 16]);
}

fn ask(name: &str) -> ExportInfoRequest {
    ExportInfoRequest {
        name: name.into(),
        infos: vec![nbd::INFO_BLOCK_SIZE, nbd::INFO_NAME, nbd::INFO_DESCRIPTION],
    }
}

fn check_option_replies(replies: &[(u32, OptionReply)], structured: bool) {
    let mut flags = ExportFlags::HAS_FLAGS
        | ExportFlags::SEND_FLUSH
        | ExportFlags::SEND_FUA
        | ExportFlags::SEND_TRIM
        | ExportFlags::SEND_WRITE_ZEROES
        | ExportFlags::SEND_CACHE
        | ExportFlags::SEND_FAST_ZERO;
    flags.set(ExportFlags::SEND_DF, structured);
    let mut want = vec![
        (nbd::OPT_LIST, OptionReply::Server { name: "disk".into(), description: "a small disk".into() }),
        (nbd::OPT_LIST, OptionReply::Ack),
        (
            nbd::OPT_INFO,
            OptionReply::Error { error: nbd::REP_ERR_UNKNOWN, text: "export 'nope' not present".into() },
        ),
        (nbd::OPT_GO, OptionReply::Info(ExportInfoItem::Name("disk".into()))),
        (nbd::OPT_GO, OptionReply::Info(ExportInfoItem::Description("a small disk".into()))),
        (
            nbd::OPT_GO,
            OptionReply::Info(ExportInfoItem::BlockSize(BlockSizes {
                minimum: 1,
                preferred: 4096,
                maximum: 32 << 20,
            })),
        ),
        (nbd::OPT_GO, OptionReply::Info(ExportInfoItem::Export { size: 8192, flags })),
        (nbd::OPT_GO, OptionReply::Ack),
    ];
    if structured {
        want.insert(0, (nbd::OPT_STRUCTURED_REPLY, OptionReply::Ack));
    }
    assert_eq!(replies, want);
}

fn greeted(server: &[u8]) -> &[u8] {
    let (bytes, rest) = server.split_first_chunk().unwrap();
    let greeting = NbdServerGreeting::decode(bytes).unwrap();
    assert_eq!(greeting.flags, HandshakeFlags::FIXED_NEWSTYLE | HandshakeFlags::NO_ZEROES);
    assert_eq!(&nbd::encode_nbd_server_greeting(greeting.flags), bytes);
    rest
}

#[test]
fn a_recorded_session_with_structured_replies() {
    let (client, server) = conversation(include_str!("data/nbd-structured.txt"));
    let (flags, options, client) = options_of(&client);
    assert_eq!(flags, ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES);
    let want = [
        NbdOption::StructuredReply,
        NbdOption::List,
        NbdOption::Info(ask("nope")),
        NbdOption::Go(ask("disk")),
    ];
    assert_eq!(options, want);
    check_requests(client);

    let (replies, mut server) = option_replies_of(greeted(&server), nbd::OPT_GO);
    check_option_replies(&replies, true);

    let mut done = Vec::new();
    let mut read = vec![0xee; 8192];
    while let Some(header) = ReplyHeader::decode(&mut server).unwrap() {
        match header {
            ReplyHeader::Simple(simple) => done.push((simple.cookie, simple.error)),
            ReplyHeader::Chunk(header) => {
                let (payload, rest) = server.split_at(header.len as usize);
                server = rest;
                let (error, again) = match ReplyChunk::decode(header, payload).unwrap() {
                    ReplyChunk::None => (0, nbd::chunk_none(header.cookie).to_vec()),
                    ReplyChunk::Data { offset, data } => {
                        read[offset as usize..offset as usize + data.len()].copy_from_slice(data);
                        let head = nbd::chunk_data_header(
                            header.cookie,
                            offset,
                            data.len() as u32,
                            header.is_done(),
                        );
                        (0, [&head[..], data].concat())
                    }
                    ReplyChunk::Hole { offset, len } => {
                        read[offset as usize..offset as usize + len as usize].fill(0);
                        (0, nbd::chunk_hole(header.cookie, offset, len, header.is_done()).to_vec())
                    }
                    ReplyChunk::BlockStatus { .. } | ReplyChunk::BlockStatusExt { .. } => {
                        panic!("nobody asked for it")
                    }
                    ReplyChunk::Error { error, text, offset } => {
                        assert_eq!(
                            (text, offset),
                            ("operation past EOF; From: 8192, Len: 512, Size: 8192", None)
                        );
                        let mut out = Vec::new();
                        nbd::put_error_chunk_with_text(&mut out, header.cookie, error, text);
                        (error, out)
                    }
                };
                assert_eq!(again, [&header.encode()[..], payload].concat());
                if header.is_done() {
                    done.push((header.cookie, error));
                }
            }
        }
    }
    assert!(server.is_empty());
    assert_eq!(done, [(1, 0), (2, 0), (3, nbd::EINVAL), (4, 0), (5, 0), (6, 0)]);
    assert_eq!(&read[4096..4107], b"hello, data");
    assert_eq!(read.iter().filter(|b| **b != 0).count(), 11);
}

#[test]
fn a_recorded_session_with_simple_replies() {
    let (client, server) = conversation(include_str!("data/nbd-simple.txt"));
    let (_, options, client) = options_of(&client);
    assert_eq!(options, [NbdOption::List, NbdOption::Info(ask("nope")), NbdOption::Go(ask("disk"))]);
    check_requests(client);

    let (replies, mut server) = option_replies_of(greeted(&server), nbd::OPT_GO);
    check_option_replies(&replies, false);
    let mut done = Vec::new();
    while let Some(header) = ReplyHeader::decode(&mut server).unwrap() {
        let ReplyHeader::Simple(simple) = header else { panic!("{header:?}") };
        done.push((simple.cookie, simple.error));
        if simple.cookie == 1 {
            server = &server[8192..];
        }
    }
    assert!(server.is_empty());
    assert_eq!(done, [(1, 0), (2, 0), (3, nbd::EINVAL), (4, 0), (5, 0), (6, 0)]);
}

#[test]
fn a_recorded_block_status_session() {
    let (client, server) = conversation(include_str!("data/nbd-block-status.txt"));
    let (_, options, client) = options_of(&client);
    let context = nbd::CONTEXT_ALLOCATION.to_owned();
    let meta = MetaContextRequest { name: "disk".into(), queries: vec![context.clone()] };
    let go = ExportInfoRequest { name: "disk".into(), infos: vec![nbd::INFO_BLOCK_SIZE] };
    let want = [NbdOption::StructuredReply, NbdOption::SetMetaContext(meta), NbdOption::Go(go)];
    assert_eq!(options, want);
    let requests: Vec<_> = requests_of(client).into_iter().map(|(request, _)| request).collect();
    let none = CommandFlags::empty();
    assert_eq!(requests[0], request(NbdCommand::BlockStatus, none, 1, 0, 16384));
    assert_eq!((requests.len(), requests[1].command), (2, NbdCommand::Disconnect));

    let (replies, mut server) = option_replies_of(greeted(&server), nbd::OPT_GO);
    assert!(
        replies.contains(&(nbd::OPT_SET_META_CONTEXT, OptionReply::MetaContext { id: 1, name: context }))
    );
    let Ok(Some(ReplyHeader::Chunk(header))) = ReplyHeader::decode(&mut server) else { panic!("no chunk") };
    let Ok(ReplyChunk::BlockStatus { context, descriptors }) = ReplyChunk::decode(header, server) else {
        panic!("no status")
    };
    let hole = nbd::STATE_HOLE | nbd::STATE_ZERO;
    let runs: Vec<_> = descriptors.iter().collect();
    assert_eq!(runs, [(8192, hole), (4096, 0), (4096, hole)]);
    let mut again = nbd::chunk_block_status_header(1, context, runs.len() as u32, true).to_vec();
    runs.iter().for_each(|(len, flags)| again.extend(nbd::encode_block_status_descriptor(*len, *flags)));
    assert_eq!(again, [&header.encode()[..], server].concat());
}
