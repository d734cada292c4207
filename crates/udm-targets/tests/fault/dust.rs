use crate::{build, disks, message, open};
use udm_core::{DevNo, Limits, Op, Sectors, Status};
use udm_dm::testing::{
    SteppedTestCores, TestDeviceNameResolver, TestDisk, bio_without_data, make_test_read_bio,
    make_test_write_bio,
};

/// The kernel's results and texts for `dmsetup message`.
#[test]
fn messages() {
    let (_a, _b, mut resolver) = disks(64, 64);
    let target = build("dust a 8 4096", 32, &mut resolver).unwrap();
    assert_eq!(target.max_io_len(), Some(Sectors(8)));
    assert_eq!(target.status(), "1:0 bypass verbose");
    let say = |words: &str| match message(&*target, words) {
        Ok(result) => result,
        Err(error) => format!("{} {}", error.errno, error.text),
    };
    let steps = [
        ("countbadblocks", "countbadblocks: 0 badblock(s) found"),
        ("listbadblocks", ""),
        ("clearbadblocks", "dust_clear_badblocks: no badblocks found"),
        ("addbadblock 3", ""),
        ("AddBadBlock 1 255", ""),
        ("addbadblock 3", "22 dust: block 3 already in badblocklist"),
        ("addbadblock 8", ""),
        ("addbadblock 9", "22 dust: selected block value out of range"),
        ("addbadblock 2 256", "22 dust: selected write fail count out of range"),
        ("addbadblock x", "22 "),
        ("addbadblock", "22 dust: addbadblock requires an additional argument"),
        ("queryblock 3", "dust_query_block: block 3 found in badblocklist"),
        ("queryblock 2", "dust_query_block: block 2 not found in badblocklist"),
        ("countbadblocks", "countbadblocks: 3 badblock(s) found"),
        ("listbadblocks", "1\n3\n8\n"),
        ("removebadblock 2", "22 dust: block 2 not found in badblocklist"),
        ("removebadblock 3", ""),
        ("countbadblocks", "countbadblocks: 2 badblock(s) found"),
        ("clearbadblocks", "dust_clear_badblocks: badblocks cleared"),
        ("bogus", "22 dust: unrecognized message 'bogus' received"),
        ("bogus 1", "22 dust: unrecognized message 'bogus' received"),
        ("queryblock 1 1", "22 dust: unrecognized message 'queryblock' received"),
        ("a b c d", "22 dust: invalid number of arguments '4'"),
    ];
    for (words, expected) in steps {
        assert_eq!(say(words), expected, "{words}");
    }
    say("enable");
    say("quiet");
    assert_eq!(target.status(), "1:0 fail_read_on_bad_block quiet");
    say("disable");
    say("quiet");
    assert_eq!(target.status(), "1:0 bypass verbose");
}

/// Bad blocks of 512 bytes on a disk with blocks of 4 KiB: requests must not be split below the
/// block size of the disk, which would refuse them.
#[test]
fn requests_are_not_cut_below_the_blocks_of_the_device() {
    let disk = TestDisk::null(Limits { logical_block: 4096, ..Limits::new(Sectors(64)) });
    let mut resolver = TestDeviceNameResolver::new();
    resolver.add("a", DevNo { major: 1, minor: 0 }, disk);
    assert_eq!(build("dust a 8 512", 32, &mut resolver).unwrap().max_io_len(), Some(Sectors(8)));
    assert_eq!(build("dust a 8 8192", 32, &mut resolver).unwrap().max_io_len(), Some(Sectors(16)));
}

#[test]
fn bad_blocks_fail_reads_and_are_healed_by_writes() {
    let (a, _b, mut resolver) = disks(64, 64);
    let target = build("dust a 8 4096", 32, &mut resolver).unwrap();
    let mut world = SteppedTestCores::new(2);
    let mut lanes = [open(&mut world, 0, &target), open(&mut world, 1, &target)];
    let mut run = |core: usize, bio| world.run(core, &mut *lanes[core], bio).status;
    // Block 2 of the device is sectors 8 to 15 of the target.
    message(&*target, "addbadblock 2 1").unwrap();
    assert!(run(0, make_test_read_bio(8, 8)).is_ok(), "in bypass nothing is bad");
    message(&*target, "enable").unwrap();
    let _ = a.take_log();
    assert_eq!(run(0, make_test_read_bio(8, 1)), Status::IoErr);
    assert_eq!(run(1, make_test_read_bio(15, 1)), Status::IoErr);
    assert!(a.take_log().is_empty(), "a failed read reaches nothing");
    assert!(run(0, make_test_read_bio(7, 1)).is_ok() && run(0, make_test_read_bio(16, 1)).is_ok());
    assert!(run(0, bio_without_data(Op::Flush, 0, 0)).is_ok());
    assert_eq!(run(0, make_test_write_bio(8, 1, 1)), Status::IoErr, "the first write was told to fail");
    assert_eq!(run(1, make_test_read_bio(8, 1)), Status::IoErr);
    assert!(run(1, make_test_write_bio(8, 1, 1)).is_ok());
    assert!(run(0, make_test_read_bio(8, 1)).is_ok(), "a write on one core heals the block for all");
    assert_eq!(message(&*target, "countbadblocks").unwrap(), "countbadblocks: 0 badblock(s) found");
    message(&*target, "addbadblock 2").unwrap();
    assert_eq!(run(0, make_test_read_bio(8, 1)), Status::IoErr, "it can be made bad again");
    assert!(run(0, bio_without_data(Op::Discard, 8, 8)).is_ok(), "a discard counts as a write");
    assert!(run(0, make_test_read_bio(8, 1)).is_ok());
    message(&*target, "addbadblock 4").unwrap();
    message(&*target, "disable").unwrap();
    assert!(run(0, make_test_read_bio(24, 8)).is_ok());
}

#[test]
fn with_a_crooked_offset_both_blocks_count() {
    let (_a, _b, mut resolver) = disks(64, 64);
    let target = build("dust a 3 4096", 32, &mut resolver).unwrap();
    let mut world = SteppedTestCores::new(1);
    let mut lane = open(&mut world, 0, &target);
    message(&*target, "addbadblock 1").unwrap();
    message(&*target, "enable").unwrap();
    // Sectors 3 to 10 of the device: blocks 0 and 1.
    assert_eq!(world.run(0, &mut *lane, make_test_read_bio(0, 8)).status, Status::IoErr);
    assert!(world.run(0, &mut *lane, make_test_read_bio(0, 5)).status.is_ok());
}
