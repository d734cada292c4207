//! Regions that need no copy, because their source is a hole, and so is their destination; and
//! holes of the destination, where zeroes of a source need no write.
//!
//! They are found when the clone is loaded. Afterwards only the clone writes its destination. A
//! write of a whole region that failed may have changed it, so such a region is copied again, and
//! written.

use super::regions::RegionMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use udm_core::{Device, ExtentKind, Extents, Sector, Sectors};

/// Extents per query of a device.
const EXTENTS_MAX: usize = 4096;

/// Sectors of the source that are examined at most: a query over a slow network takes a while.
const EXAMINED_MAX: u64 = (256 << 30) / udm_core::SECTOR_SIZE;

/// Maximum number of queries.
const QUERIES_MAX: usize = 4096;

/// Maximum number of holes of the destination that are remembered.
const HOLES_MAX: usize = 4096;

/// Regions whose source and destination are holes. They read as zeroes.
#[derive(Default)]
pub(super) struct ZeroRegions(Box<[AtomicU64]>);

impl ZeroRegions {
    /// Finds the regions of `map`. May block.
    pub(super) fn find(map: &RegionMap, source: &dyn Device, destination: &dyn Device) -> ZeroRegions {
        let mut zero = ZeroRegions::default();
        if map.is_complete() {
            return zero;
        }
        let mut queries = QUERIES_MAX;
        let examined = map.len().0.min(EXAMINED_MAX);
        for (from, to) in find_holes(source, 0..examined, usize::MAX, map, &mut queries) {
            for (from, to) in find_holes(destination, from..to, usize::MAX, map, &mut queries) {
                zero.add(map, from, to);
            }
        }
        zero
    }

    /// Adds the regions that lie within `from..to`.
    fn add(&mut self, map: &RegionMap, from: u64, to: u64) {
        let first = map.region_of(from.next_multiple_of(map.region().0));
        let end = if to == map.len().0 { map.count() } else { map.region_of(to) };
        if first < end && self.0.is_empty() {
            self.0 = (0..map.count().div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        }
        for region in first..end {
            self.0[(region / 64) as usize].fetch_or(1 << (region % 64), Ordering::Relaxed);
        }
    }

    /// True if the data of `region` is in the destination without a copy. The caller has claimed
    /// it. Relaxed: claims of a region are in one order.
    pub(super) fn contains(&self, region: u64) -> bool {
        let word = self.0.get((region / 64) as usize);
        word.is_some_and(|word| word.load(Ordering::Relaxed) >> (region % 64) & 1 == 1)
    }

    /// The destination of `region`, which the caller has claimed, may have other data by now.
    pub(super) fn remove(&self, region: u64) {
        if let Some(word) = self.0.get((region / 64) as usize) {
            word.fetch_and(!(1 << (region % 64)), Ordering::Relaxed);
        }
    }
}

/// The holes of a destination, as ranges of sectors in order. A new destination is one hole.
#[derive(Default)]
pub(super) struct DestinationHoles {
    ranges: Box<[(u64, u64)]>,
    /// A write that failed may have filled one of them.
    is_unknown: AtomicBool,
}

impl DestinationHoles {
    /// Finds the holes of `destination`. May block.
    pub(super) fn find(map: &RegionMap, destination: &dyn Device) -> DestinationHoles {
        if map.is_complete() {
            return DestinationHoles::default();
        }
        let mut ranges = find_holes(destination, 0..map.len().0, HOLES_MAX, map, &mut QUERIES_MAX.clone());
        ranges.truncate(HOLES_MAX);
        DestinationHoles { ranges: ranges.into(), is_unknown: AtomicBool::new(false) }
    }

    /// True if zeroes in `from..to`, which the caller copies, need no write. Relaxed: claims of a
    /// region are in one order.
    pub(super) fn contain(&self, from: u64, to: u64) -> bool {
        let after = self.ranges.partition_point(|(start, _)| *start <= from);
        let hole = after.checked_sub(1).map(|at| self.ranges[at]);
        hole.is_some_and(|(_, end)| to <= end) && !self.is_unknown.load(Ordering::Relaxed)
    }

    /// A write that failed may have filled a part of a hole. Such a failure is rare, so all holes
    /// are forgotten.
    pub(super) fn forget(&self) {
        self.is_unknown.store(true, Ordering::Relaxed);
    }
}

/// The holes of `device` in `range` that may contain a region. Each query takes one of `queries`;
/// there is none once `enough` holes are found.
fn find_holes(
    device: &dyn Device,
    range: Range<u64>,
    enough: usize,
    map: &RegionMap,
    queries: &mut usize,
) -> Vec<(u64, u64)> {
    let (mut at, to, mut found) = (range.start, range.end, Vec::new());
    let least = map.region().0.min(map.len().0 - (map.count() - 1) * map.region().0);
    while at < to && *queries > 0 && found.len() < enough {
        *queries -= 1;
        let mut extents = Extents::new(EXTENTS_MAX);
        device.extents(Sector(at), Sectors(to - at), &mut extents);
        let before = at;
        for extent in extents.list() {
            if extent.content == ExtentKind::Hole && extent.len.0 >= least {
                found.push((at, at + extent.len.0));
            }
            at += extent.len.0;
        }
        if at == before {
            break;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use udm_core::{Cx, DeviceControlError, DeviceId, Lane, Limits};

    /// Data in these sectors, and holes elsewhere.
    struct Sparse(DeviceId, Vec<std::ops::Range<u64>>);

    impl Device for Sparse {
        fn id(&self) -> DeviceId {
            self.0
        }

        fn limits(&self) -> Limits {
            Limits::new(Sectors(1 << 20))
        }

        fn open(&self, _: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
            Err(DeviceControlError::new(udm_core::errno::EIO, "not in this test"))
        }

        fn extents(&self, from: Sector, len: Sectors, out: &mut Extents) {
            for sector in from.0..from.0 + len.0 {
                let is_data = self.1.iter().any(|data| data.contains(&sector));
                out.push(Sectors(1), if is_data { ExtentKind::Data } else { ExtentKind::Hole });
            }
        }
    }

    #[test]
    fn holes_of_a_destination_hold_zeroes() {
        let map = RegionMap::new(Sectors(1000), Sectors(8));
        let holes = DestinationHoles::find(&map, &Sparse(DeviceId::new(), vec![100..200, 204..206]));
        for (from, to, expected) in [
            (0, 100, true),
            (0, 101, false),
            (50, 60, true),
            (99, 100, true),
            (100, 101, false),
            (199, 208, false),
            (206, 1000, true),
            (200, 204, false),
        ] {
            assert_eq!(holes.contain(from, to), expected, "{from}..{to}; short holes are not remembered");
        }
        holes.forget();
        assert!(!holes.contain(0, 8));
        assert!(!DestinationHoles::default().contain(0, 8));
        let full = DestinationHoles::find(&map, &Sparse(DeviceId::new(), vec![0..500, 500..1000]));
        assert!(!full.contain(0, 8));
    }
}
