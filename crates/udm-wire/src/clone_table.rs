//! The line of a `clone` table as its parts, so that a program can change one of them.
//!
//! ```text
//! START LEN clone METADATA DESTINATION SOURCE REGION [#FEATURES ...] [#CORE-ARGUMENTS ...]
//! ```
//!
//! Contract: pure. Lines that the target accepts are read; the target checks the values.

use crate::boot_profile::HYDRATE_FIRST;
use crate::table::TableLine;

/// The parts of a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CloneTableLine {
    /// First sector of the mapped device that the clone maps.
    pub start: u64,
    /// Number of sectors.
    pub len: u64,
    /// The words of the metadata, the destination and the source, in this order.
    pub devices: [String; 3],
    /// The region size in sectors, as written.
    pub region: String,
    /// Regions are not hydrated in the background.
    pub no_hydration: bool,
    /// Discards are not passed to the destination.
    pub no_discard_passdown: bool,
    /// Maximum number of regions that are hydrated at a time; `None` for the default.
    pub threshold: Option<u64>,
    /// Number of adjacent regions that are copied together; `None` for the default.
    pub batch: Option<u64>,
    /// The regions that are hydrated before the others.
    pub hydrate_first: Option<String>,
}

impl CloneTableLine {
    /// Reads a table of one `clone` line; `None` for any other table, and for words that the target
    /// refuses.
    #[must_use]
    pub fn of_table(lines: &[TableLine]) -> Option<CloneTableLine> {
        let [line] = lines else { return None };
        let ([metadata, destination, source, region, rest @ ..], "clone") = (&*line.args, &*line.kind) else {
            return None;
        };
        let mut parsed = CloneTableLine {
            start: line.start,
            len: line.len,
            devices: [metadata.clone(), destination.clone(), source.clone()],
            region: region.clone(),
            no_hydration: false,
            no_discard_passdown: false,
            threshold: None,
            batch: None,
            hydrate_first: None,
        };
        let (features, rest) = split_counted_words(rest)?;
        for word in features {
            match word.to_ascii_lowercase().as_str() {
                "no_hydration" => parsed.no_hydration = true,
                "no_discard_passdown" => parsed.no_discard_passdown = true,
                _ => return None,
            }
        }
        let (core, rest) = split_counted_words(rest)?;
        for pair in core.chunks(2) {
            let [name, value] = pair else { return None };
            match name.to_ascii_lowercase().as_str() {
                "hydration_threshold" => parsed.threshold = Some(value.parse().ok()?),
                "hydration_batch_size" => parsed.batch = Some(value.parse().ok()?),
                HYDRATE_FIRST => parsed.hydrate_first = Some(value.clone()),
                _ => return None,
            }
        }
        rest.is_empty().then_some(parsed)
    }

    /// The line.
    #[must_use]
    pub fn to_line(&self) -> TableLine {
        let mut words = self.devices.to_vec();
        words.push(self.region.clone());
        let features: Vec<&str> = [
            self.no_hydration.then_some("no_hydration"),
            self.no_discard_passdown.then_some("no_discard_passdown"),
        ]
        .into_iter()
        .flatten()
        .collect();
        words.push(features.len().to_string());
        words.extend(features.into_iter().map(String::from));
        let core: Vec<[String; 2]> = [
            ("hydration_threshold", self.threshold.map(|value| value.to_string())),
            ("hydration_batch_size", self.batch.map(|value| value.to_string())),
            (HYDRATE_FIRST, self.hydrate_first.clone()),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some([name.to_owned(), value?]))
        .collect();
        words.push((2 * core.len()).to_string());
        words.extend(core.into_iter().flatten());
        TableLine::new(self.start, self.len, "clone", words)
    }
}

/// Splits a group of words from the front, which begins with their number; empty if there is none.
fn split_counted_words(words: &[String]) -> Option<(&[String], &[String])> {
    let Some((count, rest)) = words.split_first() else { return Some((&[], &[])) };
    rest.split_at_checked(count.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::parse_table;

    fn line(words: &str) -> Option<CloneTableLine> {
        CloneTableLine::of_table(&parse_table(&format!("0 128 {words}")).unwrap())
    }

    #[test]
    fn a_line_is_its_parts() {
        for (words, same) in [
            ("clone m d s 8", "clone m d s 8 0 0"),
            ("clone m\\ 1 d s 8 1 No_Hydration", "clone m\\ 1 d s 8 1 no_hydration 0"),
            (
                "clone m d s 8 2 no_discard_passdown no_hydration 6 hydrate_first 3,1 Hydration_Batch_Size 7 hydration_threshold 9",
                "clone m d s 8 2 no_hydration no_discard_passdown 6 hydration_threshold 9 hydration_batch_size 7 hydrate_first 3,1",
            ),
        ] {
            let parsed = line(words).unwrap();
            assert_eq!(parsed.to_line().to_string(), format!("0 128 {same}"));
            assert_eq!(line(same), Some(parsed));
        }
        let paused = CloneTableLine { no_hydration: true, ..line("clone m d s 8").unwrap() };
        assert_eq!(paused.to_line().to_string(), "0 128 clone m d s 8 1 no_hydration 0");
    }

    #[test]
    fn other_lines_are_none() {
        for words in [
            "linear d 0",
            "clone m d s",
            "clone m d s 8 x",
            "clone m d s 8 1",
            "clone m d s 8 1 hydrate",
            "clone m d s 8 0 1 hydration_threshold",
            "clone m d s 8 0 2 hydration_threshold x",
            "clone m d s 8 0 2 other 1",
            "clone m d s 8 0 0 more",
            "clone m d s 8 18446744073709551615",
        ] {
            assert_eq!(line(words), None, "{words}");
        }
        let two = parse_table("0 8 clone m d s 8\n8 8 clone m d s 8").unwrap();
        assert_eq!(CloneTableLine::of_table(&two), None);
    }

    /// Changes of lines at random places keep what [`crate::fuzz::fuzz_clone_table`] checks.
    #[test]
    fn changed_lines_are_read_as_they_are_written() {
        let seeds = [
            "0 128 clone m d s 8 2 no_hydration no_discard_passdown 6 hydration_threshold 9 hydration_batch_size 7 hydrate_first 3,1",
            "0 128 clone /m.clone file:/d\\ 1?direct=on https://h/x?etag=1 128 0 2 hydration_threshold 64",
        ];
        let mut state = 1u64;
        let mut draw = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        let mut read = 0;
        for n in 0..5000 {
            let mut bytes = seeds[n % seeds.len()].as_bytes().to_vec();
            for _ in 0..draw(3) {
                let at = draw(bytes.len());
                match draw(3) {
                    0 => bytes[at] = b" 0123456789clone\\_\"\n\xff"[draw(21)],
                    1 => drop(bytes.remove(at)),
                    _ => bytes.insert(at, b" 19\\"[draw(4)]),
                }
            }
            crate::fuzz::fuzz_clone_table(&bytes);
            read += usize::from(
                parse_table(&String::from_utf8_lossy(&bytes))
                    .is_ok_and(|lines| CloneTableLine::of_table(&lines).is_some()),
            );
        }
        assert!((1000..5000).contains(&read), "{read} of 5000 were lines of clones");
    }
}
