//! The data of a request: an ordered list of buffers, owned or foreign.

use crate::{Buf, SharedRange, SharedRangeOutOfBounds};
use smallvec::SmallVec;

/// The scatter list of a request. Nearly always one piece, stored inline.
///
/// A piece is owned ([`Buf`]), or foreign memory that another process may change at any time
/// ([`SharedRange`]). Lanes treat both alike: they copy ([`Segments::consume`],
/// [`Segments::produce`] and functions based on them) or pass addresses to the kernel
/// ([`Segments::ranges`]). Only the owner of the request takes the pieces apart, and only owned
/// pieces.
#[derive(Debug, Default)]
pub struct Segments {
    bufs: SmallVec<[Buf; 1]>,
}

/// Portion in bytes in which foreign memory is copied.
const PORTION: usize = 4096;

impl Segments {
    /// Empty data, as for flush, discard and write-zeroes.
    #[must_use]
    pub fn new() -> Segments {
        Segments { bufs: SmallVec::new() }
    }

    /// Total length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bufs.iter().map(Buf::len).sum()
    }

    /// True if there are no bytes.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bufs.is_empty() || self.bufs.iter().all(Buf::is_empty)
    }

    /// Appends `buf`, and joins it with the last piece if both are adjacent in one slab.
    pub fn push(&mut self, buf: Buf) {
        let buf = match self.bufs.last_mut() {
            Some(last) => match last.try_join(buf) {
                Ok(()) => return,
                Err(buf) => buf,
            },
            None => buf,
        };
        self.bufs.push(buf);
    }

    /// Appends a foreign range.
    pub fn push_shared(&mut self, range: SharedRange) {
        self.push(range.0);
    }

    /// Moves all foreign pieces to `spare`, in order, and drops owned ones. The list keeps its
    /// capacity.
    pub fn take_shared(&mut self, spare: &mut Vec<SharedRange>) {
        spare.extend(self.bufs.drain(..).filter(Buf::is_shared).map(SharedRange));
    }

    /// True if a piece is foreign: the pieces cannot be taken apart then.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.bufs.iter().any(Buf::is_shared)
    }

    /// Points data of one foreign piece to another range of the same memory. Touches no reference
    /// count and allocates nothing.
    ///
    /// # Errors
    /// The range exceeds the memory, the data is not one foreign piece, or another piece of it is
    /// alive. The data is unchanged then.
    pub fn retarget(&mut self, at: usize, len: usize) -> Result<(), SharedRangeOutOfBounds> {
        match &mut self.bufs[..] {
            [piece] => piece.retarget(at, len),
            _ => Err(SharedRangeOutOfBounds),
        }
    }

    /// Appends all of `other`.
    pub fn append(&mut self, other: Segments) {
        for buf in other.bufs {
            self.push(buf);
        }
    }

    /// Removes and returns the last piece.
    ///
    /// # Panics
    /// If the piece is foreign.
    pub fn pop(&mut self) -> Option<Buf> {
        assert_no_shared_segments(self.bufs.last());
        self.bufs.pop()
    }

    /// Splits off and returns the first `at` bytes; `self` keeps the rest.
    ///
    /// # Panics
    /// If there are fewer than `at` bytes.
    #[must_use = "the front part would be dropped"]
    pub fn split_to(&mut self, mut at: usize) -> Segments {
        let mut front = Segments::new();
        while at > 0 {
            let first = self.bufs.first_mut().expect("split beyond the end");
            if first.len() <= at {
                at -= first.len();
                let whole = self.bufs.remove(0);
                front.push(whole);
            } else {
                front.push(first.split_to(at));
                at = 0;
            }
        }
        front
    }

    /// Iterates over the pieces.
    ///
    /// # Panics
    /// If a piece is foreign.
    pub fn iter(&self) -> std::slice::Iter<'_, Buf> {
        assert_no_shared_segments(&self.bufs);
        self.bufs.iter()
    }

    /// Iterates over the pieces, for writing.
    ///
    /// # Panics
    /// If a piece is foreign.
    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, Buf> {
        assert_no_shared_segments(&self.bufs);
        self.bufs.iter_mut()
    }

    /// Address and length of each piece, for the kernel and for checks of alignment. The kernel may
    /// read and write the bytes while the segments exist; do not make slices of them.
    pub fn ranges(&self) -> impl Iterator<Item = (*mut u8, usize)> + '_ {
        self.bufs.iter().map(|buf| (buf.start(), buf.len()))
    }

    /// Calls `take` with parts of at most `len` bytes from byte `from` on. It also passes the
    /// offset of each part from `from`. Foreign bytes are copied once first, so the part that
    /// `take` sees does not change.
    pub fn consume(&self, from: usize, len: usize, mut take: impl FnMut(usize, &[u8])) {
        let mut window = SegmentRangeCursor::new(from, len);
        for buf in &self.bufs {
            let Some((done, range)) = window.of(buf.len()) else { return };
            if buf.is_shared() {
                for_each_bounce_portion(range, |at, before, portion| {
                    buf.read_shared(at, portion);
                    take(done + before, portion);
                });
            } else if !range.is_empty() {
                take(done, &buf[range]);
            }
        }
    }

    /// Calls `make` to write parts of at most `len` bytes from byte `from` on, with offsets as in
    /// [`Segments::consume`]. The previous contents of a part are undefined, and `make` must write
    /// all of it.
    pub fn produce(&mut self, from: usize, len: usize, mut make: impl FnMut(usize, &mut [u8])) {
        let mut window = SegmentRangeCursor::new(from, len);
        for buf in &mut self.bufs {
            let Some((done, range)) = window.of(buf.len()) else { return };
            if buf.is_shared() {
                for_each_bounce_portion(range, |at, before, portion| {
                    make(done + before, portion);
                    buf.write_shared(at, portion);
                });
            } else if !range.is_empty() {
                make(done, &mut buf[range]);
            }
        }
    }

    /// Sets every byte to `byte`.
    pub fn fill(&mut self, byte: u8) {
        self.fill_at(0, usize::MAX, byte);
    }

    /// Sets at most `len` bytes from byte `from` on to `byte`.
    pub fn fill_at(&mut self, from: usize, len: usize, byte: u8) {
        let mut window = SegmentRangeCursor::new(from, len);
        for buf in &mut self.bufs {
            let Some((_, range)) = window.of(buf.len()) else { return };
            if buf.is_shared() {
                buf.fill_shared(range, byte);
            } else {
                buf[range].fill(byte);
            }
        }
    }

    /// Copies as many bytes as both have into `out`; returns their number.
    pub fn copy_to(&self, out: &mut [u8]) -> usize {
        self.copy_to_at(0, out)
    }

    /// Copies bytes from byte `from` on into `out`, as many as both have; returns their number.
    pub fn copy_to_at(&self, from: usize, out: &mut [u8]) -> usize {
        let mut copied = 0;
        self.consume(from, out.len(), |at, part| {
            out[at..at + part.len()].copy_from_slice(part);
            copied = at + part.len();
        });
        copied
    }

    /// Copies as many bytes as both have from `src`; returns their number.
    pub fn copy_from(&mut self, src: &[u8]) -> usize {
        self.copy_from_at(0, src)
    }

    /// Copies `src` to byte `from` and after it, as many bytes as both have; returns their number.
    pub fn copy_from_at(&mut self, from: usize, src: &[u8]) -> usize {
        let mut copied = 0;
        self.produce(from, src.len(), |at, part| {
            part.copy_from_slice(&src[at..at + part.len()]);
            copied = at + part.len();
        });
        copied
    }
}

