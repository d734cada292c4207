//! Which regions are copied first, which need no copy, and what is recorded for the next clone.

use crate::rig::filled_write;
use crate::{REGIONS, SIZE, STILL, bytes, host, host_with, pass, progress, source};
use udm_core::{Op, Status};
use udm_dm::testing::bio_without_data;

/// The regions of 8 sectors that were read from the source, in their order.
fn copied(host: &crate::rig::SnapshotRig) -> Vec<u64> {
    host.get_disk("S").take_log().iter().filter(|one| one.op == Op::Read).map(|one| one.sector / 8).collect()
}

fn first_reads(host: &crate::rig::SnapshotRig) -> Vec<u64> {
    let table = host.device("c").live().unwrap();
    table.targets()[0].target.as_clone().unwrap().first_reads()
}

#[test]
fn regions_of_a_profile_are_copied_before_the_others() {
    let mut host = host(1);
    host.make("c");
    host.load("c", "0 125 clone M D S 8 1 no_hydration 2 hydrate_first 9,2-4,15,3").unwrap();
    host.resume(&["c"]).unwrap();
    assert_eq!(host.write("c", 16, 8, 0xaa), Status::Ok, "region 2 is hydrated by a write");
    let _ = host.get_disk("S").take_log();
    host.message("c", "enable_hydration").unwrap();
    pass(&mut host, 3);
    assert_eq!(progress(&host), (REGIONS, 0, "rw".into()));
    assert_eq!(copied(&host), [9, 3, 4, 15, 0, 1, 5, 6, 7, 8, 10, 11, 12, 13, 14]);
    assert!(host.table_of("c").ends_with(" 8 1 no_hydration 2 hydrate_first 9,2-4,15,3"));
}

/// A batch stays within its run. After a failed copy the regions come first again.
#[test]
fn batches_and_failures_of_a_profile() {
    let mut host = host(1);
    host.make("c");
    let words = "6 hydration_threshold 4 hydration_batch_size 4 hydrate_first 8-9,4-15";
    host.load("c", &format!("0 125 clone M D S 8 0 {words}")).unwrap();
    let mut fails = true;
    host.get_disk("S").set_verdict(move |bio| match std::mem::take(&mut fails) && bio.op == Op::Read {
        true => Status::IoErr,
        false => Status::Ok,
    });
    let _ = host.get_disk("S").take_log();
    host.resume(&["c"]).unwrap();
    pass(&mut host, 4);
    assert_eq!(progress(&host).0, REGIONS);
    let reads = host.get_disk("S").take_log();
    let reads: Vec<_> = reads.iter().map(|one| (one.sector / 8, one.sectors.div_ceil(8))).collect();
    assert_eq!(
        reads[..2],
        [(8, 2), (4, 2)],
        "the first batch has two regions, the rest of four is the second"
    );
    let again = reads.iter().rposition(|one| one.0 == 8).unwrap();
    assert!(again > 0 && reads[again + 1..].iter().any(|one| one.0 < 4), "{reads:?}");
}

#[test]
fn what_clients_need_from_the_source_is_recorded_once() {
    let mut host = host_with(2, STILL);
    for (sector, sectors) in [(40, 1), (0, 20), (41, 2), (120, 5)] {
        assert_eq!(bytes(&mut host, sector, sectors), source(sector, sectors));
    }
    assert_eq!(host.write("c", 50, 1, 0xaa), Status::Ok, "a part of region 6");
    assert_eq!(host.write("c", 56, 8, 0xaa), Status::Ok, "all of region 7");
    assert_eq!(bytes(&mut host, 48, 16).len(), 16);
    assert_eq!(first_reads(&host), [5, 0, 1, 2, 15, 6]);
    // Another table takes the record over.
    host.load("c", STILL).unwrap();
    host.resume(&["c"]).unwrap();
    assert_eq!(bytes(&mut host, 64, 1), source(64, 1));
    assert_eq!(first_reads(&host), [5, 0, 1, 2, 15, 6, 8]);
}

#[test]
fn wrong_orders_are_refused() {
    let mut host = host(1);
    host.make("c");
    for (words, why) in [
        ("2 hydrate_first 16", "the last one is 15"),
        ("2 hydrate_first x", "expected regions, as in 0-3,17"),
        ("1 hydrate_first", "must be even"),
        ("2 hydrate_last 1", "Invalid core argument"),
    ] {
        let error = host.load("c", &format!("0 125 clone M D S 8 0 {words}")).unwrap_err().to_string();
        assert!(error.contains(why), "{words}: {error}");
    }
}

/// Source: regions 2 to 5 and the short last one are holes. Destination: regions 0 to 4 and the
/// last one.
fn host_with_holes(table: &str) -> crate::rig::SnapshotRig {
    let mut host = host(1);
    for (name, holes) in [("S", [(13, 48), (118, 125)]), ("D", [(0, 42), (120, 125)])] {
        let disk = host.get_disk(name);
        holes.iter().for_each(|&(from, end)| disk.put(from, &vec![0; (end - from) as usize * 512]));
        disk.set_holes(&holes);
    }
    host.create("c", table).unwrap();
    let _ = (host.get_disk("S").take_log(), host.get_disk("D").take_log());
    host
}

#[test]
fn holes_of_both_devices_are_not_copied() {
    let mut host = host_with_holes(STILL);
    host.message("c", "enable_hydration").unwrap();
    let mut expected = source(0, SIZE);
    expected[13..48].fill(0);
    expected[118..].fill(0);
    pass(&mut host, 3);
    assert_eq!(progress(&host), (REGIONS, 0, "rw".into()));
    assert_eq!(copied(&host), [0, 1, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]);
    assert_eq!(bytes(&mut host, 0, SIZE), expected);
    let written = host.get_disk("D").take_log();
    assert!(written.iter().all(|one| one.op != Op::Write || !(16..40).contains(&one.sector)), "{written:?}");
}

#[test]
fn a_write_of_a_part_of_a_hole_needs_no_copy() {
    let mut host = host_with_holes(STILL);
    assert_eq!(host.write("c", 17, 1, 0xaa), Status::Ok);
    assert_eq!(progress(&host).0, 1);
    assert!(copied(&host).is_empty());
    assert_eq!(bytes(&mut host, 16, 3), [0, 0xaa, 0]);
    assert_eq!(host.write("c", 41, 1, 0xbb), Status::Ok);
    assert_eq!(copied(&host), [5], "the destination of region 5 is no hole");
    assert_eq!(bytes(&mut host, 40, 3), [0, 0xbb, 0]);
}

/// A write of a whole region that failed may have left anything in the destination.
#[test]
fn after_a_failed_write_a_hole_is_copied() {
    let mut host = host_with_holes(STILL);
    let disk = host.get_disk("D");
    disk.fail(Status::IoErr);
    assert_eq!(host.write("c", 24, 8, 0xaa), Status::IoErr);
    disk.fail(Status::Ok);
    disk.put(24, &[0xaa; 512 * 3]);
    let write = host.send("c", 0, filled_write(31, 1, 0xbb));
    assert_eq!(host.wait(write).status, Status::Ok);
    assert_eq!(copied(&host), [3]);
    assert_eq!(bytes(&mut host, 24, 8), [0, 0, 0, 0, 0, 0, 0, 0xbb]);
    let discard = host.run("c", bio_without_data(Op::Discard, 32, 8));
    assert_eq!(discard.status, Status::Ok);
    pass(&mut host, 1);
    assert_eq!(bytes(&mut host, 32, 8), [0; 8]);
}
