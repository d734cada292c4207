//! The NBD client without I/O: against the server half of this crate with bytes cut anywhere, and
//! against servers that violate the protocol.

use proptest::prelude::*;
use udm_wire::nbd::client::{
    ClientHandshake, HandshakeOptions, NbdClientProtocolError, NbdRequestParams, NegotiatedExportInfo,
    ReplyEvent, ReplyParser,
};
use udm_wire::nbd::*;

const FIXED: HandshakeFlags = HandshakeFlags::FIXED_NEWSTYLE;
const FLAGS: ExportFlags = ExportFlags::HAS_FLAGS.union(ExportFlags::SEND_FLUSH);
const BLOCKS: BlockSizes = BlockSizes { minimum: 512, preferred: 4096, maximum: 1 << 20 };

fn handshake_options(structured: bool, contexts: &[&str]) -> HandshakeOptions {
    HandshakeOptions {
        export: "disk".into(),
        structured,
        contexts: contexts.iter().map(|&context| context.to_owned()).collect(),
        tls: false,
    }
}

/// A client that must use TLS asks for it first, takes nothing that is not encrypted after the
/// answer, and goes on with the other options inside.
#[test]
fn tls_comes_before_everything_else() {
    let options = HandshakeOptions { tls: true, ..handshake_options(true, &[]) };
    let started = || {
        let mut client = ClientHandshake::new(options.clone());
        assert!(client.take(&mut &encode_nbd_server_greeting(FIXED)[..]).unwrap().is_none());
        let mut asked = encode_client_flags(ClientFlags::FIXED_NEWSTYLE).to_vec();
        NbdOption::StartTls.encode(&mut asked);
        assert_eq!(client.take_out(), asked);
        client
    };
    let mut agreed = Vec::new();
    put_option_ack_reply(&mut agreed, OPT_STARTTLS);
    let mut client = started();
    assert!(!client.awaits_tls());
    assert!(client.take(&mut &agreed[..]).unwrap().is_none());
    assert!(client.awaits_tls() && client.take_out().is_empty());
    client.tls_begun();
    let mut next = Vec::new();
    NbdOption::StructuredReply.encode(&mut next);
    assert_eq!(client.take_out(), next);
    let why = started().take(&mut &[&agreed[..], b"x"].concat()[..]).unwrap_err().to_string();
    assert!(why.contains("not encrypted"), "{why}");
    let mut refused = Vec::new();
    put_option_error_reply(&mut refused, OPT_STARTTLS, REP_ERR_POLICY, "no certificates");
    let why = started().take(&mut &refused[..]).unwrap_err().to_string();
    assert_eq!(why, "the server refuses TLS: not allowed (\"no certificates\")");
}

/// A server that answers each option with `answer`, and a client that receives the bytes in pieces
/// of `step` bytes.
fn run_handshake(
    handshake_options: HandshakeOptions,
    flags: HandshakeFlags,
    step: usize,
    answer: &mut dyn FnMut(&NbdOption, &mut Vec<u8>),
) -> Result<NegotiatedExportInfo, NbdClientProtocolError> {
    let (mut client, mut parser) =
        (ClientHandshake::new(handshake_options), ClientHandshakeMessageParser::new());
    let mut to_client = encode_nbd_server_greeting(flags).to_vec();
    loop {
        let bytes = std::mem::take(&mut to_client);
        for piece in bytes.chunks(step) {
            let mut input = piece;
            if let Some(export) = client.take(&mut input)? {
                assert!(input.is_empty(), "nothing is sent behind the end");
                return Ok(export);
            }
        }
        let out = client.take_out();
        assert!(!out.is_empty(), "both sides wait for the other");
        let mut input = &out[..];
        while let Some(message) = parser.next(&mut input).unwrap() {
            match message {
                ClientHandshakeMessage::Flags(flags) => assert!(flags.contains(ClientFlags::FIXED_NEWSTYLE)),
                ClientHandshakeMessage::Option(option) => answer(&option, &mut to_client),
            }
        }
    }
}

