//! Limits of a device's requests and bytes per second: `iops=1000 wbps=100M:1G`.
//!
//! A limit is `KEY=RATE` or `KEY=RATE:BURST`. The keys are those of the kernel's `io.max` (cgroup
//! v2), and two for reads and writes together:
//!
//! | key | limits |
//! |---|---|
//! | `iops`, `bps` | all requests; all bytes |
//! | `riops`, `rbps` | reads |
//! | `wiops`, `wbps` | all other requests: writes, discards, zeroing, flushes |
//!
//! BURST is what may pass at once after a pause, in requests or bytes. Its default is what the rate
//! gives in 100 ms, as in QEMU (`throttle_compute_wait`). Bytes have the units of [`crate::size`];
//! requests have none, because 1k of them could be 1000 or 1024. `none` stands for no limit at all.

use crate::size::{SizeError, SizeWithUnit, parse_size_with_unit};
use crate::words::quote_for_error_line;
use std::fmt;
use std::str::FromStr;

/// The largest rate and the largest burst.
pub const AMOUNT_MAX: u64 = (1 << 63) - 1;

/// The longest name of a group, in bytes.
pub const GROUP_NAME_MAX: usize = 127;

/// True for a name that a group of devices may have.
#[must_use]
pub fn is_throttle_group_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= GROUP_NAME_MAX && !name.contains(char::is_control)
}

/// What a limit counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ThrottleKey {
    /// All requests.
    Iops,
    /// Reads.
    Riops,
    /// Requests other than reads.
    Wiops,
    /// Bytes of all requests.
    Bps,
    /// Bytes of reads.
    Rbps,
    /// Bytes of requests other than reads.
    Wbps,
}

impl ThrottleKey {
    /// All keys, in the order in which they are printed.
    pub const ALL: [ThrottleKey; 6] = [
        ThrottleKey::Iops,
        ThrottleKey::Riops,
        ThrottleKey::Wiops,
        ThrottleKey::Bps,
        ThrottleKey::Rbps,
        ThrottleKey::Wbps,
    ];

    /// The word before `=`.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            ThrottleKey::Iops => "iops",
            ThrottleKey::Riops => "riops",
            ThrottleKey::Wiops => "wiops",
            ThrottleKey::Bps => "bps",
            ThrottleKey::Rbps => "rbps",
            ThrottleKey::Wbps => "wbps",
        }
    }

    /// True if the limit counts bytes, false if it counts requests.
    #[must_use]
    pub const fn counts_bytes(self) -> bool {
        matches!(self, ThrottleKey::Bps | ThrottleKey::Rbps | ThrottleKey::Wbps)
    }

    /// True if the limit counts reads.
    #[must_use]
    pub const fn counts_reads(self) -> bool {
        !matches!(self, ThrottleKey::Wiops | ThrottleKey::Wbps)
    }

    /// True if the limit counts requests other than reads.
    #[must_use]
    pub const fn counts_writes(self) -> bool {
        !matches!(self, ThrottleKey::Riops | ThrottleKey::Rbps)
    }
}

/// A rate and its burst, both from 1 to [`AMOUNT_MAX`], in requests or bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThrottleRate {
    /// Requests or bytes per second.
    pub per_second: u64,
    /// Requests or bytes that may pass at once after a pause.
    pub burst: u64,
}

impl ThrottleRate {
    /// The burst of a rate that names none.
    const fn default_burst(per_second: u64) -> u64 {
        let tenth = per_second / 10;
        if tenth == 0 { 1 } else { tenth }
    }
}

/// The limits of a device or of a group of devices; at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThrottleLimits {
    /// In the order of [`ThrottleKey::ALL`].
    rates: [Option<ThrottleRate>; ThrottleKey::ALL.len()],
}

/// Why a text is not a list of limits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ThrottleError {
    /// No limit.
    #[error("no limit is given: iops=1000 or bps=100M, or none for no limit")]
    Empty,
    /// A word without a known key.
    #[error("{0} is not a limit: use iops, riops, wiops, bps, rbps or wbps, as in iops=1000 or wbps=100M:1G")]
    UnknownKey(String),
    /// A key that stands twice.
    #[error("{0} is given twice")]
    Twice(&'static str),
    /// A number of requests that is not a number.
    #[error("{key}: {text} is not a number of requests")]
    Count {
        /// The key.
        key: &'static str,
        /// The text, quoted.
        text: String,
    },
    /// A number of bytes that is not a size.
    #[error("{key}: {error}")]
    Amount {
        /// The key.
        key: &'static str,
        /// What is wrong.
        error: SizeError,
    },
    /// A rate or a burst of 0, or of 2^63 or more.
    #[error("{key}: {amount} is out of range: 1 to 9223372036854775807; leave {key} out for no limit")]
    Range {
        /// The key.
        key: &'static str,
        /// The amount.
        amount: u64,
    },
}

impl ThrottleLimits {
    /// The limits that are set.
    pub fn rates(&self) -> impl Iterator<Item = (ThrottleKey, ThrottleRate)> + '_ {
        ThrottleKey::ALL.into_iter().zip(self.rates).filter_map(|(key, rate)| Some((key, rate?)))
    }
}

/// Reads limits, or `none`.
///
/// # Errors
/// See [`ThrottleError`].
pub fn parse_throttle_limits(text: &str) -> Result<Option<ThrottleLimits>, ThrottleError> {
    if text.trim() == "none" { Ok(None) } else { text.parse().map(Some) }
}

