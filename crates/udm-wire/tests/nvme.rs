//! The codec of NVMe/TCP: recorded bytes, and properties for any input.

use proptest::prelude::*;
use std::net::SocketAddr;
use udm_wire::fuzz::{fuzz_nvme_pdu, fuzz_nvme_peer_record};
use udm_wire::nvme::{
    AnaGroup, AnaState, AsyncEvent, Completion, ConnectCommand, ConnectData, ControllerInstance,
    ControllerKind, CrossControllerReset, CrossControllerResetEntry, CrossControllerResetStatus,
    DISCOVERY_NQN, DataPdu, DataPointer, DiscoveryEntry, FabricsCommand, FatalError, FenceCapabilities,
    IdentifyController, InitializeRequest, InitializeResponse, LogPage, LogPageRequest, NvmeCommand,
    NvmeStatus, PduHeader, PduLimits, PduType, QueueCounts, RwFlags, RwRequest, TermRequest,
    decode_cross_controller_reset_log, encode_ana_log, encode_c2h_data, encode_capsule_command,
    encode_capsule_response, encode_changed_namespaces, encode_cross_controller_reset_log,
    encode_discovery_log, encode_h2c_data, encode_r2t,
};

const PLAIN: PduLimits =
    PduLimits { header_digest: false, data_digest: false, capsule_data_max: 16 << 10, data_max: 1 << 20 };
const DIGESTS: PduLimits = PduLimits { header_digest: true, data_digest: true, ..PLAIN };

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

/// What Linux 6.12 sends first, without and with digests.
#[test]
fn the_first_pdus() {
    for (digests, flags) in [(false, 0), (true, 3)] {
        let mut bytes = [0; 128];
        bytes[..16].copy_from_slice(&hex("00 00 80 00 80000000 0000 00 00 00000000"));
        bytes[11] = flags;
        let request = InitializeRequest::decode(&bytes).unwrap();
        let expected = InitializeRequest {
            version: 0,
            host_alignment: 0,
            header_digest: digests,
            data_digest: digests,
            max_r2t: 0,
        };
        assert_eq!((request, request.encode()), (expected, bytes));
    }
    let response = InitializeResponse {
        controller_alignment: 0,
        header_digest: true,
        data_digest: false,
        max_h2c_data: 1 << 20,
    };
    let bytes = response.encode();
    assert_eq!(bytes[..16], hex("01 00 80 00 80000000 0000 00 01 00001000"));
    assert_eq!(InitializeResponse::decode(&bytes), Some(response));
}

/// A Connect command as Linux 6.12 sends it: admin queue of 32 entries, 1024 bytes in the capsule,
/// a keep-alive timeout of 5 s.
#[test]
fn a_connect_command_of_linux() {
    let bytes = hex("04 00 48 48 48040000 \
         7f 40 0000 01000000 00000000 00000000 0000000000000000 0000000000000000 00040000 000000 01 \
         0000 0000 1f00 00 00 88130000 0000000000000000 00000000");
    let header = PduHeader::decode(bytes.first_chunk().unwrap(), &PLAIN).unwrap();
    assert_eq!((header.kind, header.header_len, header.data_len), (PduType::NvmeCommand, 72, 1024));
    let command = NvmeCommand::from_bytes(*bytes[8..].first_chunk().unwrap());
    assert_eq!(command.data_pointer(), DataPointer::InCapsule { offset: 0, len: 1024 });
    let connect =
        ConnectCommand { format: 0, queue: 0, queue_size: 31, no_flow_control: false, keep_alive_ms: 5000 };
    assert_eq!(FabricsCommand::decode(&command), FabricsCommand::Connect(connect));
    assert_eq!(connect.encode(0), command);
    let mut out = [0; 128];
    assert_eq!(encode_capsule_command(&mut out, &command, Some(1024), &PLAIN), 72);
    assert_eq!(out[..72], bytes);
}

