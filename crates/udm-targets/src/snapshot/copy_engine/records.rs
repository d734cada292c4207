//! A lane's metadata writes: records, and the mark of an invalid store.

use super::super::copy_jobs::PIECE_MAX;
use super::super::record_commits::ExceptionRecordWrite;
use super::super::state::SnapshotHealth;
use super::{ChunkCopyEngine, CopyEngineRequestKind, CopyEngineSnapshotState};
use std::sync::Arc;
use udm_core::{Bio, BioFlags, Nanos, Op, SECTOR_SIZE, Sectors, Status};
use udm_wire::cow::ExceptionStoreHeader;

/// Minimum interval of checks that a store has not become shorter.
const LAST_BLOCK_INTERVAL: Nanos = Nanos(100_000_000);

/// A write of records in progress.
pub(super) struct InFlightExceptionRecordWrite {
    /// The records; `None` if there are no more and the last written records must become durable.
    commit: Option<ExceptionRecordWrite>,
    /// Parts of the next area that are not cleared yet.
    clearing: usize,
    /// The records are durable when the write completes.
    is_synced: bool,
}

impl ChunkCopyEngine {
    /// Called when a request of a copy or record has failed: the snapshot of `part` is lost.
    pub(in crate::snapshot) fn fail(&mut self, part: usize, status: Status) {
        // The kernel's text, plus the case that an administrator can fix.
        self.lose(
            part,
            match status {
                Status::NoSpace => "Error reading/writing: No space left on device",
                _ => "Error reading/writing",
            },
        );
    }

    /// Invalidates the snapshot of `part`, because a copy was lost.
    pub(in crate::snapshot) fn lose(&mut self, part: usize, why: &str) {
        self.progress = true;
        let snapshot = Arc::clone(&self.parts[part].snapshot);
        if !snapshot.invalidate(why) {
            return;
        }
        if snapshot.commits.is_none() {
            return snapshot.invalidated();
        }
        let mut block = self.bufs.get(self.parts[part].block);
        ExceptionStoreHeader { valid: false, chunk: snapshot.chunk }.encode(&mut block);
        let flags = BioFlags::PREFLUSH | BioFlags::FUA | BioFlags::META;
        self.write(part, 0, block, flags, CopyEngineRequestKind::Header { part });
    }

    /// Writes the records of copied chunks, if no other lane does.
    pub(super) fn commit(&mut self, index: usize) {
        let part = &mut self.parts[index];
        let Some(commits) = &part.snapshot.commits else { return };
        if part.writing.is_some() || !(part.may_write_records || part.records_due) {
            return;
        }
        // The lane with the right also handles the runs that other lanes add.
        part.records_due = false;
        if !(part.may_write_records || commits.begin()) {
            return;
        }
        part.may_write_records = true;
        while part.may_write_records {
            if part.snapshot.health() != SnapshotHealth::Valid {
                part.unflushed = false;
                commits.discard();
                part.may_write_records = commits.end();
                continue;
            }
            let next = commits.collect();
            if next.is_some() || part.unflushed {
                return self.begin_commit(index, next);
            }
            part.may_write_records = commits.end();
        }
    }

    fn begin_commit(&mut self, part: usize, commit: Option<ExceptionRecordWrite>) {
        let mut clearing = 0;
        if let Some((sector, len)) = commit.as_ref().and_then(|commit| commit.clear) {
            let piece = PIECE_MAX.bytes() as usize;
            for at in (0..len).step_by(piece) {
                let mut zeroes = self.bufs.get(piece.min(len - at));
                zeroes.fill(0);
                let sector = sector + at as u64 / SECTOR_SIZE;
                self.write(part, sector, zeroes, BioFlags::META, CopyEngineRequestKind::Clear { part });
                clearing += 1;
            }
        }
        self.parts[part].writing = Some(InFlightExceptionRecordWrite { commit, clearing, is_synced: false });
        if clearing == 0 {
            self.flush(part);
        }
    }

    pub(super) fn clear_done(&mut self, index: usize, status: Status) {
        if !status.is_ok() {
            self.fail(index, status);
        }
        let Some(writing) = &mut self.parts[index].writing else { return };
        writing.clearing -= 1;
        if writing.clearing == 0 {
            self.flush(index);
        }
    }

