use crate::{bio_identity, build, disks, open, tagged};
use udm_core::{BioFlags, Nanos, Op, Status};
use udm_dm::testing::{
    SteppedTestCores, bio_without_data, copy_bio_data, make_test_read_bio, make_test_write_bio,
};

fn at_second(seconds: u64) -> Nanos {
    Nanos(seconds * 1_000_000_000)
}

/// The statuses of a read, a write, a discard and a flush at `now`, on a target loaded at second 5.
fn end_statuses(line: &str, now: Nanos) -> [Status; 4] {
    let (_a, _b, mut resolver) = disks(64, 64);
    let target = build(line, 32, &mut resolver).unwrap();
    let mut world = SteppedTestCores::new(1);
    world.now = at_second(5);
    let mut lane = open(&mut world, 0, &target);
    world.now = now;
    let bios = [
        make_test_read_bio(0, 1),
        make_test_write_bio(0, 1, 1),
        bio_without_data(Op::Discard, 0, 1),
        bio_without_data(Op::Flush, 0, 0),
    ];
    bios.map(|bio| world.run(0, &mut *lane, bio).status)
}

const GOOD: [Status; 4] = [Status::Ok; 4];
const BAD: [Status; 4] = [Status::IoErr; 4];

#[test]
fn good_and_bad_take_turns_from_the_load() {
    for (seconds, expected) in [(5, GOOD), (6, GOOD), (7, BAD), (9, BAD), (10, GOOD), (11, GOOD), (12, BAD)] {
        assert_eq!(end_statuses("flakey a 0 2 3", at_second(seconds)), expected, "second {seconds}");
    }
    assert_eq!(end_statuses("flakey a 0 2 3", Nanos(at_second(7).0 - 1)), GOOD);
    assert_eq!(end_statuses("flakey a 0 0 1", at_second(5)), BAD, "up 0 is always bad");
    assert_eq!(end_statuses("flakey a 0 1 0", at_second(500)), GOOD, "down 0 is always good");
}

#[test]
fn t02_features_are_printed_and_exclude_each_other() {
    let (_a, _b, mut resolver) = disks(64, 64);
    let printed = build("flakey a 0 5 5", 32, &mut resolver).unwrap().table();
    assert!(printed.ends_with("2 error_reads error_writes"), "{printed}");
    let printed = build("flakey a 0 1 1 1 drop_writes", 32, &mut resolver).unwrap().table();
    assert!(printed.ends_with("1 drop_writes"), "{printed}");
    let error = build("flakey a 0 1 1 2 drop_writes error_writes", 32, &mut resolver).err().unwrap();
    let text = "flakey: Feature error_writes conflicts with feature drop_writes";
    assert_eq!((error.errno, error.text.as_str()), (udm_core::errno::EINVAL, text));
}

#[test]
fn features_say_what_is_bad() {
    use Status::{IoErr, Ok};
    assert_eq!(end_statuses("flakey a 0 0 1 1 error_reads", at_second(5)), [IoErr, Ok, Ok, Ok]);
    assert_eq!(end_statuses("flakey a 0 0 1 1 error_writes", at_second(5)), [Ok, IoErr, IoErr, IoErr]);
    assert_eq!(end_statuses("flakey a 0 0 1 1 drop_writes", at_second(5)), GOOD);
}

#[test]
fn dropped_writes_reach_nothing() {
    let (a, _b, mut resolver) = disks(64, 64);
    let target = build("flakey a 4 0 1 1 drop_writes", 32, &mut resolver).unwrap();
    let mut world = SteppedTestCores::new(1);
    let mut lane = open(&mut world, 0, &target);
    for bio in
        [make_test_write_bio(0, 4, 9), bio_without_data(Op::Discard, 0, 4), bio_without_data(Op::Flush, 0, 0)]
    {
        assert!(world.run(0, &mut *lane, bio).status.is_ok());
    }
    assert!(a.take_log().is_empty());
    a.put(4, &[3; 512]);
    assert_eq!(copy_bio_data(&world.run(0, &mut *lane, make_test_read_bio(0, 1))), [3; 512]);
}

