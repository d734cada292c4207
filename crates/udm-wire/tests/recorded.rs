//! Parses tables as dmsetup does: compared with recordings of the real program.

use udm_wire::table;

/// A text, with the targets that dmsetup passed to the kernel, or dmsetup's message.
struct RecordedTable {
    text: String,
    targets: Vec<String>,
    error: Option<String>,
}

fn cases() -> Vec<RecordedTable> {
    let mut cases: Vec<RecordedTable> = Vec::new();
    for line in include_str!("data/dmsetup-tables.txt").lines().filter(|line| !line.starts_with('#')) {
        let (key, value) = line.split_once(' ').unwrap();
        let value: String = serde_json::from_str(value).unwrap();
        match key {
            "text" => cases.push(RecordedTable { text: value, targets: Vec::new(), error: None }),
            "target" => cases.last_mut().unwrap().targets.push(value),
            "error" => cases.last_mut().unwrap().error = Some(value),
            _ => panic!("{line}"),
        }
    }
    cases
}

#[test]
fn tables_read_as_dmsetup_reads_them() {
    let cases = cases();
    assert!(cases.len() > 20, "the recording is missing");
    for RecordedTable { text, targets, error } in cases {
        match (table::parse_table(&text), error) {
            (Err(ours), Some(theirs)) => assert_eq!(ours.in_table("on stdin"), theirs, "{text:?}"),
            (Ok(lines), None) => {
                assert_eq!(lines.len(), targets.len(), "{text:?}");
                for (line, target) in lines.iter().zip(targets) {
                    let (head, args) = target.strip_suffix(']').unwrap().split_once("] [").unwrap();
                    assert_eq!(format!("{} {} [{}", line.start, line.len, line.kind), head, "{text:?}");
                    assert_eq!(
                        line.args,
                        args.split_ascii_whitespace().flat_map(|w| w.split('\u{b}')).collect::<Vec<_>>()
                    );
                }
            }
            (ours, theirs) => panic!("{text:?}: {ours:?}, dmsetup: {theirs:?}"),
        }
    }
}
