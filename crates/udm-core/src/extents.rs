//! What is known of the parts of a device: the answers of [`crate::Device::extents`] and
//! [`crate::Device::changed`].

use crate::Sectors;

/// What is known of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// Data, as far as anybody knows.
    Data,
    /// Nothing was ever written, or it was given back: takes no space and reads as zeroes.
    Hole,
}

/// What is known of a range since an instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeStatus {
    /// It may have changed, as far as anybody knows.
    Changed,
    /// It is as it was.
    Same,
}

/// A run of sectors of one content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent<T = ExtentKind> {
    /// Its length, above 0.
    pub len: Sectors,
    /// What it is.
    pub content: T,
}

/// Collects runs of sectors in order, from the start of the range that was asked for. Neighbours of
/// one content become one.
///
/// It is *full* when it has as many runs as were wanted, or when finding them took too many steps:
/// then what follows is not known.
#[derive(Debug)]
pub struct Extents<T = ExtentKind> {
    list: Vec<Extent<T>>,
    max: usize,
    steps: usize,
    full: bool,
}

/// Pieces put together into one answer at the most: a device of small pieces must not be asked
/// about all of them.
const STEPS_MAX: usize = 16 << 10;

impl<T: Copy + PartialEq> Extents<T> {
    /// An empty list of `max` (at least 1) runs at the most.
    #[must_use]
    pub fn new(max: usize) -> Extents<T> {
        Extents { list: Vec::new(), max: max.max(1), steps: STEPS_MAX, full: false }
    }

    /// An empty list for so many runs.
    #[must_use]
    pub fn like(&self) -> Extents<T> {
        Extents::new(self.max)
    }

    /// Appends `len` sectors. What does not fit any more is left out.
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

    /// True when nothing more is taken.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.full
    }

    /// What was collected; it may be less than what was asked about, and is never empty when
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
        assert!(e.is_full(), "nothing follows what was left out");
        let seen: Vec<_> = e.list().iter().map(|e| (e.len.0, e.content)).collect();
        assert_eq!(seen, [(7, ExtentKind::Data), (11, ExtentKind::Hole)]);
        let mut e = Extents::new(1);
        (0..=STEPS_MAX).for_each(|_| e.push(Sectors(1), ExtentKind::Data));
        assert!(e.is_full());
        assert_eq!(e.list()[0].len.0, STEPS_MAX as u64);
    }
}
