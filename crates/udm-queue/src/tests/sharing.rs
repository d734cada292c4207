//! Cores that share a hardware queue.

use super::*;

#[test]
fn fewer_queues_than_cores_share_their_tags() {
    for (queues, want) in [(1, 4), (2, 8), (0, 16), (9, 16)] {
        let mut world = TestCores::new(4, &format!("queue_depth=4,nr_hw_queues={queues},nomerges=2"));
        for core in 0..4 {
            world.submit(core, (0..20).map(|n| read(n * 8, 8)).collect());
        }
        assert_eq!(world.at_disk().len(), want, "{queues} queues");
        while !world.at_disk().is_empty() {
            world.end(0, Status::Ok);
        }
        assert_eq!(with_test_disk_state(|state| state.most), want);
        assert_eq!(world.done.len(), 80);
    }
}

/// A core with many requests does not starve the others, however few tags there are (blktests
/// block/020).
#[test]
fn a_busy_core_leaves_tags_to_the_others() {
    let mut world = TestCores::new(3, "queue_depth=1,nr_hw_queues=1,nomerges=2");
    for core in 0..3 {
        world.submit(core, (0..100).map(|n| read(n * 8, 8)).collect());
    }
    for _ in 0..90 {
        assert_eq!(world.at_disk().len(), 1);
        world.end(0, Status::Ok);
    }
    for core in 0..3 {
        let of_core = world.done.iter().filter(|(of, _)| of.index() == core).count();
        assert!((28..=32).contains(&of_core), "core {core} had {of_core} of 90");
    }
    while !world.at_disk().is_empty() {
        world.end(0, Status::Ok);
    }
}

/// A lane that closes returns its tags.
#[test]
fn tags_of_a_lane_that_is_closed_come_back() {
    let mut world = TestCores::new(2, "queue_depth=2,nr_hw_queues=1,nomerges=2");
    world.submit(0, vec![read(0, 8), read(8, 8)]);
    world.submit(1, vec![read(16, 8)]);
    assert_eq!(world.at_disk().len(), 2);
    // The second core stops waiting, as in a suspend, and closes its lane.
    let (state, lane) = &mut world.cores[1];
    let mut back = Batch::new();
    with_test_disk_state(|state| state.back.append(&mut state.bios));
    lane.drain(DrainMode::NoFlush, &mut back, &mut state.cx(world.now));
    back.iter_mut().for_each(|bio| bio.finish());
    assert_eq!(back.len(), 1);
    world.cores.truncate(1);
    with_test_disk_state(|state| state.bios.append(&mut state.back));
    world.end(0, Status::Ok);
    world.submit(0, vec![read(24, 8), read(32, 8)]);
    assert_eq!(world.at_disk().len(), 2);
    while !world.at_disk().is_empty() {
        world.end(0, Status::Ok);
    }
    assert_eq!(world.done.len(), 4);
}

/// Threads that take, await and return tags as fast as they can: never more tags are in use than
/// exist, and no thread waits forever.
#[test]
fn threads_share_tags() {
    use crate::tags::HwQueueTags;
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
    for depth in [1, 4, 64, 1000] {
        let tags = Arc::new(HwQueueTags::new(depth));
        let out = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for core in 0..4_u16 {
                let (tags, out) = (Arc::clone(&tags), &out);
                scope.spawn(move || {
                    let mut state = CoreLaneState::new(CoreId(core), 4, 1, None);
                    let mut held = crate::tags::LaneTags::new(tags, &mut state.cx(Nanos(1)));
                    let mut left = 2000;
                    while left > 0 {
                        let mut got = 0;
                        let mut cx = state.cx(Nanos(1));
                        while got < left.min(7) {
                            if held.take_one(left.min(7) - got) {
                                got += 1;
                            } else if !held.update_wait(left.min(7) - got, &mut cx) {
                                break;
                            }
                        }
                        let now = out.fetch_add(got as u32, SeqCst) + got as u32;
                        assert!(now <= depth, "{now} tags are in use, the depth is {depth}");
                        out.fetch_sub(got as u32, SeqCst);
                        held.completed(got);
                        left -= got;
                        held.update_wait(left.min(7), &mut cx);
                        std::thread::yield_now();
                    }
                });
            }
        });
    }
}
