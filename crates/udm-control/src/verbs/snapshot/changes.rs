//! Where a snapshot and its origin, or two snapshots of it, may differ.

use super::{find_again, refuse, report};
use crate::error::VerbError;
use crate::http::api::{Changes, Range};
use crate::registry::{Mapped, Registry};
use std::sync::Arc;
use udm_core::errno::{EBUSY, EINVAL, EIO};
use udm_core::{ChangeStatus, Checkpoint, Device, Extents, SECTOR_SIZE, Sector, Sectors};
use udm_dm::{SnapshotReport, SnapshotState, Table};

/// Ranges of a page at the most.
pub const PAGE_MAX: usize = 16 << 10;

/// A snapshot whose instant is kept.
struct ReadableSnapshot {
    mapped: Arc<Mapped>,
    table: Arc<Table>,
    report: SnapshotReport,
    instant: Checkpoint,
}

/// A page of what may differ between `name` and its origin, or between `name` and `other`, from
/// byte `from` on: what is in one of their stores. What was not copied, and not written to a
/// snapshot, is the same. The origin goes on meanwhile: a page is as of its own moment.
///
/// # Errors
/// When one of them is no snapshot, is merged or is invalid; when they are not of one origin.
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
        second.as_ref().filter(|readable_snapshot| readable_snapshot.report.origin.number != disk)
    {
        let (one, two) = (registry.uri_of(disk), registry.uri_of(report.origin.number));
        let why = format!("it is of {one}, and {} of {two}", other.unwrap_or_default());
        return Err(refuse(name, EINVAL, why));
    }
    if let Some(merge) = second.is_none().then(|| merging_device(registry, &first.report)).flatten() {
        let why = format!("a snapshot is being merged into its origin {merge}: all of that may differ");
        return Err(refuse(name, EBUSY, why));
    }
    let len = first.table.limits().size.0;
    let against = second.as_ref().unwrap_or(&first);
    let chunk = first.report.chunk.min(against.report.chunk);
    let from = (from / SECTOR_SIZE).min(len);
    let mut found = Extents::new(2 * max.clamp(1, PAGE_MAX));
    if from < len {
        first.table.changed(&against.instant, Sector(from), Sectors(len - from), &mut found);
    }
    // One that has gone meanwhile is not passed off as one that differs everywhere.
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

/// The snapshot `mapped`, called `name` in errors, when what it holds can be read.
fn readable_snapshot(
    registry: &Registry,
    name: &str,
    mapped: Arc<Mapped>,
) -> Result<ReadableSnapshot, VerbError> {
    let (table, report) = find_again(registry, name, &mapped)?;
    let target = table.only().map(|entry| &entry.target);
    let instant = target.and_then(|target| target.snapshot()?.checkpoint());
    match (report.state, instant) {
        (state, _) if state.is_merge() => Err(refuse(name, EBUSY, "it is being merged")),
        (SnapshotState::Invalid, _) | (_, None) => Err(refuse(name, EIO, "the snapshot is invalid")),
        (_, Some(instant)) => Ok(ReadableSnapshot { mapped, table, report, instant }),
    }
}

/// The device into which a snapshot of the same origin is being merged.
fn merging_device(registry: &Registry, of: &SnapshotReport) -> Option<String> {
    let merges = |found: &SnapshotReport| found.origin.number == of.origin.number && found.state.is_merge();
    let all = registry.all().into_iter();
    let mut merging =
        all.filter(|one| one.device.live().and_then(|t| report(&t)).is_some_and(|r| merges(&r)));
    merging.next().map(|one| one.device.name())
}

/// What has changed, from sector `from` on, and up to which sector that is known.
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
