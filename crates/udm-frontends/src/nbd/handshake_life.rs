//! Every state of a handshake with every message: the answers and the next state. The rules are
//! those of proto.md, "Newstyle negotiation", "Option types", "Metadata querying" and "TLS
//! support".

use super::tests::{exports, replies, request, script};
use super::*;
use std::fmt::Write;
use std::path::Path;
use udm_core::errno::ENXIO;
use udm_tls::TlsServerConfig;
use udm_wire::nbd::{
    MAGIC_OPTION, OPT_EXPORT_NAME, OPT_EXTENDED_HEADERS, OPT_STARTTLS, REP_ACK, REP_ERR_EXT_HEADER_REQD,
    REP_ERR_POLICY, REP_ERR_TLS_REQD, REP_ERR_TOO_BIG, REP_ERR_UNSUP, REP_INFO, REP_META_CONTEXT, REP_SERVER,
    encode_client_flags,
};

const REPLIES: [(u32, &str); 12] = [
    (REP_ACK, "ack"),
    (REP_SERVER, "server"),
    (REP_INFO, "info"),
    (REP_META_CONTEXT, "context"),
    (REP_ERR_UNSUP, "unsupported"),
    (REP_ERR_POLICY, "policy"),
    (REP_ERR_INVALID, "invalid"),
    (REP_ERR_TLS_REQD, "TLS required"),
    (REP_ERR_PLATFORM, "platform"),
    (REP_ERR_UNKNOWN, "unknown"),
    (REP_ERR_TOO_BIG, "too big"),
    (REP_ERR_EXT_HEADER_REQD, "extended headers"),
];

fn make_meta_context_request(name: &str) -> MetaContextRequest {
    MetaContextRequest { name: name.into(), queries: vec!["base:allocation".into()] }
}

/// TLS of a server with the certificates of `udm-tls`.
fn server_tls(is_required: bool) -> Option<NbdServerTls> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../udm-tls/tests/data");
    let config = TlsServerConfig::load(Path::new(folder), false).unwrap();
    Some(NbdServerTls { config: Arc::new(config), is_required })
}

