//! Paths that take turns.

use super::BatchPathDispatch;
use udm_core::Bio;

/// Paths in a cyclic order: the first follows the last.
#[derive(Debug, Default)]
pub(super) struct PathRotation {
    paths: Vec<u32>,
    /// The position of the next path.
    place: usize,
}

impl PathRotation {
    /// A rotation of `paths` that starts at position `place`.
    pub(super) fn new(paths: impl Iterator<Item = u32>, place: usize) -> PathRotation {
        PathRotation { paths: paths.collect(), place }
    }

    /// Starts again with other paths, in the same memory.
    pub(super) fn begin(&mut self, paths: impl Iterator<Item = u32>) {
        self.paths.clear();
        self.paths.extend(paths);
        self.place = 0;
    }

    /// Rotates the list so that the next path is first, and returns the list for changes.
    pub(super) fn rotate_to_front(&mut self) -> &mut Vec<u32> {
        self.paths.rotate_left(self.place);
        self.place = 0;
        &mut self.paths
    }

    /// The next path. The rotation must not be empty.
    #[inline(always)]
    pub(super) fn first(&self) -> usize {
        self.paths[self.place] as usize
    }

    /// The position of the next path.
    #[inline(always)]
    pub(super) fn place(&self) -> usize {
        self.place
    }

    /// The paths from position `place` on, repeated without end.
    pub(super) fn from(&self, place: usize) -> impl Iterator<Item = usize> + '_ {
        self.paths.iter().cycle().skip(place).map(|path| *path as usize)
    }

    /// Sets the position of the next path.
    #[inline(always)]
    pub(super) fn set_next(&mut self, place: usize) {
        self.place = place;
    }

    /// Returns the next path and advances.
    #[inline(always)]
    pub(super) fn next(&mut self) -> usize {
        let path = self.first();
        self.place = next_rotation_position(self.place, self.paths.len());
        path
    }

    /// Sends each of `bios` to the next path while `may` returns true. Returns the first bio for
    /// which it returns false.
    #[inline(always)]
    pub(super) fn deal(
        &mut self,
        bios: &mut impl BatchPathDispatch,
        mut may: impl FnMut(&mut Bio) -> bool,
    ) -> Option<Box<Bio>> {
        let (paths, mut place) = (&self.paths[..], self.place);
        let rest = bios.each(|bio| {
            if !may(bio) {
                return None;
            }
            let path = paths[place];
            place = next_rotation_position(place, paths.len());
            Some(path as usize)
        });
        self.place = place;
        rest
    }
}

/// The position after `place` in a rotation of `len` paths.
#[inline(always)]
pub(super) fn next_rotation_position(place: usize, len: usize) -> usize {
    if place + 1 == len { 0 } else { place + 1 }
}
