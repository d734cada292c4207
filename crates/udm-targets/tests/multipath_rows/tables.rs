//! Tables that a kernel accepts: their printed form, and the status of the initial state.

use super::multipath_rig::{MultipathRig, build, disks};
use udm_core::Status;
use udm_dm::testing::{TestControlIo, TestDeviceNameResolver};
use udm_dm::{Table, Target};

/// Asserts that a table is accepted and printed as `table`, with the initial status `status`, and
/// that the printed table prints the same.
fn assert_accepted(params: &str, table: &str, status: &str) {
    for params in [params, table] {
        let target = build(params, &mut disks(4).1).unwrap_or_else(|error| panic!("{params}: {error}"));
        assert_eq!((target.table().as_str(), target.status().as_str()), (table, status), "{params}");
    }
}

/// Builds a table of any length, as a load does, and prints it.
fn print_loaded(text: &str, resolver: &mut TestDeviceNameResolver) -> String {
    let lines = udm_wire::table::parse_table(text).expect("a table");
    Table::build(udm_targets::TARGETS, &lines, resolver, &TestControlIo::new(), 4).expect("accepted").text()
}

#[test]
fn t01_round_robin() {
    let table = "0 0 1 1 round-robin 0 1 1 253:0 1 ";
    assert_accepted("0 0 1 1 round-robin 0 1 1 253:0 1", table, "2 1 0 0 1 1 E 0 1 0 253:0 A 0 ");
}

#[test]
fn t02_queue_length() {
    let table = "0 0 1 1 queue-length 0 1 1 253:0 1 ";
    assert_accepted("0 0 1 1 queue-length 0 1 1 253:0 1", table, "2 1 0 0 1 1 E 0 1 1 253:0 A 0 0 ");
}

#[test]
fn t03_service_time() {
    let table = "0 0 1 1 service-time 0 1 2 253:0 1 1 ";
    assert_accepted("0 0 1 1 service-time 0 1 2 253:0 1 1", table, "2 1 0 0 1 1 E 0 1 2 253:0 A 0 0 1 ");
}

#[test]
fn t04_defaults_are_printed() {
    let table = "0 0 1 1 service-time 0 1 2 253:0 1 1 ";
    assert_accepted("0 0 1 1 service-time 0 1 0 253:0", table, "2 1 0 0 1 1 E 0 1 2 253:0 A 0 0 1 ");
}

#[test]
fn t05_no_arguments_a_path() {
    let table = "0 0 1 1 round-robin 0 2 1 253:0 1 253:1 1 ";
    assert_accepted(
        "0 0 1 1 round-robin 0 2 0 253:0 253:1",
        table,
        "2 1 0 0 1 1 E 0 2 0 253:0 A 0 253:1 A 0 ",
    );
}

#[test]
fn t06_repeat_counts_are_one() {
    let table = "0 0 1 1 round-robin 0 1 1 253:0 1 ";
    assert_accepted("0 0 1 1 round-robin 0 1 1 253:0 1000", table, "2 1 0 0 1 1 E 0 1 0 253:0 A 0 ");
}

#[test]
fn t08_features_in_request_mode() {
    let groups = "0 2 1 queue-length 0 2 1 253:0 1 253:1 1 queue-length 0 2 1 253:2 1 253:3 1";
    assert_accepted(
        &format!("4 queue_if_no_path retain_attached_hw_handler queue_mode mq {groups}"),
        &format!("2 queue_if_no_path retain_attached_hw_handler {groups} "),
        "2 1 0 0 2 1 E 0 2 1 253:0 A 0 0 253:1 A 0 0 E 0 2 1 253:2 A 0 0 253:3 A 0 0 ",
    );
}

#[test]
fn t09_bio_mode() {
    let table = "3 retain_attached_hw_handler queue_mode bio 0 1 1 round-robin 0 1 1 253:0 1 ";
    assert_accepted(
        "2 queue_mode bio 0 1 1 round-robin 0 1 1 253:0 1",
        table,
        "2 1 0 0 1 1 E 0 1 0 253:0 A 0 ",
    );
}

