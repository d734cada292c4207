//! The properties of `udm_wire::fuzz` with generated input: any bytes, words of a grammar, and
//! valid input with bytes changed.

use proptest::collection::vec;
use proptest::prelude::*;
use udm_wire::{fuzz, nbd};

/// Valid input with some bytes overwritten, dropped or duplicated.
fn mutated(seed: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    let change = (any::<prop::sample::Index>(), any::<u8>(), 0..4u8);
    (seed, vec(change, 0..4)).prop_map(|(mut bytes, changes)| {
        for (at, byte, how) in changes {
            if bytes.is_empty() {
                break;
            }
            let at = at.index(bytes.len());
            match how {
                0 => bytes[at] = byte,
                1 => drop(bytes.remove(at)),
                2 => bytes.insert(at, byte),
                _ => bytes.truncate(at),
            }
        }
        bytes
    })
}

/// Text of grammar pieces in any order.
fn pieces(of: &'static [&'static str], max: usize) -> impl Strategy<Value = Vec<u8>> {
    vec(prop::sample::select(of), 0..max).prop_map(|pieces| pieces.concat().into_bytes())
}

const TABLE: &[&str] = &[
    "0",
    "8",
    " ",
    " ",
    "\t",
    "\n",
    "\r\n",
    "#",
    "\\",
    "\\ ",
    "\\#",
    "linear",
    "multipath",
    "/dev/a",
    "99999999999999999999",
    "-1",
    "\0",
    "ä",
    "\u{2028}",
    "@x",
    "\u{1b}",
    "\u{b}",
    "0 8 linear @a 0\n",
];
const UDM_CONF: &[&str] = &[
    "[serve]\n",
    "[devices.a]\n",
    "[devices.\"b c\"]\n",
    "[[devices]]\n",
    "devices.d = { table = \"0 8 error\" }\n",
    "table = \"0 8 error\"\n",
    "table = \"\"\"\n0 8 linear @a 0\n\"\"\"\n",
    "table-file = 'x'\n",
    "uuid = \"u\"\n",
    "readonly = true\n",
    "port = 1\n",
    "export = [\"a\", 1]\n",
    "poll = false\n",
    "[",
    "]",
    "\"",
    "\"\"\"",
    "'",
    "=",
    ".",
    "{",
    "}",
    "\\u0020",
    "#",
    "é",
    "\n",
    "1e9",
    "1979-05-27",
];
const CONF: &[&str] = &[
    "defaults {\n",
    "overrides {\n",
    "multipaths {\n",
    "multipath {\n",
    "device {\n",
    "}\n",
    "}",
    "{",
    "\n",
    "\"",
    " ",
    "\t",
    "#",
    "!",
    "alias yellow\n",
    "wwid ",
    "polling_interval 5\n",
    "max_polling_interval 1\n",
    "no_path_retry ",
    "queue\n",
    "12\n",
    "failback ",
    "99999999999999999999",
    "prio weightedpath\n",
    "prio path_latency\n",
    "prio_args \"devname sd.* 50\"\n",
    "prio_args \"io_num=20 base_num=1.1\"\n",
    "frobnicate x\n",
];
const SIZE: &[&str] =
    &["0", "1", "9", "18446744073709551615", "k", "K", "M", "G", "T", "P", "E", "i", "B", "b", " ", "-", "."];
const URI: &[&str] = &[
    "file:",
    "null:",
    "mem:",
    "pattern:",
    "nbd://",
    "nbd+unix://",
    "@",
    ":",
    "/",
    "?",
    "&",
    "=",
    ",",
    "%",
    "%2F",
    "%25",
    "%00",
    "%c3%a4",
    "#",
    "[::1]",
    "host",
    "direct",
    "readonly",
    "on",
    "off",
    "size",
    "gb",
    "bs",
    "blocksize",
    "irqmode",
    "queue_mode",
    "discard",
    "memory_backed",
    "cache_size",
    "hw_queue_depth",
    "max_sectors",
    "fua",
    "0",
    "1",
    "2",
    "4G",
    "512",
    "10809",
    "socket",
    ".",
    "..",
    "-",
    "x",
    " ",
    "\\",
    "ä",
    "\u{85}",
    "null:memory_backed=1,",
    "nbd+unix:///?socket=",
];

