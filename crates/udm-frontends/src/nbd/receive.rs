//! The receiving side of a connection: memory for what arrives, and the cutting of it into headers and payloads.
//!
//! Bytes arrive in a *slab*, request behind request. The payload of a write is cut out of it without a copy, so a slab is in use until the
//! last of these writes is done; until then it rests in a list of bounded length. A long payload gets a buffer of its own, page-aligned and in
//! one piece: its first bytes are copied there, and the kernel puts the rest right behind them. Beside such a buffer only a little
//! of the slab is offered, so that of the next long payload, too, little arrives in the wrong place. Otherwise only a header or
//! payload that straddles the end of its slab is copied, into the next.
//!
//! It does no I/O: the connection passes [`Receiver::room`] to the ring and gives the result to [`Receiver::arrived`].

use udm_core::{Buf, BufPool, Segments};

/// The first slab of a connection in bytes: an idle client costs little.
pub(super) const SLAB_MIN: usize = 16 << 10;
/// The largest slab in bytes. A slab that was filled by one receive is followed by one of twice the size.
pub(super) const SLAB_MAX: usize = 256 << 10;
/// A payload that is not there yet and longer than this part of a slab is received into a buffer of its own.
const LONG: usize = 4;
/// What of the slab is offered beside the buffer of a long payload, in bytes: room for some headers.
const BESIDE: usize = 4096;

/// See the module's documentation.
pub(super) struct Receiver {
    /// Arrived and not cut off yet; the slab's bytes right before `free`.
    unread: Option<Buf>,
    /// The slab's bytes that nothing has arrived in. Not here while the ring has it.
    free: Option<Buf>,
    /// What the ring had to fill, in bytes; 0 when it has nothing.
    asked: usize,
    /// Size of the next slab in bytes.
    slab_len: usize,
    /// Empty pieces of slabs that are used up: the slab is free again when its piece is the last.
    resting: Vec<Buf>,
    resting_bytes: usize,
    resting_max: usize,
    /// Bytes that must be there before the next header or payload can be cut.
    need: usize,
    /// Bytes to come that nobody wants: the payload of a refused write.
    skip: u64,
    long: Option<Long>,
    /// A list with room for two pieces.
    spare: Segments,
}

/// A long payload on its way.
struct Long {
    /// What has arrived of it: the front of its buffer.
    data: Buf,
    /// The back of its buffer. Not here while the ring has it.
    rest: Option<Buf>,
    missing: usize,
}

impl Receiver {
    /// A receiver whose used slabs take `resting_max` bytes at the most.
    pub(super) fn new(resting_max: usize) -> Receiver {
        Receiver {
            unread: None,
            free: Some(Buf::zeroed(SLAB_MIN)),
            asked: 0,
            slab_len: SLAB_MIN,
            resting: Vec::new(),
            resting_bytes: 0,
            resting_max,
            need: 1,
            skip: 0,
            long: None,
            spare: Segments::new(),
        }
    }

    /// What has arrived and was not taken.
    pub(super) fn unread(&self) -> &[u8] {
        self.unread.as_deref().unwrap_or_default()
    }

    /// Takes `n` bytes off the front of what has arrived.
    pub(super) fn consume(&mut self, n: usize) {
        if let Some(unread) = &mut self.unread {
            drop(unread.split_to(n));
        }
    }

