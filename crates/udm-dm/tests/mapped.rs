//! The life of a mapped device: slots, suspend, resume, bios that wait or fail, messages, events,
//! names.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use udm_core::errno::EINTR;
use udm_core::{Batch, Bio, BioFlags, DevNo, Device, DeviceControlError, Lane, Limits, Op, Sectors, Status};
use udm_dm::testing::{
    SteppedTestCores, TestControlIo, TestDeviceNameResolver, TestDisk, bio_without_data, copy_bio_data,
    make_test_read_bio, make_test_write_bio,
};
use udm_dm::{DeviceTransition, MappedDevice, Table, TargetError};

struct Fixture {
    world: SteppedTestCores,
    resolver: TestDeviceNameResolver,
    disks: Vec<Arc<TestDisk>>,
    device: Arc<MappedDevice>,
    /// Bios that completed while a change was stepped.
    home: Batch,
}

impl Fixture {
    /// A device without a table and three disks of 64 sectors, `/d0` to `/d2`, full of `a`, `b` and
    /// `c`.
    fn new(cores: usize) -> Fixture {
        let mut resolver = TestDeviceNameResolver::new();
        let mut disks = Vec::new();
        for i in 0..3u8 {
            let disk = TestDisk::new(64);
            disk.put(0, &[b'a' + i; 64 * 512]);
            let number = DevNo { major: 7, minor: u32::from(i) };
            resolver.add(&format!("/d{i}"), number, Arc::<TestDisk>::clone(&disk));
            disks.push(disk);
        }
        let device = device("t", 0);
        resolver.add("@t", device.number(), Arc::<MappedDevice>::clone(&device));
        Fixture { world: SteppedTestCores::new(cores), resolver, disks, device, home: Batch::new() }
    }

    fn table(&mut self, text: &str) -> Arc<Table> {
        Table::build(
            udm_targets::TARGETS,
            &udm_wire::table::parse_table(text).unwrap(),
            &mut self.resolver,
            &TestControlIo::new(),
            2,
        )
        .unwrap()
    }

    fn load(&mut self, text: &str) {
        let table = self.table(text);
        self.device.load(table).unwrap();
    }

    fn go(&mut self, text: &str) {
        self.load(text);
        self.resume(&mut []).unwrap();
    }

    /// Steps `change` to its end, and polls `lanes` (one per core).
    fn finish(
        &mut self,
        mut change: DeviceTransition,
        lanes: &mut [Box<dyn Lane>],
    ) -> Result<(), TargetError> {
        let cores = self.world.cores();
        for _ in 0..100 {
            if let Some(result) = change.step(&*cores) {
                return result;
            }
            let mut done = self.turn(lanes);
            self.home.append(&mut done);
        }
        panic!("the change does not end");
    }

    /// One poll on every core.
    fn turn(&mut self, lanes: &mut [Box<dyn Lane>]) -> Batch {
        let mut all = Batch::new();
        for (core, lane) in lanes.iter_mut().enumerate() {
            all.extend(self.world.poll(core, &mut **lane));
        }
        for core in lanes.len()..self.cores() {
            self.world.deliver(core);
        }
        all
    }

    fn cores(&mut self) -> usize {
        self.world.turn(0, |cx| cx.cores())
    }

    fn resume(&mut self, lanes: &mut [Box<dyn Lane>]) -> Result<(), TargetError> {
        let change = self.device.resume(no_wake()).unwrap();
        self.finish(change, lanes)
    }

    fn suspend(&mut self, noflush: bool, lanes: &mut [Box<dyn Lane>]) -> Result<(), TargetError> {
        let change = self.device.suspend(noflush, no_wake()).unwrap();
        self.finish(change, lanes)
    }

    fn lanes(&mut self) -> Vec<Box<dyn Lane>> {
        (0..self.cores()).map(|core| self.world.open(core, &*self.device).unwrap()).collect()
    }

    fn read_one(&mut self, lane: &mut Box<dyn Lane>) -> (Status, u8) {
        let bio = self.world.run(0, &mut **lane, make_test_read_bio(0, 1));
        (bio.status, copy_bio_data(&bio)[0])
    }

    fn go_with(&mut self, text: &str, lanes: &mut [Box<dyn Lane>]) {
        self.load(text);
        self.resume(lanes).unwrap();
    }
}

