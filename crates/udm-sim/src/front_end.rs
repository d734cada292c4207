//! Random requests of the front ends of all cores, and the memory of these requests.

use crate::machine::OpenLane;
use crate::plan::{DisturbanceClass, ExcludedDisturbances, RunPlan};
use crate::rng::{RngStream, SimRng};
use udm_core::{Batch, Bio, BioFlags, BufPool, Limits, Nanos, Op, Sector, Sectors, Segments};

/// Longest request in sectors. A stamp has ten bits for the sector within the request.
const LONGEST: u64 = 1000;

/// A device to which front ends send requests.
pub trait WorkloadDevice {
    /// Limits of the device.
    fn limits(&self) -> &Limits;
    /// Start of the region that requests currently prefer.
    fn hot(&self) -> u64;
    /// The next range of at most `most` sectors to read back.
    fn next_readback(&self, most: u64) -> Option<(u64, u64)>;
}

/// Generator of random requests for all cores.
pub struct WorkloadGenerator {
    chance: SimRng,
    without: ExcludedDisturbances,
    /// Maximum number of requests per core and device.
    depth: usize,
    /// Maximum number of requests per batch.
    burst: u64,
    /// Mean time between batches in ns.
    pause: u64,
    /// Percentage of reads.
    reads: u64,
    /// One of this many batches is followed by a long pause.
    naps: u64,
    bufs: BufPool,
    bios: Batch,
}

impl WorkloadGenerator {
    /// Creates the generator of `plan`.
    #[must_use]
    pub fn new(plan: &RunPlan, build: &mut SimRng) -> WorkloadGenerator {
        let depth = build.pick(&[1, 4, 16, 64]);
        let mut front = WorkloadGenerator {
            chance: SimRng::new(plan.seed, RngStream::Work),
            without: plan.without,
            depth: plan.depth.unwrap_or(depth).max(1),
            burst: build.pick(&[1, 4, 16, 32]),
            pause: build.pick(&[500, 5_000, 50_000, 1_000_000]),
            reads: build.pick(&[20, 50, 50, 80]),
            naps: build.pick(&[100, 1000, 10_000]),
            bufs: BufPool::new(16 << 20),
            bios: Batch::new(),
        };
        if plan.bench.is_some() {
            (front.burst, front.pause, front.reads, front.naps) = (32, 100, 50, 0);
            front.depth = plan.depth.unwrap_or(32);
        }
        front
    }

    /// Chooses the lane of the next batch, out of `lanes`.
    pub fn choose(&mut self, lanes: usize) -> usize {
        self.chance.below(lanes as u64) as usize
    }

    /// Returns the time of the next batch of a core.
    pub fn next(&mut self, now: Nanos) -> Nanos {
        match self.chance.one_in(self.naps) {
            true => now + Nanos(self.chance.between(1, 20_000) * 1_000_000),
            false => now + Nanos(self.chance.span(self.pause)),
        }
    }

    /// Draws a batch for `device`. If the world is `reading`, the batch only reads back data.
    pub fn draw(&mut self, batch: &mut Batch, open: &OpenLane, device: &impl WorkloadDevice, reading: bool) {
        let room = self.depth.saturating_sub(open.in_flight) as u64;
        let count = (1 + self.chance.below(self.burst)).min(room);
        for _ in 0..count {
            let Some(bio) = self.request(device, reading) else { break };
            batch.push(bio);
        }
    }

    /// Draws short reads of `device`.
    pub fn draw_reads(&mut self, batch: &mut Batch, count: usize, device: &impl WorkloadDevice) {
        let limits = device.limits();
        let block = u64::from(limits.logical_block) / udm_core::SECTOR_SIZE;
        for _ in 0..count {
            let mut bio = self.bios.pop().unwrap_or_default();
            let sector = self.chance.below(limits.size.0 / block) * block;
            self.fill(&mut bio, Op::Read, BioFlags::empty(), sector, block);
            batch.push(bio);
        }
    }

