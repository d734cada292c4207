//! A boot profile: the parts of a disk in the order in which a machine first read them.
//!
//! ```text
//! # udm boot profile: FIRST BYTE, LENGTH, in the order of the first reads
//! size 1073741824
//! region 65536
//! 0 65536
//! 536870912 131072
//! ```
//!
//! The size is that of the disk, in bytes, and the region is the unit in which reads were recorded.
//! Each other line is a range of bytes. So a profile also fits a clone of the same disk with
//! another region size. Blank lines and lines that begin with `#` are skipped.
//!
//! A clone gets a profile as the words `hydrate_first RUNS` of its table: the numbers of regions,
//! as in `0-3,17` ([`HydrationOrder`]).
//!
//! Contract: pure; the text is hostile input. Bounds: [`TEXT_MAX`] bytes, [`RANGES_MAX`] ranges.

use crate::table::TableLine;
use std::fmt::{self, Write};

/// The longest text, in bytes.
pub const TEXT_MAX: usize = 4 << 20;

/// Maximum number of ranges of a profile, and of runs of a [`HydrationOrder`].
pub const RANGES_MAX: usize = 1 << 16;

/// The name of the word before the runs of regions in a table.
pub const HYDRATE_FIRST: &str = "hydrate_first";

/// Bytes of a sector.
const SECTOR: u64 = 512;

/// A profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BootProfile {
    /// Bytes of the disk.
    pub size: u64,
    /// Bytes of the regions in which reads were recorded.
    pub region: u64,
    /// The ranges, as first byte and length, in the order of the reads. None is empty or beyond
    /// the size.
    pub ranges: Vec<(u64, u64)>,
}

/// The error of a text that is no profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BootProfileError {
    /// Number of the line, from 1; 0 if no line is to blame.
    pub line: usize,
    /// The reason.
    pub reason: String,
}

impl fmt::Display for BootProfileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "boot profile: {}", self.reason),
            line => write!(f, "boot profile: line {line}: {}", self.reason),
        }
    }
}

impl std::error::Error for BootProfileError {}

fn profile_error(line: usize, reason: impl Into<String>) -> BootProfileError {
    BootProfileError { line, reason: reason.into() }
}

fn parse_profile_number(word: &str) -> Option<u64> {
    // `parse` alone would accept a sign.
    word.bytes().all(|byte| byte.is_ascii_digit()).then(|| word.parse().ok())?
}

impl BootProfile {
    /// A profile of regions in the order of their reads. Adjacent ones become a range.
    #[must_use]
    pub fn of_regions(size: u64, region: u64, regions: impl IntoIterator<Item = u64>) -> BootProfile {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for index in regions {
            let start = index.saturating_mul(region);
            let len = region.min(size.saturating_sub(start));
            let is_full = ranges.len() == RANGES_MAX;
            match ranges.last_mut() {
                _ if len == 0 => {}
                Some((first, before)) if *first + *before == start => *before += len,
                _ if is_full => break,
                _ => ranges.push((start, len)),
            }
        }
        BootProfile { size, region, ranges }
    }

    /// Parses a text.
    ///
    /// # Errors
    /// It is too long, a line is no range within the size, or `size` or `region` is missing.
    pub fn parse(text: &str) -> Result<BootProfile, BootProfileError> {
        if text.len() > TEXT_MAX {
            return Err(profile_error(0, format!("longer than {TEXT_MAX} bytes")));
        }
        let (mut size, mut region, mut ranges) = (None, None, Vec::new());
        for (at, line) in text.lines().enumerate() {
            let (at, line) = (at + 1, line.trim());
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let words: Vec<&str> = line.split_ascii_whitespace().take(3).collect();
            match words[..] {
                ["size", value] if size.is_none() => {
                    let value = parse_profile_number(value).filter(|value| *value > 0);
                    size = Some(value.ok_or_else(|| profile_error(at, "expected size BYTES"))?);
                }
                ["region", value] if region.is_none() => {
                    let value = parse_profile_number(value).filter(|value| value.is_power_of_two());
                    region = Some(
                        value.ok_or_else(|| profile_error(at, "expected region BYTES, a power of two"))?,
                    );
                }
                [start, len] => {
                    let size = size.ok_or_else(|| profile_error(at, "size BYTES must come first"))?;
                    let range = parse_profile_number(start).zip(parse_profile_number(len));
                    let (start, len) =
                        range.ok_or_else(|| profile_error(at, "expected FIRST and LENGTH, in bytes"))?;
                    if len == 0 || start.checked_add(len).is_none_or(|end| end > size) {
                        return Err(profile_error(at, format!("the range is empty or beyond {size} bytes")));
                    }
                    if ranges.len() == RANGES_MAX {
                        return Err(profile_error(at, format!("more than {RANGES_MAX} ranges")));
                    }
                    ranges.push((start, len));
                }
                _ => return Err(profile_error(at, "expected FIRST and LENGTH, in bytes")),
            }
        }
        let size = size.ok_or_else(|| profile_error(0, "size BYTES is missing"))?;
        let region = region.ok_or_else(|| profile_error(0, "region BYTES is missing"))?;
        Ok(BootProfile { size, region, ranges })
    }