/// Headers of all PDUs that a controller sends, and of data from a host.
#[test]
fn headers() {
    let mut out = [0xee; 128];
    let completion =
        Completion { result: 5, sq_head: 3, id: 0x1234, status: NvmeStatus::LBA_OUT_OF_RANGE.permanent() };
    let len = encode_capsule_response(&mut out, &completion, &PLAIN);
    assert_eq!(out[..len], hex("05 00 18 00 18000000 0500000000000000 0300 0000 3412 0081"));
    let data = DataPdu { command: 7, tag: 0, offset: 0, len: 4096 };
    let len = encode_c2h_data(&mut out, &data, true, 0, &PLAIN);
    assert_eq!(out[..len], hex("07 0c 18 18 18100000 0700 0000 00000000 00100000 00000000"));
    let len = encode_c2h_data(&mut out, &data, false, 15, &DIGESTS);
    assert_eq!((len, &out[..8]), (64, &hex("07 07 18 40 44100000")[..]), "padded to 64 bytes");
    assert_eq!(out[28..64], [0; 36]);
    let r2t = DataPdu { command: 7, tag: 9, offset: 0, len: 65536 };
    let len = encode_r2t(&mut out, &r2t, &PLAIN);
    assert_eq!(out[..len], hex("09 00 18 00 18000000 0700 0900 00000000 00000100 00000000"));
    let len = encode_h2c_data(&mut out, &r2t, true, &DIGESTS);
    assert_eq!((len, &out[..8]), (28, &hex("06 07 18 1c 20000100")[..]));
    let term = TermRequest { error: FatalError::SequenceError as u16, at: 2 };
    assert_eq!(
        term.encode_c2h(&[1, 2, 3]),
        hex("03 00 18 00 1b000000 0200 02000000 00000000000000000000 010203")
    );
    assert_eq!(term.encode_c2h(&[0; 500]).len(), 24 + 128);
}

#[test]
fn commands() {
    let mut bytes = [0; 64];
    bytes[40..52].copy_from_slice(&hex("0800000001000000 07000040"));
    let range = RwRequest::decode(&NvmeCommand::from_bytes(bytes));
    assert_eq!((range.start, range.blocks), (1 << 32 | 8, 8));
    assert!(range.flags().contains(RwFlags::FUA) && !range.flags().contains(RwFlags::LIMITED_RETRY));
    bytes[40..56].copy_from_slice(&hex("0c81ff03 02000000 00100000 00000000"));
    let page = LogPageRequest::decode(&NvmeCommand::from_bytes(bytes));
    let expected = LogPageRequest {
        page: LogPage::Ana,
        specific: 1,
        retains_event: true,
        len: ((2 << 16 | 0x3ff) + 1) * 4,
        offset: 4096,
    };
    assert_eq!(page, expected);
    assert_eq!(QueueCounts::decode(0x0003_0001), QueueCounts { submission: 2, completion: 4 });
    assert_eq!(QueueCounts::encode(2), 0x0001_0001);
    let results = AsyncEvent::ALL.map(AsyncEvent::result);
    assert_eq!(results, [0x001e_f402, 0x0004_0002, 0x000c_0302, 0x0070_f002]);
}

/// The command and the log page, from figures 522, 304 and 305 of the base specification 2.3.
#[test]
fn cross_controller_resets() {
    let impacted = ControllerInstance { id: 0x0102, uniquifier: 0x33, random: 0x1122_3344_5566_7788 };
    let command = CrossControllerReset { impacted }.encode(7);
    assert_eq!(command.bytes()[..4], hex("38 40 0700"));
    assert_eq!(command.bytes()[40..56], hex("02013300 00000000 88776655 44332211"));
    assert_eq!(CrossControllerReset::decode(&command).impacted, impacted);
    let entry = |impacted, status| CrossControllerResetEntry { impacted, uniquifier: 9, source: 3, status };
    let entries = [
        entry(0x0102, CrossControllerResetStatus::InProgress),
        entry(2, CrossControllerResetStatus::Succeeded),
        entry(3, CrossControllerResetStatus::Failed),
    ];
    let page = encode_cross_controller_reset_log(&entries);
    assert_eq!(page, hex("0300000000000000 0201090003000003 0200090003000103 0300090003000203"));
    assert_eq!(decode_cross_controller_reset_log(&page), entries);
    assert_eq!(decode_cross_controller_reset_log(&page[..15]), [], "an entry that was not read");
    assert_eq!(decode_cross_controller_reset_log(&page[..7]), []);
    assert_eq!(encode_cross_controller_reset_log(&[entries[0]; 600]).len(), 4096);
}

