//! NBD clients and servers that break the rules: each gets the reply or refusal that the protocol
//! prescribes, within bounds.

use udm_wire::nbd::{
    self, ClientHandshakeMessage, ClientHandshakeMessageParser, FatalHandshakeError, MalformedOption,
    NbdOption,
};

/// A parser that has received valid flags.
fn parser() -> ClientHandshakeMessageParser {
    let mut parser = ClientHandshakeMessageParser::new();
    let mut input = &nbd::encode_client_flags(nbd::ClientFlags::all())[..];
    assert_eq!(parser.next(&mut input), Ok(Some(ClientHandshakeMessage::Flags(nbd::ClientFlags::all()))));
    parser
}

fn header(option: u32, len: u32) -> Vec<u8> {
    [&nbd::MAGIC_OPTION.to_be_bytes()[..], &option.to_be_bytes(), &len.to_be_bytes()].concat()
}

fn one(option: u32, data: &[u8]) -> Result<Option<ClientHandshakeMessage>, FatalHandshakeError> {
    let bytes = [&header(option, data.len() as u32)[..], data].concat();
    let mut input = &bytes[..];
    let out = parser().next(&mut input);
    assert!(input.is_empty());
    out
}

fn refusal(option: u32, data: &[u8]) -> (u32, &'static str) {
    match one(option, data) {
        Ok(Some(ClientHandshakeMessage::Option(option))) => option.refusal().expect("a refusal"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn options_that_every_server_refuses() {
    assert_eq!(refusal(4711, b"").0, nbd::REP_ERR_UNSUP);
    for option in [nbd::OPT_LIST, nbd::OPT_STARTTLS, nbd::OPT_STRUCTURED_REPLY, nbd::OPT_EXTENDED_HEADERS] {
        assert_eq!(refusal(option, b"x"), (nbd::REP_ERR_INVALID, "the option takes no data"));
    }
}

#[test]
fn malformed_metadata_contexts() {
    for option in [nbd::OPT_LIST_META_CONTEXT, nbd::OPT_SET_META_CONTEXT] {
        let short = (nbd::REP_ERR_INVALID, "the option is shorter than it says");
        for data in [&b""[..], &[0, 0, 0, 1], &[0, 0, 0, 0, 0, 0, 0], &[0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1]] {
            assert_eq!(refusal(option, data), short, "{data:?}");
        }
        // A count larger than the number of queries ends with the data.
        assert_eq!(refusal(option, &[0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]), short);
        let more = "the number of queries does not fit the option's length";
        assert_eq!(refusal(option, &[0, 0, 0, 0, 0, 0, 0, 0, 7]), (nbd::REP_ERR_INVALID, more));
        assert_eq!(refusal(option, &[0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0]).0, nbd::REP_ERR_INVALID);
        assert_eq!(refusal(option, &[0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0, 0, 0]).0, nbd::REP_ERR_TOO_BIG);
        assert_eq!(refusal(option, &[0xff; 40]).0, nbd::REP_ERR_TOO_BIG);
    }
}

#[test]
fn malformed_info_and_go() {
    for option in [nbd::OPT_INFO, nbd::OPT_GO] {
        let short = (nbd::REP_ERR_INVALID, "the option is shorter than it says");
        assert_eq!(refusal(option, b""), short);
        assert_eq!(refusal(option, &[0, 0, 0]), short);
        assert_eq!(refusal(option, &[0, 0, 0, 2, b'a', b'b']), short);
        assert_eq!(refusal(option, &[0, 0, 0, 1, b'a', 0]), short);
        let count = "the number of informations does not fit the option's length";
        assert_eq!(refusal(option, &[0, 0, 0, 0, 0, 1]), (nbd::REP_ERR_INVALID, count));
        assert_eq!(refusal(option, &[0, 0, 0, 0, 0, 0, 0]), (nbd::REP_ERR_INVALID, count));
        assert_eq!(
            refusal(option, &[0, 0, 0, 1, 0xff, 0, 0]),
            (nbd::REP_ERR_INVALID, "a string is not UTF-8")
        );
        assert_eq!(refusal(option, &[0, 0, 0, 1, 0, 0, 0]), (nbd::REP_ERR_INVALID, "a string contains NUL"));
        assert_eq!(refusal(option, &[0xff; 40]).0, nbd::REP_ERR_TOO_BIG);
    }
}

#[test]
fn a_bad_export_name_ends_the_connection() {
    assert_eq!(
        one(nbd::OPT_EXPORT_NAME, &[0xff]),
        Err(FatalHandshakeError::ExportName("a string is not UTF-8"))
    );
    assert_eq!(
        one(nbd::OPT_EXPORT_NAME, &[b'x'; 4097]),
        Err(FatalHandshakeError::ExportName("a string is longer than 4096 bytes"))
    );
    let name = "x".repeat(4096);
    assert_eq!(
        one(nbd::OPT_EXPORT_NAME, name.as_bytes()),
        Ok(Some(ClientHandshakeMessage::Option(NbdOption::ExportName(name))))
    );
}

#[test]
fn oversized_options_are_skipped_or_close() {
    let mut parser = parser();
    let bytes = [
        header(nbd::OPT_INFO, nbd::OPTION_LEN_MAX + 1),
        vec![0; nbd::OPTION_LEN_MAX as usize + 1],
        header(nbd::OPT_ABORT, 0),
    ]
    .concat();
    let mut said = Vec::new();
    for piece in bytes.chunks(1000) {
        let mut input = piece;
        while let Some(message) = parser.next(&mut input).unwrap() {
            said.push(message);
        }
    }
    let bad = MalformedOption {
        option: nbd::OPT_INFO,
        reply: nbd::REP_ERR_TOO_BIG,
        why: "the option is longer than 64 KiB",
    };
    assert_eq!(
        said,
        [
            ClientHandshakeMessage::Option(NbdOption::Bad(bad)),
            ClientHandshakeMessage::Option(NbdOption::Abort)
        ]
    );

    for (option, len) in [
        (nbd::OPT_INFO, nbd::OPTION_SKIP_MAX + 1),
        (nbd::OPT_EXPORT_NAME, nbd::OPTION_LEN_MAX + 1),
        (99, u32::MAX),
    ] {
        let bytes = header(option, len);
        assert_eq!(
            self::parser().next(&mut &bytes[..]),
            Err(FatalHandshakeError::OptionLength { option, len })
        );
    }
}

#[test]
fn the_number_of_options_is_bounded() {
    let mut parser = parser();
    let list = header(nbd::OPT_LIST, 0);
    for _ in 0..nbd::OPTIONS_MAX {
        assert_eq!(parser.next(&mut &list[..]), Ok(Some(ClientHandshakeMessage::Option(NbdOption::List))));
    }
    assert_eq!(parser.next(&mut &list[..]), Err(FatalHandshakeError::TooManyOptions));
}

#[test]
fn other_protocols_are_refused() {
    let mut parser = ClientHandshakeMessageParser::new();
    assert_eq!(parser.next(&mut &b"GET / HTTP/1.1"[..]), Err(FatalHandshakeError::UnknownFlags(0x4745_5420)));
    let mut parser = self::parser();
    let error = parser.next(&mut &b"GET / HTTP/1.1\r\n"[..]).unwrap_err();
    assert_eq!(error.to_string(), "bad option magic 0x474554202f204854");
    assert!(nbd::NbdServerGreeting::decode(b"SSH-2.0-OpenSSH_99").is_err());
    assert!(nbd::NbdRequestHeader::decode(&[0; 28]).is_err());
    assert!(nbd::ReplyHeader::decode(&mut &[0; 4][..]).is_err());
}

#[test]
fn flags_belong_to_commands() {
    let fits = |command: u16, flags: u16, style: nbd::NbdHeaderStyle| {
        let flags = nbd::CommandFlags::from_bits_retain(flags);
        nbd::NbdRequestHeader {
            flags,
            command: nbd::NbdCommand::from_number(command),
            cookie: 0,
            offset: 0,
            len: 0,
        }
        .flags_fit(style)
    };
    for command in 0..=8 {
        let fits_extended = |flags| fits(command, flags, nbd::NbdHeaderStyle::Extended);
        assert_eq!(fits_extended(0), command != 1, "an extended write has PAYLOAD_LEN");
        assert_eq!(fits_extended(1 << 5), matches!(command, 1 | 7), "PAYLOAD_LEN with {command}");
        assert!(!fits_extended(1 << 5 | 1 << 15));
        let fits = |command, flags| fits(command, flags, nbd::NbdHeaderStyle::Structured);
        assert!(fits(command, 0) && fits(command, 1), "FUA goes with {command}");
        assert_eq!(fits(command, 1 << 1), command == 6, "NO_HOLE with {command}");
        assert_eq!(fits(command, 1 << 2), command == 0, "DF with {command}");
        assert_eq!(fits(command, 1 << 3), command == 7, "REQ_ONE with {command}");
        assert_eq!(fits(command, 1 << 4), command == 6, "FAST_ZERO with {command}");
        assert!(!fits(command, 1 << 5) && !fits(command, 1 << 15), "no other with {command}");
    }
}

#[test]
fn sent_strings_are_clipped() {
    let long = format!("{}ä{}", "x".repeat(4095), "y".repeat(100_000));
    let mut out = Vec::new();
    nbd::put_option_error_reply(&mut out, nbd::OPT_GO, nbd::REP_ERR_UNKNOWN, &long);
    assert_eq!(out.len(), nbd::OPTION_REPLY_HEADER_SIZE + 4095, "cut before the character that does not fit");
    out.clear();
    nbd::put_error_chunk_with_text(&mut out, 1, nbd::EIO, &long);
    assert_eq!(out.len(), 26 + 4095);
    out.clear();
    nbd::put_error_chunk_with_text(&mut out, 1, nbd::EIO, "");
    assert_eq!(out, nbd::encode_textless_error_chunk(1, nbd::EIO));
}

#[test]
fn the_answer_to_export_name() {
    let reply = nbd::ExportNameReply {
        size: 1 << 40,
        flags: nbd::ExportFlags::HAS_FLAGS | nbd::ExportFlags::SEND_TRIM,
    };
    let mut out = Vec::new();
    nbd::put_export_name_reply(&mut out, reply, true);
    assert_eq!(out, [0, 0, 1, 0, 0, 0, 0, 0, 0, 0x21]);
    assert_eq!(nbd::ExportNameReply::decode(out[..].try_into().unwrap()), reply);
    nbd::put_export_name_reply(&mut out, reply, false);
    assert_eq!(out.len(), 10 + 10 + 124);
}
