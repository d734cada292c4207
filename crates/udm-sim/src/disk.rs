//! A simulated disk: its content, its volatile cache, and the effect of a crash on both.
//!
//! A sector is stored as one number, its *stamp*: eight bytes that are repeated over the sector.
//! The workload writes only stamps, so other content means that data was mixed up. A log disk
//! accepts any content: it stores the bytes separately, with a stamp that refers to them.

use crate::null_cache::NullDeviceMemory;
use crate::rng::SimRng;
use std::collections::VecDeque;
use std::sync::Arc;
use udm_core::{SharedDiskState, Status};

/// Bit of stamps that the disk made itself: initial content, or content after a discard.
pub const OWN: u64 = 1 << 63;

/// Bit that, together with [`OWN`], marks a stamp that refers to separately stored bytes of a log
/// disk.
const ASIDE: u64 = 1 << 61;

/// A write in the cache.
struct CachedWrite {
    sector: u32,
    stamp: u64,
    /// Number of this write on the disk; later writes replace earlier ones.
    nr: u64,
}

/// Capacity of the cache in sectors. A full cache writes back its oldest sector.
const CACHE_MAX: usize = 2048;

/// The medium with its volatile cache.
pub struct SimDisk {
    /// The content that reads return.
    now: Vec<u64>,
    /// The content that survives a crash, with the number of the write that stored it.
    durable: Vec<(u64, u64)>,
    cache: VecDeque<CachedWrite>,
    nr: u64,
    /// Memory and cache of a null device, if the disk uses one.
    pub(crate) null: Option<NullDeviceMemory>,
    /// State shared by all paths to the disk.
    pub shared_disk_state: Arc<SharedDiskState>,
    /// True for a log disk, which accepts any content.
    pub log: bool,
    /// True if a target above changes bytes of writes, or did so before.
    pub tainted: bool,
    /// Bytes of sectors that are not one repeated number.
    aside: Vec<Box<[u8]>>,
    /// True if the disk has a volatile cache.
    pub volatile: bool,
    /// True if the disk honours FUA; otherwise it ignores the flag, as its limits say.
    pub fua: bool,
    /// Sectors that the disk shows. It may grow to all that it has.
    pub size: u64,
    /// Sectors per step of growth; 0 if the disk cannot grow.
    pub growth: u64,
    /// Maximum size by growth, in sectors.
    pub growth_max: u64,
    /// True if the last attempt to grow failed.
    pub stuck: bool,
    /// Growth that is not durable: the number of the last write before it, and the size.
    grown: Vec<(u64, u64)>,
    /// Sectors per block. Ranges must be whole blocks.
    pub block: u64,
    /// True if queries show blank sectors as holes.
    pub shows_holes: bool,
    /// True if writes fail.
    pub read_only: bool,
    /// True if the disk was read-only at some time since power-on. Tables above may still use that
    /// limit.
    pub was_read_only: bool,
    /// Longest read or write, longest discard, longest write-zeroes, in sectors.
    pub max: [u64; 3],
    /// Minimum and maximum of each limit in `max` since power-on. Each table above uses a value in
    /// this range.
    pub max_range: [(u64, u64); 3],
    /// One of this many requests fails for a reason of the disk; 0 for none.
    pub error_one_in: u64,
    /// Step in which the disk last returned each status for a reason of its own, by status code.
    pub blamed: [Option<u64>; Status::ALL.len()],
    /// Step in which a device above last had no usable path and did not queue requests.
    pub no_path: Option<u64>,
    /// Step in which a target above last injected errors.
    pub flaky: Option<u64>,
}

impl SimDisk {
    /// Creates a disk of `sectors` sectors, each with its own stamp. `index` makes the stamps of
    /// disks distinct.
    #[must_use]
    pub fn new(index: usize, sectors: u64) -> SimDisk {
        let first: Vec<u64> = (0..sectors).map(|s| SimDisk::first_stamp(index, s)).collect();
        SimDisk {
            durable: first.iter().map(|s| (*s, 0)).collect(),
            now: first,
            cache: VecDeque::with_capacity(CACHE_MAX),
            nr: 0,
            null: None,
            shared_disk_state: Arc::default(),
            log: false,
            tainted: false,
            aside: Vec::new(),
            volatile: true,
            fua: true,
            size: sectors,
            growth: 0,
            growth_max: 0,
            stuck: false,
            grown: Vec::new(),
            block: 1,
            shows_holes: false,
            read_only: false,
            was_read_only: false,
            max: [u64::from(u32::MAX); 3],
            max_range: [(u64::from(u32::MAX), u64::from(u32::MAX)); 3],
            error_one_in: 0,
            blamed: [None; Status::ALL.len()],
            no_path: None,
            flaky: None,
        }
    }

