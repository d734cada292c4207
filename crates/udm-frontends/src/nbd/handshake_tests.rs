//! The handshake without a network: scripted clients, and clients that send arbitrary bytes.

use super::*;
use crate::nbd::ExportDescription;
use proptest::prelude::*;
use std::sync::Arc;
use udm_core::errno::{ENXIO, EOPNOTSUPP};
use udm_core::{Cx, Device, DeviceId, Lane, Limits, Sectors};
use udm_wire::nbd::{
    INFO_BLOCK_SIZE, INFO_EXPORT, OPT_STARTTLS, OPTION_REPLY_HEADER_SIZE, OptionReplyHeader, REP_ACK,
    REP_ERR_INVALID, REP_ERR_POLICY, REP_ERR_UNSUP, REP_FLAG_ERROR, REP_INFO, REP_META_CONTEXT, REP_SERVER,
    encode_client_flags,
};

/// A device with a size, which is never opened here.
struct SizedDevice(DeviceId, u64);

impl Device for SizedDevice {
    fn id(&self) -> DeviceId {
        self.0
    }
    fn open(&self, _: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Err(DeviceControlError::new(EOPNOTSUPP, "not here"))
    }
    fn limits(&self) -> Limits {
        Limits::new(Sectors(self.1))
    }
}

pub(super) fn exports() -> Exports {
    let exports = Exports::new();
    for (name, description, sectors) in [("disk", "the first", 2048), ("other", "", 100)] {
        let device = Arc::new(SizedDevice(DeviceId::new(), sectors));
        exports.add(Export::new(name, description, false, device).unwrap()).unwrap();
    }
    exports
}

/// Appends the answers to a client that sent `input` at once, and returns the last step.
fn answer_to(input: &[u8], out: &mut Vec<u8>) -> HandshakeStepOutcome {
    let (mut handshake, exports) = (ServerHandshake::default(), exports());
    let mut input = input;
    loop {
        match handshake.step(&mut input, out, &exports, &mut |_| Ok(())) {
            HandshakeStepOutcome::Answered => {}
            end => return end,
        }
    }
}

pub(super) fn script(options: &[NbdOption]) -> Vec<u8> {
    let flags = ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES;
    let mut bytes = encode_client_flags(flags).to_vec();
    options.iter().for_each(|o| o.encode(&mut bytes));
    bytes
}

/// The replies in `out`: option, reply, data.
pub(super) fn replies(mut out: &[u8]) -> Vec<(u32, u32, Vec<u8>)> {
    let mut all = Vec::new();
    while let Some((header, rest)) = out.split_first_chunk::<OPTION_REPLY_HEADER_SIZE>() {
        let h = OptionReplyHeader::decode(header).unwrap();
        let (data, rest) = rest.split_at(h.len as usize);
        all.push((h.option, h.reply, data.to_vec()));
        out = rest;
    }
    assert!(out.is_empty(), "half a reply");
    all
}

pub(super) fn request(name: &str, infos: &[u16]) -> ExportInfoRequest {
    ExportInfoRequest { name: name.to_owned(), infos: infos.to_vec() }
}

#[test]
fn go_says_size_and_blocks_and_begins() {
    let mut out = Vec::new();
    let step = answer_to(&script(&[NbdOption::Go(request("other", &[]))]), &mut out);
    let HandshakeStepOutcome::Begin(session) = step else { panic!("no session") };
    assert_eq!(
        (&*session.export.name(), session.geometry.size, session.header_style),
        ("other", 51200, NbdHeaderStyle::Simple)
    );
    let all = replies(&out);
    let kinds: Vec<_> =
        all.iter().map(|r| (r.1, r.2.get(..2).map(|k| u16::from_be_bytes([k[0], k[1]])))).collect();
    assert_eq!(kinds, [(REP_INFO, Some(INFO_EXPORT)), (REP_INFO, Some(INFO_BLOCK_SIZE)), (REP_ACK, None)]);
}

