//! A front end for a process that shares memory. Requests are in a table in the memory, and their
//! data lies where the request says. A byte on a socket is the notification.
//!
//! The first page holds 64-bit words: the number of requests ([`TAIL`]), and [`SLOTS`] entries of
//! [`ENTRY`] words. The words of an entry are operation, sector, sectors, byte offset of the data,
//! and result (errno and [`DONE`]).
//!
//! The other process can change all of this memory at any time. So each word is read once and
//! checked. An invalid request ends with EINVAL, an inconsistent table ends the connection.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use udm_core::errno::EINVAL;
use udm_core::{
    Batch, Bio, BioTaskLaneId, Buf, Device, Limits, Op, SECTOR_SIZE, Sector, Sectors, Segments,
    SharedMemoryMap, SharedRange,
};
use udm_runtime::{FrontCx, FrontEnd, RingCompletion, RingOp};

/// Offset of the number of requests in words. `TABLE` is the offset of the entries.
pub const TAIL: usize = 0;
pub const TABLE: usize = 8;
pub const ENTRY: usize = 8;
pub const SLOTS: u64 = 32;
pub const DONE: u64 = 1 << 32;
/// Offset of the data area in bytes.
pub const DATA: usize = 4096;

const RECV: u64 = 0;

/// A front end that serves requests from shared memory.
pub struct SharedMemoryFrontEnd {
    map: Arc<SharedMemoryMap>,
    fd: Arc<OwnedFd>,
    device: Arc<dyn Device>,
    limits: Limits,
    slot: Option<BioTaskLaneId>,
    /// A bio per entry, whose data is set for each request; `None` while it is in flight.
    bios: Vec<Option<Box<Bio>>>,
    taken: u64,
    in_flight: usize,
    receiving: bool,
    sending: bool,
    /// A request ended, and the other side has not been notified.
    untold: bool,
    over: bool,
    ops: Vec<RingCompletion>,
}

impl SharedMemoryFrontEnd {
    pub fn new(map: Arc<SharedMemoryMap>, fd: OwnedFd, device: Arc<dyn Device>) -> SharedMemoryFrontEnd {
        let bios = (0..SLOTS).map(|_| {
            let mut bio = Bio::new();
            bio.data = SharedRange::new(&map, DATA, 0).expect("an empty range").into();
            Some(bio)
        });
        let (bios, limits) = (bios.collect(), device.limits());
        let fd = Arc::new(fd);
        SharedMemoryFrontEnd {
            map,
            fd,
            device,
            limits,
            slot: None,
            bios,
            taken: 0,
            in_flight: 0,
            receiving: false,
            sending: false,
            untold: false,
            over: false,
            ops: Vec::new(),
        }
    }

    /// Takes the new requests.
    fn take(&mut self, cx: &mut FrontCx<'_, '_>) {
        let tail = self.map.words()[TAIL].load(Acquire);
        // More than there are entries, or less than were taken.
        if tail.wrapping_sub(self.taken) > SLOTS {
            self.over = true;
        }
        while !self.over && self.taken != tail {
            let i = (self.taken % SLOTS) as usize;
            // The entry was reused while its request was in flight.
            let Some(mut bio) = self.bios[i].take() else {
                self.over = true;
                return;
            };
            self.taken += 1;
            match (self.read(i, &mut bio), self.slot) {
                (Ok(()), Some(slot)) => {
                    bio.cookie = i as u64;
                    self.in_flight += 1;
                    cx.submit(slot, bio);
                }
                _ => {
                    self.bios[i] = Some(bio);
                    self.end(i, EINVAL);
                }
            }
        }
    }

    /// Sets `bio` to the request of entry `i`.
    fn read(&self, i: usize, bio: &mut Bio) -> Result<(), ()> {
        let words = &self.map.words()[TABLE + i * ENTRY..][..ENTRY];
        let [op, sector, sectors, at] = [0, 1, 2, 3].map(|word| words[word].load(Relaxed));
        let op = usize::try_from(op).ok().and_then(|op| Op::ALL.get(op)).ok_or(())?;
        let block = u64::from(self.limits.logical_block) / SECTOR_SIZE;
        let fits = match op {
            Op::Flush => sector == 0 && sectors == 0,
            _ => {
                let end = sector.checked_add(sectors).ok_or(())?;
                sectors > 0 && end <= self.limits.size.0 && sector % block == 0 && sectors % block == 0
            }
        };
        let max = match op {
            Op::Discard => self.limits.max_discard,
            Op::WriteZeroes => self.limits.max_write_zeroes,
            _ if self.limits.max_sectors == Sectors::ZERO => Sectors(1 << 20),
            _ => self.limits.max_sectors,
        };
        if !fits || sectors > max.0 || (op.is_write() && self.limits.read_only) {
            return Err(());
        }
        let len = if op.has_data() { sectors * SECTOR_SIZE } else { 0 };
        bio.data.retarget(usize::try_from(at).map_err(|_| ())?, len as usize).map_err(|_| ())?;
        (bio.op, bio.sector, bio.sectors) = (*op, Sector(sector), Sectors(sectors));
        Ok(())
    }

    fn end(&mut self, i: usize, errno: i32) {
        self.map.words()[TABLE + i * ENTRY + 4].store(DONE | errno as u64, Release);
        self.untold = true;
    }

    /// Receives and sends notifications, if necessary.
    fn go_on(&mut self, cx: &mut FrontCx<'_, '_>) {
        if !self.over && !self.receiving {
            self.receiving = true;
            cx.push(RECV, RingOp::Recv { fd: self.fd.clone(), data: Buf::zeroed(64).into() });
        }
        if !self.over && self.untold && !self.sending {
            (self.untold, self.sending) = (false, true);
            cx.push(
                1,
                RingOp::Send { fd: self.fd.clone(), data: Segments::from(Buf::zeroed(1)), whole: true },
            );
        }
        if self.over {
            let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
            if self.in_flight == 0
                && let Some(slot) = self.slot.take()
            {
                cx.close(slot);
            }
        }
    }
}

impl FrontEnd for SharedMemoryFrontEnd {
    fn gather(&mut self, cx: &mut FrontCx<'_, '_>) {
        if self.slot.is_none() && !self.over {
            self.slot = cx.open(&self.device).ok();
            self.over = self.slot.is_none();
        }
        cx.take(&mut self.ops);
        for done in std::mem::take(&mut self.ops) {
            match done.tag {
                RECV => self.receiving = false,
                _ => self.sending = false,
            }
            self.over |= !done.result.is_ok_and(|n| n > 0);
        }
        self.take(cx);
        self.go_on(cx);
    }

    fn complete(&mut self, done: &mut Batch, cx: &mut FrontCx<'_, '_>) {
        for bio in done.drain(..) {
            let (i, errno) = (bio.cookie as usize, bio.status.errno());
            self.in_flight -= 1;
            // This must happen before the other side is notified and reuses the entry.
            self.bios[i] = Some(bio);
            self.end(i, errno);
        }
        self.go_on(cx);
    }

    fn stop(&mut self, cx: &mut FrontCx<'_, '_>) {
        self.over = true;
        self.go_on(cx);
    }

    fn is_closed(&self) -> bool {
        self.over && self.in_flight == 0 && self.slot.is_none() && !self.receiving && !self.sending
    }
}
