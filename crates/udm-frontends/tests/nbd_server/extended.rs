//! Extended headers: each command and its chunk, lengths over 4 GiB, payloads that the server does
//! not take, and block status of some contexts.

use crate::ServerFixture;
use crate::disk::{CompletionOrder, TestDisk, pattern};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use udm_core::Device;
use udm_frontends::nbd::{Export, NbdHandover};
use udm_wire::nbd::{
    BlockStatusPayload, ClientFlags, CommandFlags, EINVAL, ENOSPC, ExportFlags, ExportInfoItem,
    ExportInfoRequest, ExtendedChunkHeader, GREETING_SIZE, MetaContextRequest, NbdCommand, NbdHeaderStyle,
    NbdOption, NbdRequestHeader, OPTION_REPLY_HEADER_SIZE, OptionReply, OptionReplyHeader, ReplyChunk,
    encode_client_flags,
};

const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;
const NONE: CommandFlags = CommandFlags::empty();
const PAYLOAD: CommandFlags = CommandFlags::PAYLOAD_LEN;
const HOLE: u64 = 3;

/// A client that has negotiated extended headers and, if it wants, the context `base:allocation`.
struct ExtendedClient {
    stream: UnixStream,
    cookie: u64,
    /// Flags of the export.
    flags: ExportFlags,
    /// Ids of the chosen contexts.
    contexts: Vec<u32>,
}

#[derive(Debug, PartialEq, Eq)]
enum ReceivedReply {
    Done,
    Data(Vec<u8>),
    /// Lengths and flags.
    Status(Vec<(u64, u64)>),
    Error(u32),
}

impl ExtendedClient {
    fn new(world: &ServerFixture, export: &str, has_contexts: bool) -> ExtendedClient {
        let (mut stream, socket) = UnixStream::pair().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        world.server.adopt(socket.into()).unwrap();
        let mut bytes = encode_client_flags(ClientFlags::FIXED_NEWSTYLE).to_vec();
        NbdOption::ExtendedHeaders.encode(&mut bytes);
        if has_contexts {
            let queries = vec!["base:allocation".to_owned()];
            NbdOption::SetMetaContext(MetaContextRequest { name: export.into(), queries }).encode(&mut bytes);
        }
        NbdOption::Go(ExportInfoRequest { name: export.into(), infos: vec![] }).encode(&mut bytes);
        stream.write_all(&bytes).unwrap();
        stream.read_exact(&mut [0; GREETING_SIZE]).unwrap();
        let mut client = ExtendedClient { stream, cookie: 0, flags: ExportFlags::empty(), contexts: vec![] };
        let mut acks = 2 + usize::from(has_contexts);
        while acks > 0 {
            match client.option_reply() {
                OptionReply::Ack => acks -= 1,
                OptionReply::MetaContext { id, .. } => client.contexts.push(id),
                OptionReply::Info(ExportInfoItem::Export { flags, .. }) => client.flags = flags,
                OptionReply::Info(_) => {}
                other => panic!("{other:?}"),
            }
        }
        client
    }

    fn option_reply(&mut self) -> OptionReply {
        let mut head = [0; OPTION_REPLY_HEADER_SIZE];
        self.stream.read_exact(&mut head).unwrap();
        let header = OptionReplyHeader::decode(&head).unwrap();
        let mut data = vec![0; header.len as usize];
        self.stream.read_exact(&mut data).unwrap();
        OptionReply::decode(header.reply, &data).unwrap()
    }

    fn send(&mut self, command: NbdCommand, flags: CommandFlags, offset: u64, len: u64, payload: &[u8]) {
        self.cookie += 1;
        let request = NbdRequestHeader { flags, command, cookie: self.cookie, offset, len };
        self.stream.write_all(&[&request.encode_extended()[..], payload].concat()).unwrap();
    }

    /// The reply to the last request, which has one chunk.
    fn receive(&mut self, at: u64) -> ReceivedReply {
        let mut head = [0; ExtendedChunkHeader::SIZE];
        self.stream.read_exact(&mut head).unwrap();
        let header = ExtendedChunkHeader::decode(&head).unwrap();
        assert_eq!((header.cookie, header.offset, header.is_done()), (self.cookie, at, true));
        let mut payload = vec![0; header.len as usize];
        self.stream.read_exact(&mut payload).unwrap();
        match ReplyChunk::decode_extended(header, &payload).unwrap() {
            ReplyChunk::None => ReceivedReply::Done,
            ReplyChunk::Data { offset, data } if offset == at => ReceivedReply::Data(data.to_vec()),
            ReplyChunk::BlockStatusExt { descriptors, .. } => {
                ReceivedReply::Status(descriptors.iter().collect())
            }
            ReplyChunk::Error { error, .. } => ReceivedReply::Error(error),
            other => panic!("{other:?}"),
        }
    }