#[test]
fn structured_replies_bring_df_and_hold_for_the_session() {
    let mut out = Vec::new();
    let options = [NbdOption::StructuredReply, NbdOption::Go(request("", &[INFO_NAME, INFO_DESCRIPTION]))];
    let HandshakeStepOutcome::Begin(session) = answer_to(&script(&options), &mut out) else {
        panic!("no session")
    };
    assert_eq!(session.header_style, NbdHeaderStyle::Structured);
    assert_eq!(&*session.export.name(), "disk", "the empty name is the first export");
    let all = replies(&out);
    assert_eq!(all[0], (OPT_STRUCTURED_REPLY, REP_ACK, vec![]));
    let flags = u16::from_be_bytes([all[1].2[10], all[1].2[11]]);
    assert!(ExportFlags::from_bits_truncate(flags).contains(ExportFlags::SEND_DF));
    assert_eq!(&all[3].2[2..], b"disk");
    assert_eq!(&all[4].2[2..], b"the first");
}

/// The flags of the export in each reply that has them.
fn flags_in(replies: &[(u32, u32, Vec<u8>)]) -> Vec<ExportFlags> {
    let is_export = |data: &[u8]| data.len() == 12 && data[..2] == INFO_EXPORT.to_be_bytes();
    let exports = replies.iter().filter(|(_, reply, data)| *reply == REP_INFO && is_export(data));
    let flags = |data: &[u8]| ExportFlags::from_bits_retain(u16::from_be_bytes([data[10], data[11]]));
    exports.map(|(.., data)| flags(data)).collect()
}

#[test]
fn extended_headers_bring_df_and_payloads_of_block_status_if_contexts_are_chosen() {
    let choose = || MetaContextRequest { name: "disk".into(), queries: vec!["base:allocation".into()] };
    let info = || NbdOption::Info(request("disk", &[]));
    let options = [
        info(),
        NbdOption::SetMetaContext(choose()),
        NbdOption::ExtendedHeaders,
        NbdOption::StructuredReply,
        info(),
        NbdOption::SetMetaContext(choose()),
        NbdOption::Info(request("other", &[])),
        info(),
        NbdOption::Go(request("disk", &[])),
    ];
    let mut out = Vec::new();
    let HandshakeStepOutcome::Begin(session) = answer_to(&script(&options), &mut out) else {
        panic!("no session")
    };
    assert_eq!((session.header_style, session.contexts.len()), (NbdHeaderStyle::Extended, 1));
    let all = replies(&out);
    let optional = ExportFlags::SEND_DF | ExportFlags::BLOCK_STATUS_PAYLOAD;
    let flags: Vec<_> = flags_in(&all).into_iter().map(|flags| flags & optional).collect();
    let df = ExportFlags::SEND_DF;
    // An export of which no context was chosen has no payloads either.
    assert_eq!(flags, [ExportFlags::empty(), df, df, optional, optional]);
    let refused: Vec<_> = all.iter().filter(|r| r.1 & REP_FLAG_ERROR != 0).map(|r| (r.0, r.1)).collect();
    let expected = [(OPT_SET_META_CONTEXT, REP_ERR_INVALID), (OPT_STRUCTURED_REPLY, REP_ERR_EXT_HEADER_REQD)];
    assert_eq!(refused, expected);
}