fn device(name: &str, minor: u32) -> Arc<MappedDevice> {
    MappedDevice::new(name, None, DevNo { major: 254, minor }).unwrap()
}

fn no_wake() -> udm_dm::TransitionWakeFn {
    Arc::new(|| {})
}

#[test]
fn a_device_without_a_table() {
    let mut rig = Fixture::new(1);
    assert_eq!((rig.device.limits().size, rig.device.table_text(false).as_str()), (Sectors(0), ""));
    let mut lanes = rig.lanes();
    for bio in [make_test_read_bio(0, 1), make_test_write_bio(0, 1, 1), bio_without_data(Op::Flush, 0, 0)] {
        assert_eq!(rig.world.run(0, &mut *lanes[0], bio).status, Status::IoErr);
    }
    rig.suspend(false, &mut lanes).unwrap();
    assert!(rig.device.info().suspended);
    rig.resume(&mut lanes).unwrap();
    assert!(!rig.device.info().suspended);
    // The device gets its first table while lanes are open.
    rig.go_with("0 64 linear /d1 0", &mut lanes);
    assert_eq!(rig.read_one(&mut lanes[0]), (Status::Ok, b'b'));
}

#[test]
fn slots_and_what_info_shows() {
    let mut rig = Fixture::new(1);
    rig.load("0 8 linear /d0 0");
    let info = rig.device.info();
    assert_eq!((info.live, info.inactive, info.targets, info.inactive_targets), (false, true, 0, 1));
    assert_eq!((info.size, rig.device.table_text(true).as_str()), (Sectors(0), "0 8 linear 7:0 0"));
    rig.resume(&mut []).unwrap();
    rig.load("0 8 linear /d1 0\n8 8 zero");
    rig.load("0 16 linear /d2 0\n16 8 error");
    assert_eq!(rig.device.table_text(false), "0 8 linear 7:0 0");
    assert_eq!(rig.device.table_text(true), "0 16 linear 7:2 0\n16 8 error ");
    rig.device.clear();
    let info = rig.device.info();
    assert_eq!((info.live, info.inactive, info.targets, info.size), (true, false, 1, Sectors(8)));
    rig.go("0 64 striped 2 8 /d0 0 /d1 0");
    assert_eq!(rig.device.status_text(), "0 64 striped 2 7:0 7:1 1 AA");
    assert_eq!((rig.device.info().size, rig.device.event_nr()), (Sectors(64), 0));
}

#[test]
fn suspended_bios_wait_or_fail_as_they_asked() {
    let mut rig = Fixture::new(1);
    rig.go("0 64 linear /d0 0");
    let mut lanes = rig.lanes();
    rig.suspend(false, &mut lanes).unwrap();
    rig.suspend(false, &mut lanes).unwrap();
    let flagged = |flags| {
        let mut bio = make_test_read_bio(0, 1);
        bio.flags = flags;
        bio
    };
    let bios = [
        make_test_read_bio(0, 1),
        flagged(BioFlags::NOWAIT),
        flagged(BioFlags::RAHEAD),
        make_test_write_bio(3, 1, 9),
    ];
    rig.world.submit(0, &mut *lanes[0], bios);
    let failed = rig.turn(&mut lanes);
    let failed: Vec<_> = failed.iter().map(|b| (b.flags, b.status)).collect();
    assert_eq!(failed, [(BioFlags::NOWAIT, Status::Again), (BioFlags::RAHEAD, Status::IoErr)]);
    assert!(rig.turn(&mut lanes).is_empty() && rig.disks[0].take_log().is_empty());
    // On a lane that is opened now, requests wait too.
    let mut late = rig.world.open(0, &*rig.device).unwrap();
    rig.world.submit(0, &mut *late, [make_test_read_bio(0, 1)]);
    assert!(rig.world.poll(0, &mut *late).is_empty());

    let mut change = rig.device.resume(no_wake()).unwrap();
    let cores = rig.world.cores();
    assert!(change.step(&*cores).is_none());
    let done = rig.turn(&mut lanes);
    assert_eq!(
        done.iter().map(|b| (b.op, b.status)).collect::<Vec<_>>(),
        [(Op::Read, Status::Ok), (Op::Write, Status::Ok)]
    );
    assert_eq!(rig.world.poll(0, &mut *late).len(), 1);
    change.step(&*cores).expect("all lanes have resumed").unwrap();
}

