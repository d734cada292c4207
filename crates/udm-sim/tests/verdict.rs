//! The report of the program: a verdict shows the coverage, and runs that cover nothing fail.

use std::process::Command;

/// Runs the program. Returns its output, and true if it succeeded.
fn sim(args: &[&str]) -> (String, bool) {
    let output = Command::new(env!("CARGO_BIN_EXE_udm-sim")).args(args).output().unwrap();
    (String::from_utf8(output.stdout).unwrap(), output.status.success())
}

/// Returns the number before `what` in the verdict.
fn number(output: &str, what: &str) -> f64 {
    let words: Vec<&str> = output.split([' ', '\n', ',']).filter(|w| !w.is_empty()).collect();
    let at = words.iter().position(|w| *w == what).unwrap_or_else(|| panic!("no {what} in {output}"));
    words[..at].iter().rev().find_map(|w| w.parse().ok()).unwrap()
}

#[test]
fn the_last_seed_is_run_too() {
    let (output, ok) = sim(&["--seed", "18446744073709551615", "--steps", "2000"]);
    assert!(ok && output.starts_with("1 seed, "), "{output}");
    assert!(number(&output, "requests") > 0.0);
}

#[test]
fn a_verdict_says_what_it_covered() {
    let (output, ok) = sim(&["--seeds", "1..9", "--steps", "3000"]);
    let first = output.lines().next().unwrap();
    assert!(ok && first.ends_with(": clean"), "{output}");
    for what in ["read", "write", "flush", "discard", "write-zeroes", "faults", "crashes", "suspends"] {
        assert!(number(&output, what) > 0.0, "{what}: {output}");
    }
    for what in ["multipath", "linear", "striped", "sectors", "rests", "reloads", "messages"] {
        assert!(number(&output, what) > 0.0, "{what}: {output}");
    }
}

#[test]
fn covering_nothing_is_a_failure() {
    let mut idle = 0;
    // The seeds that read nothing in one step change with the worlds.
    for seed in 1..2000 {
        let (output, ok) = sim(&["--steps", "1", "--seed", &seed.to_string()]);
        let nothing = number(&output, "requests") == 0.0 || number(&output, "sectors") == 0.0;
        assert_eq!((ok, output.contains("nothing was tested: ")), (!nothing, nothing), "{output}");
        idle += usize::from(nothing);
        assert!(output.contains("never came: "), "a step is no test: {output}");
        if idle == 2 {
            return;
        }
    }
    panic!("{idle} of them read nothing");
}

#[test]
fn what_was_left_out_is_said() {
    let (output, ok) = sim(&["--seed", "1", "--steps", "2000", "--without", "crash,flush"]);
    assert!(ok && output.lines().next().unwrap().ends_with(": clean, without crash,flush"), "{output}");
    assert_eq!((number(&output, "flush"), number(&output, "crashes")), (0.0, 0.0), "{output}");
    let (output, ok) = sim(&["--seed", "1", "--steps", "500", "--bench", "2"]);
    assert!(ok && output.contains(": measured, with all well") && !output.contains("clean"), "{output}");
}
