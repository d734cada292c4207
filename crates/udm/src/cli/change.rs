//! Arguments of verbs that change a device.

use super::{Print, ServerArgs, seconds};
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;

/// The arguments of `udm create`.
#[derive(Debug, Args)]
pub struct CreateArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    #[command(flatten)]
    pub print: Print,
    /// The name of the device; with --concise, the devices [default: standard input]
    #[arg(required_unless_present = "concise", value_name = "NAME|DEVICES")]
    pub name: Option<String>,
    /// A file that holds the table [default: standard input]. Relative paths in a table are
    /// relative to the current folder
    #[arg(conflicts_with_all = ["table", "notable"])]
    pub file: Option<PathBuf>,
    /// The table
    #[arg(long, conflicts_with = "notable")]
    pub table: Option<String>,
    /// Create the device without a table
    #[arg(short, long)]
    pub notable: bool,
    /// The uuid of the device
    #[arg(short, long)]
    pub uuid: Option<String>,
    /// Queue depth of a request-based multipath device (queue_mode other than bio): the tags of
    /// each hardware queue, 0 for 2048, at most 10240. Such a device has a queue only with this or
    /// the next option
    #[arg(long = "dm_mq_queue_depth", value_name = "N", conflicts_with = "concise")]
    pub dm_mq_queue_depth: Option<u32>,
    /// Number of its hardware queues: 0 for 1, at most 32 and at most one per core
    #[arg(long = "dm_mq_nr_hw_queues", value_name = "N", conflicts_with = "concise")]
    pub dm_mq_nr_hw_queues: Option<u32>,
    /// Create the devices that udm table --concise printed:
    /// NAME,UUID,MINOR,FLAGS,LINE,LINE;NAME,... UUID, MINOR and FLAGS (rw or ro) may be empty
    #[arg(long, conflicts_with_all = ["file", "table", "notable", "uuid", "json"])]
    pub concise: bool,
}

/// The arguments of `udm reconfigure`.
#[derive(Debug, Args)]
pub struct ReconfigureArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    #[command(flatten)]
    pub print: Print,
    /// Print the changes without making them
    #[arg(short = 'n', long)]
    pub dry_run: bool,
}

/// The arguments of `udm rename`.
#[derive(Debug, Args)]
pub struct RenameArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    /// The device
    pub name: String,
    /// The new name, or with --setuuid the uuid
    #[arg(value_name = "NEWNAME|UUID")]
    pub new: String,
    /// Set the uuid of a device that has none
    #[arg(long)]
    pub setuuid: bool,
}

/// The arguments of `udm wait`.
#[derive(Debug, Args)]
pub struct WaitArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    #[command(flatten)]
    pub print: Print,
    /// The device
    pub name: String,
    /// The event number that you saw last
    #[arg(default_value_t = 0)]
    pub event_nr: u32,
    /// Then print the device, as udm info does
    #[arg(short, long)]
    pub verbose: bool,
    /// Fail after so many seconds [default: no limit]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub timeout: Option<Duration>,
}

/// The arguments of `udm load`.
#[derive(Debug, Args)]
pub struct LoadArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    /// The device
    pub name: String,
    /// A file that holds the table [default: standard input]. Relative paths in a table are
    /// relative to the current folder
    #[arg(conflicts_with = "table")]
    pub file: Option<PathBuf>,
    /// The table
    #[arg(long)]
    pub table: Option<String>,
}

/// The arguments of verbs that take only devices.
#[derive(Debug, Args)]
pub struct NamesArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    /// The devices
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
}

/// The arguments of `udm remove`.
#[derive(Debug, Args)]
pub struct RemoveArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    #[command(flatten)]
    pub until: TimeoutArgs,
    /// The devices
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
    /// First replace the table of the device by one that fails every request
    #[arg(short, long)]
    pub force: bool,
    /// Remove a device in use as soon as it is no longer in use
    #[arg(long)]
    pub deferred: bool,
}

/// The time that a verb may wait for requests in flight.
#[derive(Debug, Args)]
pub struct TimeoutArgs {
    /// Cancel after so many seconds, as Ctrl-C does: the device continues as before [default: no
    /// limit]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub timeout: Option<Duration>,
}

impl TimeoutArgs {
    /// The timeout in ms, as the control socket takes it.
    pub fn timeout_ms(&self) -> Option<u64> {
        self.timeout.map(|timeout| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX))
    }
}

/// The arguments of `udm resume`.
#[derive(Debug, Args)]
pub struct ResumeArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    #[command(flatten)]
    pub until: TimeoutArgs,
    /// The devices
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
}

/// The arguments of `udm suspend`.
#[derive(Debug, Args)]
pub struct SuspendArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    #[command(flatten)]
    pub until: TimeoutArgs,
    /// The devices
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
    /// Do not wait for requests that targets hold back
    #[arg(long)]
    pub noflush: bool,
    /// Accepted for compatibility with dmsetup; udm has no file system to freeze
    #[arg(long)]
    pub nolockfs: bool,
}

/// The arguments of `udm events`.
#[derive(Debug, Args)]
pub struct EventsArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    /// Print JSON, one object per line
    #[arg(long)]
    pub json: bool,
    /// Begin after the event with this number
    #[arg(long, value_name = "ID")]
    pub after: Option<u64>,
    /// End after so many events
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Only events of these devices, by name, uuid or number [default: all]
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
}

/// The arguments of `udm top`.
#[derive(Debug, Args)]
pub struct TopArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    /// Print the figures of one interval, and exit
    #[arg(long)]
    pub once: bool,
    /// Print JSON: one line per interval, or with --once one object over several lines
    #[arg(long)]
    pub json: bool,
    /// Seconds between updates (0.1 to 3600)
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    pub interval: Duration,
}

fn interval(word: &str) -> Result<Duration, String> {
    let range = Duration::from_millis(100)..=Duration::from_secs(3600);
    seconds(word).and_then(|d| if range.contains(&d) { Ok(d) } else { Err("not in 0.1..=3600".into()) })
}

/// The arguments of `udm message`.
#[derive(Debug, Args)]
pub struct MessageArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    #[command(flatten)]
    pub print: Print,
    /// The device
    pub name: String,
    /// A sector inside the target; 0 addresses the first target
    pub sector: u64,
    /// The words of the message; put -- before them if one begins with -
    #[arg(required = true)]
    pub message: Vec<String>,
}

/// The arguments of `udm queue`.
#[derive(Debug, Args)]
pub struct QueueArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    #[command(flatten)]
    pub print: Print,
    /// The device
    pub name: String,
    /// Settings to change [default: show the present ones]
    #[arg(value_name = "SETTING")]
    pub settings: Vec<String>,
    /// Only this queue, by number or URI as udm queue shows them
    #[arg(long, value_name = "DISK")]
    pub disk: Option<String>,
}

/// The arguments of `udm power`.
#[derive(Debug, Args)]
pub struct PowerArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    #[command(flatten)]
    pub print: Print,
    /// The device
    pub name: String,
    /// The new state of the switch [default: show the present one]
    pub switch: Option<PowerSwitch>,
    /// Only this disk, by number or URI as udm power shows them
    #[arg(long, value_name = "DISK")]
    pub disk: Option<String>,
}

/// The state of a power switch; null_blk's attribute has 1 and 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PowerSwitch {
    /// The disk has power
    #[value(alias = "1")]
    On,
    /// The disk has no power
    #[value(alias = "0")]
    Off,
}