#[test]
fn suspend_waits_for_what_is_in_flight_on_every_core() {
    let mut rig = Fixture::new(2);
    rig.go("0 64 linear /d0 0");
    let mut lanes = rig.lanes();
    rig.disks[0].hold(true);
    rig.world.submit(1, &mut *lanes[1], [make_test_write_bio(0, 1, 7)]);
    let woken = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&woken);
    let wake: udm_dm::TransitionWakeFn = Arc::new(move || {
        count.fetch_add(1, Ordering::SeqCst);
    });
    let mut change = rig.device.suspend(false, wake).unwrap();
    let cores = rig.world.cores();
    assert_eq!(rig.device.suspend(false, no_wake()).err().unwrap().errno, 16, "one change at a time");
    for _ in 0..5 {
        assert!(change.step(&*cores).is_none());
        assert!(rig.turn(&mut lanes).is_empty());
    }
    assert_eq!(woken.load(Ordering::SeqCst), 0);
    rig.disks[0].hold(false);
    assert_eq!(rig.turn(&mut lanes).len(), 1);
    assert_eq!(woken.load(Ordering::SeqCst), 1);
    change.step(&*cores).unwrap().unwrap();
    drop(change);
    rig.resume(&mut lanes).unwrap();
}

#[test]
fn a_suspend_can_be_called_off() {
    let mut rig = Fixture::new(1);
    rig.go("0 64 linear /d0 0");
    let mut lanes = rig.lanes();
    rig.disks[0].hold(true);
    rig.world.submit(0, &mut *lanes[0], [make_test_read_bio(0, 1)]);
    let mut change = rig.device.suspend(false, no_wake()).unwrap();
    let cores = rig.world.cores();
    assert!(change.step(&*cores).is_none());
    rig.world.submit(0, &mut *lanes[0], [make_test_read_bio(1, 1)]);
    change.cancel(&*cores);
    assert!(change.step(&*cores).is_none());
    assert!(rig.turn(&mut lanes).is_empty());
    assert_eq!(change.step(&*cores).unwrap().unwrap_err().errno, EINTR);
    assert!(!rig.device.is_suspended());
    rig.disks[0].hold(false);
    assert_eq!(rig.turn(&mut lanes).len(), 2);
    drop(change);
    rig.suspend(false, &mut lanes).unwrap();
}

/// Held bios of a no-flush suspend go to the new table unchanged, with their fragments joined
/// again.
#[test]
fn held_bios_go_to_the_new_table() {
    for (text, new) in [
        ("0 64 linear /d0 0", "0 64 linear /d1 0"),
        ("0 32 linear /d0 8\n32 24 linear /d0 40", "0 56 linear /d1 0"),
        ("0 64 striped 2 4 /d0 0 /d0 32", "0 32 linear /d1 0\n32 32 linear /d1 32"),
    ] {
        let mut rig = Fixture::new(1);
        rig.go(text);
        let mut lanes = rig.lanes();
        rig.disks[0].hold(true);
        rig.disks[0].hand_back(true);
        let mut bios =
            vec![make_test_write_bio(20, 30, 1), make_test_read_bio(0, 2), bio_without_data(Op::Flush, 0, 0)];
        bios[0].flags = BioFlags::PREFLUSH;
        rig.world.submit(0, &mut *lanes[0], bios);
        rig.load(new);
        rig.resume(&mut lanes).unwrap();
        let mut done = std::mem::take(&mut rig.home);
        for _ in 0..5 {
            done.extend(rig.turn(&mut lanes));
        }
        done.sort_by_key(|b| (b.op as u8, b.sector));
        let facts: Vec<_> = done.iter().map(|b| (b.op, b.sector.0, b.sectors.0, b.flags, b.status)).collect();
        let none = BioFlags::empty();
        let expected = [
            (Op::Read, 0, 2, none, Status::Ok),
            (Op::Write, 20, 30, BioFlags::PREFLUSH, Status::Ok),
            (Op::Flush, 0, 0, none, Status::Ok),
        ];
        assert_eq!(facts, expected, "{text}");
        assert_eq!(copy_bio_data(&done[0]), [b'b'; 1024], "{text}");
        assert_eq!(copy_bio_data(&done[1]), copy_bio_data(&make_test_write_bio(20, 30, 1)), "{text}");
        assert_eq!(rig.disks[1].bytes(20, 30), copy_bio_data(&done[1]), "{text}");
        assert_eq!(rig.disks[0].bytes(0, 64), [b'a'; 64 * 512], "{text}: nothing reached the old disk");
    }
}