    /// The regions of `region` bytes that the ranges touch, in their order.
    #[must_use]
    pub fn hydration_order(&self, region: u64) -> HydrationOrder {
        let run = |&(start, len): &(u64, u64)| {
            let first = start / region;
            (first, (start + len - 1) / region - first + 1)
        };
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (first, count) in self.ranges.iter().map(run) {
            match runs.last_mut() {
                // Small ranges within one larger region.
                Some((last, many)) if (*last..=*last + *many).contains(&first) => {
                    *many = (*many).max(first + count - *last);
                }
                _ => runs.push((first, count)),
            }
        }
        HydrationOrder { runs }
    }

    /// Adds `hydrate_first` to a table, which must be one line of a clone of this size.
    ///
    /// # Errors
    /// It is not, or it has these words already.
    pub fn add_to_table(&self, lines: &[TableLine]) -> Result<TableLine, BootProfileError> {
        let [line] = lines else { return Err(profile_error(0, "it needs a table of one clone line")) };
        let region =
            line.args.get(3).and_then(|word| parse_profile_number(word)).filter(|region| *region > 0);
        let region = region.and_then(|sectors| sectors.checked_mul(SECTOR));
        let (Some(region), "clone") = (region, &*line.kind) else {
            return Err(profile_error(0, "it needs a table of one clone line"));
        };
        if line.len.checked_mul(SECTOR) != Some(self.size) {
            let clone = line.len.saturating_mul(SECTOR);
            return Err(profile_error(
                0,
                format!("it is of a disk of {} bytes, and the clone has {clone}", self.size),
            ));
        }
        if line.args.iter().any(|word| word == HYDRATE_FIRST) {
            return Err(profile_error(0, format!("the table has {HYDRATE_FIRST} already")));
        }
        if self.ranges.is_empty() {
            return Ok(line.clone());
        }
        let mut args = line.args.clone();
        // The counts of features and core arguments.
        if args.len() == 4 {
            args.push("0".into());
        }
        let features = parse_profile_number(&args[4]).and_then(|count| usize::try_from(count).ok());
        let core = features.and_then(|count| count.checked_add(5)).filter(|core| *core <= args.len());
        let core = core.ok_or_else(|| profile_error(0, "the feature arguments of the table are wrong"))?;
        if args.len() == core {
            args.push("0".into());
        }
        let count = parse_profile_number(&args[core]).and_then(|count| count.checked_add(2));
        args[core] =
            count.ok_or_else(|| profile_error(0, "the core arguments of the table are wrong"))?.to_string();
        args.extend([HYDRATE_FIRST.to_owned(), self.hydration_order(region).to_string()]);
        Ok(TableLine::new(line.start, line.len, &line.kind, args))
    }
}

/// The text, as [`BootProfile::parse`] reads it.
impl fmt::Display for BootProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "# udm boot profile: FIRST BYTE, LENGTH, in the order of the first reads")?;
        writeln!(f, "size {}\nregion {}", self.size, self.region)?;
        self.ranges.iter().try_for_each(|(start, len)| writeln!(f, "{start} {len}"))
    }
}

/// Runs of regions in the order in which they are hydrated, as a word: `0-3,17`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HydrationOrder {
    /// The first region of each run, and the number of regions, which is not 0.
    pub runs: Vec<(u64, u64)>,
}

impl HydrationOrder {
    /// Parses a word for a clone of `regions` regions.
    ///
    /// # Errors
    /// A run is no number or two, or beyond the end; or there are too many.
    pub fn parse(word: &str, regions: u64) -> Result<HydrationOrder, String> {
        let mut runs = Vec::new();
        for run in word.split(',') {
            let (first, last) = run.split_once('-').unwrap_or((run, run));
            let (Some(first), Some(last)) = (parse_profile_number(first), parse_profile_number(last)) else {
                return Err("expected regions, as in 0-3,17".into());
            };
            if first > last || last >= regions {
                return Err(format!("regions {first} to {last}, and the last one is {}", regions.max(1) - 1));
            }
            if runs.len() == RANGES_MAX {
                return Err(format!("more than {RANGES_MAX} runs of regions"));
            }
            runs.push((first, last - first + 1));
        }
        Ok(HydrationOrder { runs })
    }
}

