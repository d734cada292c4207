//! The keys of a section: their values, and the settings that result.

use super::{
    CHECKER_TIMEOUT, Failback, GroupingPolicy, MAX_OF_INTERVAL, MarginalPathPolicy, MultipathSettings,
    MultipathTableOptions, NoPathRetry, POLLING_INTERVAL, PathPrioritizer,
};
use udm_core::Nanos;

/// The longest time of a key, in seconds: a year.
const SECONDS_MAX: u64 = 31_536_000;

/// Maximum number of patterns of `weightedpath`.
const PATTERNS_MAX: usize = 256;

/// The keys of a section; `None` for a key that is not set.
#[derive(Clone, Debug, Default)]
pub(super) struct MultipathSectionKeys {
    polling_interval: Option<u64>,
    max_polling_interval: Option<u64>,
    checker_timeout: Option<u64>,
    /// The inner `None` leaves the decision to the table.
    no_path_retry: Option<Option<NoPathRetry>>,
    failback: Option<Failback>,
    prio: Option<String>,
    prio_args: Option<PrioArgs>,
    double_failed_time: Option<u64>,
    err_sample_time: Option<u64>,
    err_rate_threshold: Option<u64>,
    err_recheck_gap_time: Option<u64>,
    policy: Option<GroupingPolicy>,
    selector: Option<String>,
    features: Option<Vec<String>>,
    min_io: Option<u32>,
}

/// `prio_args` of the two prioritizers that take arguments.
#[derive(Clone, Debug, Default)]
struct PrioArgs {
    weights: Vec<(String, u32)>,
    io_num: Option<u32>,
    base_num: Option<f64>,
}

/// The effect of a key.
pub(super) enum MultipathKeyOutcome {
    /// The key was applied.
    Applied,
    /// The key has no effect, for this reason.
    Ignored(&'static str),
    /// The key is unknown.
    Unknown,
}

fn parse_bounded_conf_number(value: &str, least: u64, most: u64) -> Result<u64, String> {
    let number = value.parse().ok().filter(|n| (least..=most).contains(n));
    number.ok_or_else(|| format!("expected a number from {least} to {most}, not {}", quote_conf_word(value)))
}

/// Quotes a word of the file, cut at 40 characters.
pub(super) fn quote_conf_word(value: &str) -> String {
    let short: String = value.chars().take(40).collect();
    format!("{short:?}")
}

impl MultipathSectionKeys {
    /// Sets a key.
    ///
    /// # Errors
    /// The values that the key takes.
    pub fn set(&mut self, key: &str, value: &str) -> Result<MultipathKeyOutcome, String> {
        let time = |value| parse_bounded_conf_number(value, 1, SECONDS_MAX).map(Some);
        match key {
            "polling_interval" => {
                self.polling_interval = parse_bounded_conf_number(value, 1, 3600).map(Some)?;
            }
            "max_polling_interval" => {
                self.max_polling_interval = parse_bounded_conf_number(value, 1, 86_400).map(Some)?;
            }
            "checker_timeout" => {
                self.checker_timeout = parse_bounded_conf_number(value, 1, 3600).map(Some)?;
            }
            "no_path_retry" => self.no_path_retry = Some(parse_no_path_retry(value)?),
            "failback" => self.failback = Some(parse_failback(value)?),
            "prio" => return Ok(self.prio(value)),
            "prio_args" => match parse_prio_args(value)? {
                Some(args) => self.prio_args = Some(args),
                None => {
                    return Ok(MultipathKeyOutcome::Ignored(
                        "devname PATTERN PRIORITY, io_num=N and base_num=N are known",
                    ));
                }
            },
            "path_checker" => return Ok(check_path_checker_value(value)),
            "marginal_path_double_failed_time" => self.double_failed_time = time(value)?,
            "marginal_path_err_sample_time" => {
                self.err_sample_time = Some(parse_bounded_conf_number(value, 120, SECONDS_MAX)?);
            }
            "marginal_path_err_rate_threshold" => {
                self.err_rate_threshold = Some(parse_bounded_conf_number(value, 1, 1000)?);
            }
            "marginal_path_err_recheck_gap_time" => self.err_recheck_gap_time = time(value)?,
            "path_grouping_policy" => match (GroupingPolicy::named(value), value) {
                (Some(policy), _) => self.policy = Some(policy),
                (None, "group_by_serial" | "group_by_node_name" | "group_by_tpg") => {
                    return Ok(MultipathKeyOutcome::Ignored(
                        "only failover, multibus and group_by_prio are supported",
                    ));
                }
                (None, _) => {
                    return Err(format!(
                        "expected failover, multibus or group_by_prio, not {}",
                        quote_conf_word(value)
                    ));
                }
            },
            "path_selector" => {
                let (name, args) = value.trim().split_once(' ').unwrap_or((value, ""));
                self.selector = Some(format!("{name} {}", parse_counted_words(args)?.join(" ")));
            }
            "features" => self.features = Some(parse_counted_words(value)?.split_off(1)),
            "rr_min_io_rq" => {
                self.min_io = Some(parse_bounded_conf_number(value, 1, u32::MAX.into())? as u32);
            }
            "rr_min_io" => {
                return Ok(MultipathKeyOutcome::Ignored("current multipath targets use rr_min_io_rq"));
            }
            "rr_weight" => {
                return Ok(MultipathKeyOutcome::Ignored("path selectors send one request per path in turn"));
            }
            "hardware_handler"
            | "detect_prio"
            | "detect_checker"
            | "fast_io_fail_tmo"
            | "dev_loss_tmo"
            | "eh_deadline"
            | "retain_attached_hw_handler" => {
                return Ok(MultipathKeyOutcome::Ignored("there is no SCSI device here"));
            }
            "user_friendly_names" | "find_multipaths" | "uid_attribute" | "alias_prefix" => {
                return Ok(MultipathKeyOutcome::Ignored("the creator of a device chooses its name"));
            }
            "san_path_err_threshold"
            | "san_path_err_forget_rate"
            | "san_path_err_recovery_time"
            | "marginal_pathgroups" => {
                return Ok(MultipathKeyOutcome::Ignored("only the marginal_path_* keys are supported"));
            }
            _ => return Ok(MultipathKeyOutcome::Unknown),
        }
        Ok(MultipathKeyOutcome::Applied)
    }

