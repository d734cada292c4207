//! The command line: one clap tree, from which help, man pages and completions all come.
//!
//! Verbs and flags are dmsetup's where dmsetup has them, nbdkit's for serving, fio's for load.

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

/// The device mapper in user space: tables, targets and status lines of the kernel's, served to NBD
/// clients, without root.
#[derive(Debug, Parser)]
#[command(name = "udm", version, max_term_width = 100, propagate_version = true)]
#[command(
    after_help = "Exit status: 0 done, 1 failed, 2 wrong usage; serve --run: that of its command; bench that was interrupted: 128.\n\n\
Environment: UDM_SOCKET, the control socket; UDM_STATE, the folder of what outlives a server; UDM_LOG, or RUST_LOG, what goes to the log: error, warn, info, debug; NO_COLOR."
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// Every verb.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Serve devices to NBD clients
    Serve(ServeArgs),
    /// Show in under a minute what udm does: no root, nothing to install
    Demo(DemoArgs),
    /// Measure a device with load, in fio's words
    #[command(args_override_self = true)]
    Bench(Box<BenchArgs>),
    /// Run the experiments that udm comes from again, each beside what it is compared with
    Lab(LabArgs),
    /// Make a device: load its table and resume it
    Create(CreateArgs),
    /// Remove devices that nobody uses
    #[command(
        after_help = "A device is in use while clients are connected to it or tables of other devices use it. --deferred removes it when it is not any more; udm message NAME 0 \
@cancel_deferred_remove undoes that. --force replaces its table by one that fails everything, whether it can be removed then or not: what is used is still refused, and stays so. Requests of clients that are under way then, and those that come while it waits for storage, fail at once; what storage has of them \
it keeps, so a write may still happen. Storage that hangs is waited for: --timeout bounds that, and what has not failed by then goes on."
    )]
    Remove(RemoveArgs),
    /// Give a device another name, or its uuid
    #[command(
        after_help = "The device goes on, whatever state it is in and whoever uses it: its number, its tables and its clients stay. New clients ask for the new name; \
with serve --export it is exported as long as its name is one of those. A uuid is given once. The name lasts as long as the server does."
    )]
    Rename(RenameArgs),
    /// Load a table into the inactive slot
    #[command(visible_alias = "reload")]
    Load(LoadArgs),
    /// Empty the inactive slot
    Clear(NamesArgs),
    /// Park new requests and wait for those in flight; of several devices all or none
    Suspend(SuspendArgs),
    /// Swap a loaded table in and let requests go; of several devices all or none
    Resume(ResumeArgs),
    /// Send a message to a target
    Message(MessageArgs),
    /// Show or change the queues in front of what a device's table uses, and its own
    #[command(
        after_help = "A SETTING is NAME=VALUE, as in the URI of a disk: scheduler, nr_requests, nomerges, max_sectors_kb, read_expire, write_expire, writes_starved, fifo_batch, front_merges. \
It holds for the disk, whichever tables use it, until its last table is gone; in front of a request-based device, as long as that. The command returns once all requests that were sent under the old settings have completed. \
If they do not complete within 10 s it fails, and the old settings stay.\n\n\
Example:\n  udm queue disk scheduler=mq-deadline nr_requests=64"
    )]
    Queue(QueueArgs),
    /// Show or turn the power of disks that a device's table uses
    #[command(
        after_help = "A null device with cache_size has a switch, as null_blk's power: off loses what was written and not flushed, and until it is on again every request fails. \
It is the disk's, whichever tables use it, until its last table is gone. Clients are not told, as with a disk that lost its power for a moment.\n\n\
Example:\n  udm power disk off && udm power disk on"
    )]
    Power(PowerArgs),
    /// Wait until the number of a device's events is another
    #[command(
        after_help = "Events are paths that fail and return, snapshots that end, renames and the removal of a device with a table: udm info has their number. \
An event that came between is not missed: udm wait NAME NUMBER returns at once where there is another number already."
    )]
    Wait(WaitArgs),
    /// Print what changes in a server as it comes: devices, paths, snapshots
    #[command(
        after_help = "A line has the time, the device and what has changed; with --json each is an object of a line, as /openapi.json describes it. What is too slow for the server is told how much it has lost. \
--after goes on behind a change that was seen before: the server keeps the last 1024, once somebody listens."
    )]
    Events(EventsArgs),
    /// Show devices and paths as they work: requests, bytes, latency, errors
    #[command(
        after_help = "In a terminal: arrows move, space unfolds the paths of a device, Enter shows one alone, n r b l i e o sort, ? has all keys, q ends. \
docs/top.md says what the columns are."
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
    /// List what devices lie on
    Deps(DepsArgs),
    /// List what NBD clients can connect to
    Exports(ListArgs),
    /// Have the server read its file again and do what it says
    #[command(
        after_help = "What the file has new is made, what it has no more is removed, what has another table gets it: each device all or nothing, those that are used before their \
users. What can't be done is said, the rest is done, and the exit status is 1; a device in use stays. What verbs made and the file does not name is left alone, and so is what verbs have \
changed until the file changes there. A file that is broken changes nothing. SIGHUP does the same.\n\n\
Output: + NAME made, - NAME removed, ~ NAME another table, = N as they were."
    )]
    Reconfigure(ReconfigureArgs),
    /// List the types of target and their versions
    Targets(ListArgs),
    /// Print the versions of udm and of what it follows
    Version(ListArgs),
    /// Read the log of a log-writes target, offline
    LogWrites(LogWritesArgs),
    /// Show multipath devices, their groups and paths, in the words of multipath-tools
    Multipath(MultipathArgs),
    /// Keep an instant of a device: make, list, compare, merge and remove snapshots
    Snapshot(SnapshotArgs),
    /// Look at the store of a snapshot, offline
    Cow(CowArgs),
    /// Show devices, paths and events in a browser
    #[command(
        after_help = "Prints the address to open, and runs until SIGINT or SIGTERM. Whoever knows that address sees what the server shows to its own user; another one is made at each start. \
From another machine: ssh -L 8080:127.0.0.1:PORT HOST, and localhost:8080 in its place."
    )]
    Web(WebArgs),
    /// Write man pages or completions
    #[command(hide = true)]
    Generate(GenerateArgs),
}