#[test]
fn a_flushing_suspend_fails_what_is_held() {
    let mut rig = Fixture::new(1);
    rig.go("0 64 linear /d0 0");
    let mut lanes = rig.lanes();
    rig.disks[0].hold(true);
    rig.disks[0].hand_back(true);
    rig.world.submit(0, &mut *lanes[0], [make_test_read_bio(0, 1)]);
    let mut change = rig.device.suspend(false, no_wake()).unwrap();
    let cores = rig.world.cores();
    assert!(change.step(&*cores).is_none());
    assert_eq!(rig.turn(&mut lanes)[0].status, Status::IoErr);
    change.step(&*cores).unwrap().unwrap();
}

/// A resume that cannot work is refused; the old table stays live and running.
#[test]
fn a_resume_that_cannot_work_leaves_the_old_table_running() {
    for suspended in [false, true] {
        let mut rig = Fixture::new(2);
        rig.go("0 64 linear /d0 0");
        let mut lanes = rig.lanes();
        rig.load("0 64 linear /d1 0");
        if suspended {
            rig.suspend(true, &mut lanes).unwrap();
        }
        rig.disks[1].refuse(Some(DeviceControlError::new(111, "connection refused")));
        let error = rig.resume(&mut lanes).unwrap_err();
        assert_eq!((error.errno, error.reason.as_str()), (111, "connection refused"));
        assert_eq!(rig.device.table_text(false), "0 64 linear 7:0 0");
        assert!(!rig.device.is_suspended());
        assert_eq!(rig.read_one(&mut lanes[0]), (Status::Ok, b'a'));
        assert_eq!(rig.disks[1].opened(), 0, "what was prepared is closed");
        // The inactive table is still loaded, and the next attempt works.
        rig.disks[1].refuse(None);
        rig.resume(&mut lanes).unwrap();
        assert_eq!(rig.read_one(&mut lanes[0]), (Status::Ok, b'b'));
        assert_eq!((rig.disks[0].opened(), rig.disks[1].opened()), (0, 2));

        // A device below shrank between load and resume.
        rig.load("0 64 linear /d2 0");
        rig.disks[2].set_limits(|l| l.size = Sectors(32));
        let error = rig.resume(&mut lanes).unwrap_err();
        assert_eq!(error.text, "d2 too small for target: start=0, len=64, dev_size=32");
        assert_eq!(rig.read_one(&mut lanes[0]), (Status::Ok, b'b'));
    }
}

/// A lane may be opened between any two steps of a change.
#[test]
fn lanes_opened_in_the_middle_of_a_change() {
    for open_at in 0..6 {
        let mut rig = Fixture::new(2);
        rig.go("0 64 linear /d0 0");
        let mut lanes = vec![rig.world.open(0, &*rig.device).unwrap()];
        rig.load("0 64 linear /d1 0");
        let mut change = rig.device.resume(no_wake()).unwrap();
        let cores = rig.world.cores();
        for step in 0..20 {
            if step == open_at {
                lanes.push(rig.world.open(1, &*rig.device).unwrap());
            }
            match change.step(&*cores) {
                Some(result) => {
                    result.unwrap();
                    break;
                }
                // Delivery and the poll after it are separate turns.
                None if step % 2 == 0 => (0..2).for_each(|core| rig.world.deliver(core)),
                None => drop(rig.turn(&mut lanes)),
            }
        }
        if lanes.len() < 2 {
            lanes.push(rig.world.open(1, &*rig.device).unwrap());
        }
        for (core, lane) in lanes.iter_mut().enumerate() {
            let bio = rig.world.run(core, &mut **lane, make_test_read_bio(0, 1));
            assert_eq!(
                (bio.status, copy_bio_data(&bio)[0]),
                (Status::Ok, b'b'),
                "opened before step {open_at}"
            );
        }
        assert_eq!(rig.disks[0].opened(), 0);
    }
}

