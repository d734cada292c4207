//! `udm cow`: examines the store of a snapshot offline.
//!
//! `info` describes the store, and `dump` prints its exceptions. `check` reads
//! everything that a load would read and reports errors. `compact` moves the data to the front of
//! the store and cuts off the end.
//!
//! Contract: the store is hostile input. Only `compact` writes it. An error names its byte. Memory
//! is a few bits per exception.

mod clear;
mod compact;
mod print;
mod store;

use crate::args::StateFolderArgs;
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
    /// Describe a store and how full it is
    Info(StoreArgs),
    /// Print the exceptions: each chunk of the origin and its chunk in the store
    Dump(StoreArgs),
    /// Read all records; fail if the store cannot be used
    #[command(
        after_help = "The status is 0 for a store that can be used or is blank, and 1 for one that is invalid or damaged.\n\n\
Example:\n  udm cow check cow.img --origin-size 64G"
    )]
    Check(CowCheckArgs),
    /// Move the data to the front of the store, and free the rest in the file system
    #[command(
        after_help = "The file keeps its length, with a hole at its end, so the store keeps its room. With --shrink the file ends after the data, and the store is full until it grows. A store that is in use is refused. A crash leaves a store with the same exceptions.\n\n\
Example:\n  udm cow compact --dry-run monday.cow"
    )]
    Compact(CowCompactArgs),
    /// Accept a store again that the server has marked as invalid
    #[command(
        after_help = "If a copy for a snapshot fails, the store no longer matches the origin, and the snapshot marks the store as invalid. If this mark cannot be written, because the disk is gone, the server keeps the mark itself \
and refuses the store when the disk is back. This command removes the server's mark. Use it only if nobody has written to the origin since. \
A store that is itself marked as invalid stays invalid.\n\n\
Example:\n  udm cow clear-invalid /srv/stores/monday.cow"
    )]
    ClearInvalid(clear::CowClearInvalidArgs),
}

/// The store, and the output format.
#[derive(Debug, Args)]
struct StoreArgs {
    /// The store: the file or block device that a persistent snapshot wrote to
    store: PathBuf,
    /// Print JSON: positions and sizes in bytes
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    state: StateFolderArgs,
}

/// The arguments of `udm cow check`.
#[derive(Debug, Args)]
struct CowCheckArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Fail if an exception is beyond the end of an origin of this size (64M, 1G)
    #[arg(long, value_name = "SIZE", value_parser = udm_wire::size::parse_size_with_unit)]
    origin_size: Option<u64>,
}

/// The arguments of `udm cow compact`.
#[derive(Debug, Args)]
struct CowCompactArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Print the result without writing anything
    #[arg(long)]
    dry_run: bool,
    /// Cut off the free end of the file
    #[arg(long)]
    shrink: bool,
}

/// Runs `udm cow`.
///
/// # Errors
/// One line: the store, the byte at fault if there is one, and what is wrong.
pub fn run(args: &CowArgs) -> Result<ExitCode> {
    match &args.verb {
        CowVerb::Info(args) => print::run_cow_info(args),
        CowVerb::Dump(args) => print::run_cow_dump(args),
        CowVerb::Check(args) => print::run_cow_check(args),
        CowVerb::Compact(args) => compact::run(args),
        CowVerb::ClearInvalid(args) => clear::run_cow_clear_invalid(args),
    }
}
