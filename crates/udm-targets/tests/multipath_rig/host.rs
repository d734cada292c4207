//! Multipath as the table of a mapped device on one core.

use super::disks;
use std::sync::Arc;
use udm_core::{CoreCommandSender, DevNo, Lane, Op, Status};
use udm_dm::testing::{SteppedTestCores, TestControlIo, TestDeviceNameResolver, TestDisk, bio_without_data};
use udm_dm::{MappedDevice, Table, TargetError};

/// The device and the devices below it.
pub struct MappedRig {
    pub world: SteppedTestCores,
    pub cores: Arc<dyn CoreCommandSender>,
    pub disks: Vec<Arc<TestDisk>>,
    pub resolver: TestDeviceNameResolver,
    pub device: Arc<MappedDevice>,
    pub lane: Box<dyn Lane>,
}

impl MappedRig {
    /// A device over `/dev/nullb0` to `/dev/nullb3`, with `table` live.
    pub fn new(table: &str) -> MappedRig {
        let (disks, resolver) = disks(4);
        let mut world = SteppedTestCores::new(1);
        let device = MappedDevice::new("t", None, DevNo { major: 254, minor: 0 }).unwrap();
        let lane = world.open(0, &*device).unwrap();
        let cores: Arc<dyn CoreCommandSender> = world.cores();
        let mut host = MappedRig { world, cores, disks, resolver, device, lane };
        host.load(table).unwrap();
        host.resume();
        host
    }

    /// Loads `table` as the inactive table.
    pub fn load(&mut self, table: &str) -> Result<(), TargetError> {
        let lines = udm_wire::table::parse_table(table).unwrap();
        self.device.load(Table::build(
            udm_targets::TARGETS,
            &lines,
            &mut self.resolver,
            &TestControlIo::new(),
            1,
        )?)
    }

    /// Suspends. Returns the statuses of bios that completed in the meantime.
    pub fn suspend(&mut self, noflush: bool) -> Vec<Status> {
        let change = self.device.suspend(noflush, Arc::new(|| {})).unwrap();
        self.finish(change)
    }

    /// Resumes. Returns the statuses of bios that completed in the meantime.
    pub fn resume(&mut self) -> Vec<Status> {
        let change = self.device.resume(Arc::new(|| {})).unwrap();
        self.finish(change)
    }

    /// Steps a change to its end. Returns the statuses of bios that completed in the meantime.
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

    /// Polls. Returns the statuses of completed bios.
    pub fn poll(&mut self) -> Vec<Status> {
        self.world.poll(0, &mut *self.lane).iter().map(|bio| bio.status).collect()
    }

    /// Reads 4 KiB. Returns the status, or nothing if the read is queued.
    pub fn read(&mut self) -> Vec<Status> {
        self.world.submit(0, &mut *self.lane, [bio_without_data(Op::Read, 0, 8)]);
        self.poll()
    }

    /// Sends a message, as a client does.
    pub fn message(&mut self, text: &str) -> Result<String, TargetError> {
        let words: Vec<String> = text.split(' ').map(String::from).collect();
        self.device.message(0, &words, &mut self.resolver, &*self.cores)
    }
}
