//! The lengths of requests: fio's `bs`, `bsrange` and `bssplit`.
//!
//! Each option has up to three values between commas, for reads, writes and trims. One value is for
//! all directions. The second of two values is also for trims. An empty value leaves its direction
//! unchanged.

use rand::rngs::SmallRng;
use rand::{Rng, RngExt};
use std::fmt;
use std::str::FromStr;
use udm_wire::size;

/// Maximum number of sizes in one `bssplit`, as in fio.
const SPLIT_MAX: usize = 64;

/// Number of draws of a size that fits. After that, the smallest size is taken.
const DRAWS: usize = 100;

/// An option with a value per direction, and its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PerDirection<T> {
    text: String,
    /// Values for reads, writes and trims; `None` if the option does not set the direction.
    pub of: [Option<T>; 3],
}

impl<T> fmt::Display for PerDirection<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl<T: FromStr<Err = String> + Clone> FromStr for PerDirection<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<PerDirection<T>, String> {
        let parts: Vec<&str> = text.split(',').collect();
        let part = |i: usize| match parts[i] {
            "" => Ok(None),
            part => part.parse().map(Some),
        };
        let of = match parts.len() {
            1 => [(); 3].map(|()| part(0)),
            2 => [part(0), part(1), part(1)],
            3 => [part(0), part(1), part(2)],
            _ => return Err("more than three parts".into()),
        };
        let [reads, writes, trims] = of;
        let of = [reads?, writes?, trims?];
        if of.iter().all(Option::is_none) {
            return Err("no value".into());
        }
        Ok(PerDirection { text: text.to_owned(), of })
    }
}

/// A length in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteLength(pub u64);

impl FromStr for ByteLength {
    type Err = String;

    fn from_str(text: &str) -> Result<ByteLength, String> {
        parse_nonzero_size(text).map(ByteLength)
    }
}

/// Bytes or requests per second; 0 for no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoRateLimit(pub u64);

impl FromStr for IoRateLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<IoRateLimit, String> {
        size::parse_size_with_unit(text).map(IoRateLimit).map_err(|error| error.to_string())
    }
}

/// A range of lengths: minimum and maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LengthRange(u64, u64);

impl FromStr for LengthRange {
    type Err = String;

    fn from_str(text: &str) -> Result<LengthRange, String> {
        let (min, max) = text.split_once(['-', ':']).ok_or("a range is MIN-MAX")?;
        let (min, max) = (parse_nonzero_size(min)?, parse_nonzero_size(max)?);
        // As in fio, both orders are accepted.
        Ok(LengthRange(min.min(max), min.max(max)))
    }
}

/// Sizes, and the upper bound of the drawn percentage of each, the rarest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LengthSplit(Vec<(u64, u32)>);

impl FromStr for LengthSplit {
    type Err = String;

    fn from_str(text: &str) -> Result<LengthSplit, String> {
        let mut sizes = Vec::new();
        for entry in text.split(':') {
            let (bytes, percent) = entry.split_once('/').unwrap_or((entry, ""));
            sizes.push((parse_nonzero_size(bytes)?, parse_bssplit_percentage(percent)?));
        }
        if sizes.len() > SPLIT_MAX {
            return Err(format!("more than {SPLIT_MAX} sizes"));
        }
        let given: u32 = sizes.iter().filter_map(|(_, percent)| *percent).sum();
        let unsaid = sizes.iter().filter(|(_, percent)| percent.is_none()).count() as u32;
        if given > 100 {
            return Err(format!("percentages of {given} in all"));
        }
        // Sizes without a percentage share the rest of 100.
        let share = (100 - given).checked_div(unsaid).unwrap_or(0);
        let mut split: Vec<_> =
            sizes.into_iter().map(|(size, percent)| (size, percent.unwrap_or(share))).collect();
        split.sort_by_key(|(_, percent)| *percent);
        let mut all = 0;
        for (_, percent) in &mut split {
            all += *percent;
            *percent = all;
        }
        Ok(LengthSplit(split))
    }
}

/// The lengths of the requests of one direction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LengthDistribution {
    pub min: u64,
    pub max: u64,
    /// The split, if the lengths are more than a range.
    split: Option<LengthSplit>,
}

impl LengthDistribution {
    /// Builds the distribution from the options of a direction. A split has precedence over a
    /// range.
    pub fn new(bs: u64, range: Option<LengthRange>, split: Option<&LengthSplit>) -> LengthDistribution {
        if let Some(split) = split {
            let sizes = || split.0.iter().map(|(size, _)| *size);
            let (min, max) = (sizes().min().unwrap_or(bs), sizes().max().unwrap_or(bs));
            return LengthDistribution { min, max, split: Some(split.clone()) };
        }
        let LengthRange(min, max) = range.unwrap_or(LengthRange(bs, bs));
        LengthDistribution { min, max, split: None }
    }

    /// Whether all lengths are multiples of `unit`.
    pub fn are_multiples_of(&self, unit: u64) -> bool {
        self.min.is_multiple_of(unit) && self.max.is_multiple_of(unit)
    }

    /// Draws the next length, at most `room`; `None` if the shortest does not fit. As in fio, the
    /// result is a multiple of the shortest length, or the longest length.
    pub fn draw(&self, room: u64, rng: &mut SmallRng) -> Option<u64> {
        if self.min > room {
            return None;
        }
        if self.min == self.max {
            return Some(self.min);
        }
        let fits = |size: &u64| *size <= room;
        (0..DRAWS).map(|_| self.draw_any(room, rng)).find(fits).or(Some(self.min))
    }