/// Offsets of fields that hosts read, from the figures of the specification.
#[test]
fn structures() {
    let controller = IdentifyController {
        kind: ControllerKind::Io,
        serial: "abc",
        model: "udm",
        firmware: "1",
        subsystem: "nqn.2014-08.org.example:a",
        id: 0x1234,
        version: 0x0001_0400,
        transfer_max_log2: 8,
        capsule_data_max: 16 << 10,
        commands_max: 128,
        namespaces_max: 1024,
        event_requests_max: 4,
        ana_transition_max: 10,
        ana_groups: 1,
        keep_alive_granularity: 10,
        fence: FenceCapabilities {
            instance: Some(ControllerInstance { id: 0x1234, uniquifier: 5, random: 0x0102_0304_0506_0708 }),
            resets_max: 4,
            quiesce_time_ms: 30_000,
        },
    };
    let bytes = controller.encode();
    assert_eq!((bytes[135], &bytes[136..144]), (5, &hex("0807060504030201")[..]));
    assert_eq!((bytes[1807], &bytes[386..388], bytes[94]), (4, &hex("3075")[..], 0x10));
    assert_eq!(FenceCapabilities::decode(&bytes), controller.fence);
    assert_eq!(&bytes[4..12], b"abc     ");
    assert_eq!((bytes[76], bytes[77], &bytes[78..80]), (0b1011, 8, &[0x34, 0x12][..]));
    assert_eq!((&bytes[1792..1796], &bytes[1796..1800]), (&hex("04040000")[..], &hex("01000000")[..]));
    assert_eq!(&bytes[768..793], b"nqn.2014-08.org.example:a");
    let discovery = IdentifyController { kind: ControllerKind::Discovery, ..controller }.encode();
    assert_eq!((discovery[111], discovery[76], &discovery[516..520]), (2, 0b0011, &[0; 4][..]));

    let group = AnaGroup { id: 1, changes: 3, state: AnaState::NonOptimized, namespaces: vec![1, 5] };
    let ana = encode_ana_log(4, std::slice::from_ref(&group), false);
    assert_eq!(ana[..16], hex("0400000000000000 0100 000000000000"));
    assert_eq!(ana[16..48], hex("01000000 02000000 0300000000000000 02 000000000000000000000000000000"));
    assert_eq!(ana[48..], hex("01000000 05000000"));
    assert_eq!(encode_ana_log(4, &[group], true).len(), 48);
    let many: Vec<u32> = (1..=1025).collect();
    assert_eq!(encode_changed_namespaces(&many)[..8], hex("ffffffff 00000000"));
    assert_eq!(encode_changed_namespaces(&many[..2])[..12], hex("01000000 02000000 00000000"));

    let address: SocketAddr = "[2001:db8::1]:4420".parse().unwrap();
    let entry = DiscoveryEntry {
        is_discovery: true,
        port_id: 1,
        address,
        subsystem: DISCOVERY_NQN.into(),
        admin_queue_max: 128,
    };
    let log = encode_discovery_log(2, &[entry]);
    assert_eq!((log.len(), &log[..16]), (2048, &hex("0200000000000000 0100000000000000")[..]));
    assert_eq!(log[1024..1034], hex("03 02 03 02 0100 ffff 8000"));
    assert!(log[1056..].starts_with(b"4420 ") && log[1536..].starts_with(b"2001:db8::1 "));
    assert!(log[1280..].starts_with(DISCOVERY_NQN.as_bytes()));
}

