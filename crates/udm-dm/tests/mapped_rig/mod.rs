//! Mapped devices over disks in memory on one core, driven by hand.
#![allow(dead_code, reason = "each test program uses its part")]

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use udm_core::{Batch, Cx, DevNo, Device, DeviceId, Lane, Limits, OpenError, Sectors};
use udm_dm::testing::{TestDisk, TestIo, TestResolver, TestWorld};
use udm_dm::{Change, MappedDevice, Table, TargetError};

pub struct Rig {
    pub world: TestWorld,
    pub resolver: TestResolver,
    made: u32,
}

impl Rig {
    pub fn new() -> Rig {
        Rig { world: TestWorld::new(1), resolver: TestResolver::new(), made: 0 }
    }

    /// A disk that stores nothing, as `name` in tables.
    pub fn disk(&mut self, name: &str, sectors: u64) -> Arc<TestDisk> {
        let disk = TestDisk::null(Limits::new(Sectors(sectors)));
        self.made += 1;
        self.resolver.add(name, DevNo { major: 7, minor: self.made }, Arc::<TestDisk>::clone(&disk));
        disk
    }

    /// A device without a table, as `@name` in tables.
    pub fn make(&mut self, name: &str) -> Arc<MappedDevice> {
        self.made += 1;
        let number = DevNo { major: 254, minor: self.made };
        let device = MappedDevice::new(name, None, number).unwrap();
        self.resolver.add(&format!("@{name}"), number, Arc::<MappedDevice>::clone(&device));
        device
    }

    pub fn load(&mut self, device: &MappedDevice, text: &str) -> Result<(), TargetError> {
        let lines = udm_wire::table::parse(text).unwrap();
        device.load(Table::build(udm_targets::TARGETS, &lines, &mut self.resolver, &TestIo::new(), 1)?)
    }

    /// A device with a live table; no lane is open that would have to be told.
    pub fn live(&mut self, name: &str, text: &str) -> Arc<MappedDevice> {
        let device = self.make(name);
        self.load(&device, text).unwrap();
        self.resume(&device, &mut []).unwrap();
        device
    }

    pub fn open(&mut self, device: &MappedDevice) -> Box<dyn Lane> {
        self.world.open(0, device).unwrap()
    }

    pub fn resume(
        &mut self,
        device: &Arc<MappedDevice>,
        lanes: &mut [&mut Box<dyn Lane>],
    ) -> Result<(), TargetError> {
        let change = device.resume(Arc::new(|| {})).unwrap();
        self.finish(change, lanes, &mut Batch::new())
    }

    /// Steps `change` to its end, polling `lanes`; what came back meanwhile goes to `done`.
    pub fn finish(
        &mut self,
        mut change: Change,
        lanes: &mut [&mut Box<dyn Lane>],
        done: &mut Batch,
    ) -> Result<(), TargetError> {
        let cores = self.world.cores();
        for _ in 0..100 {
            if let Some(result) = change.step(&*cores) {
                return result;
            }
            self.world.deliver(0);
            for lane in &mut *lanes {
                done.extend(self.world.poll(0, &mut ***lane));
            }
        }
        panic!("the change does not end");
    }
}

/// A disk that tells where it was closed: who dropped the last hold on it, its lanes' included.
pub struct Closable(Arc<Inner>);

#[derive(Default)]
struct Inner {
    in_turn: Arc<AtomicBool>,
    refuse: AtomicBool,
    closed: Mutex<Option<&'static str>>,
}

/// What is closed: the disk and each of its lanes hold it.
struct Open(Arc<Inner>);

impl Drop for Open {
    fn drop(&mut self) {
        let by = if self.0.in_turn.load(Relaxed) { "a core" } else { "the control side" };
        *self.0.closed.lock().unwrap() = Some(by);
    }
}

struct ClosableDisk(DeviceId, Arc<Open>);

struct ClosableLane(#[expect(dead_code, reason = "held for its drop")] Arc<Open>, Batch);

impl Closable {
    pub fn closed_by(&self) -> Option<&'static str> {
        *self.0.closed.lock().unwrap()
    }

    /// Lanes can't be opened.
    pub fn refuse(&self, refuse: bool) {
        self.0.refuse.store(refuse, Relaxed);
    }
}

impl Device for ClosableDisk {
    fn id(&self) -> DeviceId {
        self.0
    }

    fn open(&self, _cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        match self.1.0.refuse.load(Relaxed) {
            true => Err(OpenError::new(24, "too many open files")),
            false => Ok(Box::new(ClosableLane(Arc::clone(&self.1), Batch::new()))),
        }
    }

    fn limits(&self) -> Limits {
        Limits::new(Sectors(64))
    }
}

impl Lane for ClosableLane {
    fn submit(&mut self, batch: &mut Batch, _cx: &mut Cx<'_>) {
        self.1.append(batch);
    }

    fn poll(&mut self, done: &mut Batch, _cx: &mut Cx<'_>) {
        done.append(&mut self.1);
    }
}

impl Rig {
    pub fn closable(&mut self, name: &str) -> Closable {
        let inner = Arc::new(Inner { in_turn: self.world.in_turn(), ..Inner::default() });
        let disk = Arc::new(ClosableDisk(DeviceId::new(), Arc::new(Open(Arc::clone(&inner)))));
        self.made += 1;
        self.resolver.add(name, DevNo { major: 7, minor: self.made }, disk);
        Closable(inner)
    }
}
