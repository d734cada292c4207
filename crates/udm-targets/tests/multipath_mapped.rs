//! Multipath as the table of a mapped device: what may replace what, messages that let held bios
//! go, repair by reload.

mod multipath_rig;

use multipath_rig::{SIZE, disks};
use std::sync::Arc;
use udm_core::errno::{EBUSY, EINVAL};
use udm_core::{Cores, DevNo, Lane, Op, Status};
use udm_dm::testing::{TestDisk, TestIo, TestResolver, TestWorld, bare};
use udm_dm::{MappedDevice, Table, TargetError};

struct Host {
    world: TestWorld,
    cores: Arc<dyn Cores>,
    disks: Vec<Arc<TestDisk>>,
    resolver: TestResolver,
    device: Arc<MappedDevice>,
    lane: Box<dyn Lane>,
}

impl Host {
    fn new(table: &str) -> Host {
        let (disks, resolver) = disks(4);
        let mut world = TestWorld::new(1);
        let device = MappedDevice::new("t", None, DevNo { major: 254, minor: 0 }).unwrap();
        let lane = world.open(0, &*device).unwrap();
        let cores: Arc<dyn Cores> = world.cores();
        let mut host = Host { world, cores, disks, resolver, device, lane };
        host.load(table).unwrap();
        host.resume();
        host
    }

    fn load(&mut self, table: &str) -> Result<(), TargetError> {
        let lines = udm_wire::table::parse(table).unwrap();
        self.device.load(Table::build(udm_targets::TARGETS, &lines, &mut self.resolver, &TestIo::new(), 1)?)
    }

    fn suspend(&mut self, noflush: bool) -> Vec<Status> {
        let change = self.device.suspend(noflush, Arc::new(|| {})).unwrap();
        self.finish(change)
    }

    fn resume(&mut self) -> Vec<Status> {
        let change = self.device.resume(Arc::new(|| {})).unwrap();
        self.finish(change)
    }

    /// Steps a change to its end; what came back meanwhile.
    fn finish(&mut self, mut change: udm_dm::Change) -> Vec<Status> {
        let mut back = Vec::new();
        for _ in 0..20 {
            let over = change.step(&*self.cores);
            back.extend(self.poll());
            if let Some(result) = over {
                result.unwrap();
                back.extend(self.poll());
                return back;
            }
        }
        panic!("the change does not end");
    }

    fn poll(&mut self) -> Vec<Status> {
        self.world.poll(0, &mut *self.lane).iter().map(|bio| bio.status).collect()
    }

    fn read(&mut self) -> Vec<Status> {
        self.world.submit(0, &mut *self.lane, [bare(Op::Read, 0, 8)]);
        self.poll()
    }

    fn message(&mut self, text: &str) -> Result<String, TargetError> {
        let words: Vec<String> = text.split(' ').map(String::from).collect();
        self.device.message(0, &words, &mut self.resolver, &*self.cores)
    }
}

const REQUEST: &str = "0 32768 multipath 1 queue_if_no_path 0 1 1 round-robin 0 1 0 253:0";
const BIO: &str = "0 32768 multipath 3 queue_if_no_path queue_mode bio 0 1 1 round-robin 0 1 0 253:0";

/// A live multipath device takes multipath of its own mode, or the error target, and nothing else.
#[test]
fn what_may_replace_it() {
    for (table, other) in [(REQUEST, BIO), (BIO, REQUEST)] {
        let mut host = Host::new(table);
        assert_eq!(host.load(other).unwrap_err().errno, EINVAL);
        assert_eq!(host.load("0 32768 linear 253:1 0").unwrap_err().errno, EINVAL);
        host.load(table).unwrap();
        host.load("0 32768 error").unwrap();
    }
}

/// In request mode every path must be request-based; a linear device is not.
#[test]
fn stacking() {
    let mut host = Host::new(REQUEST);
    let linear = MappedDevice::new("p", None, DevNo { major: 254, minor: 1 }).unwrap();
    let lines = udm_wire::table::parse("0 32768 linear 253:1 0").unwrap();
    linear
        .load(Table::build(udm_targets::TARGETS, &lines, &mut host.resolver, &TestIo::new(), 1).unwrap())
        .unwrap();
    let change = linear.resume(Arc::new(|| {})).unwrap();
    host.finish(change);
    host.resolver.add("/dev/mapper/p", linear.number(), linear);
    let mut build = |features: &str| {
        let text = format!("0 {SIZE} multipath {features} 0 1 1 round-robin 0 1 0 /dev/mapper/p");
        let lines = udm_wire::table::parse(&text).unwrap();
        Table::build(udm_targets::TARGETS, &lines, &mut host.resolver, &TestIo::new(), 1)
            .map(|table| table.text())
    };
    let error = build("0").unwrap_err();
    assert_eq!(
        (error.errno, error.text.as_str()),
        (22, "table load rejected: including non-request-stackable devices")
    );
    let printed =
        "0 32768 multipath 3 retain_attached_hw_handler queue_mode bio 0 1 1 round-robin 0 1 1 254:1 1 ";
    assert_eq!(build("2 queue_mode bio").unwrap(), printed);
}

