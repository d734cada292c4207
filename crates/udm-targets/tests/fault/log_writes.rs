use crate::{build, disks, message, open, poll_until_idle, tagged};
use std::sync::Arc;
use udm_core::{Batch, BioFlags, DevNo, DrainMode, Nanos, Op, OwnWork, Status};
use udm_dm::testing::{
    SteppedTestCores, TestControlIo, TestDisk, bio_without_data, copy_bio_data, make_test_read_bio,
    make_test_write_bio,
};
use udm_dm::{DeviceTransition, LowerLimits, MappedDevice, Table, Target};
use udm_targets::fault::log_writes::HELD_MAX;
use udm_wire::log_writes::{LogWritesCursor, LogWritesEntry};

/// The entries on the log, as a reader finds them.
fn entries(log: &TestDisk, sectors: u64) -> Vec<LogWritesEntry> {
    let bytes = log.bytes(0, sectors);
    let mut cursor = LogWritesCursor::new(&bytes, bytes.len() as u64).expect("a log");
    let size = cursor.superblock().sector_size as usize;
    let mut all = Vec::new();
    while let Some(at) = cursor.offset().unwrap() {
        all.push(cursor.step(&bytes[at as usize..at as usize + size]).unwrap());
    }
    all
}

/// The entries in short form: `w3+1=7` is a write of one sector of sevens at sector 3, `f` flush,
/// `u` FUA, `d` discard, `m:text` mark.
fn log_of(log: &TestDisk) -> String {
    let sectors = 4096;
    let bytes = log.bytes(0, sectors);
    let short = |record: &LogWritesEntry| {
        let entry = &record.entry;
        let mut text = match &record.mark {
            Some(mark) => return format!("m:{}", String::from_utf8_lossy(mark)),
            None => entry
                .flags
                .names()
                .replace("flush", "f")
                .replace("fua", "u")
                .replace("discard", "d")
                .replace('-', "w"),
        };
        text = text.replace('|', "");
        if entry.sectors > 0 {
            text += &format!("{}+{}", entry.sector, entry.sectors);
        }
        if !record.data.is_empty() {
            text += &format!("={}", bytes[record.data.start as usize]);
        }
        text
    };
    entries(log, sectors).iter().map(short).collect::<Vec<_>>().join(" ")
}

fn fua(sector: u64, fill: u8) -> Box<udm_core::Bio> {
    let mut bio = make_test_write_bio(sector, 1, fill);
    bio.flags = BioFlags::FUA;
    bio
}

struct LogWritesRig {
    disk: Arc<TestDisk>,
    log: Arc<TestDisk>,
    target: Arc<dyn Target>,
    world: SteppedTestCores,
    lanes: Vec<Box<dyn udm_core::Lane>>,
}

fn rig(log_sectors: u64, cores: usize) -> LogWritesRig {
    let (disk, log, mut resolver) = disks(1 << 18, log_sectors);
    let target = build("log-writes a b", 1 << 18, &mut resolver).unwrap();
    let mut world = SteppedTestCores::new(cores);
    let lanes = (0..cores).map(|core| open(&mut world, core, &target)).collect();
    target.resume();
    LogWritesRig { disk, log, target, world, lanes }
}

impl LogWritesRig {
    fn submit(&mut self, core: usize, bios: impl IntoIterator<Item = Box<udm_core::Bio>>) {
        self.world.submit(core, &mut *self.lanes[core], bios);
    }

    fn poll_until_idle(&mut self, core: usize) -> Batch {
        poll_until_idle(&mut self.world, core, &mut *self.lanes[core])
    }

    fn run(&mut self, core: usize, bio: Box<udm_core::Bio>) -> Status {
        self.submit(core, [bio]);
        let done = self.poll_until_idle(core);
        assert_eq!(done.len(), 1);
        done[0].status
    }

    /// Suspends the target and drains its lanes.
    fn suspend(&mut self) {
        self.target.presuspend(false);
        for _ in 0..50 {
            for (core, lane) in self.lanes.iter_mut().enumerate() {
                let mut back = Batch::new();
                self.world.turn(core, |cx| lane.drain(DrainMode::Flush, &mut back, cx));
                assert!(back.is_empty() && self.world.poll(core, &mut **lane).is_empty());
            }
            self.world.now = self.world.now + Nanos::from_millis(1);
            if self.lanes.iter().all(|lane| lane.own_work() == OwnWork::Idle) {
                return self.target.postsuspend();
            }
        }
        panic!("the lanes stay busy");
    }
}