/// Panics on foreign pieces: they are stored as a [`Buf`], which must not leave this module.
fn assert_no_shared_segments<'a>(bufs: impl IntoIterator<Item = &'a Buf>) {
    assert!(!bufs.into_iter().any(Buf::is_shared), "foreign memory can only be copied");
}

/// Splits `range` into portions. Calls `each` with the start of the portion, its offset in `range`,
/// and a buffer.
#[cold]
fn for_each_bounce_portion(range: std::ops::Range<usize>, mut each: impl FnMut(usize, usize, &mut [u8])) {
    let mut portion = [0; PORTION];
    for at in range.clone().step_by(PORTION) {
        each(at, at - range.start, &mut portion[..PORTION.min(range.end - at)]);
    }
}

/// A cursor that maps a range of the whole data to ranges of its pieces.
struct SegmentRangeCursor {
    skip: usize,
    left: usize,
    done: usize,
}

impl SegmentRangeCursor {
    fn new(from: usize, len: usize) -> SegmentRangeCursor {
        SegmentRangeCursor { skip: from, left: len, done: 0 }
    }

    /// Returns the part of the next piece, of `len` bytes, that is in the range, and the number of
    /// bytes before it. `None` after the end of the range.
    fn of(&mut self, len: usize) -> Option<(usize, std::ops::Range<usize>)> {
        if self.left == 0 {
            return None;
        }
        let start = self.skip.min(len);
        self.skip -= start;
        let end = len.min(start.saturating_add(self.left));
        let before = self.done;
        self.left -= end - start;
        self.done += end - start;
        Some((before, start..end))
    }
}

impl From<Buf> for Segments {
    fn from(buf: Buf) -> Segments {
        let mut s = Segments::new();
        s.bufs.push(buf);
        s
    }
}

impl From<SharedRange> for Segments {
    fn from(range: SharedRange) -> Segments {
        let mut s = Segments::new();
        s.bufs.push(range.0);
        s
    }
}

impl IntoIterator for Segments {
    type Item = Buf;
    type IntoIter = smallvec::IntoIter<[Buf; 1]>;
    fn into_iter(self) -> Self::IntoIter {
        assert_no_shared_segments(&self.bufs);
        self.bufs.into_iter()
    }
}

impl<'a> IntoIterator for &'a Segments {
    type Item = &'a Buf;
    type IntoIter = std::slice::Iter<'a, Buf>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_ranges_of_the_whole() {
        let mut s = Segments::from(Buf::zeroed(10));
        s.push(Buf::zeroed(20));
        s.push(Buf::zeroed(5));
        let bytes: Vec<u8> = (0..35).collect();
        s.copy_from(&bytes);
        for from in 0..36 {
            for len in [0, 1, 9, 21, 40] {
                let end = (from + len).min(35);
                let mut seen = Vec::new();
                s.consume(from, len, |at, part| {
                    assert_eq!(at, seen.len());
                    seen.extend_from_slice(part);
                });
                assert_eq!(seen, bytes[from..end.max(from)]);
            }
        }
        s.produce(8, 4, |_, part| part.fill(99));
        let mut out = [0; 35];
        s.copy_to(&mut out);
        assert_eq!(out[7..13], [7, 99, 99, 99, 99, 12]);
    }

    #[test]
    fn split_across_pieces_and_append_back() {
        let mut s = Segments::from(Buf::zeroed(10));
        s.push(Buf::zeroed(20));
        let bytes: Vec<u8> = (0..30).collect();
        assert_eq!(s.copy_from(&bytes), 30);
        let mut front = s.split_to(15);
        assert_eq!((front.len(), s.len()), (15, 15));
        front.append(s);
        let mut out = [0; 30];
        assert_eq!(front.copy_to(&mut out), 30);
        assert_eq!(&out[..], &bytes[..]);
        assert_eq!(front.iter().count(), 2, "the two halves of a slab joined again");
    }
}
