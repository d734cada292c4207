//! Clones of requests: a lane sends a clone down in place of a request for which it must keep a
//! note.

use slab::Slab;
use udm_core::{Bio, BioOwnerId, BioPool, Cx};

/// The requests that have a clone in flight, each with a note of type `T`. A clone carries the data
/// of its request (moved, not copied); its cookie is the index of the request.
pub(super) struct InFlightBioClones<T> {
    owner: BioOwnerId,
    originals: Slab<(Box<Bio>, T)>,
    pool: BioPool,
}

impl<T> InFlightBioClones<T> {
    pub(super) fn new(cx: &mut Cx<'_>) -> InFlightBioClones<T> {
        // There are as many clones as requests in flight above, and their owners limit those.
        InFlightBioClones { owner: cx.new_owner(), originals: Slab::new(), pool: BioPool::new(usize::MAX) }
    }

    /// Keeps `bio` with `note` and returns a started clone to send in its place.
    pub(super) fn begin(&mut self, mut bio: Box<Bio>, note: T) -> Box<Bio> {
        let mut clone = self.pool.get().expect("the pool has no bound");
        clone.op = bio.op;
        clone.flags = bio.flags;
        clone.owner = self.owner;
        clone.sector = bio.sector;
        clone.sectors = bio.sectors;
        clone.started = bio.started;
        clone.data = std::mem::take(&mut bio.data);
        clone.cookie = self.originals.insert((bio, note)) as u64;
        clone.start();
        clone
    }

    /// True for clones of this lane.
    pub(super) fn is_mine(&self, bio: &Bio) -> bool {
        bio.owner == self.owner
    }

    /// Ends a clone. Returns its request, with its data and the clone's status, and the note.
    pub(super) fn end(&mut self, mut clone: Box<Bio>) -> (Box<Bio>, T) {
        clone.finish();
        let (mut bio, note) = self.originals.remove(clone.cookie as usize);
        bio.data = std::mem::take(&mut clone.data);
        bio.end_with(clone.status);
        self.pool.put(clone);
        (bio, note)
    }

    /// True if no clone is in flight.
    pub(super) fn is_empty(&self) -> bool {
        self.originals.is_empty()
    }
}