fn option() -> impl Strategy<Value = nbd::NbdOption> {
    let info = ("[a-z/ä]{0,9}", vec(any::<u16>(), 0..5))
        .prop_map(|(name, infos)| nbd::ExportInfoRequest { name, infos });
    prop_oneof![
        Just(nbd::NbdOption::Abort),
        Just(nbd::NbdOption::List),
        Just(nbd::NbdOption::StartTls),
        Just(nbd::NbdOption::StructuredReply),
        Just(nbd::NbdOption::ExtendedHeaders),
        "[a-z]{0,9}".prop_map(nbd::NbdOption::ExportName),
        info.clone().prop_map(nbd::NbdOption::Info),
        info.prop_map(nbd::NbdOption::Go),
        ("[a-z]{0,9}", vec("[a-z:]{0,9}", 0..4), any::<bool>()).prop_map(|(name, queries, list)| {
            let request = nbd::MetaContextRequest { name, queries };
            if list {
                nbd::NbdOption::ListMetaContext(request)
            } else {
                nbd::NbdOption::SetMetaContext(request)
            }
        }),
        (9..20u32, vec(any::<u8>(), 0..40))
            .prop_map(|(option, data)| nbd::NbdOption::Unknown { option, data }),
    ]
}

fn handshake() -> impl Strategy<Value = Vec<u8>> {
    (any::<u8>(), 0..4u32, vec(option(), 0..4)).prop_map(|(step, flags, options)| {
        let mut bytes = vec![step];
        bytes.extend(flags.to_be_bytes());
        options.iter().for_each(|option| option.encode(&mut bytes));
        bytes
    })
}

fn option_reply() -> impl Strategy<Value = Vec<u8>> {
    let sizes = (0..18u32, 0..26u32, any::<u32>()).prop_map(|(min, preferred, maximum)| nbd::BlockSizes {
        minimum: 1 << min,
        preferred: 1 << preferred,
        maximum,
    });
    let info = prop_oneof![
        (any::<u64>(), any::<u16>()).prop_map(|(size, flags)| nbd::ExportInfoItem::Export {
            size,
            flags: nbd::ExportFlags::from_bits_truncate(flags)
        }),
        "[a-zä]{0,9}".prop_map(nbd::ExportInfoItem::Name),
        ".{0,9}".prop_map(nbd::ExportInfoItem::Description),
        sizes.prop_map(nbd::ExportInfoItem::BlockSize),
        any::<u16>().prop_map(nbd::ExportInfoItem::Other),
    ];
    prop_oneof![
        Just(nbd::OptionReply::Ack),
        ("[a-z]{0,9}", ".{0,9}")
            .prop_map(|(name, description)| nbd::OptionReply::Server { name, description }),
        info.prop_map(nbd::OptionReply::Info),
        (any::<u32>(), ".{0,9}").prop_map(|(id, name)| nbd::OptionReply::MetaContext { id, name }),
        (1..12u32, ".{0,20}")
            .prop_map(|(e, text)| nbd::OptionReply::Error { error: nbd::REP_FLAG_ERROR | e, text }),
    ]
    .prop_map(|reply| {
        let mut out = Vec::new();
        match reply {
            nbd::OptionReply::Server { name, description } => {
                nbd::put_rep_server(&mut out, &name, &description);
            }
            nbd::OptionReply::Info(info) => nbd::put_export_info_reply(&mut out, nbd::OPT_GO, &info),
            nbd::OptionReply::MetaContext { id, name } => {
                nbd::put_meta_context_reply(&mut out, nbd::OPT_SET_META_CONTEXT, id, &name);
            }
            nbd::OptionReply::Error { error, text } => {
                nbd::put_option_error_reply(&mut out, nbd::OPT_GO, error, &text);
            }
            _ => nbd::put_option_ack_reply(&mut out, nbd::OPT_GO),
        }
        out
    })
}

