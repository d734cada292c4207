//! The write-intent log of a mirror: what it says at each moment, and which logs are refused.

use crate::mirror::{live, load_paused, on_disk, queries, report};
use crate::rig::{SnapshotRig, filled_write};
use crate::{SIZE, host, pass};
use udm_core::{Op, Status};
use udm_dm::target::MirrorPhase;
use udm_wire::mirror_log::MirrorLogLayout;

const LOGGED: &str = "0 125 mirror disk 2 M 8 2 S 0 D 0 1 handle_errors";
const IN_SYNC: &str = "0 125 mirror disk 3 M 8 nosync 2 S 0 D 0 1 handle_errors";

/// A host with a mirror that is in sync, and whose log says so.
fn in_sync(cores: usize) -> SnapshotRig {
    let mut host = host(cores);
    let data = host.get_disk("S").bytes(0, SIZE);
    host.get_disk("D").put(0, &data);
    load_paused(&mut host, IN_SYNC);
    assert_eq!(clean(&host), 0xffff);
    host
}

/// The clean regions, as the device of the log has them.
fn clean(host: &SnapshotRig) -> u64 {
    let layout = MirrorLogLayout::new(16);
    let bytes = host.get_disk("M").bytes(0, layout.sectors().0);
    let mut words = Vec::new();
    assert_eq!(layout.decode(&bytes, true, |word| words.push(word)), 0);
    words[0]
}

/// Another host with the same disks, and no devices.
fn next_host(host: SnapshotRig) -> SnapshotRig {
    let disks: Vec<_> = ["S", "D", "M"].map(|name| (name, host.get_disk(name))).into();
    drop(host);
    let mut next = SnapshotRig::new(1);
    disks.iter().for_each(|(name, disk)| next.put_disk(name, disk));
    next
}

/// The mirror ends, and another one begins with the log.
fn again(host: SnapshotRig) -> SnapshotRig {
    let mut next = next_host(host);
    load_paused(&mut next, LOGGED);
    next
}

fn refusal(host: &mut SnapshotRig, table: &str) -> String {
    let error = host.build(table).map(drop).expect_err(table);
    assert!(error.text.contains("Error creating mirror dirty log"), "{error}");
    error.reason
}

#[test]
fn a_region_is_dirty_before_a_write_and_clean_after_a_while() {
    let mut host = in_sync(2);
    host.get_disk("M").hold(true);
    let _ = host.get_disk("S").take_log();
    let sent = host.send("c", 1, filled_write(9, 1, 0xaa));
    for _ in 0..20 {
        host.poll();
    }
    assert!(host.get_disk("S").take_log().is_empty(), "the log comes first");
    host.get_disk("M").hold(false);
    assert_eq!(host.wait(sent).status, Status::Ok);
    assert_eq!((clean(&host), report(&host).log.unwrap().dirty), (0xfffd, 1));
    let log = host.get_disk("M").take_log();
    assert_eq!(log.last().map(|request| request.op), Some(Op::Flush), "durable");
    // Another write of the region needs no log.
    assert_eq!(host.write("c", 8, 8, 0xbb), Status::Ok);
    assert!(host.get_disk("M").take_log().is_empty());
    let _ = (host.get_disk("S").take_log(), host.get_disk("D").take_log());
    pass(&mut host, 4);
    assert_eq!((clean(&host), report(&host).log.unwrap().dirty), (0xffff, 0));
    for disk in ["S", "D"] {
        let log = host.get_disk(disk).take_log();
        assert!(log.iter().any(|request| request.op == Op::Flush), "{disk} is flushed first");
    }
    // An idle mirror does nothing.
    pass(&mut host, 4);
    assert!(host.get_disk("S").take_log().is_empty() && host.get_disk("D").take_log().is_empty());
    assert!(host.status("c").ends_with(" 16/16 1 AA 3 disk 1:2 A"), "{}", host.status("c"));
}