    fn prio(&mut self, value: &str) -> MultipathKeyOutcome {
        match value {
            "const" | "weightedpath" | "path_latency" => {
                self.prio = Some(value.to_owned());
                MultipathKeyOutcome::Applied
            }
            _ => MultipathKeyOutcome::Ignored("only const, weightedpath and path_latency are supported"),
        }
    }

    /// If some of the `marginal_path` keys are set, the ones that are not.
    pub fn missing_marginal(&self) -> Vec<&'static str> {
        let keys = [
            ("marginal_path_double_failed_time", self.double_failed_time),
            ("marginal_path_err_sample_time", self.err_sample_time),
            ("marginal_path_err_rate_threshold", self.err_rate_threshold),
            ("marginal_path_err_recheck_gap_time", self.err_recheck_gap_time),
        ];
        let missing: Vec<_> = keys.iter().filter(|(_, said)| said.is_none()).map(|(key, _)| *key).collect();
        if missing.len() == keys.len() { Vec::new() } else { missing }
    }

    /// The keys of this section; keys that are not set come from `other`.
    pub fn or(self, other: MultipathSectionKeys) -> MultipathSectionKeys {
        MultipathSectionKeys {
            polling_interval: self.polling_interval.or(other.polling_interval),
            max_polling_interval: self.max_polling_interval.or(other.max_polling_interval),
            checker_timeout: self.checker_timeout.or(other.checker_timeout),
            no_path_retry: self.no_path_retry.or(other.no_path_retry),
            failback: self.failback.or(other.failback),
            prio: self.prio.or(other.prio),
            prio_args: self.prio_args.or(other.prio_args),
            double_failed_time: self.double_failed_time.or(other.double_failed_time),
            err_sample_time: self.err_sample_time.or(other.err_sample_time),
            err_rate_threshold: self.err_rate_threshold.or(other.err_rate_threshold),
            err_recheck_gap_time: self.err_recheck_gap_time.or(other.err_recheck_gap_time),
            policy: self.policy.or(other.policy),
            selector: self.selector.or(other.selector),
            features: self.features.or(other.features),
            min_io: self.min_io.or(other.min_io),
        }
    }

