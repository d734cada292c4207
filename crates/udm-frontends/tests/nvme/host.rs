//! A host that sends what a test says, and reads PDUs.

use super::{HOST, SUBSYSTEM};
use rustix::net::{AddressFamily, SocketType};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;
use udm_wire::nvme::{
    Completion, ConnectCommand, ConnectData, DataPdu, InitializeRequest, InitializeResponse, NvmeCommand,
    NvmeStatus, PduHeader, PduLimits, PduType, TermRequest, data_digest, encode_capsule_command,
    encode_h2c_data, verify_header_digest,
};

/// Bytes of a block of the test disk.
pub const BLOCK: usize = 512;

/// The connection of a queue.
pub struct Connection {
    pub stream: TcpStream,
    pub limits: PduLimits,
    /// Identifier of the last command.
    id: u16,
}

/// A PDU of the controller.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    Response(Completion),
    Data {
        pdu: DataPdu,
        data: Vec<u8>,
        is_success: bool,
    },
    ReadyToTransfer(DataPdu),
    Term(TermRequest),
    /// The connection is closed.
    End,
}

impl Answer {
    /// The status of a completion.
    pub fn status(self) -> NvmeStatus {
        match self {
            Answer::Response(completion) => completion.status,
            other => panic!("expected a response: {other:?}"),
        }
    }

    /// The fatal error of a termination request.
    pub fn fatal(self) -> (u16, u32) {
        match self {
            Answer::Term(request) => (request.error, request.at),
            other => panic!("expected a termination request: {other:?}"),
        }
    }
}

impl Connection {
    pub fn open(address: SocketAddr) -> Connection {
        Connection::new(TcpStream::connect(address).unwrap())
    }

    /// As [`Connection::open`], from another address of this machine.
    pub fn open_from(from: [u8; 4], address: SocketAddr) -> Connection {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddr::from((from, 0))).unwrap();
        rustix::net::connect(&socket, &address).unwrap();
        Connection::new(socket.into())
    }

    fn new(stream: TcpStream) -> Connection {
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.set_nodelay(true).unwrap();
        let limits = PduLimits {
            header_digest: false,
            data_digest: false,
            capsule_data_max: 1 << 20,
            data_max: 1 << 20,
        };
        Connection { stream, limits, id: 0 }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        // The target may have closed the connection.
        let _ = self.stream.write_all(bytes);
    }

    /// `ICReq` and its answer; with digests of both kinds or without.
    pub fn initialize(&mut self, digests: bool) -> InitializeResponse {
        let request = InitializeRequest {
            version: 0,
            host_alignment: 0,
            header_digest: digests,
            data_digest: digests,
            max_r2t: 0,
        };
        self.send(&request.encode());
        let mut bytes = [0; InitializeRequest::SIZE];
        self.stream.read_exact(&mut bytes).unwrap();
        let response = InitializeResponse::decode(&bytes).unwrap();
        (self.limits.header_digest, self.limits.data_digest) = (response.header_digest, response.data_digest);
        response
    }

    /// Sends a command with `data` in its capsule. Returns its identifier.
    pub fn command(&mut self, command: NvmeCommand, data: &[u8]) -> u16 {
        self.id += 1;
        let mut bytes = *command.bytes();
        bytes[2..4].copy_from_slice(&self.id.to_le_bytes());
        let (mut header, command) = ([0; 128], NvmeCommand::from_bytes(bytes));
        let len = (!data.is_empty()).then_some(data.len() as u32);
        let header_len = encode_capsule_command(&mut header, &command, len, &self.limits);
        let digest = data_digest([data]);
        let digest = if self.limits.data_digest && !data.is_empty() { &digest[..] } else { &[] };
        self.send(&[&header[..header_len], data, digest].concat());
        self.id
    }

    /// Sends data for a transfer.
    pub fn data(&mut self, pdu: DataPdu, data: &[u8], is_last: bool) {
        let mut header = [0; 128];
        let len = encode_h2c_data(&mut header, &pdu, is_last, &self.limits);
        let digest = data_digest([data]);
        let digest = if self.limits.data_digest { &digest[..] } else { &[] };
        self.send(&[&header[..len], data, digest].concat());
    }

    /// Reads a PDU, whose digests must be right.
    pub fn answer(&mut self) -> Answer {
        let mut common = [0; PduHeader::SIZE];
        if self.stream.read_exact(&mut common).is_err() {
            return Answer::End;
        }
        let pdu = PduHeader::decode(&common, &self.limits).unwrap();
        let mut header = common.to_vec();
        header.resize(pdu.header_len, 0);
        self.stream.read_exact(&mut header[PduHeader::SIZE..]).unwrap();
        let mut data = vec![0; pdu.data_len as usize];
        self.stream.read_exact(&mut data).unwrap();
        if pdu.has_data_digest {
            let mut digest = [0; 4];
            self.stream.read_exact(&mut digest).unwrap();
            assert_eq!(digest, data_digest([&data[..]]));
        }
        if self.limits.header_digest && pdu.kind != PduType::ControllerTermRequest {
            assert!(verify_header_digest(&header[..usize::from(header[2]) + 4]));
        }
        match pdu.kind {
            PduType::ResponseCapsule => {
                Answer::Response(Completion::decode(header[8..].first_chunk().unwrap()))
            }
            PduType::ControllerData => {
                assert!(pdu.is_last, "one PDU has all data");
                Answer::Data { pdu: DataPdu::decode(&header), data, is_success: pdu.is_success }
            }
            PduType::ReadyToTransfer => Answer::ReadyToTransfer(DataPdu::decode(&header)),
            PduType::ControllerTermRequest => Answer::Term(TermRequest::decode(&header)),
            other => panic!("{other:?} from a controller"),
        }
    }

    /// Sends a command without data, and reads its completion.
    pub fn ask(&mut self, command: NvmeCommand) -> Completion {
        let id = self.command(command, &[]);
        match self.answer() {
            Answer::Response(completion) if completion.id == id => completion,
            other => panic!("expected a response: {other:?}"),
        }
    }

    /// Sends a command that returns data, and reads both.
    pub fn read(&mut self, command: NvmeCommand) -> Result<Vec<u8>, NvmeStatus> {
        let id = self.command(command, &[]);
        match self.answer() {
            Answer::Data { pdu, data, is_success } => {
                assert_eq!((pdu.command, pdu.offset, pdu.len as usize), (id, 0, data.len()));
                if !is_success {
                    assert!(self.answer().status().is_ok());
                }
                Ok(data)
            }
            other => Err(other.status()),
        }
    }

    /// Sends a Connect command, and reads its completion.
    pub fn connect(&mut self, connect: &ConnectCommand, data: &ConnectData) -> Completion {
        self.command(connect.encode(0), &data.encode());
        match self.answer() {
            Answer::Response(completion) => completion,
            other => panic!("expected a response: {other:?}"),
        }
    }
}

