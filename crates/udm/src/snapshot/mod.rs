//! `udm snapshot`: snapshots by name, against a running `udm serve`.
//!
//! `create`, `remove` and `merge` change tables; `list`, `diff` and
//! `export` only read. The server does the work ([`udm_control::verbs::snapshot`]); this folder has
//! the command line and the output.

mod copy;
mod diff;
mod merge_wait;
mod print;
mod qcow2;

use crate::args::{DrainTimeoutArgs, OutputFormatArgs, ServerArgs};
use crate::output::{print_json_to_stdout, print_to_stdout};
use crate::requests::{call_verb_without_body, current_dir, explain_client_error};
use anyhow::{Context, Result};
use clap::{ArgGroup, Args, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;
use udm_control::api;
use udm_control::api::verbs;
use udm_control::client::ControlClient;

/// The arguments of `udm snapshot`.
#[derive(Debug, Args)]
pub struct SnapshotArgs {
    #[command(subcommand)]
    verb: SnapshotVerb,
}

#[derive(Debug, Subcommand)]
enum SnapshotVerb {
    /// Create snapshots of a device as it is now, or of several devices at one instant
    #[command(
        after_help = "The device stays active; no suspend is needed. A device with a linear table over a disk becomes a snapshot-origin of that disk, and becomes linear \
again when its last snapshot is removed. The snapshot does not see writes that reach the disk directly, without passing the device. A store that does not exist is created, grows as it fills, and is removed with its snapshot.\n\n\
Examples:\n  udm snapshot create monday --of disk\n  udm snapshot create monday --of disk --store /srv/stores/monday.cow --size 1G --overflow\n  \
udm snapshot create --group data-monday=data,log-monday=log"
    )]
    Create(SnapshotCreateArgs),
    /// List snapshots
    List(SnapshotListArgs),
    /// Remove snapshots that are not in use, with the stores that were created for them
    Remove(SnapshotRemoveArgs),
    /// Merge a snapshot into its origin, which reads as the snapshot at once
    #[command(
        after_help = "The snapshot's own device is removed when the merge begins. If the server ends or crashes during a merge, the merge continues when the table \
snapshot-merge is loaded again."
    )]
    Merge(SnapshotMergeArgs),
    /// Print the ranges in which a snapshot and its origin, or two snapshots, may differ
    #[command(
        after_help = "The ranges are those that were copied into a store or written to a snapshot. Everything outside the ranges is identical.\n\n\
Example:\n  udm snapshot diff monday tuesday --json"
    )]
    Diff(SnapshotDiffArgs),
    /// Copy a snapshot into a file, or only the changes since an older snapshot
    #[command(
        after_help = "Without --since FILE is created, with holes for zeroes; it has its name once the copy is complete. With --since OLD, FILE is a copy of the snapshot OLD, \
and the blocks that may differ between OLD and NAME are written into it. An incremental copy that was interrupted is completed by the same command. \
With --format qcow2 FILE is always created; with --since OLD it has the clusters that may differ, over the copy of OLD that --backing names.\n\n\
Examples:\n  udm snapshot copy monday disk.backup\n  udm snapshot copy tuesday --since monday disk.backup\n  udm snapshot copy monday full.qcow2 --format qcow2\n  udm snapshot copy tuesday --since monday --backing full.qcow2 --format qcow2 changes.qcow2"
    )]
    Copy(SnapshotCopyArgs),
    /// Print the NBD URIs of a snapshot
    Export(SnapshotExportArgs),
}

