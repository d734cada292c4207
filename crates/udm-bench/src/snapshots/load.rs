//! The load: the same requests again and again, each for one chunk.

use crate::one_mutex_origin::CHUNK;
use std::ops::Range;
use udm_buf::Buf;
use udm_core::{Batch, Bio, Lane, Op, Sector, Sectors};
use udm_runtime::LocalCore;

/// A load that keeps a fixed number of requests in flight, each for one chunk.
pub(super) struct FixedDepthChunkLoad {
    idle: Batch,
    batch: Batch,
    done: Batch,
}

impl FixedDepthChunkLoad {
    /// Creates a load with `depth` requests in flight.
    pub(super) fn new(depth: usize) -> FixedDepthChunkLoad {
        let bio = |_| Bio::write(Sector(0), Sectors(CHUNK), Buf::zeroed(CHUNK as usize * 512).into());
        FixedDepthChunkLoad { idle: (0..depth).map(bio).collect(), batch: Batch::new(), done: Batch::new() }
    }

    /// Sends one request per chunk and waits until all complete.
    pub(super) fn run(
        &mut self,
        core: &mut LocalCore,
        lane: &mut dyn Lane,
        op: Op,
        chunks: impl Iterator<Item = u64>,
    ) {
        let (mut chunks, depth) = (chunks.fuse(), self.idle.len());
        loop {
            let moved = core.turn(|cx| {
                lane.poll(&mut self.done, cx);
                let came_back = !self.done.is_empty();
                for mut bio in self.done.drain(..) {
                    bio.finish();
                    assert!(bio.status.is_ok(), "a request failed: {}", bio.status);
                    self.idle.push(bio);
                }
                while let Some(mut bio) = self.idle.pop() {
                    let Some(chunk) = chunks.next() else {
                        self.idle.push(bio);
                        break;
                    };
                    (bio.op, bio.sector) = (op, Sector(chunk * CHUNK));
                    bio.start();
                    self.batch.push(bio);
                }
                let more = !self.batch.is_empty();
                if more {
                    lane.submit(&mut self.batch, cx);
                }
                came_back || more
            });
            if self.idle.len() == depth {
                return;
            }
            if !moved {
                core.park();
            }
        }
    }
}

/// A permutation of the numbers below `count`, a power of two.
pub(super) fn permute_index_below(number: u64, count: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15) & (count - 1)
}

/// A pseudo-random number below `count` for each of `numbers`.
pub(super) fn pseudo_random_numbers_below(numbers: Range<u64>, count: u64) -> impl Iterator<Item = u64> {
    let mix = |number: u64| {
        (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number << 7).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    };
    numbers.map(move |number| ((u128::from(mix(number)) * u128::from(count)) >> 64) as u64)
}
