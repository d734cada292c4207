//! The server over the devices of this project, as in `udm serve`, and over a device that records
//! the lengths of requests.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use udm_core::{Batch, Cx, Device, DeviceControlError, DeviceId, Lane, Limits, Op, Sectors, Status};
use udm_frontends::nbd::{Export, Exports, NbdServer, NbdServerLimits};
use udm_runtime::{Runtime, RuntimeOptions};
use udm_wire::nbd::{
    ClientFlags, CommandFlags, EINVAL, GREETING_SIZE, NbdCommand, NbdOption, NbdRequestHeader,
    OPTION_REPLY_HEADER_SIZE, OptionReplyHeader, REP_ACK, ReplyHeader, encode_client_flags,
};

const MIB: u64 = 1 << 20;
const NONE: CommandFlags = CommandFlags::empty();

/// A server with one export on one core, and its client with simple replies.
struct ServerFixture {
    server: NbdServer,
    runtime: Runtime,
    stream: UnixStream,
    cookie: u64,
}

impl ServerFixture {
    fn new(device: Arc<dyn Device>, options: NbdServerLimits) -> ServerFixture {
        let spin_max = Duration::from_micros(20);
        let runtime = Runtime::start(&RuntimeOptions { cpus: vec![None], poll: false, spin_max }).unwrap();
        let exports = Arc::new(Exports::new());
        exports.add(Export::new("", "", false, device).unwrap()).unwrap();
        let server = NbdServer::start(runtime.core_set(), exports, options, &[]).unwrap();
        let (mut stream, socket) = UnixStream::pair().unwrap();
        // A limit against hanging forever.
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        server.adopt(socket.into()).unwrap();
        stream.read_exact(&mut [0; GREETING_SIZE]).unwrap();
        let mut bytes = encode_client_flags(ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES).to_vec();
        NbdOption::Go(Default::default()).encode(&mut bytes);
        stream.write_all(&bytes).unwrap();
        loop {
            let mut header = [0; OPTION_REPLY_HEADER_SIZE];
            stream.read_exact(&mut header).unwrap();
            let header = OptionReplyHeader::decode(&header).unwrap();
            stream.read_exact(&mut vec![0; header.len as usize]).unwrap();
            if header.reply == REP_ACK {
                return ServerFixture { server, runtime, stream, cookie: 0 };
            }
        }
    }

    fn over(uri: &str) -> ServerFixture {
        let device =
            udm_backends::open_standalone_device(&udm_wire::uri::parse_device_uri(uri).unwrap()).unwrap();
        ServerFixture::new(device, NbdServerLimits::default())
    }

    /// Sends a request. Returns the error and the data of a read.
    fn ask(
        &mut self,
        command: NbdCommand,
        flags: CommandFlags,
        offset: u64,
        len: u32,
        payload: &[u8],
    ) -> (u32, Vec<u8>) {
        self.cookie += 1;
        let request = NbdRequestHeader { flags, command, cookie: self.cookie, offset, len: len.into() };
        self.stream.write_all(&request.encode()).unwrap();
        self.stream.write_all(payload).unwrap();
        let mut header = [0; 16];
        self.stream.read_exact(&mut header).unwrap();
        let Some(ReplyHeader::Simple(reply)) = ReplyHeader::decode(&mut &header[..]).unwrap() else {
            panic!("a structured reply that nobody asked for")
        };
        assert_eq!(reply.cookie, self.cookie);
        let carries = command == NbdCommand::Read && reply.error == 0;
        let mut data = vec![0; if carries { len as usize } else { 0 }];
        self.stream.read_exact(&mut data).unwrap();
        (reply.error, data)
    }

    fn end(self) {
        drop(self.stream);
        self.server.stop();
        self.runtime.stop();
    }
}

/// A device with given limits that does nothing and records the ranges of its requests in bytes.
struct RecordingDevice {
    id: DeviceId,
    limits: Limits,
    /// Each write-zeroes fails as not supported.
    zeroes_refused: bool,
    seen: Arc<Mutex<Vec<(Op, u64, u64)>>>,
    /// The most requests in one turn.
    batch_max: Arc<AtomicUsize>,
}

impl RecordingDevice {
    fn new(size: u64, range_max: u64) -> RecordingDevice {
        let mut limits = Limits::new(Sectors::from_bytes(size));
        limits.max_discard = Sectors::from_bytes(range_max);
        limits.max_write_zeroes = Sectors::from_bytes(range_max);
        RecordingDevice {
            id: DeviceId::new(),
            limits,
            zeroes_refused: false,
            seen: Arc::default(),
            batch_max: Arc::default(),
        }
    }
}

