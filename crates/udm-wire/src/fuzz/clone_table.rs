//! Lines of clones.

use super::decode_lossy_utf8;
use crate::clone_table::CloneTableLine;
use crate::table::parse_table;

/// Lines of clones: [`CloneTableLine`]. A line that is read is written as one that reads the same,
/// and so is one with changed parts.
pub fn fuzz_clone_table(data: &[u8]) {
    let Ok(lines) = parse_table(&decode_lossy_utf8(data)) else { return };
    let Some(line) = CloneTableLine::of_table(&lines) else { return };
    let read = |line: &CloneTableLine| {
        let lines = parse_table(&line.to_line().to_string()).expect("a written line");
        CloneTableLine::of_table(&lines).expect("a line of a clone")
    };
    assert_eq!(read(&line), line);
    let devices = [" ", "a b\\", "\u{e4}"].map(String::from);
    let changed = CloneTableLine { devices, no_hydration: !line.no_hydration, threshold: Some(1), ..line };
    assert_eq!(read(&changed), changed);
}
