//! The list of clones, in columns.

use crate::output::{align_rows, format_bytes};
use udm_control::api;

/// The heads of the columns. The paths are the last ones, since they may be long.
const HEADS: [&str; 9] =
    ["NAME", "STATE", "%", "HYDRATED", "REGIONS", "HYDRATING", "REGION", "DESTINATION", "SOURCE"];

/// The columns of numbers.
const NUMBERS: [usize; 5] = [2, 3, 4, 5, 6];

/// One line per clone, and then one per clone that has not returned, or not completely.
pub(super) fn format_clone_list(clones: &[api::CloneDescription]) -> String {
    let rows = [HEADS.map(String::from)].into_iter().chain(clones.iter().map(format_clone_row));
    let rows: Vec<[String; 9]> = rows.collect();
    let mut text: String = align_rows(&rows, &NUMBERS).iter().map(|line| format!("{line}\n")).collect();
    for clone in clones {
        if let Some(error) = &clone.error {
            text += &format!("{}: {}: {error}\n", clone.name, clone.state);
        }
    }
    text
}

fn format_clone_row(clone: &api::CloneDescription) -> [String; 9] {
    let percent = clone.hydrated_regions as f64 * 100.0 / clone.regions.max(1) as f64;
    [
        clone.name.clone(),
        clone.state.clone(),
        // 100 only if no region is left.
        format!("{:.1}", (percent * 10.0).floor() / 10.0),
        format!("{}/{}", format_bytes(clone.hydrated_bytes), format_bytes(clone.size_bytes)),
        format!("{}/{}", clone.hydrated_regions, clone.regions),
        clone.hydrating_regions.to_string(),
        format_bytes(clone.region_bytes),
        clone.destination.clone(),
        clone.source.clone(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stand_below_their_heads_and_100_percent_means_done() {
        let one = api::CloneDescription {
            name: "vm1".into(),
            source: "nbd://backup/disk".into(),
            destination: "/srv/vm1.img".into(),
            state: "hydrating".into(),
            size_bytes: 1 << 30,
            region_bytes: 64 << 10,
            regions: 16_384,
            hydrated_regions: 16_383,
            hydrated_bytes: (1 << 30) - (64 << 10),
            hydrating_regions: 1,
            ..api::CloneDescription::default()
        };
        let all = [one.clone(), api::CloneDescription { name: "a-long-name".into(), ..one }];
        let lines: Vec<String> = format_clone_list(&all).lines().map(String::from).collect();
        assert_eq!(lines.len(), 3);
        for head in ["STATE", "DESTINATION", "SOURCE"] {
            let at = lines[0].find(head).unwrap();
            assert!(
                lines[1..].iter().all(|line| &line[at - 1..at] == " " && &line[at..=at] != " "),
                "{lines:?}"
            );
        }
        assert!(lines[1].contains(" 99.9 ") && lines[1].contains(" 16383/16384 "), "{lines:?}");
    }
}