    /// The resulting settings. `every` is the check interval in seconds if the file sets none.
    pub fn settings(self, every: Option<u64>) -> MultipathSettings {
        let nanos = |seconds: u64| Nanos::from_millis(seconds * 1000);
        let interval = self.polling_interval.or(every).unwrap_or(POLLING_INTERVAL);
        let most = self.max_polling_interval.unwrap_or(interval * MAX_OF_INTERVAL);
        let args = self.prio_args.unwrap_or_default();
        let prio = match self.prio.as_deref() {
            Some("weightedpath") => PathPrioritizer::Weighted(args.weights),
            Some("path_latency") => PathPrioritizer::Latency {
                checks: args.io_num.unwrap_or(20),
                base: args.base_num.unwrap_or(10.0),
            },
            _ => PathPrioritizer::Const,
        };
        // As in multipathd: all four keys, or none.
        let marginal = || {
            Some(MarginalPathPolicy {
                double_failed_time: nanos(self.double_failed_time?),
                err_sample_time: nanos(self.err_sample_time?),
                err_rate_threshold: self.err_rate_threshold? as u32,
                err_recheck_gap_time: nanos(self.err_recheck_gap_time?),
            })
        };
        let usual = MultipathTableOptions::default();
        let grouping = MultipathTableOptions {
            policy: self.policy.unwrap_or(usual.policy),
            selector: self.selector.unwrap_or(usual.selector),
            features: self.features.unwrap_or(usual.features),
            min_io: self.min_io.unwrap_or(usual.min_io),
        };
        MultipathSettings {
            grouping,
            polling_interval: nanos(interval),
            max_polling_interval: nanos(most.max(interval)),
            checker_timeout: nanos(self.checker_timeout.unwrap_or(CHECKER_TIMEOUT)),
            no_path_retry: self.no_path_retry.flatten(),
            failback: self.failback.unwrap_or(Failback::Manual),
            prio,
            marginal: marginal(),
        }
    }
}

/// Parses a count and as many words. The result includes the count.
fn parse_counted_words(value: &str) -> Result<Vec<String>, String> {
    let words: Vec<String> = value.split_whitespace().map(String::from).collect();
    let count = words.first().and_then(|word| word.parse().ok());
    match count == Some(words.len().saturating_sub(1)) && !words.is_empty() {
        true => Ok(words),
        false => Err(format!("expected a count and as many words, not {}", quote_conf_word(value))),
    }
}

fn check_path_checker_value(value: &str) -> MultipathKeyOutcome {
    match value {
        "directio" | "readsector0" | "tur" => MultipathKeyOutcome::Applied,
        _ => MultipathKeyOutcome::Ignored("a check reads the path's first block"),
    }
}

fn parse_no_path_retry(value: &str) -> Result<Option<NoPathRetry>, String> {
    Ok(match value {
        "fail" | "0" => Some(NoPathRetry::Fail),
        "queue" => Some(NoPathRetry::Queue),
        "off" => None,
        number => match parse_bounded_conf_number(number, 1, 1_000_000) {
            Ok(checks) => Some(NoPathRetry::Checks(checks as u32)),
            Err(_) => {
                return Err(format!(
                    "expected fail, queue or a number of checks, not {}",
                    quote_conf_word(number)
                ));
            }
        },
    })
}

fn parse_failback(value: &str) -> Result<Failback, String> {
    Ok(match value {
        "manual" => Failback::Manual,
        "immediate" | "0" => Failback::Immediate,
        "followover" => Failback::Followover,
        number => match parse_bounded_conf_number(number, 1, SECONDS_MAX) {
            Ok(seconds) => Failback::After(Nanos::from_millis(seconds * 1000)),
            Err(_) => {
                let what = "manual, immediate, followover or a number of seconds";
                return Err(format!("expected {what}, not {}", quote_conf_word(number)));
            }
        },
    })
}

/// Parses `devname PATTERN PRIO ...`, or `io_num=N base_num=N`. Returns `None` for the arguments of
/// another prioritizer, because multipathd passes any arguments to the one in use.
fn parse_prio_args(value: &str) -> Result<Option<PrioArgs>, String> {
    let mut args = PrioArgs::default();
    let mut words = value.split_whitespace();
    while let Some(word) = words.next() {
        if let Some(number) = word.strip_prefix("io_num=") {
            args.io_num = Some(parse_bounded_conf_number(number, 2, 200)? as u32);
        } else if let Some(number) = word.strip_prefix("base_num=") {
            let base = number.parse().ok().filter(|base| (1.1..=100.0).contains(base));
            let base = base.ok_or_else(|| {
                format!("expected a base_num from 1.1 to 100, not {}", quote_conf_word(number))
            })?;
            args.base_num = Some(base);
        } else if word == "devname" {
            let (Some(name), Some(prio)) = (words.next(), words.next()) else {
                return Err("expected a pattern and a priority after devname".into());
            };
            if args.weights.len() == PATTERNS_MAX {
                return Err(format!("more than {PATTERNS_MAX} patterns"));
            }
            args.weights
                .push((convert_regex_to_glob(name)?, parse_bounded_conf_number(prio, 0, 1_000_000)? as u32));
        } else {
            return Ok(None);
        }
    }
    Ok(Some(args))
}

/// multipath-tools takes regular expressions. Accepts those with the same meaning here: text, and
/// `.*` for any text.
fn convert_regex_to_glob(word: &str) -> Result<String, String> {
    if word.contains(['[', ']', '(', ')', '^', '$', '+', '|', '\\', '{', '}']) {
        return Err(format!("expected a pattern of text, * and ?, not {}", quote_conf_word(word)));
    }
    Ok(word.replace(".*", "*"))
}