impl Device for RecordingDevice {
    fn id(&self) -> DeviceId {
        self.id
    }
    fn open(&self, _: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        let (refused, seen) = (self.zeroes_refused, self.seen.clone());
        let batch_max = self.batch_max.clone();
        Ok(Box::new(RecordingLane { ready: Batch::new(), refused, seen, batch_max }))
    }
    fn limits(&self) -> Limits {
        self.limits
    }
}

struct RecordingLane {
    ready: Batch,
    refused: bool,
    seen: Arc<Mutex<Vec<(Op, u64, u64)>>>,
    batch_max: Arc<AtomicUsize>,
}

impl Lane for RecordingLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.batch_max.fetch_max(batch.len(), Ordering::Relaxed);
        for bio in batch.iter_mut() {
            self.seen.lock().unwrap().push((bio.op, bio.sector.bytes(), bio.sectors.bytes()));
            bio.end_with(if self.refused && bio.op == Op::WriteZeroes {
                Status::NotSupp
            } else {
                Status::Ok
            });
        }
        self.ready.append(batch);
        cx.wake_now();
    }
    fn poll(&mut self, done: &mut Batch, _: &mut Cx<'_>) {
        done.append(&mut self.ready);
    }
}

/// A device announces the longest discard and write-zeroes, and its lane may rely on it.
#[test]
fn ranges_are_cut_to_the_limits_of_the_device() {
    // A limit that is no multiple of the block is rounded down.
    for (range_max, piece) in [(MIB, MIB), (MIB + 512, MIB)] {
        let mut device = RecordingDevice::new(1 << 33, range_max);
        device.limits.logical_block = 4096;
        let seen = device.seen.clone();
        let mut world = ServerFixture::new(Arc::new(device), NbdServerLimits::default());
        for (command, op) in [(NbdCommand::Trim, Op::Discard), (NbdCommand::WriteZeroes, Op::WriteZeroes)] {
            let (start, len) = (4 << 30, 5 * MIB as u32 + 4096);
            assert_eq!(world.ask(command, CommandFlags::FUA, start, len, &[]).0, 0);
            let mut expected: Vec<_> = (0..5).map(|i| (op, start + i * piece, piece)).collect();
            expected.push((op, start + 5 * piece, 4096));
            expected.push((Op::Flush, 0, 0));
            assert_eq!(std::mem::take(&mut *seen.lock().unwrap()), expected);
        }
        // The longest range in the protocol.
        assert_eq!(world.ask(NbdCommand::Trim, NONE, 4096, u32::MAX - 4095, &[]).0, 0);
        let seen = std::mem::take(&mut *seen.lock().unwrap());
        assert!(seen.iter().all(|&(op, _, len)| op == Op::Discard && len <= piece));
        assert_eq!(seen.iter().map(|s| s.2).sum::<u64>(), (1 << 32) - 4096);
        world.end();
    }
}

/// A device that does not support write-zeroes gets the same range as data.
#[test]
fn refused_zeroes_become_writes_of_the_whole_range() {
    let mut device = RecordingDevice::new(1 << 30, MIB);
    device.zeroes_refused = true;
    let seen = device.seen.clone();
    let mut world = ServerFixture::new(Arc::new(device), NbdServerLimits::default());
    let len = 3 * MIB as u32 + 512;
    assert_eq!(world.ask(NbdCommand::WriteZeroes, CommandFlags::FUA, 512, len, &[]).0, 0);
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    let mut at = 512;
    for &(op, offset, bytes) in seen.iter().filter(|s| s.0 == Op::Write) {
        assert_eq!((op, offset), (Op::Write, at));
        at += bytes;
    }
    assert_eq!(at, 512 + u64::from(len));
    assert_eq!(seen.iter().filter(|s| s.0 == Op::WriteZeroes).count(), 1, "asked once and no more");
    assert_eq!(seen.last(), Some(&(Op::Flush, 0, 0)));
    world.end();
}

