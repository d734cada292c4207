//! A simulated disk: what it holds, what its cache holds, and what is left of both after a crash.
//!
//! A sector is kept as one number, its *stamp*: the eight bytes that fill all of it. The workload
//! writes no others, so one of other content that arrives was mixed up on its way. A disk for logs
//! is given others: it keeps their bytes aside, and a stamp that says where.

use crate::null_cache::NullCache;
use crate::rng::SimRng;
use std::collections::VecDeque;
use std::sync::Arc;
use udm_core::{SharedDiskState, Status};

/// Stamps with this bit are what the disk itself made up: first content, or what a discard left
/// behind.
pub const OWN: u64 = 1 << 63;

/// Stamps with this bit and [`OWN`] stand for bytes that are kept aside, on a disk for logs.
const ASIDE: u64 = 1 << 61;

/// A write in the cache.
struct CachedWrite {
    sector: u32,
    stamp: u64,
    /// Which write to this disk it was; later ones win.
    nr: u64,
}

/// How many sectors the cache holds. A full one writes its oldest back.
const CACHE_MAX: usize = 2048;

/// The medium with its volatile cache.
pub struct SimDisk {
    /// What a read returns.
    now: Vec<u64>,
    /// What survives a crash, with the number of the write that put it there.
    durable: Vec<(u64, u64)>,
    cache: VecDeque<CachedWrite>,
    nr: u64,
    /// It keeps what it holds in the memory and the cache of a null device.
    pub(crate) null: Option<NullCache>,
    /// What its paths share.
    pub shared_disk_state: Arc<SharedDiskState>,
    /// For a log: takes any content.
    pub log: bool,
    /// A target above changes bytes of what is written, or did.
    pub tainted: bool,
    /// Sectors that are not full of one number.
    aside: Vec<Box<[u8]>>,
    /// Has a volatile cache.
    pub volatile: bool,
    /// Honours FUA; otherwise the flag is ignored, as the limits say.
    pub fua: bool,
    /// Sectors that it shows; it may grow to all that it has.
    pub size: u64,
    /// Sectors by which it grows when it is asked to; 0 for one that does not.
    pub growth: u64,
    /// To so many at the most.
    pub growth_max: u64,
    /// It could not grow the last time.
    pub stuck: bool,
    /// Growth that is not durable: the number of the last write before it, and the size.
    grown: Vec<(u64, u64)>,
    /// Sectors in a block: ranges are whole blocks.
    pub block: u64,
    /// Writes fail.
    pub read_only: bool,
    /// It was read-only at some time since the power came on: tables above may still go by that.
    pub was_read_only: bool,
    /// Longest read or write, longest discard, longest write-zeroes, in sectors.
    pub max: [u64; 3],
    /// The same, the least and the most that they were since the power came on: tables above go by
    /// one of them.
    pub max_range: [(u64, u64); 3],
    /// One request in so many fails for the disk's own reasons; 0 for never.
    pub error_one_in: u64,
    /// When (step) each status was last returned for a reason of the disk's own, by status code.
    pub blamed: [Option<u64>; Status::ALL.len()],
    /// When (step) a device in front of this disk had no usable path and was not told to wait for
    /// one.
    pub no_path: Option<u64>,
    /// When (step) a target in front of this disk last failed requests at will.
    pub flaky: Option<u64>,
}

impl SimDisk {
    /// A disk of `sectors`, each with a stamp of its own; `index` tells disks apart.
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

    /// What sector `sector` of disk `index` holds before anything is written.
    #[must_use]
    pub fn first_stamp(index: usize, sector: u64) -> u64 {
        OWN | (index as u64) << 40 | sector
    }

    /// From now on it is the memory and the cache of a null device, with room for so many pages.
    pub(crate) fn behind_null(&mut self, pages: u64) {
        let null = NullCache::new(self.sectors(), pages);
        self.now.iter().zip(0..).for_each(|(stamp, sector)| null.write(sector, *stamp, true));
        self.null = Some(null);
    }

    /// Makes `sector` zero, for good.
    pub fn blank(&mut self, sector: u64) {
        self.write(sector, 0, true);
    }

    /// Changes the limits on length.
    pub fn set_max(&mut self, max: [u64; 3]) {
        self.max = max;
        for (range, now) in self.max_range.iter_mut().zip(max) {
            *range = (range.0.min(now), range.1.max(now));
        }
    }

    /// Makes it read-only, or writable.
    pub fn set_read_only(&mut self, on: bool) {
        self.read_only = on;
        self.was_read_only |= on;
    }