    fn ask(
        &mut self,
        command: NbdCommand,
        flags: CommandFlags,
        offset: u64,
        len: u64,
        payload: &[u8],
    ) -> ReceivedReply {
        self.send(command, flags, offset, len, payload);
        self.receive(offset)
    }

    fn plain(&mut self, command: NbdCommand, offset: u64, len: u64) -> ReceivedReply {
        self.ask(command, NONE, offset, len, &[])
    }

    /// A `BLOCK_STATUS` about the contexts with these ids.
    fn status_of(&mut self, offset: u64, len: u64, ids: &[u32]) -> ReceivedReply {
        let payload = BlockStatusPayload { len, contexts: ids.to_vec() }.encode();
        self.ask(NbdCommand::BlockStatus, PAYLOAD, offset, payload.len() as u64, &payload)
    }

    /// True if the server has closed the connection without another reply.
    fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => rest.is_empty(),
            Err(e) => e.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

/// Adds an export of the device of `uri`.
fn add_export(world: &ServerFixture, name: &str, uri: &str) {
    let uri = udm_wire::uri::parse_device_uri(uri).unwrap();
    let device: Arc<dyn Device> = udm_backends::open_standalone_device(&uri).unwrap();
    world.exports.add(Export::new(name, "", false, device).unwrap()).unwrap();
}

#[test]
fn every_reply_is_an_extended_chunk() {
    let world = ServerFixture::new(TestDisk::new(4 * MIB, CompletionOrder::Shuffled));
    let mut c = ExtendedClient::new(&world, "disk", false);
    assert!(c.flags.contains(ExportFlags::SEND_DF));
    assert!(!c.flags.contains(ExportFlags::BLOCK_STATUS_PAYLOAD), "no context was chosen");
    for move_to_other_core in [false, true] {
        if move_to_other_core {
            world.server.rotate();
        }
        let expected: Vec<u8> = (8192..8192 + 700).map(pattern).collect();
        assert_eq!(c.plain(NbdCommand::Read, 8192, 700), ReceivedReply::Data(expected));
        let write = [9; 1000];
        assert_eq!(c.ask(NbdCommand::Write, PAYLOAD, 513, 1000, &write), ReceivedReply::Done);
        assert_eq!(
            c.ask(NbdCommand::Write, PAYLOAD | CommandFlags::FUA, 513, 1000, &write),
            ReceivedReply::Done
        );
        assert_eq!(
            c.ask(NbdCommand::Read, CommandFlags::DF, 513, 1000, &[]),
            ReceivedReply::Data(write.to_vec())
        );
        for (command, len) in
            [(NbdCommand::Trim, 4096), (NbdCommand::WriteZeroes, 4096), (NbdCommand::Cache, 4096)]
        {
            assert_eq!(c.plain(command, 65536, len), ReceivedReply::Done, "{command:?}");
        }
        assert_eq!(c.plain(NbdCommand::Flush, 0, 0), ReceivedReply::Done);
        assert_eq!(c.plain(NbdCommand::Read, 4 * MIB - 512, 512), ReceivedReply::Error(udm_wire::nbd::EIO));
        assert_eq!(c.plain(NbdCommand::Read, 4 * MIB, 512), ReceivedReply::Error(EINVAL));
        assert_eq!(c.plain(NbdCommand::BlockStatus, 0, 512), ReceivedReply::Error(EINVAL));
        assert_eq!(c.plain(NbdCommand::Other(99), 0, 512), ReceivedReply::Error(EINVAL));
    }
    // Long payloads are received outside of the slab.
    let long = vec![7; 2 * MIB as usize];
    assert_eq!(c.ask(NbdCommand::Write, PAYLOAD, 512, 2 * MIB, &long), ReceivedReply::Done);
    assert_eq!(c.plain(NbdCommand::Read, 512, 2 * MIB), ReceivedReply::Data(long));
    c.send(NbdCommand::Disconnect, NONE, 0, 0, &[]);
    assert!(c.is_closed());
    world.wait_until_empty();
    world.end();
}

/// A client that is handed over keeps its headers and contexts.
#[test]
fn a_detached_client_keeps_its_headers() {
    let world = ServerFixture::new(TestDisk::new(MIB, CompletionOrder::AtOnce));
    let mut c = ExtendedClient::new(&world, "disk", true);
    assert_eq!(c.plain(NbdCommand::Flush, 0, 0), ReceivedReply::Done);
    let handover = NbdHandover::start(&world.server);
    let end = Instant::now() + Duration::from_secs(20);
    let detached = loop {
        match handover.detached().next() {
            Some(client) => break client,
            None => assert!(Instant::now() < end, "the client is not detached"),
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    drop(handover);
    assert_eq!(detached.header_style, NbdHeaderStyle::Extended);
    world.server.attach_detached(detached).unwrap();
    let expected: Vec<u8> = (0..512).map(pattern).collect();
    assert_eq!(c.plain(NbdCommand::Read, 0, 512), ReceivedReply::Data(expected));
    let id = c.contexts[0];
    assert_eq!(c.status_of(8192, 512, &[id]), ReceivedReply::Status(vec![(512, HOLE)]));
    drop(c);
    world.wait_until_empty();
    world.end();
}

#[test]
fn lengths_over_four_gib() {
    let world = ServerFixture::new(TestDisk::new(MIB, CompletionOrder::AtOnce));
    add_export(&world, "large", "null:size=8T");
    add_export(&world, "trim", "null:size=64G,memory_backed=1,discard=1");
    let mut c = ExtendedClient::new(&world, "large", true);
    assert_eq!(c.plain(NbdCommand::WriteZeroes, TIB + 1, 6 * TIB), ReceivedReply::Done);
    assert_eq!(c.plain(NbdCommand::Cache, 3 * TIB, (4 << 30) + 1), ReceivedReply::Done);
    assert_eq!(
        c.plain(NbdCommand::BlockStatus, 512, 8 * TIB - 512),
        ReceivedReply::Status(vec![(8 * TIB - 512, 0)])
    );
    for command in [NbdCommand::WriteZeroes, NbdCommand::Cache, NbdCommand::BlockStatus] {
        let beyond = if command == NbdCommand::WriteZeroes { ENOSPC } else { EINVAL };
        for (offset, len) in [(1, 8 * TIB), (8 * TIB - 1, u64::MAX), (0, u64::MAX)] {
            assert_eq!(c.plain(command, offset, len), ReceivedReply::Error(beyond), "{command:?} {len}");
        }
    }
    // Reads and writes keep the limit of a payload.
    assert_eq!(c.plain(NbdCommand::Read, 0, 64 * MIB + 1), ReceivedReply::Error(EINVAL));
    assert_eq!(c.plain(NbdCommand::Read, 0, 5 << 30), ReceivedReply::Error(EINVAL));
    assert!(
        matches!(c.plain(NbdCommand::Read, 7 * TIB, 64 * MIB), ReceivedReply::Data(data) if data.len() == 64 << 20)
    );
    // The bytes of a request are counted in full.
    let counters = world.exports.get("large").unwrap().served();
    let zeroed = counters.ops[udm_core::Op::WriteZeroes as usize].bytes;
    assert_eq!(zeroed, 6 * TIB);

    let mut t = ExtendedClient::new(&world, "trim", true);
    let (first, last) = (4096, 60 << 30);
    for at in [first, last] {
        assert_eq!(t.ask(NbdCommand::Write, PAYLOAD, at, 512, &[5; 512]), ReceivedReply::Done);
    }
    assert_eq!(t.plain(NbdCommand::Trim, first, (60 << 30) - first), ReceivedReply::Done);
    assert_eq!(t.plain(NbdCommand::Read, first, 512), ReceivedReply::Data(vec![0; 512]));
    assert_eq!(t.plain(NbdCommand::Read, last, 512), ReceivedReply::Data(vec![5; 512]));
    // A device may answer for a part of the range.
    let (mut at, mut runs) = (0, Vec::new());
    while at < 64 << 30 {
        let ReceivedReply::Status(found) = t.plain(NbdCommand::BlockStatus, at, (64 << 30) - at) else {
            panic!("no status")
        };
        at += found.iter().map(|run| run.0).sum::<u64>();
        runs.extend(found);
    }
    let holes: u64 = runs.iter().filter(|run| run.1 == HOLE).map(|run| run.0).sum();
    assert!(at == 64 << 30 && holes > 63 << 30, "{holes} of {at} bytes are holes");
    drop((c, t));
    world.wait_until_empty();
    world.end();
}

#[test]
fn payloads_that_the_server_does_not_take() {
    let world = ServerFixture::new(TestDisk::new(MIB, CompletionOrder::AtOnce));
    let mut c = ExtendedClient::new(&world, "disk", false);
    let junk = vec![0xee; 300 << 10];
    for command in [
        NbdCommand::Read,
        NbdCommand::Trim,
        NbdCommand::WriteZeroes,
        NbdCommand::Cache,
        NbdCommand::Flush,
        NbdCommand::BlockStatus,
        NbdCommand::Other(99),
    ] {
        for len in [1, 12, junk.len()] {
            assert_eq!(c.ask(command, PAYLOAD, 0, len as u64, &junk[..len]), ReceivedReply::Error(EINVAL));
        }
    }
    // A write without the flag has no payload, and is refused as one without data is.
    assert_eq!(c.plain(NbdCommand::Write, 0, 512), ReceivedReply::Error(EINVAL));
    assert_eq!(c.ask(NbdCommand::Write, PAYLOAD, 0, 0, &[]), ReceivedReply::Error(EINVAL));
    assert_eq!(c.ask(NbdCommand::Write, PAYLOAD, MIB, 512, &junk[..512]), ReceivedReply::Error(ENOSPC));
    let untouched: Vec<u8> = (0..512).map(pattern).collect();
    assert_eq!(c.plain(NbdCommand::Read, 0, 512), ReceivedReply::Data(untouched));
    drop(c);
    // More than the announced maximum ends the connection, whatever the command.
    for command in [NbdCommand::Write, NbdCommand::Trim] {
        for len in [64 * MIB + 1, 1 << 32, u64::MAX] {
            let mut c = ExtendedClient::new(&world, "disk", false);
            c.send(command, PAYLOAD, 0, len, &[]);
            assert!(c.is_closed(), "{command:?} {len}");
        }
    }
    // Headers of the other style.
    let mut c = ExtendedClient::new(&world, "disk", false);
    let request = NbdRequestHeader { flags: NONE, command: NbdCommand::Read, cookie: 1, offset: 0, len: 512 };
    c.stream.write_all(&[&request.encode()[..], &[0; 4]].concat()).unwrap();
    assert!(c.is_closed());
    world.wait_until_empty();
    world.end();
}

#[test]
fn a_block_status_of_some_contexts() {
    let world = ServerFixture::new(TestDisk::new(MIB, CompletionOrder::AtOnce));
    let mut c = ExtendedClient::new(&world, "disk", true);
    assert!(c.flags.contains(ExportFlags::BLOCK_STATUS_PAYLOAD));
    let [id] = c.contexts[..] else { panic!("{:?}", c.contexts) };
    let expected = ReceivedReply::Status(vec![(8192, 0), (4096, HOLE), (8192, 0)]);
    assert_eq!(c.plain(NbdCommand::BlockStatus, 0, 20_480), expected);
    assert_eq!(c.status_of(0, 20_480, &[id]), expected);
    for ids in [&[][..], &[id + 1], &[id, id]] {
        assert_eq!(c.status_of(0, 20_480, ids), ReceivedReply::Error(EINVAL), "{ids:?}");
    }
    for (offset, len) in [(0, 0), (0, MIB + 1), (MIB, 1), (1, u64::MAX)] {
        assert_eq!(c.status_of(offset, len, &[id]), ReceivedReply::Error(EINVAL), "{offset} {len}");
    }
    let query = BlockStatusPayload { len: 512, contexts: vec![id] }.encode();
    let (flags, len) = (PAYLOAD | CommandFlags::REQ_ONE, query.len() as u64);
    assert_eq!(
        c.ask(NbdCommand::BlockStatus, flags, 8192, len, &query),
        ReceivedReply::Status(vec![(512, HOLE)])
    );
    let short = ReceivedReply::Error(EINVAL);
    assert_eq!(c.ask(NbdCommand::BlockStatus, PAYLOAD, 0, 11, &query[..11]), short);
    // In pieces, as the network may deliver it.
    c.send(NbdCommand::BlockStatus, PAYLOAD, 8192, len, &query[..5]);
    std::thread::sleep(Duration::from_millis(20));
    c.stream.write_all(&query[5..]).unwrap();
    assert_eq!(c.receive(8192), ReceivedReply::Status(vec![(512, HOLE)]));
    // A client that leaves in the middle.
    c.send(NbdCommand::BlockStatus, PAYLOAD, 8192, len, &query[..5]);
    drop(c);
    world.wait_until_empty();
    world.end();
}