#[test]
fn t04_a_log_in_the_kernels_format() {
    let mut rig = rig(4096, 1);
    for bio in [
        make_test_write_bio(1, 1, 1),
        make_test_write_bio(2, 1, 2),
        bio_without_data(Op::Flush, 0, 0),
        fua(3, 3),
    ] {
        assert_eq!(rig.run(0, bio), Status::Ok);
    }
    message(&*rig.target, "mark m").unwrap();
    rig.poll_until_idle(0);
    assert_eq!(log_of(&rig.log), "w1+1=1 w2+1=2 f u3+1=3 m:m");
    let number = |at: usize| u64::from_le_bytes(rig.log.bytes(0, 64)[at..at + 8].try_into().unwrap());
    assert_eq!((number(0), number(8), number(16)), (0x6a_7366_7773_6872, 1, 5), "magic, version, entries");
    // A, B, the flush, C, the mark: the position of each entry, its data and its flags.
    let begin = [1, 3, 5, 6, 8].map(|sector: usize| sector * 512);
    assert_eq!(begin.map(|at| number(at + 16)), [0, 0, 1, 2, 8]);
    assert_eq!(rig.log.bytes(8, 1)[32], b'm');
}

/// The example of the kernel's documentation: W1 W2 W3 C3 C2 Wflush C1 Cflush.
#[test]
fn a_flush_logs_what_had_completed_when_it_came_in() {
    let mut rig = rig(4096, 1);
    rig.disk.hold(true);
    rig.disk.reverse(true);
    rig.submit(0, [make_test_write_bio(1, 1, 1), make_test_write_bio(2, 1, 2), make_test_write_bio(3, 1, 3)]);
    rig.disk.release(2);
    assert_eq!(rig.poll_until_idle(0).len(), 2);
    assert_eq!(log_of(&rig.log), "", "an empty log is a log");
    rig.submit(0, [bio_without_data(Op::Flush, 0, 0)]);
    rig.disk.reverse(false);
    rig.disk.release(2);
    assert_eq!(rig.poll_until_idle(0).len(), 2);
    assert_eq!(log_of(&rig.log), "w3+1=3 w2+1=2 f");
    rig.disk.hold(false);
    rig.run(0, bio_without_data(Op::Flush, 0, 0));
    assert_eq!(log_of(&rig.log), "w3+1=3 w2+1=2 f w1+1=1 f");
    assert_eq!(rig.target.status(), "5 8");
    assert_eq!(entries(&rig.log, 4096)[0].range, 3 * 512..4 * 512);
}

#[test]
fn fua_goes_at_its_own_completion_and_discards_carry_nothing() {
    let mut rig = rig(4096, 1);
    rig.run(0, make_test_write_bio(1, 1, 1));
    rig.run(0, bio_without_data(Op::Discard, 1, 8));
    rig.run(0, fua(9, 9));
    assert_eq!(log_of(&rig.log), "u9+1=9");
    let mut preflush = make_test_write_bio(20, 1, 20);
    preflush.flags = BioFlags::PREFLUSH | BioFlags::FUA;
    rig.run(0, preflush);
    assert_eq!(log_of(&rig.log), "u9+1=9 w1+1=1 d1+8 fu20+1=20");
    rig.run(0, make_test_read_bio(0, 8));
    rig.disk.set_limits(|limits| limits.max_discard = udm_core::Sectors::ZERO);
    assert!(
        rig.target.limits(LowerLimits::NOW).max_discard.0 > 0,
        "discards are logged even where the device takes none"
    );
    assert_eq!(rig.target.limits(LowerLimits::NOW).max_write_zeroes.0, 0);
}

#[test]
fn a_discard_that_the_device_does_not_take_is_logged_all_the_same() {
    let (disk, log, mut resolver) = disks(64, 4096);
    disk.set_limits(|limits| limits.max_discard = udm_core::Sectors::ZERO);
    let target = build("log-writes a b", 64, &mut resolver).unwrap();
    let mut world = SteppedTestCores::new(1);
    let mut lane = open(&mut world, 0, &target);
    target.resume();
    assert!(world.run(0, &mut *lane, bio_without_data(Op::Discard, 0, 8)).status.is_ok());
    assert!(world.run(0, &mut *lane, bio_without_data(Op::Flush, 0, 0)).status.is_ok());
    poll_until_idle(&mut world, 0, &mut *lane);
    assert_eq!(log_of(&log), "d0+8 f");
    assert_eq!(disk.take_log().len(), 1);
}

