//! Reads, writes, discards, flushes, and the hydration in the background.

use crate::rig::filled_write;
use crate::{REGIONS, SIZE, STILL, TABLE, bytes, host, host_with, pass, progress, source};
use std::sync::{Arc, Mutex};
use udm_core::{BioFlags, Op, Status};
use udm_dm::testing::make_test_read_bio;

#[test]
fn it_reads_as_the_source_before_anything_is_copied() {
    let mut host = host_with(2, STILL);
    assert_eq!(bytes(&mut host, 0, SIZE), source(0, SIZE));
    assert_eq!(progress(&host), (0, 0, "rw".into()));
    assert!(host.get_disk("D").take_log().is_empty());
}

#[test]
fn a_write_of_a_part_hydrates_its_region() {
    let mut host = host_with(2, STILL);
    assert_eq!(host.write("c", 10, 2, 0xaa), Status::Ok);
    assert_eq!(progress(&host).0, 1);
    let mut expected = source(0, SIZE);
    expected[10..12].fill(0xaa);
    assert_eq!(bytes(&mut host, 0, SIZE), expected);
    let destination = host.get_disk("D").bytes(0, SIZE);
    let first: Vec<u8> = destination.chunks(512).map(|sector| sector[0]).collect();
    assert_eq!(first[8..16], expected[8..16]);
    assert!(first[..8].iter().chain(&first[16..]).all(|byte| *byte == 0xdd), "only that region");
    // Across regions, and in the short last one.
    assert_eq!(host.write("c", 30, 20, 0xbb), Status::Ok);
    assert_eq!(host.write("c", 124, 1, 0xcc), Status::Ok);
    expected[30..50].fill(0xbb);
    expected[124] = 0xcc;
    assert_eq!(bytes(&mut host, 0, SIZE), expected);
    assert_eq!(progress(&host).0, 6);
}

#[test]
fn a_write_of_a_whole_region_copies_nothing() {
    let mut host = host_with(1, STILL);
    let _ = host.get_disk("S").take_log();
    assert_eq!(host.write("c", 16, 16, 0xaa), Status::Ok);
    assert_eq!(host.write("c", 120, 5, 0xbb), Status::Ok);
    assert_eq!(progress(&host).0, 3);
    assert!(host.get_disk("S").take_log().is_empty(), "the source is not read");
    let mut expected = source(0, SIZE);
    expected[16..32].fill(0xaa);
    expected[120..].fill(0xbb);
    assert_eq!(bytes(&mut host, 0, SIZE), expected);
}

/// Until the write has completed, the region reads as the source.
#[test]
fn a_whole_region_counts_when_its_write_completes() {
    let mut host = host_with(2, STILL);
    host.get_disk("D").hold(true);
    let write = host.send("c", 0, filled_write(8, 8, 0xaa));
    let part = host.send("c", 1, filled_write(9, 1, 0xbb));
    let read = host.send("c", 1, make_test_read_bio(8, 8));
    (0..20).for_each(|_| host.poll());
    assert!(host.answer(write).is_none() && host.answer(part).is_none());
    assert_eq!(udm_dm::testing::copy_bio_data(&host.answer(read).unwrap())[0], 9);
    assert_eq!(progress(&host), (0, 1, "rw".into()));
    host.get_disk("D").hold(false);
    host.wait(write);
    host.wait(part);
    assert_eq!(bytes(&mut host, 8, 3), [0xaa, 0xbb, 0xaa]);
}

#[test]
fn a_discard_hydrates_the_regions_that_it_covers() {
    for passdown in [true, false] {
        let mut host = match passdown {
            true => host_with(1, STILL),
            false => host_with(1, "0 125 clone M D S 8 2 no_hydration no_discard_passdown"),
        };
        let _ = (host.get_disk("S").take_log(), host.get_disk("D").take_log());
        // Regions 2 and 3 wholly, 1 and 4 in part; then no region; then the short last one.
        assert_eq!(host.discard("c", 12, 22), Status::Ok);
        assert_eq!(host.discard("c", 41, 6), Status::Ok);
        assert_eq!(host.discard("c", 120, 5), Status::Ok);
        assert_eq!(progress(&host).0, 2);
        assert!(host.get_disk("S").take_log().is_empty());
        let log = host.get_disk("D").take_log();
        match passdown {
            true => {
                assert_eq!(log.len(), 1);
                assert_eq!((log[0].op, log[0].sector, log[0].sectors), (Op::Discard, 16, 16));
            }
            false => assert!(log.is_empty()),
        }
        let kept: Vec<u8> = bytes(&mut host, 0, 16);
        assert_eq!(kept, source(0, 16), "a region that is discarded in part keeps its data");
        assert_eq!(bytes(&mut host, 32, SIZE - 32), source(32, SIZE - 32));
    }
}

