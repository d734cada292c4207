//! Mapped devices over disks in memory on one core, stepped by hand.
#![allow(dead_code, reason = "each test program uses its part")]

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use udm_core::{Batch, Cx, DevNo, Device, DeviceControlError, DeviceId, Lane, Limits, Sectors};
use udm_dm::testing::{SteppedTestCores, TestControlIo, TestDeviceNameResolver, TestDisk};
use udm_dm::{DeviceTransition, MappedDevice, Table, TargetError};

pub struct Fixture {
    pub world: SteppedTestCores,
    pub resolver: TestDeviceNameResolver,
    made: u32,
}

impl Fixture {
    pub fn new() -> Fixture {
        Fixture { world: SteppedTestCores::new(1), resolver: TestDeviceNameResolver::new(), made: 0 }
    }

    /// Creates a disk that stores nothing; `name` is its name in tables.
    pub fn disk(&mut self, name: &str, sectors: u64) -> Arc<TestDisk> {
        let disk = TestDisk::null(Limits::new(Sectors(sectors)));
        self.made += 1;
        self.resolver.add(name, DevNo { major: 7, minor: self.made }, Arc::<TestDisk>::clone(&disk));
        disk
    }

    /// Creates a device without a table; tables name it `@name`.
    pub fn make(&mut self, name: &str) -> Arc<MappedDevice> {
        self.made += 1;
        let number = DevNo { major: 254, minor: self.made };
        let device = MappedDevice::new(name, None, number).unwrap();
        self.resolver.add(&format!("@{name}"), number, Arc::<MappedDevice>::clone(&device));
        device
    }

    pub fn load(&mut self, device: &MappedDevice, text: &str) -> Result<(), TargetError> {
        let lines = udm_wire::table::parse_table(text).unwrap();
        device.load(Table::build(udm_targets::TARGETS, &lines, &mut self.resolver, &TestControlIo::new(), 1)?)
    }

    /// A device with a live table. No lanes are open, so no core has to answer.
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

    /// Steps `change` to its end and polls `lanes`. Bios that come back are added to `done`.
    pub fn finish(
        &mut self,
        mut change: DeviceTransition,
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

/// A disk that records which thread dropped the last reference to it, including those of its lanes.
pub struct CloseProbe(Arc<CloseState>);

#[derive(Default)]
struct CloseState {
    in_turn: Arc<AtomicBool>,
    refuse: AtomicBool,
    closed: Mutex<Option<&'static str>>,
}

/// Held by the disk and each of its lanes; its drop records the close.
struct CloseGuard(Arc<CloseState>);

impl Drop for CloseGuard {
    fn drop(&mut self) {
        let by = if self.0.in_turn.load(Relaxed) { "a core" } else { "the control side" };
        *self.0.closed.lock().unwrap() = Some(by);
    }
}

struct CloseProbeDisk(DeviceId, Arc<CloseGuard>);

struct CloseProbeLane(#[expect(dead_code, reason = "dropping it records the close")] Arc<CloseGuard>, Batch);

impl CloseProbe {
    pub fn closed_by(&self) -> Option<&'static str> {
        *self.0.closed.lock().unwrap()
    }

    /// If `refuse` is true, opening a lane fails.
    pub fn refuse(&self, refuse: bool) {
        self.0.refuse.store(refuse, Relaxed);
    }
}

impl Device for CloseProbeDisk {
    fn id(&self) -> DeviceId {
        self.0
    }

    fn open(&self, _cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        match self.1.0.refuse.load(Relaxed) {
            true => Err(DeviceControlError::new(24, "too many open files")),
            false => Ok(Box::new(CloseProbeLane(Arc::clone(&self.1), Batch::new()))),
        }
    }

    fn limits(&self) -> Limits {
        Limits::new(Sectors(64))
    }
}

impl Lane for CloseProbeLane {
    fn submit(&mut self, batch: &mut Batch, _cx: &mut Cx<'_>) {
        self.1.append(batch);
    }

    fn poll(&mut self, done: &mut Batch, _cx: &mut Cx<'_>) {
        done.append(&mut self.1);
    }
}

impl Fixture {
    pub fn closable(&mut self, name: &str) -> CloseProbe {
        let inner = Arc::new(CloseState { in_turn: self.world.in_turn(), ..CloseState::default() });
        let disk = Arc::new(CloseProbeDisk(DeviceId::new(), Arc::new(CloseGuard(Arc::clone(&inner)))));
        self.made += 1;
        self.resolver.add(name, DevNo { major: 7, minor: self.made }, disk);
        CloseProbe(inner)
    }
}
