//! `udm cow`: examines the store of a snapshot offline.
//!
//! `info` describes the store, and `dump` prints its exceptions. `check` reads everything that a
//! load would read and reports errors. `compact` moves the data to the front of the store and cuts
//! off the end.
//!
//! Contract: the store is hostile input. Only `compact` writes it. An error names its byte. Memory
//! is a few bits per exception.

mod clear;
mod compact;
mod print;
mod store;

use crate::cli::StateArgs;
use anyhow::Result;
use clap::{Args, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// The arguments of `udm cow`.
#[derive(Debug, Args)]
pub struct CowArgs {
    #[command(subcommand)]
    verb: CowVerb,
}

#[derive(Debug, Subcommand)]
enum CowVerb {
    /// Say what a store is and how full
    Info(StoreArgs),
    /// Print which chunk of the origin is kept where
    Dump(StoreArgs),
    /// Read all records; fail when the store can't be used
    #[command(
        after_help = "The status is 0 for a store that can be used, also a blank one, and 1 for one that is invalid or wrong.\n\n\
Example:\n  udm cow check cow.img --origin-size 64G"
    )]
    Check(CheckArgs),
    /// Bring what is kept together at the front, and give the rest back to the file system
    #[command(
        after_help = "The file keeps its length, with a hole at its end, so that the store has the room that it had; with --shrink it ends behind what is kept, and is full until it grows. A store that is in use is refused. A crash leaves a store with the same exceptions.\n\n\
Example:\n  udm cow compact --dry-run monday.cow"
    )]
    Compact(CompactArgs),
    /// Believe a store again that has lost a copy and could not be told so
    #[command(
        after_help = "A snapshot that loses a copy marks its store. When that can't be written, because the disk is gone, the server keeps the mark itself, and refuses \
the store when the disk is back: what the store holds is not what the origin was. This forgets it, for one who knows that nobody has written to the origin since. \
A store that says itself that it is invalid stays so.\n\n\
Example:\n  udm cow clear-invalid /srv/stores/monday.cow"
    )]
    ClearInvalid(clear::ClearArgs),
}

/// A store, and how to print.
#[derive(Debug, Args)]
struct StoreArgs {
    /// The store: the file or block device that a persistent snapshot wrote to
    store: PathBuf,
    /// Print JSON: positions and sizes in bytes
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    state: StateArgs,
}

/// The arguments of `udm cow check`.
#[derive(Debug, Args)]
struct CheckArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Refuse exceptions that an origin of this size does not have (64M, 1G)
    #[arg(long, value_name = "SIZE", value_parser = udm_wire::size::parse)]
    origin_size: Option<u64>,
}

/// The arguments of `udm cow compact`.
#[derive(Debug, Args)]
struct CompactArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Say what would be done, and write nothing
    #[arg(long)]
    dry_run: bool,
    /// Cut the file off behind what is kept
    #[arg(long)]
    shrink: bool,
}

/// Runs `udm cow`.
///
/// # Errors
/// One line: the store, the byte where one is to blame, and what is wrong.
pub fn run(args: &CowArgs) -> Result<ExitCode> {
    match &args.verb {
        CowVerb::Info(args) => print::info(args),
        CowVerb::Dump(args) => print::dump(args),
        CowVerb::Check(args) => print::check(args),
        CowVerb::Compact(args) => compact::run(args),
        CowVerb::ClearInvalid(args) => clear::clear(args),
    }
}
