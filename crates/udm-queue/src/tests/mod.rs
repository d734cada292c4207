//! Tests of the queue over a disk that holds requests until the test completes them.

mod changing;
mod merging;
mod mq_deadline;
mod shared_tags;
mod sharing;

use super::*;
use crate::settings::map_core_to_hw_queue;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Mutex;
use udm_core::{
    Batch, Bio, BioFlags, BioTaskFactory, Buf, CoreCommandSender, CoreId, CoreLaneState, DrainMode,
    LaneCommand, OwnWork,
};
use udm_core::{BioTaskHandle, HwQueueReport, Nanos, Op, SECTOR_SIZE, Segments, Status};

/// State of the disk, shared by its lanes on this thread.
#[derive(Default)]
struct TestDiskState {
    /// Requests in order of arrival, with their core.
    bios: Vec<(CoreId, Box<Bio>)>,
    back: Vec<(CoreId, Box<Bio>)>,
    most: usize,
    /// If true, requests complete within `submit`.
    prompt: bool,
}

thread_local! {
    static HELD: Rc<RefCell<TestDiskState>> = Rc::default();
}

fn with_test_disk_state<T>(f: impl FnOnce(&mut TestDiskState) -> T) -> T {
    HELD.with(|state| f(&mut state.borrow_mut()))
}

struct Disk {
    id: DeviceId,
    content: Arc<Mutex<Vec<u8>>>,
}

struct DiskLane(CoreId);

impl Lane for DiskLane {
    fn submit(&mut self, batch: &mut Batch, _: &mut Cx<'_>) {
        with_test_disk_state(|state| {
            let to = if state.prompt { &mut state.back } else { &mut state.bios };
            to.extend(batch.drain(..).map(|bio| (self.0, bio)));
            state.most = state.most.max(state.bios.len() + state.back.len());
        });
    }

    fn poll(&mut self, done: &mut Batch, _: &mut Cx<'_>) {
        with_test_disk_state(|state| {
            let mine = state.back.extract_if(.., |(core, _)| *core == self.0);
            done.extend(mine.map(|(_, bio)| bio));
        });
    }

    fn drain(&mut self, how: DrainMode, back: &mut Batch, _: &mut Cx<'_>) {
        if how == DrainMode::NoFlush {
            with_test_disk_state(|state| back.extend(state.bios.drain(..).map(|(_, bio)| bio)));
        }
    }

    fn own_work(&self) -> OwnWork {
        OwnWork::Idle
    }
}

const SIZE: u64 = 1024;

impl Device for Disk {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Ok(Box::new(DiskLane(cx.core())))
    }

    fn limits(&self) -> Limits {
        Limits { max_sectors: Sectors(64), ..Limits::new(Sectors(SIZE)) }
    }
}

/// Wakeups between the cores of the test.
#[derive(Default)]
struct RecordedWakes(Mutex<Vec<(CoreId, DeviceId)>>);

impl CoreCommandSender for RecordedWakes {
    fn broadcast(&self, _: DeviceId, _: LaneCommand) {}
    fn wake_up(&self, core: CoreId, device: DeviceId) {
        self.0.lock().unwrap().push((core, device));
    }
    fn start(&self, _: BioTaskFactory) -> BioTaskHandle {
        unreachable!("one core needs no owner task")
    }
}

/// Cores, each with a lane of the same queue.
struct TestCores {
    cores: Vec<(CoreLaneState, Box<dyn Lane>)>,
    queue: QueuedDevice,
    wakes: Arc<RecordedWakes>,
    content: Arc<Mutex<Vec<u8>>>,
    now: Nanos,
    done: Vec<(CoreId, Box<Bio>)>,
}

impl TestCores {
    fn new(cores: usize, words: &str) -> TestCores {
        let content = Arc::new(Mutex::new(vec![0; (SIZE * SECTOR_SIZE) as usize]));
        let disk = Arc::new(Disk { id: DeviceId::new(), content: Arc::clone(&content) });
        assert!(disk.content.lock().is_ok());
        with_test_disk_state(|state| *state = TestDiskState::default());
        let queue = QueuedDevice::new(disk, &params(words));
        let wakes = Arc::new(RecordedWakes::default());
        let open = |core| {
            let state = CoreLaneState::new(CoreId(core as u16), cores, 1, None);
            let mut state = state.with_cores(Arc::clone(&wakes) as Arc<dyn CoreCommandSender>);
            let lane = queue.open(&mut state.cx(Nanos(1))).unwrap();
            (state, lane)
        };
        let cores = (0..cores).map(open).collect();
        TestCores { cores, queue, wakes, content, now: Nanos(1), done: Vec::new() }
    }

