//! An NBD client on one end of a socket pair. A separate thread receives replies, so that neither
//! side waits for the other to read.

use super::HANG;
use crate::{TestRequest, TestRequestResult, fill_buffer_with_stamps};
use std::collections::{BTreeMap, HashMap};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use udm_core::{BioFlags, Op, SECTOR_SIZE};
use udm_wire::nbd::{
    ClientFlags, CommandFlags, ExportInfoItem, ExportInfoRequest, GREETING_SIZE, NbdCommand, NbdOption,
    NbdRequestHeader as WireRequest, NbdServerGreeting, OPTION_REPLY_HEADER_SIZE, OptionReply,
    OptionReplyHeader, ReplyChunk, ReplyChunkHeader, ReplyHeader, encode_client_flags,
};

/// A request in flight.
#[derive(Default)]
struct PendingRequest {
    offset: u64,
    /// Expected bytes of a read; 0 for all other operations.
    len: usize,
    data: Vec<u8>,
    /// Bytes that have arrived.
    got: usize,
    error: u32,
}

type PendingRequests = Arc<Mutex<HashMap<u64, PendingRequest>>>;

pub(super) struct NbdTestClient {
    stream: UnixStream,
    open: PendingRequests,
    news: Receiver<(u64, TestRequestResult)>,
    reader: Option<JoinHandle<()>>,
    given: u64,
    collected: u64,
    answers: BTreeMap<u64, TestRequestResult>,
    pub(super) infos: Vec<ExportInfoItem>,
}

impl NbdTestClient {
    /// Connects to the default export over `stream`, with structured or simple replies.
    pub(super) fn new(mut stream: UnixStream, structured: bool) -> NbdTestClient {
        stream.set_read_timeout(Some(HANG)).expect("a time-out");
        stream.set_write_timeout(Some(HANG)).expect("a time-out");
        let infos = perform_client_handshake(&mut stream, structured);
        stream.set_read_timeout(None).expect("no time-out");
        let (open, (sender, news)) = (PendingRequests::default(), channel());
        let (socket, theirs) = (stream.try_clone().expect("a second descriptor"), open.clone());
        let reader = std::thread::spawn(move || read_replies(socket, structured, &theirs, &sender));
        let answers = BTreeMap::new();
        NbdTestClient { stream, open, news, reader: Some(reader), given: 0, collected: 0, answers, infos }
    }

    /// Creates a socket pair: the client's end, and the end that the server adopts.
    pub(super) fn pair() -> (UnixStream, OwnedFd) {
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        (ours, theirs.into())
    }

    pub(super) fn send(&mut self, request: &TestRequest) {
        let cookie = self.given;
        self.given += 1;
        let offset = request.sector.checked_mul(SECTOR_SIZE).unwrap_or(u64::MAX - (SECTOR_SIZE - 1));
        let len = request.sectors * SECTOR_SIZE;
        assert!(len <= u32::MAX.into(), "a length that fits compact requests");
        let (command, flags) = convert_to_nbd_command(request);
        let read = if request.op == Op::Read { len as usize } else { 0 };
        let pending = PendingRequest { offset, len: read, data: vec![0; read], ..PendingRequest::default() };
        self.open.lock().unwrap_or_else(PoisonError::into_inner).insert(cookie, pending);
        let mut bytes = WireRequest { flags, command, cookie, offset, len }.encode().to_vec();
        if request.op == Op::Write {
            let at = bytes.len();
            bytes.resize(at + request.data_len(), 0);
            fill_buffer_with_stamps(offset, request.generation, &mut bytes[at..]);
        }
        // The request is sent in pieces, as on a slow network.
        let mut rest = &bytes[..];
        for &cut in &request.cuts {
            let (piece, more) = rest.split_at(cut.min(rest.len()));
            self.put(piece);
            rest = more;
        }
        self.put(rest);
    }

