//! `udm cow compact`: moves the data of a store to its front, and frees the rest.
//!
//! It works in place, so it needs no room for a second store, and the file keeps its inode and
//! name. The data chunks at the end are copied into holes, and the originals are not changed. So a
//! crash at any point leaves a store with the same exceptions:
//!
//! ```text
//!  copy into the holes ──► sync ──► point the records there ──► sync ──► cut off the end ──► sync
//! ```
//!
//! A record lies within one sector, so it points to the old chunk or to the new one. Both chunks
//! hold the data until all durable records point to the new one.

use super::CowCompactArgs;
use super::print::read_store_invalid_mark;
use super::store::{StoreFile, for_each_cow_exception};
use crate::output::with_stdout_ignoring_epipe;
use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::Serialize;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::ExitCode;
use udm_wire::cow::{
    ExceptionStoreHeader, ExceptionStoreLayout, ExceptionStoreScanResult, RECORD_LEN, SnapshotException,
};

/// Maximum bytes that are copied or cleared at once.
const PIECE_MAX: u64 = 1 << 20;

/// A file with a store; tests use one that loses power.
trait StoreFileIo {
    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()>;
    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()>;
    /// Makes all earlier writes durable.
    fn sync(&self) -> io::Result<()>;
    fn set_len(&self, len: u64) -> io::Result<()>;
}

impl StoreFileIo for File {
    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(bytes, at)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.write_all_at(bytes, at)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        File::set_len(self, len)
    }
}

/// The moves that compact a store.
struct CompactPlan {
    header: ExceptionStoreHeader,
    layout: ExceptionStoreLayout,
    size: u64,
    found: ExceptionStoreScanResult,
    /// Number of chunks that move.
    moves: u64,
}

/// The result, as `--json` prints it.
#[derive(Serialize)]
struct CompactReport {
    exceptions: u64,
    moved_bytes: u64,
    /// Length of the file before and after, in bytes.
    size_bytes: [u64; 2],
    /// Disk space of the file before and after, in bytes; the second is `None` in a dry run.
    disk_bytes: [Option<u64>; 2],
}

/// Runs `udm cow compact`.
pub(super) fn run(args: &CowCompactArgs) -> Result<ExitCode> {
    let path = &args.store.store;
    let context = || path.display().to_string();
    let file = File::options().read(true).write(!args.dry_run).open(path).with_context(context)?;
    if !file.metadata().with_context(context)?.is_file() {
        bail!("{}: no regular file: a device stays as long as it is", path.display());
    }
    // Other errors are ignored: they come from file systems without locks.
    if flock(&file, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK) {
        bail!("{}: it is in use by another program", path.display());
    }
    let store = StoreFile::open(path)?;
    let Some(header) = store.header else { bail!("{}: it is blank", path.display()) };
    if !header.valid {
        bail!("{}: the snapshot in it is invalid: nothing of it is of use", path.display());
    }
    if let Some(why) = read_store_invalid_mark(&args.store) {
        bail!("{why}");
    }
    let disk = |file: &File| file.metadata().map(|meta| meta.blocks() * 512).ok();
    let before = disk(&file);
    let plan = CompactPlan::new(&file, header, store.size).with_context(context)?;
    let len = if args.shrink { plan.least() } else { plan.size };
    if !args.dry_run {
        let bar = create_compact_progress_bar(plan.moves * header.chunk.bytes());
        plan.carry_out(&file, len, |moved| bar.inc(moved)).with_context(context)?;
        bar.finish_and_clear();
    }
    let report = CompactReport {
        exceptions: plan.found.exceptions,
        moved_bytes: plan.moves * header.chunk.bytes(),
        size_bytes: [plan.size, len],
        disk_bytes: [before, disk(&file).filter(|_| !args.dry_run)],
    };
    print_compact_report(&report, args)?;
    Ok(ExitCode::SUCCESS)
}

