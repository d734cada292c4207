//! A pool of slabs, so that a warm core allocates nothing.

use crate::{Buf, Segments};

/// Maximum length in bytes of a piece from [`BufPool::get_pieces`].
pub const PIECE_MAX: usize = 1 << 20;

/// A pool of slabs by power-of-two size. One per core or connection; never shared.
#[derive(Debug)]
pub struct BufPool {
    /// `classes[i]` holds free slabs of `MIN << i` bytes.
    classes: Vec<Vec<Buf>>,
    free_bytes: usize,
    out: usize,
    free_max: usize,
}

/// The smallest slab in bytes.
const MIN: usize = 4096;

impl BufPool {
    /// Creates a pool that keeps at most `free_max` bytes of free slabs. Slabs beyond that are
    /// freed.
    #[must_use]
    pub fn new(free_max: usize) -> BufPool {
        BufPool { classes: Vec::new(), free_bytes: 0, out: 0, free_max }
    }

    fn class(len: usize) -> usize {
        (len.max(MIN).next_power_of_two() / MIN).trailing_zeros() as usize
    }

    /// A buffer of exactly `len` bytes (at least 1). Its contents are undefined, but initialised.
    pub fn get(&mut self, len: usize) -> Buf {
        let class = BufPool::class(len);
        let mut buf = match self.classes.get_mut(class).and_then(Vec::pop) {
            Some(buf) => {
                self.free_bytes -= buf.slab_len();
                buf
            }
            None => Buf::zeroed(MIN << class),
        };
        self.out += buf.slab_len();
        if buf.len() > len {
            buf.truncate(len);
        }
        buf
    }

    /// Memory of exactly `len` bytes, in aligned pieces of [`PIECE_MAX`] bytes. The last piece may
    /// be shorter.
    pub fn get_pieces(&mut self, len: usize) -> Segments {
        let mut pieces = Segments::new();
        let mut left = len;
        while left > 0 {
            let now = left.min(PIECE_MAX);
            pieces.push(self.get(now));
            left -= now;
        }
        pieces
    }

    /// Bytes by which [`BufPool::total_bytes`] would grow with a [`BufPool::get_pieces`] of `len`
    /// bytes.
    #[must_use]
    pub fn growth(&self, len: usize) -> usize {
        let free = |len| self.classes.get(BufPool::class(len)).map_or(0, Vec::len);
        let (whole, last) = (len / PIECE_MAX, len % PIECE_MAX);
        let pieces = whole.saturating_sub(free(PIECE_MAX)) * PIECE_MAX;
        let rest = if last == 0 || free(last) > 0 { 0 } else { MIN << BufPool::class(last) };
        pieces + rest
    }

    /// Returns a buffer to the pool. If other pieces of its slab are alive, or the pool is full,
    /// the buffer is dropped.
    pub fn put(&mut self, mut buf: Buf) {
        let size = buf.slab_len();
        if !size.is_power_of_two() || size < MIN || !buf.reclaim() {
            return;
        }
        self.out = self.out.saturating_sub(size);
        if self.free_bytes + size > self.free_max {
            return;
        }
        let class = BufPool::class(size);
        if self.classes.len() <= class {
            self.classes.resize_with(class + 1, Vec::new);
        }
        self.free_bytes += size;
        self.classes[class].push(buf);
    }

    /// Frees all free slabs.
    pub fn trim(&mut self) {
        self.classes = Vec::new();
        self.free_bytes = 0;
    }

    /// Bytes of all slabs in use or free.
    #[must_use]
    pub fn total_bytes(&self) -> usize {
        self.out + self.free_bytes
    }

    /// Bytes of free slabs.
    #[must_use]
    pub fn free_bytes(&self) -> usize {
        self.free_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slab_comes_back() {
        let mut p = BufPool::new(1 << 20);
        let b = p.get(5000);
        assert_eq!((b.len(), b.slab_len()), (5000, 8192));
        let addr = b.addr();
        p.put(b);
        assert_eq!(p.free_bytes(), 8192);
        let b = p.get(8192);
        assert_eq!((b.addr(), b.len(), p.free_bytes()), (addr, 8192, 0));
    }

    #[test]
    fn what_is_held_is_what_is_out_and_what_is_kept() {
        let mut p = BufPool::new(4 << 20);
        for len in [1, 4096, PIECE_MAX, PIECE_MAX + 1, 3 * PIECE_MAX + 70_000] {
            let grows = p.growth(len);
            let before = p.total_bytes();
            let pieces = p.get_pieces(len);
            assert_eq!((pieces.len(), p.total_bytes() - before), (len, grows));
            assert!(pieces.iter().all(|b| b.addr() % crate::ALIGN == 0));
            pieces.into_iter().for_each(|b| p.put(b));
            assert_eq!(p.total_bytes(), p.free_bytes());
        }
        p.trim();
        assert_eq!((p.total_bytes(), p.free_bytes()), (0, 0));
    }

    #[test]
    fn a_shared_slab_is_not_reused() {
        let mut p = BufPool::new(1 << 20);
        let mut b = p.get(4096);
        let piece = b.split_to(10);
        p.put(b);
        assert_eq!(p.free_bytes(), 0);
        drop(piece);
    }

    #[test]
    fn the_bound_holds() {
        let mut p = BufPool::new(8192);
        let (a, b, c) = (p.get(4096), p.get(4096), p.get(4096));
        p.put(a);
        p.put(b);
        p.put(c);
        assert_eq!(p.free_bytes(), 8192);
    }
}
