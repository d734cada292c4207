//! Recycled bios.

use crate::{Batch, Bio};

/// A bounded store of bios for a front end or a lane that makes its own. Full is not failed: who
/// gets no bio stops reading, or parks what it has, until one comes back.
#[derive(Debug)]
pub struct BioPool {
    free: Batch,
    made: usize,
    max: usize,
}

impl BioPool {
    /// A pool of at most `max` bios, made on first use.
    #[must_use]
    pub fn new(max: usize) -> BioPool {
        BioPool { free: Batch::new(), made: 0, max }
    }

    /// A bio, its fields as its last user left them; `None` when all are out.
    pub fn get(&mut self) -> Option<Box<Bio>> {
        if let Some(bio) = self.free.pop() {
            return Some(bio);
        }
        if self.made == self.max {
            return None;
        }
        self.made += 1;
        Some(Bio::new())
    }

    /// Takes a bio back. It must be home ([`Bio::finish`]).
    pub fn put(&mut self, bio: Box<Bio>) {
        debug_assert!(!bio.is_in_flight(), "a bio in flight put back in its pool");
        self.free.push(bio);
    }

    /// How many are out.
    #[must_use]
    pub fn out(&self) -> usize {
        self.made - self.free.len()
    }

    /// How many more can be had.
    #[must_use]
    pub fn available(&self) -> usize {
        self.max - self.out()
    }
}
