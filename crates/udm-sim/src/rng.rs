//! Chance, drawn from a seed.
//!
//! Each part of the world has a stream of its own, so that switching one class of disturbance off
//! while a failure is being shrunk leaves the draws of the other parts as they were for as long as
//! possible.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// Which part of the world draws.
#[derive(Clone, Copy, Debug)]
#[repr(u64)]
pub enum RngStream {
    /// Which disks, tables and devices there are.
    Build = 1,
    /// Which core runs next and how long it takes.
    Schedule,
    /// What front ends ask for.
    Work,
    /// When and what the control side does.
    Control,
    /// When commands arrive at a core.
    Inbox,
    /// What disks and paths do.
    Disks,
    /// Who acts in the middle of another's turn.
    Between,
    /// What the network and the ring of a core do.
    SimNetwork,
    /// What paths are watched for.
    Watch,
    /// Which of these are slow.
    Slow,
    /// What goes wrong with null devices.
    Faults,
    /// Which mapped devices have queues of their own.
    OwnQueues,
    /// Which disks share tags.
    Shared,
    /// Whether a device lies over the one with a log.
    OverLog,
    /// What clients ask for, in worlds whose machine draws from `Work` which lane is next.
    Clients,
    /// When and which verbs are called, in worlds whose machine draws from `Control`.
    Verbs,
}

/// A stream of draws.
pub struct SimRng(SmallRng);

impl SimRng {
    /// The stream `stream` of `seed`.
    #[must_use]
    pub fn new(seed: u64, stream: RngStream) -> SimRng {
        SimRng(SmallRng::seed_from_u64(mix(seed ^ mix(stream as u64))))
    }

    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number below `n`; 0 when `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.any()) * u128::from(n)) >> 64) as u64
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True once in `n` draws; never when `n` is 0.
    pub fn one_in(&mut self, n: u64) -> bool {
        n != 0 && self.below(n) == 0
    }

    /// One of `list`, which isn't empty.
    pub fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len() as u64) as usize]
    }

    /// A span around `mean` with a long tail: half of all draws lie below it, one in 64 is up to 16
    /// times as long.
    pub fn span(&mut self, mean: u64) -> u64 {
        let base = mean / 2 + self.below(mean.max(1));
        match self.below(64) {
            0 => base * self.between(2, 16),
            _ => base,
        }
    }
}

/// Spreads the bits of `x` (the finalizer of splitmix64).
#[must_use]
pub fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}