/// The data of a Connect command to `controller`.
pub fn connect_data(controller: u16) -> ConnectData {
    ConnectData { host_id: [7; 16], controller, subsystem: SUBSYSTEM.into(), host: HOST.into() }
}

/// A Connect command for this queue, without flow control.
pub fn connect_command(queue: u16) -> ConnectCommand {
    ConnectCommand { format: 0, queue, queue_size: 31, no_flow_control: true, keep_alive_ms: 0 }
}

/// A command: opcode, namespace, and the dwords from 10 on.
pub fn command(opcode: u8, nsid: u32, dwords: &[u32]) -> NvmeCommand {
    let mut bytes = [0; 64];
    (bytes[0], bytes[1]) = (opcode, 0x40);
    bytes[4..8].copy_from_slice(&nsid.to_le_bytes());
    for (at, dword) in dwords.iter().enumerate() {
        bytes[40 + at * 4..44 + at * 4].copy_from_slice(&dword.to_le_bytes());
    }
    NvmeCommand::from_bytes(bytes)
}

/// The same command with `len` bytes of data: in the capsule, or in data PDUs.
pub fn with_data(command: NvmeCommand, in_capsule: bool, len: u32) -> NvmeCommand {
    let mut bytes = *command.bytes();
    bytes[32..36].copy_from_slice(&len.to_le_bytes());
    bytes[39] = if in_capsule { 0x01 } else { 0x5a };
    NvmeCommand::from_bytes(bytes)
}

/// A read or write (`opcode`) of whole blocks.
pub fn rw(opcode: u8, block: u64, blocks: u32, in_capsule: bool) -> NvmeCommand {
    let dwords = [block as u32, (block >> 32) as u32, blocks - 1];
    with_data(command(opcode, 1, &dwords), in_capsule, blocks * BLOCK as u32)
}

pub const READ: u8 = 2;
pub const WRITE: u8 = 1;

/// Sets a property of 4 bytes.
pub fn property_set(offset: u32, value: u32) -> NvmeCommand {
    command(0x7f, 0, &[0, offset, value, 0])
}

/// Reads a property of 4 bytes.
pub fn property_get(offset: u32) -> NvmeCommand {
    command(0x7f, 4, &[0, offset])
}

/// An Identify command.
pub fn identify(structure: u32, nsid: u32) -> NvmeCommand {
    with_data(command(0x06, nsid, &[structure]), false, 4096)
}

/// A Get Log Page command for the first `len` bytes of a page.
pub fn log_page(page: u32, len: u32) -> NvmeCommand {
    with_data(command(0x02, 0, &[page | (len / 4 - 1) << 16]), false, len)
}

/// A host with a controller.
pub struct ScriptedHost {
    address: SocketAddr,
    pub admin: Connection,
    pub controller: u16,
}

impl ScriptedHost {
    /// Connects an admin queue with this keep-alive timeout, and enables the controller.
    pub fn connect(address: SocketAddr, keep_alive_ms: u32) -> ScriptedHost {
        let mut admin = Connection::open(address);
        admin.initialize(false);
        let connect = ConnectCommand { keep_alive_ms, ..connect_command(0) };
        let completion = admin.connect(&connect, &connect_data(0xffff));
        assert!(completion.status.is_ok(), "{completion:?}");
        let controller = completion.result as u16;
        let mut host = ScriptedHost { address, admin, controller };
        host.enable();
        host
    }

    /// Enables the controller.
    pub fn enable(&mut self) {
        assert!(self.admin.ask(property_set(0x14, 0x0046_0001)).status.is_ok());
        self.wait_for_status(1);
    }

    /// Waits until the property CSTS has this value.
    pub fn wait_for_status(&mut self, value: u64) {
        for _ in 0..2000 {
            if self.admin.ask(property_get(0x1c)).result == value {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("CSTS is not {value}");
    }

    /// Connects an I/O queue: with digests of both kinds and flow control, or without.
    pub fn queue(&self, queue: u16, digests: bool) -> Connection {
        let mut connection = Connection::open(self.address);
        connection.initialize(digests);
        let connect = ConnectCommand { no_flow_control: !digests, ..connect_command(queue) };
        let completion = connection.connect(&connect, &connect_data(self.controller));
        assert!(completion.status.is_ok(), "{completion:?}");
        connection
    }
}
