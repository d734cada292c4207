//! Tests of the contents and the memory use of a map.

use super::*;

#[test]
fn a_chunk_goes_its_way_and_memory_follows() {
    let map = ExceptionMap::new(1 << 28);
    let empty = map.bytes();
    assert!(empty < 64 << 10, "a terabyte of 4 KiB chunks, untouched: {empty} bytes");
    assert_eq!(map.get(77), ChunkState::Free);
    assert!(map.claim(77) && !map.claim(77));
    assert_eq!(map.get(77), ChunkState::Pending);
    map.give_up(77);
    assert!(map.claim(77));
    map.publish(77, 2);
    assert_eq!(map.get(77), ChunkState::Copied(2));
    assert!(!map.are_settled(77, 77) && !map.claim(77));
    map.settle(77, 78);
    assert!(map.are_settled(77, 77) && !map.are_settled(77, 78));
    map.load((1 << 28) - 1, 3);
    assert_eq!(map.next_in_store(0, u64::MAX), Some((77, 2)));
    assert_eq!(map.next_in_store(78, 1 << 28), Some(((1 << 28) - 1, 3)));
    assert_eq!((map.next_in_store(0, 77), map.next_in_store(78, (1 << 28) - 1)), (None, None));
    map.forget(77);
    assert_eq!((map.get(77), map.next_in_store(1 << 28, u64::MAX)), (ChunkState::Free, None));
    assert!(map.bytes() < empty + (64 << 10));
}

#[test]
fn who_is_settled_is_counted_once() {
    let map = ExceptionMap::new(1000);
    (0..500).for_each(|chunk| map.load(chunk, chunk + 2));
    map.load(7, 9);
    for chunk in 500..1000 {
        assert!(map.claim(chunk) && !map.are_all_settled());
        map.publish(chunk, chunk + 2);
    }
    (0..2).for_each(|_| map.settle(400, 998));
    assert!(!map.are_all_settled());
    map.settle(999, 999);
    assert!(map.are_all_settled());
    map.unsettle(3, 5);
    assert!(!map.are_all_settled() && map.get(3) == ChunkState::Copied(5));
    map.settle(0, 999);
    assert!(map.are_all_settled());
    map.forget(3);
    assert!(!map.are_all_settled());
}

#[test]
fn a_dense_map_takes_little_more_than_eight_bytes_a_chunk() {
    let map = ExceptionMap::new(1 << 20);
    (0..1 << 20).for_each(|chunk| map.load(chunk, chunk + 2));
    assert!(map.bytes() <= 9 << 20, "{} bytes", map.bytes());
}

#[test]
fn scattered_exceptions_take_little_memory() {
    let map = ExceptionMap::new(1 << 29);
    (0..1 << 20).for_each(|at| map.load(at << 9, at + 2));
    assert!(map.bytes() <= 40_000_000, "{} bytes", map.bytes());
    let mut from = 0;
    for at in 0..1 << 20 {
        assert_eq!(map.next_in_store(from, u64::MAX), Some((at << 9, at + 2)));
        from = (at << 9) + 1;
    }
    assert_eq!(map.next_in_store(from, u64::MAX), None);
    // With any number of exceptions in any order.
    for in_leaf in [1, 2, 3, 16, 17, 46, 47, 200, 511] {
        let map = ExceptionMap::new(1 << 20);
        let chunk = |leaf: u64, at: u64| (leaf << 9) | (at * 7 % 512);
        for at in 0..in_leaf {
            for leaf in 0..64 {
                assert!(map.claim(chunk(leaf, at)) && !map.claim(chunk(leaf, at)));
                map.publish(chunk(leaf, at), leaf * 1000 + at + 2);
            }
        }
        for leaf in 0..64 {
            let mut kept: Vec<u64> = (0..in_leaf).map(|at| chunk(leaf, at)).collect();
            for at in 0..in_leaf {
                assert_eq!(map.get(chunk(leaf, at)), ChunkState::Copied(leaf * 1000 + at + 2));
            }
            assert_eq!(map.get(chunk(leaf, in_leaf)), ChunkState::Free);
            kept.sort_unstable();
            let mut from = leaf << 9;
            for chunk in kept {
                assert_eq!(map.next_in_store(from, (leaf + 1) << 9).map(|(chunk, _)| chunk), Some(chunk));
                from = chunk + 1;
            }
            assert_eq!(map.next_in_store(from, (leaf + 1) << 9), None);
        }
    }
}

/// Cores claim chunks of the same leaves at once: each chunk keeps one word.
#[test]
fn cores_that_claim_in_one_leaf() {
    let map = ExceptionMap::new(1 << 14);
    let claimed = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for core in 0..4_u64 {
            let (map, claimed) = (&map, &claimed);
            scope.spawn(move || {
                for at in 0..1 << 14 {
                    let chunk = (at * 5 + core * 77) % (1 << 14);
                    if map.claim(chunk) {
                        claimed.fetch_add(1, Ordering::Relaxed);
                        map.publish(chunk, chunk + 2);
                    }
                }
            });
        }
    });
    assert_eq!(claimed.into_inner(), 1 << 14);
    (0..1 << 14).for_each(|chunk| assert_eq!(map.get(chunk), ChunkState::Copied(chunk + 2)));
}