/// The arguments of `udm snapshot create`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("which").required(true).args(["name", "group"]))]
struct SnapshotCreateArgs {
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    print: OutputFormatArgs,
    #[command(flatten)]
    timeout: DrainTimeoutArgs,
    /// The name of the snapshot
    #[arg(requires = "of")]
    name: Option<String>,
    /// The device to take the snapshot of
    #[arg(long, value_name = "DEVICE", requires = "name")]
    of: Option<String>,
    /// Take several snapshots at one instant, all or none
    #[arg(long, value_name = "NAME=DEVICE,...", value_delimiter = ',', value_parser = parse_name_device_pair)]
    group: Vec<(String, String)>,
    /// The store: a path, a device, or a folder, in which NAME.cow is created [default: the folder
    /// of the device's disk]
    #[arg(long, value_name = "PATH")]
    store: Option<String>,
    /// The largest size of a store that is created [default: enough for every chunk]
    #[arg(long, value_name = "SIZE", value_parser = udm_wire::size::parse_size_with_unit)]
    size: Option<u64>,
    /// How much the store grows at a time, before it is full; 0 creates it with its full size
    /// [default: its own size, at most 64M]
    #[arg(long, value_name = "SIZE", value_parser = udm_wire::size::parse_size_with_unit)]
    grow: Option<u64>,
    /// The chunk size, the unit of copying: a power of two [default: 4k, or the block size of the
    /// disk]
    #[arg(long, value_name = "SIZE", value_parser = udm_wire::size::parse_size_with_unit)]
    chunk: Option<u64>,
    /// Keep the exceptions only in memory: fewer writes, but the snapshot is lost when the server
    /// ends
    #[arg(long, conflicts_with = "overflow")]
    transient: bool,
    /// Become read-only when the store is full, instead of invalid
    #[arg(long)]
    overflow: bool,
}

/// The arguments of `udm snapshot list`.
#[derive(Debug, Args)]
struct SnapshotListArgs {
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    print: OutputFormatArgs,
}

/// The arguments of `udm snapshot remove`.
#[derive(Debug, Args)]
struct SnapshotRemoveArgs {
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    timeout: DrainTimeoutArgs,
    /// The snapshots
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// Keep the stores that were created for the snapshots
    #[arg(long)]
    keep_store: bool,
}

/// The arguments of `udm snapshot merge`.
#[derive(Debug, Args)]
struct SnapshotMergeArgs {
    #[command(flatten)]
    server: ServerArgs,
    /// The snapshot
    name: String,
    /// Return once the merge has begun
    #[arg(short, long)]
    background: bool,
}

/// The arguments of `udm snapshot diff`.
#[derive(Debug, Args)]
struct SnapshotDiffArgs {
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    print: OutputFormatArgs,
    /// The snapshot
    name: String,
    /// Another snapshot of the same origin [default: the origin as it is now]
    against: Option<String>,
}

/// `udm snapshot copy`.
#[derive(Debug, Args)]
struct SnapshotCopyArgs {
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    print: OutputFormatArgs,
    /// The snapshot
    name: String,
    /// The snapshot that FILE is a copy of
    #[arg(long, value_name = "OLD")]
    since: Option<String>,
    /// The format of FILE
    #[arg(long, value_enum, default_value = "raw")]
    format: CopyFormat,
    /// The copy of OLD, in either format, for --format qcow2 with --since
    #[arg(long, value_name = "FILE", requires = "since")]
    backing: Option<PathBuf>,
    /// The file to create; with --since and --format raw the file or block device to update
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// The format of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum CopyFormat {
    /// The bytes, with holes for zeroes
    Raw,
    /// An image of QEMU
    Qcow2,
}

/// The arguments of `udm snapshot export`.
#[derive(Debug, Args)]
struct SnapshotExportArgs {
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    print: OutputFormatArgs,
    /// The snapshot
    name: String,
}

/// Parses `NAME=DEVICE`.
fn parse_name_device_pair(word: &str) -> Result<(String, String), String> {
    let (name, of) = word.split_once('=').ok_or("expected NAME=DEVICE")?;
    match (name, of) {
        ("", _) => Err("the name is missing".into()),
        (_, "") => Err("the device is missing".into()),
        _ => Ok((name.into(), of.into())),
    }
}

