//! A host of an NVMe/TCP target: an admin queue, and I/O queues whose PDUs a thread each receives,
//! so that neither side waits for the other to read.

use super::HANG;
use crate::{TestRequest, TestRequestResult, fill_buffer_with_stamps};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use udm_core::errno::{EIO, EOPNOTSUPP};
use udm_core::{BioFlags, Op, SECTOR_SIZE};
use udm_wire::nvme::{
    Completion, ConnectCommand, ConnectData, DataPdu, InitializeRequest, InitializeResponse, NvmeCommand,
    NvmeStatus, PduHeader, PduLimits, PduType, data_digest, encode_capsule_command, encode_h2c_data,
    verify_header_digest,
};

/// Commands in flight of a queue of 128 entries.
const IN_FLIGHT_MAX: usize = 127;
/// The longest data in a capsule in bytes.
const CAPSULE_DATA_MAX: usize = 16 << 10;
/// Most blocks of a command.
const BLOCKS_MAX: u64 = 65536;

const FLUSH: u8 = 0x00;
const WRITE: u8 = 0x01;
const READ: u8 = 0x02;
const WRITE_ZEROES: u8 = 0x08;
const DATASET: u8 = 0x09;

/// The admin queue of a host.
pub(super) struct NvmeTestHost {
    address: SocketAddr,
    subsystem: String,
    admin: NvmeStream,
    controller: u16,
    digests: bool,
    /// The namespace: Identify CNS 0.
    pub(super) namespace: Vec<u8>,
}

/// A connection.
#[derive(Clone)]
struct NvmeStream {
    stream: Arc<TcpStream>,
    /// Held while a PDU is sent.
    sender: Arc<Mutex<()>>,
    limits: PduLimits,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn command(opcode: u8, dwords: &[u32]) -> [u8; 64] {
    let mut bytes = [0; 64];
    (bytes[0], bytes[1], bytes[4]) = (opcode, 0x40, 1);
    for (at, dword) in dwords.iter().enumerate() {
        bytes[40 + at * 4..44 + at * 4].copy_from_slice(&dword.to_le_bytes());
    }
    bytes
}

/// Sets the data pointer: `len` bytes in the capsule or in data PDUs.
fn point(bytes: &mut [u8; 64], len: usize, in_capsule: bool) {
    bytes[32..36].copy_from_slice(&(len as u32).to_le_bytes());
    bytes[39] = if in_capsule { 0x01 } else { 0x5a };
}

impl NvmeStream {
    fn connect(address: SocketAddr, digests: bool) -> NvmeStream {
        let stream = TcpStream::connect(address).expect("the target listens");
        stream.set_nodelay(true).expect("a TCP socket");
        let request = InitializeRequest {
            version: 0,
            host_alignment: 0,
            header_digest: digests,
            data_digest: digests,
            max_r2t: 0,
        };
        (&stream).write_all(&request.encode()).expect("the target reads");
        let mut bytes = [0; InitializeRequest::SIZE];
        (&stream).read_exact(&mut bytes).expect("ICResp");
        let response = InitializeResponse::decode(&bytes).expect("ICResp");
        assert_eq!((response.header_digest, response.data_digest), (digests, digests));
        let limits = PduLimits {
            header_digest: digests,
            data_digest: digests,
            capsule_data_max: CAPSULE_DATA_MAX as u32,
            data_max: response.max_h2c_data,
        };
        NvmeStream { stream: Arc::new(stream), sender: Arc::default(), limits }
    }

    fn send(&self, header: &[u8], data: &[u8]) {
        let digest = data_digest([data]);
        let digest = if self.limits.data_digest && !data.is_empty() { &digest[..] } else { &[] };
        let _sender = lock(&self.sender);
        // The test may have closed the connection.
        let _ = (&*self.stream).write_all(&[header, data, digest].concat());
    }

    fn send_command(&self, bytes: [u8; 64], data: &[u8]) {
        let mut header = [0; 128];
        let len = (!data.is_empty()).then_some(data.len() as u32);
        let command = NvmeCommand::from_bytes(bytes);
        let header_len = encode_capsule_command(&mut header, &command, len, &self.limits);
        self.send(&header[..header_len], data);
    }