    fn submit(&mut self, core: usize, mut batch: Batch) {
        batch.iter_mut().for_each(|bio| bio.start());
        let (state, lane) = &mut self.cores[core];
        lane.submit(&mut batch, &mut state.cx(self.now));
        assert!(batch.is_empty());
    }

    fn poll(&mut self, core: usize) {
        let (state, lane) = &mut self.cores[core];
        let mut done = Batch::new();
        lane.poll(&mut done, &mut state.cx(self.now));
        done.iter_mut().for_each(|bio| bio.finish());
        self.done.extend(done.into_iter().map(|bio| (CoreId(core as u16), bio)));
    }

    /// Completes the `n`th request of the disk with `status`.
    fn end(&mut self, n: usize, status: Status) {
        let (core, mut bio) = with_test_disk_state(|state| state.bios.remove(n));
        if status.is_ok() {
            let mut content = self.content.lock().unwrap();
            let range = bio.sector.0 as usize * 512..bio.end().0 as usize * 512;
            match bio.op {
                Op::Read => drop(bio.data.copy_from(&content[range])),
                Op::Write => drop(bio.data.copy_to(&mut content[range])),
                _ => {}
            }
        }
        bio.end_with(status);
        with_test_disk_state(|state| state.back.push((core, bio)));
        self.poll(core.index());
        self.wakes();
    }

    /// Polls the cores that have been woken.
    fn wakes(&mut self) {
        for _ in 0..100 {
            let wakes = std::mem::take(&mut *self.wakes.0.lock().unwrap());
            if wakes.is_empty() {
                return;
            }
            for (core, device) in wakes {
                self.cores[core.index()].0.inboxes().wake_up(device);
                self.poll(core.index());
            }
        }
        panic!("endless wakeups");
    }

    /// First sector and length of each request with the disk.
    fn at_disk(&self) -> Vec<(u64, u64)> {
        with_test_disk_state(|state| {
            state.bios.iter().map(|(_, bio)| (bio.sector.0, bio.sectors.0)).collect()
        })
    }
}

impl Drop for TestCores {
    /// Checks that nothing is in flight, unless the test has failed.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert!(with_test_disk_state(|state| state.bios.is_empty() && state.back.is_empty()));
        }
    }
}

/// Parses queue parameters from the words of a URI.
fn params(words: &str) -> QueueParams {
    match udm_wire::uri::parse_device_uri(&format!("mem:1M,{words}")).unwrap() {
        udm_wire::uri::DeviceUri::Mem { queue, .. } => queue.unwrap(),
        other => panic!("{other}"),
    }
}

fn read(sector: u64, sectors: u64) -> Box<Bio> {
    let mut data = Segments::new();
    data.push(Buf::zeroed((sectors * SECTOR_SIZE) as usize));
    Bio::read(Sector(sector), Sectors(sectors), data)
}

fn write(sector: u64, sectors: u64, byte: u8) -> Box<Bio> {
    let mut bio = read(sector, sectors);
    bio.data.fill(byte);
    bio.op = Op::Write;
    bio
}

#[test]
fn cores_that_share_a_queue_are_neighbours() {
    let map =
        |cores, queues| (0..cores).map(|core| map_core_to_hw_queue(core, cores, queues)).collect::<Vec<_>>();
    assert_eq!(map(4, 1), [0, 0, 0, 0]);
    assert_eq!(map(4, 2), [0, 0, 1, 1]);
    assert_eq!(map(4, 4), [0, 1, 2, 3]);
    assert_eq!(map(8, 3), [0, 0, 0, 1, 1, 1, 2, 2]);
    // The larger groups come first, as in the kernel.
    assert_eq!(map(8, 5), [0, 0, 1, 1, 2, 2, 3, 4]);
    assert_eq!(map(3, 2), [0, 0, 1]);
}

#[test]
fn a_report_says_what_holds_and_who_has_the_tags() {
    let mut world = TestCores::new(3, "queue_depth=4,nr_hw_queues=2,nr_requests=2,nomerges=2");
    world.submit(0, (0..6).map(|n| read(n * 8, 8)).collect());
    let report = world.queue.report(3);
    let number = |name: &str| report.numbers.iter().find(|(known, _)| *known == name).unwrap().1;
    assert_eq!(report.scheduler, "none");
    // nr_requests is at least 4; the disk accepts 32 KiB.
    let wanted = [("nr_hw_queues", 2), ("queue_depth", 4), ("nr_requests", 4), ("max_sectors_kb", 32)];
    wanted.iter().for_each(|(name, wanted)| assert_eq!(number(name), *wanted, "{name}"));
    let queue = |cores: &[usize], tags_in_use, waiting| HwQueueReport {
        cores: cores.to_vec(),
        tags: 4,
        tags_in_use,
        waiting,
        shared: None,
    };
    assert_eq!(report.hw_queues, [queue(&[0, 1], 4, 1), queue(&[2], 0, 0)]);
    while !world.at_disk().is_empty() {
        world.end(0, Status::Ok);
    }
    assert_eq!(world.queue.report(3).hw_queues[0], queue(&[0, 1], 0, 0));
}

