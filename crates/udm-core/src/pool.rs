//! A bounded pool of bios.

use crate::{Batch, Bio};

/// A bounded pool of bios for a front end or a lane that makes bios. Full is not failed: a user
/// that gets no bio stops reading or queues its requests until a bio returns.
#[derive(Debug)]
pub struct BioPool {
    free: Batch,
    made: usize,
    max: usize,
}

impl BioPool {
    /// Creates a pool of at most `max` bios, allocated on first use.
    #[must_use]
    pub fn new(max: usize) -> BioPool {
        BioPool { free: Batch::new(), made: 0, max }
    }

    /// Takes a bio; its fields are as its last user left them. `None` if all are in use.
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

    /// Returns a bio, which must have completed ([`Bio::finish`]).
    pub fn put(&mut self, bio: Box<Bio>) {
        debug_assert!(!bio.is_in_flight(), "a bio in flight put back in its pool");
        self.free.push(bio);
    }

    /// Number of bios in use.
    #[must_use]
    pub fn out(&self) -> usize {
        self.made - self.free.len()
    }

    /// Number of bios that [`BioPool::get`] can still return.
    #[must_use]
    pub fn available(&self) -> usize {
        self.max - self.out()
    }
}
