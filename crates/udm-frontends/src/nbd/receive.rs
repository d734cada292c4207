//! The receiving side of a connection: memory for what arrives, and the cutting of it into headers
//! and payloads.
//!
//! Bytes arrive in a *slab*, request behind request. The payload of a write is cut out of it
//! without a copy, so a slab is in use until the last of these writes is done; until then it rests
//! in a list of bounded length. A long payload gets buffers of its own, page-aligned, one after the
//! other as it arrives, so that memory is taken by what came and not by what was announced: its
//! first bytes are copied there, and the kernel puts the rest right behind them. Beside such a
//! buffer only a little of the slab is offered, so that of the next long payload, too, little
//! arrives in the wrong place. Otherwise only a header or payload that straddles the end of its
//! slab is copied, into the next.
//!
//! It does no I/O: the connection passes [`ReceiveBuffer::room`] to the ring and gives the result to
//! [`ReceiveBuffer::arrived`].

use super::reply::recycle;
use udm_buf::PIECE_MAX;
use udm_core::bugs::{self, Bug};
use udm_core::{Buf, BufPool, Segments};

/// The first slab of a connection in bytes: an idle client costs little.
pub(super) const SLAB_MIN: usize = 16 << 10;
/// The largest slab in bytes. A slab that was filled by one receive is followed by one of twice the
/// size.
pub(super) const SLAB_MAX: usize = 256 << 10;
/// A payload that is not there yet and longer than this part of a slab is received into a buffer of
/// its own.
const LONG: usize = 4;
/// What of the slab is offered beside the buffer of a long payload, in bytes: room for some
/// headers.
const BESIDE: usize = 4096;

/// See the module's documentation.
pub(super) struct ReceiveBuffer {
    /// Arrived and not cut off yet; the slab's bytes right before `free`.
    unread: Option<Buf>,
    /// The slab's bytes that nothing has arrived in. Not here while the ring has it.
    free: Option<Buf>,
    /// What the ring had to fill, in bytes; 0 when it has nothing.
    asked: usize,
    /// Size of the slab in use in bytes, and of the next one.
    current_len: usize,
    slab_len: usize,
    /// Empty pieces of slabs that are used up: the slab is free again when its piece is the last.
    resting: Vec<Buf>,
    resting_bytes: usize,
    resting_max: usize,
    /// Bytes that must be there before the next header or payload can be cut.
    need: usize,
    /// Bytes to come that nobody wants: the payload of a refused write.
    skip: u64,
    long: Option<LongPayload>,
    /// A list with room for two pieces.
    spare: Segments,
}

/// A long payload on its way.
struct LongPayload {
    /// Its pieces that are full.
    data: Segments,
    /// What has arrived of the next piece.
    front: Option<Buf>,
    /// The back of that piece. Not here while the ring has it.
    rest: Option<Buf>,
    /// Bytes that have not arrived.
    missing: usize,
}

/// What a connection that goes on on another core has received and not looked at.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct UnreadBytes {
    bytes: Vec<u8>,
    /// Bytes to come that nobody wants.
    skip: u64,
    /// The size in bytes that slabs have grown to.
    slab_len: usize,
}

/// Why nothing can be received at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReceiveBlocked {
    /// The ring has memory already, or too many slabs are in use: ask again when something has
    /// finished.
    BuffersInUse,
    /// So many bytes of memory are needed, which is more than may be had.
    Memory(usize),
}

