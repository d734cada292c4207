//! Rows H01 to H05 and H07 of the multipath cases, and comparisons with the kernel's rules.

use super::super::{PathSelectorLaneOps, record_path_choices};
use super::lane::{LanePathHistoryAndLoad, is_better_path};
use super::*;
use proptest::prelude::*;
use std::collections::VecDeque;
use udm_core::{Batch, Bio, CoreLaneState, Nanos, Sectors};

fn selector(args: &[&str], paths: usize) -> Arc<HistoricalServiceTime> {
    let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
    let base = args.first().map_or(BASE, |word| word.parse().unwrap());
    let threshold = args.get(1).map_or(0, |word| word.parse().unwrap());
    assert_eq!(super::create_historical_service_time(&args).unwrap().args(), format!("2 {base} {threshold}"));
    let mut made = HistoricalServiceTime::new(base, threshold);
    (0..paths).for_each(|_| made.add_path(&[], 1).unwrap());
    Arc::new(made)
}

fn lane(selector: &Arc<HistoricalServiceTime>) -> HistoricalServiceTimeLane {
    match Arc::clone(selector).lane(CoreId(0)) {
        SelectorLane::Historical(lane) => lane,
        _ => unreachable!(),
    }
}

/// Sends one bio at `now` and returns its path.
fn send(lane: &mut HistoricalServiceTimeLane, now: u64) -> (usize, Box<Bio>) {
    let (mut core, mut bio) = (CoreLaneState::new(CoreId(0), 1, 1, None), Bio::new());
    lane.look(&core.cx(Nanos(now)));
    (lane.choose(&mut bio), bio)
}

fn back(lane: &mut HistoricalServiceTimeLane, path: usize, bio: Box<Bio>, now: u64) {
    let mut core = CoreLaneState::new(CoreId(0), 1, 1, None);
    lane.polled(path, &[bio], Sectors(8), &core.cx(Nanos(now)));
}

fn info(selector: &HistoricalServiceTime, path: usize) -> [u64; 3] {
    let words: Vec<u64> = selector.path_info(path).split(' ').map(|word| word.parse().unwrap()).collect();
    words.try_into().unwrap()
}

#[test]
fn h01_weights() {
    let selector = selector(&["972"], 1);
    for (n, want) in
        [(0, 972), (1, 923), (2, 876), (3, 832), (7, 676), (15, 446), (31, 194), (47, 84), (62, 39), (63, 0)]
    {
        assert_eq!(selector.weights[n], want, "weight {n}");
    }
}

#[test]
fn h02_averages() {
    const MS: u64 = 1_000_000;
    let selector = selector(&[], 2);
    let mut lane = lane(&selector);
    for (n, want) in [52000972, 101360298, 148213095, 192686649, 234901780, 274973174, 313009693, 349114670]
        .into_iter()
        .enumerate()
    {
        let start = (n as u64 + 1) * 10 * MS;
        let mut bio = Bio::new();
        bio.sent = Nanos(start);
        back(&mut lane, 0, bio, start + MS);
        let [average, load, stale_after] = info(&selector, 0);
        // This lane never sent the completed bio, so the load wraps.
        assert_eq!((average, load), (want, 0u64.wrapping_sub(n as u64 + 1)), "bio {n}");
        if n == 0 {
            assert_eq!(stale_after, 11101564);
        }
    }
}

#[test]
fn h03_overlapping() {
    let selector = selector(&[], 2);
    let mut lane = lane(&selector);
    for (start, end, want) in [(1_000, 5_001_000, 260000972), (2_000, 6_001_000, 298797798)] {
        let mut bio = Bio::new();
        bio.sent = Nanos(start);
        back(&mut lane, 0, bio, end);
        assert_eq!(info(&selector, 0)[0], want);
    }
}

