//! The command line: one clap tree, from which help, man pages and completions all come.
//!
//! Verbs and options have the names of dmsetup, those for serving of nbdkit, those for load of fio.

mod change;
mod show;

pub use change::*;
pub use show::*;

use crate::bench::BenchArgs;
use crate::cow::CowArgs;
use crate::lab::LabArgs;
use crate::log_writes::LogWritesArgs;
use crate::multipath::MultipathArgs;
use crate::serve::CheckPaths;
use crate::snapshot::SnapshotArgs;
use crate::web::WebArgs;
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;
use udm_wire::cpus::CpuList;

/// The device mapper in user space, without root: the kernel's tables, targets and status lines,
/// served to NBD clients
#[derive(Debug, Parser)]
#[command(name = "udm", version, max_term_width = 100, propagate_version = true)]
#[command(
    after_help = "Exit status: 0 done, 1 failed, 2 wrong usage; serve --run: the status of its command; bench that was interrupted: 128.\n\n\
Environment: UDM_SOCKET, the control socket; UDM_STATE, the folder with state that must survive a restart of the server; UDM_LOG or RUST_LOG, the log level: error, warn, info, debug; NO_COLOR."
)]
pub struct Cli {
    /// The verb.
    #[command(subcommand)]
    pub verb: Verb,
}

/// The verbs of the command line.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Serve devices to NBD clients
    Serve(ServeArgs),
    /// Show in under a minute what udm does; needs no root and no installation
    Demo(DemoArgs),
    /// Measure a device under load; options are named as in fio
    #[command(args_override_self = true)]
    Bench(Box<BenchArgs>),
    /// Repeat the experiments that udm is based on, and compare the results with the originals
    Lab(LabArgs),
    /// Create a device: load its table and resume it
    Create(CreateArgs),
    /// Remove devices that are not in use
    #[command(
        after_help = "A device is in use while clients are connected to it or tables of other devices use it. --deferred removes it as soon as it is no longer in use; \
udm message NAME 0 @cancel_deferred_remove cancels that. --force first replaces its table by one that fails every request. A device in use is refused all the same, and keeps the failing table. \
Requests in flight, and requests that arrive while the command waits for storage, fail at once. The storage may still carry out a write that failed. \
The command waits for storage that does not answer; --timeout limits the wait. Requests that have not failed by then continue."
    )]
    Remove(RemoveArgs),
    /// Change the name of a device, or set its uuid
    #[command(
        after_help = "The device keeps its state, its number, its tables and its clients. New clients use the new name; \
with serve --export the device is exported only while its name is in that list. A uuid can be set only once. The new name is lost when the server ends."
    )]
    Rename(RenameArgs),
    /// Load a table into the inactive slot
    #[command(visible_alias = "reload")]
    Load(LoadArgs),
    /// Empty the inactive slot
    Clear(NamesArgs),
    /// Hold back new requests and wait for those in flight; several devices: all or none
    Suspend(SuspendArgs),
    /// Make a loaded table live and submit the requests held back; several devices: all or none
    Resume(ResumeArgs),
    /// Send a message to a target
    Message(MessageArgs),
    /// Show or change the request queues of a device and of the disks below it
    #[command(
        after_help = "A SETTING is NAME=VALUE, as in the URI of a disk: scheduler, nr_requests, nomerges, max_sectors_kb, read_expire, write_expire, writes_starved, fifo_batch, front_merges. \
The settings of a disk apply to all tables that use it, until the last of these tables is closed. Those of a request-based device last as long as the device. \
The command returns once all requests that were sent under the old settings have completed. \
If they do not complete within 10 s it fails, and the old settings stay.\n\n\
Example:\n  udm queue disk scheduler=mq-deadline nr_requests=64"
    )]
    Queue(QueueArgs),
    /// Show or switch the power of disks that a device's table uses
    #[command(
        after_help = "A null device with cache_size has a power switch, like null_blk's power attribute. Off discards all data that was written but not flushed; every request fails until the power is on again. \
The switch applies to all tables that use the disk, until the last of them is closed. Clients are not notified, as with a disk that loses power for a moment.\n\n\
Example:\n  udm power disk off && udm power disk on"
    )]
    Power(PowerArgs),
    /// Wait for the event counter of a device to change
    #[command(
        after_help = "Events are path failures and reinstatements, invalidated or finished snapshots, renames, and the removal of a device with a table. udm info prints the counter. \
Pass the last number that you saw: if the counter has changed since, udm wait NAME NUMBER returns at once."
    )]
    Wait(WaitArgs),
    /// Print the events of a server as they occur: devices, paths, snapshots
    #[command(
        after_help = "A line has the time, the device and the event; with --json each line is an object, which /openapi.json describes. A client that reads too slowly receives an event `lost` with the number of events dropped. \
--after ID resumes after event ID: the server keeps the last 1024 events from the moment it has a first listener."
    )]
    Events(EventsArgs),
    /// Show live figures of devices and paths: requests, bytes, latency, errors
    #[command(
        after_help = "In a terminal: arrows move, space unfolds the paths of a device, Enter shows only one device, n r b l i e o sort, ? lists all keys, q quits. \
docs/top.md describes the columns."
    )]
    Top(TopArgs),
    /// Print tables
    Table(TableArgs),
    /// Print the status of tables
    Status(ShowArgs),
    /// Describe devices
    Info(InfoArgs),
    /// List devices
    Ls(LsArgs),
    /// List the devices below each device
    Deps(DepsArgs),
    /// List the devices that NBD clients can connect to
    Exports(ListArgs),
    /// Have the server read its configuration file again and apply the changes
    #[command(
        after_help = "Creates devices that are new in the file, removes devices no longer in it, and reloads devices whose table changed. Each device is changed completely or not at all, \
and a device is changed before the devices that use it. A change that fails is reported, the others are made, and the exit status is 1. A device in use is not removed. \
Devices that were created by verbs and are not in the file are left alone. A device that verbs changed is left alone until its entry in the file changes. \
If the file has an error, nothing is changed. SIGHUP does the same.\n\n\
Output: + NAME created, - NAME removed, ~ NAME another table, = N unchanged."
    )]
    Reconfigure(ReconfigureArgs),
    /// List the types of target and their versions
    Targets(ListArgs),
    /// Print the versions of udm and of the device-mapper interface it implements
    Version(ListArgs),
    /// Read the log of a log-writes target, offline
    LogWrites(LogWritesArgs),
    /// Show multipath devices, their groups and paths, in the format of multipath-tools
    Multipath(MultipathArgs),
    /// Create, list, compare, merge and remove snapshots of devices
    Snapshot(SnapshotArgs),
    /// Inspect or compact the store of a snapshot, offline
    Cow(CowArgs),
    /// Show devices, paths and events in a browser
    #[command(
        after_help = "Prints the address to open, and runs until SIGINT or SIGTERM. The address contains a secret, new at each start: anyone who knows it sees what the server shows to its own user. \
From another machine: ssh -L 8080:127.0.0.1:PORT HOST, and localhost:8080 instead of the printed host and port."
    )]
    Web(WebArgs),
    /// Write man pages or completions
    #[command(hide = true)]
    Generate(GenerateArgs),
}

