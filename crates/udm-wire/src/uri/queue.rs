//! Options of the queue in front of a disk, such as `scheduler=mq-deadline` and `queue_depth=32`,
//! in its URI. The names are those below `/sys/block/DISK/queue` and `queue/iosched`.

use crate::words::quote_for_error_line;
use std::fmt;

/// The order in which requests that wait for a tag are sent to the disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum IoSchedulerName {
    /// First in, first out.
    #[default]
    None,
    /// By sector, in batches of one direction; a request that exceeds its expiry time goes first.
    MqDeadline,
}

impl IoSchedulerName {
    /// All schedulers with their names.
    pub const ALL: [(&'static str, IoSchedulerName); 2] =
        [("none", IoSchedulerName::None), ("mq-deadline", IoSchedulerName::MqDeadline)];
}

impl fmt::Display for IoSchedulerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = IoSchedulerName::ALL.iter().find(|(_, scheduler)| scheduler == self).map(|(name, _)| name);
        f.write_str(name.expect("the list is whole"))
    }
}

/// Defines the numeric options: name, range and default of each.
macro_rules! numbers {
    ($($(#[$doc:meta])* $name:ident: $min:literal..=$max:literal, $default:literal;)*) => {
        /// Settings of the queue in front of a disk.
        #[derive(Debug, Clone, PartialEq, Eq, Hash)]
        pub struct QueueParams {
            /// The order of waiting requests.
            pub scheduler: IoSchedulerName,
            $($(#[$doc])* pub $name: u32,)*
        }

        impl Default for QueueParams {
            fn default() -> QueueParams {
                QueueParams { scheduler: IoSchedulerName::None, $($name: $default,)* }
            }
        }

        impl QueueParams {
            /// The names of all options.
            pub const NAMES: &[&str] = &["scheduler", $(stringify!($name),)*];

            /// Sets one numeric option. Returns false if `name` is none.
            fn number(&mut self, name: &str, value: &str) -> Result<bool, String> {
                $(if name == stringify!($name) {
                    self.$name = parse_in_range(name, value, $min, $max)?;
                    return Ok(true);
                })*
                Ok(false)
            }

            /// The numeric options by name.
            #[must_use]
            pub fn by_name(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), u64::from(self.$name)),)*]
            }

            /// The numeric options that differ from the defaults.
            fn numbers(&self) -> Vec<String> {
                let mut words = Vec::new();
                $(if self.$name != $default {
                    words.push(format!(concat!(stringify!($name), "={}"), self.$name));
                })*
                words
            }
        }
    };
}

numbers! {
    /// Hardware queues; 0 means one per core, and more than the cores become one per core. Cores
    /// with a common hardware queue share its tags.
    nr_hw_queues: 0..=1024, 0;
    /// Tags of a hardware queue: the number of requests that the disk has at a time. The kernel
    /// halves the number if memory is short; its maximum is 10240.
    queue_depth: 1..=10240, 128;
    /// Requests that the scheduler sorts, at least 4 as in the kernel. 0 means twice the tags of a
    /// queue, at most 256.
    nr_requests: 0..=20480, 0;
    /// 0: adjacent requests are merged. 1: a request is merged only with the latest one. 2: never.
    nomerges: 0..=2, 0;
    /// The longest request in KiB. 0: the disk's limit, and 1280 for merged requests.
    max_sectors_kb: 0..=2097151, 0;
    /// Maximum number of memory segments in a merged request.
    max_segments: 1..=1024, 128;
    /// With `mq-deadline`: milliseconds after which a read goes first.
    read_expire: 0..=3600000, 500;
    /// With `mq-deadline`: milliseconds after which another request goes first.
    write_expire: 0..=3600000, 5000;
    /// With `mq-deadline`: how many batches of reads may precede a batch of waiting writes.
    writes_starved: 0..=1000000, 2;
    /// With `mq-deadline`: number of requests in a batch of one direction, by sector.
    fifo_batch: 0..=1000000, 16;
    /// With `mq-deadline`: 0 if requests are never merged to the front of another.
    front_merges: 0..=1, 1;
}

/// Maximum number of requests that a scheduler can be set to sort (the kernel's `MAX_SCHED_RQ`).
const SORTED_MAX: u32 = 2048;

fn parse_in_range(name: &str, value: &str, min: u32, max: u32) -> Result<u32, String> {
    let digits = !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit());
    let number = value.parse().ok().filter(|n: &u32| digits && (min..=max).contains(n));
    number.ok_or_else(|| format!("{name}={} is not a number in {min}..{max}", quote_for_error_line(value)))
}

