//! Verified load: random reads and writes of known data.
//!
//! A block holds its position, the number of its last write, and bytes that follow from both. Each
//! core has its own blocks and at most one request per block in flight, so it knows the expected
//! result of each read. A lost, repeated, misdirected or partial write shows as a wrong block.

use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use udm_core::{
    Batch, Bio, Buf, Device, DeviceControlError, Lane, Op, SECTOR_SIZE, Sector, Sectors, Segments,
};
use udm_runtime::LocalCore;

/// Block size in bytes.
pub(super) const BLOCK: u64 = 4096;

/// Requests that a core keeps in flight.
pub(super) const DEPTH: usize = 32;

const LOAD: u8 = 0;
const CHECK: u8 = 1;
const END: u8 = 2;

/// The phase and counters that the loads share with the main thread. Each load adds its counts once
/// per turn.
#[derive(Default)]
pub(super) struct DemoLoadCounters {
    phase: AtomicU8,
    submitted: AtomicU64,
    completed: AtomicU64,
    errors: AtomicU64,
    verified: AtomicU64,
    wrong: AtomicU64,
    /// Number of loads that have read back all their blocks.
    checked: AtomicU64,
}

/// The counters of [`DemoLoadCounters`] at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub(super) struct LoadCounters {
    /// Requests submitted to the device.
    pub submitted: u64,
    /// Completed requests.
    pub completed: u64,
    /// Requests that failed; they are part of `completed`.
    pub errors: u64,
    /// Blocks that were read and are correct.
    pub verified: u64,
    /// Blocks that were read and are wrong.
    pub wrong: u64,
}

impl DemoLoadCounters {
    /// The counters so far. They are exact once the loads have ended.
    pub fn counts(&self) -> LoadCounters {
        let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
        // `completed` is read first, so that it never exceeds `submitted`.
        let completed = get(&self.completed);
        LoadCounters {
            completed,
            submitted: get(&self.submitted),
            errors: get(&self.errors),
            verified: get(&self.verified),
            wrong: get(&self.wrong),
        }
    }

    /// Stops the load; each load then reads back all its blocks once.
    pub fn check(&self) {
        self.phase.store(CHECK, Ordering::Release);
    }

    /// Number of loads that have read back all their blocks.
    pub fn checked(&self) -> u64 {
        self.checked.load(Ordering::Acquire)
    }

    /// Ends the loads. The caller must also wake their cores.
    pub fn end(&self) {
        self.phase.store(END, Ordering::Release);
    }

    fn add(&self, counts: LoadCounters) {
        let add = |n: &AtomicU64, by: u64| {
            if by > 0 {
                n.fetch_add(by, Ordering::Relaxed);
            }
        };
        add(&self.submitted, counts.submitted);
        add(&self.completed, counts.completed);
        add(&self.errors, counts.errors);
        add(&self.verified, counts.verified);
        add(&self.wrong, counts.wrong);
    }
}

#[derive(Clone, Copy, Default)]
struct VerifyBlockState {
    version: u32,
    busy: bool,
}

/// The load of one core.
pub(super) struct VerifyLoad {
    core: LocalCore,
    lane: Box<dyn Lane>,
    progress: Arc<DemoLoadCounters>,
    first: u64,
    blocks: Vec<VerifyBlockState>,
    /// The next block to read back; equal to the number of blocks at the end.
    next_check: usize,
    free: Batch,
    batch: Batch,
    done: Batch,
    expected: Vec<u8>,
    rng: SmallRng,
    counts: LoadCounters,
    check_reported: bool,
}

impl VerifyLoad {
    /// Creates a load of `blocks` blocks of `device`, from block `first`.
    pub fn new(
        mut core: LocalCore,
        device: &dyn Device,
        progress: Arc<DemoLoadCounters>,
        first: u64,
        blocks: usize,
    ) -> Result<VerifyLoad, DeviceControlError> {
        let lane = core.open(device)?;
        let mut memory = Buf::zeroed(DEPTH * BLOCK as usize);
        let mut bio = || {
            let mut data = Segments::new();
            data.push(memory.split_to(BLOCK as usize));
            Bio::read(Sector(0), Sectors::from_bytes(BLOCK), data)
        };
        let free = (0..DEPTH).map(|_| bio()).collect();
        let rng = SmallRng::seed_from_u64(first + 1);
        Ok(VerifyLoad {
            core,
            lane,
            progress,
            first,
            blocks: vec![VerifyBlockState::default(); blocks],
            next_check: 0,
            free,
            batch: Batch::new(),
            done: Batch::new(),
            expected: vec![0; BLOCK as usize],
            rng,
            counts: LoadCounters::default(),
            check_reported: false,
        })
    }