/// The replies of a server that supports everything.
fn with_all(option: &NbdOption, out: &mut Vec<u8>) {
    match option {
        NbdOption::StructuredReply => put_option_ack_reply(out, OPT_STRUCTURED_REPLY),
        NbdOption::SetMetaContext(request) => {
            assert_eq!(request.name, "disk");
            put_meta_context_reply(out, OPT_SET_META_CONTEXT, 7, "base:allocation");
            put_meta_context_reply(out, OPT_SET_META_CONTEXT, 8, "unasked:for");
            put_option_ack_reply(out, OPT_SET_META_CONTEXT);
        }
        NbdOption::Go(request) => {
            assert_eq!((request.name.as_str(), &request.infos[..]), ("disk", &[INFO_BLOCK_SIZE][..]));
            put_export_info_reply(out, OPT_GO, &ExportInfoItem::Export { size: 1 << 30, flags: FLAGS });
            put_export_info_reply(out, OPT_GO, &ExportInfoItem::Name("disk".into()));
            put_export_info_reply(out, OPT_GO, &ExportInfoItem::BlockSize(BLOCKS));
            put_option_ack_reply(out, OPT_GO);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_server_with_everything() {
    for step in [1, 2, 7, 1000] {
        let export =
            run_handshake(handshake_options(true, &["base:allocation"]), FIXED, step, &mut with_all).unwrap();
        let contexts = vec![(7, "base:allocation".to_owned())];
        let want =
            NegotiatedExportInfo { size: 1 << 30, flags: FLAGS, blocks: BLOCKS, structured: true, contexts };
        assert_eq!(export, want);
        let export =
            run_handshake(handshake_options(false, &["base:allocation"]), FIXED, step, &mut with_all)
                .unwrap();
        assert!(!export.structured && export.contexts.is_empty());
    }
}

/// A server that supports only the protocol of 2013.
#[test]
fn a_server_with_nothing() {
    for flags in [FIXED, FIXED | HandshakeFlags::NO_ZEROES] {
        let mut answer = |option: &NbdOption, out: &mut Vec<u8>| match option {
            NbdOption::ExportName(name) => {
                assert_eq!(name, "disk");
                let reply = ExportNameReply { size: 4096, flags: FLAGS };
                put_export_name_reply(out, reply, flags.contains(HandshakeFlags::NO_ZEROES));
            }
            option => put_option_error_reply(out, option.number(), REP_ERR_UNSUP, "what?"),
        };
        let export =
            run_handshake(handshake_options(true, &["base:allocation"]), flags, 3, &mut answer).unwrap();
        let blocks = NegotiatedExportInfo::BLOCKS_ASSUMED;
        let want =
            NegotiatedExportInfo { size: 4096, flags: FLAGS, blocks, structured: false, contexts: vec![] };
        assert_eq!(export, want);
    }
}

#[test]
fn a_server_that_says_no_or_nonsense() {
    fn no(error: u32) -> impl Fn(&NbdOption, &mut Vec<u8>) {
        move |option, out| put_option_error_reply(out, option.number(), error, "try\nlater")
    }
    fn go(tell: impl Fn(&mut Vec<u8>)) -> impl Fn(&NbdOption, &mut Vec<u8>) {
        move |_, out| tell(out)
    }
    type ServerScript = Box<dyn FnMut(&NbdOption, &mut Vec<u8>)>;
    let rows: Vec<(ServerScript, &str)> = vec![
        (Box::new(no(REP_ERR_UNKNOWN)), "the server refuses the export: no such export (\"try\\nlater\")"),
        (Box::new(no(REP_ERR_TLS_REQD)), "requires TLS"),
        (Box::new(no(REP_ERR_POLICY)), "not allowed"),
        (Box::new(go(|out| put_option_ack_reply(out, OPT_GO))), "nothing of its export"),
        (Box::new(go(|out| put_option_ack_reply(out, OPT_LIST))), "a reply to another"),
        (
            Box::new(go(|out| {
                (0..65).for_each(|_| put_export_info_reply(out, OPT_GO, &ExportInfoItem::Other(9)));
            })),
            "more than 64",
        ),
        (Box::new(go(|out| put_rep_server(out, "x", ""))), "a reply to another"),
        (Box::new(go(|out| put_meta_context_reply(out, OPT_GO, 1, "x"))), "another kind of reply"),
        (Box::new(go(|out| out.extend([9; 20]))), "bad option reply magic"),
        (
            Box::new(go(|out| {
                let sizes = BlockSizes { minimum: 3, ..BLOCKS };
                put_export_info_reply(out, OPT_GO, &ExportInfoItem::BlockSize(sizes));
            })),
            "impossible block sizes",
        ),
    ];
    for (mut answer, want) in rows {
        for step in [1, 1000] {
            let error = run_handshake(handshake_options(false, &[]), FIXED, step, &mut *answer)
                .unwrap_err()
                .to_string();
            assert!(error.contains(want), "{error}");
        }
    }
    let error =
        run_handshake(handshake_options(false, &[]), HandshakeFlags::empty(), 5, &mut with_all).unwrap_err();
    assert_eq!(error, NbdClientProtocolError::Oldstyle);
    let error = ClientHandshake::new(handshake_options(false, &[]))
        .take(&mut &b"HTTP/1.1 400 Bad Request\r\n\r\n"[..])
        .unwrap_err();
    assert!(error.to_string().contains("bad greeting magic"), "{error}");
}

fn export(structured: bool) -> NegotiatedExportInfo {
    let contexts = vec![(7, "base:allocation".into())];
    NegotiatedExportInfo { size: 1 << 30, flags: FLAGS, blocks: BLOCKS, structured, contexts }
}

fn ask(replies: &mut ReplyParser, tag: u64, command: NbdCommand, offset: u64, len: u32) -> u64 {
    let asked = NbdRequestParams { command, flags: CommandFlags::empty(), offset, len };
    let header = replies.ask(tag, asked);
    let request = NbdRequestHeader::decode(&header).unwrap();
    assert_eq!((request.command, request.offset, request.len), (command, offset, len.into()));
    request.cookie
}

/// Tag of a request, a context, and its descriptors.
type StatusReply = (u64, u32, Vec<(u32, u32)>);

/// The events of a client whose bytes arrive in pieces.
#[derive(Debug, Default, PartialEq)]
struct ClientLog {
    content: std::collections::BTreeMap<u64, Vec<u8>>,
    done: Vec<(u64, u32)>,
    status: Vec<StatusReply>,
}

fn feed(
    replies: &mut ReplyParser,
    bytes: &[u8],
    steps: &[usize],
    len: usize,
) -> Result<ClientLog, NbdClientProtocolError> {
    let mut log = ClientLog::default();
    let (mut rest, mut turn) = (bytes, 0);
    while !rest.is_empty() {
        let n = steps[turn % steps.len()].min(rest.len());
        turn += 1;
        let (mut input, behind) = rest.split_at(n);
        rest = behind;
        loop {
            match replies.take(&mut input)? {
                None => break assert!(input.is_empty()),
                Some(ReplyEvent::Data { tag, at, bytes }) => {
                    let content = log.content.entry(tag).or_insert(vec![0xee; len]);
                    content[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
                }
                Some(ReplyEvent::Zeroes { tag, at, len: n }) => {
                    let content = log.content.entry(tag).or_insert(vec![0xee; len]);
                    content[at as usize..(at + n) as usize].fill(0);
                }
                Some(ReplyEvent::Status { tag, context, descriptors }) => {
                    log.status.push((tag, context, descriptors));
                }
                Some(ReplyEvent::Completed { tag, error }) => log.done.push((tag, error)),
            }
        }
    }
    Ok(log)
}

/// How a server replies to one request.
#[derive(Clone, Debug)]
enum ReplyStyle {
    Simple,
    Error(u32),
    /// Cut at these offsets, sent in this order; each so-many-th chunk is a hole.
    Chunks(Vec<u32>, u64, usize),
}

fn reply_styles() -> impl Strategy<Value = Vec<(ReplyStyle, bool)>> {
    let style = prop_oneof![
        Just(ReplyStyle::Simple),
        (1u32..200).prop_map(ReplyStyle::Error),
        (proptest::collection::vec(1u32..4096, 0..6), any::<u64>(), 1usize..4)
            .prop_map(|(cuts, order, holes)| ReplyStyle::Chunks(cuts, order, holes)),
    ];
    proptest::collection::vec((style, any::<bool>()), 1..8)
}

proptest! {
    /// Whatever valid replies the server sends and however they arrive, all bytes are in their
    /// place, and each request completes once.
    #[test]
    fn answers_in_any_form_order_and_pieces(
        reply_styles in reply_styles(), structured: bool, steps in proptest::collection::vec(1usize..5000, 1..5),
    ) {
        let mut replies = ReplyParser::new(&export(structured));
        let (mut bytes, mut want) = (Vec::new(), ClientLog::default());
        for (tag, (style, _)) in reply_styles.iter().enumerate() {
            let tag = tag as u64;
            let cookie = ask(&mut replies, tag, NbdCommand::Read, 512 * tag, 4096);
            let mut content: Vec<u8> = (0..4096u32).map(|i| (i as u8) ^ tag as u8 | 1).collect();
            match style {
                ReplyStyle::Error(error) => {
                    if structured {
                        put_error_chunk_with_text(&mut bytes, cookie, *error, "no");
                    } else {
                        bytes.extend(SimpleReply { error: *error, cookie }.encode());
                    }
                    want.done.push((tag, *error));
                    continue;
                }
                ReplyStyle::Chunks(cuts, order, holes) if structured => {
                    let mut cuts: Vec<u32> = cuts.iter().copied().chain([0, 4096]).collect();
                    cuts.sort_unstable();
                    cuts.dedup();
                    let mut pieces: Vec<_> = cuts.windows(2).map(|w| (w[0], w[1])).collect();
                    let n = pieces.len();
                    (0..n).for_each(|i| pieces.swap(i, (*order as usize >> i) % n));
                    for (i, (from, to)) in pieces.into_iter().enumerate() {
                        let offset = 512 * tag + u64::from(from);
                        if i % holes == 1 {
                            bytes.extend(chunk_hole(cookie, offset, to - from, false));
                            content[from as usize..to as usize].fill(0);
                        } else {
                            bytes.extend(chunk_data_header(cookie, offset, to - from, false));
                            bytes.extend(&content[from as usize..to as usize]);
                        }
                    }
                    bytes.extend(chunk_none(cookie));
                }
                _ if structured => {
                    bytes.extend(chunk_data_header(cookie, 512 * tag, 4096, true));
                    bytes.extend(&content);
                }
                _ => {
                    bytes.extend(SimpleReply { error: 0, cookie }.encode());
                    bytes.extend(&content);
                }
            }
            want.done.push((tag, 0));
            want.content.insert(tag, content);
        }
        let log = feed(&mut replies, &bytes, &steps, 4096).unwrap();
        prop_assert_eq!(log, want);
        prop_assert_eq!(replies.in_flight(), 0);
    }
}

#[test]
fn a_block_status_is_passed_on() {
    let mut replies = ReplyParser::new(&export(true));
    let cookie = ask(&mut replies, 5, NbdCommand::BlockStatus, 0, 1 << 20);
    let mut bytes = chunk_block_status_header(cookie, 7, 2, false).to_vec();
    bytes.extend(encode_block_status_descriptor(4096, STATE_HOLE | STATE_ZERO));
    bytes.extend(encode_block_status_descriptor(8192, 0));
    bytes.extend(chunk_none(cookie));
    let log = feed(&mut replies, &bytes, &[5], 0).unwrap();
    assert_eq!(log.status, [(5, 7, vec![(4096, 3), (8192, 0)])]);
    assert_eq!(log.done, [(5, 0)]);
}

/// Each violation ends the connection with a one-line error, whatever the pieces.
#[test]
fn servers_that_violate_the_protocol() {
    type BadReply = fn(u64, u64) -> Vec<u8>;
    let rows: [(bool, BadReply, &str); 16] = [
        (true, |_, _| vec![1; 20], "bad reply magic"),
        (true, |read, _| SimpleReply { error: 0, cookie: read }.encode().to_vec(), "a simple reply"),
        (false, |read, _| chunk_none(read).to_vec(), "nobody agreed on"),
        (true, |read, _| chunk_none(read ^ 1 << 40).to_vec(), "a reply to no request"),
        (false, |_, _| SimpleReply { error: 0, cookie: 9999 }.encode().to_vec(), "a reply to no request"),
        (true, |read, _| chunk_none(read).to_vec(), "comes in part"),
        (true, |_, write| chunk_data_header(write, 0, 4096, true).to_vec(), "nobody asked for"),
        (true, |read, _| chunk_data_header(read, 0, 4096, true).to_vec(), "outside of its range"),
        (true, |read, _| chunk_data_header(read, 512, 4097, true).to_vec(), "outside of its range"),
        (true, |read, _| chunk_data_header(read, 4608, 1, true).to_vec(), "outside of its range"),
        (true, |read, _| chunk_hole(read, u64::MAX, 4096, true).to_vec(), "outside of its range"),
        (true, |_, write| chunk_hole(write, 512, 4096, true).to_vec(), "another command"),
        (true, |read, _| [chunk_hole(read, 512, 9, false), chunk_hole(read, 520, 9, true)].concat(), "twice"),
        (
            true,
            |read, _| {
                let head = ReplyChunkHeader {
                    flags: ReplyFlags::DONE,
                    kind: CHUNK_ERROR,
                    cookie: read,
                    len: 1 << 30,
                };
                head.encode().to_vec()
            },
            "longer than any",
        ),
        (
            true,
            |read, _| {
                ReplyChunkHeader { flags: ReplyFlags::DONE, kind: 77, cookie: read, len: 0 }.encode().to_vec()
            },
            "bad chunk",
        ),
        (
            false,
            |_, write| SimpleReply { error: 0, cookie: write }.encode().repeat(2),
            "a reply to no request",
        ),
    ];
    for (structured, lie, want) in rows {
        for step in [1, 3, 1 << 20] {
            let mut replies = ReplyParser::new(&export(structured));
            let read = ask(&mut replies, 1, NbdCommand::Read, 512, 4096);
            let write = ask(&mut replies, 2, NbdCommand::Write, 0, 4096);
            let error = feed(&mut replies, &lie(read, write), &[step], 4096).unwrap_err().to_string();
            assert!(error.contains(want) && error.lines().count() == 1, "{error:?} for {want}");
        }
    }
}
