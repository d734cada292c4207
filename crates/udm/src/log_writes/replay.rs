//! `udm log-writes replay`.

use super::LogWritesReplayArgs;
use super::check::ReplayCheckCommand;
use super::image::ReplayOutputImage;
use super::source::LogWritesReader;
use anyhow::{Result, bail};
use serde::Serialize;
use std::ops::Range;
use udm_wire::log_writes::{EntryFlags, LogWritesEntry};

/// What a replay did.
#[derive(Debug, Default, Serialize)]
struct ReplaySummary {
    first_entry: u64,
    entries: u64,
    writes: u64,
    written_bytes: u64,
    discards: u64,
    flushes: u64,
    checks_passed: u64,
}

/// The entries to replay.
struct LogReplayRange {
    entries: Range<u64>,
    /// The record that reaches furthest into the device.
    furthest: Option<LogWritesEntry>,
}

pub(super) fn run(args: &LogWritesReplayArgs) -> Result<()> {
    let plan = plan_log_writes_replay(args)?;
    let mut log = LogWritesReader::open(&args.log)?;
    let mut image = open_replay_output_image(args, &plan, &log)?;
    let mut check =
        args.check.as_deref().map(|command| ReplayCheckCommand::new(command, &image)).transpose()?;
    let mut summary = ReplaySummary { first_entry: plan.entries.start, ..ReplaySummary::default() };
    let mut flushes = 0;
    for _ in 0..plan.entries.end {
        let Some(record) = log.next()? else { break };
        let is_flush = record.entry.flags.contains(EntryFlags::FLUSH);
        flushes += u64::from(is_flush);
        if record.index < plan.entries.start {
            continue;
        }
        replay_log_entry(&log, &record, &mut image, &mut summary)?;
        if let Some(check) = check.as_mut().filter(|_| is_flush && args.each_flush) {
            run_replay_check_command(
                check,
                &mut image,
                &format!("flush {flushes} (entry {})", record.index),
                &mut summary,
            )?;
        }
    }
    if let Some(check) = check.as_mut().filter(|_| !args.each_flush) {
        run_replay_check_command(check, &mut image, "the end", &mut summary)?;
    }
    print_replay_summary(&summary, args.json)
}

/// Finds the entries to replay. Reads, and so checks, the log up to the last of them.
fn plan_log_writes_replay(args: &LogWritesReplayArgs) -> Result<LogReplayRange> {
    let name = args.log.display();
    let mut log = LogWritesReader::open(&args.log)?;
    let mut start = if args.start_mark.is_some() { None } else { Some(args.start_entry.unwrap_or(0)) };
    let mut plan = LogReplayRange { entries: 0..0, furthest: None };
    let (mut flushes, mut reached) = (0, false);
    while !reached {
        let Some(record) = log.next()? else { break };
        let next = record.index + 1;
        plan.entries.end = next;
        let marked = |text: &Option<String>| {
            text.is_some() && record.mark.as_deref() == text.as_ref().map(String::as_bytes)
        };
        if record.entry.flags.contains(EntryFlags::FLUSH) {
            flushes += 1;
            reached = args.upto == Some(flushes);
        }
        match start {
            None if marked(&args.start_mark) => start = Some(next),
            Some(start) if record.index >= start => {
                reached |= marked(&args.upto_mark) || args.entries == Some(next - start);
                if plan.furthest.as_ref().is_none_or(|furthest| furthest.range.end < record.range.end) {
                    plan.furthest = Some(record);
                }
            }
            _ => {}
        }
    }
    let end = plan.entries.end;
    plan.entries.start = match start {
        None => bail!(
            "{name}: no mark {:?} in the {end} entries up to the end",
            args.start_mark.as_deref().unwrap_or("")
        ),
        Some(start) if start > end => {
            bail!("{name}: the start, entry {start}, is after the end, entry {end}")
        }
        Some(start) => start,
    };
    match (&args.upto, &args.upto_mark, &args.entries) {
        _ if reached => Ok(plan),
        (Some(upto), ..) => bail!("{name}: there is no flush {upto}, the log has {flushes}"),
        (_, Some(mark), _) => bail!("{name}: no mark {mark:?} after the start"),
        (.., Some(count)) => {
            bail!("{name}: there are fewer than {count} entries after the start; the log has {end}")
        }
        (None, None, None) => Ok(plan),
    }
}

/// Opens or creates the device, after checking that all entries fit.
fn open_replay_output_image(
    args: &LogWritesReplayArgs,
    plan: &LogReplayRange,
    log: &LogWritesReader,
) -> Result<ReplayOutputImage> {
    let fits = |size: u64| match &plan.furthest {
        Some(record) if record.range.end > size => bail!(
            "{}: at byte {}: entry {} reaches to byte {} of a device of {size}",
            args.log.display(),
            record.offset,
            record.index,
            record.range.end
        ),
        _ => Ok(()),
    };
    if let Some(size) = args.size {
        fits(size)?;
    }
    let image = ReplayOutputImage::open(&args.device, args.size, log)?;
    fits(image.size())?;
    Ok(image)
}

/// Applies to the image the operation that the entry records.
fn replay_log_entry(
    log: &LogWritesReader,
    record: &LogWritesEntry,
    image: &mut ReplayOutputImage,
    summary: &mut ReplaySummary,
) -> Result<()> {
    let flags = record.entry.flags;
    summary.entries += 1;
    summary.flushes += u64::from(flags.contains(EntryFlags::FLUSH));
    if flags.contains(EntryFlags::DISCARD) {
        summary.discards += 1;
        image.zero(&record.range)?;
    } else if !record.data.is_empty() {
        summary.writes += 1;
        summary.written_bytes += record.data.end - record.data.start;
        image.write(log, &record.data, record.range.start)?;
    }
    Ok(())
}

/// Runs the check. If it fails, the replay ends, and the device holds the state that failed.
fn run_replay_check_command(
    check: &mut ReplayCheckCommand<'_>,
    image: &mut ReplayOutputImage,
    at: &str,
    summary: &mut ReplaySummary,
) -> Result<()> {
    let status = check.run(image)?;
    if !status.success() {
        bail!("{}: the check failed at {at}: {status}: the file holds what failed", image.path().display());
    }
    summary.checks_passed += 1;
    Ok(())
}

fn print_replay_summary(summary: &ReplaySummary, json: bool) -> Result<()> {
    let ReplaySummary { first_entry, entries, writes, written_bytes, discards, flushes, checks_passed } =
        summary;
    let text = if json {
        serde_json::to_string(summary)? + "\n"
    } else {
        format!(
            "{entries} entries from {first_entry}: {writes} writes ({written_bytes} bytes), {discards} discards, {flushes} flushes; \
             {checks_passed} checks passed\n"
        )
    };
    crate::output::print_to_stdout(&text)
}
