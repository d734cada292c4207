//! A store that grows while it is in use.

use crate::rig::{SIZE, SnapshotRig, filled_write};
use udm_core::errno::{ENOSPC, EOPNOTSUPP};
use udm_core::{Device, DeviceControlError, Sectors, Status};

/// An origin, and a snapshot whose store has room for `chunks` chunks and grows by `step`.
fn growing_snapshot(kind: &str, chunks: u64, step: &str) -> SnapshotRig {
    let mut host = SnapshotRig::recorded(2);
    let metadata = if kind == "N" { 0 } else { 2 };
    host.get_disk("W").set_limits(|limits| limits.size = Sectors((chunks + metadata) * 8));
    host.create("od", "0 131072 snapshot-origin O").unwrap();
    host.create("sn", &format!("0 {SIZE} snapshot O W {kind} 8")).unwrap();
    host.message("sn", &format!("set grow {step}")).unwrap();
    host
}

fn no_space() -> Option<DeviceControlError> {
    Some(DeviceControlError::new(ENOSPC, "No space left on device"))
}

/// Writes chunk `chunk` of the origin, and polls for a while.
fn write(host: &mut SnapshotRig, chunk: u64) -> u64 {
    let sent = host.send("od", 0, filled_write(chunk * 8, 8, b'X'));
    (0..50).for_each(|_| host.poll());
    sent
}

fn write_all(host: &mut SnapshotRig, chunks: std::ops::Range<u64>) {
    for chunk in chunks {
        write(host, chunk);
    }
}

#[test]
fn it_grows_before_it_is_full_and_nobody_waits() {
    for kind in ["P", "N"] {
        // Steps of 8 chunks, requested when fewer than 4 are left.
        let mut host = growing_snapshot(kind, 8, "32k");
        let disk = host.get_disk("W");
        for chunk in 0..40 {
            let sent = write(&mut host, chunk);
            assert_eq!(host.answer(sent).map(|bio| bio.status), Some(Status::Ok), "{kind}: {chunk}");
            assert!(disk.growths() <= 1, "one step at a time");
            // The growth completes two writes later.
            if disk.growths() == 1 && chunk % 4 == 3 {
                disk.grow_now(None);
            }
        }
        assert_eq!(host.letters("sn", 14), "abcdefghijklmn", "{kind}");
        let total = disk.limits().size.0;
        assert!(total >= 40 * 8 && host.status("sn").contains(&format!("/{total} ")), "{kind}: {total}");
        assert_eq!(host.events("sn"), 0);
        host.audit();
    }
}

#[test]
fn who_finds_no_room_waits_for_the_step_and_not_for_the_policy() {
    for kind in ["P", "PO", "N"] {
        let mut host = growing_snapshot(kind, 2, "4k");
        let disk = host.get_disk("W");
        let sent: Vec<u64> = (0..4).map(|chunk| write(&mut host, chunk)).collect();
        let mine = host.send("sn", 1, filled_write(96, 1, b'Y'));
        (0..50).for_each(|_| host.poll());
        assert_eq!(sent.iter().filter(|sent| host.answer(**sent).is_some()).count(), 2, "{kind}");
        assert!(host.answer(mine).is_none());
        while disk.growths() > 0 {
            disk.grow_now(None);
            (0..50).for_each(|_| host.poll());
        }
        for sent in [sent[2], sent[3], mine] {
            assert_eq!(host.wait(sent).status, Status::Ok, "{kind}");
        }
        assert_eq!((host.letters("sn", 6), host.letters("od", 6)), ("abcdef".into(), "XXXXef".into()));
        assert!(!host.status("sn").contains('v'), "{kind}: {}", host.status("sn"));
    }
}

#[test]
fn a_step_that_fails_is_tried_once_more_when_it_is_full() {
    let mut host = growing_snapshot("P", 8, "32k");
    let disk = host.get_disk("W");
    write_all(&mut host, 0..5);
    assert_eq!(disk.growths(), 1, "three are left");
    disk.grow_now(no_space());
    assert_eq!((host.events("sn"), disk.growths()), (1, 0), "it is said once, and not tried again yet");
    write_all(&mut host, 5..8);
    assert_eq!(disk.growths(), 0);
    let late = write(&mut host, 8);
    assert!(host.answer(late).is_none() && disk.growths() == 1);
    disk.grow_now(None);
    assert_eq!(host.wait(late).status, Status::Ok, "there was room by then");
    // Now growth fails.
    write_all(&mut host, 9..16);
    while disk.growths() > 0 {
        disk.grow_now(no_space());
    }
    let late = write(&mut host, 16);
    assert_eq!(disk.growths(), 1);
    disk.grow_now(no_space());
    assert_eq!(host.wait(late).status, Status::Ok, "the origin goes on");
    assert_eq!((host.status("sn").as_str(), host.events("sn")), ("Invalid", 3));
}