/// A turn takes in a limited number of a client's requests, because the core has other clients.
#[test]
fn a_flood_of_short_requests_is_taken_in_over_many_turns() {
    let device = RecordingDevice::new(1 << 30, MIB);
    let (seen, batch_max) = (device.seen.clone(), device.batch_max.clone());
    let mut world = ServerFixture::new(Arc::new(device), NbdServerLimits::default());
    let mut bytes = Vec::new();
    for cookie in 0..20_000 {
        let request =
            NbdRequestHeader { flags: NONE, command: NbdCommand::Trim, cookie, offset: 0, len: 512 };
        bytes.extend_from_slice(&request.encode());
    }
    let mut writer = world.stream.try_clone().unwrap();
    let writing = std::thread::spawn(move || writer.write_all(&bytes).unwrap());
    for cookie in 0..20_000u64 {
        let mut reply = [0; 16];
        world.stream.read_exact(&mut reply).unwrap();
        assert_eq!((&reply[4..8], &reply[8..]), (&[0; 4][..], &cookie.to_be_bytes()[..]));
    }
    writing.join().unwrap();
    assert_eq!(seen.lock().unwrap().len(), 20_000);
    let most = batch_max.load(Ordering::Relaxed);
    assert!(most <= 512, "{most} requests of one client in one turn");
    world.end();
}

/// A command that was not offered is refused before it reaches the device.
#[test]
fn a_trim_that_was_not_offered() {
    let device = RecordingDevice::new(1 << 30, 0);
    let seen = device.seen.clone();
    let mut world = ServerFixture::new(Arc::new(device), NbdServerLimits::default());
    assert_eq!(world.ask(NbdCommand::Trim, NONE, 0, 4096, &[]).0, EINVAL);
    assert!(seen.lock().unwrap().is_empty());
    // Zeroes are always offered: if the device does not support them, they are written as data.
    assert_eq!(world.ask(NbdCommand::WriteZeroes, NONE, 0, 4096, &[]).0, 0);
    world.end();
}

/// The smallest limits let in one request at a time, of any length.
#[test]
fn the_smallest_bounds() {
    let options = NbdServerLimits { requests_max: 0, bytes_max: 0, ..NbdServerLimits::default() };
    let device =
        udm_backends::open_standalone_device(&udm_wire::uri::parse_device_uri("mem:64M").unwrap()).unwrap();
    let mut world = ServerFixture::new(device, options);
    for len in [512, 4096, 12_288, 65_536, 300_032, 3 << 20] {
        let data: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
        assert_eq!(world.ask(NbdCommand::Write, NONE, MIB, len, &data).0, 0, "{len}");
        assert!(world.ask(NbdCommand::Read, NONE, MIB, len, &[]) == (0, data), "{len}");
    }
    // Several requests at once, cut at the ends of receives.
    let mut bytes = Vec::new();
    for cookie in 0..40 {
        let request =
            NbdRequestHeader { flags: NONE, command: NbdCommand::Write, cookie, offset: 0, len: 7 * 512 };
        bytes.extend_from_slice(&request.encode());
        bytes.resize(bytes.len() + 7 * 512, 5);
    }
    world.stream.write_all(&bytes).unwrap();
    for cookie in 0..40 {
        let mut reply = [0; 16];
        world.stream.read_exact(&mut reply).unwrap();
        assert_eq!((&reply[4..8], &reply[8..]), (&[0; 4][..], &u64::to_be_bytes(cookie)[..]));
    }
    world.end();
}

/// Reads return written data, discarded and zeroed ranges are zero, and other data is unchanged.
#[test]
fn a_disk_of_memory() {
    let mut world = ServerFixture::over("mem:1G");
    let data: Vec<u8> = (0..32 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for offset in [0, 100 * MIB, 1024 * MIB - (32 << 20)] {
        assert_eq!(world.ask(NbdCommand::Write, CommandFlags::FUA, offset, 32 << 20, &data).0, 0);
    }
    assert_eq!(world.ask(NbdCommand::Cache, NONE, 0, 1 << 30, &[]).0, 0);
    assert_eq!(world.ask(NbdCommand::WriteZeroes, NONE, 512, (100 * MIB) as u32, &[]).0, 0);
    assert_eq!(world.ask(NbdCommand::Trim, CommandFlags::FUA, 990 * MIB, (34 * MIB) as u32, &[]).0, 0);
    assert!(world.ask(NbdCommand::Read, NONE, 0, 512, &[]) == (0, data[..512].to_vec()));
    let (error, kept) = world.ask(NbdCommand::Read, NONE, 100 * MIB, 32 << 20, &[]);
    assert_eq!((error, &kept[..512]), (0, &[0; 512][..]));
    assert!(kept[512..] == data[512..]);
    let (error, gone) = world.ask(NbdCommand::Read, NONE, 992 * MIB, 32 << 20, &[]);
    assert!(error == 0 && gone.iter().all(|&b| b == 0));
    assert_eq!(world.ask(NbdCommand::Flush, NONE, 0, 0, &[]).0, 0);
    world.end();
}
