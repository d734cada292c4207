//! The conformance suite: every case on every device in every world to which it applies, as a test
//! with the name `SUBJECT.WORLD::GROUP::CASE`.
//!
//! Combinations that do not apply are not tests. With `UDM_CONFORMANCE_LIST=1` each of them is
//! printed with the reason. The test `coverage::…` fails if a case, target, selector or kind of
//! backend has too few devices.

use libtest_mimic::{Arguments, Failed, FormatSetting, Trial};
use std::collections::BTreeMap;
use std::io::Write;
use udm_conformance::{CASES, DEVICES_UNDER_TEST, DeviceTestRig, DeviceUnderTest, WorldKind};

/// Minimum number of runs of each case, over all devices and worlds.
const SUBJECTS_MIN: usize = 3;

fn main() {
    let mut args = Arguments::from_args();
    // Thousands of names in the output help nobody.
    if args.format.is_none() && !args.list {
        args.format = Some(FormatSetting::Terse);
    }
    let list = std::env::var_os("UDM_CONFORMANCE_LIST").is_some();
    let mut runs: BTreeMap<&str, usize> = CASES.iter().map(|case| (case.name, 0)).collect();
    let mut trials = Vec::new();
    let mut absent = Vec::new();
    for subject in DEVICES_UNDER_TEST {
        if let Some(why) = WorldKind::ALL.iter().try_fold("", |_, &kind| subject.unmet_requirement(kind)) {
            absent.push(format!("{} (skipped: {why})", subject.name));
            continue;
        }
        for kind in WorldKind::ALL.into_iter() {
            let made = subject.make(kind);
            for case in CASES {
                let missing = subject.unmet_requirement(kind).or_else(|| case.unmet_requirement(&made, kind));
                let name = format!("{}.{}::{}", subject.name, kind.name(), case.name);
                match missing {
                    Some(why) if list => {
                        let _ = writeln!(std::io::stderr(), "{name}: does not apply: {why}");
                    }
                    Some(_) => {}
                    None => {
                        *runs.entry(case.name).or_default() += 1;
                        trials.push(Trial::test(name, move || run(subject, kind, case.run)));
                    }
                }
            }
        }
    }
    let coverage = move |what: fn(&BTreeMap<&str, usize>) -> Vec<String>| {
        let gaps = what(&runs);
        move || if gaps.is_empty() { Ok(()) } else { Err(Failed::from(gaps.join("\n"))) }
    };
    trials.push(Trial::test("coverage::of_cases", coverage(cases)));
    trials.push(Trial::test("coverage::of_parts", coverage(parts)));
    // Devices that this machine does not support are reported as ignored, with the reason in the
    // name.
    trials.extend(absent.into_iter().map(|name| Trial::test(name, || Ok(())).with_ignored_flag(true)));
    libtest_mimic::run(&args, trials).exit();
}

fn run(subject: &DeviceUnderTest, kind: WorldKind, case: fn(&mut DeviceTestRig)) -> Result<(), Failed> {
    let mut rig = DeviceTestRig::new(subject, kind);
    case(&mut rig);
    rig.end();
    Ok(())
}

/// Cases with too few runs.
fn cases(runs: &BTreeMap<&str, usize>) -> Vec<String> {
    let few = runs.iter().filter(|(_, n)| **n < SUBJECTS_MIN);
    few.map(|(name, n)| format!("{name} runs against {n} subjects")).collect()
}

/// Targets, selectors and kinds of devices that no device under test uses.
fn parts(_: &BTreeMap<&str, usize>) -> Vec<String> {
    let words: Vec<&str> = DEVICES_UNDER_TEST.iter().flat_map(|subject| subject.words()).collect();
    let has = |part: &str| words.iter().any(|words| words.split_whitespace().any(|word| word == part));
    let targets = udm_targets::TARGETS.iter().map(|target| target.name);
    let selectors = udm_targets::multipath::selector::SELECTORS.iter().map(|selector| selector.name);
    // The error target serves nothing; the test `faults` covers it.
    let parts = targets.chain(selectors).filter(|&part| part != "error");
    let mut gaps: Vec<String> = parts
        .filter(|part| !has(part))
        .map(|part| format!("{part} has no line in DEVICES_UNDER_TEST"))
        .collect();
    for scheme in [
        "null:", "mem:", "pattern:", "file:", "{file}", "{qcow2}", "{object}", "{loop}", "{nbd}", "{nbds}",
        "{nvme}", "@",
    ] {
        if !words.iter().any(|words| words.contains(scheme)) {
            gaps.push(format!("{scheme} has no line in DEVICES_UNDER_TEST"));
        }
    }
    if !DEVICES_UNDER_TEST.iter().any(DeviceUnderTest::is_throttled) {
        gaps.push("no device with limits in DEVICES_UNDER_TEST".to_owned());
    }
    gaps
}