/// Messages that lead to each state, and the server's TLS.
fn handshake_state_scripts() -> [(&'static str, Option<NbdServerTls>, Vec<u8>); 12] {
    let chosen =
        |name| [NbdOption::StructuredReply, NbdOption::SetMetaContext(make_meta_context_request(name))];
    let extended = || NbdOption::ExtendedHeaders;
    [
        ("greeted", None, Vec::new()),
        ("options", None, script(&[])),
        ("structured", None, script(&[NbdOption::StructuredReply])),
        ("contexts of disk", None, script(&chosen("disk"))),
        ("contexts of other", None, script(&chosen("other"))),
        ("extended", None, script(&[extended()])),
        ("extended", None, script(&[NbdOption::StructuredReply, extended()])),
        (
            "extended, contexts of disk",
            None,
            script(&[extended(), NbdOption::SetMetaContext(make_meta_context_request("disk"))]),
        ),
        ("extended, TLS offered", server_tls(false), script(&[extended()])),
        ("structured, TLS offered", server_tls(false), script(&[NbdOption::StructuredReply])),
        ("options, TLS required", server_tls(true), script(&[])),
        ("options in TLS", server_tls(true), script(&[NbdOption::StructuredReply, NbdOption::StartTls])),
    ]
}

/// An option as bytes.
fn encode_raw_option(option: u32, len: u32, data: &[u8]) -> Vec<u8> {
    [&MAGIC_OPTION.to_be_bytes(), &option.to_be_bytes()[..], &len.to_be_bytes(), data].concat()
}

fn handshake_test_messages() -> Vec<(&'static str, Vec<u8>)> {
    let option = |option: NbdOption| {
        let mut bytes = Vec::new();
        option.encode(&mut bytes);
        bytes
    };
    let no_zeroes = ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES;
    vec![
        ("flags", encode_client_flags(no_zeroes).to_vec()),
        ("flags that nobody knows", (1u32 << 9).to_be_bytes().to_vec()),
        ("EXPORT_NAME disk", option(NbdOption::ExportName("disk".into()))),
        ("EXPORT_NAME none", option(NbdOption::ExportName("none".into()))),
        ("EXPORT_NAME other, gone", option(NbdOption::ExportName("other".into()))),
        ("ABORT", option(NbdOption::Abort)),
        ("LIST", option(NbdOption::List)),
        ("LIST with data", encode_raw_option(OPT_LIST, 1, b"x")),
        ("STARTTLS", encode_raw_option(OPT_STARTTLS, 0, b"")),
        ("INFO disk", option(NbdOption::Info(request("disk", &[])))),
        ("INFO none", option(NbdOption::Info(request("none", &[])))),
        ("GO disk", option(NbdOption::Go(request("disk", &[])))),
        ("GO none", option(NbdOption::Go(request("none", &[])))),
        ("GO other, gone", option(NbdOption::Go(request("other", &[])))),
        ("GO in half", encode_raw_option(OPT_GO, 6, b"\0\0\0\x04di")),
        ("STRUCTURED_REPLY", option(NbdOption::StructuredReply)),
        ("EXTENDED_HEADERS", option(NbdOption::ExtendedHeaders)),
        ("EXTENDED_HEADERS with data", encode_raw_option(OPT_EXTENDED_HEADERS, 1, b"x")),
        ("LIST_META_CONTEXT disk", option(NbdOption::ListMetaContext(make_meta_context_request("disk")))),
        ("SET_META_CONTEXT disk", option(NbdOption::SetMetaContext(make_meta_context_request("disk")))),
        ("SET_META_CONTEXT none", option(NbdOption::SetMetaContext(make_meta_context_request("none")))),
        ("an option that nobody knows", encode_raw_option(4711, 0, b"")),
        ("an option of 4 GiB", encode_raw_option(OPT_LIST, u32::MAX, b"")),
        ("no option at all", vec![0; 16]),
        ("half an option", encode_raw_option(OPT_EXPORT_NAME, 4, b"di")),
    ]
}

/// Feeds `bytes` until they or the handshake end.
fn feed_handshake(
    handshake: &mut ServerHandshake,
    mut bytes: &[u8],
    out: &mut Vec<u8>,
    all: &Exports,
) -> HandshakeStepOutcome {
    let mut open = |export: &Export| match &*export.name() {
        "other" => Err(DeviceControlError::new(ENXIO, "the disk is gone")),
        _ => Ok(()),
    };
    loop {
        match handshake.step(&mut bytes, out, all, &mut open) {
            HandshakeStepOutcome::Answered => {}
            HandshakeStepOutcome::StartTls(_) if !bytes.is_empty() => panic!("messages after STARTTLS"),
            end => return end,
        }
    }
}

/// Name of the handshake's state.
fn handshake_state_name(handshake: &ServerHandshake) -> String {
    let negotiated = match (&handshake.contexts, handshake.header_style) {
        (Some((name, ..)), NbdHeaderStyle::Extended) => format!("extended, contexts of {name}"),
        (Some((name, ..)), _) => format!("contexts of {name}"),
        (None, NbdHeaderStyle::Extended) => "extended".into(),
        (None, NbdHeaderStyle::Structured) => "structured".into(),
        (None, NbdHeaderStyle::Simple) => "options".into(),
    };
    negotiated
        + match handshake.tls {
            HandshakeTls::Off => "",
            HandshakeTls::Before(NbdServerTls { is_required: false, .. }) => ", TLS offered",
            HandshakeTls::Before(NbdServerTls { is_required: true, .. }) => ", TLS required",
            HandshakeTls::Active => " in TLS",
        }
}

fn describe_option_replies(event: &str, out: &[u8]) -> String {
    if event.starts_with("EXPORT_NAME") && !out.is_empty() {
        return format!("{} bytes", out.len());
    }
    let name =
        |reply: u32| REPLIES.iter().find(|(number, _)| *number == reply).expect("a reply that is listed").1;
    replies(out).iter().map(|(_, reply, _)| name(*reply)).collect::<Vec<_>>().join(", ")
}

#[test]
fn every_transition() {
    let mut text = String::new();
    let all = exports();
    for (before, tls, past) in handshake_state_scripts() {
        writeln!(text, "{before}").unwrap();
        for (event, bytes) in handshake_test_messages() {
            let (mut handshake, mut out) =
                (ServerHandshake::new(tls.clone(), NbdClientIdentity::default()), Vec::new());
            feed_handshake(&mut handshake, &past, &mut out, &all);
            out.clear();
            let next = match feed_handshake(&mut handshake, &bytes, &mut out, &all) {
                HandshakeStepOutcome::Begin(s) => {
                    let style = match s.header_style {
                        NbdHeaderStyle::Simple => "",
                        NbdHeaderStyle::Structured => ", structured",
                        NbdHeaderStyle::Extended => ", extended",
                    };
                    format!("serving {}{style}, {} contexts", s.export.name(), s.contexts.len())
                }
                HandshakeStepOutcome::Close => "closed".into(),
                HandshakeStepOutcome::StartTls(_) => {
                    format!("TLS begins, {}", handshake_state_name(&handshake))
                }
                HandshakeStepOutcome::More | HandshakeStepOutcome::Answered => {
                    handshake_state_name(&handshake)
                }
            };
            let next = if next == before { "same" } else { &next };
            writeln!(text, "  {event:<27} | {:<30} | {next}", describe_option_replies(event, &out)).unwrap();
        }
    }
    insta::assert_snapshot!(text);
}
