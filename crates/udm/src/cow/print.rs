//! Output of the verbs `info`, `check` and `dump`.

use super::store::StoreFile;
use super::{CowCheckArgs, StoreArgs};
use crate::output::with_stdout_ignoring_epipe;
use anyhow::Result;
use serde::Serialize;
use std::io::Write;
use std::ops::Range;
use std::process::ExitCode;
use udm_control::state_folder::{StableDiskId, StoreToMarkInvalid};
use udm_core::{SECTOR_SIZE, Sectors};
use udm_wire::cow::{
    ExceptionStoreHeader, ExceptionStoreLayout, ExceptionStoreScanResult, SnapshotException,
};

/// A store, as `--json` prints it.
#[derive(Serialize)]
struct StoreReport {
    state: &'static str,
    /// Reason of the server's mark, if the server has marked the store as invalid.
    #[serde(skip_serializing_if = "Option::is_none")]
    marked: Option<String>,
    size_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    chunk_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    records: Option<StoreRecordsSummary>,
}

/// Summary of the records of a store.
#[derive(Serialize)]
struct StoreRecordsSummary {
    exceptions: u64,
    /// Maximum number of exceptions.
    capacity: u64,
    /// The three numbers of the kernel's status line, in sectors.
    status: String,
    /// Ranges of chunks that a crash left unused, in bytes.
    unused_bytes: Vec<Range<u64>>,
    /// The first byte after the records that is not zero.
    #[serde(skip_serializing_if = "Option::is_none")]
    leftover_bytes: Option<u64>,
}

/// An exception, as `--json` prints it.
#[derive(Serialize)]
struct ExceptionRow {
    origin_bytes: u64,
    store_bytes: u64,
}

/// Runs `udm cow info`.
pub(super) fn run_cow_info(args: &StoreArgs) -> Result<ExitCode> {
    let (report, _) = read_cow_store_report(args, None)?;
    print_cow_store_report(&report, args.json)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs `udm cow check`.
pub(super) fn run_cow_check(args: &CowCheckArgs) -> Result<ExitCode> {
    let (report, usable) = read_cow_store_report(&args.store, args.origin_size)?;
    print_cow_store_report(&report, args.store.json)?;
    Ok(if usable { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Reads the store; returns the report, and true if the store can be used.
fn read_cow_store_report(args: &StoreArgs, origin_size: Option<u64>) -> Result<(StoreReport, bool)> {
    let store = StoreFile::open(&args.store)?;
    let Some(header) = store.header else {
        let blank = StoreReport {
            state: "blank",
            marked: None,
            size_bytes: store.size,
            chunk_bytes: None,
            records: None,
        };
        return Ok((blank, true));
    };
    let summary = store.read(header, origin_size, |_| Ok(()))?;
    let marked = read_store_invalid_mark(args).filter(|_| header.valid);
    let usable = header.valid && marked.is_none();
    let report = StoreReport {
        state: if usable { "valid" } else { "invalid" },
        marked,
        size_bytes: store.size,
        chunk_bytes: Some(header.chunk.bytes()),
        records: Some(StoreRecordsSummary::new(header, &summary, store.size)),
    };
    Ok((report, usable))
}

/// Returns the reason if the server's state folder marks the store as invalid. A state folder
/// without a valid path holds no marks.
pub(super) fn read_store_invalid_mark(args: &StoreArgs) -> Option<String> {
    args.state.open().ok()?.mark(StoreToMarkInvalid::Disk(StableDiskId::named(&args.store))).why()
}

impl StoreRecordsSummary {
    fn new(
        header: ExceptionStoreHeader,
        summary: &ExceptionStoreScanResult,
        size: u64,
    ) -> StoreRecordsSummary {
        let layout = ExceptionStoreLayout::new(header.chunk);
        let (sectors, bytes) = (u64::from(header.chunk.sectors()), header.chunk.bytes());
        let size = Sectors::from_bytes(size);
        let (used, metadata) = (summary.next_free * sectors, (summary.area + 2) * sectors);
        StoreRecordsSummary {
            exceptions: summary.exceptions,
            capacity: layout.capacity(layout.chunks(size)),
            status: format!("{used}/{} {metadata}", size.0),
            unused_bytes: summary.holes.iter().map(|hole| hole.start * bytes..hole.end * bytes).collect(),
            leftover_bytes: summary.leftover,
        }
    }
}

fn print_cow_store_report(report: &StoreReport, json: bool) -> Result<()> {
    with_stdout_ignoring_epipe(|out| {
        if json {
            return Ok(writeln!(out, "{}", serde_json::to_string(report)?)?);
        }
        writeln!(out, "state       {}", report.state)?;
        if let Some(why) = &report.marked {
            writeln!(out, "marked      {why}")?;
        }
        writeln!(out, "size        {} bytes", report.size_bytes)?;
        if let Some(chunk) = report.chunk_bytes {
            writeln!(out, "chunk       {chunk} bytes, {} sectors", chunk / SECTOR_SIZE)?;
        }
        let Some(records) = &report.records else { return Ok(()) };
        writeln!(out, "exceptions  {}, {} fit", records.exceptions, records.capacity)?;
        writeln!(out, "status      {}", records.status)?;
        for hole in &records.unused_bytes {
            writeln!(out, "unused      bytes {} to {}: a crash left them", hole.start, hole.end)?;
        }
        if let Some(at) = records.leftover_bytes {
            writeln!(out, "leftover    at byte {at}, after the last record: left by a torn write")?;
        }
        Ok(())
    })
}

/// Runs `udm cow dump`.
pub(super) fn run_cow_dump(args: &StoreArgs) -> Result<ExitCode> {
    let store = StoreFile::open(&args.store)?;
    with_stdout_ignoring_epipe(|out| {
        let chunk = store.header.map(|header| header.chunk);
        match (args.json, chunk) {
            (true, Some(chunk)) => write!(out, "{{\"chunk_bytes\":{},\"exceptions\":[", chunk.bytes())?,
            (true, None) => write!(out, "{{\"exceptions\":[")?,
            (false, Some(chunk)) => writeln!(out, "# chunks of {} bytes: ORIGIN STORE", chunk.bytes())?,
            (false, None) => writeln!(out, "# blank")?,
        }
        if let Some(header) = store.header {
            let mut comma = "";
            store.read(header, None, |SnapshotException { old, new }| {
                if !args.json {
                    return Ok(writeln!(out, "{old} {new}")?);
                }
                let bytes = header.chunk.bytes();
                // `old` may be beyond any device: the product is clamped.
                let row = ExceptionRow { origin_bytes: old.saturating_mul(bytes), store_bytes: new * bytes };
                write!(out, "{comma}\n{}", serde_json::to_string(&row)?)?;
                comma = ",";
                Ok(())
            })?;
        }
        if args.json {
            writeln!(out, "\n]}}")?;
        }
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}
