//! Lists of extents of a device, as [`crate::Device::extents`] and [`crate::Device::changed`]
//! return them.

use crate::Sectors;

/// Allocation state of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// Data, or unknown.
    Data,
    /// Never written, or discarded: takes no space and reads as zeroes.
    Hole,
}

/// State of a range since a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeChangeStatus {
    /// The range may have changed, or this is unknown.
    Changed,
    /// The range has not changed.
    Same,
}

/// A run of sectors with the same content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent<T = ExtentKind> {
    /// Length, above 0.
    pub len: Sectors,
    /// Kind of content.
    pub content: T,
}

/// A list of extents, collected in order from the start of the queried range. Adjacent extents of
/// the same content are merged.
///
/// The list is *full* if it has the requested number of extents, or if collecting took too many
/// steps. The rest of the range is then unknown.
#[derive(Debug)]
pub struct Extents<T = ExtentKind> {
    list: Vec<Extent<T>>,
    max: usize,
    steps: usize,
    full: bool,
}

/// Limit of pushes per list: a device made of small pieces must not be queried about all of them.
const STEPS_MAX: usize = 16 << 10;

impl<T: Copy + PartialEq> Extents<T> {
    /// Creates an empty list of at most `max` (at least 1) extents.
    #[must_use]
    pub fn new(max: usize) -> Extents<T> {
        Extents { list: Vec::new(), max: max.max(1), steps: STEPS_MAX, full: false }
    }

    /// Creates an empty list with the same limit.
    #[must_use]
    pub fn like(&self) -> Extents<T> {
        Extents::new(self.max)
    }

    /// Appends `len` sectors. A full list ignores them.
    pub fn push(&mut self, len: Sectors, content: T) {
        if len == Sectors::ZERO || self.full {
            return;
        }
        if self.steps == 0 {
            self.full = true;
            return;
        }
        self.steps -= 1;
        let room = self.list.len() < self.max;
        match self.list.last_mut().filter(|last| last.content == content) {
            Some(last) => last.len += len,
            None if room => self.list.push(Extent { len, content }),
            None => self.full = true,
        }
    }

    /// True if the list accepts no more sectors.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.full
    }

    /// The collected extents. They may cover less than the queried range; they are never empty if
    /// anything was pushed.
    #[must_use]
    pub fn list(&self) -> &[Extent<T>] {
        &self.list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_become_one_and_the_bounds_hold() {
        let mut e = Extents::new(2);
        for (len, content) in [
            (3, ExtentKind::Data),
            (0, ExtentKind::Hole),
            (4, ExtentKind::Data),
            (5, ExtentKind::Hole),
            (6, ExtentKind::Hole),
        ] {
            e.push(Sectors(len), content);
        }
        assert!(!e.is_full());
        e.push(Sectors(1), ExtentKind::Data);
        e.push(Sectors(1), ExtentKind::Hole);
        assert!(e.is_full(), "no extent is added after an ignored one");
        let seen: Vec<_> = e.list().iter().map(|e| (e.len.0, e.content)).collect();
        assert_eq!(seen, [(7, ExtentKind::Data), (11, ExtentKind::Hole)]);
        let mut e = Extents::new(1);
        (0..=STEPS_MAX).for_each(|_| e.push(Sectors(1), ExtentKind::Data));
        assert!(e.is_full());
        assert_eq!(e.list()[0].len.0, STEPS_MAX as u64);
    }
}
