//! The receive side of a connection: memory for received bytes, and its division into headers and
//! payloads.
//!
//! Bytes arrive in a *slab*, request after request. The payload of a write is cut out of the slab
//! without a copy, so a slab is in use until the last of these writes is done. Until then it waits
//! in a list of bounded length. A long payload gets page-aligned buffers of its own, one after the
//! other as it arrives. So memory is taken for received bytes, not for announced ones. Its first
//! bytes are copied there, and the kernel puts the rest right after them. Together with such a
//! buffer, only a small part of the slab is offered. So only a little of the next long payload
//! arrives in the wrong place. Otherwise, only a header or payload that crosses the end of its slab
//! is copied, into the next slab.
//!
//! This part does no I/O: the connection passes [`ReceiveBuffer::room`] to the ring and the result
//! to [`ReceiveBuffer::arrived`].

use super::reply::return_buffers_to_pool;
use udm_buf::PIECE_MAX;
use udm_core::{Buf, BufPool, Segments};

/// The first slab of a connection in bytes: small, so that an idle client costs little.
pub(super) const SLAB_MIN: usize = 16 << 10;
/// The largest slab in bytes. If one receive fills a slab, the next slab is twice as large.
pub(super) const SLAB_MAX: usize = 256 << 10;
/// A payload that has not arrived and is longer than this fraction of a slab gets buffers of its
/// own.
const LONG: usize = 4;
/// Bytes of the slab that are offered together with the buffer of a long payload: room for some
/// headers.
const BESIDE: usize = 4096;

/// Received bytes of a connection, and memory for the next receive.
pub(crate) struct ReceiveBuffer {
    /// Bytes that arrived and were not taken; right before `free` in the slab.
    unread: Option<Buf>,
    /// Unused bytes of the slab. `None` while the ring has them.
    free: Option<Buf>,
    /// Bytes of memory that the ring has; 0 if it has none.
    asked: usize,
    /// Size in bytes of the current slab, and of the next one.
    current_len: usize,
    slab_len: usize,
    /// Empty pieces of used slabs. A slab is free again when its piece is the only one left.
    resting: Vec<Buf>,
    resting_bytes: usize,
    resting_max: usize,
    /// Bytes that must arrive before the next header or payload can be taken.
    need: usize,
    /// Bytes to discard: the payload of a refused write.
    skip: u64,
    long: Option<PartlyReceivedPayload>,
    /// A vector with capacity for two buffers.
    free_segments: Segments,
}

/// A long payload that is arriving.
struct PartlyReceivedPayload {
    /// Buffers that are full.
    data: Segments,
    /// Received bytes of the next buffer.
    front: Option<Buf>,
    /// The unfilled end of that buffer. `None` while the ring has it.
    rest: Option<Buf>,
    /// Bytes that have not arrived.
    missing: usize,
}

/// Received bytes that a connection has not handled when it moves to another core.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct FrozenReceiveBuffer {
    bytes: Vec<u8>,
    /// Bytes to discard when they arrive.
    skip: u64,
    /// Size in bytes that slabs have grown to.
    slab_len: usize,
}

impl FrozenReceiveBuffer {
    /// The received bytes that were not handled, and the number of bytes to discard when they
    /// arrive.
    pub(super) fn into_parts(self) -> (Vec<u8>, u64) {
        (self.bytes, self.skip)
    }

    /// A receiver with these bytes; `None` if there are more than a receiver can have.
    pub(super) fn from_parts(bytes: Vec<u8>, skip: u64) -> Option<FrozenReceiveBuffer> {
        let slab_len = bytes.len().next_power_of_two().max(SLAB_MIN);
        (slab_len <= SLAB_MAX).then_some(FrozenReceiveBuffer { bytes, skip, slab_len })
    }
}

/// Reason why nothing can be received now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReceiveBlocked {
    /// The ring already has memory, or too many slabs are in use. Try again when a request has
    /// completed.
    BuffersInUse,
    /// This many bytes of memory are needed, which is more than allowed.
    Memory(usize),
}

impl ReceiveBuffer {
    /// Creates a receiver whose used slabs take at most `resting_max` bytes.
    pub(crate) fn new(resting_max: usize) -> ReceiveBuffer {
        ReceiveBuffer {
            unread: None,
            free: Some(Buf::zeroed(SLAB_MIN)),
            asked: 0,
            current_len: SLAB_MIN,
            slab_len: SLAB_MIN,
            resting: Vec::new(),
            resting_bytes: 0,
            resting_max,
            need: 1,
            skip: 0,
            long: None,
            free_segments: Segments::new(),
        }
    }

    /// Returns the state for another core. No receive is in flight, and no long payload is
    /// arriving.
    pub(super) fn freeze(&mut self) -> FrozenReceiveBuffer {
        debug_assert!(self.asked == 0 && self.long.is_none());
        let unread = self.unread();
        FrozenReceiveBuffer { bytes: unread.to_vec(), skip: self.skip, slab_len: self.slab_len }
    }

