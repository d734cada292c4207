//! `null:NAME=VALUE,...`: a null device with the parameter names, defaults and clamps of null_blk
//! (Linux 6.12, read back from the kernel).
//!
//! Differences from null_blk: `size` and `cache_size` are sizes as everywhere in udm (`4G`; a
//! number without a unit counts bytes, not MiB). Parameters without a meaning here (NUMA, sleeping)
//! are accepted and ignored. Parameters that udm does not support (zones, power) are refused.

use super::{DeviceUriError, IoSchedulerName, NullFaults, QueueParams, parse_switch};
use crate::size::{self, SizeWithUnit};
use crate::words::quote_for_error_line;
use std::fmt;

/// Parameters of a null device, after null_blk's clamps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NullParams {
    /// Capacity in bytes, at least a block (`size`, or `gb` in GiB); default 250 GiB.
    pub size: u64,
    /// Logical block size in bytes: 512, 1024, 2048 or 4096 (`blocksize` or `bs`); default 512.
    pub bs: u32,
    /// Hardware queues, at least 1 (0 becomes 1); default 1. The device limits them to the number
    /// of CPUs.
    pub submit_queues: u32,
    /// Tags per hardware queue, 1..=10240 (more become 10240); default 64.
    pub hw_queue_depth: u32,
    /// Always 2, multi-queue: 0 (bio) becomes 2 as in the kernel, 1 is refused.
    pub queue_mode: u32,
    /// 0 completes inside submit, 1 on the submitting CPU, 2 by a timer; larger values become 2.
    /// Default 1.
    pub irqmode: u32,
    /// Nanoseconds until a request completes, for `irqmode` 2 only; default 10000.
    pub completion_nsec: u64,
    /// The longest request in sectors, at least 8; `None` (0, the default) for no own limit.
    pub max_sectors: Option<u32>,
    /// The device stores written data; default off.
    pub memory_backed: bool,
    /// Supports discards; off unless `memory_backed`.
    pub discard: bool,
    /// Size of the volatile write cache in bytes, whole MiB; 0 unless `memory_backed`.
    pub cache_size: u64,
    /// Supports FUA; default on.
    pub fua: bool,
    /// Injected faults, and the speed limit.
    pub faults: NullFaults,
    /// The device shares its tags with all such devices that have the same number of hardware
    /// queues and tags; default off. With this option, there is always a queue.
    pub shared_tags: bool,
    /// No scheduler is allowed; default off.
    pub no_sched: bool,
    /// The queue in front of the device; `None` for none. In null_blk, these are the queue files of
    /// any disk.
    pub queue: Option<QueueParams>,
}

impl Default for NullParams {
    fn default() -> NullParams {
        NullParams {
            size: 250 << 30,
            bs: 512,
            submit_queues: 1,
            hw_queue_depth: 64,
            queue_mode: 2,
            irqmode: 1,
            completion_nsec: 10_000,
            max_sectors: None,
            memory_backed: false,
            discard: false,
            cache_size: 0,
            fua: true,
            faults: NullFaults::default(),
            shared_tags: false,
            no_sched: false,
            queue: None,
        }
    }
}

/// The names that [`NullParams::set`] knows, for an error message.
const NAMES: &str = "badblocks, blocking, blocksize (bs), cache_size, completion_nsec, discard, fua, gb, home_node, hw_queue_depth, \
                     init_hctx, irqmode, max_sectors, mbps, memory_backed, no_sched, poll_queues, queue_mode, requeue, \
                     shared_tag_bitmap, shared_tags, size, submit_queues, timeout, use_per_node_hctx, virt_boundary";

/// Parameters that are 0 or 1 in null_blk and have no effect here.
const WITHOUT_EFFECT: [&str; 4] = ["blocking", "shared_tag_bitmap", "use_per_node_hctx", "virt_boundary"];

/// Parameters of null_blk that udm does not support.
const LEFT_OUT: &[&str] = &[
    "nr_devices",
    "power",
    "rotational",
    "zone_append_max_sectors",
    "zone_capacity",
    "zone_full",
    "zone_max_active",
    "zone_max_open",
    "zone_nr_conv",
    "zone_size",
    "zoned",
];

/// Maximum number of tags of a hardware queue (kernel `BLK_MQ_MAX_DEPTH`).
const DEPTH_MAX: u32 = 10240;