    /// Receives a PDU; `None` at the end of the stream.
    fn receive(&self) -> Option<(PduHeader, Vec<u8>, Vec<u8>)> {
        let mut stream = &*self.stream;
        let mut common = [0; PduHeader::SIZE];
        stream.read_exact(&mut common).ok()?;
        let pdu = PduHeader::decode(&common, &self.limits).expect("a PDU");
        let mut header = common.to_vec();
        header.resize(pdu.header_len, 0);
        stream.read_exact(&mut header[PduHeader::SIZE..]).ok()?;
        if self.limits.header_digest && pdu.kind != PduType::ControllerTermRequest {
            assert!(verify_header_digest(&header[..usize::from(header[2]) + 4]), "a header digest");
        }
        let mut data = vec![0; pdu.data_len as usize];
        stream.read_exact(&mut data).ok()?;
        if pdu.has_data_digest {
            let mut digest = [0; 4];
            stream.read_exact(&mut digest).ok()?;
            assert_eq!(digest, data_digest([&data[..]]), "a data digest");
        }
        Some((pdu, header, data))
    }

    /// Sends a command on an idle queue, and receives its data and its completion.
    fn ask(&self, bytes: [u8; 64], data: &[u8]) -> (Completion, Vec<u8>) {
        self.send_command(bytes, data);
        let (pdu, header, data) = self.receive().expect("an answer");
        if pdu.kind == PduType::ControllerData {
            let (_, header, _) = self.receive().expect("a completion");
            return (Completion::decode(header[8..].first_chunk().expect("16 bytes")), data);
        }
        (Completion::decode(header[8..].first_chunk().expect("16 bytes")), data)
    }
}

impl NvmeTestHost {
    /// Connects an admin queue, and enables the controller.
    pub(super) fn new(address: SocketAddr, subsystem: &str, digests: bool) -> NvmeTestHost {
        let admin = NvmeStream::connect(address, digests);
        let mut host = NvmeTestHost {
            address,
            subsystem: subsystem.to_owned(),
            admin,
            controller: u16::MAX,
            digests,
            namespace: Vec::new(),
        };
        host.controller = host.connect(&host.admin, 0);
        let mut enable = command(0x7f, &[0, 0x14, 0x0046_0001]);
        // The type of the command: Property Set.
        enable[4] = 0;
        assert!(host.admin.ask(enable, &[]).0.status.is_ok(), "the controller is enabled");
        let mut identify = command(0x06, &[0]);
        point(&mut identify, 4096, false);
        let (completion, namespace) = host.admin.ask(identify, &[]);
        assert!(completion.status.is_ok() && namespace.len() == 4096, "namespace 1");
        NvmeTestHost { namespace, ..host }
    }

    /// Sends a Connect command; returns the number of the controller.
    fn connect(&self, stream: &NvmeStream, queue: u16) -> u16 {
        let connect = ConnectCommand {
            format: 0,
            queue,
            queue_size: IN_FLIGHT_MAX as u16,
            no_flow_control: queue == 1,
            keep_alive_ms: 0,
        };
        let data = ConnectData {
            host_id: [1; 16],
            controller: self.controller,
            subsystem: self.subsystem.clone(),
            host: "nqn.2014-08.org.example:host".into(),
        };
        let (completion, _) = stream.ask(*connect.encode(0).bytes(), &data.encode());
        assert!(completion.status.is_ok(), "queue {queue}: {}", completion.status);
        completion.result as u16
    }