#[test]
fn messages() {
    let mut rig = Fixture::new(1);
    let words = |text: &str| -> Vec<String> { text.split_whitespace().map(str::to_owned).collect() };
    let cores = rig.world.cores();
    let send = |rig: &mut Fixture, sector, text: &str| {
        let error = rig.device.message(sector, &words(text), &mut rig.resolver, &*cores).unwrap_err();
        (error.errno, error.text)
    };
    assert_eq!(send(&mut rig, 0, "hello"), (22, "Target message sector outside device.".into()));
    rig.go("0 8 linear /d0 0\n8 8 zero");
    assert_eq!(send(&mut rig, 0, ""), (22, "Empty message received.".into()));
    assert_eq!(send(&mut rig, 0, "@x y"), (22, "Unsupported message sent to DM core: @x".into()));
    assert_eq!(send(&mut rig, 16, "hello"), (22, "Target message sector outside device.".into()));
    assert_eq!(send(&mut rig, 7, "hello"), (22, "Target type linear does not support messages".into()));
    assert_eq!(send(&mut rig, 8, "hello"), (22, "Target type zero does not support messages".into()));
    rig.suspend(false, &mut []).unwrap();
    let silent = (22, "Target type linear does not support messages".into());
    assert_eq!(send(&mut rig, 0, "hello"), silent, "a suspend changes nothing about that");
    assert_eq!(rig.device.table_text(false), "0 8 linear 7:0 0\n8 8 zero ");
    rig.go("0 8 multipath 2 queue_mode bio 0 1 1 round-robin 0 1 1 /d0 1");
    rig.suspend(false, &mut []).unwrap();
    assert_eq!(send(&mut rig, 0, "hello").0, 16, "multipath's own rule");
}

/// A stripe error changes the stripe's status letter and raises an event, at most fourteen times.
#[test]
fn stripe_errors_are_counted_and_reported() {
    let mut rig = Fixture::new(1);
    rig.go("0 64 striped 2 8 /d0 0 /d1 0");
    let mut lanes = rig.lanes();
    let events = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&events);
    rig.device.on_event(Arc::new(move || {
        count.fetch_add(1, Ordering::SeqCst);
    }));
    let mut run = |rig: &mut Fixture, bio: Box<Bio>| rig.world.run(0, &mut *lanes[0], bio).status;
    rig.disks[1].fail(Status::NotSupp);
    assert_eq!(run(&mut rig, make_test_read_bio(8, 1)), Status::NotSupp);
    rig.disks[1].fail(Status::IoErr);
    let mut ahead = make_test_read_bio(8, 1);
    ahead.flags = BioFlags::RAHEAD;
    assert_eq!(run(&mut rig, ahead), Status::IoErr);
    assert_eq!(
        (rig.device.status_text().as_str(), rig.device.event_nr()),
        ("0 64 striped 2 7:0 7:1 1 AA", 0)
    );
    assert_eq!(run(&mut rig, make_test_read_bio(0, 1)), Status::Ok);
    for i in 1..20 {
        assert_eq!(run(&mut rig, make_test_read_bio(6, 4)), Status::IoErr, "a piece on the bad stripe");
        assert_eq!(rig.device.event_nr(), i.min(14));
    }
    assert_eq!(rig.device.status_text(), "0 64 striped 2 7:0 7:1 1 AD");
    assert_eq!(events.load(Ordering::SeqCst), 14);
}

#[test]
fn flushes_go_to_each_device_once() {
    let mut rig = Fixture::new(1);
    let flush = |rig: &mut Fixture, lane: &mut Box<dyn Lane>, bio: Box<Bio>| {
        let status = rig.world.run(0, &mut **lane, bio).status;
        let counts = rig.disks.iter().map(|d| d.take_log().iter().filter(|s| s.op == Op::Flush).count());
        (status, counts.collect::<Vec<_>>())
    };
    for (table, counts) in [
        ("0 8 linear /d0 0\n8 8 linear /d1 0\n16 8 linear /d0 8", [1, 1, 0]),
        ("0 16 striped 2 8 /d2 0 /d2 8", [0, 0, 1]),
        ("0 8 linear /d0 0\n8 16 striped 2 8 /d1 0 /d2 0", [1, 1, 1]),
        ("0 8 zero\n8 8 error", [0, 0, 0]),
        // The zero target allows no bypass, so each target gets one flush.
        ("0 8 zero\n8 8 linear /d0 0\n16 8 linear /d0 8", [2, 0, 0]),
    ] {
        rig.go(table);
        let mut lanes = rig.lanes();
        assert_eq!(
            flush(&mut rig, &mut lanes[0], bio_without_data(Op::Flush, 0, 0)),
            (Status::Ok, counts.to_vec()),
            "{table}"
        );
    }
    rig.go("0 8 linear /d0 0\n8 8 linear /d1 0");
    let mut lanes = rig.lanes();
    rig.disks[1].fail(Status::IoErr);
    let result = flush(&mut rig, &mut lanes[0], bio_without_data(Op::Flush, 0, 0));
    assert_eq!(result, (Status::IoErr, vec![1, 1, 0]));
    // A write is not executed if the flush before it failed.
    let mut bio = make_test_write_bio(0, 1, 3);
    bio.flags = BioFlags::PREFLUSH;
    assert_eq!(rig.world.run(0, &mut *lanes[0], bio).status, Status::IoErr);
    assert!(rig.disks[0].take_log().iter().all(|s| s.op == Op::Flush));
}

