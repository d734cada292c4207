//! A target over disks, one lane of it, and the clock.

use crate::multipath_rig::build;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use udm_core::{Batch, CoreCommandSender, DevNo, Lane, Nanos, OwnWork, Status};
use udm_dm::testing::{
    SteppedTestCores, TestDeviceNameResolver, TestDisk, copy_bio_data, make_test_read_bio,
};
use udm_dm::{
    MultipathTarget, PathLatencyAndHedgeReport, PathReport, SettingsOutsideTable, Target, TargetHostServices,
};
use udm_targets::multipath::{Multipath, PathMaintenanceSettings, PathWatchOptions};

/// The deadline of the tests that have one.
pub const DEADLINE: Nanos = Nanos::from_millis(2000);
pub const MS: Nanos = Nanos::from_millis(1);

/// The device as seen by its target.
pub struct TestNotify {
    watch: PathWatchOptions,
    events: AtomicU64,
}

impl TargetHostServices for TestNotify {
    fn event(&self) {
        self.events.fetch_add(1, Ordering::Relaxed);
    }
    fn device(&self) -> String {
        "watched".into()
    }
    fn kick(&self, _: &dyn CoreCommandSender) {}
    fn settings(&self) -> Option<SettingsOutsideTable> {
        Some(Arc::new(PathMaintenanceSettings { watch: self.watch, ..PathMaintenanceSettings::default() }))
    }
}

pub struct WatchRig {
    pub world: SteppedTestCores,
    pub disks: Vec<Arc<TestDisk>>,
    pub target: Arc<Multipath>,
    pub lane: Box<dyn Lane>,
    pub above: Arc<TestNotify>,
    pub done: Batch,
}

impl WatchRig {
    /// `count` paths in one round-robin group. The content of each disk identifies it.
    pub fn new(count: u32, watch: PathWatchOptions) -> WatchRig {
        let disks: Vec<_> = (0..count).map(|_| TestDisk::new(32768)).collect();
        let mut resolver = TestDeviceNameResolver::new();
        for (minor, disk) in (0..count).zip(&disks) {
            disk.put(0, &vec![minor as u8 + 1; 64 * 512]);
            resolver.add(&format!("p{minor}"), DevNo { major: 253, minor }, disk.clone());
        }
        let paths: Vec<_> = (0..count).map(|i| format!("p{i}")).collect();
        let params = format!("0 0 1 1 round-robin 0 {count} 0 {}", paths.join(" "));
        let target = build(&params, &mut resolver).unwrap();
        let above = Arc::new(TestNotify { watch, events: AtomicU64::new(0) });
        target.attach(above.clone());
        let mut world = SteppedTestCores::new(1);
        world.now = MS;
        let lane = world.turn(0, |cx| target.open(cx)).unwrap();
        WatchRig { world, disks, target, lane, above, done: Batch::new() }
    }

    pub fn start(&mut self, bio: Box<udm_core::Bio>) {
        self.world.submit(0, &mut *self.lane, [bio]);
    }

    pub fn poll(&mut self) {
        let done = self.world.poll(0, &mut *self.lane);
        self.done.extend(done);
    }

    /// Moves the clock to the times that the lane requests, as a core does, until a bio completes.
    /// Returns the elapsed time.
    pub fn wait(&mut self) -> Nanos {
        let from = self.world.now;
        for _ in 0..100 {
            self.world.wake = Nanos::NEVER;
            self.poll();
            if !self.done.is_empty() {
                return self.world.now.since(from);
            }
            assert_ne!(self.world.wake, Nanos::NEVER, "nobody would wake the lane");
            self.world.now = self.world.now.max(self.world.wake);
        }
        panic!("nothing comes back");
    }

    /// Makes a single read. Returns its status, its disk and its time.
    pub fn read(&mut self) -> (Status, u8, Nanos) {
        self.start(make_test_read_bio(0, 8));
        let took = self.wait();
        let bio = self.done.pop().unwrap();
        let bytes = copy_bio_data(&bio);
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "of one answer");
        (bio.status, bytes[0], took)
    }

    pub fn report(&self, path: usize) -> PathReport {
        self.target.path_reports().swap_remove(path)
    }

    pub fn watch(&self, path: usize) -> PathLatencyAndHedgeReport {
        self.report(path).watch.unwrap()
    }

    pub fn events(&self) -> u64 {
        self.above.events.load(Ordering::Relaxed)
    }

    /// Asserts that nothing is in flight and no timer is set.
    pub fn rests(&mut self) {
        self.world.wake = Nanos::NEVER;
        // An unused path is polled in a poll that completes nothing.
        (0..3).for_each(|_| self.poll());
        self.world.wake = Nanos::NEVER;
        self.poll();
        assert_eq!((self.world.wake, self.lane.own_work()), (Nanos::NEVER, OwnWork::Idle));
        assert!(self.done.is_empty() && self.disks.iter().all(|disk| disk.waiting() == 0));
    }
}

pub fn hedge_settings() -> PathWatchOptions {
    PathWatchOptions { hedge_reads: true, ..PathWatchOptions::default() }
}

/// Makes enough reads to fill a window, and advances the clock past its end.
pub fn fill_window(rig: &mut WatchRig, reads: u32) {
    for _ in 0..reads {
        assert_eq!(rig.read().0, Status::Ok);
    }
    rig.world.now = rig.world.now + Nanos::from_millis(300);
}