    fn put(&mut self, bytes: &[u8]) {
        if let Err(e) = self.stream.write_all(bytes) {
            self.ended(&format!("the server takes no more: {e}"));
        }
    }

    fn receive(&mut self, timeout: Duration) -> bool {
        match self.news.recv_timeout(timeout) {
            Ok((cookie, answer)) => {
                assert!(self.answers.insert(cookie, answer).is_none(), "answered twice");
                true
            }
            Err(RecvTimeoutError::Timeout) => false,
            Err(RecvTimeoutError::Disconnected) => self.ended("the server has closed the connection"),
        }
    }

    /// Panics after the reader's thread ended; with the panic of the thread, if it had one.
    fn ended(&mut self, what: &str) -> ! {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        match self.reader.take().map(JoinHandle::join) {
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            _ => panic!("{what}, with {} requests in flight", self.in_flight()),
        }
    }

    pub(super) fn in_flight(&self) -> usize {
        (self.given - self.collected) as usize - self.answers.len()
    }

    /// Receives the replies that have arrived.
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

    /// Sends a disconnect request and waits until the server has answered all and closed.
    pub(super) fn leave(mut self) {
        let request = WireRequest {
            flags: CommandFlags::empty(),
            command: NbdCommand::Disconnect,
            cookie: u64::MAX,
            offset: 0,
            len: 0,
        };
        self.put(&request.encode());
        self.await_end();
    }

    /// Waits until the server has closed the connection. All requests are answered by then.
    pub(super) fn await_end(&mut self) {
        while !self.reader.as_ref().is_none_or(JoinHandle::is_finished) {
            if let Ok((cookie, answer)) = self.news.recv_timeout(Duration::from_millis(1)) {
                self.answers.insert(cookie, answer);
            }
        }
        self.answers.extend(self.news.try_iter());
        if let Some(Err(panic)) = self.reader.take().map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }
}

