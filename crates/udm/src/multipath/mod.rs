//! `udm multipath`: multipath devices in multipath-tools' words, against a running `udm serve`.
//!
//! The output is composed of the server's list of devices, their tables and their statuses. Fields
//! without a value in udm print as multipath-tools prints unknown ones (`#:#:#:#`, `##`).

mod map_reader;
mod print;

use crate::cli::{Print, ServerArgs};
use crate::output::{say, say_json};
use crate::verbs::{explain, folder};
use anyhow::{Result, bail};
use clap::{ArgAction, Args, Subcommand, ValueEnum};
use map_reader::{MultipathMap, Path};
use serde::Serialize;
use udm_control::api::{self, verbs};
use udm_control::client::{ClientError, ControlClient};
use udm_core::errno::{EINVAL, ENOENT, ENXIO};

/// `udm multipath`.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:\n  udm multipath -ll\n  udm multipath -ll mp\n  udm multipath show paths\n  udm multipath show paths format '%d %t %T'\n  udm multipath fail path disk.img\n  udm multipath switch map mp group 2\n\n\
Of a device: %n name, %w uuid, %d its number as dm-N, %S size, %F failback and %Q queueing, with what is left of their time, %N paths in use, %0 how often one failed, %r rw or ro, %t active or suspend, %f features, %h handler. \
Of a path: %d its name, %D number, %m device, %t active or failed, %T what its last check found, %p priority, %0 how often it failed, %o running, %i #:#:#:#, %W why no check reinstates it. Of both: %s ##,##."
)]
pub struct MultipathArgs {
    #[command(subcommand)]
    verb: Option<MultipathVerb>,
    #[command(flatten)]
    talk: ServerArgs,
    #[command(flatten)]
    print: Print,
    /// List the devices with their groups and paths; udm knows no difference between -l and -ll
    #[arg(short, action = ArgAction::Count)]
    list: u8,
    /// This device only
    name: Option<String>,
}

#[derive(Debug, Subcommand)]
enum MultipathVerb {
    /// Make a device from paths to one disk
    Create(CreateArgs),
    /// Show paths, devices (maps) or their groups and paths (topology), as multipathd does
    #[command(visible_alias = "list")]
    Show(ShowArgs),
    /// Fail a path in all devices that have it, until it is reinstated: no check does it
    Fail(PathArgs),
    /// Reinstate a path in all devices that have it
    Reinstate(PathArgs),
    /// Have a group serve, if it has a path in use
    Switch(SwitchArgs),
}

#[derive(Debug, Args)]
#[command(
    after_help = "What is not given is as the server's --multipath-conf says for a device of this name, and else as in multipath-tools: failover, const, service-time 0. path_selector and features come from there alone. \
Groups come in the order of their priority, then of their number of paths.\n\nExamples:\n  udm multipath create mp --policy multibus nbd://a/disk nbd://b/disk\n  \
udm multipath create mp --policy group_by_prio --prio weightedpath --prio-args 'devname *//a/* 50 devname * 10' nbd://a/disk nbd://b/disk"
)]
struct CreateArgs {
    #[command(flatten)]
    talk: ServerArgs,
    #[command(flatten)]
    print: Print,
    /// Its name
    name: String,
    /// How paths become groups: a group a path, all in one, or those of one priority together
    #[arg(long, value_parser = ["failover", "multibus", "group_by_prio"])]
    policy: Option<String>,
    /// What paths are worth, for their groups and, where the server checks paths, from then on:
    /// const, weightedpath or, where they are not grouped by it, path_latency
    #[arg(long)]
    prio: Option<String>,
    /// Its arguments, as in multipath.conf
    #[arg(long, value_name = "ARGS", requires = "prio")]
    prio_args: Option<String>,
    /// Its uuid
    #[arg(short, long)]
    uuid: Option<String>,
    /// Files, block devices, NBD URIs, @devices; as large as each other
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<String>,
}

#[derive(Debug, Args)]
struct PathArgs {
    #[command(flatten)]
    talk: ServerArgs,
    /// The word path
    #[arg(value_parser = ["path"])]
    what: String,
    /// Its name or its number, as show paths has them, or as a table would name it: relative paths
    /// count from the current folder
    path: String,
}

#[derive(Debug, Args)]
struct SwitchArgs {
    #[command(flatten)]
    talk: ServerArgs,
    /// The word map
    #[arg(value_parser = ["map", "multipath"])]
    what: String,
    /// The device
    name: String,
    /// The word group
    #[arg(value_parser = ["group"])]
    which: String,
    /// Its number, from 1
    group: u32,
}

#[derive(Debug, Args)]
struct ShowArgs {
    #[command(flatten)]
    talk: ServerArgs,
    #[command(flatten)]
    print: Print,
    /// What to show
    what: What,
    /// json; format FORMAT, in columns; raw format FORMAT, without heads and blanks; of maps also
    /// status: what becomes of requests without a path, and when a better group is gone back to
    #[arg(value_name = "HOW")]
    how: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// All paths.
    Paths,
    /// All devices.
    #[value(alias = "multipaths")]
    Maps,
    /// Devices with their groups and paths.
    Topology,
}