/// A length from outside never exceeds the limits of the connection.
#[test]
fn lengths_are_bounded() {
    let decode = |text: &str| PduHeader::decode(hex(text).first_chunk().unwrap(), &PLAIN);
    for (text, expected) in [
        ("04 00 48 48 48400000", Ok(16 << 10)),
        ("04 00 48 48 49400000", Err(FatalError::DataLimitExceeded)),
        ("04 00 48 48 ffffffff", Err(FatalError::DataLimitExceeded)),
        ("06 00 18 18 18001000", Ok(1 << 20)),
        ("06 00 18 18 19001000", Err(FatalError::DataLimitExceeded)),
        ("06 00 18 18 18000000", Err(FatalError::InvalidHeaderField)),
        ("06 00 18 00 20000000", Err(FatalError::InvalidHeaderField)),
        ("04 00 48 48 00000000", Err(FatalError::InvalidHeaderField)),
        ("02 00 18 00 98000000", Ok(128)),
        ("02 00 18 00 99000000", Err(FatalError::InvalidHeaderField)),
        ("02 00 18 00 00000000", Err(FatalError::InvalidHeaderField)),
    ] {
        assert_eq!(decode(text).map(|pdu| pdu.data_len).map_err(|error| error.error), expected, "{text}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_decoded_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..1200)) {
        fuzz_nvme_pdu(&bytes);
    }

    /// Records of servers in which a few bytes are wrong.
    #[test]
    fn damaged_peer_records_are_read_or_refused(
        first in 0..70_000_u32,
        path in "/[ -~]{0,40}",
        changes in prop::collection::vec((0..200_usize, any::<u8>()), 0..4),
        rest in "(remote [ -~]{0,20}\n?){0,2}",
    ) {
        let text = format!(
            "udm-nvme-peer 1\nsubsystem nqn.2026-11.org.example:disks\nboot-id b\ninode 8 7\ncontrollers \
             {first} 65000\ncontrol {path}\n{rest}"
        );
        let mut bytes = text.into_bytes();
        for (at, byte) in changes {
            let len = bytes.len();
            bytes[at % len] = byte;
        }
        fuzz_nvme_peer_record(&bytes);
    }

    /// PDUs in which a few bytes are wrong.
    #[test]
    fn damaged_pdus_are_decoded_or_refused(
        is_data: bool,
        digests: bool,
        len in 1..9000_u32,
        changes in prop::collection::vec((0..80_usize, any::<u8>()), 0..4),
    ) {
        let limits = if digests { DIGESTS } else { PLAIN };
        let mut out = [0; 128];
        let data = DataPdu { command: 1, tag: 2, offset: 0, len };
        match is_data {
            true => encode_h2c_data(&mut out, &data, true, &limits),
            false => encode_capsule_command(&mut out, &NvmeCommand::from_bytes([1; 64]), Some(len), &limits),
        };
        for (at, byte) in changes {
            out[at] = byte;
        }
        fuzz_nvme_pdu(&out);
    }

    #[test]
    fn pdus_read_back(
        (command, tag, offset, len) in (any::<u16>(), any::<u16>(), any::<u32>(), 1..=1_u32 << 20),
        alignment in 0..32_u8,
        header_digest: bool,
        data_digest: bool,
    ) {
        let limits = PduLimits { header_digest, data_digest, ..PLAIN };
        let mut out = [0; 128];
        let data = DataPdu { command, tag, offset, len };
        for kind in [PduType::ControllerData, PduType::HostData] {
            let header_len = match kind {
                PduType::HostData => encode_h2c_data(&mut out, &data, true, &limits),
                _ => encode_c2h_data(&mut out, &data, false, alignment, &limits),
            };
            let pdu = PduHeader::decode(out.first_chunk().unwrap(), &limits).unwrap();
            prop_assert_eq!((pdu.kind, pdu.header_len, pdu.data_len), (kind, header_len, len));
            prop_assert_eq!((pdu.is_last, pdu.has_data_digest), (true, data_digest));
            prop_assert_eq!(DataPdu::decode(&out), data);
        }
    }

    #[test]
    fn completions_read_back(result: u64, sq_head: u16, id: u16, status in 0..0x8000_u16) {
        let completion = Completion { result, sq_head, id, status: NvmeStatus(status) };
        prop_assert_eq!(Completion::decode(&completion.encode()), completion);
    }

    #[test]
    fn names_read_back(subsystem in "nqn\\.20[0-9]{2}-[01][0-9]\\.[a-z:.]{1,60}", host_id: [u8; 16], controller: u16) {
        let data = ConnectData { host_id, controller, host: subsystem.clone(), subsystem };
        prop_assert_eq!(ConnectData::decode(&data.encode()), Ok(data));
    }
}
