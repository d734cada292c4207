//! Multipath as the table of a mapped device: messages that resubmit queued bios, and paths that
//! are mapped devices.

mod multipath_rig;

use multipath_rig::host::MappedRig;
use std::sync::Arc;
use udm_core::errno::EBUSY;
use udm_core::{DevNo, Nanos, OwnWork, Status};
use udm_dm::testing::{TestControlIo, make_test_read_bio};
use udm_dm::{MappedDevice, Table};
use udm_targets::multipath::{PathMaintenanceSettings, PathWatchOptions};

const REQUEST: &str = "0 32768 multipath 1 queue_if_no_path 0 1 1 round-robin 0 1 0 253:0";

/// A message makes the lanes check their state: the queued read is sent at once.
#[test]
fn a_message_lets_held_bios_go() {
    let mut host = MappedRig::new(REQUEST);
    host.message("fail_path /dev/nullb0").unwrap();
    assert_eq!(host.read(), []);
    assert_eq!(host.device.event_nr(), 1);
    host.message("reinstate_path 253:0").unwrap();
    assert_eq!(host.poll(), [Status::Ok]);
    host.suspend(true);
    assert_eq!(host.message("fail_path 253:0").unwrap_err().errno, EBUSY);
    host.resume();
    host.message("fail_path 253:0").unwrap();
    assert_eq!((host.read(), host.device.event_nr()), (vec![], 3));
    host.message("fail_if_no_path").unwrap();
    assert_eq!(host.poll(), [Status::IoErr]);
}

/// A mapped device `/dev/mapper/p` with the table `table`.
fn path(host: &mut MappedRig, table: &str) -> Arc<MappedDevice> {
    let path = MappedDevice::new("p", None, DevNo { major: 254, minor: 1 }).unwrap();
    let lines = udm_wire::table::parse_table(table).unwrap();
    path.load(
        Table::build(udm_targets::TARGETS, &lines, &mut host.resolver, &TestControlIo::new(), 1).unwrap(),
    )
    .unwrap();
    let change = path.resume(Arc::new(|| {})).unwrap();
    host.finish(change);
    host.resolver.add("/dev/mapper/p", path.number(), path.clone());
    path
}

/// An idle path that is a mapped device can be suspended, although multipath sends it nothing.
#[test]
fn an_idle_path_can_be_suspended() {
    let mut host = MappedRig::new("0 32768 multipath 2 queue_mode bio 0 1 1 round-robin 0 1 0 253:0");
    let path = path(&mut host, "0 32768 linear 253:1 0");
    let table =
        "0 32768 multipath 2 queue_mode bio 0 2 1 round-robin 0 1 0 253:0 round-robin 0 1 0 /dev/mapper/p";
    host.load(table).unwrap();
    host.resume();
    assert_eq!(host.read(), [Status::Ok]);
    let change = path.suspend(false, Arc::new(|| {})).unwrap();
    host.finish(change);
    assert_eq!(host.read(), [Status::Ok]);
    let change = path.resume(Arc::new(|| {})).unwrap();
    host.finish(change);
    host.message("switch_group 2").unwrap();
    assert_eq!(host.read(), [Status::Ok]);
    assert_eq!(host.disks[1].take_log().len(), 1);
}

/// A read that was given up is in flight on a path in two fragments. A no-flush suspend takes one
/// of them back while the other is in flight. The whole read is handed back by the next drain, and
/// is not started again because another path is polled in between.
#[test]
fn a_suspend_takes_a_read_that_was_given_up_off_its_path() {
    let mut host = MappedRig::new("0 32768 multipath 2 queue_mode bio 0 1 1 round-robin 0 1 0 253:0");
    let watch = PathWatchOptions { deadline: Some(Nanos::from_millis(1000)), ..PathWatchOptions::default() };
    PathMaintenanceSettings { watch, ..PathMaintenanceSettings::default() }.set(&host.device);
    path(&mut host, "0 4 linear 253:1 0\n4 32764 linear 253:2 0");
    let table =
        "0 32768 multipath 2 queue_mode bio 0 2 1 round-robin 0 1 0 /dev/mapper/p round-robin 0 1 0 253:0";
    host.load(table).unwrap();
    host.resume();
    host.disks[1].hold(true);
    host.disks[1].hand_back(true);
    host.disks[2].hold(true);
    host.world.submit(0, &mut *host.lane, [make_test_read_bio(0, 8)]);
    assert_eq!(host.poll(), []);
    host.world.now = Nanos::from_millis(1000);
    assert_eq!(host.poll(), [], "it looks once more");
    host.world.now = host.world.now + Nanos(1);
    assert_eq!(host.poll(), [Status::Ok], "the other path serves it");
    assert_eq!((host.disks[1].waiting(), host.disks[2].waiting()), (1, 1), "and the first has it still");
    host.disks[2].hold(false);
    host.suspend(true);
    assert_eq!(host.disks[2].take_log().len(), 1, "nothing goes down while the suspend goes on");
    assert_eq!((host.disks[1].waiting(), host.lane.own_work()), (0, OwnWork::Idle));
    host.resume();
    assert_eq!(host.read(), [Status::Ok]);
}
