//! Paths that take turns.

use super::BioDispatch;
use udm_core::Bio;

/// Paths in an order that has no end: behind the last comes the first.
#[derive(Debug, Default)]
pub(super) struct Rotation {
    paths: Vec<u32>,
    /// Which of them is next.
    place: usize,
}

impl Rotation {
    /// `paths`, from `place` of them on.
    pub(super) fn new(paths: impl Iterator<Item = u32>, place: usize) -> Rotation {
        Rotation { paths: paths.collect(), place }
    }

    /// The same in the room of another ring.
    pub(super) fn begin(&mut self, paths: impl Iterator<Item = u32>) {
        self.paths.clear();
        self.paths.extend(paths);
        self.place = 0;
    }

    /// Turns the ring so that its first path is the next, to be changed.
    pub(super) fn rotate_to_front(&mut self) -> &mut Vec<u32> {
        self.paths.rotate_left(self.place);
        self.place = 0;
        &mut self.paths
    }

    /// The path that is next, which there is.
    #[inline(always)]
    pub(super) fn first(&self) -> usize {
        self.paths[self.place] as usize
    }

    /// The place of the next.
    #[inline(always)]
    pub(super) fn place(&self) -> usize {
        self.place
    }

    /// The paths from `place` on, round and round.
    pub(super) fn from(&self, place: usize) -> impl Iterator<Item = usize> + '_ {
        self.paths.iter().cycle().skip(place).map(|path| *path as usize)
    }

    /// The one at `place` is next.
    #[inline(always)]
    pub(super) fn set_next(&mut self, place: usize) {
        self.place = place;
    }

    /// Takes the next.
    #[inline(always)]
    pub(super) fn next(&mut self) -> usize {
        let path = self.first();
        self.place = next_position(self.place, self.paths.len());
        path
    }

    /// Takes each of `bio_faults` to the next path, as long as it `may` go there: the first that may not.
    #[inline(always)]
    pub(super) fn deal(
        &mut self,
        bios: &mut impl BioDispatch,
        mut may: impl FnMut(&mut Bio) -> bool,
    ) -> Option<Box<Bio>> {
        let (paths, mut place) = (&self.paths[..], self.place);
        let rest = bios.each(|bio| {
            if !may(bio) {
                return None;
            }
            let path = paths[place];
            place = next_position(place, paths.len());
            Some(path as usize)
        });
        self.place = place;
        rest
    }
}

/// The place behind `place` in a ring of `len`.
#[inline(always)]
pub(super) fn next_position(place: usize, len: usize) -> usize {
    if place + 1 == len { 0 } else { place + 1 }
}