/// The device supports discards, of fewer sectors, after the table read its limits. Lanes opened
/// later use the table's value, which is unlimited.
#[test]
fn lanes_opened_late_take_discards_as_the_table_does() {
    let (disk, log, mut resolver) = disks(64, 4096);
    disk.set_limits(|limits| limits.max_discard = udm_core::Sectors::ZERO);
    let lines = udm_wire::table::parse_table("0 64 log-writes a b").unwrap();
    let table = Table::build(udm_targets::TARGETS, &lines, &mut resolver, &TestControlIo::new(), 1).unwrap();
    disk.set_limits(|limits| limits.max_discard = udm_core::Sectors(16));
    let mut world = SteppedTestCores::new(1);
    let mut lane = world.open(0, &*table).unwrap();
    table.targets()[0].target.resume();
    assert!(world.run(0, &mut *lane, bio_without_data(Op::Discard, 0, 26)).status.is_ok());
    assert!(world.run(0, &mut *lane, bio_without_data(Op::Flush, 0, 0)).status.is_ok());
    poll_until_idle(&mut world, 0, &mut *lane);
    assert_eq!(log_of(&log), "d0+26 f");
    assert!(disk.take_log().iter().all(|seen| seen.op != Op::Discard), "longer than the disk takes");
    table.check(LowerLimits::NOW).unwrap();
    let mut lane = world.open(0, &*table).unwrap();
    assert!(world.run(0, &mut *lane, bio_without_data(Op::Discard, 0, 26)).status.is_ok());
    let sent: Vec<u64> = disk.take_log().iter().filter(|s| s.op == Op::Discard).map(|s| s.sectors).collect();
    assert_eq!(sent, [16, 10], "the next check brings the new limits");
}

#[test]
fn marks_stand_where_they_were_given() {
    let mut rig = rig(4096, 1);
    rig.run(0, make_test_write_bio(1, 1, 1));
    rig.run(0, bio_without_data(Op::Flush, 0, 0));
    message(&*rig.target, "mark mkfs").unwrap();
    let pending = rig.target.pending_completion().expect("a mark is not done when it is taken");
    rig.log.hold(true);
    rig.poll_until_idle(0);
    rig.log.release(1);
    rig.poll_until_idle(0);
    assert_eq!(pending.outcome(), None, "on the log, and not counted");
    rig.log.hold(false);
    rig.poll_until_idle(0);
    assert_eq!(pending.outcome(), Some(Ok(())));
    assert_eq!(log_of(&rig.log), "w1+1=1 f m:mkfs");
    let long = "x".repeat(600);
    message(&*rig.target, &format!("MARK {long}")).unwrap();
    rig.run(0, fua(2, 2));
    assert_eq!(log_of(&rig.log), format!("w1+1=1 f m:mkfs u2+1=2 m:{}", &long[..479]));
    let refused = |words| message(&*rig.target, words).unwrap_err().text;
    assert_eq!(
        refused("mark"),
        "log-writes: Invalid log-writes message arguments, expect 2 arguments, got 1"
    );
    assert_eq!(refused("bogus x"), "log-writes: Unrecognised log writes target message received: bogus");
}

