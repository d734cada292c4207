//! Options with a value per direction: lengths and rates.
//!
//! There are up to three values between commas, for reads, writes and trims. One value is for all
//! directions. The second of two values is also for trims. An empty value leaves its direction
//! unchanged.

use std::fmt;
use std::str::FromStr;
use udm_wire::size;

/// An option with a value per direction, and its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PerDirectionOption<T> {
    text: String,
    /// Values for reads, writes and trims; `None` if the option does not set the direction.
    pub of: [Option<T>; 3],
}

impl<T> fmt::Display for PerDirectionOption<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl<T: FromStr<Err = String> + Clone> FromStr for PerDirectionOption<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<PerDirectionOption<T>, String> {
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
        Ok(PerDirectionOption { text: text.to_owned(), of })
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

    #[test]
    fn parts_are_for_directions() {
        let of = |text: &str| {
            text.parse::<PerDirectionOption<ByteLength>>().map(|p| p.of.map(|one| one.map_or(0, |one| one.0)))
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
}
