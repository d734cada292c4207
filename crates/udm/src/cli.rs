//! The command line: one clap tree, from which help, man pages and completions all come.
//!
//! This file lists the verbs. The arguments of a verb stand beside its code, and arguments that
//! verbs share stand in `args`.
//!
//! Verbs and options have the names of dmsetup, those for serving of nbdkit, those for load of fio.

use crate::args::SharedListArgs;
use crate::bench::BenchArgs;
use crate::cow::CowArgs;
use crate::demo::DemoArgs;
use crate::lab::LabArgs;
use crate::log_writes::LogWritesArgs;
use crate::multipath::MultipathArgs;
use crate::serve::ServeArgs;
use crate::snapshot::SnapshotArgs;
use crate::top::TopArgs;
use crate::verbs::change::{
    CreateArgs, DeviceNamesArgs, LoadTableArgs, MessageArgs, RemoveArgs, RenameArgs, ResumeArgs, SuspendArgs,
};
use crate::verbs::clone::CloneArgs;
use crate::verbs::events::EventsArgs;
use crate::verbs::generate::GenerateArgs;
use crate::verbs::info::InfoArgs;
use crate::verbs::moves::MoveArgs;
use crate::verbs::nvme::NvmeArgs;
use crate::verbs::power::PowerArgs;
use crate::verbs::queue::QueueArgs;
use crate::verbs::reconfigure::ReconfigureArgs;
use crate::verbs::show::{LsArgs, TableArgs, TableStatusArgs};
use crate::verbs::throttle::ThrottleArgs;
use crate::verbs::tree::DepsArgs;
use crate::verbs::ublk::UblkArgs;
use crate::verbs::upgrade::UpgradeArgs;
use crate::verbs::vhost_user::VhostUserArgs;
use crate::verbs::wait::WaitArgs;
use crate::web::WebArgs;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};

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
    pub verb: CliVerb,
}

/// The verbs of the command line.
#[derive(Debug, Subcommand)]
pub enum CliVerb {
    /// Serve devices to NBD clients
    Serve(Box<ServeArgs>),
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
    Load(LoadTableArgs),
    /// Empty the inactive slot
    Clear(DeviceNamesArgs),
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
    /// Show or change the limits of a device's requests and bytes per second
    #[command(
        after_help = "A LIMIT is KEY=RATE or KEY=RATE:BURST. The keys are iops and bps for all requests, riops and rbps for reads, wiops and wbps for all others (the kernel's io.max); none ends all limits. \
RATE is in requests or bytes a second. BURST is what may pass at once after a pause; by default, what the rate gives in 100 ms. \
A new list replaces the old one. Devices of a --group share one list: its limits may be left out if the group has a device, and otherwise hold for all its devices. \
Requests that exceed a limit wait; none fails. Limits end with the server unless they are in its file (docs/config.md).\n\n\
Examples:\n  udm throttle disk iops=2000 wbps=50M:1G\n  udm throttle disk2 --group tenant7 iops=5000\n  udm throttle disk none"
    )]
    Throttle(ThrottleArgs),
    /// Show the NVMe/TCP target of the server, and set its ANA states
    #[command(
        after_help = "Examples:\n  udm nvme ls --json\n  udm nvme ana\n  udm nvme ana disk inaccessible --port 192.0.2.1:4420\n  udm nvme ana --all optimized"
    )]
    Nvme(NvmeArgs),
    /// Add, remove or list sockets on which devices are served to virtual machines
    #[command(
        after_help = "Examples:\n  udm vhost-user add vm1 /run/udm/vm1.sock\n  udm vhost-user list\n  udm vhost-user remove vm1 /run/udm/vm1.sock"
    )]
    VhostUser(VhostUserArgs),
    /// Add, remove or list block devices of this machine (ublk)
    #[command(
        after_help = "Needs the kernel's ublk driver (Linux 6.5) and mostly root. A server with --sandbox has no block devices.\n\n\
Examples:\n  udm ublk add disk\n  udm ublk add disk --number 7 --queues 2\n  udm ublk list\n  udm ublk remove disk"
    )]
    Ublk(UblkArgs),
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
    Status(TableStatusArgs),
    /// Describe devices
    Info(InfoArgs),
    /// List devices
    Ls(LsArgs),
    /// List the devices below each device
    Deps(DepsArgs),
    /// List the devices that NBD clients can connect to
    Exports(SharedListArgs),
    /// Have the server read its configuration file again and apply the changes
    #[command(
        after_help = "Creates devices that are new in the file, removes devices no longer in it, and reloads devices whose table changed. Each device is changed completely or not at all, \
and a device is changed before the devices that use it. A change that fails is reported, the others are made, and the exit status is 1. A device in use is not removed. \
Devices that were created by verbs and are not in the file are left alone. A device that verbs changed is left alone until its entry in the file changes. \
If the file has an error, nothing is changed. SIGHUP does the same.\n\n\
Output: + NAME created, - NAME removed, ~ NAME another table, = N unchanged."
    )]
    Reconfigure(ReconfigureArgs),
    /// Replace a running server by another version; its clients stay connected
    #[command(
        after_help = "The server starts PROGRAM with its own arguments. Once that is ready, the server waits for requests in flight and hands over its devices, connections, sockets and exports; then it ends. \
NBD clients and virtual machines see a pause and no error. If PROGRAM does not start, or cannot take the devices over, the server goes on as it was. \
What cannot be handed over is refused before anything changes: contents of mem: and memory_backed devices, snapshots without a persistent store, merges, logs of log-writes, bad blocks of dust, suspended devices, serve --run. \
Counters and event numbers begin again. docs/upgrade.md has more.\n\n\
Example:\n  udm upgrade /usr/local/bin/udm"
    )]
    Upgrade(UpgradeArgs),
    /// List the types of target and their versions
    Targets(SharedListArgs),
    /// Print the versions of udm and of the device-mapper interface it implements
    Version(SharedListArgs),
    /// Read the log of a log-writes target, offline
    LogWrites(LogWritesArgs),
    /// Show multipath devices, their groups and paths, in the format of multipath-tools
    Multipath(MultipathArgs),
    /// Create, list, compare, merge and remove snapshots of devices
    Snapshot(SnapshotArgs),
    /// Create and list devices that are copied from a source while they are used; pause, start and
    /// finish the copy
    Clone(CloneArgs),
    /// Move a device to another place while it is used; list, pause, start and stop moves
    Move(MoveArgs),
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

/// The usage error of a server without an address to serve on.
pub fn no_listen_address_error() -> clap::Error {
    let mut cli = Cli::command();
    cli.build();
    let serve = cli.find_subcommand_mut("serve").expect("serve is a verb");
    serve.error(ErrorKind::MissingRequiredArgument, NO_ADDRESS)
}

/// The message for a server without an address to serve on.
const NO_ADDRESS: &str = "nowhere to serve: expected --unix PATH, --port N, --vhost-user NAME=PATH, --ublk NAME, --run CMD, a FILE, or sockets from a service manager ($LISTEN_FDS)";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_is_sound() {
        Cli::command().debug_assert();
    }
}
