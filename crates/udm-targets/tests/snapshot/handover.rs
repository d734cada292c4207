//! The handover of a snapshot from one table to the next.

use crate::log::LogCapture;
use crate::rig::{ORIGIN, SIZE, SnapshotRig, filled_write, host_with_snapshot};
use udm_core::Status;
use udm_core::errno::EINVAL;
use udm_dm::testing::make_test_read_bio;

#[test]
fn h01_a_table_with_other_features() {
    let mut host = host_with_snapshot("P 8");
    assert_eq!(host.write("od", 8, 1, b'X'), Status::Ok);
    host.load("sn", &format!("0 {SIZE} snapshot O W P 64 1 discard_zeroes_cow")).unwrap();
    assert_eq!(host.inactive_table_of("sn"), "1:0 1:1 P 0 1 discard_zeroes_cow");
    host.suspend(&["sn"]).unwrap();
    host.resume(&["sn"]).unwrap();
    assert_eq!(host.table_of("sn"), "1:0 1:1 P 8 1 discard_zeroes_cow");
    assert_eq!(host.status("sn"), "24/131072 16");
    assert_eq!((host.letters("sn", 4), host.letters("od", 4)), ("abcd".into(), "aXcd".into()));
    assert_eq!(host.write("od", 16, 1, b'X'), Status::Ok);
    assert_eq!((host.status("sn").as_str(), &*host.letters("sn", 4)), ("32/131072 16", "abcd"));
}

/// A device in use is reloaded in one step, while its origin is written.
#[test]
fn h01_a_reload_in_one_step() {
    let mut host = host_with_snapshot("P 8");
    for round in 0..5 {
        assert_eq!(host.write("od", round * 8, 1, b'X'), Status::Ok);
        let word = if round % 2 == 0 { "PO" } else { "P" };
        host.load("sn", &format!("0 {SIZE} snapshot O W {word} 8")).unwrap();
        let sent = host.send("od", 1, crate::rig::filled_write(800 + round * 8, 8, b'X'));
        host.resume(&["sn"]).unwrap();
        assert_eq!(host.wait(sent).status, Status::Ok);
        assert_eq!(host.table_of("sn"), format!("1:0 1:1 {word} 8"));
    }
    assert_eq!(host.letters("sn", 8), "abcdefgh");
    assert_eq!(host.read("sn", 800, 40).unwrap(), [0; 40 * 512]);
    assert_eq!(host.status("sn"), "96/131072 16");
}

#[test]
fn h02_a_transient_one_keeps_its_chunks() {
    let mut host = host_with_snapshot("N 8");
    assert_eq!(host.write("od", 8, 1, b'X'), Status::Ok);
    host.load("sn", &format!("0 {SIZE} snapshot O W N 16")).unwrap();
    assert_eq!(host.inactive_table_of("sn"), "1:0 1:1 N 0");
    host.resume(&["sn"]).unwrap();
    assert_eq!(host.table_of("sn"), "1:0 1:1 N 8");
    assert_eq!((host.letters("sn", 4), host.letters("od", 4)), ("abcd".into(), "aXcd".into()));
}

#[test]
fn h03_a_store_does_not_change_its_type() {
    for (first, second) in [("P 8", "N 16"), ("N 8", "P 8")] {
        let mut host = host_with_snapshot(first);
        assert_eq!(host.write("od", 8, 1, b'X'), Status::Ok);
        let error = host.load("sn", &format!("0 {SIZE} snapshot O W {second}")).unwrap_err();
        assert_eq!(error.errno, EINVAL);
        assert!(error.reason.contains("other type"), "{error}");
        assert_eq!(host.table_of("sn"), format!("1:0 1:1 {first}"));
        assert_eq!(host.letters("sn", 4), "abcd");
    }
}