/// The address of the server.
#[derive(Debug, Args)]
pub struct ServerArgs {
    /// The control socket of the server [default: $UDM_SOCKET, or udm/udm.sock in $XDG_RUNTIME_DIR,
    /// /run/udm/udm.sock for root]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

/// The output format.
#[derive(Debug, Args)]
pub struct Print {
    /// Print JSON: sizes in bytes, times in nanoseconds
    #[arg(long)]
    pub json: bool,
}

/// The value of `--lost-snapshots`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LostSnapshotsArg {
    /// The disk is not served.
    #[default]
    Refuse,
    /// The disk is served once its snapshots can be attached.
    Wait,
    /// The snapshots are given up, and the disk is served at once.
    GiveUp,
}

impl From<LostSnapshotsArg> for udm_control::verbs::snapshot::LostSnapshots {
    fn from(arg: LostSnapshotsArg) -> Self {
        match arg {
            LostSnapshotsArg::Refuse => Self::Refuse,
            LostSnapshotsArg::Wait => Self::Wait,
            LostSnapshotsArg::GiveUp => Self::GiveUp,
        }
    }
}

/// The arguments of `udm serve`.
#[derive(Debug, Args)]
#[command(
    after_help = "A TABLE has one target per line: START LENGTH TYPE ARGUMENTS, in sectors of 512 bytes, as for dmsetup. A device in a table is a path, \
a URI (file:, nbd:, null:, mem:, pattern:), major:minor, or @NAME for another device. A DEVICE alone stands for a table that maps all of it. docs/targets.md \
has an example of each target and each kind of device.\n\n\
Examples:\n  udm serve --device disk=disk.img --unix /tmp/udm.sock\n  udm serve --device disk='0 2097152 linear file:disk.img 0' --unix /tmp/udm.sock\n  \
udm serve --device d='0 2097152 linear null:size=1G 0' --run 'nbdinfo $uri'\n  udm serve /etc/udm/udm.toml"
)]
pub struct ServeArgs {
    /// A configuration file with these options and the devices; docs/config.md describes it.
    /// Options of the command line override those of the file
    #[arg(value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Check FILE, report errors, and serve nothing
    #[arg(long, requires = "config", conflicts_with = "fork")]
    pub check: bool,
    /// A device and its table, a file with the table, or another device to map as a whole; may be
    /// repeated
    #[arg(long = "device", value_name = "NAME=TABLE|NAME=@FILE|NAME=DEVICE", value_parser = parse_device_arg)]
    pub devices: Vec<DeviceArg>,
    /// Serve NBD on a Unix socket; - creates one in a private folder
    #[arg(short = 'U', long, value_name = "PATH")]
    pub unix: Option<PathBuf>,
    /// Serve NBD on a TCP port
    #[arg(short, long, value_name = "N")]
    pub port: Option<u16>,
    /// The address to listen on with --port
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", requires = "port")]
    pub ipaddr: std::net::IpAddr,
    /// Export only this device; may be repeated [default: all]
    #[arg(long = "export", value_name = "NAME")]
    pub exports: Vec<String>,
    /// Do not let clients write
    #[arg(short, long)]
    pub readonly: bool,
    /// Run a command through /bin/sh with $uri, $unixsocket, $uri_NAME and $UDM_SOCKET set, then
    /// shut down with its status
    #[arg(long, value_name = "CMD")]
    pub run: Option<String>,
    /// The CPUs to use, one core each (0-3, 0,2) [default: one core per CPU, at most 8, not pinned]
    #[arg(long, value_name = "LIST")]
    pub cores: Option<CpuList>,
    /// Poll for requests without sleeping
    #[arg(long)]
    pub poll: bool,
    /// Check the paths of multipath devices at this interval (1 to 3600), and up to 4 times as long
    /// for working paths; fail paths that do not answer, and reinstate those that do. off: paths
    /// fail by I/O errors and messages only, as with a kernel without multipathd [default: 5]
    #[arg(long, value_name = "SECONDS|off")]
    pub check_paths: Option<CheckPaths>,
    /// Maintain paths as this multipath.conf says; docs/multipath.md lists its keys
    #[arg(long, value_name = "FILE")]
    pub multipath_conf: Option<PathBuf>,
    /// Fail a path of a multipath device that answers nothing for this long though a request is
    /// pending, or keeps one request four times as long. Its reads are sent to other paths; its
    /// writes wait (0.01 to 3600) [default: no deadline]
    #[arg(long, value_name = "SECONDS", value_parser = path_deadline)]
    pub path_deadline: Option<Duration>,
    /// Send a read of a multipath device that takes longer than most also to a second path, for at
    /// most one read in twenty
    #[arg(long)]
    pub hedge_reads: bool,
    /// Eject a path of a multipath device for a while if its reads take much longer than those of
    /// the other paths of its group
    #[arg(long)]
    pub eject_slow_paths: bool,
    /// Queue depth of request-based multipath devices (queue_mode other than bio): the tags of each
    /// hardware queue, 0 for 2048, at most 10240. Such devices have a queue only with this or the
    /// next option
    #[arg(long = "dm_mq_queue_depth", value_name = "N")]
    pub dm_mq_queue_depth: Option<u32>,
    /// Number of hardware queues of these devices: 0 for 1, at most 32 and at most one per core
    #[arg(long = "dm_mq_nr_hw_queues", value_name = "N")]
    pub dm_mq_nr_hw_queues: Option<u32>,
    /// How to serve a disk with a persistent snapshot that cannot be attached because its store is
    /// missing: refuse does not serve it, wait serves it once the store is back, give-up serves it
    /// at once and the snapshot is lost
    #[arg(long, value_name = "refuse|wait|give-up", default_value = "refuse", hide_possible_values = true)]
    pub lost_snapshots: LostSnapshotsArg,
    /// Serve in the background, and return when the devices are served; the log goes to standard
    /// error if that is a file
    #[arg(long, conflicts_with = "run")]
    pub fork: bool,
    /// Write the server's process ID to a file when the devices are served, and remove the file at
    /// the end
    #[arg(short = 'P', long, value_name = "FILE")]
    pub pidfile: Option<PathBuf>,
    /// Used by --fork: report readiness on standard output
    #[arg(long, hide = true)]
    pub ready_on_stdout: bool,
    /// How long a shutdown after a signal may take; after that udm reports what it abandons and
    /// exits with status 1
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub stop_timeout: u64,
    /// The control socket [default: as for the other verbs; with --run a private one]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    #[command(flatten)]
    pub state: StateArgs,
}

