//! The ranges in which a snapshot may differ from its origin or from another snapshot of it.

use super::{error_for, find_again, snapshot_report};
use crate::api::{Changes, Range};
use crate::error::VerbError;
use crate::registry::{RegisteredDevice, Registry};
use std::sync::Arc;
use udm_core::errno::{EBUSY, EINVAL, EIO};
use udm_core::{ChangeStatus, Checkpoint, Device, Extents, SECTOR_SIZE, Sector, Sectors};
use udm_dm::{SnapshotReport, SnapshotState, Table};

/// Maximum number of ranges in a page.
pub const PAGE_MAX: usize = 16 << 10;

/// A snapshot whose exceptions can be read.
struct ReadableSnapshot {
    mapped: Arc<RegisteredDevice>,
    table: Arc<Table>,
    report: SnapshotReport,
    instant: Checkpoint,
}

/// A page of the ranges in which `name` may differ from its origin, or from the snapshot `other`,
/// starting at byte `from`. A range may differ if one of the stores has it: it was copied from the
/// origin, or written to a snapshot. The origin is written meanwhile, so each page shows its own
/// moment.
///
/// # Errors
/// If one of the devices is not a valid snapshot or is being merged; if they have different
/// origins.
pub fn changes(
    registry: &Registry,
    name: &str,
    other: Option<&str>,
    from: u64,
    max: usize,
) -> Result<Changes, VerbError> {
    let kept_as = |name| readable_snapshot(registry, name, registry.find(name)?);
    let first = kept_as(name)?;
    let second = other.map(kept_as).transpose()?;
    let disk = first.report.origin.number;
    if let Some(ReadableSnapshot { report, .. }) =
        second.as_ref().filter(|other| other.report.origin.number != disk)
    {
        let (one, two) = (registry.uri_of(disk), registry.uri_of(report.origin.number));
        let why = format!("it is of {one}, and {} of {two}", other.unwrap_or_default());
        return Err(error_for(name, EINVAL, why));
    }
    if let Some(merge) = second.is_none().then(|| merging_device(registry, &first.report)).flatten() {
        let why = format!("a snapshot is being merged into its origin {merge}: all of it may differ");
        return Err(error_for(name, EBUSY, why));
    }
    let len = first.table.limits().size.0;
    let against = second.as_ref().unwrap_or(&first);
    let chunk = first.report.chunk.min(against.report.chunk);
    let from = (from / SECTOR_SIZE).min(len);
    let mut found = Extents::new(2 * max.clamp(1, PAGE_MAX));
    if from < len {
        first.table.changed(&against.instant, Sector(from), Sectors(len - from), &mut found);
    }
    // If a snapshot became invalid meanwhile, fail instead of reporting that everything differs.
    let names = [Some((name, &first)), other.zip(second.as_ref())];
    for (name, found) in names.into_iter().flatten() {
        readable_snapshot(registry, name, Arc::clone(&found.mapped))?;
    }
    let (ranges, end) = ranges(from, &found);
    Ok(Changes {
        size_bytes: len * SECTOR_SIZE,
        chunk_bytes: chunk.bytes(),
        ranges,
        next_bytes: (end < len).then_some(end * SECTOR_SIZE),
    })
}

/// The snapshot `mapped`, if its exceptions can be read. Errors call it `name`.
fn readable_snapshot(
    registry: &Registry,
    name: &str,
    mapped: Arc<RegisteredDevice>,
) -> Result<ReadableSnapshot, VerbError> {
    let (table, report) = find_again(registry, name, &mapped)?;
    let target = table.only_target().map(|entry| &entry.target);
    let instant = target.and_then(|target| target.as_snapshot()?.checkpoint());
    match (report.state, instant) {
        (state, _) if state.is_merge() => Err(error_for(name, EBUSY, "it is being merged")),
        (SnapshotState::Invalid, _) | (_, None) => Err(error_for(name, EIO, "the snapshot is invalid")),
        (_, Some(instant)) => Ok(ReadableSnapshot { mapped, table, report, instant }),
    }
}

/// The device into which a snapshot of the same origin is being merged.
fn merging_device(registry: &Registry, of: &SnapshotReport) -> Option<String> {
    let merges = |found: &SnapshotReport| found.origin.number == of.origin.number && found.state.is_merge();
    let all = registry.all().into_iter();
    let mut merging =
        all.filter(|one| one.device.live().and_then(|t| snapshot_report(&t)).is_some_and(|r| merges(&r)));
    merging.next().map(|one| one.device.name())
}

/// The changed ranges from sector `from` on, and the sector up to which they are known.
fn ranges(from: u64, found: &Extents<ChangeStatus>) -> (Vec<Range>, u64) {
    let (mut at, mut ranges) = (from, Vec::new());
    for run in found.list() {
        if run.content == ChangeStatus::Changed {
            ranges.push(Range { start_bytes: at * SECTOR_SIZE, length_bytes: run.len.bytes() });
        }
        at += run.len.0;
    }
    (ranges, at)
}