#[test]
fn a_mirror_that_continues_copies_only_what_is_dirty() {
    let mut host = in_sync(1);
    assert_eq!(host.write("c", 9, 1, 0xaa), Status::Ok);
    assert_eq!(host.write("c", 124, 1, 0xbb), Status::Ok);
    let mut host = again(host);
    assert_eq!((report(&host).copied, clean(&host)), (14, 0x7ffd));
    let _ = host.get_disk("D").take_log();
    queries(&live(&host)).set_paused(false);
    pass(&mut host, 1);
    assert_eq!(report(&host).phase, MirrorPhase::InSync);
    let written = host.get_disk("D").take_log();
    let mut written: Vec<u64> =
        written.iter().filter(|request| request.op == Op::Write).map(|request| request.sector).collect();
    written.sort_unstable();
    assert_eq!(written, [8, 120]);
    pass(&mut host, 4);
    assert_eq!(clean(&host), 0xffff);
    assert_eq!(on_disk(&host, "S", 0, SIZE), on_disk(&host, "D", 0, SIZE));
}

/// A mirror whose destination has failed marks what it writes, and its next table continues.
#[test]
fn a_destination_that_returns_gets_what_it_missed() {
    let mut host = in_sync(2);
    host.get_disk("D").fail(Status::Transport);
    assert_eq!(host.write("c", 9, 1, 0xaa), Status::Ok);
    assert_eq!(report(&host).phase, MirrorPhase::Degraded);
    assert_eq!(host.write("c", 40, 1, 0xbb), Status::Ok);
    pass(&mut host, 3);
    assert_eq!(clean(&host), 0xffff & !(1 << 1 | 1 << 5));
    host.get_disk("D").fail(Status::Ok);
    host.load("c", LOGGED).unwrap();
    // Between the load and the resume.
    assert_eq!(host.write("c", 80, 1, 0xcc), Status::Ok);
    host.resume(&["c"]).unwrap();
    pass(&mut host, 1);
    assert_eq!(report(&host).phase, MirrorPhase::InSync);
    assert_eq!(on_disk(&host, "S", 0, SIZE), on_disk(&host, "D", 0, SIZE));
}

/// Nobody knows what the source has after a write that failed, so the region is copied again.
#[test]
fn a_write_that_fails_on_the_source_is_copied_again() {
    let mut host = in_sync(1);
    host.get_disk("S").set_verdict(|bio| if bio.op == Op::Write { Status::Medium } else { Status::Ok });
    assert_eq!(host.write("c", 9, 1, 0xaa), Status::Medium);
    // As if the data had reached it.
    host.get_disk("S").fail(Status::Ok);
    host.get_disk("S").put(9, &[0xaa; 512]);
    assert!(host.status("c").contains(" 1 DA 3 disk"), "{}", host.status("c"));
    pass(&mut host, 3);
    assert_eq!((report(&host).phase, clean(&host)), (MirrorPhase::Degraded, 0xfffd));
    host.load("c", LOGGED).unwrap();
    host.resume(&["c"]).unwrap();
    pass(&mut host, 1);
    assert_eq!(report(&host).phase, MirrorPhase::InSync);
    assert_eq!(on_disk(&host, "S", 0, SIZE), on_disk(&host, "D", 0, SIZE));
}

