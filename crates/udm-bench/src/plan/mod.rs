//! Which blocks a job goes to, in which order, and what it does there. A plan takes next to no
//! memory and can be replayed: a clone of a fresh plan gives the same requests.

mod map;
mod varied;

use crate::load::{Load, Region};
use crate::stats::direction;
use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};
use udm_core::{Op, SECTOR_SIZE};
use varied::Varied;

/// Where on the device a request is, and how long, in sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub sector: u64,
    pub sectors: u64,
}

impl Span {
    /// Its length in bytes.
    pub fn bytes(self) -> u64 {
        self.sectors * SECTOR_SIZE
    }
}

/// The requests of one job.
#[derive(Clone)]
pub struct Plan {
    order: Order,
    region: Region,
    /// Sectors of a block.
    block: u64,
    /// Requests of this pass so far.
    at: u64,
    /// Goes over the region again and again.
    endless: bool,
    /// Requests of a pass, and passes after this one.
    length: u64,
    passes: u32,
    rng: SmallRng,
    op: Option<Op>,
    read_percent: u8,
}

#[derive(Clone)]
enum Order {
    Sequential,
    /// Each block once, in random order.
    Shuffled(Shuffle),
    /// Any block at any time.
    Random,
    /// Requests differ in length, in whatever order.
    Varied(Box<Varied>),
}

impl Plan {
    /// The plan of job number `job`.
    pub fn new(load: &Load, job: usize, region: Region) -> Plan {
        let mut rng = SmallRng::seed_from_u64(load.seed() ^ (job as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let varied = load.fixed().is_none();
        let order = match (load.rw.is_random(), load.norandommap) {
            _ if varied => Order::Varied(Box::new(Varied::new(load, region))),
            (false, _) => Order::Sequential,
            (true, true) => Order::Random,
            (true, false) => Order::Shuffled(Shuffle::new(region.blocks, &mut rng)),
        };
        let (op, read_percent) = (load.rw.op(), load.read_percent());
        let endless = load.time_based || load.exceeds(region);
        let most = if varied { u64::MAX } else { region.blocks };
        let limits = [load.number_ios, load.requests_of_io_size()].into_iter().flatten();
        let length = limits.filter(|_| !endless).fold(most, u64::min);
        let (block, passes) = (load.unit() / SECTOR_SIZE, load.loops - 1);
        Plan { order, region, block, at: 0, endless, length, passes, rng, op, read_percent }
    }

    /// True when no block comes twice.
    pub fn is_once(&self) -> bool {
        let repeats = match &self.order {
            Order::Random => true,
            Order::Varied(varied) => varied.repeats(),
            _ => false,
        };
        !self.endless && self.passes == 0 && !repeats
    }

    /// The next request: what, and where on the device. `None` when the plan is done.
    #[inline]
    pub fn next(&mut self) -> Option<(Op, Span)> {
        if self.at == self.length {
            self.again()?;
        }
        let block = match &mut self.order {
            Order::Sequential => self.at,
            Order::Shuffled(shuffle) => shuffle.next(),
            Order::Random => self.rng.random_range(0..self.region.blocks),
            Order::Varied(_) => return self.next_varied(),
        };
        self.at += 1;
        let op = self.draw_op();
        Some((op, Span { sector: (self.region.first + block) * self.block, sectors: self.block }))
    }

    #[inline]
    fn draw_op(&mut self) -> Op {
        match self.op {
            Some(op) => op,
            None if self.rng.random_range(0..100) < self.read_percent => Op::Read,
            None => Op::Write,
        }
    }

    /// Begins another pass, where there is one.
    fn again(&mut self) -> Option<()> {
        if !self.endless {
            self.passes = self.passes.checked_sub(1)?;
        }
        self.at = 0;
        match &mut self.order {
            Order::Shuffled(shuffle) => *shuffle = Shuffle::new(self.region.blocks, &mut self.rng),
            Order::Varied(varied) => varied.again(),
            Order::Sequential | Order::Random => {}
        }
        Some(())
    }

    #[inline(never)]
    fn next_varied(&mut self) -> Option<(Op, Span)> {
        let op = self.draw_op();
        loop {
            let Order::Varied(varied) = &mut self.order else { return None };
            if varied.is_over() {
                return None;
            }
            if let Some((at, bytes)) = varied.next(direction(op), &mut self.rng) {
                self.at += 1;
                let sector = self.region.first * self.block + at / SECTOR_SIZE;
                return Some((op, Span { sector, sectors: bytes / SECTOR_SIZE }));
            }
            self.again()?;
        }
    }
}

/// Every number below a bound once, in an order that looks random, out of a few words of memory.
///
/// A bijection of the numbers of so many bits, drawn from a seed: multiplication by an odd number,
/// addition, and a shift folded in by exclusive or can each be undone, so no two numbers meet. What
/// it takes beyond the bound is left out; that is less than every other number.
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

    /// The next number. To be called `bound` times at the most.
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
