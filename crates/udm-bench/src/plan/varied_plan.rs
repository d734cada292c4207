//! Requests of different lengths (`bssplit`, `bsrange`, several `bs`): their offsets and lengths.
//!
//! The rules are fio's. A sequential request begins at the end of the last one of its direction. A
//! random request begins at a multiple of the shortest length of its direction.
//!
//! With a map, a random request begins at the next free block after a drawn one, and ends before
//! the next taken block. So blocks come once, and some requests are shorter than drawn.

use super::free_block_map::FreeBlockMap;
use crate::distribution::OffsetGenerator;
use crate::load::FioLoadOptions;
use crate::region::JobRegion;
use crate::request_lengths::LengthDistribution;
use crate::stats::DIRECTIONS;
use rand::RngExt;
use rand::rngs::SmallRng;

/// The requests of one job, in passes over the same region.
#[derive(Clone)]
pub struct MixedLengthAccessPlan {
    sizes: [LengthDistribution; DIRECTIONS],
    unit: u64,
    /// The length of the region in bytes.
    bytes: u64,
    order: MixedLengthAccessOrder,
    /// Bytes of this pass so far. A pass with a map ends when all bytes are moved.
    moved: u64,
}

#[derive(Clone)]
enum MixedLengthAccessOrder {
    /// In order, with the offset of the next request of each direction.
    Sequential([u64; DIRECTIONS]),
    /// Independent random offsets for each direction.
    Random([OffsetGenerator; DIRECTIONS]),
    Mapped(FreeBlockMap),
}

impl MixedLengthAccessPlan {
    pub fn new(load: &FioLoadOptions, region: JobRegion, rng: &mut SmallRng) -> MixedLengthAccessPlan {
        let (unit, bytes) = (load.unit(), region.blocks * load.unit());
        let order = match (load.rw.is_random(), load.has_map()) {
            (false, _) => MixedLengthAccessOrder::Sequential([0; DIRECTIONS]),
            (true, false) => MixedLengthAccessOrder::Random(load.random_places(bytes, rng)),
            (true, true) => MixedLengthAccessOrder::Mapped(FreeBlockMap::new(region.blocks)),
        };
        let sizes = std::array::from_fn(|direction| load.sizes(direction));
        MixedLengthAccessPlan { sizes, unit, bytes, order, moved: 0 }
    }

    /// Begins another pass.
    pub fn again(&mut self) {
        self.moved = 0;
        match &mut self.order {
            MixedLengthAccessOrder::Sequential(at) => *at = [0; DIRECTIONS],
            MixedLengthAccessOrder::Random(_) => {}
            MixedLengthAccessOrder::Mapped(map) => map.clear(),
        }
    }

    /// The next request of a direction: offset in the region and length, in bytes. `None` if the
    /// pass has ended.
    pub fn next(&mut self, direction: usize, rng: &mut SmallRng) -> Option<(u64, u64)> {
        if self.moved >= self.bytes && matches!(self.order, MixedLengthAccessOrder::Mapped(_)) {
            return None;
        }
        let sizes = &self.sizes[direction];
        let (at, len) = match &mut self.order {
            MixedLengthAccessOrder::Sequential(at) => {
                let at = &mut at[direction];
                let len = sizes.draw(self.bytes - *at, rng)?;
                *at += len;
                (*at - len, len)
            }
            MixedLengthAccessOrder::Random(places) => {
                let at = places[direction].next(rng);
                (at, sizes.draw(self.bytes - at, rng)?)
            }
            MixedLengthAccessOrder::Mapped(map) => {
                let block = map.next_free(draw_random_offset(self.bytes, sizes, rng) / self.unit)?;
                let at = block * self.unit;
                let room = self.bytes - at;
                let len = sizes.draw(room, rng).unwrap_or(room);
                let taken = map.take(block, len.div_ceil(self.unit)) * self.unit;
                (at, len.min(taken))
            }
        };
        self.moved += len;
        Some((at, len))
    }
}

