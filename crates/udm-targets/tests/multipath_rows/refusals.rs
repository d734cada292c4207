//! Tables that a kernel refuses, with its texts; no device stays open.

use super::multipath_rig::host::MappedRig;
use super::multipath_rig::{SIZE, build, disks};
use std::sync::Arc;
use udm_core::DevNo;
use udm_core::errno::{EINVAL, ENOENT, ENXIO};
use udm_dm::testing::{TestControlIo, TestDeviceNameResolver};
use udm_dm::{MappedDevice, Table, TargetError};

const ONE: &str = "0 1 1 round-robin 0 1 1 253:0 1";

/// Asserts that the tables are refused with EINVAL and `text`, and that no disk is open or held
/// afterwards.
fn refused(all: &[&str], text: &str) {
    for params in all {
        let (disks, mut resolver) = disks(4);
        let error = build(params, &mut resolver).err().unwrap_or_else(|| panic!("{params}: accepted"));
        assert_eq!((error.errno, error.text), (EINVAL, format!("multipath: {text}")), "{params}");
        drop(resolver);
        assert!(disks.iter().all(|disk| Arc::strong_count(disk) == 1), "{params}: a disk is held");
    }
}

fn load_table(text: &str, resolver: &mut TestDeviceNameResolver) -> Result<Arc<Table>, TargetError> {
    let lines = udm_wire::table::parse_table(text).expect("the syntax is good");
    Table::build(udm_targets::TARGETS, &lines, resolver, &TestControlIo::new(), 4)
}

#[test]
fn x01_more_features_than_there_are() {
    refused(
        &[&format!("9 queue_if_no_path a b c d e f g h {ONE}"), "", "x", "2 queue_if_no_path"],
        "invalid number of feature args",
    );
}

#[test]
fn x02_features_that_are_none() {
    refused(
        &[&format!("1 bogus {ONE}"), &format!("1 pg_init_retries {ONE}")],
        "Unrecognised multipath feature request",
    );
}

#[test]
fn x03_retries_out_of_range() {
    let text = "pg_init_retries must be between 1 and 50";
    refused(&[&format!("2 pg_init_retries 0 {ONE}"), &format!("2 pg_init_retries 51 {ONE}")], text);
}

#[test]
fn x04_a_delay_out_of_range() {
    let text = "pg_init_delay_msecs must be between 0 and 60000";
    refused(&[&format!("2 pg_init_delay_msecs 60001 {ONE}")], text);
}

#[test]
fn x06_a_first_group_without_groups_and_the_other_way_round() {
    refused(&["0 0 0 1", "0 0 1 0 round-robin 0 1 1 253:0 1"], "invalid initial priority group");
}

#[test]
fn x07_other_groups_than_announced() {
    let two = "0 0 1 1 round-robin 0 1 1 253:0 1 round-robin 0 1 1 253:1 1";
    refused(&["0 0 2 1 round-robin 0 1 1 253:0 1", two, "0 0 1 1"], "priority group count mismatch");
}

#[test]
fn x08_a_selector_that_is_none() {
    let other = ["0 0 1 1 nosuch 0 1 1 253:0 1", "0 0 1 1 Round-Robin 0 1 1 253:0 1"];
    refused(&other, "unknown path selector type");
}

#[test]
fn x09_fewer_paths_than_announced() {
    refused(&["0 0 1 1 round-robin 0 0 1"], "invalid number of paths");
    refused(&["0 0 1 1 round-robin 0 2 1 253:0 1"], "not enough path parameters");
}

#[test]
fn x10_arguments_of_round_robin() {
    refused(&["0 0 1 1 round-robin 0 1 2 253:0 1 1"], "round-robin ps: incorrect number of arguments");
    refused(&["0 0 1 1 round-robin 0 1 1 253:0 x"], "round-robin ps: invalid repeat count");
}

#[test]
fn x11_arguments_of_service_time() {
    let text = "service-time ps: invalid relative_throughput value";
    refused(&["0 0 1 1 service-time 0 1 2 253:0 1 101"], text);
    refused(&["0 0 1 1 service-time 0 1 3 253:0 1 1 1"], "service-time ps: incorrect number of arguments");
}

