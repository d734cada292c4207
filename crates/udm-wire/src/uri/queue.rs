//! The queue in front of a disk: `scheduler=mq-deadline`, `queue_depth=32` and so on in its URI, by
//! the names that they have below `/sys/block/DISK/queue` and `queue/iosched`.

use crate::words::shown;
use std::fmt;

/// The order in which requests that wait for a tag go down.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Scheduler {
    /// First come, first served.
    #[default]
    None,
    /// By sector, in batches of one direction, with an age at which a request goes first.
    MqDeadline,
}

impl Scheduler {
    /// Each with its name.
    pub const ALL: [(&'static str, Scheduler); 2] =
        [("none", Scheduler::None), ("mq-deadline", Scheduler::MqDeadline)];
}

impl fmt::Display for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Scheduler::ALL.iter().find(|(_, scheduler)| scheduler == self).map(|(name, _)| name);
        f.write_str(name.expect("the list is whole"))
    }
}

/// The numbers, one line each: its name, its range, and what holds where it is not said.
macro_rules! numbers {
    ($($(#[$doc:meta])* $name:ident: $min:literal..=$max:literal, $default:literal;)*) => {
        /// What the queue in front of a disk does.
        #[derive(Debug, Clone, PartialEq, Eq, Hash)]
        pub struct QueueParams {
            /// Which of those that wait goes next.
            pub scheduler: Scheduler,
            $($(#[$doc])* pub $name: u32,)*
        }

        impl Default for QueueParams {
            fn default() -> QueueParams {
                QueueParams { scheduler: Scheduler::None, $($name: $default,)* }
            }
        }

        impl QueueParams {
            /// The names of all words.
            pub const NAMES: &[&str] = &["scheduler", $(stringify!($name),)*];

            /// Sets one number; false for a name that is none.
            fn number(&mut self, name: &str, value: &str) -> Result<bool, String> {
                $(if name == stringify!($name) {
                    self.$name = parse_in_range(name, value, $min, $max)?;
                    return Ok(true);
                })*
                Ok(false)
            }

            /// The numbers, by name.
            #[must_use]
            pub fn by_name(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), u64::from(self.$name)),)*]
            }

            /// The numbers that are not what holds where nothing is said.
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
    /// Hardware queues; 0 for one a core, and more than there are cores are one a core. Cores that
    /// have one in common share its tags.
    nr_hw_queues: 0..=1024, 0;
    /// Tags of a hardware queue: so many requests are with the disk at a time. The kernel halves it
    /// where memory is short, and has 10240 at the most.
    queue_depth: 1..=10240, 128;
    /// Requests that the scheduler sorts, at least 4 as in the kernel: twice the tags of a queue,
    /// and 256 at the most, where it is 0.
    nr_requests: 0..=20480, 0;
    /// 0: requests that lie behind each other go down as one. 1: with the latest request only. 2:
    /// never.
    nomerges: 0..=2, 0;
    /// The longest request in KiB. 0: what the disk takes, and 1280 for what is merged.
    max_sectors_kb: 0..=2097151, 0;
    /// The most pieces of memory in a request that was merged.
    max_segments: 1..=1024, 128;
    /// With `mq-deadline`: milliseconds after which a read goes first.
    read_expire: 0..=3600000, 500;
    /// With `mq-deadline`: milliseconds after which anything else goes first.
    write_expire: 0..=3600000, 5000;
    /// With `mq-deadline`: how many batches of reads go before one of writes that wait.
    writes_starved: 0..=1000000, 2;
    /// With `mq-deadline`: how many requests of one direction, by sector, are a batch.
    fifo_batch: 0..=1000000, 16;
    /// With `mq-deadline`: 0 where a request is never merged in front of another.
    front_merges: 0..=1, 1;
}

/// The most that a scheduler can be told to sort (the kernel's `MAX_SCHED_RQ`).
const SORTED_MAX: u32 = 2048;

fn parse_in_range(name: &str, value: &str, min: u32, max: u32) -> Result<u32, String> {
    let digits = !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit());
    let number = value.parse().ok().filter(|n: &u32| digits && (min..=max).contains(n));
    number.ok_or_else(|| format!("{name}={} is not a number in {min}..{max}", shown(value)))
}

impl QueueParams {
    /// How many requests the scheduler sorts, or where it sorts none may have a tag of a hardware
    /// queue.
    #[must_use]
    pub fn requests(&self) -> u32 {
        match (self.scheduler, self.nr_requests) {
            (Scheduler::None, 0) => self.queue_depth,
            (Scheduler::None, n) => n.min(self.queue_depth),
            (Scheduler::MqDeadline, 0) => 2 * self.queue_depth.min(128),
            (Scheduler::MqDeadline, n) => n,
        }
    }

    /// One of the words of a URI, with which there is a queue; false for any other word.
    ///
    /// # Errors
    /// What is wrong with the value.
    pub(super) fn word(queue: &mut Option<QueueParams>, name: &str, value: &str) -> Result<bool, String> {
        if !QueueParams::NAMES.contains(&name) {
            return Ok(false);
        }
        let queue = queue.get_or_insert_default();
        if queue.number(name, value)? {
            // The kernel refuses what is below a page, and makes four of fewer requests.
            if (1..4).contains(&queue.max_sectors_kb) {
                return Err("max_sectors_kb is 0, or at least 4".into());
            }
            if queue.nr_requests > 0 {
                queue.nr_requests = queue.nr_requests.max(4);
            }
            return Ok(true);
        }
        let known = Scheduler::ALL.iter().find(|(name, _)| *name == value);
        queue.scheduler = match known {
            Some((_, scheduler)) => *scheduler,
            None => return Err(format!("scheduler={} is neither none nor mq-deadline", shown(value))),
        };
        Ok(true)
    }

    /// Changes one setting of a queue that is in use, as the kernel's files below `queue` do.
    ///
    /// # Errors
    /// What is wrong with the name or the value, in one line.
    pub fn change(&mut self, name: &str, value: &str) -> Result<(), String> {
        if QueueParams::FIXED.contains(&name) {
            return Err(format!("{name} can't be changed while the disk is in use"));
        }
        let was = self.scheduler;
        let mut changed = Some(self.clone());
        if !QueueParams::word(&mut changed, name, value)? {
            let known = QueueParams::NAMES.iter().filter(|name| !QueueParams::FIXED.contains(name));
            let known = known.copied().collect::<Vec<_>>().join(", ");
            return Err(format!("a queue in use has no setting {}: it has {known}", shown(name)));
        }
        let mut changed = changed.expect("it was there");
        match (name, changed.scheduler) {
            ("scheduler", scheduler) if scheduler != was => changed.forget_scheduler(),
            ("nr_requests", scheduler) => {
                let (most, of) = match scheduler {
                    Scheduler::None => (self.queue_depth, "queue_depth"),
                    Scheduler::MqDeadline => (SORTED_MAX, "what a scheduler sorts at the most"),
                };
                // Here 0 is a number, and not what holds where nothing is said.
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

    /// As the kernel does it: another scheduler has as many requests as it has where nothing is
    /// said, and what its files said is gone with the one before.
    fn forget_scheduler(&mut self) {
        let QueueParams { read_expire, write_expire, writes_starved, fifo_batch, front_merges, .. } =
            QueueParams::default();
        self.nr_requests = 0;
        (self.read_expire, self.write_expire) = (read_expire, write_expire);
        (self.writes_starved, self.fifo_batch, self.front_merges) =
            (writes_starved, fifo_batch, front_merges);
    }

    /// What is as the disk was opened with.
    const FIXED: [&str; 3] = ["nr_hw_queues", "queue_depth", "max_segments"];

    /// The words that make it so.
    pub(super) fn words(queue: Option<&QueueParams>) -> Vec<String> {
        let Some(queue) = queue else { return Vec::new() };
        let mut words = queue.numbers();
        if queue.scheduler != Scheduler::None || words.is_empty() {
            words.insert(0, format!("scheduler={}", queue.scheduler));
        }
        words
    }
}
