//! A volatile cache in front of memory: null_blk's `cache_size`, which a power cut empties.
//!
//! Written data is at first only in the cache, by sector in pages of 4 KiB. A flush writes all
//! pages back. A write to a full cache writes one page back: the next after the page that was last
//! written back for this reason, by position, as in null_blk. FUA writes, discards and zeroes go to
//! the memory, and the cached data of their range is dropped. Reads look into the cache first.
//!
//! A flush is one pass over the device. The pass reaches each page that was cached when it began; a
//! page that is cached after the pass went by is newer than the flush. So a flush ends even if
//! others keep writing.
//!
//! **Power.** Without power every request fails. A request that was partly served when the power
//! was cut also fails after power returns: a flush would miss lost pages, and a write its first
//! part.
//!
//! *Price.* One lock per piece of a request (128 KiB at most); null_blk takes one per request. One
//! allocation per page that is new in the cache. Only devices with `cache_size` pay this.

use crate::mem::SparseMemory;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use udm_core::{
    Bio, BioFlags, BioProgress, DeviceControlError, Op, PowerSwitch, SECTOR_SIZE, SLICE_MAX, Status,
};
use zerocopy::FromZeros;

/// Bytes of a page.
pub(crate) const CACHE_PAGE: u64 = 4096;
const PAGE: u64 = CACHE_PAGE;

/// Cost of the search for the next page, in bytes touched.
const LOOK: u64 = 64;

/// Memory with a volatile write cache in front of it.
pub struct CachedMemory {
    pub(crate) store: Arc<SparseMemory>,
    /// Upper limit of cached pages.
    most: usize,
    cache: Mutex<WriteCache>,
}

struct WriteCache {
    pages: BTreeMap<u64, CachePage>,
    /// Index after the page that was last written back to make room.
    next: u64,
    is_on: bool,
    /// Number of power cuts.
    cuts: u64,
}

struct CachePage {
    bytes: Box<[u8]>,
    /// One bit per sector: set if the page holds its data.
    has: u8,
}

impl CachePage {
    /// The sectors that the page holds, as byte ranges of the page.
    fn sectors(&self) -> impl Iterator<Item = Range<usize>> {
        let has = self.has;
        let range = |i: usize| i * SECTOR_SIZE as usize..(i + 1) * SECTOR_SIZE as usize;
        (0..8).filter(move |i| has & 1 << i != 0).map(range)
    }
}

/// Bits of the sectors of page `index` that the byte range `range` touches.
fn page_sector_mask(index: u64, range: &Range<u64>) -> u8 {
    let base = index * PAGE;
    let first = range.start.saturating_sub(base) / SECTOR_SIZE;
    let end = range.end.saturating_sub(base).min(PAGE).div_ceil(SECTOR_SIZE);
    (first..end).fold(0, |bits, i| bits | 1 << i)
}

impl CachedMemory {
    /// Creates memory of `size` bytes with a cache of `pages` pages. The power is on.
    ///
    /// # Errors
    /// EINVAL for a size that no memory device has.
    pub fn new(size: u64, pages: u64) -> Result<CachedMemory, DeviceControlError> {
        let most = usize::try_from(pages).unwrap_or(usize::MAX).max(1);
        let cache = WriteCache { pages: BTreeMap::new(), next: 0, is_on: true, cuts: 0 };
        Ok(CachedMemory { store: Arc::new(SparseMemory::new(size)?), most, cache: Mutex::new(cache) })
    }

    /// Locks the cache. The lock is held for one piece of a request.
    fn lock(&self) -> MutexGuard<'_, WriteCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether a part of `range` may be in the cache. Without power this is always true.
    pub(crate) fn has(&self, range: &Range<u64>) -> bool {
        let cache = self.lock();
        !cache.is_on || cache.over(range).next().is_some()
    }