/// The error marks the argument that the selector refuses, or the first surplus one.
#[test]
fn the_argument_that_a_selector_refuses_is_marked() {
    for (args, word) in [("2 1024 0", 6), ("2 972 4294967296", 7), ("3 972 0 7", 8)] {
        let params = format!("0 0 1 1 historical-service-time {args} 1 1 253:0 1");
        let error = build(&params, &mut disks(1).1).err().unwrap_or_else(|| panic!("{params}: accepted"));
        assert_eq!(error.text, "multipath: path selector constructor failed");
        assert_eq!(error.word, Some(word), "{params}");
    }
}

#[test]
fn x13_masks_that_are_none() {
    let masks = ["0xf", "10", "zz"].map(|mask| format!("0 0 1 1 io-affinity 0 1 1 253:0 {mask}"));
    refused(&masks.each_ref().map(String::as_str), "io-affinity ps: invalid cpumask");
}

#[test]
fn x14_masks_without_a_core_of_their_own() {
    let none = ["0 0 1 1 io-affinity 0 1 1 253:0 0", "0 0 1 1 io-affinity 0 2 1 253:0 3 253:1 2"];
    refused(&none, "io-affinity ps: No new/valid CPU mapping found");
    refused(&["0 0 1 1 io-affinity 0 1 0 253:0"], "io-affinity ps: invalid number of arguments");
}

#[test]
fn x15_a_device_that_is_missing() {
    for (path, errno) in [("/dev/nullb9", ENOENT), ("252:0", ENXIO)] {
        let params = format!("0 0 1 1 round-robin 0 1 1 {path} 1");
        let error = build(&params, &mut disks(1).1).err().expect("refused");
        assert_eq!((error.errno, error.text.as_str()), (errno, "multipath: error getting device"), "{path}");
    }
}

#[test]
fn x17_beside_another_target() {
    let multipath = "multipath 0 0 1 1 round-robin 0 1 1 253:0 1";
    for (text, says) in [
        (
            format!("0 1024 {multipath}\n1024 1024 linear 253:1 0"),
            "target type multipath must appear alone in table",
        ),
        (
            format!("0 1024 linear 253:1 0\n1024 1024 {multipath}"),
            "multipath: singleton target type must appear alone in table",
        ),
    ] {
        let error = load_table(&text, &mut disks(2).1).err().expect("refused");
        assert_eq!((error.errno, error.text.as_str()), (EINVAL, says));
    }
}

#[test]
fn x18_request_mode_over_a_device_that_takes_bios() {
    let mut host = MappedRig::new("0 32768 linear 253:0 0");
    let linear = Arc::clone(&host.device);
    host.resolver.add("/dev/mapper/p", DevNo { major: 254, minor: 9 }, linear as Arc<MappedDevice>);
    let mut load = |features: &str| {
        let text = format!("0 {SIZE} multipath {features} 0 1 1 round-robin 0 1 1 /dev/mapper/p 1");
        load_table(&text, &mut host.resolver).map(|table| table.text())
    };
    let error = load("0").expect_err("refused");
    let says = "table load rejected: including non-request-stackable devices";
    assert_eq!((error.errno, error.text.as_str()), (EINVAL, says));
    load("2 queue_mode bio").expect("accepted");
}

#[test]
fn x19_what_may_replace_a_live_table() {
    const REQUEST: &str = "0 32768 multipath 0 0 1 1 round-robin 0 1 1 253:0 1";
    const BIO: &str = "0 32768 multipath 2 queue_mode bio 0 1 1 round-robin 0 1 1 253:0 1";
    for (table, other) in [(REQUEST, BIO), (BIO, REQUEST)] {
        let mut host = MappedRig::new(table);
        for refused in [other, "0 32768 linear 253:1 0"] {
            assert_eq!(host.load(refused).expect_err("refused").errno, EINVAL, "{refused}");
        }
        host.load(table).expect("accepted");
        host.load("0 32768 error").expect("accepted");
    }
}
