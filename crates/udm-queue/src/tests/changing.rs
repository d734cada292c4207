//! Changes of settings while requests are in flight.

use super::*;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

impl TestCores {
    /// Starts a change; returns how often it was reported complete.
    fn change(&mut self, words: &[(&str, &str)]) -> Result<Arc<AtomicU32>, DeviceControlError> {
        let words: Vec<_> = words.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        let replies = Arc::new(AtomicU32::new(0));
        let of_then = Arc::clone(&replies);
        let changed = self.queue.change(&words, Box::new(move || _ = of_then.fetch_add(1, SeqCst)));
        self.wakes();
        changed.map(|_cancel| replies)
    }

    fn end_all(&mut self) {
        while !self.at_disk().is_empty() {
            self.end(0, Status::Ok);
        }
    }
}

/// A change completes when the last earlier request has completed, and waiting requests follow the
/// new settings. No request is lost, and the disk never has more than the tags allow.
#[test]
fn a_change_takes_what_waits_with_it() {
    for cores in [1, 2] {
        let mut world = TestCores::new(cores, "queue_depth=4,nr_hw_queues=1,nomerges=2");
        world.submit(0, (0..12).map(|n| read(n * 16, 8)).collect());
        world.submit(cores - 1, (20..32).map(|n| read(n * 16, 8)).collect());
        let replies = world.change(&[("nr_requests", "4"), ("nomerges", "0")]).unwrap();
        let busy = world.change(&[("nomerges", "0")]).unwrap_err();
        assert_eq!(busy.text, "another change of the queue is in progress");
        // Requests continue while the change collects the tags.
        for _ in 0..4 {
            assert_eq!(replies.load(SeqCst), 0);
            world.end(0, Status::Ok);
        }
        world.end_all();
        assert_eq!((replies.load(SeqCst), world.done.len()), (1, 24));
        assert_eq!(with_test_disk_state(|state| state.most), 4);
        let mut sectors: Vec<u64> = world.done.iter().map(|(_, bio)| bio.sector.0 / 16).collect();
        sectors.sort_unstable();
        assert_eq!(sectors, (0..12).chain(20..32).collect::<Vec<_>>());
        // Requests are merged now, also on a core where none waited.
        world.submit(cores - 1, vec![read(0, 8), read(8, 8)]);
        world.end_all();
        world.submit(cores - 1, vec![read(0, 8), read(8, 8)]);
        assert_eq!(world.at_disk(), [(0, 16)]);
        world.end_all();
    }
}

/// A lane that sees new settings in a poll sends waiting requests, and returns those that complete
/// at once.
#[test]
fn what_moves_to_new_settings_and_ends_at_once_comes_home() {
    let mut world = TestCores::new(2, "queue_depth=1,nr_hw_queues=1,nomerges=2");
    world.submit(0, vec![read(0, 8)]);
    world.submit(1, vec![read(16, 8), read(32, 8)]);
    world.submit(0, vec![read(48, 8)]);
    let replies = world.change(&[("nomerges", "0")]).unwrap();
    for (done, next) in [(0, 0), (1, 16), (2, 48)] {
        assert_eq!((replies.load(SeqCst), world.done.len(), world.at_disk()), (0, done, vec![(next, 8)]));
        with_test_disk_state(|state| state.prompt = next == 48);
        world.end(0, Status::Ok);
    }
    assert_eq!((replies.load(SeqCst), world.done.len(), world.at_disk()), (1, 4, vec![]));
}

#[test]
fn another_scheduler_sorts_what_waits() {
    let mut world = TestCores::new(1, "queue_depth=1,nomerges=2");
    world.submit(0, [9, 5, 7, 1, 3].map(|n| read(n * 16, 8)).into());
    let replies = world.change(&[("scheduler", "mq-deadline")]).unwrap();
    assert_eq!((replies.load(SeqCst), world.at_disk()), (0, vec![(9 * 16, 8)]));
    let mut order = Vec::new();
    while let Some((sector, _)) = world.at_disk().first() {
        order.push(sector / 16);
        world.end(0, Status::Ok);
    }
    // The lane was in line for a tag first.
    assert_eq!((replies.load(SeqCst), order), (1, vec![9, 5, 1, 3, 7]));
    assert_eq!(world.queue.report(1).scheduler, "mq-deadline");
}

/// A change to the current settings completes at once, whatever the disk does; but not during
/// another change.
#[test]
fn what_holds_is_not_waited_for() {
    let mut world = TestCores::new(1, "queue_depth=1,nomerges=2");
    world.submit(0, vec![read(0, 8)]);
    for words in [&[("nomerges", "2"), ("scheduler", "none")][..], &[]] {
        assert_eq!(world.change(words).unwrap().load(SeqCst), 1);
    }
    let replies = world.change(&[("nomerges", "0")]).unwrap();
    world.change(&[("nomerges", "2")]).unwrap_err();
    world.end_all();
    assert_eq!(replies.load(SeqCst), 1);
}

