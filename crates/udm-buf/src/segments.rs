//! A request's data: a short list of [`Buf`]s, in order.

use crate::Buf;
use smallvec::SmallVec;

/// The scatter list of a request. One piece, inline, in nearly all of them.
#[derive(Debug, Default)]
pub struct Segments {
    bufs: SmallVec<[Buf; 1]>,
}

impl Segments {
    /// No data, as for flush, discard and write-zeroes.
    #[must_use]
    pub fn new() -> Segments {
        Segments { bufs: SmallVec::new() }
    }

    /// Bytes in all pieces.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bufs.iter().map(Buf::len).sum()
    }

    /// True when there are no bytes.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bufs.is_empty() || self.bufs.iter().all(Buf::is_empty)
    }

    /// Appends `buf`, joining it to the last piece when it lies right behind it.
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

    /// Appends all of `other`.
    pub fn append(&mut self, other: Segments) {
        for buf in other.bufs {
            self.push(buf);
        }
    }

    /// Takes the last piece off.
    pub fn pop(&mut self) -> Option<Buf> {
        self.bufs.pop()
    }

    /// Cuts off the first `at` bytes and returns them; `self` keeps the rest.
    ///
    /// # Panics
    /// When there are fewer than `at` bytes.
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

    /// The pieces.
    pub fn iter(&self) -> std::slice::Iter<'_, Buf> {
        self.bufs.iter()
    }

    /// The pieces, for writing into.
    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, Buf> {
        self.bufs.iter_mut()
    }

    /// The bytes from `from` on, `len` of them or as many as there are, piece by piece.
    pub fn slices(&self, from: usize, len: usize) -> impl Iterator<Item = &[u8]> {
        let mut window = Window { skip: from, left: len };
        self.bufs.iter().map_while(move |b| window.of(b.len()).map(|range| &b[range]))
    }

    /// The same, for writing into.
    pub fn slices_mut(&mut self, from: usize, len: usize) -> impl Iterator<Item = &mut [u8]> {
        let mut window = Window { skip: from, left: len };
        self.bufs.iter_mut().map_while(move |b| window.of(b.len()).map(|range| &mut b[range]))
    }

    /// Sets every byte to `byte`.
    pub fn fill(&mut self, byte: u8) {
        for b in &mut self.bufs {
            b.fill(byte);
        }
    }

    /// Copies into `out` as many bytes as both have; returns how many.
    pub fn copy_to(&self, out: &mut [u8]) -> usize {
        let mut done = 0;
        for b in &self.bufs {
            let n = b.len().min(out.len() - done);
            out[done..done + n].copy_from_slice(&b[..n]);
            done += n;
        }
        done
    }

    /// Copies from `src` as many bytes as both have; returns how many.
    pub fn copy_from(&mut self, src: &[u8]) -> usize {
        let mut done = 0;
        for b in &mut self.bufs {
            let n = b.len().min(src.len() - done);
            b[..n].copy_from_slice(&src[done..done + n]);
            done += n;
        }
        done
    }
}

/// A range of the whole, as it passes over the pieces.
struct Window {
    skip: usize,
    left: usize,
}

impl Window {
    /// What of the next piece, of `len` bytes, is in the range; `None` behind its end.
    fn of(&mut self, len: usize) -> Option<std::ops::Range<usize>> {
        if self.left == 0 {
            return None;
        }
        let start = self.skip.min(len);
        self.skip -= start;
        let end = len.min(start.saturating_add(self.left));
        self.left -= end - start;
        Some(start..end)
    }
}

impl From<Buf> for Segments {
    fn from(buf: Buf) -> Segments {
        let mut s = Segments::new();
        s.bufs.push(buf);
        s
    }
}

impl IntoIterator for Segments {
    type Item = Buf;
    type IntoIter = smallvec::IntoIter<[Buf; 1]>;
    fn into_iter(self) -> Self::IntoIter {
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
                assert_eq!(
                    s.slices(from, len).flatten().copied().collect::<Vec<_>>(),
                    bytes[from..end.max(from)]
                );
            }
        }
        s.slices_mut(8, 4).for_each(|piece| piece.fill(99));
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
