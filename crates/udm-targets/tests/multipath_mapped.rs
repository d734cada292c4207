//! Multipath as the table of a mapped device: messages that let held bios go, paths that are mapped
//! devices.

mod multipath_rig;

use multipath_rig::host::Host;
use std::sync::Arc;
use udm_core::errno::EBUSY;
use udm_core::{DevNo, Status};
use udm_dm::testing::TestIo;
use udm_dm::{MappedDevice, Table};

const REQUEST: &str = "0 32768 multipath 1 queue_if_no_path 0 1 1 round-robin 0 1 0 253:0";

/// A message has the lanes look: the held read goes at once.
#[test]
fn a_message_lets_held_bios_go() {
    let mut host = Host::new(REQUEST);
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

/// A path that is a mapped device can be suspended while it has nothing to do, under a multipath
/// that sends it nothing.
#[test]
fn an_idle_path_can_be_suspended() {
    let mut host = Host::new("0 32768 multipath 2 queue_mode bio 0 1 1 round-robin 0 1 0 253:0");
    let path = MappedDevice::new("p", None, DevNo { major: 254, minor: 1 }).unwrap();
    let lines = udm_wire::table::parse("0 32768 linear 253:1 0").unwrap();
    path.load(Table::build(udm_targets::TARGETS, &lines, &mut host.resolver, &TestIo::new(), 1).unwrap())
        .unwrap();
    let change = path.resume(Arc::new(|| {})).unwrap();
    host.finish(change);
    host.resolver.add("/dev/mapper/p", path.number(), path.clone());
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
