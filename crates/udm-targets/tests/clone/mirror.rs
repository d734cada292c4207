//! Mirrors: their table, their writes, and what the failure of a device does.

use crate::rig::{SnapshotRig, filled_write};
use crate::{SIZE, bytes, host, pass, source};
use std::sync::Arc;
use udm_core::errno::{EACCES, EBUSY, EINVAL, ENOENT};
use udm_core::{Bio, Op, Sector, Sectors, Status};
use udm_dm::target::{MirrorPhase, MirrorReport, MirrorTargetQueries};
use udm_dm::{Table, TargetError};

const MIRROR: &str = "0 125 mirror core 1 8 2 S 0 D 0";
const IN_SYNC: &str = "0 125 mirror core 2 8 nosync 2 S 0 D 0";

/// A host with the mirror `c`, whose copies are paused.
fn mirror(cores: usize, table: &str) -> SnapshotRig {
    let mut host = host(cores);
    load_paused(&mut host, table);
    host
}

/// Creates the mirror `c`, whose copies are paused.
pub(super) fn load_paused(host: &mut SnapshotRig, table: &str) {
    host.make("c");
    host.load("c", table).unwrap();
    queries(&host.device("c").inactive().unwrap()).set_paused(true);
    host.resume(&["c"]).unwrap();
}

pub(super) fn queries(table: &Arc<Table>) -> &dyn MirrorTargetQueries {
    table.targets()[0].target.as_mirror().unwrap()
}

pub(super) fn live(host: &SnapshotRig) -> Arc<Table> {
    host.device("c").live().unwrap()
}

pub(super) fn report(host: &SnapshotRig) -> MirrorReport {
    queries(&live(host)).report()
}

fn begin_switch(host: &SnapshotRig) -> Result<(), TargetError> {
    queries(&live(host)).begin_switch()
}

/// The first byte of each sector of a disk.
pub(super) fn on_disk(host: &SnapshotRig, disk: &str, from: u64, sectors: u64) -> Vec<u8> {
    host.get_disk(disk).bytes(from, sectors).chunks(512).map(|sector| sector[0]).collect()
}

#[test]
fn tables_of_mirrors_that_are_refused() {
    let mut host = host(1);
    host.disk("short", 124);
    host.disk("locked", 200).set_limits(|limits| limits.read_only = true);
    host.disk("blocks", 200).set_limits(|limits| limits.logical_block = 8192);
    for (words, text, errno) in [
        ("core", "Insufficient mirror log arguments", EINVAL),
        ("clustered 2 M 8 2 S 0 D 0", "Error creating mirror dirty log", EINVAL),
        ("core 3 8 sync x 2 S 0 D 0", "Error creating mirror dirty log", EINVAL),
        ("core 1 7 2 S 0 D 0", "Error creating mirror dirty log", EINVAL),
        ("core 1 4194304 2 S 0 D 0", "Error creating mirror dirty log", EINVAL),
        ("disk 2 gone 8 2 S 0 D 0", "Error creating mirror dirty log", ENOENT),
        ("disk 2 locked 8 2 S 0 D 0", "Error creating mirror dirty log", EINVAL),
        ("disk 2 S 8 2 S 0 D 0", "Device lookup failure", EINVAL),
        ("core 2 8 maybe 2 S 0 D 0", "Error creating mirror dirty log", EINVAL),
        ("core 1 8 3 S 0 D 0 M 0", "Invalid number of mirrors", EINVAL),
        ("core 1 8 2 S 0 D", "Too few mirror arguments", EINVAL),
        ("core 1 8 2 S x D 0", "Invalid offset", EINVAL),
        ("core 1 8 2 gone 0 D 0", "Device lookup failure", ENOENT),
        ("core 1 8 2 S 0 locked 0", "Device lookup failure", EACCES),
        ("core 1 8 2 S 0 short 0", "Device lookup failure", EINVAL),
        ("core 1 8 2 S 1 D 0", "Device lookup failure", EINVAL),
        ("core 1 8 2 M 0 M 124", "Device lookup failure", EINVAL),
        ("core 1 8 2 S 0 blocks 0", "Invalid region size", EINVAL),
        ("core 1 8 2 S 0 D 0 2 handle_errors", "Not enough arguments to support feature count", EINVAL),
        ("core 1 8 2 S 0 D 0 1 faster", "Unrecognised feature requested", EINVAL),
    ] {
        let error = host.build(&format!("0 125 mirror {words}")).map(drop).expect_err(words);
        assert_eq!(
            (error.text.trim_start_matches("mirror: "), error.errno),
            (text, errno),
            "{words}: {error}"
        );
        assert!(error.word.is_some(), "{words}");
    }
    // Two ranges of one disk that do not overlap.
    host.build("0 125 mirror core 1 8 2 M 0 M 125 1 handle_errors").unwrap();
}