/// A message has the lanes look: the held read goes at once.
#[test]
fn a_message_lets_held_bios_go() {
    let mut host = Host::new(REQUEST);
    host.message("fail_path /dev/nullb0").unwrap();
    assert_eq!(host.read(), []);
    assert_eq!(host.device.event_nr(), 1);
    host.message("reinstate_path 253:0").unwrap();
    assert_eq!(host.poll(), [Status::Ok]);
    host.suspend(true);
    assert_eq!(host.message("fail_path 253:0").unwrap_err().errno, EBUSY);
    host.resume();
    host.message("fail_path 253:0").unwrap();
    assert_eq!((host.read(), host.device.event_nr()), (vec![], 3));
    host.message("fail_if_no_path").unwrap();
    assert_eq!(host.poll(), [Status::IoErr]);
}

/// A map without paths is repaired by a no-flush suspend and a new table; an error table ends what
/// is held.
#[test]
fn repair_by_reload() {
    for table in [REQUEST, BIO] {
        for (new, want) in
            [(table.replace("253:0", "253:1"), Status::Ok), ("0 32768 error".into(), Status::IoErr)]
        {
            let mut host = Host::new(table);
            host.message("fail_path 253:0").unwrap();
            assert_eq!(host.read(), []);
            assert_eq!(host.suspend(true), []);
            host.load(&new).unwrap();
            assert_eq!(host.resume(), [want], "{new}");
        }
        let mut host = Host::new(table);
        host.message("fail_path 253:0").unwrap();
        assert_eq!(host.read(), []);
        assert_eq!(host.suspend(false), [Status::IoErr], "a flushing suspend fails what is held");
        assert!(!host.device.table_text(false).contains("queue_if_no_path"));
        host.resume();
        assert!(host.device.table_text(false).contains("queue_if_no_path"));
    }
}

/// A path that is a mapped device can be suspended while it has nothing to do, under a multipath
/// that sends it nothing.
#[test]
fn an_idle_path_can_be_suspended() {
    let mut host = Host::new("0 32768 multipath 2 queue_mode bio 0 1 1 round-robin 0 1 0 253:0");
    let path = MappedDevice::new("p", None, DevNo { major: 254, minor: 1 }).unwrap();
    let lines = udm_wire::table::parse("0 32768 linear 253:1 0").unwrap();
    path.load(Table::build(udm_targets::TARGETS, &lines, &mut host.resolver, &TestIo::new(), 1).unwrap())
        .unwrap();
    let change = path.resume(Arc::new(|| {})).unwrap();
    host.finish(change);
    host.resolver.add("/dev/mapper/p", path.number(), path.clone());
    let table =
        "0 32768 multipath 2 queue_mode bio 0 2 1 round-robin 0 1 0 253:0 round-robin 0 1 0 /dev/mapper/p";
    host.load(table).unwrap();
    host.resume();
    assert_eq!(host.read(), [Status::Ok]);
    let change = path.suspend(false, Arc::new(|| {})).unwrap();
    host.finish(change);
    assert_eq!(host.read(), [Status::Ok]);
    let change = path.resume(Arc::new(|| {})).unwrap();
    host.finish(change);
    host.message("switch_group 2").unwrap();
    assert_eq!(host.read(), [Status::Ok]);
    assert_eq!(host.disks[1].take_log().len(), 1);
}

/// The same table loaded a hundred times under load: nothing is lost, failed or doubled.
#[test]
fn reload_under_load() {
    let mut host = Host::new(REQUEST);
    let mut back = Vec::new();
    for round in 0..100_u64 {
        let bios = (0..8).map(|i| {
            let mut bio = bare(Op::Read, i, 8);
            bio.cookie = round * 8 + i;
            bio
        });
        host.disks[0].hold(round % 2 == 0);
        host.world.submit(0, &mut *host.lane, bios);
        host.load(REQUEST).unwrap();
        let change = host.device.suspend(round % 3 == 0, Arc::new(|| {})).unwrap();
        host.disks[0].hold(false);
        back.extend(host.finish(change));
        back.extend(host.resume());
    }
    assert_eq!(back, [Status::Ok; 800]);
}