#[test]
fn a_log_that_fails_holds_writes_of_clean_regions() {
    let mut host = in_sync(1);
    assert_eq!(host.write("c", 9, 1, 0xaa), Status::Ok);
    host.get_disk("M").set_verdict(|bio| if bio.op == Op::Write { Status::Medium } else { Status::Ok });
    let sent = host.send("c", 0, filled_write(20, 1, 0xbb));
    pass(&mut host, 1);
    assert!(host.answer(sent).is_none(), "it waits");
    assert_eq!(on_disk(&host, "S", 20, 1), [21]);
    assert_eq!(host.write("c", 10, 1, 0xcc), Status::Ok, "this region is dirty");
    assert_eq!(report(&host).log.unwrap().failure, Some(Status::Medium));
    assert!(host.status("c").trim_end().ends_with(" D"), "{}", host.status("c"));
    queries(&live(&host)).abandon_log();
    assert_eq!(host.wait(sent).status, Status::Ok);
    assert_eq!(report(&host).log.unwrap().failure, None);
    // With keep_log they fail.
    let mut host = in_sync(1);
    host.load("c", "0 125 mirror disk 2 M 8 2 S 0 D 0 2 handle_errors keep_log").unwrap();
    host.resume(&["c"]).unwrap();
    host.get_disk("M").fail(Status::Medium);
    assert_eq!(host.write("c", 20, 1, 0xbb), Status::IoErr);
}

#[test]
fn logs_that_are_refused_and_their_words() {
    let mut host = in_sync(1);
    host.disk("E", SIZE);
    host.disk("small", 8);
    for (table, why) in [
        ("0 125 mirror disk 3 M 8 sync 2 S 0 D 0", "a live mirror uses it"),
        ("0 125 mirror disk 2 M 8 2 S 0 E 0", "it is of D from sector 0, and not of E from sector 0"),
        ("0 125 mirror disk 2 small 8 2 S 0 D 0", "small has 4096 bytes, and the log needs 8192"),
    ] {
        assert!(refusal(&mut host, table).contains(why), "{table}: {}", refusal(&mut host, table));
    }
    let mut host = next_host(host);
    host.disk("E", SIZE);
    for (table, why) in [
        ("0 125 mirror disk 2 M 8 2 S 0 E 0", "it is of D from sector 0, and not of E from sector 0"),
        ("0 125 mirror disk 2 M 8 2 D 0 S 0", "it is of S from sector 0, and not of D from sector 0"),
        (
            "0 120 mirror disk 2 M 8 2 S 1 D 0",
            "it has 125 sectors in regions of 8; to copy all again, use sync",
        ),
        ("0 125 mirror disk 2 M 16 2 S 0 D 0", "it has 125 sectors in regions of 8"),
    ] {
        assert!(refusal(&mut host, table).contains(why), "{table}: {}", refusal(&mut host, table));
    }
    let good = host.get_disk("M").bytes(0, 16);
    for (at, byte, why) in [
        (4, 9, "incompatible disk log version 9: expected 2: name another device, or fill it with zeroes"),
        (0, 9, "M: it has other data"),
        (600, 9, "its header is damaged"),
    ] {
        let mut bad = good.clone();
        bad[at] = byte;
        host.get_disk("M").put(0, &bad);
        assert!(refusal(&mut host, LOGGED).contains(why), "{}", refusal(&mut host, LOGGED));
        assert_eq!(host.get_disk("M").bytes(0, 16), bad, "nothing is overwritten");
    }
    // Damage of the map costs copies.
    let mut bad = good;
    bad[8 * 512 + 20] ^= 1;
    host.get_disk("M").put(0, &bad);
    load_paused(&mut host, LOGGED);
    assert_eq!(report(&host).copied, 0);
    // A log of the kernel has no devices.
    let mut host = next_host(host);
    let mut kernel = vec![0; 16 * 512];
    kernel[..16].copy_from_slice(b"rRiM\x02\0\0\0\x10\0\0\0\0\0\0\0");
    kernel[1024..1026].copy_from_slice(&[0xff, 0x0f]);
    host.get_disk("M").put(0, &kernel);
    load_paused(&mut host, LOGGED);
    assert_eq!((report(&host).copied, clean(&host)), (12, 0xfff));
    let mut host = next_host(host);
    kernel[8] = 17;
    host.get_disk("M").put(0, &kernel);
    assert!(refusal(&mut host, LOGGED).contains("it has 17 regions, and 16 are expected"));
}