/// A mark is logged, or its message fails.
#[test]
fn a_mark_that_cannot_be_logged_is_refused() {
    let mut rig = rig(8, 1);
    let mark = |rig: &mut LogWritesRig| {
        message(&*rig.target, "mark x")
            .map(|_| rig.target.pending_completion().expect("it waits for the cores"))
    };
    rig.target.presuspend(false);
    assert_eq!(mark(&mut rig).err().map(|e| e.errno), Some(16), "the log is closed");
    rig.target.resume();
    let taken: Vec<_> = (0..8).map(|_| mark(&mut rig).unwrap()).collect();
    rig.poll_until_idle(0);
    let logged = taken.iter().filter(|mark| mark.outcome() == Some(Ok(()))).count();
    assert_eq!((logged, entries(&rig.log, 8).len()), (6, 6), "as many as there is room for");
    assert!(taken.iter().all(|mark| mark.outcome().is_some()));
    let error = mark(&mut rig).err().expect("logging has ended");
    assert_eq!(error.reason, "logging has ended: Ran out of space on the logdev");
    let pending = taken[0].clone();
    drop((rig, taken));
    assert_eq!(pending.outcome(), Some(Ok(())));
    let rig = self::rig(8, 1);
    message(&*rig.target, "mark x").unwrap();
    let pending = rig.target.pending_completion().unwrap();
    drop(rig);
    assert_eq!(pending.outcome().unwrap().unwrap_err().errno, 5, "nobody is left who could log it");
}

#[test]
fn what_fails_is_not_logged_and_a_failed_flush_covers_nothing() {
    let mut rig = rig(4096, 1);
    rig.run(0, make_test_write_bio(1, 1, 1));
    rig.disk.fail(Status::Medium);
    assert_eq!(rig.run(0, make_test_write_bio(2, 1, 2)), Status::Medium);
    assert_eq!(rig.run(0, bio_without_data(Op::Flush, 0, 0)), Status::Medium);
    assert_eq!(rig.run(0, fua(3, 3)), Status::Medium);
    assert_eq!(log_of(&rig.log), "");
    rig.disk.fail(Status::Ok);
    rig.run(0, bio_without_data(Op::Flush, 0, 0));
    assert_eq!(log_of(&rig.log), "w1+1=1 f");
}

/// The flush that completes first covers the writes of both.
#[test]
fn of_two_flushes_the_first_to_complete_takes_all() {
    let mut rig = rig(4096, 2);
    rig.run(0, make_test_write_bio(1, 1, 1));
    rig.disk.hold(true);
    rig.submit(0, [bio_without_data(Op::Flush, 0, 0)]);
    rig.submit(1, [bio_without_data(Op::Flush, 0, 0)]);
    rig.disk.release(1);
    assert_eq!(rig.poll_until_idle(1).len(), 1);
    assert_eq!(log_of(&rig.log), "w1+1=1 f");
    rig.disk.hold(false);
    rig.poll_until_idle(0);
    assert_eq!(log_of(&rig.log), "w1+1=1 f f");
}

/// A write on one core and the flush that covers it on another. The logged data is that at the time
/// of the write.
#[test]
fn cores_share_one_order() {
    let mut rig = rig(4096, 2);
    let bio = tagged(make_test_write_bio(7, 2, 7), 77);
    let place = bio.data.iter().next().unwrap().addr();
    rig.submit(0, [bio]);
    let mut done = rig.poll_until_idle(0);
    let mut bio = done.pop().unwrap();
    assert_eq!((bio.cookie, bio.data.iter().next().unwrap().addr()), (77, place));
    assert_eq!(copy_bio_data(&bio)[..512], [7; 512]);
    // The caller has its buffer back and may overwrite it.
    bio.data.fill(0);
    rig.run(1, bio_without_data(Op::Flush, 0, 0));
    assert_eq!(log_of(&rig.log), "w7+2=7 f");
    assert_eq!(rig.disk.bytes(7, 1), [7; 512]);
}

/// The superblock never counts an entry that is not written, whichever core writes first. Both
/// cores wait for it.
#[test]
fn the_superblock_counts_a_dense_beginning() {
    let mut rig = rig(4096, 2);
    rig.poll_until_idle(0);
    rig.log.hold(true);
    rig.submit(0, [fua(1, 1)]);
    rig.poll_until_idle(0);
    rig.submit(1, [fua(2, 2)]);
    rig.poll_until_idle(1);
    rig.log.release(1);
    assert!(rig.poll_until_idle(1).is_empty(), "its own entry is on the log, and the one before it is not");
    assert_eq!(log_of(&rig.log), "");
    rig.world.wake = Nanos::NEVER;
    assert!(rig.poll_until_idle(1).is_empty());
    assert_eq!(rig.world.wake, Nanos::NEVER, "it asks for no time: the other core will ring");
    assert!(!rig.world.has_messages(1));
    rig.log.hold(false);
    assert_eq!(rig.poll_until_idle(0).len(), 1);
    assert!(rig.world.has_messages(1), "what it waits for is counted");
    assert_eq!(rig.poll_until_idle(1).len(), 1);
    assert_eq!(log_of(&rig.log), "u1+1=1 u2+1=2");
}

