//! Injected faults of a null device, by null_blk's parameters, and its speed limit.

use crate::words::quote_for_error_line;
use std::fmt;

/// Maximum number of bad ranges of a device.
const RANGES_MAX: usize = 512;

/// The largest value of `mbps` (null_blk clamps it).
const MBPS_MAX: u64 = 1024 * 40;

/// Injected faults of a null device; none by default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NullFaults {
    /// Maximum throughput in MiB per second; 0 (the default) for no limit.
    pub mbps: u32,
    /// Sectors that cannot be read or written: first and last of each range, in order, with gaps
    /// between.
    pub badblocks: Vec<(u64, u64)>,
    /// Requests that get no completion and time out after 5 s.
    pub timeout: FaultAttr,
    /// Requests that find no resources and are requeued.
    pub requeue: FaultAttr,
    /// Hardware queues whose setup fails.
    pub init_hctx: FaultAttr,
}

/// How often a fault occurs: the kernel's fault attributes `interval,probability,space,times`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultAttr {
    /// Only each `interval`th chance counts; 0 and 1 mean all.
    pub interval: u64,
    /// Percentage of the counted chances at which the fault occurs; 0, the default, is never.
    pub probability: u64,
    /// Chances that are skipped first, plus 1; 0 and 1 skip none.
    pub space: i32,
    /// Maximum number of faults; -1 for no limit.
    pub times: i32,
}

impl Default for FaultAttr {
    fn default() -> FaultAttr {
        FaultAttr { interval: 1, probability: 0, space: 0, times: -1 }
    }
}

impl FaultAttr {
    fn parse(name: &str, text: &str) -> Result<FaultAttr, String> {
        let wrong =
            || format!("{name}={} is not INTERVAL,PROBABILITY,SPACE,TIMES", quote_for_error_line(text));
        let mut words = text.split(',');
        let mut next = || words.next().filter(|word| !word.starts_with('+')).ok_or_else(wrong);
        let counted = |word: &str| word.parse().map_err(|_| wrong());
        let (interval, probability) = (counted(next()?)?, counted(next()?)?);
        let space = next()?.parse().ok().filter(|n| *n >= 0).ok_or_else(wrong)?;
        let times = next()?.parse().ok().filter(|n| *n >= -1).ok_or_else(wrong)?;
        if words.next().is_some() {
            return Err(wrong());
        }
        Ok(FaultAttr { interval, probability, space, times })
    }
}

impl fmt::Display for FaultAttr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FaultAttr { interval, probability, space, times } = self;
        write!(f, "{interval},{probability},{space},{times}")
    }
}

impl NullFaults {
    /// Parameters whose value contains commas.
    pub(super) const LISTS: [&str; 3] = ["timeout", "requeue", "init_hctx"];

    /// True if no fault is configured.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == NullFaults::default()
    }

    /// Sets the parameter `name`. Returns its name, or `None` if it is not a fault parameter.
    pub(super) fn set(&mut self, name: &str, value: &str) -> Result<Option<&'static str>, String> {
        Ok(Some(match name {
            "mbps" => {
                let digits = !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit());
                let number = value.parse().ok().filter(|n: &u64| digits && *n <= u64::from(u32::MAX));
                let number = number.ok_or_else(|| {
                    format!("mbps={} is not a number of MiB a second", quote_for_error_line(value))
                })?;
                self.mbps = number.min(MBPS_MAX) as u32;
                "mbps"
            }
            "badblocks" => {
                self.change_bad(value)?;
                "badblocks"
            }
            "timeout" => {
                self.timeout = FaultAttr::parse(name, value)?;
                "timeout"
            }
            "requeue" => {
                self.requeue = FaultAttr::parse(name, value)?;
                "requeue"
            }
            "init_hctx" => {
                self.init_hctx = FaultAttr::parse(name, value)?;
                "init_hctx"
            }
            _ => return Ok(None),
        }))
    }

    /// `+A-B` marks the sectors A to B as bad, `-A-B` as good.
    fn change_bad(&mut self, text: &str) -> Result<(), String> {
        let number = |word: &str| word.parse().ok().filter(|_| word.bytes().all(|b| b.is_ascii_digit()));
        let range = text.get(1..).and_then(|range| range.split_once('-'));
        let range = range.and_then(|(first, last)| Some((number(first)?, number(last)?)));
        let range: Option<(u64, u64)> = range.filter(|(first, last)| first <= last);
        let (Some((first, last)), Some(sign @ ('+' | '-'))) = (range, text.chars().next()) else {
            let text = quote_for_error_line(text);
            return Err(format!("badblocks={text} is neither +FIRST-LAST, to add sectors, nor -FIRST-LAST"));
        };
        let mut left = Vec::new();
        for (from, to) in self.badblocks.drain(..) {
            left.extend((from < first).then(|| (from, to.min(first.wrapping_sub(1)))));
            left.extend((to > last).then(|| (from.max(last.wrapping_add(1)), to)));
        }
        left.extend((sign == '+').then_some((first, last)));
        left.sort_unstable();
        for (from, to) in left {
            match self.badblocks.last_mut() {
                Some((_, end)) if end.checked_add(1) == Some(from) => *end = to,
                _ => self.badblocks.push((from, to)),
            }
        }
        if self.badblocks.len() > RANGES_MAX {
            return Err(format!("badblocks: there are more than {RANGES_MAX} ranges"));
        }
        Ok(())
    }
}

/// Prints the parameters that differ from the defaults, each after a comma.
impl fmt::Display for NullFaults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.mbps > 0 {
            write!(f, ",mbps={}", self.mbps)?;
        }
        self.badblocks.iter().try_for_each(|(first, last)| write!(f, ",badblocks=+{first}-{last}"))?;
        let all = [("timeout", self.timeout), ("requeue", self.requeue), ("init_hctx", self.init_hctx)];
        let set = all.into_iter().filter(|(_, injection)| *injection != FaultAttr::default());
        set.into_iter().try_for_each(|(name, injection)| write!(f, ",{name}={injection}"))
    }
}
