//! `udm multipath`: multipath devices in the format of multipath-tools, from a running `udm serve`.
//!
//! The output is composed of the server's list of devices, their tables and their statuses. Fields
//! without a value in udm print as multipath-tools prints unknown ones (`#:#:#:#`, `##`).

mod map_reader;
mod print;

use crate::args::{OutputFormatArgs, ServerArgs};
use crate::output::{print_json_to_stdout, print_to_stdout};
use crate::requests::{current_dir, explain_client_error};
use anyhow::{Result, bail};
use clap::{ArgAction, Args, Subcommand, ValueEnum};
use map_reader::{MultipathMap, MultipathPath};
use serde::Serialize;
use udm_control::api::{self, verbs};
use udm_control::client::{ControlClient, ControlClientError};
use udm_core::errno::{EINVAL, ENOENT, ENXIO};

/// The arguments of `udm multipath`.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:\n  udm multipath -ll\n  udm multipath -ll mp\n  udm multipath show paths\n  udm multipath show paths format '%d %t %T'\n  udm multipath fail path disk.img\n  udm multipath switch map mp group 2\n\n\
Fields of a device: %n name, %w uuid, %d number as dm-N, %S size, %F failback and %Q queueing, each with the time left, %N paths in use, %0 path failures, %r rw or ro, %t active or suspend, %f features, %h handler. \
Fields of a path: %d name, %D number, %m device, %t active or failed, %T result of the last check, %p priority, %0 failures, %o running, %i #:#:#:#, %W reason why no check reinstates it. Fields of both: %s ##,##."
)]
pub struct MultipathArgs {
    #[command(subcommand)]
    verb: Option<MultipathVerb>,
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    print: OutputFormatArgs,
    /// List the devices with their groups and paths; -l and -ll are the same in udm
    #[arg(short, action = ArgAction::Count)]
    list: u8,
    /// Show only this device
    name: Option<String>,
}

#[derive(Debug, Subcommand)]
enum MultipathVerb {
    /// Create a device from paths to one disk
    Create(MultipathCreateArgs),
    /// Show paths, devices (maps), or devices with their groups and paths (topology), as multipathd
    /// does
    #[command(visible_alias = "list")]
    Show(MultipathShowArgs),
    /// Fail a path in all devices that have it, until it is reinstated by a command; checks do not
    /// reinstate it
    Fail(PathArgs),
    /// Reinstate a path in all devices that have it
    Reinstate(PathArgs),
    /// Switch to a group, if it has a path in use
    Switch(SwitchPathGroupArgs),
}

#[derive(Debug, Args)]
#[command(
    after_help = "Options that are not given are as the server's --multipath-conf says for a device of this name, else as in multipath-tools: failover, const, service-time 0. path_selector and features come only from there. \
Groups are ordered by their priority, then by their number of paths.\n\nExamples:\n  udm multipath create mp --policy multibus nbd://a/disk nbd://b/disk\n  \
udm multipath create mp --policy group_by_prio --prio weightedpath --prio-args 'devname *//a/* 50 devname * 10' nbd://a/disk nbd://b/disk"
)]
struct MultipathCreateArgs {
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    print: OutputFormatArgs,
    /// The name of the device
    name: String,
    /// How paths are grouped: one group per path, one group of all, or one group per priority
    #[arg(long, value_parser = ["failover", "multibus", "group_by_prio"])]
    policy: Option<String>,
    /// The prioritizer, which gives each path a priority for grouping and, if the server checks
    /// paths, continuously afterwards: const, weightedpath or, unless paths are grouped by
    /// priority, path_latency
    #[arg(long)]
    prio: Option<String>,
    /// Arguments of the prioritizer, as in multipath.conf
    #[arg(long, value_name = "ARGS", requires = "prio")]
    prio_args: Option<String>,
    /// The uuid of the device
    #[arg(short, long)]
    uuid: Option<String>,
    /// Files, block devices, NBD URIs or @devices, all of the same size
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<String>,
}

#[derive(Debug, Args)]
struct PathArgs {
    #[command(flatten)]
    server: ServerArgs,
    /// The word path
    #[arg(value_parser = ["path"])]
    what: String,
    /// The path: its name or number as show paths prints them, or its word in a table. A relative
    /// path is relative to the current folder
    path: String,
}

#[derive(Debug, Args)]
struct SwitchPathGroupArgs {
    #[command(flatten)]
    server: ServerArgs,
    /// The word map
    #[arg(value_parser = ["map", "multipath"])]
    what: String,
    /// The device
    name: String,
    /// The word group
    #[arg(value_parser = ["group"])]
    which: String,
    /// The number of the group, from 1
    group: u32,
}

