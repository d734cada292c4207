//! The discards of a snapshot's lane.
//!
//! With `discard_zeroes_cow`, a discard of a whole chunk in the store writes zeroes there. Other
//! discards change no store, because a discard promises nothing. With `discard_passdown_origin`,
//! the origin is discarded too, at the end.

use super::{SnapshotInFlightBioKind, SnapshotLane};
use crate::snapshot::exception_map::ChunkState;
use crate::snapshot::state::Snapshot;
use udm_core::{Batch, Bio, Buf, Op, Sector, Sectors, Segments, Status};

/// Turns the write of a piece back into the discard of its chunk.
pub(super) fn restore_discard(bio: &mut Bio, snapshot: &Snapshot) {
    let chunk = snapshot.chunk_of(bio.sector.0);
    (bio.op, bio.data) = (Op::Discard, Segments::new());
    bio.sector = Sector(snapshot.start_of(chunk));
    bio.sectors = Sectors(u64::from(snapshot.chunk.sectors()));
}

impl SnapshotLane {
    /// Sends a discard to the store, to the origin, or nowhere.
    pub(super) fn discard(&mut self, bio: Box<Bio>) {
        // A discard that is too long for the origin is not passed down.
        let fits = bio.sectors <= self.origin_discard_max;
        let discard_origin = self.features.discard_passdown_origin && fits;
        let chunk = self.snapshot.chunk_of(bio.sector.0);
        match self.snapshot.place(chunk) {
            ChunkState::Pending => self.waiting.push_back(bio),
            ChunkState::Copied(_) | ChunkState::Settled(_) if self.covers(&bio) => {
                self.clear_piece(bio, discard_origin);
            }
            _ if discard_origin => self.send_to_origin(bio, SnapshotInFlightBioKind::Discard),
            // A partial discard leaves the chunk as it is.
            _ => self.end(bio, Status::Ok),
        }
    }

    /// Writes zeroes to the piece of the chunk that begins at the sector of `bio`, a discard of the
    /// whole chunk. Zeroes are written as data, because a device may not support write-zeroes. A
    /// chunk may have 1 GiB, so its zeroes never take more memory than a piece of a copy.
    pub(super) fn clear_piece(&mut self, mut bio: Box<Bio>, discard_origin: bool) {
        let chunk = self.snapshot.chunk_of(bio.sector.0);
        let new = self.snapshot.place(chunk).store_chunk().filter(|_| self.is_usable());
        let Some(new) = new else {
            restore_discard(&mut bio, &self.snapshot);
            return self.end(bio, Status::IoErr);
        };
        let left = self.snapshot.start_of(chunk + 1) - bio.sector.0;
        (bio.op, bio.sectors) = (Op::Write, Sectors(left).min(self.engine.max_piece()));
        // The next pieces use the zeroes of the first one; only the last piece may be shorter.
        if bio.data.len() as u64 != bio.sectors.bytes() {
            bio.data = Buf::zeroed(bio.sectors.bytes() as usize).into();
        }
        self.send_to_store(bio, new, SnapshotInFlightBioKind::Clear { discard_origin });
    }

    /// Handles a written piece of a discard at `done[at]`. Returns true if the bio is still there,
    /// complete.
    pub(super) fn piece_cleared(&mut self, done: &mut Batch, at: usize, discard_origin: bool) -> bool {
        let bio = &mut done[at];
        let end = bio.end();
        let next = if !bio.status.is_ok() {
            None
        } else if end.0 < self.snapshot.start_of(self.snapshot.chunk_of(bio.sector.0) + 1) {
            bio.sector = end;
            Some(SnapshotInFlightBioKind::Clear { discard_origin })
        } else {
            discard_origin.then_some(SnapshotInFlightBioKind::Discard)
        };
        if !matches!(next, Some(SnapshotInFlightBioKind::Clear { .. })) {
            restore_discard(bio, &self.snapshot);
        }
        let Some(next) = next else { return true };
        self.to_resubmit.push((done.swap_remove(at), next));
        false
    }
}