#[test]
fn a_write_is_in_both_devices_and_a_region_is_copied_before_it() {
    let mut host = mirror(2, MIRROR);
    assert_eq!(host.status("c").split(' ').nth(3), Some("0/16"), "{}", host.status("c"));
    assert_eq!(host.write("c", 9, 1, 0xaa), Status::Ok);
    assert_eq!(on_disk(&host, "D", 8, 8), [9, 0xaa, 11, 12, 13, 14, 15, 16]);
    // A whole region is not read.
    let _ = host.get_disk("S").take_log();
    assert_eq!(host.write("c", 16, 8, 0xbb), Status::Ok);
    assert!(host.get_disk("S").take_log().iter().all(|request| request.op != Op::Read));
    assert_eq!((on_disk(&host, "S", 16, 8), on_disk(&host, "D", 16, 8)), (vec![0xbb; 8], vec![0xbb; 8]));
    assert_eq!((report(&host).copied, report(&host).phase), (2, MirrorPhase::Copying));
    queries(&live(&host)).set_paused(false);
    pass(&mut host, 2);
    assert_eq!(report(&host).phase, MirrorPhase::InSync);
    assert_eq!(on_disk(&host, "S", 0, SIZE), on_disk(&host, "D", 0, SIZE));
    assert!(host.status("c").ends_with(" 16/16 1 AA 1 core"), "{}", host.status("c"));
}

/// Zeroes are written as such, and a destination that cannot do that gets data.
#[test]
fn zeroes_of_the_source_and_of_clients() {
    for is_able in [true, false] {
        let mut host = host(1);
        for disk in ["S", "D"] {
            let most = if disk == "S" || is_able { Sectors(64) } else { Sectors::ZERO };
            host.get_disk(disk).set_limits(|limits| limits.max_write_zeroes = most);
        }
        host.get_disk("S").put(32, &[0; 8 * 512]);
        host.create("c", MIRROR).unwrap();
        pass(&mut host, 2);
        let mut zeroes = Bio::read(Sector(3), Sectors(10), Default::default());
        zeroes.op = Op::WriteZeroes;
        assert_eq!(host.run("c", zeroes).status, Status::Ok);
        assert_eq!(on_disk(&host, "S", 0, SIZE), on_disk(&host, "D", 0, SIZE));
        assert_eq!(on_disk(&host, "D", 2, 12), [3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 14]);
        let log = host.get_disk("D").take_log();
        let count = log.iter().filter(|request| request.op == Op::WriteZeroes).count();
        assert_eq!(count > 0, is_able);
    }
}

#[test]
fn a_destination_that_fails_degrades_the_mirror_and_no_request_fails() {
    let mut host = mirror(2, IN_SYNC);
    host.get_disk("D").fail(Status::Transport);
    assert_eq!(host.write("c", 9, 1, 0xaa), Status::Ok);
    let report = report(&host);
    assert_eq!((report.phase, report.failure.unwrap().status), (MirrorPhase::Degraded, Status::Transport));
    assert!(host.status("c").contains(" 1 AD 1 core") && host.events("c") == 1, "{}", host.status("c"));
    assert_eq!(begin_switch(&host).unwrap_err().errno, EBUSY);
    // It stays so: the destination lacks a write.
    host.get_disk("D").fail(Status::Ok);
    let _ = host.get_disk("D").take_log();
    assert_eq!((host.write("c", 10, 1, 0xbb), host.flush("c")), (Status::Ok, Status::Ok));
    assert!(host.get_disk("D").take_log().is_empty());
    assert_eq!(bytes(&mut host, 8, 4), [9, 0xaa, 0xbb, 12]);
}