    /// Runs until the phase is `END` and nothing is in flight.
    pub fn run(mut self) {
        loop {
            let phase = self.progress.phase.load(Ordering::Acquire);
            match phase {
                LOAD => self.fill(),
                CHECK => self.fill_check(),
                _ => {}
            }
            let (lane, batch, done) = (&mut self.lane, &mut self.batch, &mut self.done);
            let moved = self.core.turn(|cx| {
                let submitted = !batch.is_empty();
                if submitted {
                    lane.submit(batch, cx);
                }
                lane.poll(done, cx);
                submitted || !done.is_empty()
            });
            while let Some(bio) = self.done.pop() {
                self.finish(bio);
            }
            self.progress.add(std::mem::take(&mut self.counts));
            let idle = self.free.len() == DEPTH;
            if phase == END && idle {
                return;
            }
            if phase == CHECK && idle && !self.check_reported && self.next_check == self.blocks.len() {
                self.check_reported = true;
                self.progress.checked.fetch_add(1, Ordering::Release);
            }
            // If the phase changed during this turn, its wake-up may already be consumed, so the
            // core must not park.
            if !moved && phase == self.progress.phase.load(Ordering::Acquire) {
                self.core.park();
            }
        }
    }

    /// Submits random reads and writes while bios are free.
    fn fill(&mut self) {
        while let Some(mut bio) = self.free.pop() {
            let index = loop {
                // There are many more blocks than requests, so this loop ends soon.
                let index = self.rng.random_range(0..self.blocks.len());
                if !self.blocks[index].busy {
                    break index;
                }
            };
            bio.op = if self.rng.random_bool(0.5) { Op::Write } else { Op::Read };
            if bio.op == Op::Write {
                let version = self.blocks[index].version + 1;
                for piece in bio.data.iter_mut() {
                    fill_versioned_block(self.first + index as u64, version, piece);
                }
            }
            self.put(bio, index);
        }
    }

    /// Submits a read of every block in turn.
    fn fill_check(&mut self) {
        while self.next_check < self.blocks.len() && !self.blocks[self.next_check].busy {
            let Some(mut bio) = self.free.pop() else { return };
            bio.op = Op::Read;
            self.put(bio, self.next_check);
            self.next_check += 1;
        }
    }

    fn put(&mut self, mut bio: Box<Bio>, index: usize) {
        self.blocks[index].busy = true;
        bio.cookie = index as u64;
        bio.sector = Sector((self.first + index as u64) * (BLOCK / SECTOR_SIZE));
        bio.start();
        self.counts.submitted += 1;
        self.batch.push(bio);
    }

    fn finish(&mut self, mut bio: Box<Bio>) {
        bio.finish();
        self.counts.completed += 1;
        let index = bio.cookie as usize;
        let block = &mut self.blocks[index];
        block.busy = false;
        if !bio.status.is_ok() {
            self.counts.errors += 1;
        } else if bio.op == Op::Write {
            block.version += 1;
        } else {
            fill_versioned_block(self.first + index as u64, block.version, &mut self.expected);
            let right = bio.data.iter().all(|piece| piece[..] == self.expected[..]);
            *(if right { &mut self.counts.verified } else { &mut self.counts.wrong }) += 1;
        }
        // Overwrites the buffer, so that data of an earlier read cannot pass for that of the next.
        bio.data.fill(0xee);
        self.free.push(bio);
    }
}

/// The content of block `block` after write `version`: zeroes before the first write.
fn fill_versioned_block(block: u64, version: u32, out: &mut [u8]) {
    if version == 0 {
        out.fill(0);
        return;
    }
    let (head, rest) = out.split_at_mut(16);
    head[..8].copy_from_slice(&block.to_le_bytes());
    head[8..].copy_from_slice(&u64::from(version).to_le_bytes());
    SmallRng::seed_from_u64(block << 32 | u64::from(version)).fill_bytes(rest);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_tell_place_and_version() {
        let make = |block, version| {
            let mut bytes = vec![1; BLOCK as usize];
            fill_versioned_block(block, version, &mut bytes);
            bytes
        };
        assert!(make(5, 0).iter().all(|&b| b == 0));
        assert_eq!(make(5, 1), make(5, 1));
        for (block, version) in [(5, 2), (6, 1), (1, 5)] {
            let (a, b) = (make(5, 1), make(block, version));
            assert_ne!(a[..16], b[..16]);
            assert_ne!(a[16..], b[16..], "the rest tells them apart too");
        }
    }
}