/// Where the server is.
#[derive(Debug, Args)]
pub struct ServerArgs {
    /// The control socket of the server [default: $UDM_SOCKET, or udm/udm.sock in $XDG_RUNTIME_DIR,
    /// /run/udm/udm.sock for root]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

/// How to print.
#[derive(Debug, Args)]
pub struct Print {
    /// Print JSON: sizes in bytes, times in nanoseconds
    #[arg(long)]
    pub json: bool,
}

/// `--lost-snapshots`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LostSnapshotsArg {
    /// The disk is not served.
    #[default]
    Refuse,
    /// The disk is served when they are back.
    Wait,
    /// They are lost.
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

/// `udm serve`.
#[derive(Debug, Args)]
#[command(
    after_help = "A TABLE has a target a line: START LENGTH TYPE ARGUMENTS, in sectors of 512 bytes, as for dmsetup. Devices in it are paths, \
URIs (file:, nbd:, null:, mem:, pattern:), major:minor, or @NAME for another device. A DEVICE alone is the table that maps all of it. docs/targets.md \
has each target and each kind of device with an example.\n\n\
Examples:\n  udm serve --device disk=disk.img --unix /tmp/udm.sock\n  udm serve --device disk='0 2097152 linear file:disk.img 0' --unix /tmp/udm.sock\n  \
udm serve --device d='0 2097152 linear null:size=1G 0' --run 'nbdinfo $uri'\n  udm serve /etc/udm/udm.toml"
)]
pub struct ServeArgs {
    /// A file that says all this, and which devices there are; docs/config.md describes it. What
    /// the command line says too counts as it stands there
    #[arg(value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Read FILE, say whether it is good, and serve nothing
    #[arg(long, requires = "config", conflicts_with = "fork")]
    pub check: bool,
    /// A device and its table, the file that holds it, or the device that it maps whole; as often
    /// as wanted
    #[arg(long = "device", value_name = "NAME=TABLE|NAME=@FILE|NAME=DEVICE", value_parser = parse_device_arg)]
    pub devices: Vec<DeviceArg>,
    /// Serve NBD on a Unix socket; - makes one in a private folder
    #[arg(short = 'U', long, value_name = "PATH")]
    pub unix: Option<PathBuf>,
    /// Serve NBD on a TCP port
    #[arg(short, long, value_name = "N")]
    pub port: Option<u16>,
    /// The address to listen on with --port
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", requires = "port")]
    pub ipaddr: std::net::IpAddr,
    /// Export this device only; as often as wanted [default: all]
    #[arg(long = "export", value_name = "NAME")]
    pub exports: Vec<String>,
    /// Clients may not write
    #[arg(short, long)]
    pub readonly: bool,
    /// Run a command through /bin/sh with $uri, $unixsocket, $uri_NAME and $UDM_SOCKET set, then
    /// shut down with its status
    #[arg(long, value_name = "CMD")]
    pub run: Option<String>,
    /// The CPUs to use, one core each (0-3, 0,2) [default: one core, not pinned, for each CPU, at
    /// most 8]
    #[arg(long, value_name = "LIST")]
    pub cores: Option<CpuList>,
    /// Never sleep: spin for requests
    #[arg(long)]
    pub poll: bool,
    /// Check each path of multipath devices after so long (1 to 3600), up to 4 times that while it
    /// works, fail those that do not answer and reinstate those that do; off: only messages do, as
    /// with a kernel without multipathd [default: 5]
    #[arg(long, value_name = "SECONDS|off")]
    pub check_paths: Option<CheckPaths>,
    /// Look after them as a multipath.conf says: docs/multipath.md has its keys
    #[arg(long, value_name = "FILE")]
    pub multipath_conf: Option<PathBuf>,
    /// Fail a path of a multipath device that answers nothing for so long though it has a request,
    /// or keeps one for four times as long, and send its reads elsewhere; writes wait for it (0.01
    /// to 3600) [default: paths have all the time they want]
    #[arg(long, value_name = "SECONDS", value_parser = path_deadline)]
    pub path_deadline: Option<Duration>,
    /// Send a read of a multipath device that takes longer than most to a second path too, at most
    /// one in twenty
    #[arg(long)]
    pub hedge_reads: bool,
    /// Put a path of a multipath device out of use for a while when its reads take much longer than
    /// those of the others of its group
    #[arg(long)]
    pub eject_slow_paths: bool,
    /// With this or the next option, request-based multipath devices (queue_mode other than bio)
    /// have a queue: tags of a hardware queue, 0 for 2048, at most 10240
    #[arg(long = "dm_mq_queue_depth", value_name = "N")]
    pub dm_mq_queue_depth: Option<u32>,
    /// Its hardware queues: 0 for 1, at most 32 and as many as there are cores
    #[arg(long = "dm_mq_nr_hw_queues", value_name = "N")]
    pub dm_mq_nr_hw_queues: Option<u32>,
    /// What becomes of a disk that has a persistent snapshot which can't be attached, because its
    /// store is away: refuse does not serve it, wait serves it when the store is back, give-up
    /// serves it at once, and the snapshot is lost
    #[arg(long, value_name = "refuse|wait|give-up", default_value = "refuse", hide_possible_values = true)]
    pub lost_snapshots: LostSnapshotsArg,
    /// Return when the devices are served, and serve in the background; the log goes on to standard
    /// error if that is a file
    #[arg(long, conflicts_with = "run")]
    pub fork: bool,
    /// Write the server's process ID to a file when the devices are served, and remove it at the
    /// end
    #[arg(short = 'P', long, value_name = "FILE")]
    pub pidfile: Option<PathBuf>,
    /// How the server in the background tells the one who started it
    #[arg(long, hide = true)]
    pub ready_on_stdout: bool,
    /// How long the end may take when a signal has come; then udm says what it leaves and exits
    /// with status 1
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub stop_timeout: u64,
    /// Where to put the control socket [default: as the verbs look for it; with --run a private
    /// one]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    #[command(flatten)]
    pub state: StateArgs,
}