#[test]
fn a_read_is_corrupted_on_its_way_up() {
    let (a, _b, mut resolver) = disks(64, 64);
    let target = build("flakey a 0 1 1 5 corrupt_bio_byte 514 r 170 0", 32, &mut resolver).unwrap();
    let mut world = SteppedTestCores::new(1);
    let mut lane = open(&mut world, 0, &target);
    world.now = at_second(1);
    world.submit(
        0,
        &mut *lane,
        [
            tagged(make_test_read_bio(2, 2), 7),
            tagged(make_test_read_bio(2, 1), 8),
            tagged(make_test_write_bio(0, 2, 5), 9),
        ],
    );
    // The arrival time of the read counts.
    world.now = at_second(2);
    let done = world.poll(0, &mut *lane);
    let faces: Vec<_> = done.iter().map(|bio| bio_identity(bio)).collect();
    assert_eq!(faces, [(Op::Read, 2, 2, 7), (Op::Read, 2, 1, 8), (Op::Write, 0, 2, 9)]);
    let mut expected = vec![0; 1024];
    expected[513] = 170;
    assert_eq!(copy_bio_data(&done[0]), expected);
    assert_eq!(copy_bio_data(&done[1]), [0; 512], "too short for that byte");
    assert_eq!(a.bytes(0, 1), [5; 512]);
    assert_eq!(copy_bio_data(&world.run(0, &mut *lane, make_test_read_bio(2, 2))), [0; 1024], "good again");
}

#[test]
fn a_write_is_corrupted_on_a_copy() {
    let (a, _b, mut resolver) = disks(64, 64);
    let target = build("flakey a 0 0 1 5 corrupt_bio_byte 1 w 170 0", 32, &mut resolver).unwrap();
    let mut world = SteppedTestCores::new(1);
    let mut lane = open(&mut world, 0, &target);
    let bio = tagged(make_test_write_bio(0, 1, 5), 3);
    let place = bio.data.iter().next().unwrap().addr();
    let bio = world.run(0, &mut *lane, bio);
    assert_eq!((bio_identity(&bio), copy_bio_data(&bio)), ((Op::Write, 0, 1, 3), vec![5; 512]));
    assert_eq!(bio.data.iter().next().unwrap().addr(), place, "its own buffer, not a copy");
    let stored = a.bytes(0, 1);
    assert_eq!((stored[0], &stored[1..]), (170, &[5; 511][..]));
    a.fail(Status::Medium);
    let bio = world.run(0, &mut *lane, make_test_write_bio(0, 1, 5));
    assert_eq!((bio.status, copy_bio_data(&bio)), (Status::Medium, vec![5; 512]));
}

#[test]
fn the_mask_picks_the_writes() {
    let (a, _b, mut resolver) = disks(64, 64);
    // REQ_FUA is bit 17 in Linux 6.12.
    let target = build("flakey a 0 0 1 5 corrupt_bio_byte 1 w 170 131072", 32, &mut resolver).unwrap();
    let mut world = SteppedTestCores::new(1);
    let mut lane = open(&mut world, 0, &target);
    world.run(0, &mut *lane, make_test_write_bio(0, 1, 5));
    let mut fua = make_test_write_bio(1, 1, 5);
    fua.flags = BioFlags::FUA;
    world.run(0, &mut *lane, fua);
    assert_eq!((a.bytes(0, 1)[0], a.bytes(1, 1)[0]), (5, 170));
}

#[test]
fn chance_comes_from_the_seed() {
    let run = || {
        let (a, _b, mut resolver) = disks(64, 64);
        let line = "flakey a 0 0 1 4 random_read_corrupt 500000000 random_write_corrupt 500000000";
        let target = build(line, 64, &mut resolver).unwrap();
        let mut world = SteppedTestCores::new(1);
        let mut lane = open(&mut world, 0, &target);
        let reads: Vec<_> =
            (0..32).map(|i| copy_bio_data(&world.run(0, &mut *lane, make_test_read_bio(i, 1)))).collect();
        for i in 0..32 {
            assert_eq!(copy_bio_data(&world.run(0, &mut *lane, make_test_write_bio(32 + i, 1, 1))), [1; 512]);
        }
        (reads, a.bytes(32, 32))
    };
    let (reads, writes) = run();
    let bad_reads = reads.iter().filter(|r| r.iter().any(|&b| b != 0)).count();
    let bad_writes = writes.chunks(512).filter(|w| w.iter().any(|&b| b != 1)).count();
    // Expected are 16 of 32; a count outside 4..=28 occurs in one of ten thousand seeds, and the
    // seed is fixed.
    assert!((4..=28).contains(&bad_reads) && (4..=28).contains(&bad_writes), "{bad_reads} {bad_writes}");
    assert!((reads, writes) == run(), "the same seed gives the same faults");
}
