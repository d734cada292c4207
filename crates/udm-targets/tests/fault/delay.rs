use crate::{bio_identity, build, disks, open, tagged};
use udm_core::{BioFlags, DrainMode, Nanos, Op};
use udm_dm::testing::{
    SteppedTestCores, bio_without_data, copy_bio_data, make_test_read_bio, make_test_write_bio,
};

fn ms(ms: u64) -> Nanos {
    Nanos::from_millis(ms)
}

#[test]
fn each_class_waits_its_own_time() {
    let (a, b, mut resolver) = disks(64, 64);
    let target = build("delay a 8 10 b 16 20 a 0 30", 32, &mut resolver).unwrap();
    let mut world = SteppedTestCores::new(1);
    let mut lane = open(&mut world, 0, &target);
    a.put(8, &[7; 512]);

    let mut preflush = tagged(make_test_write_bio(1, 1, 0x55), 4);
    preflush.flags = BioFlags::PREFLUSH;
    let bios = [
        tagged(make_test_read_bio(0, 1), 1),
        tagged(make_test_write_bio(0, 1, 0x44), 2),
        tagged(bio_without_data(Op::Flush, 0, 0), 3),
        preflush,
        tagged(bio_without_data(Op::Discard, 4, 2), 5),
    ];
    world.submit(0, &mut *lane, bios);
    assert_eq!(target.status(), "1 2 2");
    assert!(world.poll(0, &mut *lane).is_empty());
    assert_eq!(world.wake, ms(10));
    assert!(a.take_log().is_empty() && b.take_log().is_empty());

    world.now = ms(10);
    let done = world.poll(0, &mut *lane);
    assert_eq!(done.iter().map(|bio| bio_identity(bio)).collect::<Vec<_>>(), [(Op::Read, 0, 1, 1)]);
    assert_eq!(copy_bio_data(&done[0]), [7; 512]);
    assert_eq!(target.status(), "0 2 2");

    world.now = ms(20);
    let done = world.poll(0, &mut *lane);
    let faces: Vec<_> = done.iter().map(|bio| bio_identity(bio)).collect();
    assert_eq!(faces, [(Op::Write, 0, 1, 2), (Op::Discard, 4, 2, 5)]);
    let log: Vec<_> = b.take_log().iter().map(|seen| (seen.op, seen.sector)).collect();
    assert_eq!(log, [(Op::Write, 16), (Op::Discard, 20)]);

    world.now = ms(29);
    assert!(world.poll(0, &mut *lane).is_empty());
    world.now = ms(31);
    let done = world.poll(0, &mut *lane);
    let faces: Vec<_> = done.iter().map(|bio| bio_identity(bio)).collect();
    assert_eq!(faces, [(Op::Flush, 0, 0, 3), (Op::Write, 1, 1, 4)]);
    assert_eq!(a.bytes(1, 1), [0x55; 512]);
    assert_eq!(target.status(), "0 0 0");
}

#[test]
fn no_delay_is_straight_through() {
    let (_a, _b, mut resolver) = disks(64, 64);
    let target = build("delay a 0 0 b 0 5", 32, &mut resolver).unwrap();
    let mut world = SteppedTestCores::new(1);
    let mut lane = open(&mut world, 0, &target);
    world.submit(0, &mut *lane, [make_test_read_bio(0, 1)]);
    assert_eq!(target.status(), "0 0 0");
    assert_eq!(world.poll(0, &mut *lane).len(), 1);
    assert_eq!(world.wake, Nanos::NEVER);
}

#[test]
fn a_suspend_lets_all_go_at_once() {
    let (_a, _b, mut resolver) = disks(64, 64);
    let target = build("delay a 0 1000", 32, &mut resolver).unwrap();
    for how in [DrainMode::Flush, DrainMode::NoFlush] {
        let mut world = SteppedTestCores::new(2);
        let mut lanes = [open(&mut world, 0, &target), open(&mut world, 1, &target)];
        for (core, lane) in lanes.iter_mut().enumerate() {
            world.submit(
                core,
                &mut **lane,
                [make_test_read_bio(0, 1), make_test_write_bio(1, 2, 3), bio_without_data(Op::Flush, 0, 0)],
            );
        }
        assert_eq!(target.status(), "2 2 2", "the count is over all cores");
        for (core, lane) in lanes.iter_mut().enumerate() {
            let mut back = Vec::new();
            world.turn(core, |cx| lane.drain(how, &mut back, cx));
            assert!(back.is_empty());
            assert_eq!(world.poll(core, &mut **lane).len(), 3);
        }
        assert_eq!(target.status(), "0 0 0");
    }
}
