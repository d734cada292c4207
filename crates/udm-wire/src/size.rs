//! Sizes in bytes as in fio and qemu: `512`, `4k`, `4K`, `4KiB`, `1M`, `4G`, `1T`. All units are
//! powers of 1024.
//!
//! A number without a unit counts bytes in every option; so does `512B`. Fractions, signs and
//! sectors are not supported.

use crate::words::quote_for_error_line;
use std::fmt;

/// The reason why a word is not a size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// The word is not a number with an optional unit.
    #[error("{0} is not a size: a number, then K, M, G, T, P or E")]
    Malformed(String),
    /// The size is 2^64 bytes or more.
    #[error("{0} is too large a size")]
    TooLarge(String),
}

const UNITS: &[u8; 6] = b"KMGTPE";

/// Parses a size and returns the bytes. The unit may be lower case and may be followed by `B` or
/// `iB`.
///
/// # Errors
/// Any other text, and a size that exceeds 64 bits.
pub fn parse_size_with_unit(text: &str) -> Result<u64, SizeError> {
    let malformed = || SizeError::Malformed(quote_for_error_line(text));
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    if number.is_empty() {
        return Err(malformed());
    }
    let shift = match *unit.to_ascii_uppercase().as_bytes() {
        [] | [b'B'] => 0,
        [unit] | [unit, b'B'] | [unit, b'I', b'B'] => {
            10 * (1 + UNITS.iter().position(|u| *u == unit).ok_or_else(malformed)?)
        }
        _ => return Err(malformed()),
    };
    let number: u64 = number.parse().map_err(|_| SizeError::TooLarge(quote_for_error_line(text)))?;
    number.checked_mul(1 << shift).ok_or_else(|| SizeError::TooLarge(quote_for_error_line(text)))
}

/// A size that prints in a form that [`parse_size_with_unit`] reads, in the largest unit without
/// remainder: `4K`, `1536`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SizeWithUnit(pub u64);

impl fmt::Display for SizeWithUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = (self.0.trailing_zeros() as usize / 10).min(UNITS.len());
        match units {
            0 => write!(f, "{}", self.0),
            _ if self.0 == 0 => f.write_str("0"),
            n => write!(f, "{}{}", self.0 >> (10 * n), char::from(UNITS[n - 1])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_fio_and_qemu() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("512B", 512),
            ("4k", 4096),
            ("4K", 4096),
            ("4KiB", 4096),
            ("4kb", 4096),
            ("1M", 1 << 20),
            ("4G", 4 << 30),
            ("1T", 1 << 40),
            ("15E", 15 << 60),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size_with_unit(text), Ok(bytes), "{text}");
            assert_eq!(parse_size_with_unit(&SizeWithUnit(bytes).to_string()), Ok(bytes), "{text}");
        }
        assert_eq!(SizeWithUnit(1536).to_string(), "1536");
        assert_eq!(SizeWithUnit(3 << 30).to_string(), "3G");
    }

    #[test]
    fn what_is_no_size() {
        for text in
            ["", "k", "-1", "+1", "1.5G", "2s", "4 k", "4kk", "4iB", "0x10", "4Ki", "4Kß", "4K\u{661}"]
        {
            assert!(matches!(parse_size_with_unit(text), Err(SizeError::Malformed(_))), "{text}");
        }
        for text in ["16E", "18446744073709551616", "99999999999999999999999G", "18014398509481984K"] {
            assert!(matches!(parse_size_with_unit(text), Err(SizeError::TooLarge(_))), "{text}");
        }
    }
}