#[test]
fn preflush_and_fua_are_put_in_order() {
    for (fua, write_cache, expected) in [
        (true, true, vec![(Op::Flush, BioFlags::empty()), (Op::Write, BioFlags::FUA)]),
        (
            false,
            true,
            vec![
                (Op::Flush, BioFlags::empty()),
                (Op::Write, BioFlags::empty()),
                (Op::Flush, BioFlags::empty()),
            ],
        ),
        (false, false, vec![(Op::Flush, BioFlags::empty()), (Op::Write, BioFlags::empty())]),
    ] {
        let mut rig = Fixture::new(1);
        rig.disks[0].set_limits(|l| (l.fua, l.write_cache) = (fua, write_cache));
        rig.go("0 64 linear /d0 0");
        let mut lanes = rig.lanes();
        let mut bio = make_test_write_bio(5, 3, 3);
        bio.flags = BioFlags::PREFLUSH | BioFlags::FUA;
        let bio = rig.world.run(0, &mut *lanes[0], bio);
        assert_eq!((bio.status, bio.flags), (Status::Ok, BioFlags::PREFLUSH | BioFlags::FUA));
        let seen: Vec<_> = rig.disks[0].take_log().iter().map(|s| (s.op, s.flags)).collect();
        assert_eq!(seen, expected);
    }
}

#[test]
fn the_table_is_the_boundary() {
    let mut rig = Fixture::new(1);
    rig.disks[0].set_limits(|l| (l.logical_block, l.max_write_zeroes) = (4096, Sectors(0)));
    rig.disks[1].set_limits(|l| l.read_only = true);
    rig.go("0 64 linear /d0 0");
    let mut lanes = rig.lanes();
    for (bio, status) in [
        (make_test_read_bio(0, 64), Status::Ok),
        (make_test_read_bio(64, 8), Status::IoErr),
        (make_test_read_bio(56, 16), Status::IoErr),
        (make_test_read_bio(u64::MAX - 7, 8), Status::IoErr),
        (make_test_read_bio(u64::MAX - 7, 16), Status::IoErr),
        (make_test_read_bio(1, 8), Status::Inval),
        (make_test_read_bio(0, 9), Status::Inval),
        (read_nothing(), Status::Inval),
        (bio_without_data(Op::WriteZeroes, 0, 8), Status::NotSupp),
        (bio_without_data(Op::Discard, 0, 8), Status::Ok),
        (bio_without_data(Op::Discard, 56, 16), Status::IoErr),
    ] {
        let text = format!("{bio:?}");
        assert_eq!(rig.world.run(0, &mut *lanes[0], bio).status, status, "{text}");
    }
    assert_eq!(rig.disks[0].take_log().len(), 2);
    rig.go_with("0 64 linear /d1 0", &mut lanes);
    assert_eq!(rig.world.run(0, &mut *lanes[0], make_test_write_bio(0, 8, 1)).status, Status::ReadOnly);
    assert_eq!(rig.world.run(0, &mut *lanes[0], make_test_read_bio(0, 8)).status, Status::Ok);
}

fn read_nothing() -> Box<Bio> {
    bio_without_data(Op::Read, 0, 0)
}