/// The recorded averages, and the service times that produce them.
#[test]
fn recorded_averages() {
    let selector = selector(&[], 1);
    for (times, averages) in [
        ([1240584, 2302027, 1196333, 1188578], [64511340, 180940778, 233961695, 283886884]),
        ([20257330, 26673616, 23228199, 20334222], [2045991253, 4538224597, 6436654840, 7855545892]),
    ] {
        let mut average = ONE;
        for (time, want) in times.into_iter().zip(averages) {
            average = selector.average(average, time);
            assert_eq!(average, want);
        }
    }
    for (time, want) in [
        (100_000, 977200000),
        (20_000_000, 2943000000),
        (100_000_000, 28150000000),
        (2_000_000_000, 2048000000000),
    ] {
        assert_eq!(selector.average(1_024_000_000, time), want);
    }
    assert_eq!(selector.average(u64::MAX >> 10, u64::MAX), TIME_MAX);
}

#[test]
fn h04_fresh_paths_take_turns() {
    let selector = selector(&[], 2);
    let mut lane = lane(&selector);
    let (first, bio) = send(&mut lane, 1_000_000);
    back(&mut lane, first, bio, 1_100_000);
    let (second, bio) = send(&mut lane, 1_200_000);
    assert_eq!((first, second), (0, 1));
    back(&mut lane, second, bio, 1_300_000);
}

/// A path of 1 ms and one of 20 ms, four bios in flight: the slow path gets 1 to 5 percent (10 of
/// 400 in the kernel).
#[test]
fn h05_a_slow_path_is_left_alone() {
    const MS: u64 = 1_000_000;
    let selector = selector(&[], 2);
    let mut lane = lane(&selector);
    let mut under_way: Vec<(u64, usize, Box<Bio>)> = Vec::new();
    // Each path serves one bio after the other.
    let (mut now, mut free, mut counts) = (1, [0u64; 2], [0; 2]);
    for _ in 0..400 {
        if under_way.len() == 4 {
            let next = (0..4).min_by_key(|&i| under_way[i].0).unwrap();
            let (end, path, bio) = under_way.swap_remove(next);
            now = end;
            back(&mut lane, path, bio, now);
        }
        let (path, bio) = send(&mut lane, now);
        counts[path] += 1;
        free[path] = free[path].max(now) + [MS, 20 * MS][path];
        under_way.push((free[path], path, bio));
    }
    assert!((4..=20).contains(&counts[1]), "{counts:?}");
}

#[test]
fn h07_a_path_that_failed_keeps_its_average() {
    let selector = selector(&[], 2);
    let mut lane = lane(&selector);
    let (path, bio) = send(&mut lane, 1_000_000);
    back(&mut lane, path, bio, 3_000_000);
    let before = info(&selector, path);
    lane.fail(path);
    assert_eq!(send(&mut lane, 4_000_000).0, 1 - path);
    lane.reinstate(path);
    assert_eq!(info(&selector, path), before);
}

/// A core that is alone publishes in each poll. If two cores work, each publishes once per interval
/// and continues from the other's values.
#[test]
fn cores_tell_each_other() {
    let selector = selector(&[], 1);
    let mut lanes = [lane(&selector), lane(&selector)];
    let average = |lane: &HistoricalServiceTimeLane| lane.history_of(0).average;
    let shared = || info(&selector, 0)[0];
    let serve = |lane: &mut HistoricalServiceTimeLane, now: u64| {
        let (path, bio) = send(lane, now);
        back(lane, path, bio, now + 100);
    };
    let [a, b] = &mut lanes;
    for now in [1_000, 2_000] {
        serve(a, now);
        assert_eq!(average(a), shared(), "alone");
    }
    let last_publication = shared();
    serve(b, 3_000);
    assert_eq!(average(b), selector.average(last_publication, 100), "it continues from the other's value");
    assert_eq!(shared(), last_publication, "and does not publish each time, as another core works");
    serve(a, 4_000);
    assert_eq!(average(a), selector.average(last_publication, 100));
    assert_eq!(shared(), last_publication, "nor does the first, for the same reason");
    // After the interval each publishes its history, and the other continues from it.
    serve(b, 5_000);
    let (due, known) = (5_000 + SHARE_EVERY.0, average(b));
    serve(b, due);
    assert_eq!(shared(), known, "its turn");
    serve(a, due + 1_000);
    assert_eq!(average(a), selector.average(known, 100));
    // The second core does nothing any more.
    let (now, last_publication) = (due + 2_000 + ALONE_AFTER.0, shared());
    serve(a, now);
    assert_ne!(shared(), last_publication);
    assert_eq!(average(a), shared(), "alone again");
}

