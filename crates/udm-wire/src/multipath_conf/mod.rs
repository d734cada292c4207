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

pub use grouping::{GroupingPolicy, MultipathTableOptions};

use keys::MultipathSectionKeys;
use udm_core::Nanos;

/// The longest accepted file, in bytes.
pub const CONF_MAX: usize = 1 << 20;

/// Maximum number of `multipath` sections.
const MAPS_MAX: usize = 4096;

/// Maximum number of warnings that are kept; further ones are only counted.
const WARNINGS_MAX: usize = 100;

/// Timeout of a check, in seconds. multipathd uses the kernel's timeout of a SCSI disk, which is
/// the same.
const CHECKER_TIMEOUT: u64 = 30;

/// Initial seconds between checks of a path, as in multipathd.
const POLLING_INTERVAL: u64 = 5;

/// The default maximum interval is this multiple of the initial one.
const MAX_OF_INTERVAL: u64 = 4;

/// Maintenance settings for the paths of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct MultipathSettings {
    /// Interval between checks at first, after every change, and while the path is down.
    pub polling_interval: Nanos,
    /// The interval doubles up to this value while the path works.
    pub max_polling_interval: Nanos,
    /// A check that takes longer fails.
    pub checker_timeout: Nanos,
    /// Handling of requests while there is no path; `None` leaves it to table and messages.
    pub no_path_retry: Option<NoPathRetry>,
    /// When requests return to the best group.
    pub failback: Failback,
    /// How the priority of a path is determined.
    pub prio: PathPrioritizer,
    /// Rule for paths that keep failing and are held back.
    pub marginal: Option<MarginalPathPolicy>,
    /// How a device is created from paths.
    pub grouping: MultipathTableOptions,
}

/// `no_path_retry`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPathRetry {
    /// Requests fail at once.
    Fail,
    /// Requests are queued.
    Queue,
    /// Requests are queued for this number of polling intervals.
    Checks(u32),
}

/// `failback`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failback {
    /// Never; a message can do it.
    Manual,
    /// As soon as another group is better.
    Immediate,
    /// When another group has been better for this time.
    After(Nanos),
    /// When the first path of the best group is reinstated. So hosts sharing a disk do not switch
    /// groups against each other.
    Followover,
}

/// `prio`, with `prio_args`. A higher priority is better.
#[derive(Clone, Debug, PartialEq)]
pub enum PathPrioritizer {
    /// Priority 1 for each path.
    Const,
    /// By the path's name: the priority of the first pattern that matches, else 0.
    Weighted(Vec<(String, u32)>),
    /// By the latency of the last checks, on a logarithmic scale.
    Latency {
        /// Number of checks that count.
        checks: u32,
        /// Latencies that differ by this factor differ by one in priority.
        base: f64,
    },
}

/// The `marginal_path_*` keys. After two failures in a short time, a path must show over a longer
/// time that it has few errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarginalPathPolicy {
    /// Two failures within this time make a path suspicious.
    pub double_failed_time: Nanos,
    /// A suspicious path is sampled by reads for this time.
    pub err_sample_time: Nanos,
    /// If more than this number of 1000 reads fail, the path stays failed.
    pub err_rate_threshold: u32,
    /// The path stays failed for this time; then it is sampled again.
    pub err_recheck_gap_time: Nanos,
}

impl PathPrioritizer {
    /// Parses `prio` with its `prio_args`.
    ///
    /// # Errors
    /// The accepted values, in one line.
    pub fn named(name: &str, args: Option<&str>) -> Result<PathPrioritizer, String> {
        if name == "weightedpath" && args.is_none() {
            return Err("prio weightedpath needs prio_args: patterns and priorities".into());
        }
        let mut keys = MultipathSectionKeys::default();
        for (key, value) in [("prio", Some(name)), ("prio_args", args)] {
            let Some(value) = value else { continue };
            match keys.set(key, value) {
                Ok(keys::MultipathKeyOutcome::Ignored(why)) => {
                    return Err(format!("{key} {}: {why}", keys::quote_conf_word(value)));
                }
                Err(why) => return Err(format!("{key}: {why}")),
                Ok(_) => {}
            }
        }
        Ok(keys.settings(None).prio)
    }
}

impl MultipathSettings {
    /// The defaults, with checks every `seconds` seconds.
    #[must_use]
    pub fn every(seconds: u64) -> MultipathSettings {
        MultipathSectionKeys::default().settings(Some(seconds))
    }
}

/// True if `name` matches `pattern`: `*` is any text and `?` any character.
#[must_use]
pub fn matches_pattern(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    // The position of the last star, and how much of the name it has matched so far.
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

/// A parsed `multipath.conf`.
#[derive(Clone, Debug, Default)]
pub struct MultipathConf {
    defaults: MultipathSectionKeys,
    overrides: MultipathSectionKeys,
    maps: Vec<MultipathMapSection>,
    /// Ignored and missing keys, one line each.
    pub warnings: Vec<String>,
}

/// A `multipath` section.
#[derive(Clone, Debug, Default)]
struct MultipathMapSection {
    wwid: Option<String>,
    alias: Option<String>,
    keys: MultipathSectionKeys,
}

impl MultipathConf {
    /// Parses the text of a file.
    ///
    /// # Errors
    /// The first error with its line number, in one line.
    pub fn parse(text: &str) -> Result<MultipathConf, String> {
        parser::parse_multipath_conf(text)
    }

    /// The settings for the device with this name and uuid. `every` is the check interval in
    /// seconds if the file sets none.
    #[must_use]
    pub fn settings(&self, name: &str, uuid: Option<&str>, every: Option<u64>) -> MultipathSettings {
        let is = |word: &Option<String>| word.as_deref().is_some_and(|w| w == name || Some(w) == uuid);
        let own = self.maps.iter().find(|map| is(&map.wwid) || is(&map.alias));
        let own = own.map(|map| map.keys.clone()).unwrap_or_default();
        own.or(self.overrides.clone()).or(self.defaults.clone()).settings(every)
    }
}