    /// Returns the initial stamp of `sector` of disk `index`.
    #[must_use]
    pub fn first_stamp(index: usize, sector: u64) -> u64 {
        OWN | (index as u64) << 40 | sector
    }

    /// Moves the content into the memory and cache of a null device, with a cache of `pages` pages.
    pub(crate) fn behind_null(&mut self, pages: u64) {
        let null = NullDeviceMemory::new(self.sectors(), pages);
        self.now.iter().zip(0..).for_each(|(stamp, sector)| null.write(sector, *stamp, true));
        self.null = Some(null);
    }

    /// Makes `sector` durably zero.
    pub fn blank(&mut self, sector: u64) {
        self.write(sector, 0, true);
    }

    /// True if `sector` has zeroes, and will have after a power cut.
    #[must_use]
    pub fn is_blank(&self, sector: u64) -> bool {
        self.contents(sector).all(|stamp| stamp == 0)
    }

    /// Changes the length limits.
    pub fn set_max(&mut self, max: [u64; 3]) {
        self.max = max;
        for (range, now) in self.max_range.iter_mut().zip(max) {
            *range = (range.0.min(now), range.1.max(now));
        }
    }

    /// Makes the disk read-only or writable.
    pub fn set_read_only(&mut self, on: bool) {
        self.read_only = on;
        self.was_read_only |= on;
    }

    /// Resets the histories at power-on: only the present state counts.
    pub fn start(&mut self) {
        (self.no_path, self.flaky, self.stuck) = (None, None, false);
        self.max_range = self.max.map(|max| (max, max));
        self.was_read_only = self.read_only;
    }

    /// Returns the longest request for `op` that a table above may consider allowed.
    #[must_use]
    pub fn most(&self, op: udm_core::Op) -> u64 {
        match op {
            udm_core::Op::Read | udm_core::Op::Write => self.max_range[0].1,
            udm_core::Op::Discard => self.max_range[1].1,
            udm_core::Op::WriteZeroes => self.max_range[2].1,
            udm_core::Op::Flush => u64::MAX,
        }
    }

    /// Total size in sectors.
    #[must_use]
    pub fn sectors(&self) -> u64 {
        self.now.len() as u64
    }

    /// Returns the stamp that a read of `sector` returns.
    #[must_use]
    pub fn read(&self, sector: u64) -> u64 {
        let now = self.now.get(sector as usize).copied().unwrap_or(0);
        self.null.as_ref().map_or(now, |null| null.read(sector))
    }

    /// True if `sector` holds `stamp`, or may hold it after a power cut.
    #[must_use]
    pub fn has(&self, sector: u64, stamp: u64) -> bool {
        self.contents(sector).any(|content| content == stamp)
    }

