//! The vhost-user-blk back end with a small machine. Real machines: `udm`'s `vhost_user_guest`.

mod driver;
mod fuzz;
mod hostile;
mod lives;

use driver::{DATA, MEMORY, TestMachine, message};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use udm_core::Device;
use udm_frontends::nbd::{Export, Exports};
use udm_frontends::vhost_user::VhostUserServer;
use udm_runtime::{Runtime, RuntimeOptions};
use udm_wire::virtio::VirtioFeatures;

const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

/// A server of the device `disk`, on two cores.
struct VhostUserServerFixture {
    folder: TempDir,
    runtime: Runtime,
    exports: Arc<Exports>,
    server: VhostUserServer,
}

impl VhostUserServerFixture {
    fn new(uri: &str) -> VhostUserServerFixture {
        let uri = udm_wire::uri::parse_device_uri(uri).unwrap();
        VhostUserServerFixture::of(udm_backends::open_standalone_device(&uri).unwrap())
    }

    fn of(device: Arc<dyn Device>) -> VhostUserServerFixture {
        let spin_max = Duration::from_micros(20);
        let runtime = Runtime::start(&RuntimeOptions { cpus: vec![None; 2], poll: false, spin_max }).unwrap();
        let exports = Arc::new(Exports::new());
        exports.add(Export::new("disk", "", false, device).unwrap()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.sock");
        let server = VhostUserServer::start(runtime.core_set(), &exports, "disk", &path).unwrap();
        VhostUserServerFixture { folder, runtime, exports, server }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("disk.sock")
    }

    fn machine(&self, rings: usize, features: VirtioFeatures) -> TestMachine {
        let mut machine = TestMachine::new(&self.path(), rings);
        machine.start(features);
        machine
    }

    fn end(self) {
        self.server.stop();
        self.runtime.stop();
    }
}

/// The ways in which a machine may use its rings.
const WAYS: [VirtioFeatures; 4] = [
    VirtioFeatures::empty(),
    VirtioFeatures::EVENT_IDX,
    VirtioFeatures::INDIRECT_DESC,
    VirtioFeatures::EVENT_IDX.union(VirtioFeatures::INDIRECT_DESC),
];

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i / 512) as u8 ^ (i as u8) ^ seed).collect()
}

/// Each operation, with data in one and in many buffers, over several rings.
#[test]
fn data_is_read_as_it_was_written() {
    let fixture = VhostUserServerFixture::new("mem:16M");
    for (seed, features) in WAYS.into_iter().enumerate() {
        let mut machine = fixture.machine(3, features | VirtioFeatures::BLK_FLUSH);
        for ring in 0..3 {
            let data = pattern(64 << 10, (seed * 3 + ring) as u8);
            machine.write(DATA, &data);
            let parts = [(DATA, 512), (DATA + 512, 1 << 10), (DATA + 1536, (64 << 10) - 1536)];
            assert_eq!(machine.request(ring, WRITE, 100, &parts, &[]), (0, 1));
            assert_eq!(machine.request(ring, FLUSH, 0, &[], &[]), (0, 1));
            let other = DATA + (1 << 20);
            let parts = [(other, 4096), (other + 4096, 60 << 10)];
            assert_eq!(machine.request(ring, READ, 100, &[], &parts), (0, (64 << 10) + 1));
            assert!(machine.read((other, 64 << 10)) == data, "{features:?}, ring {ring}");
            // Buffers of odd lengths, which begin anywhere.
            let parts = [(other + 1, 3), (other + 7, 505), (other + 1001, 516)];
            assert_eq!(machine.request(ring, READ, 101, &[], &parts), (0, 1025));
            let seen: Vec<u8> = parts.iter().flat_map(|place| machine.read(*place)).collect();
            assert!(seen == data[512..1536], "{features:?}, ring {ring}");
        }
        drop(machine);
    }
    fixture.end();
}