/// Any length and alignment is served, so a client need not ask for block sizes, and the sizes are
/// said to each (proto.md, "Size constraints").
#[test]
fn block_sizes_are_said_once_to_each_client_and_are_the_same_in_info_and_go() {
    for infos in
        [&[][..], &[INFO_BLOCK_SIZE], &[INFO_BLOCK_SIZE, INFO_BLOCK_SIZE, 77, INFO_NAME, INFO_EXPORT]]
    {
        let mut out = Vec::new();
        let options = [NbdOption::Info(request("disk", infos)), NbdOption::Go(request("disk", infos))];
        assert!(matches!(answer_to(&script(&options), &mut out), HandshakeStepOutcome::Begin(_)));
        let all = replies(&out);
        let infos_of = |option| {
            let of = all.iter().filter(move |reply| reply.0 == option && reply.1 == REP_INFO);
            of.map(|reply| reply.2.clone()).collect::<Vec<_>>()
        };
        assert_eq!(infos_of(OPT_INFO), infos_of(OPT_GO), "{infos:?}");
        let kinds: Vec<_> =
            infos_of(OPT_GO).iter().map(|data| u16::from_be_bytes([data[0], data[1]])).collect();
        let is_named = infos.contains(&INFO_NAME);
        let expected = [Some(INFO_EXPORT), Some(INFO_BLOCK_SIZE), is_named.then_some(INFO_NAME)];
        assert_eq!(kinds, expected.into_iter().flatten().collect::<Vec<_>>());
        let sizes = &infos_of(OPT_GO)[1];
        assert_eq!(sizes.len(), 14);
        // Minimum 1: no alignment is needed. Maximum: no less than the default of the protocol.
        assert_eq!((&sizes[2..6], &sizes[10..]), (&1u32.to_be_bytes()[..], &(64u32 << 20).to_be_bytes()[..]));
    }
}

#[test]
fn descriptions_are_in_lists_and_sent_if_asked_for() {
    let mut out = Vec::new();
    let options = [
        NbdOption::List,
        NbdOption::Info(request("disk", &[INFO_DESCRIPTION])),
        NbdOption::Info(request("disk", &[])),
        NbdOption::Info(request("other", &[INFO_DESCRIPTION])),
        NbdOption::Abort,
    ];
    answer_to(&script(&options), &mut out);
    let all = replies(&out);
    let servers: Vec<_> = all.iter().filter(|r| r.1 == REP_SERVER).map(|r| r.2.clone()).collect();
    assert_eq!(servers, [b"\0\0\0\x04diskthe first".to_vec(), b"\0\0\0\x05other".to_vec()]);
    let kind = INFO_DESCRIPTION.to_be_bytes();
    let said: Vec<_> =
        all.iter().filter(|r| r.1 == REP_INFO && r.2[..2] == kind).map(|r| &r.2[2..]).collect();
    assert_eq!(said, [b"the first"]);
}

#[test]
fn export_name_knows_no_error_but_the_end() {
    let mut out = Vec::new();
    assert!(matches!(
        answer_to(&script(&[NbdOption::ExportName("other".into())]), &mut out),
        HandshakeStepOutcome::Begin(_)
    ));
    assert_eq!(out.len(), 10, "no zeroes, as agreed");
    let mut old = encode_client_flags(ClientFlags::FIXED_NEWSTYLE).to_vec();
    NbdOption::ExportName(String::new()).encode(&mut old);
    out.clear();
    assert!(matches!(answer_to(&old, &mut out), HandshakeStepOutcome::Begin(_)));
    assert_eq!(out.len(), 134);
    out.clear();
    let step = answer_to(&script(&[NbdOption::ExportName("nothing".into())]), &mut out);
    assert!(matches!(step, HandshakeStepOutcome::Close) && out.is_empty());
    let extended = [NbdOption::ExtendedHeaders, NbdOption::ExportName("disk".into())];
    let step = answer_to(&script(&extended), &mut out);
    let acked = vec![(OPT_EXTENDED_HEADERS, REP_ACK, vec![])];
    assert!(matches!(step, HandshakeStepOutcome::Close) && replies(&out) == acked);
}