    /// All stamps that `sector` holds or may hold after a power cut.
    pub fn contents(&self, sector: u64) -> impl Iterator<Item = u64> + '_ {
        let cached = self.cache.iter().filter(move |c| u64::from(c.sector) == sector).map(|c| c.stamp);
        [self.read(sector), self.durable[sector as usize].0].into_iter().chain(cached)
    }

    /// Returns the bytes of `sector` of a log disk: the current ones, or the durable ones.
    #[must_use]
    pub fn bytes(&self, sector: u64, durable: bool) -> Vec<u8> {
        let at = sector as usize;
        let stamp = if durable { self.durable[at].0 } else { self.now[at] };
        match stamp & (OWN | ASIDE) == OWN | ASIDE {
            true => self.aside[(stamp & 0xffff_ffff) as usize].to_vec(),
            false => stamp.to_le_bytes().repeat(64),
        }
    }

    /// Returns the bytes of `sector` if they are not one repeated stamp.
    #[must_use]
    pub fn nonuniform_bytes(&self, sector: u64) -> Option<&[u8]> {
        let stamp = self.read(sector);
        let aside = (self.tainted || self.log) && stamp & (OWN | ASIDE | 1 << 62) == OWN | ASIDE;
        aside.then(|| &*self.aside[(stamp & 0xffff_ffff) as usize])
    }

    /// Returns the stamp for the bytes of a sector: the repeated number, or a reference to stored
    /// bytes. Returns `None` if the disk does not store such bytes.
    pub fn stamp(&mut self, bytes: &[u8]) -> Option<u64> {
        crate::stamp::read_sector_stamp(bytes).or_else(|| {
            let keep = self.log || (self.tainted && crate::stamp::read_damaged_sector_stamp(bytes).is_some());
            keep.then(|| {
                self.aside.push(bytes.into());
                OWN | ASIDE | (self.aside.len() as u64 - 1)
            })
        })
    }

    /// Writes one sector: durably (FUA, or no cache) or into the cache.
    pub fn write(&mut self, sector: u64, stamp: u64, durable: bool) {
        self.nr += 1;
        self.now[sector as usize] = stamp;
        if let Some(null) = &self.null {
            null.write(sector, stamp, durable || !self.volatile);
        }
        if durable || !self.volatile {
            self.durable[sector as usize] = (stamp, self.nr);
            // A durable sector implies that the size needed for it is durable.
            self.grown.retain(|(_, before)| sector < *before);
            return;
        }
        while self.cache.len() >= CACHE_MAX {
            let Some(oldest) = self.cache.pop_front() else { break };
            self.keep(&oldest);
        }
        self.cache.push_back(CachedWrite { sector: sector as u32, stamp, nr: self.nr });
    }

    /// Discards `sector`: it keeps its content, becomes zero, or gets random content.
    pub fn discard(&mut self, sector: u64, chance: &mut SimRng) {
        let stamp = match chance.below(3) {
            0 => return,
            1 => 0,
            _ => OWN | 1 << 62 | chance.below(1 << 32),
        };
        self.write(sector, stamp, false);
    }

    fn keep(&mut self, cached: &CachedWrite) {
        let slot = &mut self.durable[cached.sector as usize];
        if slot.1 < cached.nr {
            *slot = (cached.stamp, cached.nr);
        }
    }

    /// Number of the last write. A flush that arrives now must cover all writes up to it.
    #[must_use]
    pub fn mark(&self) -> u64 {
        self.nr
    }

    /// Makes all writes up to `mark` durable. Later writes may stay in the cache.
    pub fn flush(&mut self, mark: u64) {
        self.grown.retain(|(nr, _)| *nr > mark);
        if let Some(null) = &self.null {
            null.flush();
        }
        while self.cache.front().is_some_and(|c| c.nr <= mark) {
            if let Some(c) = self.cache.pop_front() {
                self.keep(&c);
            }
        }
    }

    /// Loses power. Each cached sector has reached the medium or is lost, by chance.
    pub fn crash(&mut self, chance: &mut SimRng) {
        let luck = chance.pick(&[0, 20, 50, 80, 100]);
        let cache = std::mem::take(&mut self.cache);
        for c in &cache {
            if chance.below(100) < luck {
                self.keep(c);
            }
        }
        for c in &cache {
            self.now[c.sector as usize] = self.durable[c.sector as usize].0;
        }
        self.cache = cache;
        self.cache.clear();
        if let Some(null) = &self.null {
            // The null device decides itself which cached data it loses.
            null.cycle();
            for sector in 0..self.now.len() {
                let stamp = null.read(sector as u64);
                (self.now[sector], self.durable[sector]) = (stamp, (stamp, self.nr));
            }
        }
        if !self.grown.is_empty() && chance.one_in(2) {
            let lost = chance.below(self.grown.len() as u64) as usize;
            self.size = self.grown[lost].1;
            for sector in self.size as usize..self.now.len() {
                (self.now[sector], self.durable[sector]) = (0, (0, self.nr));
            }
        }
        self.grown.clear();
    }

    /// Sets the shown size durably.
    pub fn show(&mut self, size: u64) {
        self.stuck = false;
        self.size = size;
        self.grown.clear();
    }

    /// Increases the shown size. A power cut may undo the growth.
    pub fn grow(&mut self, size: u64) {
        self.stuck = false;
        let size = size.min(self.sectors());
        if size > self.size {
            self.nr += 1;
            self.grown.push((self.nr, self.size));
            self.size = size;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::RngStream;

    #[test]
    fn a_crash_keeps_what_was_flushed() {
        for seed in 0..50 {
            let mut chance = SimRng::new(seed, RngStream::Disks);
            let mut disk = SimDisk::new(0, 8);
            disk.write(1, 11, false);
            let mark = disk.mark();
            disk.write(1, 12, false);
            disk.write(2, 22, true);
            disk.write(3, 33, false);
            disk.flush(mark);
            disk.crash(&mut chance);
            assert!([11, 12].contains(&disk.read(1)));
            assert_eq!(disk.read(2), 22);
            assert!([33, SimDisk::first_stamp(0, 3)].contains(&disk.read(3)));
            assert_eq!(disk.read(4), SimDisk::first_stamp(0, 4));
        }
    }

    #[test]
    fn a_full_cache_never_brings_an_old_sector_back() {
        let mut disk = SimDisk::new(0, 4);
        disk.write(0, 1, false);
        disk.write(0, 2, true);
        for _ in 0..2 * CACHE_MAX {
            disk.write(1, 9, false);
        }
        disk.crash(&mut SimRng::new(1, RngStream::Disks));
        assert_eq!(disk.read(0), 2);
    }
}
