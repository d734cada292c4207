//! Where a snapshot and its origin, or two snapshots of it, may differ.

use super::{find, refuse};
use crate::error::VerbError;
use crate::http::api::{Changes, Range};
use crate::registry::Registry;
use std::sync::Arc;
use udm_core::errno::{EINVAL, EIO};
use udm_core::{Device, SECTOR_SIZE, Sector, Sectors};
use udm_dm::{SnapshotReport, SnapshotState, Table};

/// Ranges of a page at the most.
pub const PAGE_MAX: usize = 16 << 10;

/// Runs that a page is put together from at the most: neighbours become one range.
const STEPS_MAX: usize = 64 << 10;

/// A page of what may differ between `name` and its origin, or between `name` and `other`, from
/// byte `from` on: what is in one of their stores. What was not copied, and not written to a
/// snapshot, is the same. The origin goes on meanwhile: a page is as of its own moment.
///
/// # Errors
/// When one of them is no snapshot or is invalid; when they are not of one origin.
pub fn changes(
    registry: &Registry,
    name: &str,
    other: Option<&str>,
    from: u64,
    max: usize,
) -> Result<Changes, VerbError> {
    let first = usable(registry, name)?;
    let second = other.map(|other| usable(registry, other)).transpose()?;
    if let Some((_, report)) = second.as_ref().filter(|(_, r)| r.origin.number != first.1.origin.number) {
        let (one, two) = (registry.uri_of(first.1.origin.number), registry.uri_of(report.origin.number));
        return Err(refuse(
            name,
            EINVAL,
            format!("it is of {one}, and {} of {two}", other.unwrap_or_default()),
        ));
    }
    let len = first.0.limits().size.0;
    let chunk = second.iter().fold(first.1.chunk, |least, (_, report)| least.min(report.chunk));
    let tables: Vec<&Table> = [&first].into_iter().chain(&second).map(|(table, _)| &**table).collect();
    let (ranges, next) = page(&tables, from / SECTOR_SIZE, len, max.clamp(1, PAGE_MAX));
    Ok(Changes {
        size_bytes: len * SECTOR_SIZE,
        chunk_bytes: chunk.bytes(),
        ranges,
        next_bytes: next.map(|sector| sector * SECTOR_SIZE),
    })
}

/// The snapshot `name`, when what it holds can be read.
fn usable(registry: &Registry, name: &str) -> Result<(Arc<Table>, SnapshotReport), VerbError> {
    let (_, table, report) = find(registry, name)?;
    match report.state {
        SnapshotState::Invalid => Err(refuse(name, EIO, "the snapshot is invalid")),
        _ => Ok((table, report)),
    }
}

/// At most `max` ranges from `from` on, below `len`, and where the next page begins.
fn page(tables: &[&Table], from: u64, len: u64, max: usize) -> (Vec<Range>, Option<u64>) {
    let (mut at, mut runs) = (from, Vec::<(u64, u64)>::new());
    for _ in 0..STEPS_MAX {
        let nearest = tables.iter().filter_map(|table| next(table, at)).filter(|run| run.0 < len).min();
        let Some((start, end)) = nearest else { return (ranges(&runs), None) };
        let full = runs.len() == max;
        match runs.last_mut() {
            Some(last) if last.1 >= start => last.1 = last.1.max(end.min(len)),
            _ if full => return (ranges(&runs), Some(start)),
            _ => runs.push((start, end.min(len))),
        }
        at = end;
    }
    (ranges(&runs), Some(at))
}

/// The next run of `table`, from a sector to another.
fn next(table: &Table, from: u64) -> Option<(u64, u64)> {
    let view = table.targets().first()?.target.snapshot()?;
    let (Sector(start), Sectors(len)) = view.next_changed(Sector(from))?;
    Some((start, start + len))
}

fn ranges(runs: &[(u64, u64)]) -> Vec<Range> {
    let range = |&(start, end): &(u64, u64)| Range {
        start_bytes: start * SECTOR_SIZE,
        length_bytes: (end - start) * SECTOR_SIZE,
    };
    runs.iter().map(range).collect()
}
