//! What a lane writes to a store besides copies: records, and the mark of one that is invalid.

use super::super::commits::Commit;
use super::super::jobs::PIECE_MAX;
use super::super::state::Health;
use super::{Engine, Errand};
use std::sync::Arc;
use udm_core::{Bio, BioFlags, SECTOR_SIZE, Status};
use udm_dm::bugs::{self, Bug};
use udm_wire::cow::Header;

/// Records on their way.
pub(super) struct Writing {
    commit: Commit,
    /// Parts of the next area that are yet to be zero.
    clearing: usize,
}

impl Engine {
    /// A copy for `part` was lost.
    pub(in crate::snapshot) fn lose(&mut self, part: usize, why: &str) {
        self.progress = true;
        let snapshot = Arc::clone(&self.parts[part].snapshot);
        if !snapshot.invalidate(why) {
            return;
        }
        if snapshot.commits.is_none() || bugs::on(Bug::InvalidUnmarked) {
            return snapshot.invalidated();
        }
        let mut block = self.bufs.get(self.parts[part].block);
        Header { valid: false, chunk: snapshot.chunk }.encode(&mut block);
        let flags = BioFlags::PREFLUSH | BioFlags::FUA | BioFlags::META;
        self.write(part, 0, block, flags, Errand::Header { part });
    }

    /// Writes the records of what was copied, if nobody else does.
    pub(super) fn commit(&mut self, index: usize) {
        let part = &mut self.parts[index];
        let Some(commits) = &part.snapshot.commits else { return };
        if part.writing.is_some() || !(part.right || part.left) {
            return;
        }
        // Who has the right looks behind all that others leave.
        part.left = false;
        if !(part.right || commits.begin()) {
            return;
        }
        part.right = true;
        while part.right {
            let next = match part.snapshot.health() {
                Health::Valid => commits.collect(),
                _ => {
                    commits.discard();
                    None
                }
            };
            match next {
                Some(commit) => return self.begin_commit(index, commit),
                None => part.right = commits.end(),
            }
        }
    }

    fn begin_commit(&mut self, part: usize, commit: Commit) {
        let mut clearing = 0;
        if let Some((sector, len)) = commit.clear {
            let piece = PIECE_MAX.bytes() as usize;
            for at in (0..len).step_by(piece) {
                let mut zeroes = self.bufs.get(piece.min(len - at));
                zeroes.fill(0);
                let sector = sector + at as u64 / SECTOR_SIZE;
                self.write(part, sector, zeroes, BioFlags::META, Errand::Clear { part });
                clearing += 1;
            }
        }
        self.parts[part].writing = Some(Writing { commit, clearing });
        if clearing == 0 {
            self.write_records(part);
        }
    }

    fn write_records(&mut self, index: usize) {
        let part = &self.parts[index];
        let (Some(writing), Some(commits)) = (&part.writing, &part.snapshot.commits) else { return };
        let mut bytes = self.bufs.get(writing.commit.len);
        commits.fill(&writing.commit, &mut bytes);
        let sector = writing.commit.sector;
        let flush = if bugs::on(Bug::RecordsUnflushed) { BioFlags::empty() } else { BioFlags::PREFLUSH };
        let flags = flush | BioFlags::FUA | BioFlags::META;
        self.write(index, sector, bytes, flags, Errand::Records { part: index });
    }

    pub(super) fn was_cleared(&mut self, index: usize, status: Status) {
        if !status.is_ok() {
            self.lose(index, "Error reading/writing");
        }
        let Some(writing) = &mut self.parts[index].writing else { return };
        writing.clearing -= 1;
        if writing.clearing > 0 {
            return;
        }
        match self.parts[index].snapshot.is_valid() {
            true => self.write_records(index),
            // The right is still ours: what waits for records is let go of.
            false => self.parts[index].writing = None,
        }
    }

    pub(super) fn were_committed(&mut self, index: usize, bio: &Bio) {
        self.progress = true;
        let part = &mut self.parts[index];
        let Some(Writing { commit, .. }) = part.writing.take() else { return };
        if !bio.status.is_ok() {
            return self.lose(index, "Error reading/writing");
        }
        let (Some(commits), Some(bytes)) = (&part.snapshot.commits, bio.data.iter().next()) else { return };
        commits.done(&commit, bytes, |copied| part.snapshot.publish(copied));
    }

    pub(super) fn was_marked(&mut self, index: usize, status: Status) {
        self.progress = true;
        let snapshot = &self.parts[index].snapshot;
        match status.is_ok() {
            true => snapshot.invalidated(),
            false => snapshot.mark_elsewhere(&status.to_string()),
        }
    }
}