/// A table that is loaded and cleared has no effect on the live table.
#[test]
fn h03_a_table_that_is_never_live() {
    let mut host = host_with_snapshot("P 8");
    assert_eq!(host.write("od", 8, 1, b'X'), Status::Ok);
    host.load("sn", &format!("0 {SIZE} snapshot O W PO 8")).unwrap();
    host.device("sn").clear();
    assert_eq!(host.write("od", 16, 1, b'X'), Status::Ok);
    assert_eq!((host.status("sn").as_str(), &*host.letters("sn", 4)), ("32/131072 16", "abcd"));
    host.suspend(&["sn"]).unwrap();
    host.resume(&["sn"]).unwrap();
    assert_eq!((host.table_of("sn").as_str(), &*host.letters("sn", 4)), ("1:0 1:1 P 8", "abcd"));
}

#[test]
fn h04_the_source_is_in_use() {
    let mut host = host_with_snapshot("P 8");
    host.make("s2");
    host.load("s2", &format!("0 {SIZE} snapshot O W P 8")).unwrap();
    let error = host.resume(&["s2"]).unwrap_err();
    assert_eq!(error.errno, EINVAL);
    let text = "Unable to perform snapshot handover until source is suspended.";
    assert!(error.to_string().contains(text), "{error}");
    assert_eq!(host.write("od", 8, 1, b'X'), Status::Ok);
    assert_eq!(host.letters("sn", 3), "abc", "the source goes on");
    // A third table is refused.
    host.make("s3");
    let error = host.load("s3", &format!("0 {SIZE} snapshot O W P 8")).unwrap_err();
    assert_eq!(error.text, "snapshot: Snapshot cow pairing for exception table handover failed");
    host.suspend(&["sn"]).unwrap();
    let error = host.resume(&["sn"]).unwrap_err();
    let text = "Unable to resume snapshot source until handover completes.";
    assert!(error.to_string().contains(text), "{error}");
}

#[test]
fn h05_another_device_takes_over() {
    for kind in ["P 8", "N 8"] {
        let mut host = host_with_snapshot(kind);
        assert_eq!(host.write("od", 8, 1, b'X'), Status::Ok);
        host.suspend(&["sn"]).unwrap();
        host.create("s2", &format!("0 {SIZE} snapshot O W {kind}")).unwrap();
        assert_eq!(host.table_of("s2"), format!("1:0 1:1 {kind}"));
        assert_eq!((host.status("sn").as_str(), &*host.letters("s2", 3)), ("Invalid", "abc"));
        assert_eq!(host.table_of("sn"), format!("1:0 1:1 {kind}"));
        host.resume(&["sn"]).unwrap();
        assert_eq!(host.status("sn"), "Invalid");
        assert_eq!(host.read("sn", 8, 1), Err(Status::IoErr));
        assert_eq!(host.write("sn", 8, 8, b'Y'), Status::IoErr);
        assert_eq!(host.write("od", 16, 1, b'X'), Status::Ok);
        assert_eq!((host.status("sn").as_str(), &*host.letters("s2", 3)), ("Invalid", "abc"));
        host.remove("sn");
        assert_eq!(host.write("od", 0, 1, b'X'), Status::Ok);
        assert_eq!(host.letters("s2", 3), "abc", "its source is gone, and the origin is still copied");
    }
}

#[test]
fn h05_the_source_goes_first() {
    let (log, mut host) = (LogCapture::new(), host_with_snapshot("N 8"));
    assert_eq!(host.write("od", 8, 1, b'X'), Status::Ok);
    host.make("s2");
    host.load("s2", &format!("0 {SIZE} snapshot O W N 8")).unwrap();
    host.remove("sn");
    host.resume(&["s2"]).unwrap();
    assert_eq!(host.status("s2"), "Invalid");
    assert!(log.says("Cancelling snapshot handover."));
    assert_eq!(host.read("s2", 8, 1), Err(Status::IoErr));
    assert_eq!(host.write("od", 16, 1, b'X'), Status::Ok);
}