    /// The next `N` bytes, when they are there.
    pub(super) fn header<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.skip_now();
        if self.skip > 0 {
            return None;
        }
        let header = self.unread().first_chunk().copied();
        match header {
            Some(_) => self.consume(N),
            None => self.need = N,
        }
        header
    }

    /// The next `len` (at least 1) bytes, when they are there. Once asked for, a payload is asked for until it is given.
    /// Memory for a long one comes from `pool`.
    pub(super) fn payload(&mut self, len: usize, pool: &mut BufPool) -> Option<Segments> {
        if let Some(long) = &self.long {
            return if long.missing == 0 { self.long.take().map(|l| l.data.into()) } else { None };
        }
        let there = self.unread().len();
        if there >= len {
            return self.unread.as_mut().map(|unread| unread.split_to(len).into());
        }
        if len <= self.slab_len / LONG {
            self.need = len;
            return None;
        }
        self.need = 1;
        let mut rest = pool.get(len);
        let mut data = rest.split_to(there);
        data.copy_from_slice(self.unread());
        self.unread = None;
        self.long = Some(Long { data, rest: Some(rest), missing: len - there });
        None
    }

    /// Lets the next `n` bytes fall.
    pub(super) fn skip(&mut self, n: u64) {
        self.skip += n;
        self.skip_now();
    }

    fn skip_now(&mut self) {
        let n = self.skip.min(self.unread().len() as u64);
        self.consume(n as usize);
        self.skip -= n;
    }

    /// Memory for the next receive. `None` when the ring has some already, or when too many slabs are in use: ask again when
    /// writes have finished.
    pub(super) fn room(&mut self) -> Option<Segments> {
        if self.asked > 0 {
            return None;
        }
        self.skip_now();
        if self.unread.as_ref().is_some_and(|u| u.is_empty()) {
            self.unread = None;
        }
        self.provide_slab();
        let rest = self.long.as_mut().and_then(|l| l.rest.take());
        let unread = self.unread().len();
        let slab = match (&rest, &mut self.free) {
            (Some(_), Some(free)) => Some(free.split_to(BESIDE.min(free.len()))).filter(|b| !b.is_empty()),
            (None, free) => free.take_if(|f| !f.is_empty() && f.len() + unread >= self.need),
            (Some(_), None) => None,
        };
        if rest.is_none() && slab.is_none() {
            return None;
        }
        let mut room = std::mem::take(&mut self.spare);
        rest.into_iter().chain(slab).for_each(|buf| room.push(buf));
        self.asked = room.len();
        Some(room)
    }

    /// Sees to it that `free` has room, if a slab can be had.
    fn provide_slab(&mut self) {
        let unread = self.unread().len();
        debug_assert!(unread < self.slab_len, "whole requests are taken before more are received");
        if let Some(free) = &mut self.free {
            if unread == 0 {
                free.reclaim();
            }
            let grows = unread == 0 && free.slab_len() < self.slab_len;
            if !grows && unread + free.len() >= self.need && free.len() >= free.slab_len() / LONG {
                return;
            }
        }
        let Some(mut slab) = self.next_slab() else { return };
        if let Some(old) = self.unread.take() {
            slab[..old.len()].copy_from_slice(&old);
            self.unread = Some(slab.split_to(old.len()));
        }
        if let Some(mut old) = self.free.replace(slab) {
            old.truncate(0);
            if !old.is_unique() || old.slab_len() == self.slab_len {
                self.resting_bytes += old.slab_len();
                self.resting.push(old);
            }
        }
    }

    /// A slab that nobody uses any more, or a new one while the bound allows.
    fn next_slab(&mut self) -> Option<Buf> {
        let mut i = 0;
        while i < self.resting.len() {
            if !self.resting[i].is_unique() {
                i += 1;
                continue;
            }
            let mut slab = self.resting.remove(i);
            self.resting_bytes -= slab.slab_len();
            // Smaller ones, of the time before it grew, are freed.
            if slab.slab_len() == self.slab_len && slab.reclaim() {
                return Some(slab);
            }
        }
        (self.resting_bytes < self.resting_max).then(|| Buf::zeroed(self.slab_len))
    }

    /// Takes the memory back from the ring, with `n` bytes received into it.
    pub(super) fn arrived(&mut self, n: usize, mut data: Segments) {
        let mut n = n;
        let full = n == self.asked;
        self.asked = 0;
        let Some(last) = data.pop() else { return };
        let slab = match self.long.as_mut().filter(|l| l.missing > 0 && l.rest.is_none()) {
            Some(long) => {
                // The payload's own buffer, and behind it the part of the slab, if there was one.
                let (mut rest, slab) = match data.pop() {
                    Some(first) => (first, Some(last)),
                    None => (last, None),
                };
                let got = n.min(rest.len());
                n -= got;
                long.missing -= got;
                join(&mut long.data, rest.split_to(got));
                long.rest = Some(rest).filter(|r| !r.is_empty());
                slab
            }
            None => {
                if full && self.slab_len < SLAB_MAX {
                    self.slab_len *= 2;
                }
                Some(last)
            }
        };
        if let Some(mut slab) = slab {
            let got = slab.split_to(n);
            match &mut self.unread {
                Some(unread) => join(unread, got),
                None => self.unread = Some(got),
            }
            // What was kept back of the slab lies right behind what the ring had.
            if let Some(kept) = self.free.take() {
                join(&mut slab, kept);
            }
            self.free = Some(slab);
        }
        self.spare = data;
    }

    /// Frees what a closed connection still holds of its client's bytes.
    pub(super) fn clear(&mut self) {
        self.unread = None;
        self.long = None;
        self.skip = 0;
    }
}

/// Puts neighbours together.
fn join(front: &mut Buf, back: Buf) {
    let joined = front.try_join(back);
    debug_assert!(joined.is_ok(), "{front:?} and {joined:?} are no neighbours");
}

#[cfg(test)]
#[path = "receive_tests.rs"]
mod tests;
