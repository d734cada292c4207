//! `udm log-writes list`.

use super::LogWritesListArgs;
use super::source::LogWritesReader;
use crate::output::with_stdout_ignoring_epipe;
use anyhow::{Context, Result};
use serde::Serialize;
use std::io::Write;
use udm_wire::log_writes::{EntryFlags, LogWritesEntry};

/// An entry, as `--json` prints it: one object per line.
#[derive(Serialize)]
struct LogWritesEntryRow<'a> {
    index: u64,
    /// Position of the entry in the log, in bytes.
    log_offset_bytes: u64,
    start_bytes: u64,
    length_bytes: u64,
    flags: Vec<String>,
    /// Number of the flush, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    flush: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mark: Option<std::borrow::Cow<'a, str>>,
}

#[derive(Serialize)]
struct LogWritesListHeader {
    sector_size_bytes: u32,
    entries: u64,
}

pub(super) fn run(args: &LogWritesListArgs) -> Result<()> {
    let mut log = LogWritesReader::open(&args.log)?;
    with_stdout_ignoring_epipe(|out| print_log_writes_entries(&mut log, args.json, out))
}

fn print_log_writes_entries(log: &mut LogWritesReader, json: bool, out: &mut impl Write) -> Result<()> {
    let head = log.superblock();
    if json {
        let head = LogWritesListHeader { sector_size_bytes: head.sector_size, entries: head.entries };
        let text = serde_json::to_string(&head)?;
        write!(out, "{{\"log\":{text},\"entries\":[").context("standard output")?;
    } else {
        writeln!(
            out,
            "# sectors of {} bytes, {} entries: ENTRY SECTOR SECTORS FLAGS",
            head.sector_size, head.entries
        )
        .context("standard output")?;
    }
    let mut flushes = 0;
    while let Some(record) = log.next()? {
        let is_flush = record.entry.flags.contains(EntryFlags::FLUSH);
        flushes += u64::from(is_flush);
        let flush = is_flush.then_some(flushes);
        let text =
            if json { log_writes_entry_json(&record, flush)? } else { log_writes_entry_line(&record, flush) };
        out.write_all(text.as_bytes()).context("standard output")?;
    }
    if json {
        out.write_all(b"\n]}\n").context("standard output")?;
    }
    Ok(())
}

fn log_writes_entry_json(record: &LogWritesEntry, flush: Option<u64>) -> Result<String> {
    let row = LogWritesEntryRow {
        index: record.index,
        log_offset_bytes: record.offset,
        start_bytes: record.range.start,
        length_bytes: record.range.end - record.range.start,
        flags: record.entry.flags.iter_names().map(|(name, _)| name.to_ascii_lowercase()).collect(),
        flush,
        mark: record.mark.as_deref().map(String::from_utf8_lossy),
    };
    let comma = if record.index == 0 { "\n" } else { ",\n" };
    Ok(comma.to_owned() + &serde_json::to_string(&row)?)
}

fn log_writes_entry_line(record: &LogWritesEntry, flush: Option<u64>) -> String {
    let entry = &record.entry;
    let mut text = format!("{} {} {} {}", record.index, entry.sector, entry.sectors, entry.flags.names());
    if let Some(flush) = flush {
        text += &format!(" #{flush}");
    }
    if let Some(mark) = &record.mark {
        // Escaped: the text is whatever the log holds, and the line goes to a terminal.
        text += &format!(" \"{}\"", mark.escape_ascii());
    }
    text + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use udm_wire::log_writes::LogWritesEntryHeader;

    #[test]
    fn a_mark_cannot_reach_the_terminal() {
        let entry = LogWritesEntryHeader { flags: EntryFlags::MARK, ..LogWritesEntryHeader::default() };
        let record = LogWritesEntry {
            index: 7,
            offset: 0,
            entry,
            mark: Some(b"a\x1b[2J\"\n".to_vec()),
            data: 0..0,
            range: 0..0,
        };
        assert_eq!(log_writes_entry_line(&record, None), "7 0 0 mark \"a\\x1b[2J\\\"\\n\"\n");
    }

    #[test]
    fn a_flush_has_its_number() {
        let entry = LogWritesEntryHeader {
            sector: 8,
            sectors: 2,
            flags: EntryFlags::FLUSH | EntryFlags::FUA,
            data_len: 0,
        };
        let record =
            LogWritesEntry { index: 3, offset: 512, entry, mark: None, data: 1024..2048, range: 4096..5120 };
        assert_eq!(log_writes_entry_line(&record, Some(2)), "3 8 2 flush|fua #2\n");
        let row = log_writes_entry_json(&record, Some(2)).unwrap();
        assert_eq!(
            row,
            ",\n{\"index\":3,\"log_offset_bytes\":512,\"start_bytes\":4096,\"length_bytes\":1024,\"flags\":[\"flush\",\"fua\"],\"flush\":2}"
        );
    }
}