/// As a volume manager does it: the origin's device becomes the merge.
#[test]
fn a_live_snapshot_becomes_a_merge() {
    let mut host = host_with_snapshot("P 8");
    assert_eq!(host.write("od", 8, 8, b'X'), Status::Ok);
    assert_eq!(host.write("sn", 24, 8, b'Z'), Status::Ok);
    host.suspend(&["od", "sn"]).unwrap();
    host.load("od", &format!("0 {SIZE} snapshot-merge O W P 8")).unwrap();
    host.resume(&["od"]).unwrap();
    host.remove("sn");
    host.settle();
    assert_eq!(host.status("od"), "16/131072 16");
    assert_eq!(host.letters("od", 4), "abcZ");
    host.load("od", ORIGIN).unwrap();
    host.resume(&["od"]).unwrap();
    assert_eq!(host.letters("od", 4), "abcZ");
    assert_eq!(host.write("od", 0, 8, b'X'), Status::Ok);
    assert_eq!(host.letters("od", 4), "XbcZ");
}

/// Repeated life cycles of snapshots leak nothing.
#[test]
fn nothing_is_left_of_snapshots_that_are_gone() {
    let mut host = SnapshotRig::recorded(2);
    host.create("od", ORIGIN).unwrap();
    let open = host.get_disk("O").opened();
    for (kind, store) in [("P 8", "W0"), ("N 8", "W1"), ("PO 8", "W2")] {
        host.disk(store, 4096);
        host.create("sn", &format!("0 {SIZE} snapshot O {store} {kind}")).unwrap();
        assert_eq!(host.write("od", 8, 1, b'X'), Status::Ok);
        host.load("sn", &format!("0 {SIZE} snapshot O {store} {kind} 1 discard_zeroes_cow")).unwrap();
        host.resume(&["sn"]).unwrap();
        host.remove("sn");
        assert_eq!(["O", store].map(|name| host.get_disk(name).opened()), [open, 0]);
    }
}

/// A suspend takes back the first write of a chunk from a store that only held it, while a read of
/// the origin is in flight. When the read completes, the lane is quiesced. Records of other lanes
/// wait for the sequence number of that write.
#[test]
fn a_write_that_is_taken_back_keeps_no_record_waiting() {
    let mut host = SnapshotRig::recorded(2);
    let held = host.disk("X", 8);
    let store = "0 16 linear W 0\n16 8 linear X 0\n24 1000 linear W 24";
    host.create("w", store).unwrap();
    host.create("sn", &format!("0 {SIZE} snapshot O @w P 8")).unwrap();
    held.hold(true);
    held.hand_back(true);
    let origin = host.get_disk("O");
    origin.hold(true);
    let taken_back = host.send("sn", 0, filled_write(0, 8, b'A'));
    let reads = host.send("sn", 0, make_test_read_bio(80, 1));
    let waits = host.send("sn", 1, filled_write(8, 8, b'B'));
    (0..10).for_each(|_| host.poll());
    assert_eq!(held.waiting(), 1);
    assert!(host.answer(waits).is_none(), "its record is behind that of the other");
    let mut is_asked = false;
    let over = host.suspend_asleep("sn", |host, core| {
        // In its first poll of the suspend core 0 takes the write back. In the next poll the read
        // completes, and the core sleeps from then on.
        let asked = core == 0 && host.world.has_messages(0);
        let read_ends = core == 0 && is_asked && origin.waiting() > 0;
        is_asked |= asked;
        if read_ends {
            held.hold(false);
            origin.hold(false);
        }
        core == 1 || asked || read_ends
    });
    assert!(over, "nobody writes the record");
    assert_eq!((host.wait(waits).status, host.wait(reads).status), (Status::Ok, Status::Ok));
    host.resume(&["sn"]).unwrap();
    assert_eq!(host.wait(taken_back).status, Status::Ok);
    assert_eq!(host.letters("sn", 4), "ABcd");
}

/// An inactive destination table in a device that is removed takes nothing over: the store is not
/// written any more.
#[test]
fn a_device_is_removed_with_a_table_that_waits() {
    let mut host = host_with_snapshot("P 8");
    host.load("sn", &format!("0 {SIZE} snapshot O W P 8")).unwrap();
    assert_eq!(host.write("od", 0, 8, b'X'), Status::Ok);
    let kept = host.store("W").unwrap().records.len();
    host.remove("sn");
    assert_eq!(host.write("od", 16, 8, b'X'), Status::Ok);
    host.settle();
    assert_eq!((kept, host.store("W").unwrap().records.len()), (1, 1));
}