/// The state folder of a server.
#[derive(Debug, Args)]
pub struct StateArgs {
    /// Folder for state that must survive a restart, such as the list of snapshot stores known to
    /// be invalid [default: $UDM_STATE, /var/lib/udm for root, or udm in $XDG_STATE_HOME or
    /// ~/.local/state]
    #[arg(long = "state", value_name = "FOLDER")]
    pub folder: Option<PathBuf>,
}

impl ServeArgs {
    /// The usage error of a server that has nowhere to serve: neither options, nor a file, nor
    /// inherited sockets say where.
    pub fn check_listen_args(&self) -> Option<clap::Error> {
        let is_said =
            self.config.is_some() || self.unix.is_some() || self.port.is_some() || self.run.is_some();
        (!is_said && std::env::var_os("LISTEN_FDS").is_none()).then(|| {
            let mut cli = Cli::command();
            cli.build();
            let serve = cli.find_subcommand_mut("serve").expect("it is one");
            serve.error(ErrorKind::MissingRequiredArgument, NOWHERE)
        })
    }
}

/// The message for a server without an address to serve on.
const NOWHERE: &str = "nowhere to serve: expected --unix PATH, --port N, --run CMD, a FILE, or sockets from a service manager ($LISTEN_FDS)";

/// The value of `--device`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceArg {
    /// The name of the device.
    pub name: String,
    /// The table of the device.
    pub table: TableArg,
}

