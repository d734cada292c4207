//! Disks that share tags, with one lane each on one core.

use super::*;

struct SharedTagDisks {
    core: CoreLaneState,
    disks: Vec<(QueuedDevice, Box<dyn Lane>)>,
    now: Nanos,
    done: Batch,
}

impl SharedTagDisks {
    fn new(depth: u32, disks: usize) -> SharedTagDisks {
        with_test_disk_state(|state| *state = TestDiskState::default());
        let set = SharedTagSet::new(1, depth);
        let wakes = Arc::new(RecordedWakes::default()) as Arc<dyn CoreCommandSender>;
        let mut core = CoreLaneState::new(CoreId(0), 1, 1, None).with_cores(wakes);
        let mut open = |_| {
            let disk = Arc::new(Disk { id: DeviceId::new(), content: Arc::default() });
            let params = params(&format!("nomerges=2,nr_hw_queues=1,queue_depth={depth}"));
            let queue = QueuedDevice::sharing(disk, &params, true, Arc::clone(&set));
            let lane = queue.open(&mut core.cx(Nanos(1))).unwrap();
            (queue, lane)
        };
        let disks = (0..disks).map(&mut open).collect();
        SharedTagDisks { core, disks, now: Nanos(1), done: Batch::new() }
    }

    /// Submits reads to a disk; their sector identifies the disk.
    fn submit(&mut self, disk: usize, n: u64) {
        let mut batch: Batch = (0..n).map(|_| read(disk as u64 * 8, 8)).collect();
        batch.iter_mut().for_each(|bio| bio.start());
        self.disks[disk].1.submit(&mut batch, &mut self.core.cx(self.now));
    }

    /// Number of requests with a disk.
    fn has(&self, disk: usize) -> usize {
        let count = with_test_disk_state(|state| {
            state.bios.iter().filter(|(_, bio)| bio.sector.0 == disk as u64 * 8).count()
        });
        let shared = self.disks[disk].0.report(1).hw_queues[0].shared.unwrap();
        assert_eq!(shared.held as usize, count);
        count
    }

    fn most(&self, disk: usize) -> u32 {
        self.disks[disk].0.report(1).hw_queues[0].shared.unwrap().most
    }

    /// Completes `n` requests of a disk and polls all lanes, that of the disk first: completions of
    /// the test disk belong to a core, not to a lane.
    fn end(&mut self, disk: usize, n: usize) {
        with_test_disk_state(|state| {
            for _ in 0..n {
                let at = state.bios.iter().position(|(_, bio)| bio.sector.0 == disk as u64 * 8).unwrap();
                let (core, mut bio) = state.bios.remove(at);
                bio.end_with(Status::Ok);
                state.back.push((core, bio));
            }
        });
        self.poll(disk);
        (0..self.disks.len()).for_each(|other| self.poll(other));
    }

    fn poll(&mut self, disk: usize) {
        let from = self.done.len();
        self.disks[disk].1.poll(&mut self.done, &mut self.core.cx(self.now));
        self.done[from..].iter_mut().for_each(|bio| bio.finish());
    }

    fn end_all(&mut self) {
        for disk in (0..self.disks.len()).cycle() {
            if with_test_disk_state(|state| state.bios.is_empty()) {
                break;
            }
            let n = self.has(disk);
            self.end(disk, n);
        }
    }
}

/// The kernel's shares of 64 tags: 32 for two disks, 22 for three, 4 for 32.
#[test]
fn b09_each_active_disk_has_its_share_and_at_least_four() {
    for (disks, share) in [(1, 64), (2, 32), (3, 22), (32, 4)] {
        let mut all = SharedTagDisks::new(64, disks);
        for disk in 0..disks {
            all.submit(disk, 1);
        }
        for disk in 0..disks {
            all.submit(disk, 100);
        }
        let has: Vec<usize> = (0..disks).map(|disk| all.has(disk)).collect();
        assert!(has.iter().all(|has| *has <= share) && has[0] == share, "{has:?}");
        assert_eq!(all.most(0) as usize, share);
        assert!(has.iter().sum::<usize>() <= 64);
        all.end_all();
        assert_eq!(all.done.len(), disks * 101);
    }
}

/// A disk that has all tags when another becomes active keeps them, and gets no more until it is
/// below its share.
#[test]
fn who_came_first_comes_down_to_its_share() {
    let mut all = SharedTagDisks::new(8, 2);
    all.submit(0, 100);
    assert_eq!((all.has(0), all.most(0)), (8, 8));
    all.submit(1, 100);
    assert_eq!((all.has(1), all.most(1)), (0, 4));
    for freed in 1..=4 {
        all.end(0, 1);
        assert_eq!((all.has(0), all.has(1)), (8 - freed, freed));
    }
    all.end(0, 1);
    assert_eq!((all.has(0), all.has(1)), (4, 4));
    all.end_all();
    assert_eq!(all.done.len(), 200);
}

/// A disk between two requests keeps its share for 5 s.
#[test]
fn a_share_is_kept_for_a_while() {
    let mut all = SharedTagDisks::new(8, 2);
    all.submit(1, 1);
    all.end(1, 1);
    all.submit(0, 100);
    assert_eq!(all.has(0), 4);
    all.now = Nanos::from_millis(4_999);
    all.end(0, 1);
    assert_eq!(all.has(0), 4);
    all.now = Nanos::from_millis(5_002);
    all.end(0, 1);
    assert_eq!(all.has(0), 8, "it is idle");
    all.end_all();
}

/// A NOWAIT request fails at once and leaves no tag behind.
#[test]
fn who_is_not_to_wait_does_not() {
    let mut all = SharedTagDisks::new(4, 2);
    all.submit(0, 4);
    let mut bio = read(8, 8);
    bio.flags = BioFlags::NOWAIT;
    bio.start();
    all.disks[1].1.submit(&mut vec![bio], &mut all.core.cx(all.now));
    all.poll(1);
    assert_eq!((all.done.len(), all.done[0].status), (1, Status::Again));
    all.end_all();
    all.submit(1, 4);
    assert_eq!(all.has(1), 4);
    all.end_all();
}

/// Waiting requests are handed back to a suspend without flush, and a lane that closes returns its
/// tags.
#[test]
fn what_waits_is_handed_back() {
    let mut all = SharedTagDisks::new(4, 2);
    all.submit(0, 4);
    all.submit(1, 4);
    let mut back = Batch::new();
    let others = with_test_disk_state(|state| std::mem::take(&mut state.bios));
    all.disks[1].1.drain(DrainMode::NoFlush, &mut back, &mut all.core.cx(all.now));
    with_test_disk_state(|state| state.bios = others);
    assert_eq!(back.len(), 4);
    back.iter_mut().for_each(|bio| bio.finish());
    all.end_all();
    all.submit(1, 4);
    assert_eq!(all.has(1), 4, "the lane left no tag behind");
    all.end_all();
}
