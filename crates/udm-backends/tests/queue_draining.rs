//! Suspends above a queue that one core runs for all lanes.

use std::sync::Arc;
use udm_core::{Batch, Bio, Device, DiskQueue as _, DrainMode, Lane, Nanos, Status};
use udm_dm::testing::{SteppedTestCores, TestDisk, make_test_read_bio};
use udm_queue::QueuedDevice;
use udm_wire::uri::{IoSchedulerName, QueueParams};

/// Two cores with one lane each of a queue. The disk holds its requests.
struct Fixture {
    world: SteppedTestCores,
    disk: Arc<TestDisk>,
    queue: Arc<QueuedDevice>,
    lanes: [Box<dyn Lane>; 2],
    home: [Batch; 2],
    handed: Batch,
}

fn queued(below: Arc<dyn Device>, queue_depth: u32) -> Arc<QueuedDevice> {
    let (scheduler, nomerges) = (IoSchedulerName::MqDeadline, 2);
    let params = QueueParams { scheduler, queue_depth, nomerges, nr_hw_queues: 1, ..QueueParams::default() };
    Arc::new(QueuedDevice::new(below, &params))
}

impl Fixture {
    /// Opens one lane each on core 0 and core 1, of a queue that `make` creates over a disk.
    fn new(make: impl FnOnce(Arc<TestDisk>) -> Arc<QueuedDevice>) -> Fixture {
        let mut world = SteppedTestCores::new(2);
        let disk = TestDisk::new(1024);
        disk.hold(true);
        let queue = make(Arc::clone(&disk));
        let lanes = [0, 1].map(|core| world.open(core, &*queue).unwrap());
        Fixture { world, disk, queue, lanes, home: Default::default(), handed: Batch::new() }
    }

    fn send(&mut self, core: usize, sectors: &[u64]) {
        let bios = sectors.iter().map(|&sector| make_test_read_bio(sector, 1));
        self.world.submit(core, &mut *self.lanes[core], bios);
    }

    fn poll(&mut self, core: usize) {
        self.home[core].append(&mut self.world.poll(core, &mut *self.lanes[core]));
    }

    /// Drains the lane of core 0.
    fn drain(&mut self) {
        let Fixture { world, lanes, handed, .. } = self;
        world.turn(0, |cx| lanes[0].drain(DrainMode::NoFlush, handed, cx));
    }

    /// Runs `n` rounds in which both cores have a turn, with or without a drain on core 0.
    fn rounds(&mut self, n: usize, drained: bool) {
        for _ in 0..n {
            self.world.run_tasks();
            if drained {
                self.drain();
            }
            self.poll(0);
            self.poll(1);
        }
    }

    /// Returns the sectors that were handed back. They are not submitted again.
    fn take_handed(&mut self) -> Vec<u64> {
        let finished = |bio: &mut Box<Bio>| {
            assert_eq!((bio.status, bio.data.len()), (Status::Ok, 512), "handed back as it was given");
            bio.finish();
            bio.sector.0
        };
        let mut sectors: Vec<u64> = self.handed.iter_mut().map(finished).collect();
        self.handed.clear();
        sectors.sort_unstable();
        sectors
    }

    /// The disk completes its requests, and the queued ones follow.
    fn end(&mut self) {
        self.disk.hold(false);
        self.rounds(20, false);
    }

    /// Sectors of the requests that completed on `core`, all with success.
    fn of(&self, core: usize) -> Vec<u64> {
        assert!(self.home[core].iter().all(|bio| bio.status == Status::Ok));
        let mut sectors: Vec<u64> = self.home[core].iter().map(|bio| bio.sector.0).collect();
        sectors.sort_unstable();
        sectors
    }

    fn tags_in_use(&self) -> u32 {
        self.queue.report(2).hw_queues.iter().map(|hw_queue| hw_queue.tags_in_use).sum()
    }
}

/// Queued requests of the drained core are handed back. Requests of the other core stay, and so do
/// those at the disk.
#[test]
fn what_waits_is_handed_back_and_others_go_on() {
    let mut rig = Fixture::new(|disk| queued(disk, 1));
    rig.send(0, &[10]);
    rig.rounds(3, false);
    rig.send(1, &[20, 21]);
    rig.send(0, &[11, 12]);
    rig.rounds(3, false);
    rig.rounds(6, true);
    assert_eq!(rig.take_handed(), [11, 12]);
    assert_eq!((rig.disk.waiting(), rig.tags_in_use()), (1, 1));
    rig.end();
    assert_eq!((rig.of(0), rig.of(1), rig.tags_in_use()), (vec![10], vec![20, 21], 0));
}

/// A suspend with flush and the end of the program reach the disk, which then fails its requests.
#[test]
fn what_fails_by_a_drain_fails_at_the_disk() {
    for how in [DrainMode::Flush, DrainMode::End] {
        let mut rig = Fixture::new(|disk| queued(disk, 1));
        rig.disk.hand_back(true);
        rig.send(0, &[10, 11]);
        rig.rounds(3, false);
        for _ in 0..6 {
            let Fixture { world, lanes, handed, .. } = &mut rig;
            world.turn(0, |cx| lanes[0].drain(how, handed, cx));
            rig.rounds(1, false);
        }
        assert!(rig.handed.is_empty());
        let ends: Vec<Status> = rig.home[0].iter().map(|bio| bio.status).collect();
        assert_eq!((ends, rig.tags_in_use()), (vec![Status::IoErr; 2], 0), "{how:?}");
    }
}

