//! The blocks and operations of a job, in order. A plan uses little memory and can be replayed: a
//! clone of a fresh plan produces the same requests.

use crate::load::FioLoadOptions;
use crate::passes::RemainingPasses;
use crate::region::JobRegion;
use crate::stats::{DIRECTIONS, direction_index_of_op};
use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};
use udm_core::{Op, SECTOR_SIZE};

/// Position and length of a request on the device, in sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SectorSpan {
    pub sector: u64,
    pub sectors: u64,
}

impl SectorSpan {
    /// Length in bytes.
    pub fn bytes(self) -> u64 {
        self.sectors * SECTOR_SIZE
    }
}

/// The requests of one job.
#[derive(Clone)]
pub struct AccessPlan {
    order: PlanOrder,
    region: JobRegion,
    /// Sectors per block.
    block: u64,
    /// Requests of this pass so far. `length` is the maximum of a pass.
    at: u64,
    length: u64,
    /// Passes after this one.
    passes: RemainingPasses,
    rng: SmallRng,
    op: Option<Op>,
    read_percent: u8,
}

#[derive(Clone)]
enum PlanOrder {
    /// Each direction from the first block to the last, with the next block of each.
    Sequential([u64; DIRECTIONS]),
    /// Each block once, in random order.
    Shuffled(Shuffle),
    /// Independent random blocks.
    Random,
}

impl AccessPlan {
    /// The plan of job number `job`.
    pub fn new(load: &FioLoadOptions, job: usize, region: JobRegion) -> AccessPlan {
        let mut rng = SmallRng::seed_from_u64(load.seed() ^ (job as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let order = match (load.rw.is_random(), load.has_map()) {
            (false, _) => PlanOrder::Sequential([0; DIRECTIONS]),
            (true, true) => PlanOrder::Shuffled(Shuffle::new(region.blocks, &mut rng)),
            (true, false) => PlanOrder::Random,
        };
        let in_order_each = !load.rw.is_random() && load.rw.op().is_none();
        let length = if in_order_each { region.blocks * 2 } else { region.blocks };
        AccessPlan {
            order,
            region,
            block: load.block_bytes() / SECTOR_SIZE,
            at: 0,
            length,
            passes: RemainingPasses::new(load),
            rng,
            op: load.rw.op(),
            read_percent: load.read_percent(),
        }
    }

    /// Whether no block comes twice.
    pub fn covers_each_block_once(&self) -> bool {
        self.passes.are_one()
    }

    /// The next request: operation and span. `None` if the plan has ended.
    #[inline]
    pub fn next(&mut self) -> Option<(Op, SectorSpan)> {
        let op = self.draw_op();
        self.next_of(op).map(|span| (op, span))
    }

    /// The span of the next request, whose operation is `op`.
    #[inline]
    pub fn next_of(&mut self, op: Op) -> Option<SectorSpan> {
        if self.at == self.length || self.is_at_the_end(op) {
            self.again()?;
        }
        let block = match &mut self.order {
            PlanOrder::Sequential(next) => {
                let next = &mut next[direction_index_of_op(op)];
                *next += 1;
                *next - 1
            }
            PlanOrder::Shuffled(shuffle) => shuffle.next(),
            PlanOrder::Random => self.rng.random_range(0..self.region.blocks),
        };
        self.at += 1;
        Some(SectorSpan { sector: (self.region.first + block) * self.block, sectors: self.block })
    }

    /// As in fio, a pass ends with the last block of one direction, regardless of the other.
    #[inline]
    fn is_at_the_end(&self, op: Op) -> bool {
        matches!(&self.order, PlanOrder::Sequential(next) if next[direction_index_of_op(op)] == self.region.blocks)
    }

    /// Draws the operation of the next request.
    #[inline]
    pub fn draw_op(&mut self) -> Op {
        match self.op {
            Some(op) => op,
            None if self.rng.random_range(0..100) < self.read_percent => Op::Read,
            None => Op::Write,
        }
    }

    /// Begins another pass, if there is one.
    fn again(&mut self) -> Option<()> {
        if !self.passes.again() {
            return None;
        }
        self.at = 0;
        match &mut self.order {
            PlanOrder::Shuffled(shuffle) => *shuffle = Shuffle::new(self.region.blocks, &mut self.rng),
            PlanOrder::Sequential(next) => *next = [0; DIRECTIONS],
            PlanOrder::Random => {}
        }
        Some(())
    }
}

/// All numbers below a bound, each once, in an order that looks random, in a few words of memory.
///
/// The order is a bijection of the numbers with a given number of bits, drawn from a seed. It
/// consists of additions, multiplications by odd numbers, and shifts combined by exclusive or. Each
/// of these steps is invertible, so no two numbers collide. Results above the bound, less than half
/// of all, are skipped.
#[derive(Clone)]
struct Shuffle {
    bound: u64,
    mask: u64,
    shift: u32,
    odd: [u64; 3],
    add: u64,
    at: u64,
}

impl Shuffle {
    fn new(bound: u64, rng: &mut SmallRng) -> Shuffle {
        let bits = 64 - bound.saturating_sub(1).leading_zeros();
        let mask = 1u64.checked_shl(bits).map_or(u64::MAX, |n| n - 1);
        let odd = std::array::from_fn(|_| rng.next_u64() | 1);
        Shuffle { bound, mask, shift: bits.div_ceil(2).max(1), odd, add: rng.next_u64(), at: 0 }
    }

    /// The next number. May be called at most `bound` times.
    #[inline]
    fn next(&mut self) -> u64 {
        loop {
            let mut x = self.at.wrapping_add(self.add) & self.mask;
            self.at += 1;
            for odd in self.odd {
                x = x.wrapping_mul(odd) & self.mask;
                x ^= x >> self.shift;
            }
            if x < self.bound {
                return x;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffle_has_every_number_once() {
        let mut rng = SmallRng::seed_from_u64(7);
        for bound in [1, 2, 3, 5, 64, 65, 1000, 4096, 100_003] {
            let mut shuffle = Shuffle::new(bound, &mut rng);
            let mut seen = vec![false; bound as usize];
            let mut in_order = 0;
            let mut last = 0;
            for _ in 0..bound {
                let x = shuffle.next();
                assert!(!std::mem::replace(&mut seen[x as usize], true), "{x} of {bound} twice");
                in_order += u64::from(x == last + 1);
                last = x;
            }
            assert!(bound < 1000 || in_order < bound / 100, "{in_order} neighbours of {bound}");
        }
    }

    #[test]
    fn shuffles_differ_by_seed_and_repeat_by_seed() {
        let draw = |seed| {
            let mut shuffle = Shuffle::new(1 << 20, &mut SmallRng::seed_from_u64(seed));
            (0..100).map(|_| shuffle.next()).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }
}