/// Runs `udm snapshot`.
///
/// # Errors
/// One line: the device, and what is wrong.
pub fn run(args: &SnapshotArgs) -> Result<ExitCode> {
    match &args.verb {
        SnapshotVerb::Create(args) => run_snapshot_create(args),
        SnapshotVerb::List(args) => run_snapshot_list(args),
        SnapshotVerb::Remove(args) => run_snapshot_remove(args),
        SnapshotVerb::Merge(args) => run_snapshot_merge(args),
        SnapshotVerb::Diff(args) => diff::run(args),
        SnapshotVerb::Copy(args) => copy::run(args),
        SnapshotVerb::Export(args) => run_snapshot_export(args),
    }
    .map(|()| ExitCode::SUCCESS)
}

fn run_snapshot_create(args: &SnapshotCreateArgs) -> Result<()> {
    let one = args.name.iter().zip(&args.of);
    let all = args.group.iter().map(|(name, of)| (name, of)).chain(one);
    let new = |(name, of): (&String, &String)| api::NewSnapshot { name: name.clone(), of: of.clone() };
    let body = api::CreateSnapshotsRequest {
        snapshots: all.map(new).collect(),
        store: args.store.clone(),
        size_bytes: args.size,
        grow_bytes: args.grow,
        chunk_bytes: args.chunk,
        transient: Some(args.transient),
        overflow: Some(args.overflow),
        folder: current_dir(),
        timeout_ms: args.timeout.timeout_ms(),
    };
    let created = args.server.client()?.call(verbs::CREATE_SNAPSHOTS, &body);
    let created = created.map_err(|e| explain_client_error(e, None))?;
    if args.print.json { print_json_to_stdout(&created.snapshots) } else { Ok(()) }
}

fn run_snapshot_list(args: &SnapshotListArgs) -> Result<()> {
    let found = call_verb_without_body(&args.server.client()?, verbs::LIST_SNAPSHOTS)?.snapshots;
    match (args.print.json, found.is_empty()) {
        (true, _) => print_json_to_stdout(&found),
        (false, true) => print_to_stdout("No snapshots found\n"),
        (false, false) => print_to_stdout(&print::format_snapshot_list(&found)),
    }
}

fn run_snapshot_remove(args: &SnapshotRemoveArgs) -> Result<()> {
    let client = args.server.client()?;
    let (keep_store, timeout_ms) = (Some(args.keep_store), args.timeout.timeout_ms());
    let query = api::RemoveSnapshotQuery { keep_store, timeout_ms };
    args.names
        .iter()
        .try_for_each(|name| call_verb_without_body(&client, verbs::REMOVE_SNAPSHOT.on(name).with(&query)))
}

fn run_snapshot_merge(args: &SnapshotMergeArgs) -> Result<()> {
    let client = args.server.client()?;
    // Reads the size before the merge reduces it.
    let before = call_verb_without_body(&client, verbs::GET_SNAPSHOT.on(&args.name))?;
    let begun = call_verb_without_body(&client, verbs::MERGE_SNAPSHOT.on(&args.name))?;
    if args.background {
        return Ok(());
    }
    merge_wait::wait_for_snapshot_merge(&client, &before, begun)
}

fn run_snapshot_export(args: &SnapshotExportArgs) -> Result<()> {
    let client = args.server.client()?;
    let snapshot = call_verb_without_body(&client, verbs::GET_SNAPSHOT.on(&args.name))?;
    let export = find_snapshot_export(&client, &snapshot.name)?;
    if args.print.json {
        return print_json_to_stdout(&export);
    }
    print_to_stdout(&export.uris.iter().map(|uri| format!("{uri}\n")).collect::<String>())
}

/// The export of the snapshot `name`.
fn find_snapshot_export(client: &ControlClient, name: &str) -> Result<api::NbdExportDescription> {
    let exports = call_verb_without_body(client, verbs::LIST_EXPORTS)?.exports;
    let found = exports.into_iter().find(|export| export.name == name);
    found.with_context(|| format!("{name}: it is not exported: the server has --export for others"))
}