/// The kernel lets the copy overwrite the write.
#[test]
fn a_discard_waits_for_a_copy_of_its_region() {
    let mut host = host_with(2, STILL);
    host.get_disk("D").hold(true);
    let part = host.send("c", 0, filled_write(8, 1, 0xaa));
    (0..20).for_each(|_| host.poll());
    let discard = host.send("c", 1, udm_dm::testing::bio_without_data(Op::Discard, 8, 8));
    (0..20).for_each(|_| host.poll());
    assert!(host.answer(discard).is_none(), "the copy is in flight");
    host.get_disk("D").hold(false);
    host.wait(part);
    host.wait(discard);
    host.write("c", 8, 1, 0xee);
    pass(&mut host, 1);
    assert_eq!(bytes(&mut host, 8, 1), [0xee]);
}

#[test]
fn a_discard_of_many_regions_takes_several_turns() {
    let mut host = host(1);
    for name in ["BD", "BS"] {
        host.disk(name, 8 * 10_000);
    }
    host.create("c", "0 80000 clone M BD BS 8 1 no_hydration").unwrap();
    assert_eq!(host.discard("c", 0, 80_000), Status::Ok);
    assert_eq!(progress(&host).0, 10_000);
}

#[test]
fn the_background_copies_everything_and_says_so_once() {
    for (words, cores, regions) in
        [("8", 1, 16), ("8 0 4 hydration_threshold 4 hydration_batch_size 3", 2, 16), ("64", 3, 2)]
    {
        let mut host = host_with(cores, &format!("0 125 clone M D S {words}"));
        pass(&mut host, 3);
        assert_eq!(progress(&host), (regions, 0, "rw".into()));
        assert_eq!(host.get_disk("D").bytes(0, SIZE), host.get_disk("S").bytes(0, SIZE));
        assert_eq!(host.events("c"), 1);
        let _ = host.get_disk("S").take_log();
        assert_eq!(bytes(&mut host, 0, SIZE), source(0, SIZE));
        host.write("c", 3, 50, 0xaa);
        host.flush("c");
        pass(&mut host, 2);
        assert!(host.get_disk("S").take_log().is_empty(), "the source is not used any more");
        assert_eq!(host.events("c"), 1);
    }
}

#[test]
fn threshold_and_batch_size() {
    let mut host = host(1);
    host.get_disk("S").hold(true);
    host.get_disk("D").hold(true);
    host.make("c");
    // The fingerprint of the source is read at load.
    host.get_disk("S").hold(false);
    host.load("c", "0 125 clone M D S 8 0 4 hydration_threshold 5 hydration_batch_size 2").unwrap();
    host.get_disk("S").hold(true);
    let _ = host.get_disk("S").take_log();
    host.resume(&["c"]).unwrap();
    (0..50).for_each(|_| host.poll());
    assert_eq!(progress(&host).1, 5, "5 regions are in flight");
    host.get_disk("S").hold(false);
    (0..50).for_each(|_| host.poll());
    let log = host.get_disk("S").take_log();
    let reads: Vec<_> = log.iter().map(|request| (request.sector, request.sectors)).collect();
    assert_eq!(reads, [(0, 16), (16, 16), (32, 8)], "batches of 2, and the rest of the threshold");
    host.message("c", "hydration_threshold 0").unwrap();
    host.get_disk("D").hold(false);
    pass(&mut host, 1);
    assert_eq!(progress(&host).0, 5, "a threshold of 0 stops the hydration");
    host.message("c", "hydration_threshold 100").unwrap();
    host.message("c", "hydration_batch_size 100").unwrap();
    let _ = host.get_disk("S").take_log();
    pass(&mut host, 1);
    assert_eq!(host.get_disk("S").take_log()[0].sectors, SIZE - 40, "all that is left");
    assert_eq!(progress(&host).0, REGIONS);
}