    /// Makes copied data and previous records durable.
    fn flush(&mut self, index: usize) {
        if !self.parts[index].is_cached {
            return self.flush_done(index, Status::Ok);
        }
        let bio = self.pool.get().expect("the pool has no bound");
        self.send(
            1 + index,
            bio,
            (Op::Flush, BioFlags::empty(), 0),
            CopyEngineRequestKind::Flush { part: index },
        );
    }

    pub(super) fn flush_done(&mut self, index: usize, status: Status) {
        if !status.is_ok() {
            self.fail(index, status);
        } else if std::mem::take(&mut self.parts[index].unflushed) {
            self.publish(index);
        }
        self.write_records(index);
    }

    fn write_records(&mut self, index: usize) {
        let part = &mut self.parts[index];
        let (Some(writing), Some(commits)) = (&mut part.writing, &part.snapshot.commits) else { return };
        let Some(commit) = writing.commit.filter(|_| part.snapshot.is_valid()) else {
            // This lane still has the right: `commit` discards the waiting runs.
            part.writing = None;
            return;
        };
        let mut bytes = self.bufs.get(commit.len);
        commits.fill(&commit, &mut bytes);
        // If more records follow, their flush makes these durable too.
        writing.is_synced = !commits.has_more();
        let sync = if writing.is_synced { BioFlags::FUA } else { BioFlags::empty() };
        self.write(
            index,
            commit.sector,
            bytes,
            BioFlags::META | sync,
            CopyEngineRequestKind::Records { part: index },
        );
    }

    pub(super) fn records_done(&mut self, index: usize, bio: &Bio) {
        self.progress = true;
        let part = &mut self.parts[index];
        let Some(InFlightExceptionRecordWrite { commit: Some(commit), is_synced, .. }) = part.writing.take()
        else {
            return;
        };
        if !bio.status.is_ok() {
            return self.fail(index, bio.status);
        }
        let Some(commits) = &part.snapshot.commits else { return };
        commits.written(&commit);
        part.unflushed = part.is_cached && !is_synced;
        if !part.unflushed {
            self.publish(index);
        }
    }

    /// Publishes the runs of the written records, which are durable.
    fn publish(&mut self, index: usize) {
        self.progress = true;
        let CopyEngineSnapshotState { snapshot, notify_due, .. } = &mut self.parts[index];
        let Some(commits) = &snapshot.commits else { return };
        commits.durable(|copied| snapshot.publish(copied));
        *notify_due = true;
    }

    /// Reads the last block of a store that other programs may shorten. If a later write extends
    /// the store again, the lost data reads as zeroes.
    #[cold]
    pub(super) fn read_last(&mut self, index: usize, now: Nanos) {
        let part = &mut self.parts[index];
        part.last_block_check_at = now + LAST_BLOCK_INTERVAL;
        let (size, block) = (part.snapshot.store.device.limits().size, part.block);
        let sectors = Sectors(block as u64 / SECTOR_SIZE);
        if size < sectors || !part.snapshot.is_valid() {
            return;
        }
        let mut bio = self.pool.get().expect("the pool has no bound");
        (bio.sectors, bio.data) = (sectors, self.bufs.get(block).into());
        let request = CopyEngineRequestKind::LastBlock { part: index, size };
        self.send(1 + index, bio, (Op::Read, BioFlags::empty(), size.0 - sectors.0), request);
    }

    /// Called when the last block of a store of size `size` was read or the read failed.
    pub(super) fn last_block_done(&mut self, index: usize, size: Sectors, status: Status) {
        // If the size is unchanged, the disk failed, and its data may become readable again.
        if !status.is_ok() && self.parts[index].snapshot.store.device.limits().size < size {
            self.lose(index, "The store was made shorter");
        }
    }

    pub(super) fn mark_done(&mut self, index: usize, status: Status) {
        self.progress = true;
        let snapshot = &self.parts[index].snapshot;
        match status.is_ok() {
            true => snapshot.invalidated(),
            false => snapshot.mark_elsewhere(&status.to_string()),
        }
    }
}