    fn request(&mut self, device: &impl WorkloadDevice, reading: bool) -> Option<Box<Bio>> {
        let mut bio = self.bios.pop().unwrap_or_default();
        let size = device.limits().size.0;
        if let Some((sector, len)) = device.next_readback(64) {
            // After a crash every sector is read back once.
            self.fill(&mut bio, Op::Read, BioFlags::empty(), sector, len);
            return Some(bio);
        }
        if reading {
            self.bios.push(bio);
            return None;
        }
        let (mut op, flags) = self.kind();
        let limits = device.limits();
        let (mut sector, mut len) = self.range(op, size, device.hot());
        let block = u64::from(limits.logical_block) / udm_core::SECTOR_SIZE;
        if self.wild() {
            // Invalid requests, which a target must refuse or tolerate.
            match self.chance.below(3) {
                0 => sector = (size - self.chance.below(len)).min(size),
                1 => sector = self.chance.any() >> 8,
                _ => {}
            }
        } else {
            len = len.next_multiple_of(block).min(size);
            sector = (sector - sector % block).min(size - len);
            if limits.check(op, Sector(sector), Sectors(len)).is_err() {
                op = Op::Read;
            }
        }
        match op {
            Op::Flush => self.fill(&mut bio, op, flags, 0, 0),
            Op::Read => self.fill(&mut bio, op, flags & (BioFlags::RAHEAD | BioFlags::NOWAIT), sector, len),
            _ => self.fill(&mut bio, op, flags, sector, len),
        }
        Some(bio)
    }

    fn wild(&mut self) -> bool {
        !self.without.has(DisturbanceClass::Wild) && self.chance.one_in(200)
    }

    fn kind(&mut self) -> (Op, BioFlags) {
        let c = &mut self.chance;
        let read = c.below(100) < self.reads;
        let op = match c.below(100) {
            0..5 if !self.without.has(DisturbanceClass::Flush) => Op::Flush,
            5..10 if !self.without.has(DisturbanceClass::Trim) => Op::Discard,
            10..15 if !self.without.has(DisturbanceClass::Trim) => Op::WriteZeroes,
            _ if read => Op::Read,
            _ => Op::Write,
        };
        let mut flags = BioFlags::empty();
        match (op, c.below(64)) {
            (Op::Read, 0) => flags |= BioFlags::RAHEAD,
            (Op::Read | Op::Write, 1) => flags |= BioFlags::NOWAIT,
            (Op::Read | Op::Write, 2) => flags |= BioFlags::META,
            (Op::WriteZeroes, 3..9) => flags |= BioFlags::NOUNMAP,
            _ => {}
        }
        if !self.without.has(DisturbanceClass::Flush) && matches!(op, Op::Write | Op::WriteZeroes) {
            match c.below(32) {
                0..3 => flags |= BioFlags::FUA,
                3 if op == Op::Write => flags |= BioFlags::PREFLUSH,
                4 if op == Op::Write => flags |= BioFlags::PREFLUSH | BioFlags::FUA,
                _ => {}
            }
        }
        (op, flags)
    }

    fn range(&mut self, op: Op, size: u64, hot: u64) -> (u64, u64) {
        let c = &mut self.chance;
        let most = match c.below(64) {
            0 if !self.without.has(DisturbanceClass::Long) => LONGEST,
            1..4 => 64,
            _ if !op.has_data() => 32,
            4..24 => 1,
            _ => 8,
        };
        let len = c.between(1, most.min(size));
        let room = size - len + 1;
        let sector = match c.below(4) {
            0 => c.below(room),
            _ => ((hot % size) + c.below(64)).min(room - 1),
        };
        (sector, len)
    }

    fn fill(&mut self, bio: &mut Bio, op: Op, flags: BioFlags, sector: u64, len: u64) {
        bio.op = op;
        bio.flags = flags;
        bio.sector = Sector(sector);
        bio.sectors = Sectors(len);
        if op.has_data() {
            bio.data = self.data(Sectors(len).bytes() as usize);
        }
    }

    fn data(&mut self, bytes: usize) -> Segments {
        if !self.without.has(DisturbanceClass::Pieces) && self.chance.one_in(16) {
            let cut = 1 + self.chance.below(bytes as u64 - 1) as usize;
            let cut = if self.chance.one_in(2) && cut > 512 { cut / 512 * 512 } else { cut };
            let mut data = Segments::from(self.bufs.get(cut));
            data.push(self.bufs.get(bytes - cut));
            return data;
        }
        Segments::from(self.bufs.get(bytes))
    }

    /// Recycles a bio and its memory.
    pub fn put(&mut self, mut bio: Box<Bio>) {
        for buf in std::mem::take(&mut bio.data) {
            self.bufs.put(buf);
        }
        self.bios.push(bio);
    }
}
