//! `udm cow compact`: brings the data of a store together at its front, and gives the rest back.
//!
//! It works in place, so it needs no room for a second store, and the file stays the one that
//! tables name. What lies furthest behind moves into holes, and the data that it leaves is not
//! touched again; so a crash at any point leaves a store with the same exceptions:
//!
//! ```text
//!  copy into the holes ──► sync ──► point the records there ──► sync ──► cut off the end ──► sync
//! ```
//!
//! A record lies within one sector, so it points to the old place or to the new one, and both have
//! the data until all records that are durable point to the new one.

use super::CompactArgs;
use super::print::marked;
use super::store::{StoreFile, records};
use crate::output::to_stdout;
use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::Serialize;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::ExitCode;
use udm_wire::cow::{Exception, RECORD_LEN, StoreHeader, StoreLayout, StoreSummary};

/// The most bytes that are copied or cleared at once.
const PIECE_MAX: u64 = 1 << 20;

/// What a store is kept in.
trait Medium {
    fn read(&self, at: u64, bytes: &mut [u8]) -> io::Result<()>;
    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()>;
    /// What was written before is durable.
    fn sync(&self) -> io::Result<()>;
    fn set_len(&self, len: u64) -> io::Result<()>;
}

impl Medium for File {
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

/// What is to be done.
struct CompactPlan {
    header: StoreHeader,
    layout: StoreLayout,
    size: u64,
    found: StoreSummary,
    /// Chunks that move.
    moves: u64,
}

/// What was done, as `--json` prints it.
#[derive(Serialize)]
struct CompactReport {
    exceptions: u64,
    moved_bytes: u64,
    /// The length of the file.
    size_bytes: [u64; 2],
    /// What it takes on the disk; not known of what was not done.
    disk_bytes: [Option<u64>; 2],
}

/// `udm cow compact`.
pub(super) fn run(args: &CompactArgs) -> Result<ExitCode> {
    let path = &args.store.store;
    let context = || path.display().to_string();
    let file = File::options().read(true).write(!args.dry_run).open(path).with_context(context)?;
    if !file.metadata().with_context(context)?.is_file() {
        bail!("{}: no regular file: a device stays as long as it is", path.display());
    }
    // Another error is that of a file system that knows no locks.
    if flock(&file, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK) {
        bail!("{}: it is in use by another program", path.display());
    }
    let store = StoreFile::open(path)?;
    let Some(header) = store.header else { bail!("{}: it is blank", path.display()) };
    if !header.valid {
        bail!("{}: the snapshot in it is invalid: nothing of it is of use", path.display());
    }
    if let Some(why) = marked(&args.store) {
        bail!("{why}");
    }
    let disk = |file: &File| file.metadata().map(|meta| meta.blocks() * 512).ok();
    let before = disk(&file);
    let plan = CompactPlan::new(&file, header, store.size).with_context(context)?;
    let len = if args.shrink { plan.least() } else { plan.size };
    if !args.dry_run {
        let progress_bar = progress_bar(plan.moves * header.chunk.bytes());
        plan.carry_out(&file, len, |moved| progress_bar.inc(moved)).with_context(context)?;
        progress_bar.finish_and_clear();
    }
    let report = CompactReport {
        exceptions: plan.found.exceptions,
        moved_bytes: plan.moves * header.chunk.bytes(),
        size_bytes: [plan.size, len],
        disk_bytes: [before, disk(&file).filter(|_| !args.dry_run)],
    };
    show(&report, args)?;
    Ok(ExitCode::SUCCESS)
}

fn progress_bar(bytes: u64) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{progress_bar:30} {percent}% {bytes} of {total_bytes} ({eta})");
    ProgressBar::new(bytes).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn show(report: &CompactReport, args: &CompactArgs) -> Result<()> {
    to_stdout(|out| {
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
    /// Reads all records.
    fn new(medium: &impl Medium, header: StoreHeader, size: u64) -> Result<CompactPlan> {
        let layout = StoreLayout::new(header.chunk);
        let found = records(|at, bytes| medium.read(at, bytes), header, size, None, |_| Ok(()))?;
        let mut plan = CompactPlan { header, layout, size, found, moves: 0 };
        let mut moves = 0;
        plan.each_move(medium, |_, _, _| {
            moves += 1;
            Ok(())
        })?;
        plan.moves = moves;
        Ok(plan)
    }

    /// Bytes that the store needs.
    fn least(&self) -> u64 {
        self.layout.chunks_for(self.found.exceptions) * self.header.chunk.bytes()
    }

    /// Calls `each` for the chunks that lie behind as many chunks of data as there are exceptions:
    /// with the byte of the record, the chunk, and the hole that it is to go to.
    fn each_move(
        &self,
        medium: &impl Medium,
        mut each: impl FnMut(u64, u64, u64) -> Result<()>,
    ) -> Result<()> {
        let (layout, bytes) = (self.layout, self.header.chunk.bytes());
        if self.found.holes.is_empty() {
            return Ok(());
        }
        let holes = self.found.holes.iter().cloned().flatten();
        let mut free = holes.filter(|chunk| !layout.is_metadata(*chunk));
        let mut record = 0;
        let one = |exception: Exception| {
            let area = layout.area(record / layout.records()) * bytes;
            let at = area + record % layout.records() * RECORD_LEN as u64;
            record += 1;
            if layout.data_index(exception.new) < self.found.exceptions {
                return Ok(());
            }
            let to = free.next().context("there is no hole for what lies behind")?;
            each(at, exception.new, to)
        };
        records(|at, bytes| medium.read(at, bytes), self.header, self.size, None, one).map(drop)
    }

    /// Does it, and leaves `len` bytes; `moved` is told of bytes that were copied.
    fn carry_out(&self, medium: &impl Medium, len: u64, moved: impl Fn(u64)) -> Result<()> {
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
            // Its chunk of the origin stands in front of where it is kept.
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

    /// What a torn write left behind the records would be taken for records by another reader.
    fn clear_leftover(&self, medium: &impl Medium) -> Result<()> {
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