fn known(average: u64, load: u64, stale_after: u64) -> LanePathHistoryAndLoad {
    LanePathHistoryAndLoad {
        history: PathHistory { average, stale_after, last_finish: 0 },
        load,
        ..LanePathHistoryAndLoad::default()
    }
}

/// Below 0 if `c` is better than `b`, above 0 if it is worse: the kernel's `hst_compare` line by
/// line, in numbers that cannot overflow.
fn compare(c: &LanePathHistoryAndLoad, b: &LanePathHistoryAndLoad, now: u64, threshold: u32) -> i128 {
    let by_load = i128::from(c.load) - i128::from(b.load);
    let (high, low) = (c.history.average.max(b.history.average), c.history.average.min(b.history.average));
    if u128::from(high) <= u128::from(low) * u128::from(threshold) {
        return by_load;
    }
    let (c_idle, b_idle) = (c.load == 0, b.load == 0);
    let (c_stale, b_stale) = (c.history.stale_after < now, b.history.stale_after < now);
    if c_idle && c_stale || b_idle && b_stale || c_idle && b_idle {
        let stale = |slot: &LanePathHistoryAndLoad, other_idle| {
            if other_idle { i128::from(slot.history.stale_after) } else { 0 }
        };
        return stale(c, b_idle) - stale(b, c_idle);
    }
    let b_better = if c.load == b.load {
        c.history.average > b.history.average
    } else {
        let many = c.load >= MANY || b.load >= MANY;
        let cost = |slot: &LanePathHistoryAndLoad| {
            let average = if many { slot.history.average >> POINT } else { slot.history.average };
            u128::from(average) * (u128::from(slot.load) + 1)
        };
        cost(c) > cost(b)
    };
    match b_better {
        true if b_stale => by_load,
        false if c_stale => by_load,
        true => 1,
        false => -1,
    }
}

#[test]
fn comparisons() {
    let rows = [
        // Equal within the threshold: bios in flight decide.
        ((1024, 3, 9), (1024, 2, 9), 1, 1),
        ((1024, 2, 9), (2048, 2, 9), 2, 0),
        // Both idle: the path that has been stale for longest.
        ((5000, 0, 4), (1024, 0, 6), 0, -2),
        // One is idle and stale: it is tried.
        ((50000, 0, 3), (1024, 1, 20), 0, -20),
        ((1024, 1, 20), (50000, 0, 3), 0, 20),
        // The cost decides; a full tie goes to the one compared last.
        ((2048, 1, 20), (1024, 1, 20), 0, 1),
        ((2048, 1, 20), (1024, 4, 20), 0, -1),
        ((1024, 1, 20), (1024, 1, 20), 0, -1),
        // A stale winner gets at most an equal share.
        ((1024, 3, 5), (4096, 2, 20), 0, 1),
        ((1024, 1, 5), (4096, 2, 20), 0, -1),
    ];
    for (c, b, threshold, want) in rows {
        let (c, b) = (known(c.0, c.1, c.2), known(b.0, b.1, b.2));
        assert_eq!(compare(&c, &b, 10, threshold), want, "{c:?} v {b:?}");
        assert_eq!(is_better_path(&c, &b, 10, threshold), want < 0, "{c:?} v {b:?}");
    }
}