#[test]
fn metadata_contexts() {
    let meta =
        |name: &str, query: &str| MetaContextRequest { name: name.into(), queries: vec![query.into()] };
    let go = || NbdOption::Go(request("disk", &[]));
    let chosen = |options: &[NbdOption]| {
        let mut out = Vec::new();
        let HandshakeStepOutcome::Begin(session) = answer_to(&script(options), &mut out) else {
            panic!("no session")
        };
        let said: Vec<_> = replies(&out).iter().map(|r| r.1).filter(|r| *r != REP_INFO).collect();
        (session.contexts.len(), said)
    };
    let set = |name, query| NbdOption::SetMetaContext(meta(name, query));
    let structured = || NbdOption::StructuredReply;
    let (ack, context) = (REP_ACK, REP_META_CONTEXT);
    assert_eq!(chosen(&[set("disk", "base:allocation"), go()]), (0, vec![REP_ERR_INVALID, ack]));
    let all = [structured(), set("disk", "base:allocation"), go()];
    assert_eq!(chosen(&all), (1, vec![ack, context, ack, ack]));
    // The last choice counts, even if it failed, and only for its export.
    for (name, query, error) in
        [("disk", "base:", ack), ("nothing", "base:allocation", REP_ERR_UNKNOWN), ("other", "x", ack)]
    {
        let options = [structured(), set("disk", "base:allocation"), set(name, query), go()];
        assert_eq!(chosen(&options), (0, vec![ack, context, ack, error, ack]), "{name} {query}");
    }
    let list = [structured(), NbdOption::ListMetaContext(meta("disk", "base:")), go()];
    assert_eq!(chosen(&list), (0, vec![ack, context, ack, ack]), "listed is not chosen");
}

/// A context belongs to the device that had the name when the context was chosen.
#[test]
fn metadata_contexts_of_a_name_that_changes_hands() {
    let choice = MetaContextRequest { name: "disk".into(), queries: vec!["base:allocation".into()] };
    for changes in [false, true] {
        let (mut handshake, exports, mut out) = (ServerHandshake::default(), exports(), Vec::new());
        let (disk, other) = (exports.get("disk").unwrap(), exports.get("other").unwrap());
        let mut step = |mut bytes: &[u8]| {
            loop {
                match handshake.step(&mut bytes, &mut out, &exports, &mut |_| Ok(())) {
                    HandshakeStepOutcome::Answered if !bytes.is_empty() => {}
                    step => return step,
                }
            }
        };
        step(&script(&[NbdOption::StructuredReply, NbdOption::SetMetaContext(choice.clone())]));
        if changes {
            assert!(exports.put(&other, "disk").is_err_and(|e| e.to_string().contains("exists already")));
            exports.put(&disk, "was").unwrap();
            exports.put(&other, "disk").unwrap();
        }
        let mut go = Vec::new();
        NbdOption::Go(request("disk", &[])).encode(&mut go);
        let HandshakeStepOutcome::Begin(session) = step(&go) else { panic!("no session") };
        assert_eq!(
            session.export.device().id(),
            if changes { other.device().id() } else { disk.device().id() }
        );
        assert_eq!(session.contexts.len(), usize::from(!changes));
    }
}

#[test]
fn what_is_refused_leaves_the_handshake_alive() {
    let mut out = Vec::new();
    let options = [
        NbdOption::Go(request("nothing", &[])),
        NbdOption::Info(request("nothing", &[])),
        NbdOption::Unknown { option: 999, data: vec![1, 2, 3] },
        NbdOption::Unknown { option: OPT_LIST, data: vec![1] },
        NbdOption::StartTls,
        NbdOption::List,
        NbdOption::Info(request("disk", &[])),
        NbdOption::Abort,
    ];
    assert!(matches!(answer_to(&script(&options), &mut out), HandshakeStepOutcome::Close));
    let kinds: Vec<_> = replies(&out).iter().map(|r| (r.0, r.1)).collect();
    assert_eq!(
        kinds,
        [
            (OPT_GO, REP_ERR_UNKNOWN),
            (OPT_INFO, REP_ERR_UNKNOWN),
            (999, REP_ERR_UNSUP),
            (OPT_LIST, REP_ERR_INVALID),
            (OPT_STARTTLS, REP_ERR_POLICY),
            (OPT_LIST, REP_SERVER),
            (OPT_LIST, REP_SERVER),
            (OPT_LIST, REP_ACK),
            (OPT_INFO, REP_INFO),
            (OPT_INFO, REP_INFO),
            (OPT_INFO, REP_ACK),
            (OPT_ABORT, REP_ACK),
        ]
    );
}

