//! A warm connection allocates nothing: a counting allocator sees no allocation in server, runtime
//! or device over many requests.

mod warm;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use std::alloc::System;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use udm_frontends::nbd::{Export, Exports, NbdServer, NbdServerLimits};
use udm_runtime::{Runtime, RuntimeOptions};
use udm_wire::nbd::{
    ClientFlags, CommandFlags, ExportInfoRequest, ExtendedChunkHeader, NbdCommand, NbdOption,
    NbdRequestHeader, encode_client_flags,
};

#[global_allocator]
static ALLOC: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const DEPTH: usize = 32;

/// A round of `DEPTH` requests of `len` bytes each, which itself allocates nothing.
struct RequestRound {
    requests: Vec<u8>,
    replies: Vec<u8>,
}

impl RequestRound {
    fn new(command: NbdCommand, len: usize, is_extended: bool) -> RequestRound {
        let (sent, got) = if command == NbdCommand::Write { (len, 0) } else { (0, len) };
        let mut requests = Vec::new();
        for cookie in 0..DEPTH as u64 {
            let mut flags = CommandFlags::empty();
            flags.set(CommandFlags::PAYLOAD_LEN, is_extended && sent > 0);
            let (offset, len) = (cookie * len as u64, len as u64);
            let request = NbdRequestHeader { flags, command, cookie, offset, len };
            match is_extended {
                true => requests.extend_from_slice(&request.encode_extended()),
                false => requests.extend_from_slice(&request.encode()),
            }
            requests.resize(requests.len() + sent, 3);
        }
        let header = match (is_extended, got) {
            (false, _) => 16,
            (true, 0) => ExtendedChunkHeader::SIZE,
            (true, _) => ExtendedChunkHeader::SIZE + 8,
        };
        RequestRound { requests, replies: vec![0; DEPTH * (header + got)] }
    }

    fn run(&mut self, stream: &mut UnixStream) {
        stream.write_all(&self.requests).unwrap();
        stream.read_exact(&mut self.replies).unwrap();
    }
}

#[test]
fn a_warm_connection_allocates_nothing() {
    check_allocations(false);
    check_allocations(true);
}

fn check_allocations(is_extended: bool) {
    let options = RuntimeOptions { cpus: vec![None], poll: false, spin_max: Duration::from_micros(20) };
    let runtime = Runtime::start(&options).unwrap();
    let exports = Arc::new(Exports::new());
    let device =
        udm_backends::open_standalone_device(&udm_wire::uri::parse_device_uri("mem:64M").unwrap()).unwrap();
    exports.add(Export::new("disk", "", false, device).unwrap()).unwrap();
    let server = NbdServer::start(runtime.core_set(), exports, NbdServerLimits::default(), &[]).unwrap();
    let (mut stream, socket) = UnixStream::pair().unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    server.adopt(socket.into()).unwrap();
    let mut opening = encode_client_flags(ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES).to_vec();
    let replies = if is_extended {
        NbdOption::ExtendedHeaders.encode(&mut opening);
        NbdOption::Go(ExportInfoRequest { name: "disk".into(), infos: vec![] }).encode(&mut opening);
        // Two ACKs, the export and its block sizes.
        20 + 20 + 32 + 34
    } else {
        NbdOption::ExportName("disk".into()).encode(&mut opening);
        10
    };
    stream.write_all(&opening).unwrap();
    stream.read_exact(&mut vec![0; 18 + replies]).unwrap();

    let mut rounds = [
        (NbdCommand::Read, 4096),
        (NbdCommand::Write, 4096),
        (NbdCommand::Write, 512),
        (NbdCommand::Read, 128 << 10),
        (NbdCommand::Write, 128 << 10),
        (NbdCommand::Flush, 0),
    ]
    .map(|(command, len)| RequestRound::new(command, len, is_extended));
    warm::assert_becomes_warm(ALLOC, || {
        for round in &mut rounds {
            (0..200).for_each(|_| round.run(&mut stream));
        }
    });
    drop(stream);
    server.stop();
    runtime.stop();
}