impl QueueParams {
    /// Number of requests that the scheduler sorts. Without a scheduler, the number that may hold a
    /// tag of a hardware queue.
    #[must_use]
    pub fn requests(&self) -> u32 {
        match (self.scheduler, self.nr_requests) {
            (IoSchedulerName::None, 0) => self.queue_depth,
            (IoSchedulerName::None, n) => n.min(self.queue_depth),
            (IoSchedulerName::MqDeadline, 0) => 2 * self.queue_depth.min(128),
            (IoSchedulerName::MqDeadline, n) => n,
        }
    }

    /// Sets an option of a queue in a URI, and creates the queue if there is none. Returns false if
    /// `name` is no such option.
    ///
    /// # Errors
    /// An invalid value.
    pub(super) fn word(queue: &mut Option<QueueParams>, name: &str, value: &str) -> Result<bool, String> {
        if !QueueParams::NAMES.contains(&name) {
            return Ok(false);
        }
        let queue = queue.get_or_insert_default();
        if queue.number(name, value)? {
            // As in the kernel: `max_sectors_kb` below a page is refused, and `nr_requests` is at
            // least 4.
            if (1..4).contains(&queue.max_sectors_kb) {
                return Err("max_sectors_kb is 0, or at least 4".into());
            }
            if queue.nr_requests > 0 {
                queue.nr_requests = queue.nr_requests.max(4);
            }
            return Ok(true);
        }
        let known = IoSchedulerName::ALL.iter().find(|(name, _)| *name == value);
        queue.scheduler = match known {
            Some((_, scheduler)) => *scheduler,
            None => {
                return Err(format!(
                    "scheduler={} is neither none nor mq-deadline",
                    quote_for_error_line(value)
                ));
            }
        };
        Ok(true)
    }

    /// Changes one setting of a queue in use, as writing the kernel's files below `queue` does.
    ///
    /// # Errors
    /// An unknown name or an invalid value, in one line.
    pub fn change(&mut self, name: &str, value: &str) -> Result<(), String> {
        if QueueParams::FIXED.contains(&name) {
            return Err(format!("{name} can't be changed while the disk is in use"));
        }
        let was = self.scheduler;
        let mut changed = Some(self.clone());
        if !QueueParams::word(&mut changed, name, value)? {
            let known = QueueParams::NAMES.iter().filter(|name| !QueueParams::FIXED.contains(name));
            let known = known.copied().collect::<Vec<_>>().join(", ");
            return Err(format!(
                "a queue in use has no setting {}: it has {known}",
                quote_for_error_line(name)
            ));
        }
        let mut changed = changed.expect("it was there");
        match (name, changed.scheduler) {
            ("scheduler", scheduler) if scheduler != was => changed.forget_scheduler(),
            ("nr_requests", scheduler) => {
                let (most, of) = match scheduler {
                    IoSchedulerName::None => (self.queue_depth, "queue_depth"),
                    IoSchedulerName::MqDeadline => (SORTED_MAX, "what a scheduler sorts at the most"),
                };
                // Here 0 is a number, not the default.
                changed.nr_requests = changed.nr_requests.max(4);
                if changed.nr_requests > most {
                    let n = changed.nr_requests;
                    return Err(format!("nr_requests={n} is more than {most}, {of}"));
                }
            }
            _ => {}
        }
        *self = changed;
        Ok(())
    }

    /// Resets the options of the scheduler, as the kernel does: a new scheduler starts with its
    /// defaults.
    fn forget_scheduler(&mut self) {
        let QueueParams { read_expire, write_expire, writes_starved, fifo_batch, front_merges, .. } =
            QueueParams::default();
        self.nr_requests = 0;
        (self.read_expire, self.write_expire) = (read_expire, write_expire);
        (self.writes_starved, self.fifo_batch, self.front_merges) =
            (writes_starved, fifo_batch, front_merges);
    }

    /// Options that cannot change after the disk was opened.
    const FIXED: [&str; 3] = ["nr_hw_queues", "queue_depth", "max_segments"];

    /// The URI options that give this queue.
    pub(super) fn words(queue: Option<&QueueParams>) -> Vec<String> {
        let Some(queue) = queue else { return Vec::new() };
        let mut words = queue.numbers();
        if queue.scheduler != IoSchedulerName::None || words.is_empty() {
            words.insert(0, format!("scheduler={}", queue.scheduler));
        }
        words
    }
}