/// One step lists a few of thousands of exports. Exports may be added and removed meanwhile.
#[test]
fn a_long_list_is_told_in_parts() {
    let (mut handshake, exports, mut out) = (ServerHandshake::default(), Exports::new(), Vec::new());
    let add = |n: u64| {
        let device = Arc::new(SizedDevice(DeviceId::new(), 8));
        exports.add(Export::new(format!("d{n}"), "", false, device).unwrap()).unwrap();
    };
    (0..1000).for_each(add);
    let bytes = script(&[NbdOption::List, NbdOption::Abort]);
    let (mut input, mut steps) = (&bytes[..], 0);
    loop {
        let before = out.len();
        match handshake.step(&mut input, &mut out, &exports, &mut |_| Ok(())) {
            HandshakeStepOutcome::Answered => {
                assert!(out.len() - before < 1024, "{} bytes in a step", out.len() - before);
            }
            HandshakeStepOutcome::Close => break,
            HandshakeStepOutcome::More
            | HandshakeStepOutcome::Begin(_)
            | HandshakeStepOutcome::StartTls(_) => panic!("at byte {before}"),
        }
        steps += 1;
        if steps == 10 {
            exports.remove(&exports.get("d3").unwrap());
            exports.remove(&exports.get("d500").unwrap());
            add(1000);
        }
    }
    let all = replies(&out);
    let name = |reply: &(u32, u32, Vec<u8>)| String::from_utf8(reply.2[4..].to_vec()).unwrap();
    let servers: Vec<_> = all.iter().filter(|r| r.1 == REP_SERVER).map(name).collect();
    let expected: Vec<_> = (0..=1000).filter(|n| *n != 500).map(|n| format!("d{n}")).collect();
    assert_eq!(servers, expected);
    let ends: Vec<_> = all.iter().filter(|r| r.1 == REP_ACK).map(|r| r.0).collect();
    assert_eq!(ends, [OPT_LIST, OPT_ABORT]);
}

/// Each export is a reply of its own, and the longest texts fit a step.
#[test]
fn the_longest_names_and_descriptions_are_listed_in_bounded_steps() {
    let (mut handshake, exports, mut out) = (ServerHandshake::default(), Exports::new(), Vec::new());
    for n in 10..60 {
        let (name, description) = (format!("{n}{}", "n".repeat(4094)), "d".repeat(4096));
        let device = Arc::new(SizedDevice(DeviceId::new(), 8));
        exports.add(Export::new(name, description, false, device).unwrap()).unwrap();
    }
    let bytes = script(&[NbdOption::List, NbdOption::Abort]);
    let (mut input, mut before) = (&bytes[..], 0);
    while let HandshakeStepOutcome::Answered = handshake.step(&mut input, &mut out, &exports, &mut |_| Ok(()))
    {
        assert!(out.len() - before <= 8 * (20 + 4 + 4096 + 4096), "{} bytes in a step", out.len() - before);
        before = out.len();
    }
    let servers = replies(&out).into_iter().filter(|reply| reply.1 == REP_SERVER);
    let lens: Vec<_> = servers.map(|reply| (reply.0, reply.2.len())).collect();
    assert_eq!(lens, [(OPT_LIST, 4 + 4096 + 4096); 50]);
}

#[test]
fn a_description_may_change() {
    let description = Arc::new(ExportDescription::default());
    let device = Arc::new(SizedDevice(DeviceId::new(), 8));
    let export = Export::new("d", "", false, device).unwrap().described_by(Arc::clone(&description));
    let export = Exports::new().add(export).unwrap();
    description.set("a disk");
    assert_eq!(&*export.description(), "a disk");
    let too_long = Export::new("d", "d".repeat(4097), false, Arc::clone(export.device()));
    assert!(too_long.is_err_and(|e| e.to_string().contains("at most 4096 bytes")));
}

