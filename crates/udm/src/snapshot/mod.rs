//! `udm snapshot`: snapshots by name, against a running `udm serve`.
//!
//! `create`, `remove` and `merge` change tables; `list`, `diff` and `export` only read. The server
//! does the work ([`udm_control::verbs::snapshot`]); this folder has the command line and the
//! output.

mod copy;
mod diff;
mod print;
mod progress;

use crate::cli::{Print, ServerArgs, TimeoutArgs};
use crate::output::{say, say_json};
use crate::verbs::{explain, folder};
use anyhow::{Context, Result};
use clap::{ArgGroup, Args, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;
use udm_control::api;
use udm_control::api::verbs::{self, Verb};
use udm_control::client::ControlClient;

/// `udm snapshot`.
#[derive(Debug, Args)]
pub struct SnapshotArgs {
    #[command(subcommand)]
    verb: SnapshotVerb,
}

#[derive(Debug, Subcommand)]
enum SnapshotVerb {
    /// Keep a device as it is now; several at one instant
    #[command(
        after_help = "The device goes on; nobody has to suspend it. One that is linear over a disk becomes a snapshot-origin of that disk, and is linear \
again when its last snapshot is removed. Writes that reach the disk by another way are not seen. A store that does not exist is made, grows as it fills, and goes with its snapshot.\n\n\
Examples:\n  udm snapshot create monday --of disk\n  udm snapshot create monday --of disk --store /srv/stores/monday.cow --size 1G --overflow\n  \
udm snapshot create --group data-monday=data,log-monday=log"
    )]
    Create(CreateArgs),
    /// List snapshots
    List(ListArgs),
    /// Remove snapshots that nobody uses, with the stores that were made for them
    Remove(RemoveArgs),
    /// Bring a snapshot back into its origin, which reads as the snapshot at once
    #[command(
        after_help = "The snapshot's own device is gone from the begin on. A merge that is cut, by the end of the server or a crash, goes on when the table \
snapshot-merge is loaded again."
    )]
    Merge(MergeArgs),
    /// Print where a snapshot and its origin, or two snapshots, may differ
    #[command(
        after_help = "What is printed is what was copied into a store or written to a snapshot. What is not printed is the same.\n\n\
Example:\n  udm snapshot diff monday tuesday --json"
    )]
    Diff(DiffArgs),
    /// Copy a snapshot into a file, or only the changes since an older snapshot
    #[command(
        after_help = "Without --since FILE is created, with holes for zeroes; it has its name once the copy is complete. With --since OLD, FILE is a copy of the snapshot OLD, \
and the blocks that may differ between OLD and NAME are written into it. An incremental copy that was interrupted is completed by the same command.\n\n\
Examples:\n  udm snapshot copy monday disk.backup\n  udm snapshot copy tuesday --since monday disk.backup"
    )]
    Copy(CopyArgs),
    /// Print under which NBD URIs a snapshot is served
    Export(ExportArgs),
}

/// `udm snapshot create`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("which").required(true).args(["name", "group"]))]
struct CreateArgs {
    #[command(flatten)]
    talk: ServerArgs,
    #[command(flatten)]
    print: Print,
    #[command(flatten)]
    until: TimeoutArgs,
    /// Its name
    #[arg(requires = "of")]
    name: Option<String>,
    /// The device to keep
    #[arg(long, value_name = "DEVICE", requires = "name")]
    of: Option<String>,
    /// Several at one instant, all or none
    #[arg(long, value_name = "NAME=DEVICE,...", value_delimiter = ',', value_parser = pair)]
    group: Vec<(String, String)>,
    /// Where to keep what differs: a path, a device, or a folder for NAME.cow [default: the folder
    /// of the device's disk]
    #[arg(long, value_name = "PATH")]
    store: Option<String>,
    /// How large the store that is made becomes [default: enough for everything]
    #[arg(long, value_name = "SIZE", value_parser = udm_wire::size::parse)]
    size: Option<u64>,
    /// By how much it grows at a time, before it is full; 0 makes it in full length [default: its
    /// own size, up to 64M]
    #[arg(long, value_name = "SIZE", value_parser = udm_wire::size::parse)]
    grow: Option<u64>,
    /// What is copied at once: a power of two [default: 4k, or the block of the disk]
    #[arg(long, value_name = "SIZE", value_parser = udm_wire::size::parse)]
    chunk: Option<u64>,
    /// Keep nothing over the end of the server, and write less
    #[arg(long, conflicts_with = "overflow")]
    transient: bool,
    /// Become read-only when the store is full, and not invalid
    #[arg(long)]
    overflow: bool,
}

/// `udm snapshot list`.
#[derive(Debug, Args)]
struct ListArgs {
    #[command(flatten)]
    talk: ServerArgs,
    #[command(flatten)]
    print: Print,
}

/// `udm snapshot remove`.
#[derive(Debug, Args)]
struct RemoveArgs {
    #[command(flatten)]
    talk: ServerArgs,
    #[command(flatten)]
    until: TimeoutArgs,
    /// The snapshots
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// Leave the stores that were made for them
    #[arg(long)]
    keep_store: bool,
}

