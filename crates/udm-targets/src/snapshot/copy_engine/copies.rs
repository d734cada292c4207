//! The pieces of a copy: read from the origin, written to each store.

use super::super::copy_jobs::{ChunkCopyDestination, ChunkCopyJob};
use super::super::record_commits::ExceptionRun;
use super::{ChunkCopyEngine, CopyEngineRequestKind};
use smallvec::SmallVec;
use udm_core::{Bio, BioFlags, Op, Sectors};

impl ChunkCopyEngine {
    pub(super) fn read_done(&mut self, job: usize, mut bio: Box<Bio>) {
        let from = bio.sector.0;
        if !bio.status.is_ok() {
            for dest in self.jobs.get(job).dests.clone() {
                match bio.status.is_ok() {
                    true => {
                        self.parts[dest.part].snapshot.publish(&dest.copied);
                        self.parts[dest.part].notify_due = true;
                    }
                    false => self.fail(dest.part, bio.status),
                }
            }
        }
        self.fill_block(&mut bio);
        for buf in bio.data.iter_mut() {
            // The data has one segment: the pool returned it as a whole.
            self.jobs.get(job).apply_overlay(from, buf);
        }
        let parts = &self.parts;
        let to = self.jobs.get(job).dests.iter().enumerate();
        let mut to: SmallVec<[usize; 4]> =
            to.filter(|(_, dest)| parts[dest.part].snapshot.is_valid()).map(|(dest, _)| dest).collect();
        let Some(last) = to.pop() else { return self.end_piece(job, bio) };
        for dest in to {
            let mut copy = self.bufs.get(bio.data.len());
            bio.data.copy_to(&mut copy);
            let more = self.jobs.get(job);
            more.in_flight += 1;
            self.jobs.bytes += copy.len();
            let mut other = self.pool.get().expect("the pool has no bound");
            other.sectors = bio.sectors;
            other.data = copy.into();
            self.write_piece(job, dest, from, other);
        }
        self.write_piece(job, last, from, bio);
    }

    /// Pads the last piece with zeroes if the origin ends within a block of a store. Stores take
    /// whole blocks, and their chunks have room for them.
    fn fill_block(&mut self, bio: &mut Bio) {
        let block = self.parts.iter().map(|part| part.block).max().unwrap_or(1);
        let len = bio.data.len();
        if len.is_multiple_of(block) {
            return;
        }
        let mut whole = self.bufs.get(len.next_multiple_of(block));
        bio.data.copy_to(&mut whole[..len]);
        whole[len..].fill(0);
        self.jobs.bytes += whole.len() - len;
        bio.sectors = Sectors::from_bytes(whole.len() as u64);
        for buf in std::mem::replace(&mut bio.data, whole.into()) {
            self.bufs.put(buf);
        }
    }

    /// Sends the piece that begins at sector `from` of the origin to `dests[dest]` of `job`.
    fn write_piece(&mut self, job: usize, dest: usize, from: u64, bio: Box<Bio>) {
        let ChunkCopyJob { dests, start, .. } = self.jobs.get(job);
        let (ChunkCopyDestination { part, copied }, start) = (dests[dest], *start);
        let sector = self.parts[part].snapshot.start_of(copied.new) + (from - start);
        let request = CopyEngineRequestKind::Write { job, dest };
        self.send(1 + part, bio, (Op::Write, BioFlags::empty(), sector), request);
    }

    pub(super) fn write_done(&mut self, job: usize, dest: usize, bio: &Bio) {
        if !bio.status.is_ok() {
            let part = self.jobs.get(job).dests[dest].part;
            self.fail(part, bio.status);
        }
        self.piece_done(job, bio.data.len());
    }

    fn end_piece(&mut self, job: usize, bio: Box<Bio>) {
        self.piece_done(job, bio.data.len());
        self.put(bio);
    }

    fn piece_done(&mut self, job: usize, bytes: usize) {
        let Some(job) = self.jobs.end_piece(job, bytes) else { return };
        for ChunkCopyDestination { part, copied } in job.dests {
            let is_valid = self.parts[part].snapshot.is_valid();
            self.copied(part, ExceptionRun { is_valid, ..copied });
        }
        self.overlaid.extend(job.overlay);
    }
}