/// What multipathd shows of a path, with why it stays failed, and of a device.
const PATHS: &str = "%i %d %D %p %t %T %o %W";
const MAPS: &str = "%n %d %w";
const MAPS_STATUS: &str = "%n %F %Q %N %t %r";

/// What a device refuses a path with that it has not.
const NOT_THERE: [u32; 3] = [ENOENT as u32, ENXIO as u32, EINVAL as u32];

/// What multipathd's JSON has in front.
#[derive(Serialize)]
struct JsonReply<T> {
    major_version: u32,
    minor_version: u32,
    #[serde(flatten)]
    what: T,
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum JsonList<'a> {
    Maps(&'a [MultipathMap]),
    Paths(Vec<&'a Path>),
}

fn json(what: JsonList<'_>) -> Result<()> {
    say_json(&JsonReply { major_version: 0, minor_version: 1, what })
}

/// Runs the verb.
///
/// # Errors
/// What the server refused; a letter that means nothing.
pub fn run(args: &MultipathArgs) -> Result<()> {
    match &args.verb {
        Some(MultipathVerb::Create(args)) => return create(args),
        Some(MultipathVerb::Show(args)) => return show(args),
        Some(MultipathVerb::Fail(args)) => return command_path(args, "fail"),
        Some(MultipathVerb::Reinstate(args)) => return command_path(args, "reinstate"),
        Some(MultipathVerb::Switch(args)) => {
            return send_message(&args.talk.client()?, &args.name, format!("switch_group {}", args.group));
        }
        None => {}
    }
    let maps = map_reader::maps(&args.talk.client()?, args.name.as_deref())?;
    if args.print.json { json(JsonList::Maps(&maps)) } else { say(&print::topology(&maps)) }
}

fn create(args: &CreateArgs) -> Result<()> {
    let CreateArgs { name, uuid, paths, policy, prio, prio_args, .. } = args;
    let new = api::CreateMultipath {
        name: name.clone(),
        uuid: uuid.clone(),
        paths: paths.clone(),
        policy: policy.clone(),
        prio: prio.clone(),
        prio_args: prio_args.clone(),
        folder: folder(),
    };
    let made = args.talk.client()?.call(verbs::CREATE_MULTIPATH, &new);
    let made = made.map_err(|e| explain(e, None))?;
    if args.print.json { say_json(&made) } else { Ok(()) }
}

fn show(args: &ShowArgs) -> Result<()> {
    let how: Vec<&str> = args.how.iter().map(String::as_str).collect();
    let (as_json, raw, format) = match (how.as_slice(), args.what) {
        ([], _) => (args.print.json, false, None),
        (["json"], _) => (true, false, None),
        (["status"], What::Maps) => (false, false, Some(MAPS_STATUS)),
        (["format", _] | ["raw", "format", _], What::Topology) => {
            bail!("multipath show topology: it has no format")
        }
        (["format", format], _) => (false, false, Some(*format)),
        (["raw", "format", format], _) => (false, true, Some(*format)),
        _ => bail!("multipath show: what may follow is json, format FORMAT, or raw format FORMAT"),
    };
    let maps = map_reader::maps(&args.talk.client()?, None)?;
    match args.what {
        What::Paths if as_json => json(JsonList::Paths(print::all_paths(&maps))),
        What::Maps | What::Topology if as_json => json(JsonList::Maps(&maps)),
        What::Topology => say(&print::topology(&maps)),
        What::Paths => say(&print::paths(&maps, format.unwrap_or(PATHS), raw)?),
        What::Maps => say(&print::maps(&maps, format.unwrap_or(MAPS), raw)?),
    }
}

/// Sends a message.
fn send_message(client: &ControlClient, device: &str, message: String) -> Result<()> {
    let message = api::Message { sector: 0, message, folder: None };
    let answer = client.call(verbs::SEND_MESSAGE.on(device), &message);
    answer.map(drop).map_err(|e| explain(e, None))
}

fn command_path(args: &PathArgs, action: &str) -> Result<()> {
    let client = args.talk.client()?;
    let maps = map_reader::maps(&client, None)?;
    let send_message = |device: &str, path: &str| {
        let command = api::CommandPath { path: path.into(), action: action.into(), folder: folder() };
        client.call(verbs::COMMAND_PATH.on(device), &command)
    };
    let mut told = Vec::new();
    for path in print::all_paths(&maps) {
        let meant = [&path.dev, &path.dev_t].contains(&&args.path);
        // A command means a path in every group that has it.
        if meant && !told.contains(&(&path.multipath, &path.dev_t)) {
            send_message(&path.multipath, &path.dev_t).map_err(|e| explain(e, None))?;
            told.push((&path.multipath, &path.dev_t));
        }
    }
    let mut done = !told.is_empty();
    // It may be a table's word for a path that is shown otherwise. What that means the server
    // knows.
    for map in maps.iter().filter(|_| told.is_empty()) {
        match send_message(&map.name, &args.path) {
            Ok(()) => done = true,
            Err(ClientError::Refused(e)) if NOT_THERE.contains(&e.errno) => {}
            Err(e) => return Err(explain(e, None)),
        }
    }
    if !done {
        bail!("{}: no multipath device has this path", args.path);
    }
    Ok(())
}
