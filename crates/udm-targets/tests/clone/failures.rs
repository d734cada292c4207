//! Errors of the source, the destination and the metadata.

use crate::rig::filled_write;
use crate::{REGIONS, SIZE, STILL, TABLE, bytes, host, host_with, pass, progress, source};
use udm_core::{BioFlags, Op, Status};

#[test]
fn a_write_fails_if_its_region_cannot_be_copied_and_the_next_one_tries_again() {
    for disk in ["S", "D"] {
        let mut host = host_with(2, STILL);
        host.get_disk(disk).fail(Status::Medium);
        let other = host.send("c", 1, filled_write(9, 1, 0xbb));
        assert_eq!(host.write("c", 8, 1, 0xaa), Status::IoErr, "{disk}");
        assert_eq!(host.wait(other).status, Status::IoErr);
        assert_eq!(progress(&host), (0, 0, "rw".into()));
        host.get_disk(disk).fail(Status::Ok);
        assert_eq!(bytes(&mut host, 0, SIZE), source(0, SIZE));
        assert_eq!(host.write("c", 8, 1, 0xaa), Status::Ok);
        assert_eq!(bytes(&mut host, 8, 2), [0xaa, 10]);
    }
}

#[test]
fn a_write_of_a_whole_region_that_fails_changes_nothing() {
    let mut host = host_with(2, STILL);
    host.get_disk("D").fail(Status::Medium);
    assert_eq!(host.write("c", 8, 8, 0xaa), Status::Medium);
    host.get_disk("D").fail(Status::Ok);
    assert_eq!((bytes(&mut host, 0, SIZE), progress(&host).0), (source(0, SIZE), 0));
}

/// The background tries bad regions again after a second, and copies the others meanwhile.
#[test]
fn the_background_comes_back_to_bad_regions() {
    let mut host = host(2);
    host.make("c");
    host.load("c", "0 125 clone M D S 8 0 2 hydration_threshold 4").unwrap();
    host.get_disk("S").set_verdict(|bio| match bio.sector.0 {
        40..48 => Status::Medium,
        _ => Status::Ok,
    });
    host.resume(&["c"]).unwrap();
    pass(&mut host, 10);
    assert_eq!(progress(&host), (REGIONS - 1, 0, "rw".into()));
    let _ = host.get_disk("S").take_log();
    pass(&mut host, 5);
    let tries = host.get_disk("S").take_log().len();
    assert!((3..=7).contains(&tries), "{tries} tries in 5 s");
    assert_eq!(host.read("c", 40, 8), Err(Status::Medium));
    assert_eq!(host.events("c"), 0);
    host.get_disk("S").fail(Status::Ok);
    pass(&mut host, 3);
    assert_eq!((progress(&host).0, host.events("c")), (REGIONS, 1));
    assert_eq!(bytes(&mut host, 0, SIZE), source(0, SIZE));
}

#[test]
fn metadata_that_cannot_be_written_is_read_only() {
    for (operation, disk) in [(Op::Write, "M"), (Op::Flush, "M"), (Op::Flush, "D")] {
        let mut host = host_with(2, STILL);
        host.write("c", 1, 1, 0xaa);
        host.get_disk(disk).set_verdict(move |bio| match bio.op == operation {
            true => Status::IoErr,
            false => Status::Ok,
        });
        assert_eq!(host.flush("c"), Status::IoErr, "{operation:?} of {disk}");
        assert_eq!((progress(&host), host.events("c")), ((1, 0, "ro".into()), 1));
        // Reads, and writes of hydrated regions; others cannot be hydrated.
        assert_eq!(host.write("c", 2, 1, 0xbb), Status::Ok);
        assert_eq!(host.write("c", 9, 1, 0xcc), Status::IoErr);
        assert_eq!(host.write("c", 16, 8, 0xcc), Status::IoErr);
        let mut fua = filled_write(3, 1, 0xdd);
        fua.flags = BioFlags::FUA;
        assert_eq!(host.run("c", fua).status, Status::IoErr, "its region is not in the metadata");
        assert_eq!(host.discard("c", 16, 8), Status::Ok, "ignored, as in the kernel");
        let mut expected = source(0, SIZE);
        (expected[1], expected[2]) = (0xaa, 0xbb);
        assert_eq!(bytes(&mut host, 0, SIZE), expected, "no read returns older data");
        host.message("c", "enable_hydration").unwrap();
        pass(&mut host, 2);
        assert_eq!(progress(&host).0, 1, "nothing is hydrated");
        // A suspend does not wait for a commit, and a new table begins with writable metadata.
        host.get_disk(disk).fail(Status::Ok);
        host.load("c", TABLE).unwrap();
        host.resume(&["c"]).unwrap();
        assert_eq!(host.flush("c"), Status::Ok);
        pass(&mut host, 3);
        assert_eq!((bytes(&mut host, 0, SIZE), progress(&host)), (expected, (REGIONS, 0, "rw".into())));
    }
}

#[test]
fn metadata_that_cannot_be_read_either_fails_everything() {
    let mut host = host_with(2, STILL);
    host.write("c", 1, 1, 0xaa);
    host.get_disk("M").fail(Status::IoErr);
    assert_eq!(host.flush("c"), Status::IoErr);
    host.settle();
    assert_eq!((host.status("c").as_str(), host.events("c")), ("Fail", 1));
    for _ in 0..2 {
        assert_eq!(host.read("c", 1, 1), Err(Status::IoErr));
        assert_eq!(host.write("c", 1, 1, 0xbb), Status::IoErr);
        assert_eq!((host.flush("c"), host.discard("c", 0, 8)), (Status::IoErr, Status::IoErr));
        host.get_disk("M").fail(Status::Ok);
    }
    host.load("c", STILL).unwrap();
    host.resume(&["c"]).unwrap();
    assert_eq!(bytes(&mut host, 0, 3), [1, 0xaa, 3]);
    assert_eq!((host.flush("c"), progress(&host).2), (Status::Ok, "rw".into()));
}

/// A second copy that cannot be written leaves the first one, which is durable.
#[test]
fn a_failure_between_the_copies_loses_nothing() {
    let mut host = host_with(1, STILL);
    host.write("c", 1, 1, 0xaa);
    host.get_disk("M").set_verdict(|bio| match (bio.op, bio.sector.0) {
        (Op::Write, 24..) => Status::IoErr,
        _ => Status::Ok,
    });
    assert_eq!(host.flush("c"), Status::Ok, "the first copy is durable");
    host.settle();
    assert_eq!(progress(&host).2, "ro");
    assert_eq!(host.flush("c"), Status::Ok, "nothing is left to commit");
    // The next commit writes the other copy first.
    host.get_disk("M").fail(Status::Ok);
    host.load("c", STILL).unwrap();
    host.resume(&["c"]).unwrap();
    host.write("c", 9, 1, 0xbb);
    let _ = host.get_disk("M").take_log();
    host.flush("c");
    host.settle();
    let log = host.get_disk("M").take_log();
    let writes: Vec<_> = log.iter().filter(|one| one.op == Op::Write).map(|one| one.sector).collect();
    assert_eq!(writes, [24, 16]);
}
