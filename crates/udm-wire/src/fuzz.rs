//! Properties that must hold for any input, one function per parser. Tests run them with generated
//! input, fuzzers with discovered input.
//!
//! Each function takes any bytes, and panics if a property of its parser is violated:
//!
//! * the parser panics or does not end
//! * the parsed value is not encoded to the same bytes
//! * a bound is exceeded
//! * the result depends on how the bytes are cut into pieces
//! * an error has more than one line

mod boot_profile;
mod clone_metadata;
mod clone_table;
mod extended_headers;
mod mirror_log;
mod nvme_host;
mod nvme_host_exchange;
mod nvme_pdu;
mod nvme_peer_record;
mod qcow2_image;

pub use nvme_host::fuzz_nvme_host_pdu;
pub use nvme_host_exchange::fuzz_nvme_host_exchange;
pub use nvme_pdu::fuzz_nvme_pdu;
pub use nvme_peer_record::fuzz_nvme_peer_record;

pub use boot_profile::fuzz_boot_profile;
pub use clone_metadata::fuzz_clone_metadata;
pub use clone_table::fuzz_clone_table;
pub use mirror_log::fuzz_mirror_log;

use crate::{cow, log_writes, multipath_conf, nbd, size, table, udm_conf, uri, vhost_user, words};

pub use qcow2_image::fuzz_qcow2_image;

fn decode_lossy_utf8(data: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(data)
}

fn assert_one_line_error(error: &impl std::fmt::Display) {
    let error = error.to_string();
    assert!(!error.is_empty() && !error.contains(['\n', '\0', '\u{1b}']), "{error:?}");
    assert!(error.len() < 2000, "{error}");
}

/// Tables: [`table::parse_table`], `Display` of a line, carets.
pub fn fuzz_table_parser(data: &[u8]) {
    let text = decode_lossy_utf8(data);
    match table::parse_table(&text) {
        Err(error) => {
            assert_one_line_error(&error);
            assert!(error.span.start <= error.span.end && error.span.end <= error.text.len());
            assert_eq!(error.caret().lines().count(), 2);
        }
        Ok(lines) => {
            for line in &lines {
                assert_eq!(line.spans.len(), line.args.len() + 3);
                for (arg, span) in line.args.iter().zip(&line.spans[3..]) {
                    assert_eq!(words::split_message_words(&line.text[span.start..span.end]), [arg.as_str()]);
                }
                let caret = line.caret(line.args.len() / 2);
                assert_eq!(caret.matches('\n').count(), 1);
                let again = table::parse_table(&line.to_string()).expect("a line reads back");
                assert_eq!(again.len(), 1);
                let [again] = &again[..] else { unreachable!() };
                assert_eq!((again.start, again.len), (line.start, line.len));
                assert_eq!((&again.kind, &again.args), (&line.kind, &line.args));
                let made = table::TableLine::new(line.start, line.len, &line.kind, line.args.clone());
                assert_eq!(&made, again);
            }
        }
    }
}

/// Messages of a vhost-user front end: [`vhost_user::VhostUserRequest`].
pub fn fuzz_vhost_user_message(data: &[u8]) {
    let Some((header, rest)) = data.split_first_chunk() else { return };
    match vhost_user::VhostUserMessageHeader::decode(header) {
        Err(error) => assert_one_line_error(&error),
        Ok(header) => {
            assert!(header.size <= vhost_user::PAYLOAD_MAX);
            let payload = &rest[..rest.len().min(header.size)];
            for fds in 0..10 {
                match vhost_user::VhostUserRequest::decode(&header, payload, fds) {
                    Err(error) => assert_one_line_error(&error),
                    Ok(vhost_user::VhostUserRequest::GetConfig(range)) => assert_eq!(range.encode(), payload),
                    Ok(request) => assert!(request.descriptors() <= vhost_user::TABLE_REGIONS_MAX),
                }
            }
        }
    }
}

/// Requests that set a session up: [`vhost_user::encode_setup_request`] encodes what was decoded,
/// so that another process decodes the same.
pub fn fuzz_vhost_user_setup(data: &[u8]) {
    let decode = |message: &[u8], fds| {
        let (header, payload) = message.split_first_chunk()?;
        let header = vhost_user::VhostUserMessageHeader::decode(header).ok()?;
        vhost_user::VhostUserRequest::decode(&header, payload, fds).ok()
    };
    for fds in 0..=vhost_user::TABLE_REGIONS_MAX {
        let Some(request) = decode(data, fds) else { continue };
        if let Some(message) = vhost_user::encode_setup_request(&request) {
            assert_eq!(decode(&message, request.descriptors()), Some(request));
        }
    }
}

