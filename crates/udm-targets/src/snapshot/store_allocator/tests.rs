//! Allocations from a store of each kind.

use super::*;
use udm_wire::cow::ChunkSize;

fn persistent() -> StoreChunkLayout {
    StoreChunkLayout::Persistent(ExceptionStoreLayout::new(ChunkSize::new(1).unwrap()))
}

/// Sequence number, first chunk, number of chunks.
fn parts(grant: AllocatedChunkRun) -> (u64, u64, u64) {
    (grant.seq, grant.new, grant.len)
}

#[test]
fn a_store_is_filled_from_its_front_areas_passed_over() {
    let space = StoreAllocator::new(persistent(), 0, Vec::new());
    let size = Sectors(100);
    assert_eq!(space.take(30, size).map(parts), Some((0, 2, 30)));
    assert_eq!(space.take(30, size).map(parts), Some((30, 32, 2)));
    assert_eq!(space.end(), 35, "34 is an area");
    assert_eq!(space.take(30, size).map(parts), Some((32, 35, 30)));
    assert_eq!(space.end(), 65);
}

#[test]
fn the_last_record_of_an_area_needs_the_next_area() {
    let space = StoreAllocator::new(persistent(), 0, Vec::new());
    assert_eq!(space.take(40, Sectors(34)).map(|grant| grant.len), Some(31));
    assert_eq!(space.take(1, Sectors(34)), None);
    assert_eq!(space.take(1, Sectors(35)).map(|grant| grant.new), Some(33), "it has grown");
}

#[test]
fn holes_are_used_when_the_front_is_at_the_end() {
    let space = StoreAllocator::new(persistent(), 8, vec![4..6, 7..8]);
    let size = Sectors(12);
    assert_eq!(space.take(9, size).map(parts), Some((0, 10, 2)));
    assert_eq!(space.take(9, size).map(parts), Some((2, 4, 2)));
    assert_eq!(space.take(9, size).map(parts), Some((4, 7, 1)));
    assert_eq!((space.take(9, size), space.end()), (None, 12));
    assert_eq!(space.take(9, Sectors(14)).map(parts), Some((5, 12, 2)), "it has grown");
    assert_eq!((space.take(1, Sectors(14)), space.end()), (None, 14));
}

#[test]
fn a_transient_store_is_all_data() {
    let space = StoreAllocator::new(StoreChunkLayout::Transient(8), 0, Vec::new());
    assert_eq!(space.take(9, Sectors(48)).map(parts), Some((0, 0, 6)));
    assert_eq!((space.take(1, Sectors(55)), space.end()), (None, 6));
}

#[test]
fn cores_that_take_at_once_get_different_chunks() {
    let space = StoreAllocator::new(persistent(), 0, vec![]);
    let mut all: Vec<u64> = std::thread::scope(|scope| {
        let take = || (0..500).filter_map(|n| space.take(1 + n % 3, Sectors(10_000))).collect::<Vec<_>>();
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(take)).collect();
        let grants = threads.into_iter().flat_map(|thread| thread.join().unwrap());
        grants.flat_map(|grant| grant.new..grant.new + grant.len).collect()
    });
    let count = all.len();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), count);
    let layout = ExceptionStoreLayout::new(ChunkSize::new(1).unwrap());
    assert!(!all.iter().any(|chunk| layout.is_metadata(*chunk)));
}
