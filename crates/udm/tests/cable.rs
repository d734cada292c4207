//! `udm demo cable`: no request fails in any part, and no block is wrong.

mod support;

use serde_json::Value;
use support::{has, text, udm};

#[test]
fn no_request_fails_and_no_block_is_wrong() {
    if !has("nbdkit") || !has("fio") {
        return;
    }
    let out = udm(&["demo", "cable", "--json"]).output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    let parts: Value = serde_json::from_slice(&out.stdout).unwrap();
    let parts = parts.as_array().unwrap();
    let whats: Vec<_> = parts.iter().map(|part| part["what"].as_str().unwrap()).collect();
    let expected = [
        "nothing is lost",
        "a server is stopped for 1 s",
        "the same, with hedged reads",
        "a server is killed",
        "both are killed for 1 s",
    ];
    assert_eq!(whats[..expected.len()], expected);
    if whats.len() == expected.len() {
        support::report_skip("a server that is cut off from the network: that needs root");
    }
    for part in parts {
        assert_eq!(part["udm"]["is_well"], true, "{part}");
        assert!(part["udm"]["requests"].as_u64().unwrap() > 0, "{part}");
    }
    // The fault is real: without udm, fio fails.
    assert_eq!(parts[3]["plain"]["is_well"], false);
}
