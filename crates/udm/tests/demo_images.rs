//! `udm demo images`: a machine that is ready at once, and the same data each time.

mod support;

use serde_json::Value;
use support::{text, udm};

#[test]
fn a_profile_shortens_a_boot_and_a_copy_shortens_it_more() {
    let out = udm(&["demo", "images", "--json"]).output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    let rows = report["rows"].as_array().unwrap();
    let time = |row: usize, key: &str| rows[row][key].as_u64().unwrap();
    let names: Vec<_> = rows.iter().map(|row| row["what"].as_str().unwrap()).take(3).collect();
    assert_eq!(names, ["clone, nothing copied", "clone with a boot profile", "after the copy, as linear"]);
    assert!(time(1, "boot_ns") < time(0, "boot_ns"), "{report}");
    assert!(time(2, "boot_ns") < time(1, "boot_ns"), "{report}");
    assert_eq!(time(2, "requests"), 0, "{report}");
    assert_eq!(report["disks"], 100);
}
