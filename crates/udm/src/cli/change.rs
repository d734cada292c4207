//! What verbs that change a device take.

use super::{Print, ServerArgs, seconds};
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;

/// `udm create`.
#[derive(Debug, Args)]
pub struct CreateArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    #[command(flatten)]
    pub print: Print,
    /// Its name; with --concise the devices [default: standard input]
    #[arg(required_unless_present = "concise", value_name = "NAME|DEVICES")]
    pub name: Option<String>,
    /// A file that holds the table [default: standard input]; relative paths in a table count from
    /// the current folder
    #[arg(conflicts_with_all = ["table", "notable"])]
    pub file: Option<PathBuf>,
    /// The table
    #[arg(long, conflicts_with = "notable")]
    pub table: Option<String>,
    /// Make it without a table
    #[arg(short, long)]
    pub notable: bool,
    /// Its uuid
    #[arg(short, long)]
    pub uuid: Option<String>,
    /// With this or the next option, a multipath device that is request-based (queue_mode other
    /// than bio) has a queue: tags of a hardware queue, 0 for 2048, at most 10240
    #[arg(long = "dm_mq_queue_depth", value_name = "N", conflicts_with = "concise")]
    pub dm_mq_queue_depth: Option<u32>,
    /// Its hardware queues: 0 for 1, at most 32 and as many as there are cores
    #[arg(long = "dm_mq_nr_hw_queues", value_name = "N", conflicts_with = "concise")]
    pub dm_mq_nr_hw_queues: Option<u32>,
    /// Make devices as udm table --concise prints them: NAME,UUID,MINOR,FLAGS,LINE,LINE;NAME,...;
    /// each of UUID, MINOR and FLAGS (rw or ro) may be empty
    #[arg(long, conflicts_with_all = ["file", "table", "notable", "uuid", "json"])]
    pub concise: bool,
}

/// `udm reconfigure`.
#[derive(Debug, Args)]
pub struct ReconfigureArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    #[command(flatten)]
    pub print: Print,
    /// Say what would be done, and do nothing
    #[arg(short = 'n', long)]
    pub dry_run: bool,
}

/// `udm rename`.
#[derive(Debug, Args)]
pub struct RenameArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    /// The device
    pub name: String,
    /// Its new name, or with --setuuid its uuid
    #[arg(value_name = "NEWNAME|UUID")]
    pub new: String,
    /// Give it a uuid, which it has not yet
    #[arg(long)]
    pub setuuid: bool,
}

/// `udm wait`.
#[derive(Debug, Args)]
pub struct WaitArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    #[command(flatten)]
    pub print: Print,
    /// The device
    pub name: String,
    /// The number of events that is known
    #[arg(default_value_t = 0)]
    pub event_nr: u32,
    /// Print the device as it is then, as udm info does
    #[arg(short, long)]
    pub verbose: bool,
    /// Give up after so many seconds [default: no limit]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub timeout: Option<Duration>,
}

/// `udm load`.
#[derive(Debug, Args)]
pub struct LoadArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    /// The device
    pub name: String,
    /// A file that holds the table [default: standard input]; relative paths in a table count from
    /// the current folder
    #[arg(conflicts_with = "table")]
    pub file: Option<PathBuf>,
    /// The table
    #[arg(long)]
    pub table: Option<String>,
}

/// Verbs that take devices and nothing else.
#[derive(Debug, Args)]
pub struct NamesArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    /// The devices
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
}

/// `udm remove`.
#[derive(Debug, Args)]
pub struct RemoveArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    #[command(flatten)]
    pub until: TimeoutArgs,
    /// The devices
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
    /// Fail all that is asked of them first
    #[arg(short, long)]
    pub force: bool,
    /// Remove those that are in use when they are not any more
    #[arg(long)]
    pub deferred: bool,
}

/// How long a verb may wait for requests in flight.
#[derive(Debug, Args)]
pub struct TimeoutArgs {
    /// Call it off after so many seconds, as Ctrl-C does: the device goes on as it was [default: no
    /// limit]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub timeout: Option<Duration>,
}

impl TimeoutArgs {
    /// As the control socket takes it.
    pub fn timeout_ms(&self) -> Option<u64> {
        self.timeout.map(|timeout| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX))
    }
}

/// `udm resume`.
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

/// `udm suspend`.
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
    /// Taken for the sake of dmsetup's users: there is no file system to freeze
    #[arg(long)]
    pub nolockfs: bool,
}

/// `udm events`.
#[derive(Debug, Args)]
pub struct EventsArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    /// Print JSON, a change a line
    #[arg(long)]
    pub json: bool,
    /// Begin behind the change with this number
    #[arg(long, value_name = "ID")]
    pub after: Option<u64>,
    /// End after so many changes
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Only those of these devices: by name, uuid or number [default: all]
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
}

/// `udm top`.
#[derive(Debug, Args)]
pub struct TopArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    /// Print what goes on in one interval, and end
    #[arg(long)]
    pub once: bool,
    /// Print JSON: an object a line for each interval, or with --once a readable one
    #[arg(long)]
    pub json: bool,
    /// How often to look, in seconds (0.1 to 3600)
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    pub interval: Duration,
}

fn interval(word: &str) -> Result<Duration, String> {
    let range = Duration::from_millis(100)..=Duration::from_secs(3600);
    seconds(word).and_then(|d| if range.contains(&d) { Ok(d) } else { Err("not in 0.1..=3600".into()) })
}

/// `udm message`.
#[derive(Debug, Args)]
pub struct MessageArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    #[command(flatten)]
    pub print: Print,
    /// The device
    pub name: String,
    /// A sector inside the target; 0 for the first
    pub sector: u64,
    /// The words of the message; behind -- where one begins with -
    #[arg(required = true)]
    pub message: Vec<String>,
}

/// `udm queue`.
#[derive(Debug, Args)]
pub struct QueueArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    #[command(flatten)]
    pub print: Print,
    /// The device
    pub name: String,
    /// What is to hold [default: show what holds]
    #[arg(value_name = "SETTING")]
    pub settings: Vec<String>,
    /// Only this queue, by its number or URI as they are shown
    #[arg(long, value_name = "DISK")]
    pub disk: Option<String>,
}

/// `udm power`.
#[derive(Debug, Args)]
pub struct PowerArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    #[command(flatten)]
    pub print: Print,
    /// The device
    pub name: String,
    /// Which way to turn it [default: show what is]
    pub switch: Option<PowerSwitch>,
    /// Only this disk, by its number or URI as they are shown
    #[arg(long, value_name = "DISK")]
    pub disk: Option<String>,
}

/// A switch: null_blk's attribute has 1 and 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PowerSwitch {
    /// There is power
    #[value(alias = "1")]
    On,
    /// There is none
    #[value(alias = "0")]
    Off,
}