/// Messages: [`words::split_message_words`] and [`words::escape_table_word`].
pub fn fuzz_message_words(data: &[u8]) {
    let text = decode_lossy_utf8(data);
    let split = words::split_message_words(&text);
    assert!(split.iter().all(|word| !word.is_empty()));
    let joined: Vec<_> = split.iter().map(|word| words::escape_table_word(word)).collect();
    assert_eq!(words::split_message_words(&joined.join(" ")), split);
}

/// `multipath.conf`: [`multipath_conf::MultipathConf`].
pub fn fuzz_multipath_conf_parser(data: &[u8]) {
    match multipath_conf::MultipathConf::parse(&decode_lossy_utf8(data)) {
        Err(error) => assert_one_line_error(&error),
        Ok(conf) => {
            conf.warnings.iter().for_each(assert_one_line_error);
            assert!(conf.warnings.len() <= 101);
            let settings = conf.settings("yellow", Some("wwid"), None);
            assert!(settings.polling_interval <= settings.max_polling_interval);
            assert!(settings.polling_interval.0 > 0 && settings.checker_timeout.0 > 0);
        }
    }
}

/// `udm.toml`: [`udm_conf::UdmConf`]. Every error can be shown.
pub fn fuzz_udm_conf_parser(data: &[u8]) {
    let text = decode_lossy_utf8(data);
    match udm_conf::UdmConf::parse(&text) {
        Err(fault) => {
            assert_one_line_error(&fault);
            assert!(fault.with_source_line("f", &text).starts_with("f:"));
        }
        Ok(conf) => {
            for device in &conf.devices {
                let is = uri::DeviceUri::Mapped(device.name.clone());
                assert_eq!(uri::parse_device_uri(&format!("@{}", device.name)), Ok(is));
                if let udm_conf::TableSource::Text(table) = &device.table {
                    assert!(table::parse_table(table).is_ok());
                }
            }
            let places = conf.serve.iter().flat_map(|key| [&key.at, &key.value_at]);
            places.for_each(|at| assert!(text.get(at.clone()).is_some(), "{at:?}"));
        }
    }
}

/// Sizes: [`size::parse_size_with_unit`] and [`size::SizeWithUnit`].
pub fn fuzz_size_parser(data: &[u8]) {
    match size::parse_size_with_unit(&decode_lossy_utf8(data)) {
        Err(error) => assert_one_line_error(&error),
        Ok(bytes) => {
            assert_eq!(size::parse_size_with_unit(&size::SizeWithUnit(bytes).to_string()), Ok(bytes));
        }
    }
}

/// Device names: [`uri::parse_device_uri`] and `Display`.
pub fn fuzz_device_uri_parser(data: &[u8]) {
    match uri::parse_device_uri(&decode_lossy_utf8(data)) {
        Err(error) => assert_one_line_error(&error),
        Ok(device) => {
            let word = device.to_string();
            assert_eq!(uri::parse_device_uri(&word).as_ref(), Ok(&device), "{word}");
            assert_eq!(
                uri::parse_device_uri(&word).unwrap().to_string(),
                word,
                "the canonical form is stable"
            );
            // The word can be written into a table.
            assert_eq!(words::split_message_words(&words::escape_table_word(&word)), [word.as_str()]);
        }
    }
}

/// Logs of writes: [`log_writes::LogWritesCursor`]. The walk ends, stays inside the log and moves
/// forward. Each record is encoded to the same bytes.
pub fn fuzz_log_writes_cursor(data: &[u8]) {
    let mut cursor = match log_writes::LogWritesCursor::new(data, data.len() as u64) {
        Err(error) => return assert_one_line_error(&error),
        Ok(cursor) => cursor,
    };
    let size = cursor.superblock().sector_size as usize;
    let mut behind = size as u64;
    loop {
        let at = match cursor.offset() {
            Err(error) => return assert_one_line_error(&error),
            Ok(None) => return,
            Ok(Some(at)) => at,
        };
        assert_eq!(at, behind, "entries follow each other");
        let sector = &data[at as usize..at as usize + size];
        let record = match cursor.step(sector) {
            Err(error) => return assert_one_line_error(&error),
            Ok(record) => record,
        };
        assert!(record.data.start > at && record.data.start <= record.data.end);
        assert!(record.data.end <= data.len() as u64 && record.range.start <= record.range.end);
        let mut again = vec![0; size];
        let text = record.mark.unwrap_or_default();
        record.entry.encode(&text, &mut again);
        let used = log_writes::HEADER_LEN + text.len();
        assert_eq!(again[..used], sector[..used]);
        behind = record.data.end;
    }
}