/// After a crash at any time the log has every acknowledged flush.
#[test]
fn a_flush_is_returned_when_the_superblock_counts_it() {
    let mut rig = rig(4096, 1);
    rig.run(0, make_test_write_bio(1, 1, 1));
    rig.log.hold(true);
    rig.submit(0, [bio_without_data(Op::Flush, 0, 0)]);
    assert!(rig.poll_until_idle(0).is_empty());
    rig.log.release(2);
    assert!(rig.poll_until_idle(0).is_empty(), "on the log, and not counted");
    assert_eq!(log_of(&rig.log), "");
    rig.log.release(1);
    assert_eq!(rig.poll_until_idle(0).len(), 1);
    assert_eq!(log_of(&rig.log), "w1+1=1 f");
    assert_eq!(rig.lanes[0].own_work(), OwnWork::Idle);
}

/// If the log device has a cache, counted entries are flushed first, and the superblock is written
/// with FUA or flushed too.
#[test]
fn a_log_device_with_a_cache_is_flushed() {
    for fua_known in [true, false] {
        let (_disk, log, mut resolver) = disks(64, 4096);
        log.set_limits(|limits| (limits.write_cache, limits.fua) = (true, fua_known));
        let target = build("log-writes a b", 64, &mut resolver).unwrap();
        let mut world = SteppedTestCores::new(1);
        let mut lane = open(&mut world, 0, &target);
        target.resume();
        poll_until_idle(&mut world, 0, &mut *lane);
        let _ = log.take_log();
        log.hold(true);
        world.submit(0, &mut *lane, [fua(1, 1)]);
        let mut seen = Vec::new();
        let mut acknowledged = Vec::new();
        for _ in 0..4 {
            log.release(1);
            acknowledged.push(poll_until_idle(&mut world, 0, &mut *lane).len());
            seen.extend(log.take_log().iter().map(|seen| (seen.op, seen.sector, seen.flags)));
        }
        let none = BioFlags::empty();
        let mut wanted = vec![
            (Op::Write, 1, none),
            (Op::Flush, 0, none),
            (Op::Write, 0, BioFlags::FUA),
            (Op::Flush, 0, none),
        ];
        wanted.truncate(if fua_known { 3 } else { 4 });
        assert_eq!(seen, wanted);
        assert_eq!(acknowledged, if fua_known { [0, 0, 1, 0] } else { [0, 0, 0, 1] });
    }
}

/// Write A, FUA B, flush, all to one sector: the log must end in B. Writes that a FUA write
/// overlaps are logged before it, and the writes that those overlap too.
#[test]
fn a_held_write_is_logged_before_a_fua_write_that_overlaps_it() {
    let mut rig = rig(4096, 2);
    rig.run(0, make_test_write_bio(1, 1, 1));
    rig.run(0, make_test_write_bio(30, 1, 30));
    rig.run(0, fua(1, 2));
    assert_eq!(log_of(&rig.log), "w1+1=1 u1+1=2", "and what lies elsewhere may still be lost");
    rig.run(0, bio_without_data(Op::Flush, 0, 0));
    assert_eq!(log_of(&rig.log), "w1+1=1 u1+1=2 w30+1=30 f");
}

#[test]
fn overlapping_entries_stand_in_the_order_of_their_completion() {
    // A chain over two cores: the write that the FUA write overlaps was itself written over
    // another.
    let mut rig = rig(4096, 2);
    rig.run(0, make_test_write_bio(10, 4, 1));
    rig.run(1, make_test_write_bio(12, 4, 11));
    rig.run(0, bio_without_data(Op::Discard, 14, 8));
    rig.run(1, make_test_write_bio(40, 1, 40));
    rig.run(1, fua(20, 50));
    assert_eq!(log_of(&rig.log), "w10+4=1 w12+4=11 d14+8 u20+1=50");
    // A write that completes after the FUA write is logged after it, even if it arrived before.
    rig.disk.hold(true);
    rig.disk.reverse(true);
    rig.submit(0, [make_test_write_bio(5, 2, 5), fua(6, 60)]);
    rig.disk.release(1);
    assert_eq!(rig.poll_until_idle(0).len(), 1);
    rig.disk.release(1);
    assert_eq!(rig.poll_until_idle(0).len(), 1);
    rig.disk.hold(false);
    rig.disk.reverse(false);
    rig.run(0, bio_without_data(Op::Flush, 0, 0));
    assert_eq!(log_of(&rig.log), "w10+4=1 w12+4=11 d14+8 u20+1=50 u6+1=60 w40+1=40 w5+2=5 f");
}