#[test]
fn ranges_are_discarded_and_zeroed() {
    let fixture = VhostUserServerFixture::new("mem:16M");
    let mut machine = fixture.machine(1, VirtioFeatures::empty());
    machine.write(DATA, &pattern(8192, 5));
    assert_eq!(machine.request(0, WRITE, 0, &[(DATA, 8192)], &[]).0, 0);
    let range = |sector: u64, sectors: u32, flags: u32| {
        [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
    };
    machine.write(DATA, &[range(0, 2, 0), range(4, 4, 1)].concat());
    assert_eq!(machine.request(0, WRITE_ZEROES, 0, &[(DATA, 16), (DATA + 16, 16)], &[]), (0, 1));
    assert_eq!(machine.request(0, READ, 0, &[], &[(DATA, 8192)]).0, 0);
    let mut expected = pattern(8192, 5);
    expected[..1024].fill(0);
    expected[2048..4096].fill(0);
    assert!(machine.read((DATA, 8192)) == expected);
    machine.write(DATA, &range(8, 8, 0));
    assert_eq!(machine.request(0, DISCARD, 0, &[(DATA, 16)], &[]).0, 0);
    // Reserved flags, a range beyond the end, and half a range.
    for (bytes, status) in
        [(range(0, 8, 2), 2), (range(0, 8, 1), 2), (range(u64::MAX, 8, 0), 1), (range(0, 0, 0), 1)]
    {
        machine.write(DATA, &bytes);
        assert_eq!(machine.request(0, DISCARD, 0, &[(DATA, 16)], &[]).0, status, "{bytes:?}");
    }
    assert_eq!(machine.request(0, DISCARD, 0, &[(DATA, 15)], &[]).0, 2);
    assert_eq!(machine.request(0, DISCARD, 0, &[], &[]).0, 2);
    assert_eq!(machine.request(0, GET_ID, 0, &[], &[(DATA, 20)]), (0, 21));
    assert_eq!(machine.read((DATA, 6)), b"disk\0\0");
    fixture.end();
}

/// A full ring without kicks in between: one kick, and all complete, on as few notifications as the
/// machine asks for.
#[test]
fn a_batch_needs_one_notification_each_way() {
    let fixture = VhostUserServerFixture::new("null:1G");
    for features in [VirtioFeatures::EVENT_IDX, VirtioFeatures::empty()] {
        let mut machine = fixture.machine(1, features | VirtioFeatures::INDIRECT_DESC);
        for _ in 0..50 {
            let old = machine.avail(0);
            for i in 0..100 {
                machine.add(0, READ, i * 8, &[], &[(DATA + 4096 * i as usize, 4096)]);
            }
            machine.kick(0, old);
            machine.wait_for_call(0);
            for _ in 0..100 {
                machine.wait_used(0);
            }
        }
    }
    fixture.end();
}

/// A queue that was idle gets its next kick, however long it was idle.
#[test]
fn a_sleeping_core_asks_for_a_notification() {
    let fixture = VhostUserServerFixture::new("null:1G");
    for features in WAYS {
        let mut machine = fixture.machine(2, features);
        for pause in [0, 1, 30, 100] {
            std::thread::sleep(Duration::from_millis(pause));
            for ring in [0, 1] {
                let old = machine.avail(ring);
                machine.add(ring, READ, 0, &[], &[(DATA, 512)]);
                let kicked = machine.kick(ring, old);
                assert!(kicked || pause < 30, "a core that sleeps needs a kick");
                machine.wait_used(ring);
            }
        }
    }
    fixture.end();
}

/// A request that completes while its core sleeps: the core asks for a notification again.
#[test]
fn a_core_that_a_completion_woke_asks_for_a_notification() {
    let fixture = VhostUserServerFixture::new("null:size=1G,irqmode=2,completion_nsec=20000000");
    for features in WAYS {
        let mut machine = fixture.machine(1, features);
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(30));
            let old = machine.avail(0);
            machine.add(0, READ, 0, &[], &[(DATA, 512)]);
            assert!(machine.kick(0, old), "{features:?}: a core that sleeps needs a kick");
            machine.wait_used(0);
        }
    }
    fixture.end();
}

#[test]
fn requests_that_cannot_be_are_refused() {
    let fixture = VhostUserServerFixture::new("mem:1M");
    let mut machine = fixture.machine(1, VirtioFeatures::empty());
    let end = (1 << 20) / 512;
    for (kind, sector, len, status) in [
        (READ, end, 512, 1),
        (READ, end - 1, 1024, 1),
        (READ, u64::MAX, 512, 1),
        (READ, 0, 513, 1),
        (READ, end - 1, 512, 0),
        (WRITE, end - 1, 512, 0),
        (2, 0, 512, 2),
        (77, 0, 512, 2),
    ] {
        let place = [(DATA, len)];
        let (readable, writable) = if kind == WRITE { (&place[..], &[][..]) } else { (&[][..], &place[..]) };
        assert_eq!(machine.request(0, kind, sector, readable, writable).0, status, "{kind} {sector} {len}");
    }
    // A buffer beyond the memory.
    assert_eq!(machine.request(0, READ, 0, &[], &[(MEMORY - 100, 512)]).0, 1);
    assert_eq!(machine.request(0, READ, 0, &[], &[]).0, 1, "no data");
    fixture.end();
}

#[test]
fn the_write_cache_can_be_switched_off() {
    let fixture = VhostUserServerFixture::new("null:size=1G,memory_backed=on,cache_size=4M");
    let mut machine = fixture.machine(1, VirtioFeatures::BLK_FLUSH | VirtioFeatures::BLK_CONFIG_WCE);
    let config = machine.config();
    assert_eq!((config[..8].to_vec(), config[32]), (((1u64 << 30) / 512).to_le_bytes().to_vec(), 1));
    let mut payload: Vec<u8> = [32u32, 1, 0].iter().flat_map(|word| word.to_ne_bytes()).collect();
    payload.push(0);
    machine.tell(message::SET_CONFIG, &payload, &[]);
    assert_eq!(machine.config()[32], 0);
    machine.write(DATA, &pattern(4096, 1));
    assert_eq!(machine.request(0, WRITE, 0, &[(DATA, 4096)], &[]).0, 0);
    // What was written survives a power cut, although nobody has flushed.
    let export = fixture.exports.get("disk").unwrap();
    let power = export.device().power().expect("a null device has a switch");
    power.turn(false);
    power.turn(true);
    assert_eq!(machine.request(0, READ, 0, &[], &[(DATA + 4096, 4096)]).0, 0);
    assert!(machine.read((DATA + 4096, 4096)) == pattern(4096, 1));
    fixture.end();
}