/// All messages that the parser returns for a client's bytes, passed in pieces of `step` bytes.
fn parse_handshake_in_pieces(
    data: &[u8],
    step: usize,
) -> (Vec<nbd::ClientHandshakeMessage>, Option<nbd::FatalHandshakeError>, usize) {
    let mut parser = nbd::ClientHandshakeMessageParser::new();
    let mut events = Vec::new();
    let mut fed = 0;
    for piece in data.chunks(step) {
        let mut input = piece;
        loop {
            match parser.next(&mut input) {
                Err(error) => return (events, Some(error), fed + piece.len() - input.len()),
                Ok(None) => break,
                Ok(Some(nbd::ClientHandshakeMessage::Option(
                    option @ (nbd::NbdOption::Go(_) | nbd::NbdOption::ExportName(_)),
                ))) => {
                    events.push(nbd::ClientHandshakeMessage::Option(option));
                    return (events, None, fed + piece.len() - input.len());
                }
                Ok(Some(message)) => events.push(message),
            }
        }
        assert!(input.is_empty(), "a parser that wants more leaves nothing");
        fed += piece.len();
    }
    (events, None, fed)
}

/// The client's half of the handshake: [`nbd::ClientHandshakeMessageParser`], [`nbd::NbdOption`].
/// The first byte is the length of the pieces.
pub fn fuzz_nbd_handshake_parser(data: &[u8]) {
    let Some((step, data)) = data.split_first() else { return };
    let (events, error, used) = parse_handshake_in_pieces(data, data.len().max(1));
    assert_eq!(
        parse_handshake_in_pieces(data, usize::from(*step).max(1)),
        (events.clone(), error.clone(), used),
        "pieces do not matter"
    );
    if let Some(error) = &error {
        assert_one_line_error(error);
    }
    for (i, message) in events.iter().enumerate() {
        let nbd::ClientHandshakeMessage::Option(option) = message else {
            assert_eq!(i, 0, "flags come first, and once");
            continue;
        };
        assert_ne!(i, 0, "flags come first");
        if let nbd::NbdOption::Bad(bad) = option {
            assert!(bad.reply & nbd::REP_FLAG_ERROR != 0 && option.refusal() == Some((bad.reply, bad.why)));
            continue;
        }
        let mut bytes = vec![0; 4];
        option.encode(&mut bytes);
        let (again, error, used) = parse_handshake_in_pieces(&bytes, bytes.len());
        assert_eq!((error, used), (None, bytes.len()));
        assert_eq!(&again[1..], std::slice::from_ref(message));
    }
}

/// Requests: [`nbd::NbdRequestHeader`], compact or extended, and [`nbd::BlockStatusPayload`].
pub fn fuzz_nbd_request(data: &[u8]) {
    extended_headers::check_request(data);
    let Some(bytes) = data.first_chunk() else { return };
    match nbd::NbdRequestHeader::decode(bytes) {
        Err(error) => assert_one_line_error(&error),
        Ok(request) => {
            assert_eq!(&request.encode(), bytes);
            for style in [nbd::NbdHeaderStyle::Simple, nbd::NbdHeaderStyle::Structured] {
                assert!(request.payload_len(style) <= request.len);
                assert!(!request.flags.contains(nbd::CommandFlags::PAYLOAD_LEN) || !request.flags_fit(style));
            }
        }
    }
}

