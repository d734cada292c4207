//! Opening and closing leaves no descriptor and no thread open. The test has its own program,
//! because it counts those of the process.

use std::fs::{read_dir, read_link};
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};
use udm_conformance::{CASES, DEVICES_UNDER_TEST, DeviceTestRig, WorldKind};

/// Cases that open, close and change devices, and clients that vanish.
const CASES_RUN: [&str; 4] = [
    "life::data_survives_reopen",
    "life::server_stop_answers_requests",
    "life::disconnects_tear_no_write",
    "changes::reload_under_load",
];

fn count(what: &str) -> usize {
    read_dir(format!("/proc/self/{what}")).expect("procfs").count()
}

/// What the descriptors of the process are.
fn descriptors() -> Vec<PathBuf> {
    let all = read_dir("/proc/self/fd").expect("procfs").flatten();
    all.filter_map(|entry| read_link(entry.path()).ok()).collect()
}

/// Numbers of descriptors and threads, once they are at most `before`. The kernel frees a ring and
/// its workers after their owner has continued. After five seconds, the rest counts as leaked.
fn open_now(before: (usize, usize)) -> (usize, usize) {
    let begin = Instant::now();
    loop {
        let now = (count("fd"), count("task"));
        if now.0 <= before.0 && now.1 <= before.1 || begin.elapsed() > Duration::from_secs(5) {
            return now;
        }
        sleep(Duration::from_millis(5));
    }
}

#[test]
fn nothing_is_left_open() {
    let mut before: Option<(usize, usize)> = None;
    let mut subjects: Vec<_> = DEVICES_UNDER_TEST.iter().collect();
    // The first object makes tokio create a pair of sockets for signals, once per process.
    subjects.sort_by_key(|subject| subject.name != "object");
    for subject in subjects {
        for kind in WorldKind::ALL.into_iter().filter(|&kind| subject.unmet_requirement(kind).is_none()) {
            let made = subject.make(kind);
            let cases = CASES.iter().filter(|case| CASES_RUN.contains(&case.name));
            for case in cases.filter(|case| case.unmet_requirement(&made, kind).is_none()) {
                let mut rig = DeviceTestRig::new(subject, kind);
                (case.run)(&mut rig);
                rig.end();
            }
            drop(made);
            let name = format!("{}.{}", subject.name, kind.name());
            let Some(before) = before else {
                // Resources that a process creates once now exist, and all others are freed after a
                // while.
                sleep(Duration::from_millis(500));
                before = Some((count("fd"), count("task")));
                continue;
            };
            let now = open_now(before);
            assert!(
                now.0 <= before.0 && now.1 <= before.1,
                "{name} leaves {now:?} behind, {before:?} before: {:?}",
                descriptors()
            );
        }
    }
}