/// Before a lane is opened, and while all are idle, a change completes at once.
#[test]
fn an_idle_queue_changes_at_once() {
    let mut world = TestCores::new(2, "queue_depth=8");
    let replies = world.change(&[("nr_requests", "4"), ("max_sectors_kb", "16")]).unwrap();
    assert_eq!(replies.load(SeqCst), 1);
    assert_eq!(world.queue.limits().max_sectors, Sectors(32));
    world.submit(0, (0..12).map(|n| read(n * 16, 8)).collect());
    assert_eq!(world.at_disk().len(), 4);
    world.end_all();
    assert_eq!(world.change(&[("max_sectors_kb", "0")]).unwrap().load(SeqCst), 1);
    assert_eq!(world.queue.limits().max_sectors, Sectors(64));
}

/// A NOWAIT request gets a tag of the new settings, also on a lane where no request waits.
#[test]
fn who_is_not_to_wait_goes_by_the_new_settings() {
    let mut world = TestCores::new(1, "queue_depth=8");
    world.change(&[("nr_requests", "4")]).unwrap();
    let mut bio = read(0, 8);
    bio.flags = BioFlags::NOWAIT;
    world.submit(0, vec![bio]);
    world.poll(0);
    assert_eq!((world.done.len(), world.at_disk()), (0, vec![(0, 8)]));
    world.end_all();
    assert_eq!(world.done[0].1.status, Status::Ok);
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    let mut world = TestCores::new(1, "queue_depth=8,nr_requests=6");
    let before = world.queue.report(1);
    for (name, value, why) in [
        ("nr_requests", "9", "nr_requests=9 is more than 8, queue_depth"),
        ("nr_requests", "x", "nr_requests=\"x\" is not a number in 0..20480"),
        ("scheduler", "bfq", "scheduler=\"bfq\" is neither none nor mq-deadline"),
        ("max_sectors_kb", "3", "max_sectors_kb is 0, or at least 4"),
        ("queue_depth", "4", "queue_depth can't be changed while the disk is in use"),
    ] {
        let refused = world.change(&[("nomerges", "1"), (name, value)]).unwrap_err();
        assert_eq!((refused.text.as_str(), refused.errno), (why, udm_core::errno::EINVAL));
    }
    let refused = world.change(&[("colour", "red")]).unwrap_err().text;
    assert!(refused.starts_with("a queue in use has no setting \"colour\": it has scheduler, nr_requests"));
    assert_eq!(world.queue.report(1), before);
    // Another scheduler resets the number of requests to its default and drops the settings of the
    // old scheduler. Fewer than four requests become four.
    world.change(&[("scheduler", "mq-deadline"), ("read_expire", "7"), ("fifo_batch", "0")]).unwrap();
    let numbers = world.queue.report(1).numbers;
    assert!([("nr_requests", 16), ("read_expire", 7), ("fifo_batch", 0)].iter().all(|n| numbers.contains(n)));
    world.change(&[("scheduler", "none")]).unwrap();
    world.change(&[("scheduler", "mq-deadline")]).unwrap();
    let numbers = world.queue.report(1).numbers;
    assert!(numbers.contains(&("read_expire", 500)) && numbers.contains(&("fifo_batch", 16)));
    let refused = world.change(&[("nr_requests", "2049")]).unwrap_err().text;
    assert_eq!(refused, "nr_requests=2049 is more than 2048, what a scheduler sorts at the most");
    world.change(&[("nr_requests", "0")]).unwrap();
    assert!(world.queue.report(1).numbers.contains(&("nr_requests", 4)));
}

/// A disk that no core can open.
struct UnopenableDisk(DeviceId);

impl Device for UnopenableDisk {
    fn id(&self) -> DeviceId {
        self.0
    }
    fn open(&self, _: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Err(DeviceControlError::new(udm_core::errno::EIO, "closed"))
    }
    fn limits(&self) -> Limits {
        Limits::new(Sectors(SIZE))
    }
}

/// Also if an owner task serves the requests: it would find out only with the first request.
#[test]
fn a_disk_that_cannot_be_opened_refuses_the_lane() {
    for words in ["scheduler=none", "scheduler=mq-deadline"] {
        let queue = QueuedDevice::new(Arc::new(UnopenableDisk(DeviceId::new())), &params(words));
        let mut core =
            CoreLaneState::new(CoreId(0), 2, 1, None).with_cores(Arc::new(RecordedWakes::default()));
        let refused = queue.open(&mut core.cx(Nanos(1))).err().map(|error| error.text);
        assert_eq!(refused.as_deref(), Some("closed"), "{words}");
    }
}

/// A cancelled change keeps all tags and the old settings. Waiting requests continue, and another
/// change may follow.
#[test]
fn a_cancelled_change_gives_its_tags_back() {
    for cores in [1, 2] {
        let mut world = TestCores::new(cores, "queue_depth=2,nr_hw_queues=1,nomerges=2");
        world.submit(0, vec![read(0, 8)]);
        let words = [("nomerges".to_owned(), "0".to_owned())];
        let cancel = world.queue.change(&words, Box::new(|| panic!("it was cancelled"))).unwrap();
        world.submit(cores - 1, vec![read(16, 8)]);
        assert_eq!(world.at_disk(), [(0, 8)], "the change has the other tag");
        cancel();
        world.wakes();
        world.poll(cores - 1);
        assert_eq!(world.at_disk(), [(0, 8), (16, 8)]);
        world.end_all();
        assert_eq!(world.queue.report(cores).hw_queues[0].tags_in_use, 0);
        assert_eq!(world.change(&[("nomerges", "1")]).unwrap().load(SeqCst), 1);
    }
}
