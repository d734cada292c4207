//! What is opened and closed leaves no descriptor and no thread behind. One test in a program of its own, because it counts those of the process.

use std::fs::read_dir;
use udm_conformance::{CASES, Kind, Rig, SUBJECTS};

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

#[test]
fn nothing_is_left_open() {
    let mut before = None;
    for subject in SUBJECTS {
        for kind in Kind::ALL.into_iter().filter(|&kind| subject.missing(kind).is_none()) {
            let made = subject.make(kind);
            let cases = CASES.iter().filter(|case| CASES_RUN.contains(&case.name));
            for case in cases.filter(|case| case.missing(&made, kind).is_none()) {
                let mut rig = Rig::new(subject, kind);
                (case.run)(&mut rig);
                rig.end();
            }
            drop(made);
            let now = (count("fd"), count("task"));
            let name = format!("{}.{}", subject.name, kind.name());
            assert_eq!(now, *before.get_or_insert(now), "descriptors and threads behind {name}");
        }
    }
}