    /// Connects an I/O queue.
    pub(super) fn queue(&self, queue: u16) -> NvmeTestQueue {
        let stream = NvmeStream::connect(self.address, self.digests);
        self.connect(&stream, queue);
        let block_log2 = self.namespace[130];
        // Of a read-only namespace the target refuses discards.
        let can_discard = self.namespace[24] & 1 != 0 || self.namespace[99] & 1 != 0;
        let (sender, news) = channel();
        let shared = Arc::new(QueueShared { stream, block_log2, can_discard, state: Mutex::default() });
        let theirs = Arc::clone(&shared);
        let reader = std::thread::spawn(move || theirs.receive_all(&sender));
        NvmeTestQueue { shared, news, reader: Some(reader), given: 0, collected: 0, answers: BTreeMap::new() }
    }
}

/// An I/O queue.
pub(super) struct NvmeTestQueue {
    shared: Arc<QueueShared>,
    news: Receiver<(u64, TestRequestResult)>,
    reader: Option<JoinHandle<()>>,
    given: u64,
    collected: u64,
    answers: BTreeMap<u64, TestRequestResult>,
}

struct QueueShared {
    stream: NvmeStream,
    block_log2: u8,
    can_discard: bool,
    state: Mutex<QueueState>,
}

#[derive(Default)]
struct QueueState {
    /// Requests in flight, by command identifier.
    pending: HashMap<u16, PendingRequest>,
    /// Requests that wait for an entry of the queue.
    waiting: VecDeque<PendingRequest>,
    last_id: u16,
}

struct PendingRequest {
    number: u64,
    bytes: [u8; 64],
    data: Vec<u8>,
    /// Data of a completed read.
    read: Vec<u8>,
    /// A flush follows, as Linux does it: discards have no FUA.
    flushes: bool,
}

impl QueueShared {
    /// The command of a request.
    ///
    /// # Errors
    /// The errno, if a host refuses the request itself: it cannot be expressed.
    fn encode(&self, number: u64, request: &TestRequest) -> Result<PendingRequest, i32> {
        let mut pending =
            PendingRequest { number, bytes: [0; 64], data: Vec::new(), read: Vec::new(), flushes: false };
        if request.op == Op::Flush {
            pending.bytes = command(FLUSH, &[]);
            return Ok(pending);
        }
        let sectors = (1_u64 << self.block_log2) / SECTOR_SIZE;
        let is_whole = request.sector.is_multiple_of(sectors) && request.sectors.is_multiple_of(sectors);
        let (start, blocks) = (request.sector / sectors, request.sectors / sectors);
        if request.op == Op::Discard && !self.can_discard {
            return Err(EOPNOTSUPP);
        }
        let blocks_max = if request.op == Op::Discard { u32::MAX.into() } else { BLOCKS_MAX };
        if !is_whole || !(1..=blocks_max).contains(&blocks) {
            return Err(EIO);
        }
        let fua = request.flags.contains(BioFlags::FUA);
        let range = |flags: u32| [start as u32, (start >> 32) as u32, (blocks - 1) as u32 | flags];
        let len = request.data_len();
        match request.op {
            Op::Read => {
                pending.bytes = command(READ, &range(0));
                point(&mut pending.bytes, len, false);
            }
            Op::Write => {
                pending.bytes = command(WRITE, &range(u32::from(fua) << 30));
                point(&mut pending.bytes, len, len <= CAPSULE_DATA_MAX);
                pending.data = vec![0; len];
                let offset = request.sector.wrapping_mul(SECTOR_SIZE);
                fill_buffer_with_stamps(offset, request.generation, &mut pending.data);
            }
            Op::WriteZeroes => {
                let deallocates = !request.flags.contains(BioFlags::NOUNMAP);
                let flags = u32::from(fua) << 30 | u32::from(deallocates) << 25;
                pending.bytes = command(WRITE_ZEROES, &range(flags));
            }
            Op::Discard | Op::Flush => {
                pending.bytes = command(DATASET, &[0, 4]);
                point(&mut pending.bytes, 16, true);
                pending.data = [&[0; 4][..], &(blocks as u32).to_le_bytes(), &start.to_le_bytes()].concat();
                pending.flushes = fua;
            }
        }
        Ok(pending)
    }

    /// Sends waiting commands while the queue has entries.
    fn send_waiting(&self) {
        loop {
            let (bytes, data) = {
                let mut state = lock(&self.state);
                if state.pending.len() >= IN_FLIGHT_MAX {
                    return;
                }
                let Some(mut pending) = state.waiting.pop_front() else { return };
                while state.pending.contains_key(&state.last_id) {
                    state.last_id = state.last_id.wrapping_add(1);
                }
                let id = state.last_id;
                pending.bytes[2..4].copy_from_slice(&id.to_le_bytes());
                let in_capsule = pending.bytes[39] == 0x01;
                let sent = (pending.bytes, if in_capsule { pending.data.clone() } else { Vec::new() });
                state.pending.insert(id, pending);
                sent
            };
            self.stream.send_command(bytes, &data);
        }
    }