impl fmt::Display for HydrationOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (first, count)) in self.runs.iter().enumerate() {
            if at > 0 {
                f.write_char(',')?;
            }
            match count {
                0 | 1 => write!(f, "{first}")?,
                _ => write!(f, "{first}-{}", first + count - 1)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::parse_table;
    use proptest::prelude::*;

    #[test]
    fn a_profile_is_read_as_it_was_printed() {
        let profile = BootProfile::of_regions(1_000_448, 4096, [7, 0, 1, 2, 244]);
        assert_eq!(profile.ranges, [(28672, 4096), (0, 12288), (999_424, 1024)]);
        let text = profile.to_string();
        assert_eq!(BootProfile::parse(&text), Ok(profile.clone()));
        assert_eq!(BootProfile::parse(&text.replace('\n', "\r\n\r\n")), Ok(profile.clone()));
        assert_eq!(profile.hydration_order(4096).to_string(), "7,0-2,244");
        assert_eq!(profile.hydration_order(8192).to_string(), "3,0-1,122", "by bytes");
        assert_eq!(profile.hydration_order(65536).to_string(), "0,15");
        assert_eq!(profile.hydration_order(512).to_string(), "56-63,0-23,1952-1953");
    }

    #[test]
    fn wrong_profiles_are_refused_with_their_line() {
        for (text, line, why) in [
            ("", 0, "size BYTES is missing"),
            ("size 8192", 0, "region BYTES is missing"),
            ("size 0", 1, "expected size BYTES"),
            ("size 8192\nregion 3", 2, "a power of two"),
            ("region 4096\n0 1", 2, "size BYTES must come first"),
            ("size 8192\nsize 4096", 2, "expected FIRST"),
            ("size 8192\n0", 2, "expected FIRST"),
            ("size 8192\n0 1 2", 2, "expected FIRST"),
            ("size 8192\n+0 1", 2, "expected FIRST"),
            ("size 8192\n\n8191 2", 3, "beyond 8192 bytes"),
            ("size 8192\n0 0", 2, "empty"),
            ("size 8192\n18446744073709551615 2", 2, "beyond"),
        ] {
            let error = BootProfile::parse(text).unwrap_err();
            assert!(error.line == line && error.reason.contains(why), "{text:?}: {error}");
        }
        let many = format!("size 8192\nregion 4096\n{}", "0 1\n".repeat(RANGES_MAX + 1));
        assert!(BootProfile::parse(&many).unwrap_err().reason.contains("more than 65536"));
        assert!(BootProfile::parse(&"\n".repeat(TEXT_MAX + 1)).is_err());
    }

    proptest! {
        #[test]
        fn any_text(lines in proptest::collection::vec("(size|region|[0-9]{1,20}|-|,|#)( [0-9]{1,20}){0,2}", 0..12)) {
            crate::fuzz::fuzz_boot_profile(lines.join("\n").as_bytes());
        }

        /// The regions of an order cover each range, whatever their size.
        #[test]
        fn an_order_covers_its_ranges(
            ranges in proptest::collection::vec((0..1_000_000_u64, 1..200_000_u64), 1..20),
            shift in 9..21_u32,
        ) {
            let profile = BootProfile { size: 1_200_000, region: 4096, ranges };
            let order = profile.hydration_order(1 << shift);
            for (start, len) in &profile.ranges {
                for region in start >> shift..=(start + len - 1) >> shift {
                    let is_in = |&(first, count): &(u64, u64)| (first..first + count).contains(&region);
                    prop_assert!(order.runs.iter().any(is_in), "{region}: {order}");
                }
            }
            let word = order.to_string();
            prop_assert_eq!(HydrationOrder::parse(&word, 1_200_000_u64.div_ceil(1 << shift)), Ok(order));
        }
    }

    #[test]
    fn runs_of_regions() {
        let order = HydrationOrder::parse("0-3,17,5", 18).unwrap();
        assert_eq!(
            (order.runs.as_slice(), &*order.to_string()),
            (&[(0, 4), (17, 1), (5, 1)][..], "0-3,17,5")
        );
        for word in ["", "1,", "3-1", "18", "0-18", "-1", "1-", "a", "0x1", "1 2"] {
            assert!(HydrationOrder::parse(word, 18).is_err(), "{word}");
        }
    }

    #[test]
    fn a_profile_becomes_words_of_a_table() {
        let profile = BootProfile::of_regions(65536, 4096, [3, 1]);
        let add =
            |table: &str| profile.add_to_table(&parse_table(table).unwrap()).map(|line| line.to_string());
        for (table, wanted) in [
            ("0 128 clone m d s 8", "0 128 clone m d s 8 0 2 hydrate_first 3,1"),
            (
                "0 128 clone m d s 16 1 no_hydration",
                "0 128 clone m d s 16 1 no_hydration 2 hydrate_first 1,0",
            ),
            (
                "0 128 clone m\\ 1 d s 8 0 2 hydration_threshold 9",
                "0 128 clone m\\ 1 d s 8 0 4 hydration_threshold 9 hydrate_first 3,1",
            ),
        ] {
            assert_eq!(add(table).as_deref(), Ok(wanted));
        }
        for table in [
            "0 128 linear d 0",
            "0 136 clone m d s 8",
            "0 128 clone m d s",
            "0 128 clone m d s 8 7",
            "0 128 clone m d s 8 0 x",
            "0 128 clone m d s 8 0 2 hydrate_first 0",
            "0 64 clone m d s 8\n64 64 clone m d s 8",
        ] {
            assert!(add(table).is_err(), "{table}");
        }
    }
}