/// A random offset for a request of these sizes.
fn draw_random_offset(bytes: u64, sizes: &LengthDistribution, rng: &mut SmallRng) -> u64 {
    rng.random_range(0..(bytes / sizes.min).max(1)) * sizes.min
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::parse_fio_load_options;
    use crate::plan::AccessPlan;
    use udm_core::Op;

    /// The requests of a plan: operation, offset and length in bytes.
    fn plan(text: &str, blocks: u64) -> (AccessPlan, Vec<(Op, u64, u64)>) {
        let load = parse_fio_load_options(text);
        load.check().unwrap();
        let region = JobRegion { first: 3, blocks, bytes: blocks * load.unit() };
        let mut plan = AccessPlan::new(&load, 0, region);
        let fresh = plan.clone();
        let most = load.requests(region).min(100_000) as usize;
        let begin = 3 * load.unit() / 512;
        let next = || plan.next().map(|(op, span)| (op, (span.sector - begin) * 512, span.sectors * 512));
        (fresh, std::iter::from_fn(next).take(most).collect())
    }

    #[test]
    fn in_order_without_gaps() {
        let (_, all) = plan("--rw read --bssplit 4k:16k:64k", 1000);
        let mut at = 0;
        for (_, first, len) in &all {
            assert_eq!(*first, at);
            at += len;
        }
        assert_eq!(at, 1000 * 4096, "the shortest fill up what the others leave");
        let (_, all) = plan("--rw rw --bs 4k,16k", 10_000);
        let of =
            |op: Op| all.iter().filter(|r| r.0 == op).map(|r| r.2).collect::<std::collections::BTreeSet<_>>();
        assert_eq!((of(Op::Read), of(Op::Write)), ([4096].into(), [16384].into()));
    }

    #[test]
    fn a_map_has_every_block_once() {
        for text in
            ["--rw randread --bsrange 4k-32k", "--rw randrw --bs 4k,32k", "--rw randwrite --bsrange 4k-10k"]
        {
            let (_, mut all) = plan(text, 5000);
            let in_order = all.windows(2).filter(|w| w[0].1 + w[0].2 == w[1].1).count();
            assert!(in_order * 2 < all.len(), "{text}: {in_order} of {}", all.len());
            all.sort_by_key(|r| r.1);
            assert!(all.windows(2).all(|w| w[0].1 + w[0].2 <= w[1].1), "{text}: blocks come twice");
            let covered: u64 = all.iter().map(|r| r.2.div_ceil(4096)).sum();
            assert_eq!(covered, 5000, "{text}");
        }
    }

    #[test]
    fn without_a_map_lengths_are_what_was_drawn() {
        let (_, all) = plan("--rw randread --norandommap --bssplit 4k/50:64k/50", 50_000);
        let moved: u64 = all.iter().map(|r| r.2).sum();
        assert!((50_000 * 4096..50_016 * 4096).contains(&moved), "{moved}");
        let long = all.iter().filter(|r| r.2 == 65_536).count();
        assert!(long.abs_diff(all.len() / 2) < all.len() / 20, "{long} of {}", all.len());
        assert!(all.iter().all(|r| r.1 + r.2 <= 50_000 * 4096));
    }

    #[test]
    fn limits_hold() {
        let moved = |text: &str| {
            let (_, all) = plan(&format!("--rw randread --bsrange 4k-16k {text}"), 100);
            (all.len(), all.iter().map(|r| r.2).sum::<u64>())
        };
        assert_eq!(moved("--loops 3").1, 3 * 100 * 4096);
        assert!((1 << 20..(1 << 20) + 16384).contains(&moved("--io_size 1m").1));
        assert_eq!(moved("--io_size 1m --loops 3").1, 3 * 100 * 4096, "three passes have moved it");
        assert!((300_000..300_000 + 3 * 16384).contains(&moved("--io_size 100000 --loops 3").1));
        assert_eq!(moved("--number_ios 7 --loops 2").0, 14);
        assert_eq!(moved("--time_based --runtime 1 --io_size 64k --number_ios 7").0, 100_000);
    }

    /// With any alignment, requests begin at multiples of it and end inside the region.
    #[test]
    fn alignment_is_of_the_first_byte() {
        for (text, align) in [
            ("--rw randread --bs 4k --ba 16k", 16384),
            ("--rw randwrite --bs 16k --ba 512,1k", 1024),
            ("--rw randread --bsrange 4k-64k --ba 3k", 3072),
            ("--rw randtrim --bssplit 8k:12k --blockalign 4k,4k,20k", 20480),
        ] {
            let (_, all) = plan(&format!("{text} --loops 20"), 1001);
            let end = 1001 * crate::jobs::parse_fio_load_options(text).unit();
            let (mut last, mut uneven) = (0, 0);
            for (_, first, len) in all {
                assert!(first % align == 0 && first + len <= end, "{text}: {len} at {first}");
                last = last.max(first + len);
                uneven += u64::from(first % (align * 2) != 0);
            }
            assert!(last + align + 4096 > end - 65_536 && uneven > 0, "{text}: {last} of {end}");
        }
        let one = |text: &str| parse_fio_load_options(&format!("--rw randread --bs 4k {text}")).has_map();
        assert!(one("") && one("--ba 4k") && !one("--ba 4k,8k") && !one("--ba 4k --norandommap"));
        assert_eq!(plan("--rw read --bs 4k --ba 64k", 10).1.len(), 10, "in order it means nothing");
    }

    #[test]
    fn a_clone_replays_it() {
        let (mut fresh, all) = plan("--rw randrw --bsrange 512-8k,1k-64k", 9999);
        let again = std::iter::from_fn(|| fresh.next())
            .map(|(op, span)| (op, (span.sector - 3) * 512, span.sectors * 512));
        assert!(again.eq(all));
    }
}
