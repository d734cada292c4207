//! Requests that pass through to another place, with what is needed to undo that.

use slab::Slab;
use udm_core::{Bio, OwnerId, Sector};

/// The requests that are below with a tag. A tag takes the place of the owner and cookie of a
/// request until it comes back; `T` is what its lane has to know of it then.
pub(super) struct RedirectedBios<T> {
    owner: OwnerId,
    notes: Slab<SavedBio<T>>,
}

struct SavedBio<T> {
    owner: OwnerId,
    cookie: u64,
    sector: Sector,
    what: T,
}

impl<T> RedirectedBios<T> {
    /// Tags with this owner.
    pub(super) fn new(owner: OwnerId) -> RedirectedBios<T> {
        RedirectedBios { owner, notes: Slab::new() }
    }

    /// Marks `bio`, and sends it to `sector`.
    #[inline]
    pub(super) fn put(&mut self, bio: &mut Bio, sector: Sector, what: T) {
        let note = SavedBio { owner: bio.owner, cookie: bio.cookie, sector: bio.sector, what };
        bio.owner = self.owner;
        bio.cookie = self.notes.insert(note) as u64;
        bio.sector = sector;
    }

    /// What was noted, or `None` for a request without a mark.
    #[inline]
    pub(super) fn get(&self, bio: &Bio) -> Option<&T> {
        if bio.owner != self.owner { None } else { Some(&self.notes[bio.cookie as usize].what) }
    }

    /// Takes the mark off again: what was noted, or `None` for a request without one.
    #[inline]
    pub(super) fn take(&mut self, bio: &mut Bio) -> Option<T> {
        if bio.owner != self.owner {
            return None;
        }
        let note = self.notes.remove(bio.cookie as usize);
        (bio.owner, bio.cookie, bio.sector) = (note.owner, note.cookie, note.sector);
        Some(note.what)
    }
}
