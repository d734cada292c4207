//! Bios that are redirected to another sector, with the data to restore them.

use slab::Slab;
use udm_core::{Bio, BioOwnerId, Sector};

/// Redirected bios in flight. A bio's owner and cookie are replaced until it completes; `T` is the
/// lane's note about the bio.
pub(crate) struct RedirectedBios<T> {
    owner: BioOwnerId,
    notes: Slab<SavedBioFields<T>>,
}

struct SavedBioFields<T> {
    owner: BioOwnerId,
    cookie: u64,
    sector: Sector,
    what: T,
}

impl<T> RedirectedBios<T> {
    /// An empty list. Redirected bios get this owner.
    pub(crate) fn new(owner: BioOwnerId) -> RedirectedBios<T> {
        RedirectedBios { owner, notes: Slab::new() }
    }

    /// True if no redirected bio is in flight.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.notes.is_empty()
    }

    /// Redirects `bio` to `sector`.
    #[inline]
    pub(crate) fn put(&mut self, bio: &mut Bio, sector: Sector, what: T) {
        let note = SavedBioFields { owner: bio.owner, cookie: bio.cookie, sector: bio.sector, what };
        bio.owner = self.owner;
        bio.cookie = self.notes.insert(note) as u64;
        bio.sector = sector;
    }

    /// The note of a redirected bio; `None` for any other bio.
    #[inline]
    pub(crate) fn get(&self, bio: &Bio) -> Option<&T> {
        if bio.owner != self.owner { None } else { Some(&self.notes[bio.cookie as usize].what) }
    }

    /// Restores a redirected bio and returns its note; `None` for any other bio.
    #[inline]
    pub(crate) fn take(&mut self, bio: &mut Bio) -> Option<T> {
        if bio.owner != self.owner {
            return None;
        }
        let note = self.notes.remove(bio.cookie as usize);
        (bio.owner, bio.cookie, bio.sector) = (note.owner, note.cookie, note.sector);
        Some(note.what)
    }
}