    /// Returns the number of bytes that the flush of `bio` passes over; 0 without a flush.
    fn pass(&self, bio: &Bio) -> u64 {
        let before = bio.op.is_write() && bio.flags.contains(BioFlags::PREFLUSH);
        let flushes = bio.op == Op::Flush || before;
        if flushes { self.store.size.bytes() } else { 0 }
    }

    /// Upper bound of the cost of a request, in bytes touched. A flush may be long.
    pub(crate) fn cost(&self, bio: &Bio) -> u64 {
        // A write may write back as many pages as it adds.
        if self.pass(bio) > 0 { SLICE_MAX + 1 } else { SparseMemory::cost(bio).saturating_mul(2) }
    }

    /// Number of bytes by which the progress of a request is counted: its pass over the device,
    /// plus its range.
    #[must_use]
    pub fn length(&self, bio: &Bio) -> u64 {
        self.pass(bio).saturating_add(bio.sectors.0.saturating_mul(SECTOR_SIZE))
    }

    /// Serves a part of one request.
    pub fn serve(&self, bio: &mut Bio, part: &mut BioProgress) -> Status {
        let cache = &mut *self.lock();
        if part.done == 0 {
            part.mark = cache.cuts;
        }
        if !cache.is_on || part.mark != cache.cuts {
            return Status::IoErr;
        }
        if bio.op != Op::Flush
            && let Some(status) = crate::invalid_bio_status(bio, self.store.size)
        {
            return status;
        }
        let pass = self.pass(bio);
        if part.done < pass
            && let Err(status) = self.write_back(cache, pass, part)
        {
            return status;
        }
        if part.done < pass || part.is_done() || part.left == 0 {
            return Status::Ok;
        }
        self.serve_range(cache, bio, pass, part).err().unwrap_or(Status::Ok)
    }

    /// Continues a flush pass of `pass` bytes.
    fn write_back(&self, cache: &mut WriteCache, pass: u64, part: &mut BioProgress) -> Result<(), Status> {
        while part.done < pass && part.left > 0 {
            let from = part.done.div_ceil(PAGE);
            let next = cache.pages.range(from..).next().map(|(index, _)| *index);
            let Some(index) = next.filter(|index| *index * PAGE < pass) else {
                part.advance_for(pass - part.done, LOOK);
                break;
            };
            let end = ((index + 1) * PAGE).min(pass);
            self.write_page(cache, index)?;
            part.advance_for(end - part.done, PAGE);
        }
        Ok(())
    }

    /// Writes a page back and removes it from the cache.
    fn write_page(&self, cache: &mut WriteCache, index: u64) -> Result<(), Status> {
        if let Some(page) = cache.pages.get(&index) {
            for range in page.sectors() {
                self.store.write(index * PAGE + range.start as u64, &page.bytes[range])?;
            }
        }
        cache.pages.remove(&index);
        Ok(())
    }

    /// Serves a part of the range of `bio`, after a flush pass of `pass` bytes. The part consists
    /// of whole sectors, because the cache holds whole sectors.
    fn serve_range(
        &self,
        cache: &mut WriteCache,
        bio: &mut Bio,
        pass: u64,
        part: &mut BioProgress,
    ) -> Result<(), Status> {
        let (start, from) = (bio.sector.bytes(), part.done - pass);
        let now = part.rest().min((part.left & !(SECTOR_SIZE - 1)).max(SECTOR_SIZE));
        let at = start + from;
        match bio.op {
            Op::Flush => {}
            Op::Read => {
                bio.data.produce(from as usize, now as usize, |done, piece| {
                    self.read(cache, at + done as u64, piece);
                });
                part.advance(now);
            }
            Op::Write => {
                let is_fua = bio.flags.contains(BioFlags::FUA);
                let (mut written, mut cost) = (Ok(()), now);
                bio.data.consume(from as usize, now as usize, |done, piece| {
                    let at = at + done as u64;
                    written = written.and_then(|()| match is_fua {
                        true => self.store.write(at, piece),
                        false => self.write(cache, at, piece, &mut cost),
                    });
                });
                written?;
                if is_fua {
                    cache.drop_range(&(at..at + now));
                }
                part.advance_for(now, cost);
            }
            Op::Discard | Op::WriteZeroes => {
                self.store.zero(start.wrapping_sub(pass), part);
                cache.drop_range(&(at..start + part.done - pass));
            }
        }
        Ok(())
    }