#[test]
fn t10_features_have_an_order() {
    assert_accepted(
        "5 pg_init_delay_msecs 0 queue_if_no_path pg_init_retries 3 0 1 1 round-robin 0 1 1 253:0 1",
        "5 queue_if_no_path pg_init_retries 3 pg_init_delay_msecs 0 0 1 1 round-robin 0 1 1 253:0 1 ",
        "2 1 0 0 1 1 E 0 1 0 253:0 A 0 ",
    );
}

#[test]
fn t11_as_many_features_as_there_are() {
    assert_accepted(
        "8 queue_if_no_path retain_attached_hw_handler pg_init_retries 5 pg_init_delay_msecs 100 queue_mode bio \
         0 1 1 round-robin 0 1 1 253:0 1",
        "8 queue_if_no_path pg_init_retries 5 pg_init_delay_msecs 100 retain_attached_hw_handler queue_mode bio \
         0 1 1 round-robin 0 1 1 253:0 1 ",
        "2 1 0 0 1 1 E 0 1 0 253:0 A 0 ",
    );
}

#[test]
fn t13_a_feature_said_twice() {
    assert_accepted(
        "2 queue_if_no_path queue_if_no_path 0 1 1 round-robin 0 1 1 253:0 1",
        "1 queue_if_no_path 0 1 1 round-robin 0 1 1 253:0 1 ",
        "2 1 0 0 1 1 E 0 1 0 253:0 A 0 ",
    );
}

#[test]
fn t14_no_groups() {
    assert_accepted("0 0 0 0", "0 0 0 0 ", "2 1 0 0 0 0 ");
    let mut rig = MultipathRig::new("0 0 0 0");
    assert_eq!(rig.read(), Status::IoErr);
    assert_eq!(rig.status(), "2 0 0 0 0 0 ");
}

#[test]
fn t15_a_first_group_that_there_is_not() {
    let table = "0 0 1 1 round-robin 0 1 1 253:0 1 ";
    assert_accepted("0 0 1 2 round-robin 0 1 1 253:0 1", table, "2 1 0 0 1 1 E 0 1 0 253:0 A 0 ");
}

#[test]
fn t16_groups_with_selectors_of_their_own() {
    let params = "0 0 2 2 round-robin 0 1 1 253:0 1 service-time 0 1 2 253:1 1 7";
    assert_accepted(params, &format!("{params} "), "2 1 0 0 2 2 E 0 1 0 253:0 A 0 E 0 1 2 253:1 A 0 0 7 ");
    assert_eq!(MultipathRig::new(params).order(1), [1], "the second group is the first to be used");
}

#[test]
fn t18_a_device_twice() {
    let params = "0 0 1 1 round-robin 0 2 1 253:0 1 253:0 1";
    assert_accepted(params, &format!("{params} "), "2 1 0 0 1 1 E 0 2 0 253:0 A 0 253:0 A 0 ");
}

#[test]
fn t19_historical_service_time() {
    assert_accepted(
        "0 0 1 1 historical-service-time 2 1023 20 1 1 253:0 500",
        "0 0 1 1 historical-service-time 2 1023 20 1 1 253:0 0 ",
        "2 1 0 0 1 1 E 2 1023 20 1 3 253:0 A 0 1024 0 0 ",
    );
}

#[test]
fn t20_io_affinity() {
    let params = "0 0 1 1 io-affinity 0 2 1 253:0 3 253:1 6";
    assert_accepted(params, &format!("{params} "), "2 1 0 0 1 1 E 0 2 1 253:0 A 0 0 253:1 A 0 0 ");
}

#[test]
fn t22_shorter_than_its_paths() {
    let text = "0 1000 multipath 0 0 1 1 round-robin 0 1 1 253:0 1 ";
    assert_eq!(print_loaded(text, &mut disks(1).1), text);
}

/// `recorded_tables` does this for the recorded tables; this test for those of this file.
#[test]
fn t23_what_is_printed_is_a_table() {
    let text = "0 32768 multipath 5 queue_if_no_path pg_init_retries 3 pg_init_delay_msecs 0 0 2 2 queue-length 0 1 1 \
                253:0 1 io-affinity 0 2 1 253:1 3 253:2 c ";
    let printed = print_loaded(text, &mut disks(4).1);
    assert_eq!(printed, text);
    assert_eq!(print_loaded(&printed, &mut disks(4).1), text);
}
