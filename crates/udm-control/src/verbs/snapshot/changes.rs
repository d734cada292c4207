//! The ranges in which a snapshot may differ from its origin or from another snapshot of it.

use super::{current_snapshot_report, snapshot_report, verb_error_with_errno};
use crate::api::{ChangedByteRange, ChangedRangesPage};
use crate::error::VerbError;
use crate::registry::{DeviceRegistry, RegisteredDevice};
use std::sync::Arc;
use udm_core::errno::{EBUSY, EINVAL, EIO};
use udm_core::{ChangeTrackingCheckpoint, Device, Extents, RangeChangeStatus, SECTOR_SIZE, Sector, Sectors};
use udm_dm::{SnapshotReport, SnapshotState, Table};

/// Maximum number of ranges in a page.
pub const PAGE_MAX: usize = 16 << 10;

/// A snapshot whose exceptions can be read.
struct SnapshotExceptionView {
    mapped: Arc<RegisteredDevice>,
    table: Arc<Table>,
    report: SnapshotReport,
    instant: ChangeTrackingCheckpoint,
}

/// A page of the ranges in which `name` may differ from its origin, or from the snapshot `other`,
/// starting at byte `from`. A range may differ if one of the stores has it: it was copied from the
/// origin, or written to a snapshot. The origin is written meanwhile, so each page shows its own
/// moment.
///
/// # Errors
/// If one of the devices is not a valid snapshot or is being merged; if they have different
/// origins.
pub fn list_changed_ranges(
    registry: &DeviceRegistry,
    name: &str,
    other: Option<&str>,
    from: u64,
    max: usize,
) -> Result<ChangedRangesPage, VerbError> {
    let kept_as = |name| view_snapshot_exceptions(registry, name, registry.find(name)?);
    let first = kept_as(name)?;
    let second = other.map(kept_as).transpose()?;
    let disk = first.report.origin.number;
    if let Some(SnapshotExceptionView { report, .. }) =
        second.as_ref().filter(|other| other.report.origin.number != disk)
    {
        let (one, two) = (registry.uri_of(disk), registry.uri_of(report.origin.number));
        let why = format!("it is of {one}, and {} of {two}", other.unwrap_or_default());
        return Err(verb_error_with_errno(name, EINVAL, why));
    }
    if let Some(merge) =
        second.is_none().then(|| find_merging_origin_device(registry, &first.report)).flatten()
    {
        let why = format!("a snapshot is being merged into its origin {merge}: all of it may differ");
        return Err(verb_error_with_errno(name, EBUSY, why));
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
        view_snapshot_exceptions(registry, name, Arc::clone(&found.mapped))?;
    }
    let (ranges, end) = extents_to_changed_ranges(from, &found);
    Ok(ChangedRangesPage {
        size_bytes: len * SECTOR_SIZE,
        chunk_bytes: chunk.bytes(),
        ranges,
        next_bytes: (end < len).then_some(end * SECTOR_SIZE),
    })
}

/// The snapshot `mapped`, if its exceptions can be read. Errors call it `name`.
fn view_snapshot_exceptions(
    registry: &DeviceRegistry,
    name: &str,
    mapped: Arc<RegisteredDevice>,
) -> Result<SnapshotExceptionView, VerbError> {
    let (table, report) = current_snapshot_report(registry, name, &mapped)?;
    let target = table.only_target().map(|entry| &entry.target);
    let instant = target.and_then(|target| target.as_snapshot()?.checkpoint());
    match (report.state, instant) {
        (state, _) if state.is_merge() => Err(verb_error_with_errno(name, EBUSY, "it is being merged")),
        (SnapshotState::Invalid, _) | (_, None) => {
            Err(verb_error_with_errno(name, EIO, "the snapshot is invalid"))
        }
        (_, Some(instant)) => Ok(SnapshotExceptionView { mapped, table, report, instant }),
    }
}

/// The device into which a snapshot of the same origin is being merged.
fn find_merging_origin_device(registry: &DeviceRegistry, of: &SnapshotReport) -> Option<String> {
    let merges = |found: &SnapshotReport| found.origin.number == of.origin.number && found.state.is_merge();
    let all = registry.all().into_iter();
    let mut merging =
        all.filter(|one| one.device.live().and_then(|t| snapshot_report(&t)).is_some_and(|r| merges(&r)));
    merging.next().map(|one| one.device.name())
}

/// The changed ranges from sector `from` on, and the sector up to which they are known.
fn extents_to_changed_ranges(from: u64, found: &Extents<RangeChangeStatus>) -> (Vec<ChangedByteRange>, u64) {
    let (mut at, mut ranges) = (from, Vec::new());
    for run in found.list() {
        if run.content == RangeChangeStatus::Changed {
            ranges.push(ChangedByteRange { start_bytes: at * SECTOR_SIZE, length_bytes: run.len.bytes() });
        }
        at += run.len.0;
    }
    (ranges, at)
}
