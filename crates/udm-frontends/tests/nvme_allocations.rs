//! A warm NVMe queue allocates nothing: a counting allocator sees no allocation in target, runtime
//! or device over many commands.

mod warm;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use std::alloc::System;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;
use udm_frontends::nbd::{Export, Exports};
use udm_frontends::nvme::{NvmeServer, NvmeServerOptions};
use udm_runtime::{Runtime, RuntimeOptions};
use udm_wire::nvme::{
    ConnectCommand, ConnectData, DataPdu, InitializeRequest, NvmeCommand, PduLimits, data_digest,
    encode_capsule_command, encode_h2c_data,
};

#[global_allocator]
static ALLOC: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const SUBSYSTEM: &str = "nqn.2014-08.org.example:warm";
const DEPTH: usize = 32;
/// Bytes of a response, an R2T and the header of data, each with a header digest.
const HEADER: usize = 28;
const LIMITS: PduLimits =
    PduLimits { header_digest: true, data_digest: true, capsule_data_max: 16 << 10, data_max: 1 << 20 };

/// A command of `len` bytes of data, with `data` in its capsule.
fn capsule(out: &mut Vec<u8>, mut bytes: [u8; 64], id: u16, data: &[u8]) {
    bytes[2..4].copy_from_slice(&id.to_le_bytes());
    let (mut header, command) = ([0; 128], NvmeCommand::from_bytes(bytes));
    let len = (!data.is_empty()).then_some(data.len() as u32);
    let header_len = encode_capsule_command(&mut header, &command, len, &LIMITS);
    out.extend_from_slice(&header[..header_len]);
    out.extend_from_slice(data);
    if !data.is_empty() {
        out.extend_from_slice(&data_digest([data]));
    }
}

fn command(opcode: u8, start: u64, len: usize, pointer: u8) -> [u8; 64] {
    let mut bytes = [0; 64];
    (bytes[0], bytes[1], bytes[4], bytes[39]) = (opcode, 0x40, 1, pointer);
    bytes[32..36].copy_from_slice(&(len as u32).to_le_bytes());
    bytes[40..48].copy_from_slice(&start.to_le_bytes());
    bytes[48..50].copy_from_slice(&((len / 512).max(1) as u16 - 1).to_le_bytes());
    bytes
}

/// A round of `DEPTH` commands, which itself allocates nothing.
struct CommandRound {
    commands: Vec<u8>,
    answers: Vec<u8>,
    /// Bytes of each transfer after an R2T; 0 for none.
    transfer: usize,
    data: Vec<u8>,
    digest: [u8; 4],
}

impl CommandRound {
    fn new(opcode: u8, len: usize) -> CommandRound {
        let (is_read, is_write) = (opcode == 2, opcode == 1);
        let in_capsule = is_write && len <= 16 << 10;
        let data = vec![7; if is_write { len } else { 0 }];
        let mut commands = Vec::new();
        for id in 0..DEPTH {
            let pointer = if in_capsule { 0x01 } else { 0x5a };
            let bytes = command(opcode, (id * len / 512) as u64, len, pointer);
            capsule(&mut commands, bytes, id as u16, if in_capsule { &data } else { &[] });
        }
        let answer = if is_read { HEADER + len + 4 } else { HEADER };
        let transfer = if is_write && !in_capsule { len } else { 0 };
        let digest = data_digest([&data[..]]);
        CommandRound { commands, answers: vec![0; DEPTH * answer], transfer, data, digest }
    }

    fn run(&mut self, stream: &mut TcpStream) {
        stream.write_all(&self.commands).unwrap();
        if self.transfer > 0 {
            let mut asked = [0; DEPTH * HEADER];
            stream.read_exact(&mut asked).unwrap();
            for r2t in asked.chunks(HEADER) {
                let mut header = [0; 128];
                let len = encode_h2c_data(&mut header, &DataPdu::decode(r2t), true, &LIMITS);
                stream.write_all(&header[..len]).unwrap();
                stream.write_all(&self.data).unwrap();
                stream.write_all(&self.digest).unwrap();
            }
        }
        stream.read_exact(&mut self.answers).unwrap();
    }
}

/// Connects a queue; returns the number of its controller.
fn connect(address: SocketAddr, queue: u16, controller: u16) -> (TcpStream, u16) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.set_nodelay(true).unwrap();
    let request = InitializeRequest {
        version: 0,
        host_alignment: 0,
        header_digest: true,
        data_digest: true,
        max_r2t: 0,
    };
    stream.write_all(&request.encode()).unwrap();
    stream.read_exact(&mut [0; 128]).unwrap();
    let connect =
        ConnectCommand { format: 0, queue, queue_size: 63, no_flow_control: true, keep_alive_ms: 0 };
    let host = "nqn.2014-08.org.example:host".into();
    let data = ConnectData { host_id: [1; 16], controller, subsystem: SUBSYSTEM.into(), host };
    let mut bytes = Vec::new();
    capsule(&mut bytes, *connect.encode(0).bytes(), 0, &data.encode());
    stream.write_all(&bytes).unwrap();
    let mut response = [0; HEADER];
    stream.read_exact(&mut response).unwrap();
    assert_eq!(response[22..24], [0, 0]);
    (stream, u16::from_le_bytes([response[8], response[9]]))
}

#[test]
fn a_warm_queue_allocates_nothing() {
    let options = RuntimeOptions { cpus: vec![None], poll: false, spin_max: Duration::from_micros(20) };
    let runtime = Runtime::start(&options).unwrap();
    let exports = Arc::new(Exports::new());
    let device =
        udm_backends::open_standalone_device(&udm_wire::uri::parse_device_uri("mem:64M").unwrap()).unwrap();
    exports.add(Export::new("disk", "", false, device).unwrap()).unwrap();
    let options = NvmeServerOptions { subsystem: SUBSYSTEM.into(), ..NvmeServerOptions::default() };
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let server = NvmeServer::start(runtime.core_set(), &exports, options, &[any]).unwrap();
    let (mut admin, controller) = connect(server.bound()[0], 0, 0xffff);
    let (mut enable, mut bytes) = ([0; 64], Vec::new());
    (enable[0], enable[1], enable[44], enable[48], enable[50]) = (0x7f, 0x40, 0x14, 1, 0x46);
    capsule(&mut bytes, enable, 1, &[]);
    admin.write_all(&bytes).unwrap();
    admin.read_exact(&mut [0; HEADER]).unwrap();
    let (mut stream, _) = connect(server.bound()[0], 1, controller);

    let kinds = [(2, 4096), (1, 4096), (1, 512), (2, 128 << 10), (1, 128 << 10), (0, 0)];
    let mut rounds = kinds.map(|(opcode, len)| CommandRound::new(opcode, len));
    warm::assert_becomes_warm(ALLOC, || {
        for round in &mut rounds {
            (0..100).for_each(|_| round.run(&mut stream));
        }
    });
    drop((stream, admin, server));
    runtime.stop();
}