/// Two devices above are suspended, one without flush: both drain the lane in each turn.
#[test]
fn of_two_drains_in_a_turn_the_one_without_flush_counts() {
    for order in [[DrainMode::NoFlush, DrainMode::Flush], [DrainMode::Flush, DrainMode::NoFlush]] {
        let mut rig = Fixture::new(|disk| queued(disk, 1));
        rig.send(0, &[10, 11]);
        rig.rounds(3, false);
        for _ in 0..6 {
            let Fixture { world, lanes, handed, .. } = &mut rig;
            world.turn(0, |cx| order.into_iter().for_each(|how| lanes[0].drain(how, handed, cx)));
            rig.poll(0);
            rig.world.run_tasks();
        }
        assert_eq!(rig.take_handed(), [11], "{order:?}");
        rig.end();
        assert_eq!(rig.of(0), [10]);
    }
}

/// A request that the disk hands back also frees its tag.
#[test]
fn what_the_disk_hands_back_keeps_no_tag() {
    let mut rig = Fixture::new(|disk| queued(disk, 2));
    rig.disk.hand_back(true);
    rig.send(0, &[10, 11, 12, 13]);
    rig.rounds(3, false);
    assert_eq!(rig.tags_in_use(), 2);
    rig.rounds(6, true);
    assert_eq!(rig.take_handed(), [10, 11, 12, 13]);
    assert_eq!((rig.disk.waiting(), rig.tags_in_use()), (0, 0));
}

/// A suspend is cancelled while a request is being handed back: the request is submitted again.
#[test]
fn what_comes_back_late_goes_down_again() {
    for drains in 1..4 {
        let mut rig = Fixture::new(|disk| queued(disk, 1));
        rig.send(0, &[10, 11, 12]);
        rig.rounds(3, false);
        (0..drains).for_each(|_| rig.drain());
        rig.world.run_tasks();
        rig.rounds(6, false);
        assert_eq!((rig.take_handed(), rig.disk.waiting(), rig.tags_in_use()), (vec![], 1, 1));
        rig.end();
        assert_eq!((rig.of(0), rig.tags_in_use()), (vec![10, 11, 12], 0));
    }
}

/// A suspend without flush is cancelled and one with flush begins in the same turn. No request is
/// handed back in that turn, because it would then wait for the resume. It is submitted again and
/// completes.
#[test]
fn a_flush_is_given_nothing_back() {
    let mut rig = Fixture::new(|disk| queued(disk, 1));
    rig.send(0, &[10, 11, 12]);
    rig.rounds(3, false);
    rig.drain();
    rig.poll(0);
    rig.world.run_tasks();
    for _ in 0..6 {
        let Fixture { world, lanes, handed, .. } = &mut rig;
        world.turn(0, |cx| lanes[0].drain(DrainMode::Flush, handed, cx));
        rig.poll(0);
        assert!(rig.handed.is_empty());
        rig.world.run_tasks();
        rig.disk.hold(false);
    }
    assert_eq!((rig.of(0), rig.tags_in_use()), (vec![10, 11, 12], 0));
}

/// A lane that is polled twice after a drain submits the requests that arrived meanwhile. It
/// requests a turn, in which the next drain asks again.
#[test]
fn a_second_poll_behind_a_drain_ends_nothing() {
    for came in [false, true] {
        let mut rig = Fixture::new(|disk| queued(disk, 1));
        rig.send(0, &[10, 11]);
        rig.rounds(3, false);
        rig.drain();
        rig.poll(0);
        if came {
            rig.world.run_tasks();
        }
        rig.world.wake = Nanos::NEVER;
        rig.poll(0);
        assert!(rig.world.wake <= rig.world.now, "it asks for a turn");
        rig.rounds(6, true);
        assert_eq!(rig.take_handed(), [11]);
        rig.end();
        assert_eq!(rig.of(0), [10]);
    }
}

/// A request that the disk holds only later is handed back later.
#[test]
fn a_drain_that_brought_something_goes_on() {
    let mut rig = Fixture::new(|disk| queued(disk, 1));
    rig.send(0, &[10, 11]);
    rig.rounds(3, false);
    rig.rounds(6, true);
    assert_eq!(rig.take_handed(), [11]);
    rig.disk.hand_back(true);
    rig.world.wake = Nanos::NEVER;
    rig.rounds(6, true);
    assert!(rig.take_handed().is_empty() && rig.world.wake > rig.world.now, "it is a pause");
    assert!(rig.world.wake <= Nanos::from_millis(10), "it ends");
    rig.world.now = rig.world.wake;
    rig.rounds(6, true);
    assert_eq!((rig.take_handed(), rig.tags_in_use()), (vec![10], 0));
}

/// Two such queues, one over the other: requests of other cores in the lower one are not moved
/// again and again by a drain that waits for something else.
#[test]
fn what_others_have_does_not_go_round() {
    let mut rig = Fixture::new(|disk| queued(queued(disk, 1), 8));
    rig.send(0, &[10]);
    rig.rounds(6, false);
    rig.send(1, &[20, 21]);
    rig.rounds(6, false);
    rig.rounds(20, true);
    for _ in 0..10 {
        rig.world.run_tasks();
        assert!(!rig.world.has_messages(0) && !rig.world.has_messages(1), "somebody is woken");
        rig.rounds(1, true);
    }
    assert!(rig.take_handed().is_empty());
    rig.end();
    assert_eq!((rig.of(0), rig.of(1), rig.tags_in_use()), (vec![10], vec![20, 21], 0));
}