/// If a FUA write takes held writes while a flush is in flight, the flush still covers the same
/// writes.
#[test]
fn a_fua_write_beside_a_flush_under_way() {
    let mut rig = rig(4096, 2);
    rig.run(0, make_test_write_bio(1, 1, 1));
    rig.run(0, make_test_write_bio(2, 1, 2));
    rig.disk.hold(true);
    rig.submit(0, [bio_without_data(Op::Flush, 0, 0)]);
    rig.submit(1, [fua(1, 9)]);
    rig.disk.release(1);
    assert_eq!(rig.poll_until_idle(1).len(), 1);
    assert_eq!(log_of(&rig.log), "w1+1=1 u1+1=9");
    rig.disk.release(1);
    assert_eq!(rig.poll_until_idle(0).len(), 1);
    assert_eq!(log_of(&rig.log), "w1+1=1 u1+1=9 w2+1=2 f");
}

/// No entry is written where the superblock counts one: neither over an old log nor over the end
/// mark.
#[test]
fn requests_wait_until_the_log_may_be_written() {
    let (disk, log, mut resolver) = disks(64, 4096);
    let target = build("log-writes a b", 64, &mut resolver).unwrap();
    let mut world = SteppedTestCores::new(2);
    let mut lanes: Vec<_> = (0..2).map(|core| open(&mut world, core, &target)).collect();
    for again in [false, true] {
        target.resume();
        log.hold(true);
        let _ = log.take_log();
        world.submit(
            0,
            &mut *lanes[0],
            [fua(1, 1), make_test_read_bio(0, 1), bio_without_data(Op::Flush, 0, 0)],
        );
        world.submit(1, &mut *lanes[1], [make_test_write_bio(2, 1, 2)]);
        let back = poll_until_idle(&mut world, 0, &mut *lanes[0]);
        assert_eq!(back.iter().map(|bio| bio.op).collect::<Vec<_>>(), [Op::Read], "reads need no log");
        assert!(poll_until_idle(&mut world, 1, &mut *lanes[1]).is_empty());
        assert_eq!(log.waiting(), 1, "the superblock alone");
        log.hold(false);
        let first = poll_until_idle(&mut world, 0, &mut *lanes[0]).len()
            + poll_until_idle(&mut world, 1, &mut *lanes[1]).len();
        assert_eq!((first, disk.waiting()), (3, 0));
        assert_eq!(log.take_log()[0].sector, 0);
        poll_until_idle(&mut world, 1, &mut *lanes[1]);
        if !again {
            let lane = &mut *lanes[1];
            assert!(world.run(1, lane, bio_without_data(Op::Flush, 0, 0)).status.is_ok());
            target.presuspend(false);
            poll_until_idle(&mut world, 0, &mut *lanes[0]);
            assert!(!log_of(&log).contains("m:"), "more may come");
            for _ in 0..2 {
                for (core, lane) in lanes.iter_mut().enumerate() {
                    world.turn(core, |cx| lane.drain(DrainMode::Flush, &mut Batch::new(), cx));
                    poll_until_idle(&mut world, core, &mut **lane);
                }
            }
            assert!(log_of(&log).ends_with(" m:dm-log-writes-end"), "{}", log_of(&log));
            target.postsuspend();
        }
    }
    assert!(!log_of(&log).contains("m:"), "{}", log_of(&log));
}

#[test]
fn a_full_log_ends_logging_and_nothing_else() {
    let mut rig = rig(8, 1);
    rig.run(0, fua(1, 1));
    rig.run(0, fua(2, 2));
    assert_eq!(rig.target.status(), "2 4");
    assert!(rig.run(0, fua(3, 3)).is_ok());
    assert_eq!(rig.target.status(), "3 6");
    assert!(rig.run(0, fua(4, 4)).is_ok());
    assert_eq!(rig.target.status(), "3 6 logging_disabled");
    assert!(
        rig.run(0, make_test_write_bio(5, 1, 5)).is_ok()
            && rig.run(0, bio_without_data(Op::Flush, 0, 0)).is_ok()
    );
    assert_eq!(rig.disk.bytes(4, 1), [4; 512]);
    assert_eq!(entries(&rig.log, 8).len(), 3);
    rig.suspend();
}

