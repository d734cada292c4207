//! Path maintenance of multipath devices, and its file `multipath.conf`.
//!
//! Words and defaults are those of multipath-tools (multipath.conf(5)), as far as they apply here;
//! docs/multipath.md lists them. A key that udm does not know, or that has no effect, gives a
//! warning with its line. An invalid value or an unmatched brace refuses the file.
//!
//! The order of precedence for a device: its own `multipath` section, found by `alias` or by `wwid`
//! (the name or uuid of the device); then `overrides`; then `defaults`.

pub mod grouping;
mod keys;
mod parser;
#[cfg(test)]
mod tests;

pub use grouping::{Grouping, GroupingPolicy};

use keys::SectionKeys;
use udm_core::Nanos;

/// The longest file that is read, in bytes.
pub const CONF_MAX: usize = 1 << 20;

/// The most `multipath` sections.
const MAPS_MAX: usize = 4096;

/// The most warnings that are kept; what is over is counted.
const WARNINGS_MAX: usize = 100;

/// The latest that a check is answered, in seconds: what multipathd has where the kernel's own
/// time-out of a SCSI disk counts.
const CHECKER_TIMEOUT: u64 = 30;

/// The seconds between checks of a path in the first place, multipathd's.
const POLLING_INTERVAL: u64 = 5;

/// How many times that is the most, while a path works.
const MAX_OF_INTERVAL: u64 = 4;

/// What is done for the paths of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct MultipathSettings {
    /// From one check of a path to the next: the first time, behind every change, and while it is
    /// down.
    pub polling_interval: Nanos,
    /// What that doubles up to while the path works.
    pub max_polling_interval: Nanos,
    /// A check that takes longer has failed.
    pub checker_timeout: Nanos,
    /// What becomes of requests while there is no path; `None` leaves it to table and messages.
    pub no_path_retry: Option<NoPathRetry>,
    /// When the best group is gone back to.
    pub failback: Failback,
    /// What a path is worth.
    pub prio: Prio,
    /// Which paths are held back because they keep failing.
    pub marginal: Option<MarginalPolicy>,
    /// How a device is made from paths.
    pub grouping: Grouping,
}

/// `no_path_retry`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPathRetry {
    /// Requests fail at once.
    Fail,
    /// They wait.
    Queue,
    /// They wait for so many polling intervals.
    Checks(u32),
}

/// `failback`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failback {
    /// Never: messages do it.
    Manual,
    /// As soon as it is better.
    Immediate,
    /// When it has been better for so long.
    After(Nanos),
    /// When its first path comes back: hosts that share a disk then don't take it from each other.
    Followover,
}

/// `prio`, with `prio_args`. A higher one is better.
#[derive(Clone, Debug, PartialEq)]
pub enum Prio {
    /// 1, each.
    Const,
    /// By the path's name: that of the first pattern which fits, else 0.
    Weighted(Vec<(String, u32)>),
    /// By the time that its last checks took, on a scale of logarithms.
    Latency {
        /// How many checks count.
        checks: u32,
        /// Latencies that differ by this factor differ in priority.
        base: f64,
    },
}

/// The `marginal_path_*` keys: two failures in a short time, and a path has to show over a longer
/// one that its errors are few.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarginalPolicy {
    /// Two failures within so long make it suspicious.
    pub double_failed_time: Nanos,
    /// For so long it is read from then.
    pub err_sample_time: Nanos,
    /// More errors of 1000 than this, and it stays out.
    pub err_rate_threshold: u32,
    /// For so long; then it is sampled anew.
    pub err_recheck_gap_time: Nanos,
}

impl Prio {
    /// `prio` with its `prio_args`.
    ///
    /// # Errors
    /// What they want instead, in one line.
    pub fn named(name: &str, args: Option<&str>) -> Result<Prio, String> {
        if name == "weightedpath" && args.is_none() {
            return Err("prio weightedpath wants prio_args: patterns and priorities".into());
        }
        let mut keys = SectionKeys::default();
        for (key, value) in [("prio", Some(name)), ("prio_args", args)] {
            let Some(value) = value else { continue };
            match keys.set(key, value) {
                Ok(keys::KeyOutcome::Ignored(why)) => {
                    return Err(format!("{key} {}: {why}", keys::shown(value)));
                }
                Err(why) => return Err(format!("{key} {why}")),
                Ok(_) => {}
            }
        }
        Ok(keys.settings(None).prio)
    }
}

impl MultipathSettings {
    /// The defaults, with checks `seconds` apart.
    #[must_use]
    pub fn every(seconds: u64) -> MultipathSettings {
        SectionKeys::default().settings(Some(seconds))
    }
}

/// True when `name` is what `pattern` stands for, in which `*` is any text and `?` any character.
#[must_use]
pub fn matches_pattern(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    // Where the last star stands, and how much of the name it has taken so far.
    let (mut p, mut n, mut star) = (0, 0, None);
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(&c) if c == '?' || c == name[n] => (p, n) = (p + 1, n + 1),
            _ => match star {
                Some((at, taken)) => {
                    star = Some((at, taken + 1));
                    (p, n) = (at + 1, taken + 1);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&c| c == '*')
}

/// A `multipath.conf`, read.
#[derive(Clone, Debug, Default)]
pub struct Conf {
    defaults: SectionKeys,
    overrides: SectionKeys,
    maps: Vec<MultipathSection>,
    /// What is ignored, and what is missing, a line each.
    pub warnings: Vec<String>,
}

/// A `multipath` section.
#[derive(Clone, Debug, Default)]
struct MultipathSection {
    wwid: Option<String>,
    alias: Option<String>,
    keys: SectionKeys,
}

impl Conf {
    /// Reads a file's text.
    ///
    /// # Errors
    /// What is wrong first, with its line, in one line.
    pub fn parse(text: &str) -> Result<Conf, String> {
        parser::parse(text)
    }

    /// What it says for the device of this name and uuid; without a word of it, checks are `every`
    /// so many seconds.
    #[must_use]
    pub fn settings(&self, name: &str, uuid: Option<&str>, every: Option<u64>) -> MultipathSettings {
        let is = |word: &Option<String>| word.as_deref().is_some_and(|w| w == name || Some(w) == uuid);
        let own = self.maps.iter().find(|map| is(&map.wwid) || is(&map.alias));
        let own = own.map(|map| map.keys.clone()).unwrap_or_default();
        own.or(self.overrides.clone()).or(self.defaults.clone()).settings(every)
    }
}