fn reply() -> impl Strategy<Value = Vec<u8>> {
    let (cookie, error, done) = (any::<u64>(), any::<u32>(), any::<bool>());
    prop_oneof![
        (cookie, error).prop_map(|(cookie, error)| nbd::SimpleReply { error, cookie }.encode().to_vec()),
        cookie.prop_map(|cookie| nbd::chunk_none(cookie).to_vec()),
        (cookie, any::<u64>(), vec(any::<u8>(), 1..20), done).prop_map(|(cookie, offset, data, done)| {
            let mut out = nbd::chunk_data_header(cookie, offset, data.len() as u32, done).to_vec();
            out.extend(data);
            out
        }),
        (cookie, any::<u64>(), 1..u32::MAX, done)
            .prop_map(|(c, offset, len, done)| nbd::chunk_hole(c, offset, len, done).to_vec()),
        (cookie, any::<u32>(), vec((1..u32::MAX, any::<u32>()), 1..5), done).prop_map(
            |(c, id, runs, done)| {
                let mut out = nbd::chunk_block_status_header(c, id, runs.len() as u32, done).to_vec();
                runs.iter()
                    .for_each(|(len, flags)| out.extend(nbd::encode_block_status_descriptor(*len, *flags)));
                out
            }
        ),
        (cookie, 1..200u32, ".{0,20}").prop_map(|(cookie, error, text)| {
            let mut out = Vec::new();
            nbd::put_error_chunk_with_text(&mut out, cookie, error, &text);
            out
        }),
        (cookie, 1..200u32)
            .prop_map(|(cookie, error)| nbd::encode_textless_error_chunk(cookie, error).to_vec()),
    ]
}

fn extended_reply() -> impl Strategy<Value = Vec<u8>> {
    let request =
        (any::<u64>(), any::<u64>()).prop_map(|(cookie, offset)| nbd::AnsweredRequest { cookie, offset });
    let done = any::<bool>();
    prop_oneof![
        request.clone().prop_map(|request| nbd::extended_chunk_none(request).to_vec()),
        (request.clone(), any::<u64>(), vec(any::<u8>(), 1..20), done).prop_map(
            |(request, at, data, done)| {
                let head = nbd::extended_chunk_data_header(request, at, data.len() as u32, done);
                [&head[..], &data].concat()
            }
        ),
        (request.clone(), any::<u32>(), vec((1..u64::MAX, any::<u64>()), 1..5), done).prop_map(
            |(request, id, runs, done)| {
                let head = nbd::extended_chunk_block_status_header(request, id, runs.len() as u32, done);
                let runs = runs
                    .iter()
                    .flat_map(|(len, flags)| nbd::encode_extended_block_status_descriptor(*len, *flags));
                head.into_iter().chain(runs).collect()
            }
        ),
        (request, 1..200u32)
            .prop_map(|(request, error)| nbd::encode_extended_error_chunk(request, error).to_vec()),
    ]
}