    fn draw_any(&self, room: u64, rng: &mut SmallRng) -> u64 {
        let size = match &self.split {
            None => self.min + ((u128::from(self.max) * u128::from(rng.next_u64())) >> 64) as u64,
            Some(LengthSplit(sizes)) => {
                let drawn = rng.random_range(0..100u32);
                let fits = sizes.iter().find(|(size, up_to)| drawn < *up_to && *size <= room);
                // The last size, which is the most frequent, also gets what the percentages leave
                // of 100.
                fits.or(sizes.last()).map_or(self.min, |(size, _)| *size)
            }
        };
        (size - size % self.min).min(self.max)
    }
}

/// A percentage of a split; `None` if it is empty or 0. fio ignores a fraction, so it reads a value
/// below 1 as 0 and draws it like a size without a percentage. Such a value is refused here.
fn parse_bssplit_percentage(text: &str) -> Result<Option<u32>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(fraction) {
        return Err("a percentage is a number".into());
    }
    let percent = whole.parse::<u32>().map_or(100, |n| n.min(100));
    if percent == 0 && fraction.bytes().any(|b| b != b'0') {
        return Err(format!("a percentage of {text}: less than 1"));
    }
    Ok(Some(percent).filter(|n| *n > 0))
}

fn parse_nonzero_size(text: &str) -> Result<u64, String> {
    match size::parse_size_with_unit(text) {
        Ok(0) => Err("a size of 0".into()),
        Ok(size) => Ok(size),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use std::collections::BTreeMap;

    fn split(text: &str) -> Result<Vec<(u64, u32)>, String> {
        text.parse::<LengthSplit>().map(|split| split.0)
    }

    #[test]
    fn parts_are_for_directions() {
        let of = |text: &str| {
            text.parse::<PerDirection<ByteLength>>().map(|p| p.of.map(|one| one.map_or(0, |one| one.0)))
        };
        assert_eq!(of("4k"), Ok([4096; 3]));
        assert_eq!(of("4k,8k"), Ok([4096, 8192, 8192]));
        assert_eq!(of("4k,8k,512"), Ok([4096, 8192, 512]));
        assert_eq!(of("4k,"), Ok([4096, 0, 0]));
        assert_eq!(of(",8k"), Ok([0, 8192, 8192]));
        assert_eq!(of(",8k,"), Ok([0, 8192, 0]));
        for bad in ["", ",", "4k,8k,4k,4k", "0", "4k,x"] {
            assert!(of(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn ranges_and_splits() {
        assert_eq!("4k-8k".parse(), Ok(LengthRange(4096, 8192)));
        assert_eq!("8k:4k".parse(), Ok(LengthRange(4096, 8192)));
        assert_eq!(split("4k/10:64k/50:32k/40"), Ok(vec![(4096, 10), (32768, 50), (65536, 100)]));
        assert_eq!(split("4k/50:1k/:32k/"), Ok(vec![(1024, 25), (32768, 50), (4096, 100)]));
        assert_eq!(split("4k/0:8k"), Ok(vec![(4096, 50), (8192, 100)]), "0 is no percentage");
        assert_eq!(split("4k/33.3:8k/66.7"), Ok(vec![(4096, 33), (8192, 99)]), "as fio reads it");
        assert_eq!(split("4k/99999999999:8k"), Ok(vec![(8192, 0), (4096, 100)]));
        assert_eq!(split("4k"), Ok(vec![(4096, 100)]));
        for bad in [
            "",
            "4k/x",
            "4k/-1",
            "4k/0.5:8k",
            "4k/1.",
            "4k/.5",
            "4k/1.x",
            "4k/1.2.3",
            "/50",
            "4k/60:8k/60",
            "4k:",
            "0/50",
            "4k/50,8k",
        ] {
            assert!(split(bad).is_err(), "{bad}");
        }
        assert!(split(&["512"; 65].join(":")).is_err());
        assert!("4k".parse::<LengthRange>().is_err() && "4k-".parse::<LengthRange>().is_err());
    }

    /// How often each length is drawn in ten thousand draws.
    fn drawn(sizes: &LengthDistribution, room: u64) -> BTreeMap<u64, u32> {
        let mut rng = SmallRng::seed_from_u64(5);
        let mut counts = BTreeMap::new();
        (0..10_000).for_each(|_| *counts.entry(sizes.draw(room, &mut rng).unwrap()).or_default() += 1);
        counts
    }

    fn near(counts: &BTreeMap<u64, u32>, want: &[(u64, u32)]) {
        assert_eq!(counts.keys().copied().collect::<Vec<_>>(), want.iter().map(|w| w.0).collect::<Vec<_>>());
        for (size, percent) in want {
            assert!(counts[size].abs_diff(percent * 100) < 250, "{size}: {} of 10000", counts[size]);
        }
    }

    #[test]
    fn lengths_come_as_often_as_they_should() {
        let split: LengthSplit = "4k/10:8k/60:16k/20".parse().unwrap();
        let split = LengthDistribution::new(4096, None, Some(&split));
        near(&drawn(&split, u64::MAX), &[(4096, 10), (8192, 70), (16384, 20)]);
        near(&drawn(&split, 8192), &[(4096, 10), (8192, 90)]);
        assert_eq!(drawn(&split, 4096).len(), 1);
        let range = LengthDistribution::new(4096, "4k-16k".parse().ok(), None);
        near(&drawn(&range, u64::MAX), &[(4096, 25), (8192, 25), (12288, 25), (16384, 25)]);
        let uneven = LengthDistribution::new(4096, "4k-10k".parse().ok(), None);
        near(&drawn(&uneven, u64::MAX), &[(4096, 40), (8192, 40), (10240, 20)]);
        assert_eq!(range.draw(4095, &mut SmallRng::seed_from_u64(1)), None);
    }
}