#[test]
fn a_log_that_fails_ends_logging_and_nothing_else() {
    let mut rig = rig(4096, 1);
    rig.poll_until_idle(0);
    rig.log.fail(Status::IoErr);
    assert!(rig.run(0, fua(1, 1)).is_ok());
    assert!(rig.target.status().ends_with(" logging_disabled"), "{}", rig.target.status());
    assert!(
        rig.run(0, make_test_write_bio(2, 1, 2)).is_ok()
            && rig.run(0, bio_without_data(Op::Flush, 0, 0)).is_ok()
    );
    rig.suspend();
}

#[test]
fn a_suspend_closes_the_log_and_a_resume_opens_it_again() {
    let mut rig = rig(4096, 2);
    rig.run(0, make_test_write_bio(1, 1, 1));
    rig.suspend();
    assert_eq!(log_of(&rig.log), "w1+1=1 m:dm-log-writes-end");
    rig.target.resume();
    rig.run(1, make_test_write_bio(2, 1, 2));
    rig.run(1, bio_without_data(Op::Flush, 0, 0));
    assert_eq!(log_of(&rig.log), "w1+1=1 w2+1=2 f");
    rig.disk.fail(Status::IoErr);
    rig.suspend();
    assert_eq!(log_of(&rig.log), "w1+1=1 w2+1=2 f m:dm-log-writes-end");
}

/// One lane flushes the held writes for all. If a second lane did too, its flush could be in flight
/// when the suspend ends.
#[test]
fn the_end_is_flushed_once() {
    let mut rig = rig(4096, 2);
    for core in 0..2 {
        assert_eq!(rig.run(core, make_test_write_bio(core as u64, 1, 1)), Status::Ok);
    }
    rig.disk.take_log().clear();
    rig.disk.hold(true);
    rig.target.presuspend(false);
    for _ in 0..4 {
        for (core, lane) in rig.lanes.iter_mut().enumerate() {
            rig.world.turn(core, |cx| lane.drain(DrainMode::Flush, &mut Batch::new(), cx));
            rig.world.poll(core, &mut **lane);
        }
    }
    assert_eq!(rig.disk.waiting(), 1, "a flush");
    assert!(rig.lanes.iter().all(|lane| lane.own_work() == OwnWork::Required), "both wait for it");
    // The lane that began the flush is closed before the flush completes: the other lane takes
    // over.
    let first = rig.lanes.iter().position(|lane| lane.own_work() == OwnWork::Required).unwrap();
    rig.lanes.remove(first);
    rig.disk.hold(false);
    rig.suspend();
    assert!(log_of(&rig.log).ends_with("m:dm-log-writes-end"), "{}", log_of(&rig.log));
}

#[test]
fn copies_are_bounded_by_a_flush_of_its_own() {
    let mut rig = rig(1 << 19, 1);
    let sectors = 8192;
    let writes = 2 * HELD_MAX as u64 / (sectors * 512);
    let mut bios: Vec<_> = (0..writes).map(|i| make_test_write_bio(i * sectors, sectors, i as u8)).collect();
    rig.submit(0, bios.drain(..));
    let done = rig.poll_until_idle(0);
    assert_eq!(done.len() as u64, writes);
    assert!(rig.disk.take_log().iter().any(|seen| seen.op == Op::Flush), "it flushed by itself");
    assert!(log_of_len(&rig.log) > 0 && log_of_len(&rig.log) < writes as usize);
    rig.run(0, bio_without_data(Op::Flush, 0, 0));
    assert_eq!(log_of_len(&rig.log) as u64, writes + 1, "its own flush has no entry");
}

fn log_of_len(log: &TestDisk) -> usize {
    entries(log, 1 << 19).len()
}