impl ReceiveBuffer {
    /// A receiver whose used slabs take `resting_max` bytes at the most.
    pub(super) fn new(resting_max: usize) -> ReceiveBuffer {
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
            spare: Segments::new(),
        }
    }

    /// What is to go on elsewhere. Nothing is being received, and no payload is midway.
    pub(super) fn freeze(&mut self) -> UnreadBytes {
        debug_assert!(self.asked == 0 && self.long.is_none());
        let unread = if bugs::on(Bug::UnreadLeftBehind) { &[] } else { self.unread() };
        UnreadBytes { bytes: unread.to_vec(), skip: self.skip, slab_len: self.slab_len }
    }

    /// A receiver that goes on where another was frozen.
    pub(super) fn thaw(unread: UnreadBytes, resting_max: usize) -> ReceiveBuffer {
        let UnreadBytes { bytes, skip, slab_len } = unread;
        let mut receiver = ReceiveBuffer::new(resting_max);
        if !bytes.is_empty() {
            // They were in one slab.
            let mut slab = Buf::zeroed(slab_len);
            let mut front = slab.split_to(bytes.len());
            front.copy_from_slice(&bytes);
            (receiver.unread, receiver.free) = (Some(front), Some(slab));
            receiver.current_len = slab_len;
        }
        ReceiveBuffer { skip, slab_len, ..receiver }
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

    /// The next `len` (at least 1) bytes, when they are there. Once asked for, a payload is asked
    /// for until it is given.
    pub(super) fn payload(&mut self, len: usize) -> Option<Segments> {
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
        self.long = Some(LongPayload { data: Segments::new(), front: None, rest: None, missing: len });
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

    /// Memory for the next receive, of which `may` bytes at the most are new. Buffers of long
    /// payloads come from `pool`.
    ///
    /// # Errors
    /// When there is none, with the reason.
    pub(super) fn room(&mut self, pool: &mut BufPool, mut may: usize) -> Result<Segments, ReceiveBlocked> {
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
        // Behind the last piece only: what is behind another goes into the next piece.
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
        let mut room = std::mem::take(&mut self.spare);
        rest.into_iter().chain(slab).for_each(|buf| room.push(buf));
        self.asked = room.len();
        Ok(room)
    }

    /// Sees to it that a long payload has a piece to go on in. What lies in the slab of its first
    /// is moved there.
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
        // It is less than a slab, and less than the payload, or it would not be received by itself.
        let mut front = rest.split_to(there.len());
        front.copy_from_slice(there);
        long.missing -= there.len();
        (long.front, long.rest) = (Some(front), Some(rest));
        Ok(())
    }

    /// Sees to it that `free` has room, if a slab can be had. `Err` when it takes more than `may`
    /// bytes.
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
            let lost = usize::from(bugs::on(Bug::CutLosesByte) && old.len() > 1);
            let kept = old.len() - lost;
            slab[..kept].copy_from_slice(&old[..kept]);
            self.unread = Some(slab.split_to(kept));
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

    /// A slab that nobody uses any more, or a new one while the bound allows.
    fn next_slab(&mut self, may: usize) -> Result<Option<Buf>, ()> {
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

    /// Frees the slabs that nothing is in, but for the one that is being received into.
    pub(super) fn trim(&mut self) {
        self.resting.retain(|slab| !slab.is_unique());
        self.resting_bytes = self.resting.iter().map(Buf::slab_len).sum();
    }

    /// True while a long payload has arrived in part.
    pub(super) fn is_midway(&self) -> bool {
        self.long.is_some()
    }

    /// Takes the memory back from the ring, with `n` bytes received into it.
    pub(super) fn arrived(&mut self, n: usize, mut data: Segments) {
        let mut n = n;
        let full = n == self.asked;
        self.asked = 0;
        let Some(last) = data.pop() else { return };
        let slab = match self.long.as_mut().filter(|l| l.front.is_some() && l.rest.is_none()) {
            Some(long) => {
                // The payload's own buffer, and behind it the part of the slab, if there was one.
                let (mut rest, slab) = match data.pop() {
                    Some(first) => (first, Some(last)),
                    None => (last, None),
                };
                let got = n.min(rest.len());
                n -= got;
                long.missing -= got;
                if let Some(front) = &mut long.front {
                    join(front, rest.split_to(got));
                }
                if rest.is_empty() {
                    // First of all the empty rest: a full piece is the only one of its slab.
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
    pub(super) fn clear(&mut self, pool: &mut BufPool) {
        self.unread = None;
        self.skip = 0;
        if let Some(LongPayload { mut data, front, rest, .. }) = self.long.take() {
            front.into_iter().chain(rest).for_each(|piece| data.push(piece));
            recycle(data, pool);
        }
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
