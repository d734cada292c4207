//! Random numbers, derived from a seed.
//!
//! Each part of the world has its own stream. If one class of disturbance is switched off while a
//! failure is shrunk, the draws of the other parts stay the same for as long as possible.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// The part of the world that uses a stream of random numbers.
#[derive(Clone, Copy, Debug)]
#[repr(u64)]
pub enum RngStream {
    /// The disks, tables and devices of a world.
    Build = 1,
    /// The choice of the next core, and durations.
    Schedule,
    /// Requests of front ends.
    Work,
    /// Times and actions of the control side.
    Control,
    /// Delays of messages to cores.
    Inbox,
    /// Behaviour of disks and paths.
    Disks,
    /// Cores that preempt others.
    Between,
    /// Behaviour of the network and of the ring of a core.
    SimNetwork,
    /// Options of the path watch.
    Watch,
    /// Slow paths, in worlds with a path watch.
    Slow,
    /// Faults of null devices.
    Faults,
    /// Mapped devices with queues of their own.
    OwnQueues,
    /// Disks that share tags.
    Shared,
    /// A device over the logging device.
    OverLog,
    /// Requests of clients, in worlds whose machine draws the next lane from `Work`.
    Clients,
    /// Times and kinds of verbs, in worlds whose machine draws from `Control`.
    Verbs,
    /// Limits of the requests and bytes per second of devices.
    Throttles,
    /// Blank sectors of an object.
    Objects,
}

/// A stream of random numbers.
pub struct SimRng(SmallRng);

impl SimRng {
    /// Creates stream `stream` of `seed`.
    #[must_use]
    pub fn new(seed: u64, stream: RngStream) -> SimRng {
        SimRng(SmallRng::seed_from_u64(mix_bits_splitmix64(seed ^ mix_bits_splitmix64(stream as u64))))
    }

    /// Any 64-bit number.
    pub fn any(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number below `n`; 0 if `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.any()) * u128::from(n)) >> 64) as u64
    }

    /// A number from `low` to `high`, both inclusive.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True with probability 1/`n`; never if `n` is 0.
    pub fn one_in(&mut self, n: u64) -> bool {
        n != 0 && self.below(n) == 0
    }

    /// An element of `list`, which must not be empty.
    pub fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len() as u64) as usize]
    }

    /// A duration around `mean` with a long tail: one draw in 64 is up to 16 times as long.
    pub fn span(&mut self, mean: u64) -> u64 {
        let base = mean / 2 + self.below(mean.max(1));
        match self.below(64) {
            0 => base * self.between(2, 16),
            _ => base,
        }
    }
}

/// Mixes the bits of `x` (the finalizer of splitmix64).
#[must_use]
pub fn mix_bits_splitmix64(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}
