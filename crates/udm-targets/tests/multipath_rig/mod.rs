//! A multipath device on one core, over four disks `/dev/nullb0` (253:0) to `/dev/nullb3`. The test
//! calls the target directly, as a mapped device does on suspend, resume and messages.
#![allow(dead_code, reason = "each test program uses a part of it")]

pub mod host;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use udm_core::errno::EBUSY;
use udm_core::{Batch, Bio, CoreCommandSender, DevNo, DrainMode, Lane, Limits, Sector, Sectors, Status};
use udm_dm::testing::{
    SteppedTestCores, TestControlIo, TestDeviceNameResolver, TestDisk, bio_without_data, make_test_read_bio,
};
use udm_dm::{Target, TargetArgs, TargetError, TargetHostServices};
use udm_targets::multipath::Multipath;

/// Number of cores that a table is built for.
const CORES: usize = 4;

/// Sectors of each disk.
pub const SIZE: u64 = 32768;

/// Counts events.
#[derive(Default)]
pub struct EventCounter(AtomicU64);

impl EventCounter {
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl TargetHostServices for EventCounter {
    fn event(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn device(&self) -> String {
        "rig".into()
    }
    fn kick(&self, _cores: &dyn CoreCommandSender) {}
}

pub struct MultipathRig {
    pub world: SteppedTestCores,
    pub disks: Vec<Arc<TestDisk>>,
    pub resolver: TestDeviceNameResolver,
    pub target: Arc<Multipath>,
    pub lane: Box<dyn Lane>,
    pub events: Arc<EventCounter>,
    /// Completed bios that no test has taken yet.
    pub finished: Batch,
    /// Bios that a no-flush suspend took back.
    pub back: Batch,
    pub suspended: bool,
}

/// Builds the target of `params` with the devices of `resolver`.
pub fn build(params: &str, resolver: &mut TestDeviceNameResolver) -> Result<Arc<Multipath>, TargetError> {
    let args: Vec<String> = params.split_whitespace().map(String::from).collect();
    Multipath::new(&mut TargetArgs {
        start: Sector(0),
        len: Sectors(SIZE),
        args: &args,
        resolver,
        io: &TestControlIo::new(),
        cores: CORES,
    })
}

/// `count` null disks with the names and numbers of the recordings.
pub fn disks(count: u32) -> (Vec<Arc<TestDisk>>, TestDeviceNameResolver) {
    let disks: Vec<_> = (0..count).map(|_| TestDisk::null(Limits::new(Sectors(SIZE)))).collect();
    let mut resolver = TestDeviceNameResolver::new();
    for (minor, disk) in (0..count).zip(&disks) {
        resolver.add(&format!("/dev/nullb{minor}"), DevNo { major: 253, minor }, disk.clone());
    }
    (disks, resolver)
}

impl MultipathRig {
    pub fn new(params: &str) -> MultipathRig {
        MultipathRig::with_disks(params, disks(4))
    }

    pub fn with_disks(
        params: &str,
        (disks, mut resolver): (Vec<Arc<TestDisk>>, TestDeviceNameResolver),
    ) -> MultipathRig {
        let target = build(params, &mut resolver).unwrap_or_else(|e| panic!("{params}: {e}"));
        let events = Arc::new(EventCounter::default());
        target.attach(events.clone());
        let mut world = SteppedTestCores::new(1);
        let lane = world.turn(0, |cx| target.open(cx)).expect("disks open");
        let (finished, back) = (Batch::new(), Batch::new());
        MultipathRig { world, disks, resolver, target, lane, events, finished, back, suspended: false }
    }

    /// Replaces the table, as a reload between suspend and resume does.
    pub fn load(&mut self, params: &str) {
        assert!(self.suspended, "a table is replaced while suspended");
        self.target = build(params, &mut self.resolver).expect("the new table is good");
        self.target.attach(self.events.clone());
        self.lane = self.world.turn(0, |cx| self.target.open(cx)).expect("disks open");
    }

    pub fn submit(&mut self, bio: Box<Bio>) {
        self.world.submit(0, &mut *self.lane, [bio]);
    }

    pub fn poll(&mut self) {
        let mut done = self.world.poll(0, &mut *self.lane);
        self.finished.append(&mut done);
    }

    /// Submits a bio and polls; the bio may be queued.
    pub fn start(&mut self, bio: Box<Bio>) {
        self.submit(bio);
        self.poll();
    }

    /// Runs a bio until it completes.
    pub fn run(&mut self, bio: Box<Bio>) -> Status {
        self.world.run(0, &mut *self.lane, bio).status
    }

    /// Reads 4 KiB at sector 0.
    pub fn read(&mut self) -> Status {
        self.run(make_test_read_bio(0, 8))
    }

    /// Sends a message, and polls the lane as a mapped device does.
    pub fn message(&mut self, message: &str) -> Result<(), TargetError> {
        if self.suspended {
            return Err(TargetError::errno(EBUSY));
        }
        let words: Vec<String> = message.split_whitespace().map(String::from).collect();
        let reply = self.target.message(&words, &mut self.resolver);
        self.poll();
        reply.map(|text| assert_eq!(text, ""))
    }

    /// Sends a message that must succeed.
    pub fn tell(&mut self, message: &str) {
        self.message(message).unwrap_or_else(|e| panic!("{message}: {e}"));
    }

    /// Suspends: all queued bios and bios in flight complete or are taken back.
    pub fn suspend(&mut self, noflush: bool) {
        self.target.presuspend(noflush);
        // The lane may run in between: queued bios must stay queued.
        if noflush {
            let before = self.finished.len();
            self.poll();
            assert!(self.finished[before..].iter().all(|bio| bio.status.is_ok()));
        }
        let how = if noflush { DrainMode::NoFlush } else { DrainMode::Flush };
        for _ in 0..4 {
            self.world.turn(0, |cx| self.lane.drain(how, &mut self.back, cx));
            self.poll();
        }
        self.target.postsuspend();
        self.suspended = true;
    }

    /// Resumes; bios that were taken back are submitted again.
    pub fn resume(&mut self) {
        self.target.resume();
        self.suspended = false;
        let mut back = std::mem::take(&mut self.back);
        self.world.turn(0, |cx| self.lane.submit(&mut back, cx));
        self.poll();
    }

    /// Takes the statuses of completed bios.
    pub fn results(&mut self) -> Vec<Status> {
        self.finished.drain(..).map(|bio| bio.status).collect()
    }

    pub fn status(&self) -> String {
        self.target.status()
    }

    pub fn table(&self) -> String {
        self.target.table()
    }

    /// Number of requests of each disk since the last call.
    pub fn counts(&mut self) -> Vec<usize> {
        self.disks.iter().map(|disk| disk.take_log().len()).collect()
    }

    /// The disk that served exactly one request.
    pub fn served_by(&mut self) -> usize {
        let counts = self.counts();
        assert_eq!(counts.iter().sum::<usize>(), 1, "{counts:?}");
        counts.iter().position(|&n| n == 1).expect("one did")
    }

    /// Makes `n` reads, one after another. Returns the disk of each.
    pub fn order(&mut self, n: usize) -> Vec<usize> {
        self.counts();
        (0..n)
            .map(|_| {
                assert_eq!(self.read(), Status::Ok);
                self.served_by()
            })
            .collect()
    }

    /// The disks in `bad` fail requests of the second half of the device.
    pub fn bad_second_half(&mut self, bad: &[usize], status: Status) {
        for &disk in bad {
            self.disks[disk]
                .set_verdict(move |bio| if bio.sector.0 < SIZE / 2 { Status::Ok } else { status });
        }
    }
}

/// A read of `sectors` sectors without memory.
pub fn bare_read(sectors: u64) -> Box<Bio> {
    bio_without_data(udm_core::Op::Read, 0, sectors)
}