fn create_compact_progress_bar(bytes: u64) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:30} {percent}% {bytes} of {total_bytes} ({eta})");
    ProgressBar::new(bytes).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn print_compact_report(report: &CompactReport, args: &CowCompactArgs) -> Result<()> {
    with_stdout_ignoring_epipe(|out| {
        if args.store.json {
            return Ok(writeln!(out, "{}", serde_json::to_string(report)?)?);
        }
        let [size, len] = report.size_bytes;
        let moved = if args.dry_run { "to move" } else { "moved" };
        writeln!(out, "exceptions  {}", report.exceptions)?;
        writeln!(out, "{moved:<12}{} bytes", report.moved_bytes)?;
        writeln!(out, "size        {len} bytes, {size} before")?;
        if let [Some(before), Some(now)] = report.disk_bytes {
            writeln!(out, "on disk     {now} bytes, {before} before")?;
        }
        Ok(())
    })
}

impl CompactPlan {
    /// Reads all records and counts the moves.
    fn new(medium: &impl StoreFileIo, header: ExceptionStoreHeader, size: u64) -> Result<CompactPlan> {
        let layout = ExceptionStoreLayout::new(header.chunk);
        let found =
            for_each_cow_exception(|at, bytes| medium.read(at, bytes), header, size, None, |_| Ok(()))?;
        let mut plan = CompactPlan { header, layout, size, found, moves: 0 };
        let mut moves = 0;
        plan.each_move(medium, |_, _, _| {
            moves += 1;
            Ok(())
        })?;
        plan.moves = moves;
        Ok(plan)
    }

    /// Length in bytes of the compacted store.
    fn least(&self) -> u64 {
        self.layout.chunks_for(self.found.exceptions) * self.header.chunk.bytes()
    }

    /// Calls `each` for every chunk of data beyond the first N data chunks, where N is the number
    /// of exceptions. The arguments are the byte of the record, the chunk, and the hole to move it
    /// to.
    fn each_move(
        &self,
        medium: &impl StoreFileIo,
        mut each: impl FnMut(u64, u64, u64) -> Result<()>,
    ) -> Result<()> {
        let (layout, bytes) = (self.layout, self.header.chunk.bytes());
        if self.found.holes.is_empty() {
            return Ok(());
        }
        let holes = self.found.holes.iter().cloned().flatten();
        let mut free = holes.filter(|chunk| !layout.is_metadata(*chunk));
        let mut record = 0;
        let one = |exception: SnapshotException| {
            let area = layout.area(record / layout.records()) * bytes;
            let at = area + record % layout.records() * RECORD_LEN as u64;
            record += 1;
            if layout.data_index(exception.new) < self.found.exceptions {
                return Ok(());
            }
            let to = free.next().context("there is no hole to move a chunk to")?;
            each(at, exception.new, to)
        };
        for_each_cow_exception(|at, bytes| medium.read(at, bytes), self.header, self.size, None, one)
            .map(drop)
    }

    /// Moves the chunks and sets the length of the store to `len`; `moved` is called with the bytes
    /// of each copy.
    fn carry_out(&self, medium: &impl StoreFileIo, len: u64, moved: impl Fn(u64)) -> Result<()> {
        let bytes = self.header.chunk.bytes();
        if self.moves > 0 {
            let mut piece = vec![0; bytes.min(PIECE_MAX) as usize];
            self.each_move(medium, |_, from, to| {
                for at in (0..bytes).step_by(piece.len()) {
                    medium.read(from * bytes + at, &mut piece)?;
                    medium.write(to * bytes + at, &piece)?;
                    moved(piece.len() as u64);
                }
                Ok(())
            })?;
            medium.sync()?;
            // The second half of a record is the chunk of the store; the first half is that of the
            // origin.
            self.each_move(medium, |at, _, to| Ok(medium.write(at + 8, &to.to_le_bytes())?))?;
            medium.sync()?;
        }
        self.clear_leftover(medium)?;
        if self.least() < self.size {
            medium.set_len(self.least())?;
            medium.sync()?;
        }
        if self.least() < len {
            medium.set_len(len)?;
            medium.sync()?;
        }
        Ok(())
    }

    /// Clears bytes that a torn write left after the records. Another reader would take them for
    /// records.
    fn clear_leftover(&self, medium: &impl StoreFileIo) -> Result<()> {
        let Some(mut at) = self.found.leftover else { return Ok(()) };
        let bytes = self.header.chunk.bytes();
        let end = (self.layout.area(self.found.area) + 1) * bytes;
        while at < end {
            let piece = (end - at).min(PIECE_MAX);
            medium.write(at, &vec![0; piece as usize])?;
            at += piece;
        }
        Ok(medium.sync()?)
    }
}

#[cfg(test)]
mod tests;