/// `udm snapshot merge`.
#[derive(Debug, Args)]
struct MergeArgs {
    #[command(flatten)]
    talk: ServerArgs,
    /// The snapshot
    name: String,
    /// Return when it has begun
    #[arg(short, long)]
    background: bool,
}

/// `udm snapshot diff`.
#[derive(Debug, Args)]
struct DiffArgs {
    #[command(flatten)]
    talk: ServerArgs,
    #[command(flatten)]
    print: Print,
    /// The snapshot
    name: String,
    /// Another one of the same origin [default: the origin as it is now]
    against: Option<String>,
}

/// `udm snapshot copy`.
#[derive(Debug, Args)]
struct CopyArgs {
    #[command(flatten)]
    talk: ServerArgs,
    #[command(flatten)]
    print: Print,
    /// The snapshot
    name: String,
    /// The snapshot that FILE is a copy of
    #[arg(long, value_name = "OLD")]
    since: Option<String>,
    /// The file to create; with --since the file or block device to update
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// `udm snapshot export`.
#[derive(Debug, Args)]
struct ExportArgs {
    #[command(flatten)]
    talk: ServerArgs,
    #[command(flatten)]
    print: Print,
    /// The snapshot
    name: String,
}

/// `NAME=DEVICE`.
fn pair(word: &str) -> Result<(String, String), String> {
    let (name, of) = word.split_once('=').ok_or("NAME=DEVICE is wanted")?;
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
        SnapshotVerb::Create(args) => create(args),
        SnapshotVerb::List(args) => list(args),
        SnapshotVerb::Remove(args) => remove(args),
        SnapshotVerb::Merge(args) => merge(args),
        SnapshotVerb::Diff(args) => diff::run(args),
        SnapshotVerb::Copy(args) => copy::run(args),
        SnapshotVerb::Export(args) => export(args),
    }
    .map(|()| ExitCode::SUCCESS)
}

/// The answer to a verb without a body.
fn ask<Q, R: serde::de::DeserializeOwned>(client: &ControlClient, verb: Verb<Q, (), R>) -> Result<R> {
    client.call(verb, &()).map_err(|e| explain(e, None))
}

fn create(args: &CreateArgs) -> Result<()> {
    let one = args.name.iter().zip(&args.of);
    let all = args.group.iter().map(|(name, of)| (name, of)).chain(one);
    let new = |(name, of): (&String, &String)| api::NewSnapshot { name: name.clone(), of: of.clone() };
    let wanted = api::CreateSnapshots {
        snapshots: all.map(new).collect(),
        store: args.store.clone(),
        size_bytes: args.size,
        grow_bytes: args.grow,
        chunk_bytes: args.chunk,
        transient: Some(args.transient),
        overflow: Some(args.overflow),
        folder: folder(),
        timeout_ms: args.until.timeout_ms(),
    };
    let made = args.talk.client()?.call(verbs::CREATE_SNAPSHOTS, &wanted);
    let made = made.map_err(|e| explain(e, None))?;
    if args.print.json { say_json(&made.snapshots) } else { Ok(()) }
}

fn list(args: &ListArgs) -> Result<()> {
    let found = ask(&args.talk.client()?, verbs::LIST_SNAPSHOTS)?.snapshots;
    match (args.print.json, found.is_empty()) {
        (true, _) => say_json(&found),
        (false, true) => say("No snapshots found\n"),
        (false, false) => say(&print::table(&found)),
    }
}

fn remove(args: &RemoveArgs) -> Result<()> {
    let client = args.talk.client()?;
    let (keep_store, timeout_ms) = (Some(args.keep_store), args.until.timeout_ms());
    let query = api::RemoveSnapshotQuery { keep_store, timeout_ms };
    args.names.iter().try_for_each(|name| ask(&client, verbs::REMOVE_SNAPSHOT.on(name).with(&query)))
}

fn merge(args: &MergeArgs) -> Result<()> {
    let client = args.talk.client()?;
    // How much there is is told before it gets less.
    let before = ask(&client, verbs::GET_SNAPSHOT.on(&args.name))?;
    let begun = ask(&client, verbs::MERGE_SNAPSHOT.on(&args.name))?;
    if args.background {
        return Ok(());
    }
    progress::watch(&client, &before, begun)
}

fn export(args: &ExportArgs) -> Result<()> {
    let client = args.talk.client()?;
    let snapshot = ask(&client, verbs::GET_SNAPSHOT.on(&args.name))?;
    let export = find_export(&client, &snapshot.name)?;
    if args.print.json {
        return say_json(&export);
    }
    say(&export.uris.iter().map(|uri| format!("{uri}\n")).collect::<String>())
}

/// The export of the snapshot `name`.
fn find_export(client: &ControlClient, name: &str) -> Result<api::Export> {
    let exports = ask(client, verbs::LIST_EXPORTS)?.exports;
    let found = exports.into_iter().find(|export| export.name == name);
    found.with_context(|| format!("{name}: it is not exported: the server has --export for others"))
}