    /// Creates a receiver that continues a frozen one.
    pub(super) fn thaw(unread: FrozenReceiveBuffer, resting_max: usize) -> ReceiveBuffer {
        let FrozenReceiveBuffer { bytes, skip, slab_len } = unread;
        let mut receiver = ReceiveBuffer::new(resting_max);
        if !bytes.is_empty() {
            // They fit in one slab, as before.
            let mut slab = Buf::zeroed(slab_len);
            let mut front = slab.split_to(bytes.len());
            front.copy_from_slice(&bytes);
            (receiver.unread, receiver.free) = (Some(front), Some(slab));
            receiver.current_len = slab_len;
        }
        ReceiveBuffer { skip, slab_len, ..receiver }
    }

    /// Bytes that arrived and were not taken.
    pub(crate) fn unread(&self) -> &[u8] {
        self.unread.as_deref().unwrap_or_default()
    }

    /// Takes `n` bytes from the front of the unread bytes.
    pub(crate) fn consume(&mut self, n: usize) {
        if let Some(unread) = &mut self.unread {
            drop(unread.split_to(n));
        }
    }

    /// Returns the next `N` bytes, if they have arrived.
    pub(crate) fn header<const N: usize>(&mut self) -> Option<[u8; N]> {
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

    /// The next `n` bytes, if they have arrived. They are not taken.
    pub(crate) fn peek(&mut self, n: usize) -> Option<&[u8]> {
        if self.unread().len() < n {
            self.need = n;
            return None;
        }
        self.unread().get(..n)
    }

    /// Begins with `bytes`, which arrived elsewhere. At most 16 KiB, before anything else arrives.
    pub(crate) fn put_back(&mut self, bytes: &[u8]) {
        if let Some(free) = self.free.as_mut().filter(|_| !bytes.is_empty()) {
            let mut front = free.split_to(bytes.len());
            front.copy_from_slice(bytes);
            self.unread = Some(front);
        }
    }

    /// Returns the next `len` (at least 1) bytes, if they have arrived. If not, the caller must
    /// request the same payload again until it gets it.
    pub(crate) fn payload(&mut self, len: usize) -> Option<Segments> {
        if let Some(long) = &self.long {
            return if long.missing == 0 { self.long.take().map(|l| l.data) } else { None };
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
        self.long =
            Some(PartlyReceivedPayload { data: Segments::new(), front: None, rest: None, missing: len });
        None
    }

    /// Discards the next `n` bytes.
    pub(super) fn skip(&mut self, n: u64) {
        self.skip += n;
        self.skip_now();
    }

    fn skip_now(&mut self) {
        let n = self.skip.min(self.unread().len() as u64);
        self.consume(n as usize);
        self.skip -= n;
    }

    /// Returns memory for the next receive. At most `may` bytes of it are new. Buffers of long
    /// payloads come from `pool`.
    ///
    /// # Errors
    /// No memory is available, with the reason.
    pub(crate) fn room(&mut self, pool: &mut BufPool, mut may: usize) -> Result<Segments, ReceiveBlocked> {
        if self.asked > 0 {
            return Err(ReceiveBlocked::BuffersInUse);
        }
        self.skip_now();
        if self.unread.as_ref().is_some_and(|u| u.is_empty()) {
            self.unread = None;
        }
        self.provide_piece(pool, &mut may)?;
        let refused = self.provide_slab(may).is_err();
        let rest = self.long.as_mut().and_then(|l| l.rest.take());
        let unread = self.unread().len();
        // Only after the last buffer of the payload: otherwise the bytes after it belong to the
        // next buffer.
        let is_last = self.long.as_ref().is_none_or(|l| rest.as_ref().is_none_or(|r| r.len() == l.missing));
        let slab = match (&rest, &mut self.free) {
            (Some(_), _) if !is_last => None,
            (Some(_), Some(free)) => Some(free.split_to(BESIDE.min(free.len()))).filter(|b| !b.is_empty()),
            (None, free) => free.take_if(|f| !f.is_empty() && f.len() + unread >= self.need),
            (Some(_), None) => None,
        };
        if rest.is_none() && slab.is_none() {
            return Err(if refused {
                ReceiveBlocked::Memory(self.slab_len)
            } else {
                ReceiveBlocked::BuffersInUse
            });
        }
        let mut room = std::mem::take(&mut self.free_segments);
        rest.into_iter().chain(slab).for_each(|buf| room.push(buf));
        self.asked = room.len();
        Ok(room)
    }

    /// Provides a buffer for a long payload if it needs one. The received bytes of its first buffer
    /// are copied from the slab.
    fn provide_piece(&mut self, pool: &mut BufPool, may: &mut usize) -> Result<(), ReceiveBlocked> {
        let Some(long) = self.long.as_mut().filter(|l| l.missing > 0 && l.rest.is_none()) else {
            return Ok(());
        };
        let len = long.missing.min(PIECE_MAX);
        let growth = pool.growth(len);
        *may = may.checked_sub(growth).ok_or(ReceiveBlocked::Memory(growth))?;
        let mut rest = pool.get(len);
        let there = self.unread.take();
        let there = there.as_deref().unwrap_or_default();
        // They are less than a slab and less than the payload; otherwise the payload would not be a
        // long one.
        let mut front = rest.split_to(there.len());
        front.copy_from_slice(there);
        long.missing -= there.len();
        (long.front, long.rest) = (Some(front), Some(rest));
        Ok(())
    }

    /// Provides space in `free`, if a slab is available. Returns `Err` if that needs more than
    /// `may` bytes.
    fn provide_slab(&mut self, may: usize) -> Result<(), ()> {
        let unread = self.unread().len();
        debug_assert!(unread < self.slab_len, "whole requests are taken before more are received");
        if let Some(free) = &mut self.free {
            if unread == 0 {
                free.reclaim();
            }
            let grows = unread == 0 && free.slab_len() < self.slab_len;
            if !grows && unread + free.len() >= self.need && free.len() >= free.slab_len() / LONG {
                return Ok(());
            }
        }
        let Some(mut slab) = self.next_slab(may)? else { return Ok(()) };
        self.current_len = slab.slab_len();
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
        Ok(())
    }

    /// Returns a slab that is free again, or a new one within the limit.
    fn next_slab(&mut self, may: usize) -> Result<Option<Buf>, ()> {
        let mut i = 0;
        while i < self.resting.len() {
            if !self.resting[i].is_unique() {
                i += 1;
                continue;
            }
            let mut slab = self.resting.remove(i);
            self.resting_bytes -= slab.slab_len();
            // Smaller slabs, from before the growth, are freed.
            if slab.slab_len() == self.slab_len && slab.reclaim() {
                return Ok(Some(slab));
            }
        }
        if self.resting_bytes >= self.resting_max {
            return Ok(None);
        }
        if self.slab_len > may { Err(()) } else { Ok(Some(Buf::zeroed(self.slab_len))) }
    }

    /// Bytes of the slabs in use.
    pub(super) fn held(&self) -> usize {
        self.current_len + self.resting_bytes
    }

    /// Frees unused slabs, except the current one.
    pub(crate) fn trim(&mut self) {
        self.resting.retain(|slab| !slab.is_unique());
        self.resting_bytes = self.resting.iter().map(Buf::slab_len).sum();
    }

    /// Returns true while a long payload is arriving.
    pub(super) fn is_midway(&self) -> bool {
        self.long.is_some()
    }

    /// Takes the memory back from the ring, with `n` received bytes in it.
    pub(crate) fn arrived(&mut self, n: usize, mut data: Segments) {
        let mut n = n;
        let full = n == self.asked;
        self.asked = 0;
        let Some(last) = data.pop() else { return };
        let slab = match self.long.as_mut().filter(|l| l.front.is_some() && l.rest.is_none()) {
            Some(long) => {
                // The buffer of the payload, then the part of the slab, if there was one.
                let (mut rest, slab) = match data.pop() {
                    Some(first) => (first, Some(last)),
                    None => (last, None),
                };
                let got = n.min(rest.len());
                n -= got;
                long.missing -= got;
                if let Some(front) = &mut long.front {
                    join_adjacent_buffers(front, rest.split_to(got));
                }
                if rest.is_empty() {
                    // The empty rest is dropped first: a full buffer must be the only one of its
                    // slab.
                    drop(rest);
                    long.front.take().into_iter().for_each(|piece| long.data.push(piece));
                } else {
                    long.rest = Some(rest);
                }
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
                Some(unread) => join_adjacent_buffers(unread, got),
                None => self.unread = Some(got),
            }
            // The part of the slab that was kept follows the part that the ring had.
            if let Some(kept) = self.free.take() {
                join_adjacent_buffers(&mut slab, kept);
            }
            self.free = Some(slab);
        }
        self.free_segments = data;
    }

    /// Frees the received bytes of a closed connection.
    pub(crate) fn clear(&mut self, pool: &mut BufPool) {
        self.unread = None;
        self.skip = 0;
        if let Some(PartlyReceivedPayload { mut data, front, rest, .. }) = self.long.take() {
            front.into_iter().chain(rest).for_each(|piece| data.push(piece));
            return_buffers_to_pool(data, pool);
        }
    }
}

/// Joins adjacent buffers.
fn join_adjacent_buffers(front: &mut Buf, back: Buf) {
    let joined = front.try_join(back);
    debug_assert!(joined.is_ok(), "{front:?} and {joined:?} are no neighbours");
}

#[cfg(test)]
#[path = "receive_tests.rs"]
mod tests;
