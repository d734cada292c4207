//! Mapped devices over disks in memory on one core, driven by hand.
#![allow(dead_code, reason = "each test program uses its part")]

use std::sync::Arc;
use udm_core::{Batch, DevNo, Lane, Limits, Sectors};
use udm_targets::testing::{TestDisk, TestResolver, TestWorld};
use udm_targets::{Change, MappedDevice, Table, TargetError};

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
        device.load(Table::build(&lines, &mut self.resolver, 1)?)
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
