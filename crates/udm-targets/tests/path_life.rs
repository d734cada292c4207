//! The state machine of paths and groups: each state of two paths in two groups, each event, the
//! result and the status that follows.
//!
//! The kernel's functions are in drivers/md/dm-mpath.c: `fail_path`, `reinstate_path`, `bypass_pg`,
//! `switch_pg_num`, `queue_if_no_path`, `multipath_end_io_bio`. These fields of a status line
//! change: the second is 1 until the first read chooses a group; the sixth is the next group. Each
//! group has its state (A active, E enabled, D disabled), and its path's state (A active, F failed)
//! with the failure count. `queueing` stands for the feature of the table.

mod multipath_rig;

use multipath_rig::{MultipathRig, SIZE};
use std::fmt::Write;
use udm_core::Status;
use udm_dm::testing::make_test_read_bio;

/// The states, with the events that lead to them.
const STATES: [(&str, &[&str]); 6] = [
    ("fresh", &[]),
    ("in use", &["read"]),
    ("first failed", &["read", "fail_path /dev/nullb0"]),
    ("both failed", &["read", "fail_path /dev/nullb0", "fail_path /dev/nullb1"]),
    ("first group disabled", &["read", "disable_group 1"]),
    ("both failed, queueing", &["queue_if_no_path", "fail_path /dev/nullb0", "fail_path /dev/nullb1"]),
];

const EVENTS: [&str; 13] = [
    "read",
    "read, path error",
    "read, medium error",
    "fail_path /dev/nullb0",
    "reinstate_path /dev/nullb0",
    "disable_group 1",
    "enable_group 1",
    "switch_group 2",
    "switch_group 3",
    "queue_if_no_path",
    "fail_if_no_path",
    "suspend and resume",
    "suspend and resume, no flush",
];

/// Applies `event`. Returns the result.
fn apply_event(rig: &mut MultipathRig, event: &str) -> String {
    let mut start = |status| {
        rig.bad_second_half(&[0, 1], status);
        rig.start(make_test_read_bio(SIZE / 2, 8));
    };
    match event {
        "read" => start(Status::Ok),
        "read, path error" => start(Status::Transport),
        "read, medium error" => start(Status::Medium),
        "suspend and resume" | "suspend and resume, no flush" => {
            rig.suspend(event.ends_with("no flush"));
            rig.resume();
        }
        message => return rig.message(message).map_or_else(|e| e.to_string(), |()| "done".into()),
    }
    // If a path fails, the read is retried on the next path.
    (0..4).for_each(|_| rig.poll());
    match (event.starts_with("read"), rig.results().pop()) {
        (false, _) => "done".into(),
        (true, None) => "waits".into(),
        (true, Some(Status::Ok)) => "served".into(),
        (true, Some(status)) => format!("fails: {status}"),
    }
}

/// The status line, and whether reads without a path are queued.
fn status_line(rig: &MultipathRig) -> String {
    let queueing = if rig.table().contains("queue_if_no_path") { " queueing" } else { "" };
    format!("{}{queueing}", rig.status().trim())
}

#[test]
fn every_transition() {
    let mut text = String::new();
    for (name, past) in STATES {
        for event in EVENTS {
            let mut rig =
                MultipathRig::new("0 0 2 1 round-robin 0 1 1 /dev/nullb0 1 round-robin 0 1 1 /dev/nullb1 1");
            past.iter().for_each(|event| drop(apply_event(&mut rig, event)));
            if event == EVENTS[0] {
                writeln!(text, "{name}: {}", status_line(&rig)).unwrap();
            }
            let before = status_line(&rig);
            let answer = apply_event(&mut rig, event);
            let after = status_line(&rig);
            let after = if after == before { "same" } else { &after };
            writeln!(text, "  {event:<29} | {answer:<27} | {after}").unwrap();
            // Queued reads complete before the rig is dropped.
            rig.message("fail_if_no_path").expect("it knows the message");
            rig.poll();
        }
    }
    insta::assert_snapshot!(text);
}