/// Clients come first: with one of their requests in flight, one batch is started per 10 ms.
#[test]
fn clients_come_first() {
    let mut host = host_with(1, STILL);
    host.get_disk("D").hold(true);
    let write = host.send("c", 0, filled_write(0, 8, 0xaa));
    host.poll();
    host.message("c", "enable_hydration").unwrap();
    host.message("c", "hydration_threshold 100").unwrap();
    let _ = host.get_disk("S").take_log();
    (0..50).for_each(|_| host.poll());
    assert_eq!(host.get_disk("S").take_log().len(), 1);
    for _ in 0..4 {
        host.world.now = host.world.now + udm_core::Nanos::from_millis(10);
        (0..10).for_each(|_| host.poll());
    }
    assert_eq!(host.get_disk("S").take_log().len(), 4);
    host.get_disk("D").hold(false);
    host.wait(write);
    pass(&mut host, 1);
    assert_eq!(progress(&host).0, REGIONS);
}

/// All requests to destination and metadata in their order.
fn recorded_order(host: &crate::rig::SnapshotRig) -> Arc<Mutex<Vec<String>>> {
    let order = Arc::new(Mutex::new(Vec::new()));
    for name in ["D", "M"] {
        let order = Arc::clone(&order);
        host.get_disk(name).set_verdict(move |bio| {
            let fua = if bio.flags.contains(BioFlags::FUA) { "+fua" } else { "" };
            order.lock().unwrap().push(format!("{name} {:?}{fua} {}", bio.op, bio.sector));
            Status::Ok
        });
    }
    order
}

#[test]
fn a_flush_commits_before_it_completes() {
    let mut host = host_with(2, STILL);
    let order = recorded_order(&host);
    host.write("c", 1, 1, 0xaa);
    assert_eq!(host.flush("c"), Status::Ok);
    host.settle();
    check_order(
        &order,
        &[
            "D Write 0",  // the copy
            "D Write 1",  // the client's write
            "D Flush 0",  // the data is durable before
            "M Write 16", // the first copy of the bitmap,
            "M Flush 0",  // which is durable before
            "D Flush 0",  // the client's flush is sent, and
        ],
        &["M Write 24"], // before the second copy is written
    );
    assert_eq!(host.flush("c"), Status::Ok);
    check_order(&order, &["D Flush 0"], &[]);
    // The next commit begins with the other copy.
    let mut bio = filled_write(8, 8, 0xbb);
    bio.flags = BioFlags::FUA;
    assert_eq!(host.run("c", bio).status, Status::Ok);
    host.settle();
    check_order(&order, &["D Write+fua 8", "D Flush 0", "M Write 24", "M Flush 0"], &["M Write 16"]);
    // A FUA write of a part: its region is committed before the write is sent.
    let mut bio = filled_write(17, 1, 0xcc);
    bio.flags = BioFlags::FUA;
    assert_eq!(host.run("c", bio).status, Status::Ok);
    host.settle();
    check_order(
        &order,
        &["D Write 16", "D Flush 0", "M Write 16", "M Flush 0", "D Write+fua 17"],
        &["M Write 24"],
    );
}

/// Checks that the requests since the last call were those of `chain`, in this order, and that the
/// others came after the flush of the metadata.
fn check_order(order: &Mutex<Vec<String>>, chain: &[&str], others: &[&str]) {
    let order = std::mem::take(&mut *order.lock().unwrap());
    let flushed = order.iter().position(|one| one == "M Flush 0");
    let (late, rest): (Vec<_>, Vec<_>) =
        order.iter().enumerate().partition(|(_, one)| others.contains(&one.as_str()));
    assert_eq!(rest.iter().map(|(_, one)| one.as_str()).collect::<Vec<_>>(), chain, "{order:?}");
    assert_eq!(late.len(), others.len(), "{order:?}");
    assert!(late.iter().all(|(at, _)| Some(*at) > flushed), "{order:?}");
}

#[test]
fn changes_are_committed_once_a_second() {
    let mut host = host_with(1, STILL);
    host.write("c", 1, 1, 0xaa);
    let _ = host.get_disk("M").take_log();
    host.settle();
    assert!(host.get_disk("M").take_log().is_empty());
    pass(&mut host, 2);
    let log = host.get_disk("M").take_log();
    assert_eq!(log.iter().filter(|request| request.op == Op::Write).count(), 2, "both copies, once");
}

#[test]
fn extents_come_from_where_the_data_is() {
    let mut host = host_with(1, TABLE);
    pass(&mut host, 1);
    let mut out = udm_core::Extents::new(8);
    let device = host.device("c");
    udm_core::Device::extents(&*device, udm_core::Sector(3), udm_core::Sectors(100), &mut out);
    assert_eq!(out.list().iter().map(|extent| extent.len.0).sum::<u64>(), 100);
}