/// The server's half of the handshake: [`nbd::NbdServerGreeting`], [`nbd::OptionReplyHeader`],
/// [`nbd::OptionReply`].
pub fn fuzz_nbd_option_reply(data: &[u8]) {
    if let Some(Ok(greeting)) = data.first_chunk().map(nbd::NbdServerGreeting::decode) {
        let again = nbd::encode_nbd_server_greeting(greeting.flags);
        assert_eq!(&data[..16], &again[..16]);
        assert_eq!(nbd::NbdServerGreeting::decode(&again), Ok(greeting));
    }
    let Some((bytes, payload)) = data.split_first_chunk() else { return };
    let header = match nbd::OptionReplyHeader::decode(bytes) {
        Err(error) => return assert_one_line_error(&error),
        Ok(header) => header,
    };
    assert!(header.len <= nbd::OPTION_LEN_MAX);
    let payload = &payload[..payload.len().min(header.len as usize)];
    let reply = match nbd::OptionReply::decode(header.reply, payload) {
        Err(error) => return assert_one_line_error(&error),
        Ok(reply) => reply,
    };
    let mut out = Vec::new();
    match &reply {
        nbd::OptionReply::Ack => nbd::put_option_ack_reply(&mut out, header.option),
        nbd::OptionReply::Server { name, description } => {
            nbd::put_rep_server(&mut out, name, description);
        }
        nbd::OptionReply::Info(info) => nbd::put_export_info_reply(&mut out, header.option, info),
        nbd::OptionReply::MetaContext { id, name } => {
            nbd::put_meta_context_reply(&mut out, header.option, *id, name);
        }
        nbd::OptionReply::Error { error, text } => {
            nbd::put_option_error_reply(&mut out, header.option, *error, text);
        }
        nbd::OptionReply::Other(kind) => nbd::put_option_reply(&mut out, header.option, *kind, &[]),
    }
    let (bytes, payload) = out.split_first_chunk().expect("a header");
    let again = nbd::OptionReplyHeader::decode(bytes).expect("a header reads back");
    assert_eq!((again.len as usize, again.reply), (payload.len(), header.reply));
    assert_eq!(nbd::OptionReply::decode(again.reply, payload), Ok(reply));
}

/// Replies of the transmission phase: [`nbd::ReplyHeader`], [`nbd::ReplyChunk`], and
/// [`nbd::ExtendedChunkHeader`].
pub fn fuzz_nbd_reply(data: &[u8]) {
    extended_headers::check_reply(data);
    let mut rest = data;
    let header = match nbd::ReplyHeader::decode(&mut rest) {
        Err(error) => return assert_one_line_error(&error),
        Ok(None) => return assert_eq!(rest, data, "an unfinished header is left alone"),
        Ok(Some(header)) => header,
    };
    let used = &data[..data.len() - rest.len()];
    let header = match header {
        nbd::ReplyHeader::Simple(simple) => return assert_eq!(simple.encode(), used),
        nbd::ReplyHeader::Chunk(header) => header,
    };
    assert_eq!(header.encode(), used);
    let payload = &rest[..rest.len().min(header.len as usize)];
    let chunk = match nbd::ReplyChunk::decode(header, payload) {
        Err(error) => return assert_one_line_error(&error),
        Ok(chunk) => chunk,
    };
    let (cookie, done) = (header.cookie, header.is_done());
    let mut again = Vec::new();
    match chunk {
        nbd::ReplyChunk::None => again.extend(nbd::chunk_none(cookie)),
        nbd::ReplyChunk::Data { offset, data } => {
            again.extend(nbd::chunk_data_header(cookie, offset, data.len() as u32, done));
            again.extend(data);
        }
        nbd::ReplyChunk::Hole { offset, len } => again.extend(nbd::chunk_hole(cookie, offset, len, done)),
        nbd::ReplyChunk::BlockStatus { context, descriptors } => {
            let n = descriptors.iter().count() as u32;
            again.extend(nbd::chunk_block_status_header(cookie, context, n, done));
            descriptors
                .iter()
                .for_each(|(len, flags)| again.extend(nbd::encode_block_status_descriptor(len, flags)));
        }
        nbd::ReplyChunk::BlockStatusExt { .. } => panic!("an extended chunk without extended headers"),
        nbd::ReplyChunk::Error { error, text, .. } => {
            nbd::put_error_chunk_with_text(&mut again, cookie, error, text);
        }
    }
    let mut input = &again[..];
    let Ok(Some(nbd::ReplyHeader::Chunk(header))) = nbd::ReplyHeader::decode(&mut input) else {
        panic!("{again:?}")
    };
    match (nbd::ReplyChunk::decode(header, input).expect("a chunk reads back"), chunk) {
        (
            nbd::ReplyChunk::Error { error, text, offset: None },
            nbd::ReplyChunk::Error { error: e, text: t, .. },
        ) => {
            assert_eq!((error, text), (e, t));
        }
        (again, chunk) => assert_eq!(again, chunk),
    }
}