/// The log uses the larger of the two block sizes.
#[test]
fn sectors_are_logical_blocks() {
    let (disk, log, mut resolver) = disks(64, 4096);
    disk.set_limits(|limits| limits.logical_block = 4096);
    let target = build("log-writes a b", 64, &mut resolver).unwrap();
    assert_eq!(target.status(), "0 7");
    let mut world = SteppedTestCores::new(1);
    let mut lane = open(&mut world, 0, &target);
    target.resume();
    let mut bio = make_test_write_bio(16, 8, 5);
    bio.flags = BioFlags::FUA;
    world.submit(0, &mut *lane, [bio]);
    assert_eq!(poll_until_idle(&mut world, 0, &mut *lane).len(), 1);
    let all = entries(&log, 4096);
    assert_eq!((all[0].entry.sector, all[0].entry.sectors, all[0].range.clone()), (2, 1, 8192..12288));
    assert_eq!(target.status(), "1 23");
}

/// The block size and the size of the log are those at the first resume, not at the load.
#[test]
fn blocks_and_size_are_those_of_the_resume() {
    let (disk, log, mut resolver) = disks(64, 4096);
    log.set_limits(|limits| limits.size = udm_core::Sectors(8));
    let target = build("log-writes a b", 64, &mut resolver).unwrap();
    log.set_limits(|limits| limits.size = udm_core::Sectors(4096));
    disk.set_limits(|limits| limits.logical_block = 4096);
    assert_eq!(target.limits(LowerLimits::NOW).logical_block, 4096);
    let mut world = SteppedTestCores::new(1);
    let mut lane = open(&mut world, 0, &target);
    target.resume();
    disk.set_limits(|limits| limits.logical_block = 512);
    assert_eq!(target.limits(LowerLimits::NOW).logical_block, 4096, "in use: as it was taken");
    for block in 0..4 {
        let mut bio = make_test_write_bio(block * 8, 8, 5);
        bio.flags = BioFlags::FUA;
        world.submit(0, &mut *lane, [bio]);
        assert_eq!(poll_until_idle(&mut world, 0, &mut *lane).len(), 1);
    }
    assert_eq!(target.status(), "4 71");
    assert_eq!(entries(&log, 4096)[3].range, 12288..16384);
}

/// Through a mapped device: a mark is logged without requests, and a suspend waits for the end
/// mark.
#[test]
fn a_mapped_device_waits_for_the_log() {
    let (disk, log, mut resolver) = disks(64, 4096);
    let lines = udm_wire::table::parse_table("0 64 log-writes a b").unwrap();
    let table = Table::build(udm_targets::TARGETS, &lines, &mut resolver, &TestControlIo::new(), 2).unwrap();
    let device = MappedDevice::new("d", None, DevNo { major: 254, minor: 0 }).unwrap();
    device.load(table).unwrap();
    let mut world = SteppedTestCores::new(2);
    let cores = world.cores();
    let mut lanes: Vec<_> = (0..2).map(|core| world.open(core, &*device).unwrap()).collect();
    let mut finish = |world: &mut SteppedTestCores, mut change: DeviceTransition| {
        for _ in 0..100 {
            if let Some(result) = change.step(&*cores) {
                return result.unwrap();
            }
            for (core, lane) in lanes.iter_mut().enumerate() {
                assert!(world.poll(core, &mut **lane).is_empty());
            }
            world.now = world.now + Nanos::from_millis(1);
        }
        panic!("the change does not end");
    };
    let change = device.resume(Arc::new(|| {})).unwrap();
    finish(&mut world, change);
    let words = ["mark".to_owned(), "here".to_owned()];
    device.message(0, &words, &mut resolver, &*world.cores()).unwrap();
    let change = device.suspend(false, Arc::new(|| {})).unwrap();
    finish(&mut world, change);
    assert_eq!(log_of(&log), "m:here m:dm-log-writes-end");
    assert_eq!((log.waiting(), disk.waiting()), (0, 0), "nothing is left in flight");
    let change = device.resume(Arc::new(|| {})).unwrap();
    finish(&mut world, change);
    world.submit(1, &mut *lanes[1], [fua(1, 1)]);
    let mut back = 0;
    for _ in 0..2 {
        back += lanes
            .iter_mut()
            .enumerate()
            .map(|(core, lane)| poll_until_idle(&mut world, core, &mut **lane).len())
            .sum::<usize>();
    }
    assert_eq!(back, 1);
    assert_eq!(log_of(&log), "m:here u1+1=1");
}
