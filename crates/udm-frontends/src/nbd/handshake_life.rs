//! Every state of a handshake with every message: the answers and the next state. The rules are
//! those of proto.md, "Newstyle negotiation", "Option types" and "Metadata querying".

use super::tests::{exports, replies, request, script};
use super::*;
use std::fmt::Write;
use udm_core::errno::ENXIO;
use udm_wire::nbd::{
    MAGIC_OPTION, OPT_EXPORT_NAME, OPT_STARTTLS, REP_ACK, REP_ERR_POLICY, REP_ERR_TOO_BIG, REP_ERR_UNSUP,
    REP_INFO, REP_META_CONTEXT, REP_SERVER, encode_client_flags,
};

const REPLIES: [(u32, &str); 10] = [
    (REP_ACK, "ack"),
    (REP_SERVER, "server"),
    (REP_INFO, "info"),
    (REP_META_CONTEXT, "context"),
    (REP_ERR_UNSUP, "unsupported"),
    (REP_ERR_POLICY, "policy"),
    (REP_ERR_INVALID, "invalid"),
    (REP_ERR_PLATFORM, "platform"),
    (REP_ERR_UNKNOWN, "unknown"),
    (REP_ERR_TOO_BIG, "too big"),
];

fn meta(name: &str) -> MetaRequest {
    MetaRequest { name: name.into(), queries: vec!["base:allocation".into()] }
}

/// Messages that lead to each state.
fn states() -> [(&'static str, Vec<u8>); 5] {
    let chosen = |name| [ClientOption::StructuredReply, ClientOption::SetMetaContext(meta(name))];
    [
        ("greeted", Vec::new()),
        ("options", script(&[])),
        ("structured", script(&[ClientOption::StructuredReply])),
        ("contexts of disk", script(&chosen("disk"))),
        ("contexts of other", script(&chosen("other"))),
    ]
}

/// An option as bytes.
fn raw(option: u32, len: u32, data: &[u8]) -> Vec<u8> {
    [&MAGIC_OPTION.to_be_bytes(), &option.to_be_bytes()[..], &len.to_be_bytes(), data].concat()
}

fn events() -> Vec<(&'static str, Vec<u8>)> {
    let option = |option: ClientOption| {
        let mut bytes = Vec::new();
        option.encode(&mut bytes);
        bytes
    };
    let no_zeroes = ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES;
    vec![
        ("flags", encode_client_flags(no_zeroes).to_vec()),
        ("flags that nobody knows", (1u32 << 9).to_be_bytes().to_vec()),
        ("EXPORT_NAME disk", option(ClientOption::ExportName("disk".into()))),
        ("EXPORT_NAME none", option(ClientOption::ExportName("none".into()))),
        ("EXPORT_NAME other, gone", option(ClientOption::ExportName("other".into()))),
        ("ABORT", option(ClientOption::Abort)),
        ("LIST", option(ClientOption::List)),
        ("LIST with data", raw(OPT_LIST, 1, b"x")),
        ("STARTTLS", raw(OPT_STARTTLS, 0, b"")),
        ("INFO disk", option(ClientOption::Info(request("disk", &[])))),
        ("INFO none", option(ClientOption::Info(request("none", &[])))),
        ("GO disk", option(ClientOption::Go(request("disk", &[])))),
        ("GO none", option(ClientOption::Go(request("none", &[])))),
        ("GO other, gone", option(ClientOption::Go(request("other", &[])))),
        ("GO in half", raw(OPT_GO, 6, b"\0\0\0\x04di")),
        ("STRUCTURED_REPLY", option(ClientOption::StructuredReply)),
        ("LIST_META_CONTEXT disk", option(ClientOption::ListMetaContext(meta("disk")))),
        ("SET_META_CONTEXT disk", option(ClientOption::SetMetaContext(meta("disk")))),
        ("SET_META_CONTEXT none", option(ClientOption::SetMetaContext(meta("none")))),
        ("an option that nobody knows", raw(4711, 0, b"")),
        ("an option of 4 GiB", raw(OPT_LIST, u32::MAX, b"")),
        ("no option at all", vec![0; 16]),
        ("half an option", raw(OPT_EXPORT_NAME, 4, b"di")),
    ]
}

/// Feeds `bytes` until they or the handshake end.
fn feed(handshake: &mut Handshake, mut bytes: &[u8], out: &mut Vec<u8>, all: &Exports) -> HandshakeStep {
    let mut open = |export: &Export| match &*export.name() {
        "other" => Err(OpenError::new(ENXIO, "the disk is gone")),
        _ => Ok(()),
    };
    loop {
        match handshake.step(&mut bytes, out, all, &mut open) {
            HandshakeStep::Answered => {}
            end => return end,
        }
    }
}

/// Name of the handshake's state.
fn state(handshake: &Handshake) -> String {
    match (&handshake.contexts, handshake.structured) {
        (Some((name, ..)), _) => format!("contexts of {name}"),
        (None, true) => "structured".into(),
        (None, false) => "options".into(),
    }
}

fn answers(event: &str, out: &[u8]) -> String {
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
    for (before, past) in states() {
        writeln!(text, "{before}").unwrap();
        for (event, bytes) in events() {
            let (mut handshake, mut out) = (Handshake::default(), Vec::new());
            feed(&mut handshake, &past, &mut out, &all);
            out.clear();
            let next = match feed(&mut handshake, &bytes, &mut out, &all) {
                HandshakeStep::Begin(s) => {
                    let form = if s.structured { ", structured" } else { "" };
                    format!("serving {}{form}, {} contexts", s.export.name(), s.contexts.len())
                }
                HandshakeStep::Close => "closed".into(),
                HandshakeStep::More | HandshakeStep::Answered => state(&handshake),
            };
            let next = if next == before { "same" } else { &next };
            writeln!(text, "  {event:<27} | {:<30} | {next}", answers(event, &out)).unwrap();
        }
    }
    insta::assert_snapshot!(text);
}