/// The source of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TableArg {
    /// The table itself.
    Text(String),
    /// A file that holds the table.
    File(PathBuf),
    /// Another device, to be mapped as a whole.
    Whole(String),
}

/// Parses `NAME=TABLE`, `NAME=@FILE` or `NAME=DEVICE`.
fn parse_device_arg(text: &str) -> Result<DeviceArg, String> {
    let (name, table) = text
        .split_once('=')
        .ok_or("expected NAME=TABLE, NAME=@FILE or NAME=DEVICE, such as disk=disk.img")?;
    if name.is_empty() {
        return Err("the name is missing".into());
    }
    let table = match table.strip_prefix('@') {
        Some("") => return Err("the file is missing".into()),
        Some(file) => TableArg::File(file.into()),
        None if udm_wire::table::is_table(table) => TableArg::Text(table.into()),
        None => TableArg::Whole(table.into()),
    };
    Ok(DeviceArg { name: name.into(), table })
}

/// The arguments of `udm demo`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct DemoArgs {
    #[command(subcommand)]
    pub what: Option<DemoVerb>,
    #[command(flatten)]
    pub print: Print,
    /// Seconds of the verified load
    #[arg(long, value_name = "SECONDS", default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub runtime: u64,
}

/// The other demonstrations of `udm demo`.
#[derive(Debug, Subcommand)]
pub enum DemoVerb {
    /// A hundred writable disks from one image, each with an NBD client
    Disks(Print),
    /// Backups of two volumes at the same instant, under load: full and incremental
    Backup(Print),
    /// Two NBD servers of one file as paths: under fio, one or both are stopped, killed or cut off
    Cable(Print),
}

/// Parses the deadline of a path, in seconds.
fn path_deadline(word: &str) -> Result<Duration, String> {
    let range = Duration::from_millis(10)..=Duration::from_secs(3600);
    seconds(word).and_then(|d| if range.contains(&d) { Ok(d) } else { Err("not in 0.01..=3600".into()) })
}

/// Parses seconds, with or without a fraction.
fn seconds(word: &str) -> Result<Duration, String> {
    let seconds: f64 = word.parse().map_err(|_| "a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|e| e.to_string())
}

/// The arguments of verbs that list.
#[derive(Debug, Args)]
pub struct ListArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    #[command(flatten)]
    pub print: Print,
}

/// The arguments of `udm generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// The kind of files to write
    pub what: GenerateKind,
    /// The folder to write to; it is created if it is missing
    pub folder: PathBuf,
}

/// The kinds of files that `udm generate` writes.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum GenerateKind {
    /// Man pages: one per verb, one of udm.toml and one of udm as dmsetup.
    Man,
    /// Completions for bash, fish and zsh.
    Completions,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn devices() {
        let arg = parse_device_arg("d=0 8 linear file:x?direct=on 0").unwrap();
        assert_eq!(
            (arg.name.as_str(), arg.table),
            ("d", TableArg::Text("0 8 linear file:x?direct=on 0".into()))
        );
        for device in ["disk.img", "my disk.img", "/dev/sda", "mem:1G", "253:0", "file:x?direct=on"] {
            let whole = TableArg::Whole(device.into());
            assert_eq!(parse_device_arg(&format!("d={device}")).unwrap().table, whole);
        }
        for table in ["0 8 zero", " 0 8 zero", "", "0", "# none\n", "a\nb", "0\t8 zero"] {
            let text = TableArg::Text(table.into());
            assert_eq!(parse_device_arg(&format!("d={table}")).unwrap().table, text);
        }
        assert_eq!(parse_device_arg("d=@/etc/t").unwrap().table, TableArg::File("/etc/t".into()));
        for bad in ["", "d", "=0 8 error", "d=@"] {
            assert!(parse_device_arg(bad).is_err(), "{bad}");
        }
    }
}