/// A device must not map itself: not directly, not through others, and not through an inactive
/// table.
#[test]
fn circles_are_refused() {
    let mut rig = Fixture::new(1);
    rig.load("0 8 linear /d0 0");
    let upper = device("u", 1);
    rig.resolver.add("@u", upper.number(), Arc::<MappedDevice>::clone(&upper));
    let own = rig.table("0 4 zero\n4 4 linear @t 0");
    let error = rig.device.load(own).unwrap_err();
    assert_eq!((error.errno, error.text.as_str(), error.line), (22, "linear: Device lookup failed", Some(1)));
    let over = rig.table("0 8 linear @t 0");
    upper.load(over).unwrap();
    let circle = rig.table("0 8 striped 1 8 @u 0");
    let error = rig.device.load(circle).unwrap_err();
    assert_eq!((error.errno, error.text.as_str()), (22, "striped: Device lookup failed"));
    assert_eq!(rig.device.table_text(true), "0 8 linear 7:0 0");
}

/// Which tables may replace which.
#[test]
fn a_device_keeps_its_kind() {
    let mut rig = Fixture::new(1);
    let multipath = |mode: &str| format!("0 64 multipath {mode} 0 1 1 round-robin 0 1 0 /d0");
    let (request, bio) = (multipath("0"), multipath("2 queue_mode bio"));
    let load = |rig: &mut Fixture, text: &str| {
        let table = rig.table(text);
        rig.device.load(table).map_err(|e| e.text)
    };
    rig.go(&request);
    let kept = Err("can't replace immutable target type multipath".to_owned());
    assert_eq!(load(&mut rig, "0 64 linear /d0 0"), kept);
    assert_eq!(load(&mut rig, "0 64 zero"), kept);
    assert_eq!(load(&mut rig, "0 32 error\n32 32 linear /d0 0"), kept);
    let kind = Err("can't change device type (old=2 vs new=1) after initial table load.".to_owned());
    assert_eq!(load(&mut rig, &bio), kind);
    assert_eq!(load(&mut rig, &request), Ok(()));
    assert_eq!(load(&mut rig, "0 64 error"), Ok(()));
    rig.resume(&mut []).unwrap();
    assert_eq!(load(&mut rig, "0 64 linear /d0 0"), kind, "the first load fixed it");
    assert_eq!(load(&mut rig, &request), Ok(()));

    let mut rig = Fixture::new(1);
    rig.go("0 64 linear /d0 0");
    assert_eq!(load(&mut rig, &bio), Ok(()));
    let kind = Err("can't change device type (old=1 vs new=2) after initial table load.".to_owned());
    assert_eq!(load(&mut rig, &request), kind);
}

