//! `udm log-writes`: reads the log of a log-writes target offline.
//!
//! `list` prints the entries. `replay` rebuilds in a file the content of the device after any
//! entry. It runs a command on the state after each flush, which a power cut could have left.
//!
//! Contract: the log is hostile input. A replay reads everything that it will use before it writes.
//! So a bad log is refused with its bad byte, and nothing has changed. Memory does not grow with
//! the log.

mod check;
mod image;
mod list;
mod replay;
mod source;

use anyhow::Result;
use clap::{Args, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// The arguments of `udm log-writes`.
#[derive(Debug, Args)]
pub struct LogWritesArgs {
    #[command(subcommand)]
    verb: LogWritesVerb,
}

#[derive(Debug, Subcommand)]
enum LogWritesVerb {
    /// Print the entries of a log
    List(LogWritesListArgs),
    /// Rebuild the content of the logged device after an entry
    Replay(LogWritesReplayArgs),
}

/// The arguments of `udm log-writes list`.
#[derive(Debug, Args)]
struct LogWritesListArgs {
    /// The log: a file or block device that a log-writes target wrote
    log: PathBuf,
    /// Print JSON: positions and sizes in bytes
    #[arg(long)]
    json: bool,
}

/// The arguments of `udm log-writes replay`.
#[derive(Debug, Args)]
#[command(
    after_help = "Flushes are counted from 1 over the whole log, entries from 0, as `list` shows them. DEVICE must hold the content of the logged device \
at the start of the replay: zeroes for a new device (--size), or the result of an earlier replay up to that point.\n\n\
Examples:\n  udm log-writes replay log.img disk.img --size 64M --upto-mark mkfs\n  \
udm log-writes replay log.img disk.img --start-mark mkfs --each-flush --check 'e2fsck -fy $image'"
)]
struct LogWritesReplayArgs {
    /// The log: a file or block device that a log-writes target wrote
    log: PathBuf,
    /// The file or block device to write to
    device: PathBuf,
    /// Create DEVICE, which must not exist, with this many bytes of zeroes (64M, 1G)
    #[arg(long, value_name = "SIZE", value_parser = udm_wire::size::parse_size_with_unit)]
    size: Option<u64>,
    /// Begin after the first mark with this text
    #[arg(long, value_name = "TEXT", group = "start")]
    start_mark: Option<String>,
    /// Begin with this entry
    #[arg(long, value_name = "N", group = "start")]
    start_entry: Option<u64>,
    /// End with this flush
    #[arg(long, value_name = "FLUSH", group = "end", value_parser = clap::value_parser!(u64).range(1..))]
    upto: Option<u64>,
    /// End with the first mark with this text after the start
    #[arg(long, value_name = "TEXT", group = "end")]
    upto_mark: Option<String>,
    /// End after so many entries
    #[arg(long, value_name = "N", group = "end")]
    entries: Option<u64>,
    /// Run a command through /bin/sh on a copy of the result, with its path in $image; if the
    /// command fails, the replay fails
    #[arg(long, value_name = "CMD")]
    check: Option<String>,
    /// Run the command after each flush, each time on a new copy
    #[arg(long, requires = "check")]
    each_flush: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs `udm log-writes`.
///
/// # Errors
/// One line: the file, the byte of the log at fault if there is one, and what is wrong.
pub fn run(args: &LogWritesArgs) -> Result<ExitCode> {
    match &args.verb {
        LogWritesVerb::List(args) => list::run(args)?,
        LogWritesVerb::Replay(args) => replay::run(args)?,
    }
    Ok(ExitCode::SUCCESS)
}
