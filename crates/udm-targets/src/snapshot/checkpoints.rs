//! Changes since an instant: checkpoints of origins and snapshots.
//!
//! A snapshot's map has the chunks that its origin has changed since the instant of the snapshot,
//! and the chunks written to the snapshot itself. Two maps together show where two snapshots may
//! differ. Incremental copies use these answers, so an answer may contain too much but never too
//! little:
//!
//! * A map only grows while its snapshot is in use. A snapshot that is merged, removed or invalid
//!   is of no use. So the map is walked first, and *afterwards* the code checks that the snapshot
//!   was in use. Then every write acknowledged before the walk is included.
//! * An origin that is being merged into changes all the time. It has no checkpoints, and all of it
//!   counts as changed.

use super::binding::SnapshotTableBinding;
use super::origin_snapshots::OriginSnapshots;
use super::state::Snapshot;
use std::sync::Arc;
use udm_core::{ChangeTrackingCheckpoint, Extents, RangeChangeStatus, Sector, Sectors};

/// Maximum number of chunks added to a run, so that extending a run takes no longer than finding
/// its start.
const RUN_MAX: u64 = 511;

impl Snapshot {
    /// The first run of sectors between `from` and `end` that are in the store. The sectors after
    /// the run may be in the store too.
    fn next_changed(&self, from: u64, end: u64) -> Option<(u64, u64)> {
        let (mut chunk, last) = (self.chunk_of(from), self.chunk_of(end.max(1) - 1));
        (chunk, _) = self.map.next_in_store(chunk, last + 1)?;
        let start = self.start_of(chunk).max(from);
        let most = (chunk + RUN_MAX).min(last);
        while chunk < most && self.place(chunk + 1).store_chunk().is_some() {
            chunk += 1;
        }
        Some((start, self.start_of(chunk + 1).min(end)))
    }

    /// True if the snapshot keeps every change of its origin.
    fn keeps_all(&self) -> bool {
        self.is_active() && self.is_valid()
    }
}

/// The runs of sectors that are in at least one of several stores.
struct ChangedSectorRuns<'a> {
    end: u64,
    /// Each snapshot with its next run, if it has one.
    sources: Vec<(&'a Snapshot, Option<(u64, u64)>)>,
}

impl<'a> ChangedSectorRuns<'a> {
    fn new(sources: impl Iterator<Item = &'a Snapshot>, from: u64, end: u64) -> ChangedSectorRuns<'a> {
        let source = |snapshot: &'a Snapshot| (snapshot, snapshot.next_changed(from, end));
        ChangedSectorRuns { end, sources: sources.map(source).collect() }
    }
}

impl Iterator for ChangedSectorRuns<'_> {
    type Item = (u64, u64);

    /// If runs overlap, no sector is returned twice.
    fn next(&mut self) -> Option<(u64, u64)> {
        let (start, end) = self.sources.iter().filter_map(|(_, next)| *next).min()?;
        for (snapshot, next) in &mut self.sources {
            if next.is_some_and(|(at, _)| at < end) {
                *next = if end < self.end { snapshot.next_changed(end, self.end) } else { None };
            }
        }
        Some((start, end))
    }
}

impl OriginSnapshots {
    /// The checkpoints of the origin, without that of the snapshot `except`.
    pub(super) fn checkpoints(&self, except: Option<&Arc<Snapshot>>) -> Vec<ChangeTrackingCheckpoint> {
        let bindings = self.bindings();
        let others =
            bindings.iter().filter(|binding| except.is_none_or(|own| !Arc::ptr_eq(&binding.snapshot, own)));
        others.filter_map(|binding| binding.checkpoint()).collect()
    }

    /// Appends the ranges that may differ between the instant `since` and the origin, or its
    /// snapshot `own`.
    pub(super) fn changed(
        &self,
        own: Option<&Snapshot>,
        since: &ChangeTrackingCheckpoint,
        (from, len): (Sector, Sectors),
        out: &mut Extents<RangeChangeStatus>,
    ) {
        let base = since.key.upgrade().and_then(|key| key.downcast::<Snapshot>().ok());
        let found = base.and_then(|base| {
            let found = append_changed_ranges(own, &base, from.0, from.0 + len.0, out.like());
            let is_ours = self.listed().iter().any(|listed| Arc::ptr_eq(listed, &base));
            let all = is_ours && base.keeps_all() && own.is_none_or(Snapshot::keeps_all);
            all.then_some(found)
        });
        match found {
            Some(found) => found.list().iter().for_each(|run| out.push(run.len, run.content)),
            None => out.push(len, RangeChangeStatus::Changed),
        }
    }
}

/// Appends the ranges that are in one of the stores. Sectors beyond the end of a snapshot count as
/// changed.
fn append_changed_ranges(
    own: Option<&Snapshot>,
    base: &Snapshot,
    from: u64,
    end: u64,
    mut out: Extents<RangeChangeStatus>,
) -> Extents<RangeChangeStatus> {
    let sources = || own.into_iter().chain([base]);
    let known = sources().map(Snapshot::len).fold(end, u64::min).max(from);
    let mut at = from;
    if known > from {
        for (start, until) in ChangedSectorRuns::new(sources(), from, known) {
            if out.is_full() {
                break;
            }
            out.push(Sectors(start - at), RangeChangeStatus::Same);
            out.push(Sectors(until - start), RangeChangeStatus::Changed);
            at = until;
        }
        out.push(Sectors(known - at), RangeChangeStatus::Same);
    }
    out.push(Sectors(end - known), RangeChangeStatus::Changed);
    out
}

impl SnapshotTableBinding {
    /// The checkpoint of the kept instant; `None` if the snapshot is not active or not valid.
    pub(super) fn checkpoint(&self) -> Option<ChangeTrackingCheckpoint> {
        let (name, key) = (self.name()?, Arc::downgrade(&self.snapshot));
        // A table before its handover keeps nothing yet.
        (self.is_active_snapshot() && self.snapshot.keeps_all())
            .then_some(ChangeTrackingCheckpoint { name, key })
    }
}