/// Where a server keeps what outlives it.
#[derive(Debug, Args)]
pub struct StateArgs {
    /// Where is kept that a store must not be believed which could not be told so [default:
    /// $UDM_STATE, /var/lib/udm for root, or udm in $XDG_STATE_HOME or ~/.local/state]
    #[arg(long = "state", value_name = "FOLDER")]
    pub folder: Option<PathBuf>,
}

impl ServeArgs {
    /// What is wrong where nothing says where to serve: neither the command line, nor a file, nor
    /// sockets that the server was started with.
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

/// What a server without a place to serve on is told.
const NOWHERE: &str = "where to serve? --unix PATH, --port N, --run CMD or a FILE is wanted, or sockets of a service manager's ($LISTEN_FDS)";

/// A device of `--device`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceArg {
    /// Its name.
    pub name: String,
    /// Its table.
    pub table: TableArg,
}

/// Where a table is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TableArg {
    /// Here.
    Text(String),
    /// In a file.
    File(PathBuf),
    /// All of a device.
    Whole(String),
}

/// `NAME=TABLE` or `NAME=@FILE`.
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

/// `udm demo`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct DemoArgs {
    #[command(subcommand)]
    pub what: Option<DemoVerb>,
    #[command(flatten)]
    pub print: Print,
    /// How long the verified load runs, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub runtime: u64,
}

/// What `udm demo` shows instead.
#[derive(Debug, Subcommand)]
pub enum DemoVerb {
    /// A hundred writable disks from one image, each with an NBD client
    Disks(Print),
    /// Backups of two volumes at one instant, under a load: of everything, and of what has changed
    Backup(Print),
    /// Two NBD servers of one file as paths: one is stopped, killed or cut off, or both, under fio
    Cable(Print),
}

/// The deadline of a path.
fn path_deadline(word: &str) -> Result<Duration, String> {
    let range = Duration::from_millis(10)..=Duration::from_secs(3600);
    seconds(word).and_then(|d| if range.contains(&d) { Ok(d) } else { Err("not in 0.01..=3600".into()) })
}

/// Seconds, with or without a fraction.
fn seconds(word: &str) -> Result<Duration, String> {
    let seconds: f64 = word.parse().map_err(|_| "a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|e| e.to_string())
}

/// Verbs that list.
#[derive(Debug, Args)]
pub struct ListArgs {
    #[command(flatten)]
    pub talk: ServerArgs,
    #[command(flatten)]
    pub print: Print,
}

/// `udm generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// What to write
    pub what: GenerateKind,
    /// The folder to write to; it is made when it is missing
    pub folder: PathBuf,
}

/// What `udm generate` can write.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum GenerateKind {
    /// A man page a verb, of udm.toml and of udm as dmsetup.
    Man,
    /// For bash, fish and zsh.
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