/// Without a scheduler, `nr_requests` limits the tags, as in the kernel.
#[test]
fn fewer_requests_than_tags_are_fewer_tags() {
    let mut world = TestCores::new(1, "queue_depth=16,nr_requests=5,nomerges=2");
    world.submit(0, (0..10).map(|n| read(n * 8, 8)).collect());
    assert_eq!(world.at_disk().len(), 5);
    while !world.at_disk().is_empty() {
        world.end(0, Status::Ok);
    }
}

#[test]
fn no_more_than_the_depth_is_with_the_disk() {
    let mut world = TestCores::new(1, "queue_depth=4,nomerges=2");
    world.submit(0, (0..10).map(|n| read(n * 8, 8)).collect());
    assert_eq!(world.at_disk().len(), 4);
    while !world.at_disk().is_empty() {
        world.end(0, Status::Ok);
    }
    let order: Vec<_> = world.done.iter().map(|(_, bio)| bio.sector.0 / 8).collect();
    assert_eq!(order, (0..10).collect::<Vec<_>>());
    assert_eq!(with_test_disk_state(|state| state.most), 4);
}

#[test]
fn who_is_not_to_wait_does_not() {
    let mut world = TestCores::new(1, "queue_depth=1");
    let nowait = |sector| {
        let mut bio = read(sector, 8);
        bio.flags = BioFlags::NOWAIT;
        bio
    };
    world.submit(0, vec![nowait(0), nowait(100)]);
    world.poll(0);
    assert_eq!(world.at_disk(), [(0, 8)]);
    let [(_, refused)] = &world.done[..] else { panic!("one") };
    assert_eq!((refused.sector, refused.status), (Sector(100), Status::Again));
    world.end(0, Status::Ok);
    assert_eq!(world.done[1].1.status, Status::Ok);

    // If a tag is free, a NOWAIT request is sent, even after others of its batch, and is not merged
    // with them.
    let mut world = TestCores::new(1, "queue_depth=2");
    world.submit(0, vec![read(0, 8), read(8, 8), nowait(16), nowait(24)]);
    world.poll(0);
    assert_eq!(world.at_disk(), [(0, 16), (16, 8)]);
    let [(_, refused)] = &world.done[..] else { panic!("one") };
    assert_eq!((refused.sector, refused.status), (Sector(24), Status::Again));
    world.end(0, Status::Ok);
    world.end(0, Status::Ok);
}

/// Waiting requests and requests that the disk has not started are handed back unchanged, and their
/// tags are free.
#[test]
fn a_suspend_without_flush_takes_back_what_waits() {
    for scheduler in ["none", "mq-deadline"] {
        let mut world = TestCores::new(1, &format!("queue_depth=1,scheduler={scheduler}"));
        let bios = vec![write(0, 8, 1), write(8, 8, 2), write(100, 8, 3), write(108, 8, 4), write(92, 8, 5)];
        world.submit(0, bios);
        assert_eq!(world.at_disk().len(), 1);
        let (state, lane) = &mut world.cores[0];
        let mut back = Batch::new();
        lane.drain(DrainMode::NoFlush, &mut back, &mut state.cx(world.now));
        back.sort_by_key(|bio| bio.sector.0);
        let whole = |bio: &Bio| (bio.sector.0, bio.sectors.0, bio.data.iter().next().unwrap()[0]);
        let seen: Vec<_> = back.iter().map(|bio| whole(bio)).collect();
        assert_eq!(seen, [(0, 8, 1), (8, 8, 2), (92, 8, 5), (100, 8, 3), (108, 8, 4)]);
        assert!(back.iter().all(|bio| bio.data.len() as u64 == bio.sectors.bytes()));
        back.iter_mut().for_each(|bio| bio.finish());
        world.submit(0, vec![read(500, 8)]);
        assert_eq!(world.at_disk(), [(500, 8)], "the tag is free again");
        world.end(0, Status::Ok);
    }
}

#[test]
fn the_limits_are_those_of_the_disk_or_less() {
    let limits = |words: &str| {
        let disk = Arc::new(Disk { id: DeviceId::new(), content: Arc::default() });
        QueuedDevice::new(disk, &params(words)).limits().max_sectors.0
    };
    assert_eq!(limits("max_sectors_kb=16"), 32);
    assert_eq!(limits("max_sectors_kb=0"), 64);
    assert_eq!(limits("max_sectors_kb=1280"), 64, "more than the disk takes is what it takes");
}