#[test]
fn policies_come_behind_a_last_attempt() {
    for (policy, answer) in [("fail", Some(Status::NoSpace)), ("pause", None)] {
        let mut host = growing_snapshot("P", 2, "4k");
        host.message("sn", &format!("set on_full {policy}")).unwrap();
        let disk = host.get_disk("W");
        let sent: Vec<u64> = (0..3).map(|chunk| write(&mut host, chunk)).collect();
        while disk.growths() > 0 {
            disk.grow_now(no_space());
            (0..50).for_each(|_| host.poll());
        }
        assert_eq!(host.answer(sent[2]).map(|bio| bio.status), answer, "{policy}");
        assert_eq!(host.events("sn"), 1, "{policy}: failures are said once");
        // After a second it is retried: by a waiting write, or by a write that fails.
        host.world.now.0 += 1_100_000_000;
        let next = write(&mut host, 3);
        assert_eq!(disk.growths(), 1, "{policy}");
        while disk.growths() > 0 {
            disk.grow_now(None);
            (0..50).for_each(|_| host.poll());
        }
        let waited = if answer.is_none() { sent[2] } else { write(&mut host, 4) };
        assert_eq!(host.wait(waited).status, Status::Ok, "{policy}");
        if answer.is_none() {
            assert_eq!(host.wait(next).status, Status::Ok);
        }
        assert_eq!(host.letters("sn", 6), "abcdef");
    }
}

#[test]
fn a_maximum_is_the_end_until_another_is_set() {
    let mut host = growing_snapshot("P", 2, "0");
    let disk = host.get_disk("W");
    host.message("sn", "set grow_max 20k").unwrap();
    host.message("sn", "set on_full pause").unwrap();
    host.message("sn", "set grow 1G").unwrap();
    assert_eq!(disk.growths(), 1, "less is left than half a step");
    assert_eq!(disk.grow_now(None), Sectors(40));
    let sent: Vec<u64> = (0..4).map(|chunk| write(&mut host, chunk)).collect();
    assert_eq!((disk.growths(), host.status("sn").as_str()), (0, "40/40 16"));
    host.world.now.0 += 5_000_000_000;
    (0..50).for_each(|_| host.poll());
    assert_eq!(disk.growths(), 0, "nobody asks for more than the maximum");
    // A maximum below the current size does not shrink the store. A larger one continues the
    // growth.
    host.message("sn", "set grow_max 1").unwrap();
    assert_eq!(disk.growths(), 0);
    host.message("sn", "set grow_max 1M").unwrap();
    assert_eq!(disk.grow_now(None), Sectors(40 + 128), "16 chunks at first, however long a step may be");
    assert_eq!(host.wait(sent[3]).status, Status::Ok);
    assert_eq!(host.letters("sn", 6), "abcdef");
}

#[test]
fn a_handover_and_a_removal_leave_growth_to_itself() {
    let mut host = growing_snapshot("N", 2, "4k");
    let disk = host.get_disk("W");
    let sent: Vec<u64> = (0..3).map(|chunk| write(&mut host, chunk)).collect();
    assert_eq!(disk.growths(), 1);
    // The settings and the growth in progress belong to the snapshot, not to its table.
    host.load("sn", &format!("0 {SIZE} snapshot O W N 8")).unwrap();
    assert_eq!(disk.grow_now(None), Sectors(24));
    assert_eq!(host.wait(sent[2]).status, Status::Ok);
    host.resume(&["sn"]).unwrap();
    assert_eq!(host.letters("sn", 6), "abcdef");
    write_all(&mut host, 3..5);
    assert_eq!(disk.growths(), 1);
    host.suspend(&["sn"]).unwrap();
    host.resume(&["sn"]).unwrap();
    host.remove("sn");
    // No snapshot is left to be notified.
    disk.grow_now(None);
    assert_eq!(host.write("od", 80, 8, b'X'), Status::Ok);
}

#[test]
fn what_can_not_grow_says_so_and_bad_numbers_are_refused() {
    let mut host = growing_snapshot("P", 2, "4k");
    for message in ["set grow", "set grow -1", "set grow 1.5M", "set grow_max never", "set grow 99999999999P"]
    {
        assert_eq!(host.message("sn", message).unwrap_err().errno, 22, "{message}");
    }
    let disk = host.get_disk("W");
    assert_eq!(write(&mut host, 1), 1);
    disk.grow_now(Some(DeviceControlError::new(EOPNOTSUPP, "only a regular file grows by itself")));
    assert_eq!(host.events("sn"), 1);
    // The largest possible numbers.
    host.message("sn", "set grow_max 18446744073709551615").unwrap();
    host.message("sn", "set grow 18446744073709551615").unwrap();
    assert_eq!(disk.growths(), 1);
    disk.grow_now(no_space());
    host.message("sn", "set grow 0").unwrap();
    assert_eq!(write(&mut host, 0), 2);
    assert_eq!(disk.growths(), 0, "it stays as it is");
}