impl Drop for NbdTestClient {
    /// Vanishes with requests in flight.
    fn drop(&mut self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

fn convert_to_nbd_command(request: &TestRequest) -> (NbdCommand, CommandFlags) {
    let (command, mut flags) = match request.op {
        Op::Read => (NbdCommand::Read, CommandFlags::empty()),
        Op::Write => (NbdCommand::Write, CommandFlags::empty()),
        Op::Flush => (NbdCommand::Flush, CommandFlags::empty()),
        Op::Discard => (NbdCommand::Trim, CommandFlags::empty()),
        Op::WriteZeroes if request.flags.contains(BioFlags::NOUNMAP) => {
            (NbdCommand::WriteZeroes, CommandFlags::NO_HOLE)
        }
        Op::WriteZeroes => (NbdCommand::WriteZeroes, CommandFlags::empty()),
    };
    flags.set(CommandFlags::FUA, request.flags.contains(BioFlags::FUA));
    (command, flags)
}

fn read_exact_bytes<const N: usize>(stream: &mut UnixStream) -> [u8; N] {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).expect("the server answers the handshake");
    bytes
}

fn perform_client_handshake(stream: &mut UnixStream, structured: bool) -> Vec<ExportInfoItem> {
    NbdServerGreeting::decode(&read_exact_bytes::<GREETING_SIZE>(stream)).expect("a greeting");
    let mut bytes = encode_client_flags(ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES).to_vec();
    if structured {
        NbdOption::StructuredReply.encode(&mut bytes);
    }
    let infos = vec![udm_wire::nbd::INFO_BLOCK_SIZE];
    NbdOption::Go(ExportInfoRequest { name: String::new(), infos }).encode(&mut bytes);
    stream.write_all(&bytes).expect("the server reads the handshake");
    let (mut acks, mut infos) = (1 + usize::from(structured), Vec::new());
    while acks > 0 {
        let header = OptionReplyHeader::decode(&read_exact_bytes::<OPTION_REPLY_HEADER_SIZE>(stream))
            .expect("a reply");
        let mut data = vec![0; header.len as usize];
        stream.read_exact(&mut data).expect("the rest of the reply");
        match OptionReply::decode(header.reply, &data).expect("a reply") {
            OptionReply::Ack => acks -= 1,
            OptionReply::Info(info) => infos.push(info),
            other => panic!("{other:?}"),
        }
    }
    infos
}

/// The reader's thread; it runs until the end of the stream.
fn read_replies(
    mut stream: UnixStream,
    structured: bool,
    open: &PendingRequests,
    news: &Sender<(u64, TestRequestResult)>,
) {
    let mut head = Vec::new();
    let mut byte = [0; 4];
    loop {
        // Reads the shortest header first, then the rest of a longer one.
        let n = if head.is_empty() { 4 } else { 1 };
        match stream.read_exact(&mut byte[..n]) {
            Ok(()) => head.extend_from_slice(&byte[..n]),
            Err(_) if head.is_empty() => return,
            Err(e) => panic!("the stream ends inside a reply: {e}"),
        }
        let Some(header) = ReplyHeader::decode(&mut &head[..]).expect("a reply") else { continue };
        head.clear();
        let done = match header {
            ReplyHeader::Simple(simple) => {
                let (len, cookie) =
                    (with_pending_request_of_cookie(open, simple.cookie, |p| p.len), simple.cookie);
                assert!(!(structured && len > 0), "a simple reply to a structured read");
                let mut data = vec![0; if simple.error == 0 { len } else { 0 }];
                stream.read_exact(&mut data).expect("the data of a reply");
                with_pending_request_of_cookie(open, cookie, |p| {
                    (p.error, p.got) = (simple.error, data.len());
                    p.data = data;
                });
                Some(cookie)
            }
            ReplyHeader::Chunk(header) => {
                assert!(structured, "an unexpected chunk");
                let mut payload = vec![0; header.len as usize];
                stream.read_exact(&mut payload).expect("the payload of a chunk");
                with_pending_request_of_cookie(open, header.cookie, |p| {
                    store_reply_chunk(p, header, &payload);
                });
                header.is_done().then_some(header.cookie)
            }
        };
        if let Some(cookie) = done {
            let pending = open.lock().unwrap_or_else(PoisonError::into_inner).remove(&cookie);
            let pending = pending.expect("the request is in flight");
            assert!(pending.error != 0 || pending.got == pending.len, "a read is incomplete");
            let data = if pending.error == 0 { pending.data } else { Vec::new() };
            let _ = news.send((cookie, TestRequestResult { errno: pending.error as i32, data }));
        }
    }
}

fn with_pending_request_of_cookie<R>(
    open: &PendingRequests,
    cookie: u64,
    f: impl FnOnce(&mut PendingRequest) -> R,
) -> R {
    let mut open = open.lock().unwrap_or_else(PoisonError::into_inner);
    f(open.get_mut(&cookie).unwrap_or_else(|| panic!("a reply to cookie {cookie:#x}, which is not open")))
}

fn store_reply_chunk(pending: &mut PendingRequest, header: ReplyChunkHeader, payload: &[u8]) {
    let place = |offset: u64, len: usize| {
        let at = offset.checked_sub(pending.offset).expect("data before the read") as usize;
        assert!(at + len <= pending.len, "data after the read");
        at..at + len
    };
    match ReplyChunk::decode(header, payload).expect("a chunk") {
        ReplyChunk::None => {}
        ReplyChunk::Data { offset, data } => {
            let range = place(offset, data.len());
            pending.data[range].copy_from_slice(data);
            pending.got += data.len();
        }
        ReplyChunk::Hole { offset, len } => {
            let range = place(offset, len as usize);
            pending.data[range].fill(0);
            pending.got += len as usize;
        }
        ReplyChunk::BlockStatus { .. } | ReplyChunk::BlockStatusExt { .. } => {
            panic!("unexpected block status")
        }
        ReplyChunk::Error { error, .. } => pending.error = error,
    }
}
