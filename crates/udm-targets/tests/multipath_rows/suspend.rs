//! Suspend, resume and reload.

use super::multipath_rig::host::MappedRig;
use super::multipath_rig::{MultipathRig, bare_read};
use std::sync::Arc;
use udm_core::errno::EBUSY;
use udm_core::{Op, Status};
use udm_dm::testing::bio_without_data;

const REQUEST: &str = "0 32768 multipath 1 queue_if_no_path 0 1 1 round-robin 0 1 0 253:0";
const BIO: &str = "0 32768 multipath 3 queue_if_no_path queue_mode bio 0 1 1 round-robin 0 1 0 253:0";

/// A device without a usable path, and a read that waits.
fn rig_with_waiting_read(table: &str) -> MappedRig {
    let mut host = MappedRig::new(table);
    host.message("fail_path 253:0").unwrap();
    assert_eq!(host.read(), []);
    host
}

#[test]
fn u01_a_suspended_device_takes_no_messages() {
    let mut host = MappedRig::new(REQUEST);
    assert_eq!(host.suspend(false), []);
    for message in ["fail_path 253:0", "queue_if_no_path", "nonsense"] {
        assert_eq!(host.message(message).expect_err("suspended").errno, EBUSY, "{message}");
    }
    assert!(host.device.table_text(false).contains("multipath"));
    assert!(host.device.status_text().contains("253:0 A 0"));
}

#[test]
fn u02_queueing_is_off_during_a_flushing_suspend() {
    let mut host = MappedRig::new(REQUEST);
    host.suspend(false);
    assert!(!host.device.table_text(false).contains("queue_if_no_path"));
    host.resume();
    assert!(host.device.table_text(false).contains("queue_if_no_path"));
}

#[test]
fn u04_a_table_with_a_path_repairs_it() {
    for table in [REQUEST, BIO] {
        let mut host = rig_with_waiting_read(table);
        assert_eq!(host.suspend(true), []);
        host.load(&table.replace("253:0", "253:1")).unwrap();
        assert_eq!(host.resume(), [Status::Ok]);
    }
}

#[test]
fn u05_a_flushing_suspend_fails_what_waits() {
    let mut host = rig_with_waiting_read(BIO);
    assert_eq!(host.suspend(false), [Status::IoErr]);
    host.resume();
    assert!(host.device.table_text(false).contains("queue_if_no_path"));
}

/// In request mode the kernel queues the read over the suspend; udm has the rule of bio mode for
/// both.
#[test]
fn u06_in_request_mode_too() {
    assert_eq!(rig_with_waiting_read(REQUEST).suspend(false), [Status::IoErr]);
}

#[test]
fn u07_the_error_target_ends_what_waits() {
    for table in [REQUEST, BIO] {
        let mut host = rig_with_waiting_read(table);
        host.load("0 32768 error").unwrap();
        assert_eq!(host.suspend(true), []);
        assert_eq!(host.resume(), [Status::IoErr]);
    }
}

#[test]
fn u08_a_hundred_reloads_under_load() {
    for table in [REQUEST, BIO] {
        let mut host = MappedRig::new(table);
        let mut back = Vec::new();
        for round in 0..100_u64 {
            host.disks[0].hold(true);
            let bios = (0..8).map(|n| bio_without_data(Op::Write, round * 8 + n, 1));
            host.world.submit(0, &mut *host.lane, bios);
            host.load(table).unwrap();
            let change = host.device.suspend(round % 3 > 0, Arc::new(|| {})).unwrap();
            host.disks[0].hold(false);
            back.extend(host.finish(change));
            back.extend(host.resume());
        }
        assert_eq!(back, [Status::Ok; 800]);
        let seen: Vec<_> = host.disks[0].take_log().iter().map(|seen| seen.sector).collect();
        assert!(seen.iter().copied().eq(0..800), "each was done once, in its turn");
    }
}

/// A waiter sees that the counter has changed.
#[test]
fn v03_a_failed_path_moves_the_counter() {
    let mut host = MappedRig::new(REQUEST);
    assert_eq!(host.device.event_nr(), 0);
    host.message("fail_path 253:0").unwrap();
    assert_eq!(host.device.event_nr(), 1);
    let mut rig = MultipathRig::new("0 0 1 1 round-robin 0 2 0 253:0 253:1");
    rig.disks[0].fail(Status::IoErr);
    assert_eq!((rig.run(bare_read(8)), rig.events.count()), (Status::Ok, 1));
}