    /// The power comes on: only what is so now counts.
    pub fn start(&mut self) {
        (self.no_path, self.flaky, self.stuck) = (None, None, false);
        self.max_range = self.max.map(|max| (max, max));
        self.was_read_only = self.read_only;
    }

    /// The longest request for `op` that a table above may think it takes.
    #[must_use]
    pub fn most(&self, op: udm_core::Op) -> u64 {
        match op {
            udm_core::Op::Read | udm_core::Op::Write => self.max_range[0].1,
            udm_core::Op::Discard => self.max_range[1].1,
            udm_core::Op::WriteZeroes => self.max_range[2].1,
            udm_core::Op::Flush => u64::MAX,
        }
    }

    /// Size in sectors.
    #[must_use]
    pub fn sectors(&self) -> u64 {
        self.now.len() as u64
    }

    /// What a read of `sector` returns.
    #[must_use]
    pub fn read(&self, sector: u64) -> u64 {
        let now = self.now.get(sector as usize).copied().unwrap_or(0);
        self.null.as_ref().map_or(now, |null| null.read(sector))
    }

    /// True when `sector` holds `stamp`, or may after a power cut.
    #[must_use]
    pub fn has(&self, sector: u64, stamp: u64) -> bool {
        self.contents(sector).any(|content| content == stamp)
    }

    /// What `sector` holds, or may after a power cut.
    pub fn contents(&self, sector: u64) -> impl Iterator<Item = u64> + '_ {
        let cached = self.cache.iter().filter(move |c| u64::from(c.sector) == sector).map(|c| c.stamp);
        [self.read(sector), self.durable[sector as usize].0].into_iter().chain(cached)
    }

    /// The bytes of `sector` of a log: what a read returns, or what a power cut is sure to leave.
    #[must_use]
    pub fn bytes(&self, sector: u64, durable: bool) -> Vec<u8> {
        let at = sector as usize;
        let stamp = if durable { self.durable[at].0 } else { self.now[at] };
        match stamp & (OWN | ASIDE) == OWN | ASIDE {
            true => self.aside[(stamp & 0xffff_ffff) as usize].to_vec(),
            false => stamp.to_le_bytes().repeat(64),
        }
    }

    /// The bytes of `sector`, where they are more than its stamp.
    #[must_use]
    pub fn nonuniform_bytes(&self, sector: u64) -> Option<&[u8]> {
        let stamp = self.read(sector);
        let aside = (self.tainted || self.log) && stamp & (OWN | ASIDE | 1 << 62) == OWN | ASIDE;
        aside.then(|| &*self.aside[(stamp & 0xffff_ffff) as usize])
    }

    /// The stamp for the bytes of a sector: one number, or where they are kept. `None` when this
    /// disk keeps no such bytes.
    pub fn stamp(&mut self, bytes: &[u8]) -> Option<u64> {
        crate::stamp::of(bytes).or_else(|| {
            let keep = self.log || (self.tainted && crate::stamp::almost_of(bytes).is_some());
            keep.then(|| {
                self.aside.push(bytes.into());
                OWN | ASIDE | (self.aside.len() as u64 - 1)
            })
        })
    }

    /// Writes one sector; `durable` at once (FUA, or a disk without a cache), or into the cache.
    pub fn write(&mut self, sector: u64, stamp: u64, durable: bool) {
        self.nr += 1;
        self.now[sector as usize] = stamp;
        if let Some(null) = &self.null {
            null.write(sector, stamp, durable || !self.volatile);
        }
        if durable || !self.volatile {
            self.durable[sector as usize] = (stamp, self.nr);
            // What is there can be had: so is the size that it needs.
            self.grown.retain(|(_, before)| sector < *before);
            return;
        }
        while self.cache.len() >= CACHE_MAX {
            let Some(oldest) = self.cache.pop_front() else { break };
            self.keep(&oldest);
        }
        self.cache.push_back(CachedWrite { sector: sector as u32, stamp, nr: self.nr });
    }

    /// What a discard leaves in `sector`: the old content, zeroes, or anything.
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

    /// The number of the last write so far: what a flush that arrives now must cover.
    #[must_use]
    pub fn mark(&self) -> u64 {
        self.nr
    }

    /// Makes all writes up to `mark` durable. Later ones stay in the cache: a flush promises
    /// nothing about them.
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

    /// Loses power: of what the cache holds, any part may have reached the medium, sector by
    /// sector.
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
            // The dice are not thrown for it: what it has lost, it has lost.
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

    /// Shows so many sectors, for good.
    pub fn show(&mut self, size: u64) {
        self.stuck = false;
        self.size = size;
        self.grown.clear();
    }

    /// Shows more sectors, which a power cut may undo.
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
