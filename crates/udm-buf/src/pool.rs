//! Recycled slabs, so that a warm core allocates nothing.

use crate::Buf;

/// Slabs by power-of-two size, kept for reuse. One to a core or a connection; never shared.
#[derive(Debug)]
pub struct BufPool {
    /// `classes[i]` holds free slabs of `MIN << i` bytes.
    classes: Vec<Vec<Buf>>,
    kept: usize,
    keep_max: usize,
}

/// The smallest slab in bytes.
const MIN: usize = 4096;

impl BufPool {
    /// A pool that keeps at most `keep_max` bytes of free slabs; what is put back beyond that is freed.
    #[must_use]
    pub fn new(keep_max: usize) -> BufPool {
        BufPool { classes: Vec::new(), kept: 0, keep_max }
    }

    fn class(len: usize) -> usize {
        (len.max(MIN).next_power_of_two() / MIN).trailing_zeros() as usize
    }

    /// A buffer of exactly `len` bytes (at least 1). Its bytes are of no known value, but initialised.
    pub fn get(&mut self, len: usize) -> Buf {
        let class = BufPool::class(len);
        let mut buf = match self.classes.get_mut(class).and_then(Vec::pop) {
            Some(buf) => {
                self.kept -= buf.slab_len();
                buf
            }
            None => Buf::zeroed(MIN << class),
        };
        if buf.len() > len {
            buf.truncate(len);
        }
        buf
    }

    /// Takes a buffer back. One whose slab has other live pieces, or that is too much to keep, is dropped.
    pub fn put(&mut self, mut buf: Buf) {
        let size = buf.slab_len();
        if !size.is_power_of_two() || size < MIN || self.kept + size > self.keep_max || !buf.reclaim() {
            return;
        }
        let class = BufPool::class(size);
        if self.classes.len() <= class {
            self.classes.resize_with(class + 1, Vec::new);
        }
        self.kept += size;
        self.classes[class].push(buf);
    }

    /// Bytes held free.
    #[must_use]
    pub fn kept(&self) -> usize {
        self.kept
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
        assert_eq!(p.kept(), 8192);
        let b = p.get(8192);
        assert_eq!((b.addr(), b.len(), p.kept()), (addr, 8192, 0));
    }

    #[test]
    fn a_shared_slab_is_not_reused() {
        let mut p = BufPool::new(1 << 20);
        let mut b = p.get(4096);
        let piece = b.split_to(10);
        p.put(b);
        assert_eq!(p.kept(), 0);
        drop(piece);
    }

    #[test]
    fn the_bound_holds() {
        let mut p = BufPool::new(8192);
        let (a, b, c) = (p.get(4096), p.get(4096), p.get(4096));
        p.put(a);
        p.put(b);
        p.put(c);
        assert_eq!(p.kept(), 8192);
    }
}