/// All bytes of a server to a client with three requests in flight.
fn conversation() -> impl Strategy<Value = Vec<u8>> {
    (any::<u8>(), any::<bool>()).prop_map(|(step, holes)| {
        let mut out = vec![step];
        out.extend(nbd::encode_nbd_server_greeting(nbd::HandshakeFlags::FIXED_NEWSTYLE));
        nbd::put_option_ack_reply(&mut out, nbd::OPT_STRUCTURED_REPLY);
        nbd::put_meta_context_reply(&mut out, nbd::OPT_SET_META_CONTEXT, 7, nbd::CONTEXT_ALLOCATION);
        nbd::put_option_ack_reply(&mut out, nbd::OPT_SET_META_CONTEXT);
        let flags = nbd::ExportFlags::HAS_FLAGS;
        nbd::put_export_info_reply(
            &mut out,
            nbd::OPT_GO,
            &nbd::ExportInfoItem::Export { size: 1 << 20, flags },
        );
        nbd::put_option_ack_reply(&mut out, nbd::OPT_GO);
        let [read, write, status] = [0u64, 1, 2].map(|key| (key + 1) << 32 | key);
        out.extend(nbd::SimpleReply { error: 0, cookie: write }.encode());
        out.extend(nbd::chunk_hole(read, 1024, 100, false));
        out.extend(nbd::chunk_block_status_header(status, 7, 1, holes));
        out.extend(nbd::encode_block_status_descriptor(4096, 3));
        out.extend(nbd::chunk_data_header(read, 512, 512, false));
        out.extend([9; 512]);
        out.extend(nbd::chunk_data_header(read, 1124, 3484, holes));
        out.extend([8; 3484]);
        if !holes {
            nbd::put_error_chunk_with_text(&mut out, status, 5, "no");
            out.extend(nbd::chunk_none(read));
        }
        out
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes(data in vec(any::<u8>(), 0..200)) {
        fuzz::fuzz_table_parser(&data);
        fuzz::fuzz_message_words(&data);
        fuzz::fuzz_multipath_conf_parser(&data);
        fuzz::fuzz_udm_conf_parser(&data);
        fuzz::fuzz_size_parser(&data);
        fuzz::fuzz_device_uri_parser(&data);
        fuzz::fuzz_nbd_handshake_parser(&data);
        fuzz::fuzz_nbd_request(&data);
        fuzz::fuzz_nbd_option_reply(&data);
        fuzz::fuzz_nbd_reply(&data);
        fuzz::fuzz_nbd_client(&data);
        fuzz::fuzz_vhost_user_message(&data);
        fuzz::fuzz_vhost_user_setup(&data);
    }

    #[test]
    fn vhost_user_messages(request in 0u32..45, data in vec(any::<u8>(), 0..100), small in vec(0u8..4, 0..100)) {
        for payload in [data, small] {
            let message = udm_wire::vhost_user::encode_message(request, false, &payload);
            fuzz::fuzz_vhost_user_message(&message);
            fuzz::fuzz_vhost_user_setup(&message);
        }
    }

    /// Payloads of the lengths that requests have.
    #[test]
    fn vhost_user_setups(request in 0u32..45, words in vec(any::<u8>(), 40), small in vec(0u8..3, 40), len in 0usize..6) {
        for payload in [&words, &small] {
            let payload = &payload[..[0, 8, 13, 20, 24, 40][len]];
            fuzz::fuzz_vhost_user_setup(&udm_wire::vhost_user::encode_message(request, false, payload));
        }
    }

    #[test]
    fn tables(data in mutated(pieces(TABLE, 20))) {
        fuzz::fuzz_table_parser(&data);
        fuzz::fuzz_message_words(&data);
    }

    #[test]
    fn multipath_confs(data in mutated(pieces(CONF, 30))) {
        fuzz::fuzz_multipath_conf_parser(&data);
    }

    #[test]
    fn udm_confs(data in mutated(pieces(UDM_CONF, 20))) {
        fuzz::fuzz_udm_conf_parser(&data);
    }

    #[test]
    fn sizes(data in mutated(pieces(SIZE, 5))) {
        fuzz::fuzz_size_parser(&data);
    }

    #[test]
    fn uris(data in mutated(pieces(URI, 12))) {
        fuzz::fuzz_device_uri_parser(&data);
    }

    #[test]
    fn handshakes(data in mutated(handshake())) {
        fuzz::fuzz_nbd_handshake_parser(&data);
    }

    #[test]
    fn requests(flags: u16, command in 0..12u16, cookie: u64, offset: u64, len: u32, long: u64, ids in vec(any::<u32>(), 0..4)) {
        let flags = nbd::CommandFlags::from_bits_retain(flags);
        let (command, len) = (nbd::NbdCommand::from_number(command), len.into());
        let request = nbd::NbdRequestHeader { flags, command, cookie, offset, len };
        prop_assert_eq!(nbd::NbdRequestHeader::decode(&request.encode()), Ok(request));
        fuzz::fuzz_nbd_request(&request.encode());
        let extended = nbd::NbdRequestHeader { len: long, ..request };
        prop_assert_eq!(nbd::NbdRequestHeader::decode_extended(&extended.encode_extended()), Ok(extended));
        let payload = nbd::BlockStatusPayload { len: long, contexts: ids };
        fuzz::fuzz_nbd_request(&[&extended.encode_extended()[..], &payload.encode()].concat());
    }

    #[test]
    fn option_replies(data in mutated(option_reply())) {
        fuzz::fuzz_nbd_option_reply(&data);
    }

    #[test]
    fn replies(data in mutated(prop_oneof![reply(), extended_reply()])) {
        fuzz::fuzz_nbd_reply(&data);
    }

    #[test]
    fn conversations(data in mutated(conversation())) {
        fuzz::fuzz_nbd_client(&data);
    }

    #[test]
    fn carets_never_fail(line in ".{0,300}", start in 0..400usize, end in 0..400usize) {
        let out = udm_wire::words::draw_carets_under_span(&line.replace('\n', " "), udm_wire::words::WordSpan { start, end });
        prop_assert_eq!(out.split('\n').count(), 2);
        prop_assert!(out.split('\n').nth(1).unwrap().trim_start().starts_with('^'));
    }
}