#[test]
fn a_device_that_does_not_open_is_an_answer_and_not_the_end() {
    let (mut handshake, exports, mut out) = (ServerHandshake::default(), exports(), Vec::new());
    let bytes = script(&[NbdOption::Go(request("disk", &[]))]);
    let mut input = &bytes[..];
    let mut open = |_: &Export| Err(DeviceControlError::new(ENXIO, "the disk is gone"));
    while let HandshakeStepOutcome::Answered = handshake.step(&mut input, &mut out, &exports, &mut open) {}
    assert_eq!(replies(&out), [(OPT_GO, REP_ERR_PLATFORM, b"the disk is gone".to_vec())]);
}

fn any_name() -> impl Strategy<Value = String> + Clone {
    prop_oneof![Just("disk".to_owned()), Just(String::new()), "\\PC{0,20}"]
}

fn any_option() -> impl Strategy<Value = NbdOption> {
    let name = any_name();
    let info = (any_name(), prop::collection::vec(0u16..8, 0..8))
        .prop_map(|(name, infos)| ExportInfoRequest { name, infos });
    prop_oneof![
        name.prop_map(NbdOption::ExportName),
        Just(NbdOption::Abort),
        Just(NbdOption::List),
        Just(NbdOption::StartTls),
        Just(NbdOption::StructuredReply),
        Just(NbdOption::ExtendedHeaders),
        info.clone().prop_map(NbdOption::Info),
        info.prop_map(NbdOption::Go),
        (
            any_name(),
            prop::collection::vec(
                prop_oneof![Just("base:".to_owned()), Just("base:allocation".to_owned()), "\\PC{0,9}"],
                0..6
            ),
            any::<bool>()
        )
            .prop_map(|(name, queries, list)| {
                let request = MetaContextRequest { name, queries };
                if list { NbdOption::ListMetaContext(request) } else { NbdOption::SetMetaContext(request) }
            }),
        (0u32..20, prop::collection::vec(any::<u8>(), 0..40))
            .prop_map(|(option, data)| NbdOption::Unknown { option, data }),
    ]
}

proptest! {
    /// For any input there is no panic, every call makes progress, and the output is proportional
    /// to the input.
    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..400), head in any::<bool>()) {
        let mut input = if head { script(&[]) } else { Vec::new() };
        input.extend(bytes);
        let mut out = Vec::new();
        answer_to(&input, &mut out);
        prop_assert!(out.len() <= 256 + input.len() * 64, "{} bytes for {}", out.len(), input.len());
    }

    /// Valid options with one changed byte. If they are cut into pieces, the result is the same.
    #[test]
    fn options_bent_and_cut(
        options in prop::collection::vec(any_option(), 0..12),
        at in any::<prop::sample::Index>(), to in any::<u8>(), bend in any::<bool>(),
        piece in 1usize..50,
    ) {
        let mut bytes = script(&options);
        if bend {
            let at = at.index(bytes.len());
            bytes[at] = to;
        }
        let mut whole = Vec::new();
        let end = answer_to(&bytes, &mut whole);
        prop_assert!(whole.len() <= 256 + options.len() * 4096);

        let (mut handshake, exports, mut cut) = (ServerHandshake::default(), exports(), Vec::new());
        let mut ended = false;
        for mut input in bytes.chunks(piece) {
            while !ended {
                match handshake.step(&mut input, &mut cut, &exports, &mut |_| Ok(())) {
                    HandshakeStepOutcome::Answered => {}
                    HandshakeStepOutcome::More => break,
                    HandshakeStepOutcome::Begin(_)
                    | HandshakeStepOutcome::StartTls(_)
                    | HandshakeStepOutcome::Close => ended = true,
                }
            }
        }
        prop_assert_eq!(cut, whole);
        prop_assert_eq!(ended, !matches!(end, HandshakeStepOutcome::More));
    }
}