impl FromStr for ThrottleLimits {
    type Err = ThrottleError;

    fn from_str(text: &str) -> Result<ThrottleLimits, ThrottleError> {
        let mut limits = ThrottleLimits { rates: [None; ThrottleKey::ALL.len()] };
        for word in text.split_ascii_whitespace() {
            let known = word.split_once('=').and_then(|(word, value)| {
                let place = ThrottleKey::ALL.iter().position(|key| key.word() == word)?;
                Some((place, value))
            });
            let (place, value) =
                known.ok_or_else(|| ThrottleError::UnknownKey(quote_for_error_line(word)))?;
            let (key, counts_bytes) =
                (ThrottleKey::ALL[place].word(), ThrottleKey::ALL[place].counts_bytes());
            let number = |text: &str| {
                if counts_bytes {
                    return parse_size_with_unit(text).map_err(|error| ThrottleError::Amount { key, error });
                }
                let digits = Some(text).filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
                let count = digits.and_then(|text| text.parse().ok());
                count.ok_or_else(|| ThrottleError::Count { key, text: quote_for_error_line(text) })
            };
            let amount = |text: &str| match number(text)? {
                amount @ 1..=AMOUNT_MAX => Ok(amount),
                amount => Err(ThrottleError::Range { key, amount }),
            };
            let rate = match value.split_once(':') {
                Some((rate, burst)) => ThrottleRate { per_second: amount(rate)?, burst: amount(burst)? },
                None => {
                    let per_second = amount(value)?;
                    ThrottleRate { per_second, burst: ThrottleRate::default_burst(per_second) }
                }
            };
            if limits.rates[place].replace(rate).is_some() {
                return Err(ThrottleError::Twice(key));
            }
        }
        if limits.rates.iter().all(Option::is_none) { Err(ThrottleError::Empty) } else { Ok(limits) }
    }
}

impl fmt::Display for ThrottleLimits {
    /// Prints what [`FromStr`] reads. A default burst is left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (key, rate)) in self.rates().enumerate() {
            let amount = |amount: u64| match key.counts_bytes() {
                true => SizeWithUnit(amount).to_string(),
                false => amount.to_string(),
            };
            write!(f, "{}{}={}", if i > 0 { " " } else { "" }, key.word(), amount(rate.per_second))?;
            if rate.burst != ThrottleRate::default_burst(rate.per_second) {
                write!(f, ":{}", amount(rate.burst))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn limits_are_read_and_printed() {
        for (text, printed) in [
            ("iops=1000", "iops=1000"),
            ("wbps=100M:1G", "wbps=100M:1G"),
            ("  wbps=1M\triops=5:7 ", "riops=5:7 wbps=1M"),
            ("iops=1000:100", "iops=1000"),
            ("iops=3", "iops=3"),
            ("bps=9223372036854775807:1", "bps=9223372036854775807:1"),
        ] {
            let limits: ThrottleLimits = text.parse().unwrap();
            assert_eq!(limits.to_string(), printed, "{text}");
        }
        let burst = |text: &str| text.parse::<ThrottleLimits>().unwrap().rates().next().unwrap().1.burst;
        assert_eq!((burst("iops=1000"), burst("iops=3"), burst("iops=3:9")), (100, 1, 9));
        assert_eq!(parse_throttle_limits(" none\n"), Ok(None));
    }

    #[test]
    fn what_is_no_limit_is_refused() {
        for (text, why) in [
            ("", "no limit is given: iops=1000 or bps=100M, or none for no limit"),
            ("iops", "\"iops\" is not a limit"),
            ("iops 5", "\"iops\" is not a limit"),
            ("IOPS=5", "\"IOPS=5\" is not a limit"),
            ("none iops=5", "\"none\" is not a limit"),
            ("iops=", "iops: \"\" is not a number of requests"),
            ("iops=-1", "iops: \"-1\" is not a number of requests"),
            ("iops=+1", "iops: \"+1\" is not a number of requests"),
            ("iops=1k", "iops: \"1k\" is not a number of requests"),
            ("iops=5:", "iops: \"\" is not a number of requests"),
            ("iops=5:6:7", "iops: \"6:7\" is not a number of requests"),
            ("bps=1M:", "bps: \"\" is not a size"),
            ("iops=0", "iops: 0 is out of range: 1 to 9223372036854775807; leave iops out"),
            ("iops=5:0", "iops: 0 is out of range"),
            ("bps=8E", "bps: 9223372036854775808 is out of range"),
            ("bps=16E", "bps: \"16E\" is too large a size"),
            ("bps=1 bps=1", "bps is given twice"),
        ] {
            let error = parse_throttle_limits(text).unwrap_err().to_string();
            assert!(error.starts_with(why), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read_again(text in "([rw]?(iops|bps)=[0-9]{1,3}[kM]?(:[0-9]{1,3}G?)? ?){1,6}") {
            if let Ok(limits) = text.parse::<ThrottleLimits>() {
                prop_assert_eq!(limits.to_string().parse::<ThrottleLimits>(), Ok(limits));
            }
        }

        #[test]
        fn any_text_is_read_or_refused_in_one_line(text in ".{0,200}") {
            if let Err(error) = parse_throttle_limits(&text) {
                prop_assert!(!error.to_string().contains('\n') && error.to_string().len() < 400);
            }
        }
    }
}