/// During a switch, either device may be the disk next.
#[test]
fn in_a_switch_a_write_needs_both_devices() {
    let host = mirror(2, MIRROR);
    assert!(begin_switch(&host).is_err_and(|error| error.reason.contains("not all regions")));
    let mut host = mirror(2, IN_SYNC);
    begin_switch(&host).unwrap();
    for disk in ["S", "D"] {
        host.get_disk(disk).fail(Status::Medium);
        assert_eq!(host.write("c", 9, 1, 0xaa), Status::Medium, "{disk}");
        host.get_disk(disk).fail(Status::Ok);
    }
    assert_eq!(report(&host).phase, MirrorPhase::Switching);
    // The devices may differ in what failed, so the switch that ends leaves a degraded mirror.
    queries(&live(&host)).cancel_switch();
    assert_eq!(report(&host).phase, MirrorPhase::Degraded);
    let mut host = mirror(2, IN_SYNC);
    begin_switch(&host).unwrap();
    queries(&live(&host)).cancel_switch();
    host.get_disk("D").fail(Status::Medium);
    assert_eq!(host.write("c", 9, 1, 0xaa), Status::Ok);
    assert_eq!(report(&host).phase, MirrorPhase::Degraded);
}

/// A region that cannot be copied: the write goes to the source, and the region is left.
#[test]
fn a_write_of_a_region_that_cannot_be_copied_succeeds() {
    for (disk, op) in [("S", Op::Read), ("D", Op::Write)] {
        let mut host = mirror(2, MIRROR);
        host.get_disk(disk).set_verdict(move |bio| if bio.op == op { Status::Medium } else { Status::Ok });
        let other = host.send("c", 1, filled_write(10, 1, 0xbb));
        assert_eq!(host.write("c", 9, 1, 0xaa), Status::Ok, "{disk}");
        assert_eq!(host.wait(other).status, Status::Ok);
        if disk == "D" {
            assert_eq!(host.write("c", 16, 8, 0xcc), Status::Ok);
        }
        let failure = report(&host).failure.unwrap();
        assert_eq!((failure.of_destination, failure.status), (disk == "D", Status::Medium));
        assert_eq!((report(&host).copied, report(&host).phase), (0, MirrorPhase::Copying));
        assert_eq!(on_disk(&host, "S", 8, 4), [9, 0xaa, 0xbb, 12]);
        host.get_disk(disk).fail(Status::Ok);
        queries(&live(&host)).set_paused(false);
        pass(&mut host, 3);
        assert_eq!((report(&host).phase, report(&host).failure), (MirrorPhase::InSync, None));
        assert_eq!(on_disk(&host, "S", 0, SIZE), on_disk(&host, "D", 0, SIZE));
    }
}

/// The later of two writes of one place waits until both devices have the first one.
#[test]
fn writes_of_one_place_are_in_one_order() {
    let mut host = mirror(2, IN_SYNC);
    host.get_disk("S").hold(true);
    let first = host.send("c", 0, filled_write(8, 4, 0xaa));
    let second = host.send("c", 1, filled_write(10, 4, 0xbb));
    let beside = host.send("c", 1, filled_write(24, 1, 0xcc));
    host.poll();
    assert_eq!(host.get_disk("S").waiting(), 2, "the second one waits in its lane");
    host.get_disk("S").hold(false);
    for sent in [first, second, beside] {
        assert_eq!(host.wait(sent).status, Status::Ok);
    }
    assert_eq!(on_disk(&host, "D", 8, 6), [0xaa, 0xaa, 0xbb, 0xbb, 0xbb, 0xbb]);
    assert_eq!(on_disk(&host, "S", 8, 6), on_disk(&host, "D", 8, 6));
    assert_eq!(bytes(&mut host, 24, 2), [0xcc, source(25, 1)[0]]);
}