/// The names of queue options, without those that have another name for a null device.
fn null_queue_option_names() -> String {
    let own = ["nr_hw_queues", "queue_depth"];
    let names: Vec<_> = QueueParams::NAMES.iter().copied().filter(|name| !own.contains(name)).collect();
    names.join(", ")
}

impl NullParams {
    /// Parses the text after `null:`.
    pub(super) fn parse(text: &str) -> Result<NullParams, DeviceUriError> {
        let mut params = NullParams::default();
        let mut seen = Vec::new();
        for pair in split_null_params(text) {
            let (name, value) = match pair.split_once('=') {
                Some(named) => named,
                // As for other kinds of device: `null:1G`.
                None if size::parse_size_with_unit(pair).is_ok() => ("size", pair),
                None => (pair, ""),
            };
            let name = params.set(name, value).map_err(|why| DeviceUriError::new(format!("null: {why}")))?;
            if name != "badblocks" && seen.contains(&name) {
                return Err(DeviceUriError::new(format!("null: {name} is given twice")));
            }
            seen.push(name);
        }
        if params.size < u64::from(params.bs) {
            return Err(DeviceUriError::new(format!(
                "null: size {} is less than a block of {}",
                SizeWithUnit(params.size),
                params.bs
            )));
        }
        if !params.memory_backed {
            (params.discard, params.cache_size) = (false, 0);
        }
        if params.no_sched && params.queue.as_ref().is_some_and(|q| q.scheduler != IoSchedulerName::None) {
            return Err(DeviceUriError::new("null: no_sched=1 forbids a scheduler"));
        }
        if params.shared_tags {
            params.queue.get_or_insert_default();
        }
        if let Some(queue) = &mut params.queue {
            (queue.nr_hw_queues, queue.queue_depth) = (params.submit_queues, params.hw_queue_depth);
        }
        Ok(params)
    }

    /// Sets one parameter. Returns its name; aliases return the same name.
    fn set(&mut self, name: &str, value: &str) -> Result<&'static str, String> {
        let number = |max: u64| {
            let digits = !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit());
            let number = value.parse().ok().filter(|n: &u64| digits && *n <= max);
            number
                .ok_or_else(|| format!("{name}={} is not a number in 0..{max}", quote_for_error_line(value)))
        };
        let small = || number(u64::from(u32::MAX)).map(|n| n as u32);
        let bytes = || size::parse_size_with_unit(value).map_err(|error| format!("{name}: {error}"));
        let on_off = || {
            parse_switch("null", name, value)
                .map_err(|_| format!("{name}={} is neither 0 nor 1", quote_for_error_line(value)))
        };
        Ok(match name {
            "size" => {
                self.size = bytes()?;
                "size"
            }
            "gb" => {
                self.size = number(u64::MAX >> 30)? << 30;
                "size"
            }
            "blocksize" | "bs" => {
                self.bs = match bytes()? {
                    n @ (512 | 1024 | 2048 | 4096) => n as u32,
                    _ => return Err(format!("{name}={value} is not 512, 1024, 2048 or 4096")),
                };
                "blocksize"
            }
            "submit_queues" => {
                self.submit_queues = small()?.max(1);
                "submit_queues"
            }
            "hw_queue_depth" => {
                self.hw_queue_depth = match small()? {
                    0 => return Err("hw_queue_depth must be at least 1".into()),
                    n => n.min(DEPTH_MAX),
                };
                "hw_queue_depth"
            }
            "queue_mode" => {
                if small()? == 1 {
                    return Err("queue_mode=1 (single queue) is not supported; use 2 (multi-queue)".into());
                }
                "queue_mode"
            }
            "irqmode" => {
                self.irqmode = small()?.min(2);
                "irqmode"
            }
            "completion_nsec" => {
                self.completion_nsec = number(u64::MAX)?;
                "completion_nsec"
            }
            "max_sectors" => {
                self.max_sectors = match small()? {
                    0 => None,
                    1..8 => return Err("max_sectors must be at least 8".into()),
                    n => Some(n),
                };
                "max_sectors"
            }
            "memory_backed" => {
                self.memory_backed = on_off()?;
                "memory_backed"
            }
            "discard" => {
                self.discard = on_off()?;
                "discard"
            }
            "fua" => {
                self.fua = on_off()?;
                "fua"
            }
            "cache_size" => {
                self.cache_size = match bytes()? {
                    n if n % (1 << 20) == 0 => n,
                    _ => {
                        let is_number = value.bytes().all(|b| b.is_ascii_digit());
                        let meant =
                            if is_number { format!("; write {value}M to mean MiB") } else { String::new() };
                        return Err(format!("cache_size={value} is not whole MiB{meant}"));
                    }
                };
                "cache_size"
            }
            "shared_tags" => {
                self.shared_tags = on_off()?;
                "shared_tags"
            }
            "no_sched" => {
                self.no_sched = on_off()?;
                "no_sched"
            }
            // -1 means no particular node, as a node that does not exist.
            "home_node" if value == "-1" => "home_node",
            "home_node" => small().map(|_| "home_node")?,
            "poll_queues" => small().map(|_| "poll_queues")?,
            "nr_hw_queues" => return Err("a null device has submit_queues for nr_hw_queues".into()),
            "queue_depth" => return Err("a null device has hw_queue_depth for queue_depth".into()),
            _ if QueueParams::word(&mut self.queue, name, value)? => {
                QueueParams::NAMES.iter().find(|known| **known == name).expect("a known name")
            }
            _ if WITHOUT_EFFECT.contains(&name) => {
                on_off()?;
                WITHOUT_EFFECT.iter().find(|known| **known == name).expect("a known name")
            }
            "" => return Err("an empty parameter; NAME=VALUE,NAME=VALUE".into()),
            name if LEFT_OUT.contains(&name) => {
                return Err(format!("{name} is null_blk's and not udm's; expected one of {NAMES}"));
            }
            _ => match self.faults.set(name, value)? {
                Some(name) => name,
                None => {
                    let queue = null_queue_option_names();
                    return Err(format!(
                        "unknown parameter {}; expected one of {NAMES}, {queue}",
                        quote_for_error_line(name)
                    ));
                }
            },
        })
    }
}