#[test]
fn k10_names_and_uuids() {
    let refused = |name: &str| MappedDevice::new(name, None, DevNo::default()).err().map(|e| e.text);
    assert_eq!(refused("a/b").unwrap(), r#"Name "a/b" invalid. It contains "/"."#);
    for name in ["control", ".", ".."] {
        assert_eq!(refused(name).unwrap(), r#"device name cannot be "control", ".", or "..""#);
    }
    assert!(refused("").is_some() && refused(&"x".repeat(128)).is_some() && refused("a\nb").is_some());
    assert!(refused(&"x".repeat(127)).is_none() && refused("with blanks").is_none());
    let mut rig = Fixture::new(1);
    rig.device.rename("other").unwrap();
    assert_eq!((rig.device.name().as_str(), rig.device.event_nr()), ("other", 0));
    rig.go("0 8 zero");
    rig.device.rename("third").unwrap();
    assert_eq!(rig.device.event_nr(), 1);
    assert!(rig.device.rename("a/b").is_err());
    rig.device.set_uuid("U1").unwrap();
    let error = rig.device.set_uuid("U2").unwrap_err().text;
    assert_eq!(error, "Unable to change uuid of mapped device third to U2 because uuid is already set to U1");
    assert_eq!((rig.device.info().uuid.as_deref(), rig.device.event_nr()), (Some("U1"), 2));
}

/// The lower of two devices changes its table, once while the upper one has bios in flight there,
/// once while the upper one is suspended.
#[test]
fn a_device_under_another_changes_its_table() {
    let mut rig = Fixture::new(1);
    rig.go("0 64 linear /d0 0");
    let (upper, lower) = (device("u", 1), Arc::clone(&rig.device));
    let table = rig.table("0 64 linear @t 0");
    upper.load(table).unwrap();
    rig.device = Arc::clone(&upper);
    rig.resume(&mut []).unwrap();
    let mut lanes = rig.lanes();
    rig.disks[0].hold(true);
    rig.world.submit(0, &mut *lanes[0], [make_test_read_bio(0, 1)]);
    rig.device = Arc::clone(&lower);
    rig.load("0 64 linear /d1 0");
    let mut change = lower.resume(no_wake()).unwrap();
    let cores = rig.world.cores();
    for _ in 0..5 {
        assert!(change.step(&*cores).is_none());
        assert!(rig.turn(&mut lanes).is_empty());
    }
    rig.world.submit(0, &mut *lanes[0], [make_test_read_bio(8, 1)]);
    rig.disks[0].hold(false);
    let mut done = Batch::new();
    for _ in 0..5 {
        if change.step(&*cores).is_some() {
            break;
        }
        done.extend(rig.turn(&mut lanes));
    }
    done.extend(rig.turn(&mut lanes));
    let read: Vec<_> = done.iter().map(|b| (b.sector.0, b.status, copy_bio_data(b)[0])).collect();
    assert_eq!(read, [(0, Status::Ok, b'a'), (8, Status::Ok, b'b')]);
    drop(change);

    rig.device = Arc::clone(&upper);
    rig.suspend(false, &mut lanes).unwrap();
    rig.device = lower;
    rig.go_with("0 64 linear /d2 0", &mut lanes);
    rig.device = upper;
    rig.resume(&mut lanes).unwrap();
    assert_eq!(rig.read_one(&mut lanes[0]), (Status::Ok, b'c'));
}

/// Three splitters on top of each other, with more pieces than fragments.
#[test]
fn splitters_do_not_starve_each_other() {
    let mut rig = Fixture::new(1);
    let disk = TestDisk::null(Limits { max_sectors: Sectors(1), ..Limits::new(Sectors(1 << 20)) });
    rig.resolver.add("/big", DevNo { major: 8, minor: 0 }, Arc::<TestDisk>::clone(&disk));
    rig.go("0 1048576 linear /big 0");
    let mut top = Arc::clone(&rig.device);
    for level in 1..4 {
        let device = device(&format!("l{level}"), level);
        let below = if level == 1 { "@t".to_owned() } else { format!("@l{}", level - 1) };
        rig.resolver.add(&format!("@l{level}"), device.number(), Arc::<MappedDevice>::clone(&device));
        let table = rig.table(&format!("0 524288 linear {below} 0\n524288 524288 linear {below} 524288"));
        device.load(table).unwrap();
        rig.device = Arc::clone(&device);
        rig.resume(&mut []).unwrap();
        top = device;
    }
    let mut lane = rig.world.open(0, &*top).unwrap();
    let bios = (0..64).map(|i| make_test_read_bio(524_288 - 64 + i, 128));
    rig.world.submit(0, &mut *lane, bios);
    let mut back = 0;
    for _ in 0..10_000 {
        back += rig
            .world
            .poll(0, &mut *lane)
            .iter()
            .filter(|b| b.status.is_ok() && b.data.iter().count() == 1)
            .count();
        if back == 64 {
            assert_eq!(disk.take_log().len(), 64 * 128);
            return;
        }
    }
    panic!("{back} of 64 came back");
}

/// One core can open the new table and another cannot: the first one's lane is closed again.
#[test]
fn a_table_that_one_core_cannot_open() {
    let mut rig = Fixture::new(2);
    rig.go("0 64 linear /d0 0");
    let mut lanes = rig.lanes();
    rig.load("0 64 linear /d1 0");
    let mut change = rig.device.resume(no_wake()).unwrap();
    let cores = rig.world.cores();
    assert!(change.step(&*cores).is_none());
    assert!(rig.world.poll(0, &mut *lanes[0]).is_empty());
    assert_eq!(rig.disks[1].opened(), 1);
    rig.disks[1].refuse(Some(DeviceControlError::new(24, "too many open files")));
    assert!(rig.world.poll(1, &mut *lanes[1]).is_empty());
    assert!(change.step(&*cores).is_none(), "the first core has yet to let go");
    assert!(rig.turn(&mut lanes).is_empty());
    assert_eq!((rig.disks[0].opened(), rig.disks[1].opened()), (2, 0));
    assert_eq!(change.step(&*cores).unwrap().unwrap_err().errno, 24);
    assert_eq!(rig.read_one(&mut lanes[0]), (Status::Ok, b'a'));
}
