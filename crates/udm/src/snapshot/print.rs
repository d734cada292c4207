//! Snapshots as a table for people.

use crate::output::{align_rows, format_bytes};
use udm_control::api;

/// The heads of the columns.
const HEADS: [&str; 11] =
    ["NAME", "ORIGIN", "TYPE", "CHUNK", "USED", "TOTAL", "MAX", "%", "STATE", "AGE", "STORE"];

/// Sizes of at least this many bytes are shown as unlimited.
const END: u64 = 1 << 62;

/// The columns of numbers.
const NUMBERS: [usize; 6] = [3, 4, 5, 6, 7, 9];

/// Prints one line per snapshot. The store is the last column, since a path may be long.
pub(super) fn format_snapshot_list(all: &[api::SnapshotDescription]) -> String {
    let rows = [HEADS.map(String::from)].into_iter().chain(all.iter().map(format_snapshot_list_row));
    let rows: Vec<[String; 11]> = rows.collect();
    let mut out: String = align_rows(&rows, &NUMBERS).iter().map(|line| format!("{line}\n")).collect();
    for (snapshot, why) in all.iter().filter_map(|snapshot| Some((snapshot, snapshot.why.as_ref()?))) {
        out.push_str(&format!("! {}: {}: {why}\n", snapshot.name, snapshot.state));
    }
    out
}

fn format_snapshot_list_row(one: &api::SnapshotDescription) -> [String; 11] {
    // A store that grows without limit has no maximum.
    let max = one.max_bytes.filter(|max| *max < END);
    let full = max.unwrap_or(one.total_bytes).max(one.total_bytes);
    let percent = one.used_bytes as f64 * 100.0 / full.max(1) as f64;
    [
        one.name.clone(),
        if one.origin.is_empty() { one.disk.clone() } else { one.origin.clone() },
        one.kind.clone(),
        format_bytes(one.chunk_bytes),
        format_bytes(one.used_bytes),
        format_bytes(one.total_bytes),
        match (max, one.max_bytes) {
            (Some(max), _) => format_bytes(max),
            (None, Some(_)) => "any".into(),
            (None, None) => "-".into(),
        },
        format!("{percent:.1}"),
        one.state.clone(),
        one.age_ns.map_or_else(|| "-".into(), |age| age_text(age / 1_000_000_000)),
        one.store.clone(),
    ]
}

fn age_text(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..86400 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stand_below_their_heads() {
        let one = api::SnapshotDescription {
            name: "monday".into(),
            origin: "disk".into(),
            kind: "P".into(),
            state: "active".into(),
            store: "/srv/monday.cow".into(),
            chunk_bytes: 4096,
            used_bytes: 16384,
            total_bytes: 1 << 20,
            max_bytes: Some(4 << 20),
            age_ns: Some(125_000_000_000),
            ..api::SnapshotDescription::default()
        };
        let text = format_snapshot_list(&[one]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2);
        for head in ["NAME", "ORIGIN", "TYPE", "STATE", "STORE"] {
            let at = lines[0].find(head).unwrap();
            assert!(at == 0 || lines[1].as_bytes()[at - 1] == b' ', "{text}");
            assert_ne!(lines[1].as_bytes()[at], b' ', "{text}");
        }
        let cells: Vec<&str> = lines[1].split_whitespace().collect();
        assert_eq!(cells[..3], ["monday", "disk", "P"]);
        assert_eq!(cells[7..], ["0.4", "active", "2m", "/srv/monday.cow"]);
    }
}