/// Splits `text` at commas into parameters. Some parameters contain commas.
fn split_null_params(text: &str) -> Vec<&str> {
    let mut pairs = Vec::new();
    let mut rest = Some(text).filter(|text| !text.is_empty());
    while let Some(text) = rest {
        let is_list = text.split_once('=').is_some_and(|(name, _)| NullFaults::LISTS.contains(&name));
        let goes_on = |at: usize| {
            let next = text[at + 1..].split(',').next().unwrap_or_default();
            is_list && next.starts_with(|c: char| c == '-' || c.is_ascii_digit()) && !next.contains('=')
        };
        let end = text.match_indices(',').map(|(at, _)| at).find(|at| !goes_on(*at));
        pairs.push(&text[..end.unwrap_or(text.len())]);
        rest = end.map(|end| &text[end + 1..]);
    }
    pairs
}

/// Prints the size, then all parameters that differ from the defaults.
impl fmt::Display for NullParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plain = NullParams::default();
        write!(f, "null:size={}", SizeWithUnit(self.size))?;
        if self.bs != plain.bs {
            write!(f, ",blocksize={}", self.bs)?;
        }
        if self.submit_queues != plain.submit_queues {
            write!(f, ",submit_queues={}", self.submit_queues)?;
        }
        if self.hw_queue_depth != plain.hw_queue_depth {
            write!(f, ",hw_queue_depth={}", self.hw_queue_depth)?;
        }
        if self.irqmode != plain.irqmode {
            write!(f, ",irqmode={}", self.irqmode)?;
        }
        if self.completion_nsec != plain.completion_nsec {
            write!(f, ",completion_nsec={}", self.completion_nsec)?;
        }
        if let Some(n) = self.max_sectors {
            write!(f, ",max_sectors={n}")?;
        }
        if self.memory_backed {
            f.write_str(",memory_backed=1")?;
        }
        if self.discard {
            f.write_str(",discard=1")?;
        }
        if self.cache_size != plain.cache_size {
            write!(f, ",cache_size={}", SizeWithUnit(self.cache_size))?;
        }
        if self.fua != plain.fua {
            f.write_str(",fua=0")?;
        }
        write!(f, "{}", self.faults)?;
        if self.shared_tags {
            f.write_str(",shared_tags=1")?;
        }
        if self.no_sched {
            f.write_str(",no_sched=1")?;
        }
        // `nr_hw_queues` and `queue_depth` are already printed under their null_blk names.
        let plain = QueueParams::default();
        let (nr_hw_queues, queue_depth) = (plain.nr_hw_queues, plain.queue_depth);
        let queue = self.queue.clone().map(|queue| QueueParams { nr_hw_queues, queue_depth, ..queue });
        QueueParams::words(queue.as_ref()).iter().try_for_each(|word| write!(f, ",{word}"))
    }
}
