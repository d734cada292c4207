//! The conformance suite can fail: it finds those of the planted bugs (`udm_core::bugs`) that break
//! one of its rules. The other bugs concern details of one target, such as the choice of a path or
//! the content of a log. The simulator finds them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use udm_conformance::{CASES, DEVICES_UNDER_TEST, DeviceTestRig, WorldKind};
use udm_core::bugs::{Bug, plant_bug};

/// The bugs, each with a device that shows it, and the group of cases, or the case, that must fail.
const FOUND_BY: &[(Bug, &str, &str)] = &[
    (Bug::SubmitTwice, "lines", "ranges::"),
    (Bug::SplitLosesTail, "linear_cache", "ranges::every_start_and_length"),
    (Bug::StripeShifted, "lines", "ranges::every_start_and_length"),
    (Bug::ZeroesTooShort, "zero", "ranges::beyond_the_end"),
    (Bug::FlushNotFannedOut, "lines", "flags::flush_is_durable"),
    (Bug::PreflushDropped, "linear_cache", "flags::preflush_is_durable"),
    (Bug::FuaDropped, "linear_no_fua", "flags::fua_is_durable"),
    (Bug::OffsetKeptOnError, "linear", "errors::bad_sector_fails_its_requests"),
    (Bug::PieceErrorLost, "linear", "errors::non_path_errors_pass_unchanged"),
    (Bug::MediumErrorFailsPath, "round_robin", "errors::bad_sector_fails_its_requests"),
    (Bug::PathErrorNotRetried, "round_robin", "paths::path_failures_fail_no_request"),
    (Bug::RetryForgets, "round_robin", "paths::path_failures_fail_no_request"),
    (Bug::StalePathGeneration, "round_robin", "paths::path_failures_fail_no_request"),
    (Bug::HeldBioFails, "round_robin", "paths::requests_wait_for_path"),
    (Bug::NoKick, "round_robin", "paths::requests_wait_for_path"),
    (Bug::SuspendAcksEarly, "linear_cache", "changes::"),
    (Bug::SwapTooEarly, "linear", "changes::reload_under_load"),
    (Bug::ReloadDropsParked, "linear", "changes::reload_under_load"),
    (Bug::OldTableKept, "linear_cache", "changes::loaded_table_takes_effect"),
    (Bug::FlushMissesPage, "null_memory", "flags::flush_is_durable"),
    (Bug::SuperblockNotSent, "log_writes", "life::idle_lane_requests_no_wakeup"),
];

#[test]
fn every_bug_that_breaks_a_rule_is_found() {
    let missed: Vec<_> =
        FOUND_BY.iter().filter(|(bug, subject, group)| !fails(*bug, subject, group)).collect();
    assert!(missed.is_empty(), "not found: {missed:?}");
}

/// Whether a case of `group` fails on `subject` with `bug`, and passes without it.
fn fails(bug: Bug, subject: &str, group: &str) -> bool {
    let subject = DEVICES_UNDER_TEST.iter().find(|s| s.name == subject).expect("a subject of the list");
    let made = subject.make(WorldKind::Stepped);
    let mut cases = CASES.iter().filter(|case| {
        case.name.starts_with(group) && case.unmet_requirement(&made, WorldKind::Stepped).is_none()
    });
    cases.any(|case| {
        let run = |bug: Option<Bug>| {
            plant_bug(bug);
            let result = catch_unwind(AssertUnwindSafe(|| {
                let mut rig = DeviceTestRig::new(subject, WorldKind::Stepped);
                (case.run)(&mut rig);
                rig.end();
            }));
            plant_bug(None);
            result.is_ok()
        };
        !run(Some(bug)) && run(None)
    })
}