/// Snapshot stores: [`cow::ExceptionStoreHeader`], [`cow::ExceptionStoreScanner`]. All reads are
/// within the store, and no chunk is read twice.
pub fn fuzz_exception_store(data: &[u8]) {
    let header = match cow::ExceptionStoreHeader::decode(data) {
        Err(error) => return assert_one_line_error(&error),
        Ok(None) => return,
        Ok(Some(header)) => header,
    };
    let size = header.chunk.bytes() as usize;
    // A chunk that exceeds the data is cut off at its end.
    let (layout, chunks) = (cow::ExceptionStoreLayout::new(header.chunk), (data.len() / size) as u64);
    let (mut walk, mut found, mut last) =
        (cow::ExceptionStoreScanner::new(layout, chunks, None), cow::SparseChunkBitmap::default(), 0);
    loop {
        let at = match walk.next() {
            Err(error) => return assert_one_line_error(&error),
            Ok(None) => break,
            Ok(Some(at)) => at,
        };
        assert!(at.start > last && at.end <= data.len() as u64);
        last = at.start;
        let area = &data[at.start as usize..at.end as usize];
        if let Err(error) = walk.take(area, |exception| found.insert(exception.old)) {
            return assert_one_line_error(&error);
        }
    }
    let end = walk.end();
    assert_eq!(found.iter().count() as u64, end.exceptions);
    assert!(end.exceptions <= layout.capacity(chunks) && end.next_free <= chunks + 1);
    assert!(end.holes.iter().all(|hole| hole.start < hole.end && hole.end < end.next_free));
}

/// The events of a client in a comparable form; the bytes come in pieces of `step` bytes.
fn feed_nbd_client_in_pieces(data: &[u8], step: usize) -> (Vec<String>, Vec<u8>) {
    use nbd::client::{ClientHandshake, HandshakeOptions, NbdRequestParams, ReplyEvent, ReplyParser};
    let wish = HandshakeOptions {
        export: "x".into(),
        structured: true,
        contexts: vec![nbd::CONTEXT_ALLOCATION.into()],
        tls: false,
    };
    let (mut shake, mut replies): (_, Option<ReplyParser>) = (ClientHandshake::new(wish), None);
    let (mut events, mut content) = (Vec::new(), vec![0; 4096]);
    for mut input in data.chunks(step) {
        loop {
            let Some(replies) = &mut replies else {
                match shake.take(&mut input) {
                    Err(error) => {
                        assert_one_line_error(&error);
                        return (vec![error.to_string()], content);
                    }
                    Ok(None) => break assert!(input.is_empty()),
                    Ok(Some(export)) => {
                        events.push(format!("{export:?}"));
                        let mut fresh = ReplyParser::new(&export);
                        for (tag, command) in
                            [nbd::NbdCommand::Read, nbd::NbdCommand::Write, nbd::NbdCommand::BlockStatus]
                                .into_iter()
                                .enumerate()
                        {
                            let flags = nbd::CommandFlags::empty();
                            fresh
                                .ask(tag as u64, NbdRequestParams { command, flags, offset: 512, len: 4096 });
                        }
                        replies = Some(fresh);
                        continue;
                    }
                }
            };
            match replies.take(&mut input) {
                Err(error) => {
                    assert_one_line_error(&error);
                    events.push(error.to_string());
                    return (events, content);
                }
                Ok(None) => break assert!(input.is_empty()),
                Ok(Some(ReplyEvent::Data { at, bytes, .. })) => {
                    content[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
                }
                Ok(Some(ReplyEvent::Zeroes { at, len, .. })) => {
                    content[at as usize..(at + len) as usize].fill(0);
                }
                Ok(Some(event)) => events.push(format!("{event:?}")),
            }
        }
    }
    (events, content)
}

/// All messages of a server to a client: [`nbd::client::ClientHandshake`],
/// [`nbd::client::ReplyParser`], with three requests in flight from the start. The first byte is
/// the length of the pieces. The pieces must not matter, no request may end twice, and no data may
/// be outside its read.
pub fn fuzz_nbd_client(data: &[u8]) {
    let Some((step, data)) = data.split_first() else { return };
    let whole = feed_nbd_client_in_pieces(data, data.len().max(1));
    assert_eq!(feed_nbd_client_in_pieces(data, usize::from(*step).max(1)), whole, "pieces do not matter");
    let ended = whole.0.iter().filter(|events| events.starts_with("Completed")).count();
    assert!(ended <= 3, "{:?}", whole.0);
}
