//! Commits of the bitmap to the metadata, one at a time over all cores.
//!
//! A commit works in rounds of a few changed blocks. Bits are set after their data was written to
//! the destination, and the blocks are taken before the destination is flushed. So each bit that is
//! written has durable data. Blocks go first to the copy that does not have their last durable
//! state.

use super::{DESTINATION, EngineRequestKind, HydrationEngine, METADATA};
use crate::clone::state::MetadataMode;
use udm_core::{BioFlags, Op, Status};
use udm_wire::clone_metadata::{BLOCK_LEN, BitmapBlock, MetadataCopy};

/// Maximum number of blocks of a round.
const BLOCKS_PER_ROUND: usize = 64;

/// A request of a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CommitRequestKind {
    /// Makes the data of the regions durable.
    FlushDestination,
    /// Writes a block to the copy that may be torn.
    WriteFirst,
    /// Makes these blocks durable.
    FlushMetadata,
    /// Writes the block to the other copy.
    WriteSecond,
    /// Reads the header after a failure, to learn whether the device answers at all.
    Probe,
}

/// A block that is being written.
struct CommittedBlock {
    block: usize,
    bytes: Box<[u8; BLOCK_LEN]>,
    /// The copy that is written first.
    first: MetadataCopy,
}

/// A commit in progress.
pub(super) struct MetadataCommit {
    /// Number of changes that the metadata has after the last round.
    changes: u64,
    generation: u64,
    /// The next block to be examined.
    from: usize,
    blocks: Vec<CommittedBlock>,
    in_flight: usize,
    failure: Status,
}

impl HydrationEngine {
    /// True while this engine commits.
    pub(in crate::clone) fn is_committing(&self) -> bool {
        self.commit.is_some()
    }

    /// Begins a commit if the metadata lacks changes, and no other lane commits.
    pub(in crate::clone) fn begin_commit(&mut self) {
        if self.commit.is_some() || !self.state.needs_commit() {
            return;
        }
        let Some(changes) = self.state.begin_commit() else { return };
        self.commit = Some(MetadataCommit {
            changes,
            generation: self.state.next_generation(),
            from: 0,
            blocks: Vec::new(),
            in_flight: 0,
            failure: Status::Ok,
        });
        self.begin_round();
    }

    /// Takes the next changed blocks. If there are none, the commit is over.
    fn begin_round(&mut self) {
        let Some(commit) = &mut self.commit else { return };
        commit.blocks.clear();
        let map = &self.state.map;
        while commit.blocks.len() < BLOCKS_PER_ROUND {
            let Some(block) = map.take_dirty(commit.from) else {
                commit.from = usize::MAX;
                break;
            };
            commit.from = block + 1;
            let mut bytes = Box::new([0; BLOCK_LEN]);
            BitmapBlock::encode(commit.generation, block as u64, map.words_of(block), &mut bytes[..]);
            let first = self.state.durable_copy(block).other();
            commit.blocks.push(CommittedBlock { block, bytes, first });
        }
        if commit.blocks.is_empty() {
            let changes = commit.changes;
            self.state.set_committed(changes);
            return self.end_commit();
        }
        self.send_commit_step(DESTINATION, Op::Flush, CommitRequestKind::FlushDestination);
    }

    fn send_commit_step(&mut self, device: usize, op: Op, kind: CommitRequestKind) {
        let data = (op == Op::Read).then(|| self.bufs.get(BLOCK_LEN));
        if let Some(commit) = &mut self.commit {
            commit.in_flight += 1;
        }
        self.send(device, (op, BioFlags::empty(), 0), data, EngineRequestKind::Commit(kind));
    }

    /// Writes the blocks of the round to one of their copies.
    fn write_blocks(&mut self, kind: CommitRequestKind) {
        let Some(mut commit) = self.commit.take() else { return };
        let layout = self.state.map.layout();
        for CommittedBlock { block, bytes, first } in &commit.blocks {
            let copy = if kind == CommitRequestKind::WriteFirst { *first } else { first.other() };
            let mut data = self.bufs.get(BLOCK_LEN);
            data.copy_from_slice(&bytes[..]);
            let sector = layout.bitmap(copy, *block as u64).0;
            let request = EngineRequestKind::Commit(kind);
            self.send(METADATA, (Op::Write, BioFlags::META, sector), Some(data), request);
            commit.in_flight += 1;
        }
        self.commit = Some(commit);
    }

    pub(super) fn commit_step_done(&mut self, kind: CommitRequestKind, status: Status) {
        let Some(commit) = &mut self.commit else { return };
        commit.in_flight -= 1;
        if commit.failure.is_ok() {
            commit.failure = status;
        }
        if commit.in_flight > 0 {
            return;
        }
        if kind == CommitRequestKind::Probe {
            // One change of the mode, as in the kernel.
            let mode = if status.is_ok() { MetadataMode::ReadOnly } else { MetadataMode::Fail };
            self.state.set_mode(mode);
            return self.end_commit();
        }
        if !commit.failure.is_ok() {
            return self.fail_commit(kind);
        }
        match kind {
            CommitRequestKind::FlushDestination => self.write_blocks(CommitRequestKind::WriteFirst),
            CommitRequestKind::WriteFirst => {
                self.send_commit_step(METADATA, Op::Flush, CommitRequestKind::FlushMetadata);
            }
            CommitRequestKind::FlushMetadata => {
                for CommittedBlock { block, first, .. } in &commit.blocks {
                    self.state.set_durable_copy(*block, *first);
                }
                if commit.from == usize::MAX {
                    self.state.set_committed(commit.changes);
                }
                self.write_blocks(CommitRequestKind::WriteSecond);
            }
            CommitRequestKind::WriteSecond if commit.from == usize::MAX => self.end_commit(),
            CommitRequestKind::WriteSecond => self.begin_round(),
            CommitRequestKind::Probe => {}
        }
    }

    /// A request of the commit failed: the metadata becomes read-only, or fails if it cannot be
    /// read either. Until that is known, flushes wait.
    fn fail_commit(&mut self, kind: CommitRequestKind) {
        let operation = match kind {
            CommitRequestKind::FlushDestination => "flush data device",
            _ => "dm_clone_metadata_commit",
        };
        let Some(commit) = &mut self.commit else { return };
        let error = commit.failure;
        commit.failure = Status::Ok;
        for CommittedBlock { block, .. } in commit.blocks.drain(..) {
            self.state.map.mark_dirty(block);
        }
        let errno = error.errno();
        tracing::error!("{}: Metadata operation `{operation}' failed: error = -{errno}", self.state.name());
        self.send_commit_step(METADATA, Op::Read, CommitRequestKind::Probe);
    }

    fn end_commit(&mut self) {
        self.commit = None;
        self.state.end_commit();
    }

    /// Gives the commit up: its blocks stay changed.
    pub(super) fn abandon_commit(&mut self) {
        if let Some(commit) = self.commit.take() {
            commit.blocks.iter().for_each(|block| self.state.map.mark_dirty(block.block));
            self.state.end_commit();
        }
    }
}
