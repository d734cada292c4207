//! Multipath as the table of a mapped device on one core.

use super::disks;
use std::sync::Arc;
use udm_core::{Cores, DevNo, Lane, Op, Status};
use udm_dm::testing::{TestControlIo, TestDisk, TestResolver, TestWorld, bare};
use udm_dm::{MappedDevice, Table, TargetError};

/// The device, and what it lies on.
pub struct MappedRig {
    pub world: TestWorld,
    pub cores: Arc<dyn Cores>,
    pub disks: Vec<Arc<TestDisk>>,
    pub resolver: TestResolver,
    pub device: Arc<MappedDevice>,
    pub lane: Box<dyn Lane>,
}

impl MappedRig {
    /// Over `/dev/nullb0` to `/dev/nullb3`, with `table` live.
    pub fn new(table: &str) -> MappedRig {
        let (disks, resolver) = disks(4);
        let mut world = TestWorld::new(1);
        let device = MappedDevice::new("t", None, DevNo { major: 254, minor: 0 }).unwrap();
        let lane = world.open(0, &*device).unwrap();
        let cores: Arc<dyn Cores> = world.cores();
        let mut host = MappedRig { world, cores, disks, resolver, device, lane };
        host.load(table).unwrap();
        host.resume();
        host
    }

    /// Loads a table into the inactive place.
    pub fn load(&mut self, table: &str) -> Result<(), TargetError> {
        let lines = udm_wire::table::parse(table).unwrap();
        self.device.load(Table::build(
            udm_targets::TARGETS,
            &lines,
            &mut self.resolver,
            &TestControlIo::new(),
            1,
        )?)
    }

    /// Suspends; what came back meanwhile.
    pub fn suspend(&mut self, noflush: bool) -> Vec<Status> {
        let change = self.device.suspend(noflush, Arc::new(|| {})).unwrap();
        self.finish(change)
    }

    /// Resumes; what came back meanwhile.
    pub fn resume(&mut self) -> Vec<Status> {
        let change = self.device.resume(Arc::new(|| {})).unwrap();
        self.finish(change)
    }

    /// Steps a change to its end; what came back meanwhile.
    pub fn finish(&mut self, mut change: udm_dm::DeviceTransition) -> Vec<Status> {
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

    /// What came back.
    pub fn poll(&mut self) -> Vec<Status> {
        self.world.poll(0, &mut *self.lane).iter().map(|bio| bio.status).collect()
    }

    /// Reads 4 KiB; what came back, nothing if it is held.
    pub fn read(&mut self) -> Vec<Status> {
        self.world.submit(0, &mut *self.lane, [bare(Op::Read, 0, 8)]);
        self.poll()
    }

    /// A message, as a client sends it.
    pub fn message(&mut self, text: &str) -> Result<String, TargetError> {
        let words: Vec<String> = text.split(' ').map(String::from).collect();
        self.device.message(0, &words, &mut self.resolver, &*self.cores)
    }
}