proptest! {
    /// For any sequence of bios on several lanes, no load remains at the end, and only usable paths
    /// are chosen.
    #[test]
    fn loads_end_at_nothing(
        steps in proptest::collection::vec((0usize..2, 0u8..6, 0usize..3, 1u64..50_000_000), 1..200),
    ) {
        let selector = selector(&[], 3);
        let mut lanes = [lane(&selector), lane(&selector)];
        let mut usable = [[true; 3]; 2];
        let (mut under_way, mut now) = ([Vec::new(), Vec::new()], 1);
        for (n, what, path, time) in steps {
            now += time;
            match what {
                0 if usable[n][path] && usable[n].iter().filter(|usable| **usable).count() > 1 => {
                    usable[n][path] = false;
                    lanes[n].fail(path);
                }
                1 if !usable[n][path] => {
                    usable[n][path] = true;
                    lanes[n].reinstate(path);
                }
                2 | 3 if !under_way[n].is_empty() => {
                    let (path, bio) = under_way[n].remove(0);
                    back(&mut lanes[n], path, bio, now);
                }
                _ => {
                    let (path, bio) = send(&mut lanes[n], now);
                    prop_assert!(usable[n][path]);
                    under_way[n].push((path, bio));
                }
            }
        }
        let first = under_way[0].drain(..).collect::<Vec<_>>();
        for (path, bio) in first {
            back(&mut lanes[0], path, bio, now);
        }
        // The loads of a dropped lane are removed.
        drop(lanes);
        for path in 0..3 {
            prop_assert_eq!(info(&selector, path)[1], 0);
        }
    }
}

fn slots() -> impl Strategy<Value = LanePathHistoryAndLoad> {
    let average = prop_oneof![0..4u64, 1..100_000u64, Just(TIME_MAX)];
    let load = prop_oneof![0..4u64, 1000..1050u64, Just(u64::MAX)];
    (average, load, 0..4u64).prop_map(|(average, load, stale_after)| known(average, load, stale_after))
}

proptest! {
    #[test]
    fn comparisons_are_the_kernels(c in slots(), b in slots(), now in 0..4u64, threshold in 0..4u32) {
        prop_assert_eq!(is_better_path(&c, &b, now, threshold), compare(&c, &b, now, threshold) < 0);
    }

    /// A batch gets the same choices as its bios one by one, for any initial history, while bios
    /// complete and paths fail and return.
    #[test]
    fn a_batch_is_no_different(
        known in prop_oneof![Just(2), 1..7usize].prop_flat_map(|paths| {
            prop::collection::vec((1u64..40, 0..2000u64), paths)
        }),
        scale in prop_oneof![3 => Just(4000), 1 => Just(SHORT / 40), 1 => Just(TIME_MAX / 40)],
        alike: bool,
        all_stale: bool,
        threshold in prop_oneof![4 => Just("0"), 1 => Just("1"), 1 => Just("2")],
        steps in prop::collection::vec(
            (
                prop_oneof![1..40usize, (1..5usize).prop_map(|rounds| rounds * 60)],
                prop_oneof![Just(0), 0..500u64],
                prop_oneof![any::<usize>(), Just(0).prop_map(|_| usize::MAX / 8 * 7)],
                0..30usize,
            ),
            1..12,
        ),
    ) {
        let mut cores = [(); 2].map(|()| {
            let selector = selector(&["972", threshold], known.len());
            for (path, (average, stale_after)) in selector.paths.iter().zip(&known) {
                let average = if alike { known[0].0 } else { *average };
                path.average.store(average * scale, Relaxed);
                path.stale_after.store(if all_stale { *stale_after % 3 } else { *stale_after }, Relaxed);
            }
            lane(&selector)
        });
        let (mut core, mut now) = (CoreLaneState::new(CoreId(0), 1, 1, None), if all_stale { 3 } else { 1 });
        let (paths, mut usable) = (known.len(), vec![true; known.len()]);
        let mut under_way: Vec<VecDeque<(Box<Bio>, Box<Bio>)>> = (0..paths).map(|_| VecDeque::new()).collect();
        for (count, time, change, back) in steps {
            let cx = core.cx(Nanos(now));
            cores.iter_mut().for_each(|lane| lane.look(&cx));
            let [whole, single] = &mut cores;
            let bios = (0..count).map(|_| Bio::new()).collect();
            for (n, (path, bio)) in record_path_choices(whole, bios).into_iter().enumerate() {
                let mut other = Bio::new();
                prop_assert_eq!((single.choose(&mut other), other.sent), (path, bio.sent), "bio {}", n);
                under_way[path].push_back((bio, other));
            }
            now += time;
            let (cx, path) = (core.cx(Nanos(now)), change % paths);
            let back = back.min(under_way[path].len());
            if change / paths % 4 == 3 {
                // All bios in flight complete in one poll.
                for (path, under_way) in under_way.iter_mut().enumerate() {
                    let (a, b): (Vec<_>, Vec<_>) = under_way.drain(..).unzip();
                    whole.reaped(path, &a, Sectors(0), &cx);
                    single.polled(path, &b, Sectors(0), &cx);
                }
                whole.end_reap(&cx);
            } else {
                let (a, b): (Vec<_>, Vec<_>) = under_way[path].drain(..back).unzip();
                whole.polled(path, &a, Sectors(0), &cx);
                single.polled(path, &b, Sectors(0), &cx);
            }
            prop_assert!((0..paths).all(|path| whole.history_of(path) == single.history_of(path)));
            match change / paths % 4 {
                1 if usable[path] && usable.iter().filter(|usable| **usable).count() > 1 => {
                    usable[path] = false;
                    cores.iter_mut().for_each(|lane| lane.fail(path));
                }
                2 if !usable[path] => {
                    usable[path] = true;
                    cores.iter_mut().for_each(|lane| lane.reinstate(path));
                }
                _ => {}
            }
        }
    }
}

