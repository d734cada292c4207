//! What is opened and closed leaves no descriptor and no thread behind. One test in a program of
//! its own, because it counts those of the process.

use std::fs::read_dir;
use std::thread::sleep;
use std::time::{Duration, Instant};
use udm_conformance::{CASES, DEVICES_UNDER_TEST, TestRig, WorldKind};

/// Cases that open, close, change and vanish.
const CASES_RUN: [&str; 4] = [
    "life::closed_and_opened",
    "life::ends_under_load",
    "life::clients_vanish",
    "changes::reload_under_load",
];

fn count(what: &str) -> usize {
    read_dir(format!("/proc/self/{what}")).expect("procfs").count()
}

/// Descriptors and threads, once there are no more of them than `before`: the kernel takes a ring
/// and its workers apart when their owner has gone on. Those that are still there after five
/// seconds are left behind.
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
    for subject in DEVICES_UNDER_TEST {
        for kind in WorldKind::ALL.into_iter().filter(|&kind| subject.missing(kind).is_none()) {
            let made = subject.make(kind);
            let cases = CASES.iter().filter(|case| CASES_RUN.contains(&case.name));
            for case in cases.filter(|case| case.missing(&made, kind).is_none()) {
                let mut rig = TestRig::new(subject, kind);
                (case.run)(&mut rig);
                rig.end();
            }
            drop(made);
            let name = format!("{}.{}", subject.name, kind.name());
            let Some(before) = before else {
                // What a process makes once and keeps is there now, and nothing else after a while.
                sleep(Duration::from_millis(500));
                before = Some((count("fd"), count("task")));
                continue;
            };
            let now = open_now(before);
            assert!(
                now.0 <= before.0 && now.1 <= before.1,
                "{name} leaves {now:?} behind, {before:?} before"
            );
        }
    }
}
