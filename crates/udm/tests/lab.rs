//! `udm lab`: every experiment runs and prints its findings. Figures are asserted only for
//! simulated paths, which are the same on every machine.

use serde_json::Value;
use std::process::{Command, Output};

fn lab(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_udm")).arg("lab").args(args).output().expect("udm runs")
}

fn stdout(out: &Output) -> String {
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

#[test]
fn all_are_listed() {
    let list = stdout(&lab(&["list"]));
    for name in
        ["lockless", "context-switches", "io-affinity", "snapshot", "ornl", "selectors", "growth", "fio"]
    {
        assert!(list.lines().any(|line| line.split_whitespace().next() == Some(name)), "{name}: {list}");
    }
    let unknown = lab(&["run", "nothing"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("selectors"), "it says what there is");
    // A path below a file cannot be created on any machine.
    let nowhere = lab(&["run", "--html", "/proc/self/cmdline/lab.html"]);
    assert_eq!(
        (nowhere.status.code(), nowhere.stdout.len()),
        (Some(1), 0),
        "said before anything is measured"
    );
}

/// The findings of `experiment`: name, value here, and value of the original.
fn findings(experiment: &Value) -> Vec<(&str, f64, Option<f64>)> {
    let all = experiment["findings"].as_array().expect("findings");
    let of = |f: &'_ Value| (f["here"].as_f64().expect("a ratio"), f["original"].as_f64());
    all.iter().map(|f| (f["what"].as_str().expect("text"), of(f).0, of(f).1)).collect()
}

#[test]
fn all_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let page = folder.path().join("lab.html");
    let out = lab(&["run", "--quick", "--json", "--html", page.to_str().expect("UTF-8")]);
    let output: Value = serde_json::from_str(&stdout(&out)).expect("JSON");
    assert!(output["machine"]["cpus"].as_u64() >= Some(1));
    let experiments = output["experiments"].as_array().expect("experiments");
    let names: Vec<&str> = experiments.iter().map(|e| e["name"].as_str().expect("a name")).collect();
    assert_eq!(
        names,
        ["lockless", "context-switches", "io-affinity", "snapshot", "ornl", "selectors", "growth", "fio"]
    );
    for experiment in experiments {
        let found = findings(experiment);
        // The experiment fio needs the engine.
        assert_eq!(found.is_empty(), experiment["name"] == "fio", "{experiment:#}");
        assert!(found.iter().all(|(_, here, _)| here.is_finite()), "{found:?}");
    }
    let page = std::fs::read_to_string(page).expect("the page");
    for name in names {
        assert!(page.contains(&format!("<h2>{name}</h2>")), "{name}");
    }
    assert!(page.matches("<svg").count() >= 10, "plots");
    assert!(page.contains("Not an optimised build") == cfg!(debug_assertions));
}

#[test]
fn selectors_do_as_they_should() {
    let output: Value = serde_json::from_str(&stdout(&lab(&["run", "selectors", "--json"]))).expect("JSON");
    let experiment = &output["experiments"][0];
    for finding in experiment["findings"].as_array().expect("findings") {
        assert_ne!(finding["verdict"], "missed", "{finding:#}");
    }
    // By theory: with paths of 10,000 and 1,000 requests/s, round-robin has twice the rate of the
    // slower path.
    let found = findings(experiment);
    let (_, share, _) = found
        .iter()
        .find(|(name, ..)| *name == "10 times slower, depth 32: round-robin, share of the ideal")
        .expect("round-robin");
    assert!((share - 2.0 / 11.0).abs() < 0.01, "{share}");
    let text = stdout(&lab(&["run", "selectors"]));
    assert!(text.contains("selectors: How does each selector handle paths that are slow"), "{text}");
}

/// The experiment fio runs if its engine was built.
#[test]
fn fio_runs_where_there_is_an_engine() {
    let out = lab(&["run", "fio", "--json"]);
    let output: Value = serde_json::from_str(&stdout(&out)).expect("JSON");
    let note = output["experiments"][0]["notes"][0].as_str().expect("a note");
    assert!(note.contains("make fio-engine"), "{note}");
    let out = lab(&["run", "fio", "--quick", "--fio-engine", "/dev/null"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&out.stderr).contains("lab: fio"), "{out:?}");
}