/// Two lanes over separate selectors: one gets batches of `count` bios, the other the same bios one
/// by one. All bios of a batch complete in one poll, so that the paths become equal and stale paths
/// become fresh.
#[test]
fn equal_paths_take_turns() {
    for (paths, counts) in [(2, [2, 6, 4, 3, 8]), (3, [3, 3, 6, 12, 4]), (16, [32, 16, 64, 48, 7])] {
        let [mut whole, mut single] = [(); 2].map(|()| lane(&selector(&[], paths)));
        let (mut core, mut now, mut rings) = (CoreLaneState::new(CoreId(0), 1, 1, None), 1_000, Vec::new());
        for count in counts.into_iter().cycle().take(40) {
            let cx = core.cx(Nanos(now));
            whole.look(&cx);
            single.look(&cx);
            let chosen = record_path_choices(&mut whole, (0..count).map(|_| Bio::new()).collect());
            let mut back: Vec<(Batch, Batch)> = (0..paths).map(|_| Default::default()).collect();
            for (n, (path, bio)) in chosen.into_iter().enumerate() {
                let mut other = Bio::new();
                assert_eq!(
                    (single.choose(&mut other), other.sent),
                    (path, bio.sent),
                    "{paths} paths, bio {n}"
                );
                back[path].0.push(bio);
                back[path].1.push(other);
            }
            rings.push(whole.rotation_is_stale);
            now += 10 + 5_000 * u64::from(count == paths);
            let cx = core.cx(Nanos(now));
            for (path, (a, b)) in back.iter().enumerate() {
                whole.reaped(path, a, Sectors(0), &cx);
                single.polled(path, b, Sectors(0), &cx);
                assert_eq!(whole.history_of(path), single.history_of(path));
            }
            whole.end_reap(&cx);
            now += 1 + 50_000_000 * u64::from(count == paths);
        }
        for rotation in [None, Some(false), Some(true)] {
            assert!(rings.contains(&rotation), "{paths} paths, {rotation:?}: {rings:?}");
        }
    }
}