    /// Handles the PDUs of the controller until the end of the stream.
    fn receive_all(&self, news: &Sender<(u64, TestRequestResult)>) {
        while let Some((pdu, header, data)) = self.stream.receive() {
            let fields = DataPdu::decode(&header);
            match pdu.kind {
                PduType::ReadyToTransfer => {
                    let range = fields.offset as usize..(fields.offset + fields.len) as usize;
                    let data = lock(&self.state).pending[&fields.command].data[range].to_vec();
                    let mut out = [0; 128];
                    let len = encode_h2c_data(&mut out, &fields, true, &self.stream.limits);
                    self.stream.send(&out[..len], &data);
                }
                PduType::ControllerData => {
                    let mut state = lock(&self.state);
                    let pending = state.pending.get_mut(&fields.command).expect("data of a read");
                    assert_eq!((fields.offset, fields.len as usize), (0, data.len()), "all data at once");
                    pending.read = data;
                    drop(state);
                    if pdu.is_success {
                        self.completed(fields.command, NvmeStatus::SUCCESS, news);
                    }
                }
                PduType::ResponseCapsule => {
                    let completion = Completion::decode(header[8..].first_chunk().expect("16 bytes"));
                    self.completed(completion.id, completion.status, news);
                }
                other => panic!("the controller sends {other:?}"),
            }
        }
    }

    fn completed(&self, id: u16, status: NvmeStatus, news: &Sender<(u64, TestRequestResult)>) {
        let mut state = lock(&self.state);
        let mut pending = state.pending.remove(&id).expect("the command is in flight");
        if pending.flushes && status.is_ok() {
            let (number, bytes) = (pending.number, command(FLUSH, &[]));
            pending = PendingRequest { number, bytes, data: Vec::new(), read: Vec::new(), flushes: false };
            state.waiting.push_front(pending);
        } else {
            let errno = match NvmeStatus(status.0 & 0x7ff) {
                NvmeStatus::SUCCESS => 0,
                NvmeStatus::INVALID_OPCODE => EOPNOTSUPP,
                _ => EIO,
            };
            let data = if errno == 0 { pending.read } else { Vec::new() };
            let _ = news.send((pending.number, TestRequestResult { errno, data }));
        }
        drop(state);
        self.send_waiting();
    }
}

impl NvmeTestQueue {
    pub(super) fn submit(&mut self, requests: &[TestRequest]) {
        for request in requests {
            let number = self.given;
            self.given += 1;
            match self.shared.encode(number, request) {
                Ok(pending) => lock(&self.shared.state).waiting.push_back(pending),
                Err(errno) => {
                    self.answers.insert(number, TestRequestResult { errno, data: Vec::new() });
                }
            }
            self.shared.send_waiting();
        }
    }

    fn receive(&mut self, timeout: Duration) -> bool {
        match self.news.recv_timeout(timeout) {
            Ok((number, answer)) => {
                assert!(self.answers.insert(number, answer).is_none(), "answered twice");
                true
            }
            Err(RecvTimeoutError::Timeout) => false,
            Err(RecvTimeoutError::Disconnected) => {
                panic!("the target has closed the connection, with {} requests in flight", self.in_flight())
            }
        }
    }

    pub(super) fn in_flight(&self) -> usize {
        (self.given - self.collected) as usize - self.answers.len()
    }

    /// Receives the answers that have arrived.
    pub(super) fn look(&mut self) {
        while self.receive(Duration::ZERO) {}
    }

    pub(super) fn collect(&mut self) -> Vec<TestRequestResult> {
        while self.in_flight() > 0 {
            assert!(self.receive(HANG), "hung: {} requests", self.in_flight());
        }
        self.collected = self.given;
        std::mem::take(&mut self.answers).into_values().collect()
    }
}

impl Drop for NvmeTestQueue {
    /// Vanishes with requests in flight.
    fn drop(&mut self) {
        let _ = self.shared.stream.stream.shutdown(Shutdown::Both);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}