#[derive(Debug, Args)]
struct MultipathShowArgs {
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    print: OutputFormatArgs,
    /// The kind of objects to show
    what: MultipathShowKind,
    /// json; format FORMAT, for columns; raw format FORMAT, without headings and padding; for maps
    /// also status: whether requests without a path are queued, and when failback happens
    #[arg(value_name = "HOW")]
    how: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum MultipathShowKind {
    /// All paths.
    Paths,
    /// All devices.
    #[value(alias = "multipaths")]
    Maps,
    /// Devices with their groups and paths.
    Topology,
}

/// The fields that multipathd shows of a path, plus the reason why it stays failed, and those of a
/// device.
const PATHS: &str = "%i %d %D %p %t %T %o %W";
const MAPS: &str = "%n %d %w";
const MAPS_STATUS: &str = "%n %F %Q %N %t %r";

/// The errors with which a device refuses a path that it does not have.
const NOT_THERE: [u32; 3] = [ENOENT as u32, ENXIO as u32, EINVAL as u32];

/// The head of multipathd's JSON.
#[derive(Serialize)]
struct MultipathdJsonReply<T> {
    major_version: u32,
    minor_version: u32,
    #[serde(flatten)]
    list: T,
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum MultipathdJsonList<'a> {
    Maps(&'a [MultipathMap]),
    Paths(Vec<&'a MultipathPath>),
}

fn print_multipathd_json(list: MultipathdJsonList<'_>) -> Result<()> {
    print_json_to_stdout(&MultipathdJsonReply { major_version: 0, minor_version: 1, list })
}

/// Runs the verb.
///
/// # Errors
/// The server refused a request, or a format letter is not known.
pub fn run(args: &MultipathArgs) -> Result<()> {
    match &args.verb {
        Some(MultipathVerb::Create(args)) => return run_multipath_create(args),
        Some(MultipathVerb::Show(args)) => return run_multipath_show(args),
        Some(MultipathVerb::Fail(args)) => return send_path_command(args, "fail"),
        Some(MultipathVerb::Reinstate(args)) => return send_path_command(args, "reinstate"),
        Some(MultipathVerb::Switch(args)) => {
            return send_message(&args.server.client()?, &args.name, format!("switch_group {}", args.group));
        }
        None => {}
    }
    let maps = map_reader::read_multipath_maps(&args.server.client()?, args.name.as_deref())?;
    if args.print.json {
        print_multipathd_json(MultipathdJsonList::Maps(&maps))
    } else {
        print_to_stdout(&print::format_multipath_topology(&maps))
    }
}

fn run_multipath_create(args: &MultipathCreateArgs) -> Result<()> {
    let MultipathCreateArgs { name, uuid, paths, policy, prio, prio_args, .. } = args;
    let new = api::CreateMultipathRequest {
        name: name.clone(),
        uuid: uuid.clone(),
        paths: paths.clone(),
        policy: policy.clone(),
        prio: prio.clone(),
        prio_args: prio_args.clone(),
        folder: current_dir(),
    };
    let created = args.server.client()?.call(verbs::CREATE_MULTIPATH, &new);
    let created = created.map_err(|e| explain_client_error(e, None))?;
    if args.print.json { print_json_to_stdout(&created) } else { Ok(()) }
}

fn run_multipath_show(args: &MultipathShowArgs) -> Result<()> {
    let how: Vec<&str> = args.how.iter().map(String::as_str).collect();
    let (as_json, raw, format) = match (how.as_slice(), args.what) {
        ([], _) => (args.print.json, false, None),
        (["json"], _) => (true, false, None),
        (["status"], MultipathShowKind::Maps) => (false, false, Some(MAPS_STATUS)),
        (["format", _] | ["raw", "format", _], MultipathShowKind::Topology) => {
            bail!("multipath show topology: it has no format")
        }
        (["format", format], _) => (false, false, Some(*format)),
        (["raw", "format", format], _) => (false, true, Some(*format)),
        _ => bail!("multipath show: what may follow is json, format FORMAT, or raw format FORMAT"),
    };
    let maps = map_reader::read_multipath_maps(&args.server.client()?, None)?;
    match args.what {
        MultipathShowKind::Paths if as_json => {
            print_multipathd_json(MultipathdJsonList::Paths(print::all_paths(&maps)))
        }
        MultipathShowKind::Maps | MultipathShowKind::Topology if as_json => {
            print_multipathd_json(MultipathdJsonList::Maps(&maps))
        }
        MultipathShowKind::Topology => print_to_stdout(&print::format_multipath_topology(&maps)),
        MultipathShowKind::Paths => {
            print_to_stdout(&print::format_multipath_paths(&maps, format.unwrap_or(PATHS), raw)?)
        }
        MultipathShowKind::Maps => {
            print_to_stdout(&print::format_multipath_maps(&maps, format.unwrap_or(MAPS), raw)?)
        }
    }
}

/// Sends a message to a device.
fn send_message(client: &ControlClient, device: &str, message: String) -> Result<()> {
    let message = api::TargetMessageRequest { sector: 0, message, folder: None };
    let answer = client.call(verbs::SEND_MESSAGE.on(device), &message);
    answer.map(drop).map_err(|e| explain_client_error(e, None))
}

fn send_path_command(args: &PathArgs, action: &str) -> Result<()> {
    let client = args.server.client()?;
    let maps = map_reader::read_multipath_maps(&client, None)?;
    let send_command = |device: &str, path: &str| {
        let command = api::FailOrReinstatePathRequest {
            path: path.into(),
            action: action.into(),
            folder: current_dir(),
        };
        client.call(verbs::COMMAND_PATH.on(device), &command)
    };
    let mut commanded = Vec::new();
    for path in print::all_paths(&maps) {
        let is_named = [&path.dev, &path.dev_t].contains(&&args.path);
        // A command applies to the path in every group that has it.
        if is_named && !commanded.contains(&(&path.multipath, &path.dev_t)) {
            send_command(&path.multipath, &path.dev_t).map_err(|e| explain_client_error(e, None))?;
            commanded.push((&path.multipath, &path.dev_t));
        }
    }
    let mut done = !commanded.is_empty();
    // The argument may be another word for a path, as in a table. Only the server can resolve it.
    for map in maps.iter().filter(|_| commanded.is_empty()) {
        match send_command(&map.name, &args.path) {
            Ok(()) => done = true,
            Err(ControlClientError::Refused(e)) if NOT_THERE.contains(&e.errno) => {}
            Err(e) => return Err(explain_client_error(e, None)),
        }
    }
    if !done {
        bail!("{}: no multipath device has this path", args.path);
    }
    Ok(())
}
