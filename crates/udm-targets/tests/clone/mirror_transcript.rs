//! Tables of mirrors, as a kernel accepts, prints and refuses them (`data/mirror_transcript.txt`).

use crate::rig::SnapshotRig;
use udm_core::errno::{EINVAL, ENOENT};

const TRANSCRIPT: &str = include_str!("../data/mirror_transcript.txt");

/// What udm does not do as the kernel, with the reason.
const DIFFERENCES: [(&str, &str); 7] = [
    (" 3 /dev/vda", "udm has two devices"),
    (" 9 /dev/vda", "udm has two devices"),
    ("core 1 2 2", "regions have 8 sectors at least, as those of a clone"),
    ("core 1 4 2", "regions have 8 sectors at least, as those of a clone"),
    ("/dev/vda 0 /dev/vda 0", "a device would be copied over itself"),
    ("disk 2 /dev/none", "udm says that there is no such device"),
    ("/dev/vdb 40000", "udm says so when it parses the line, and not when it stacks the limits"),
];

/// A recorded table: what follows it up to the next one.
struct RecordedTable {
    table: String,
    lines: Vec<String>,
}

fn recorded() -> Vec<RecordedTable> {
    let mut all: Vec<RecordedTable> = Vec::new();
    for line in TRANSCRIPT.lines().filter(|line| !line.starts_with('#')) {
        match (line.strip_prefix("T "), all.last_mut()) {
            (Some(table), _) => all.push(RecordedTable { table: table.into(), lines: Vec::new() }),
            (None, Some(last)) => last.lines.push(line.into()),
            (None, None) => panic!("{line}"),
        }
    }
    all
}

/// The number of regions that are copied is that of a moment.
fn without_progress(status: &str) -> String {
    let word = |word: &str| word.split_once('/').map_or(word.to_owned(), |(_, total)| format!("/{total}"));
    status.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

/// A line of udm with the kernel's device numbers.
fn with_numbers(line: &str) -> String {
    let number = |word: &str| match word {
        "1:0" => "254:0".into(),
        "1:1" => "254:16".into(),
        "1:2" => "254:32".into(),
        other => other.to_owned(),
    };
    line.split(' ').map(number).collect::<Vec<_>>().join(" ")
}

#[test]
fn tables_are_accepted_printed_and_refused_as_by_a_kernel() {
    let (mut compared, mut differences) = (0, Vec::new());
    for RecordedTable { table, lines } in recorded() {
        let mut host = SnapshotRig::new(1);
        for disk in ["/dev/vda", "/dev/vdb", "/dev/vdc"] {
            host.disk(disk, 8192);
        }
        let is_different = DIFFERENCES.iter().position(|(words, _)| table.contains(words));
        let outcome = match host.build(&table).map(drop) {
            Err(error) => Err((error.text.trim_start_matches("mirror: ").to_owned(), error.errno)),
            Ok(()) => {
                host.create("c", &table).unwrap();
                let front = table.split(' ').take(3).collect::<Vec<_>>().join(" ");
                let print =
                    |line: String| without_progress(&with_numbers(format!("{front} {line}").trim_end()));
                Ok((print(host.table_of("c")), print(host.status("c"))))
            }
        };
        let expected = match lines.first().map(String::as_str) {
            Some("OK") => Ok((without_progress(&lines[1]), without_progress(&lines[2]))),
            _ => {
                let line = lines.iter().find_map(|line| line.split_once("mirror: "));
                let (text, errno) = line.and_then(|(_, text)| text.rsplit_once(" (-")).unwrap_or_default();
                let errno = if errno.starts_with("ENOENT") { ENOENT } else { EINVAL };
                Err((text.to_owned(), errno))
            }
        };
        match is_different {
            Some(at) => {
                assert_ne!(outcome, expected, "{table}: no difference");
                differences.push(at);
            }
            None => assert_eq!(outcome, expected, "{table}"),
        }
        compared += 1;
    }
    differences.sort_unstable();
    differences.dedup();
    assert!(compared > 50 && differences.len() == DIFFERENCES.len(), "{compared} {differences:?}");
}