    fn read(&self, cache: &WriteCache, at: u64, out: &mut [u8]) {
        self.store.read(at, out);
        let range = at..at + out.len() as u64;
        for (index, page) in cache.over(&range) {
            for sector in page.sectors() {
                let base = index * PAGE;
                let from = (base + sector.start as u64).max(range.start);
                let end = (base + sector.end as u64).min(range.end);
                if from < end {
                    out[(from - at) as usize..(end - at) as usize]
                        .copy_from_slice(&page.bytes[(from - base) as usize..(end - base) as usize]);
                }
            }
        }
    }

    /// Copies `data` to byte `at` of the cache. Adds the bytes that were written back for it to
    /// `cost`.
    fn write(
        &self,
        cache: &mut WriteCache,
        mut at: u64,
        mut data: &[u8],
        cost: &mut u64,
    ) -> Result<(), Status> {
        while !data.is_empty() {
            let (index, within) = (at / PAGE, (at % PAGE) as usize);
            let (now, rest) = data.split_at(data.len().min(PAGE as usize - within));
            if !cache.pages.contains_key(&index) {
                *cost += self.make_room(cache)?;
                let bytes = <[u8]>::new_box_zeroed_with_elems(PAGE as usize).map_err(|_| Status::Resource)?;
                cache.pages.insert(index, CachePage { bytes, has: 0 });
            }
            if let Some(page) = cache.pages.get_mut(&index) {
                page.bytes[within..within + now.len()].copy_from_slice(now);
                page.has |= page_sector_mask(index, &(at..at + now.len() as u64));
            }
            at += now.len() as u64;
            data = rest;
        }
        Ok(())
    }

    /// Makes room for one more page. Returns the number of bytes that were written back.
    fn make_room(&self, cache: &mut WriteCache) -> Result<u64, Status> {
        let mut bytes = 0;
        while cache.pages.len() >= self.most {
            let behind = cache.pages.range(cache.next..).next();
            let Some((&index, _)) = behind.or_else(|| cache.pages.iter().next()) else { break };
            self.write_page(cache, index)?;
            cache.next = index + 1;
            bytes += PAGE;
        }
        Ok(bytes)
    }
}

impl WriteCache {
    /// The cached pages that hold a part of `range`.
    fn over(&self, range: &Range<u64>) -> impl Iterator<Item = (u64, &CachePage)> {
        let of_range = range.clone();
        let pages = self.pages.range(range.start / PAGE..range.end.div_ceil(PAGE).max(range.start / PAGE));
        pages.filter_map(move |(&i, page)| {
            (page.has & page_sector_mask(i, &of_range) != 0).then_some((i, page))
        })
    }

    /// Drops the sectors of `range` from the cache.
    fn drop_range(&mut self, range: &Range<u64>) {
        let (mut at, end) = (range.start / PAGE, range.end.div_ceil(PAGE));
        while at < end
            && let Some((&index, page)) = self.pages.range_mut(at..end).next()
        {
            page.has &= !page_sector_mask(index, range);
            if page.has == 0 {
                self.pages.remove(&index);
            }
            at = index + 1;
        }
    }
}

impl PowerSwitch for CachedMemory {
    fn is_on(&self) -> bool {
        self.lock().is_on
    }

    fn turn(&self, on: bool) {
        let mut cache = self.lock();
        let cuts = u64::from(cache.is_on && !on);
        (cache.is_on, cache.cuts) = (on, cache.cuts + cuts);
        let lost = if cuts > 0 { std::mem::take(&mut cache.pages) } else { BTreeMap::new() };
        drop(cache);
        // Memory is freed after the lock is released, so that no core waits for it.
        drop(lost);
    }
}

#[cfg(test)]
mod tests;
