//! Adjacent requests are merged on the way down and come back unchanged.

use super::*;
use proptest::prelude::*;

#[test]
fn neighbours_of_a_batch_go_down_as_one() {
    let mut world = TestCores::new(1, "queue_depth=8");
    world.submit(0, vec![write(8, 8, 1), write(16, 8, 2), write(0, 8, 3), write(100, 8, 4)]);
    assert_eq!(world.at_disk(), [(0, 24), (100, 8)]);
    world.end(0, Status::Ok);
    assert_eq!(world.done.len(), 3);
    world.end(0, Status::Ok);
    world.submit(0, vec![read(0, 24)]);
    world.end(0, Status::Ok);
    let read = &world.done.last().unwrap().1.data;
    let mut bytes = vec![0; read.len()];
    read.copy_to(&mut bytes);
    assert_eq!([bytes[0], bytes[4096], bytes[8192]], [3, 1, 2]);
}

#[test]
fn what_comes_is_merged_with_what_waits() {
    for scheduler in ["none", "mq-deadline"] {
        let mut world = TestCores::new(1, &format!("queue_depth=1,scheduler={scheduler}"));
        world.submit(0, vec![read(500, 8)]);
        for sector in [0, 8, 16, 200, 208, 192] {
            world.submit(0, vec![read(sector, 8)]);
        }
        let mut went = Vec::new();
        while let Some(first) = world.at_disk().first().copied() {
            went.push(first);
            world.end(0, Status::Ok);
        }
        assert_eq!(went, [(500, 8), (0, 24), (192, 24)], "{scheduler}");
        assert_eq!(world.done.len(), 7);
    }
}

/// Two waiting requests are joined when a third fills the gap, from either side.
#[test]
fn two_that_wait_are_joined_by_a_third() {
    // The third one touches the first and the second.
    for (sectors, want) in
        [([0, 16, 8], vec![(0, 24)]), ([16, 0, 8], vec![(0, 24)]), ([0, 24, 8], vec![(0, 16), (24, 8)])]
    {
        for words in ["", ",front_merges=0", ",max_sectors_kb=8", ",nomerges=1"] {
            let mut world = TestCores::new(1, &format!("queue_depth=1,scheduler=mq-deadline{words}"));
            world.submit(0, vec![write(500, 8, 9)]);
            for (n, sector) in sectors.into_iter().enumerate() {
                world.submit(0, vec![write(sector, 8, n as u8 + 1)]);
            }
            let mut went = Vec::new();
            while let Some(first) = world.at_disk().first().copied() {
                went.push(first);
                world.end(0, Status::Ok);
            }
            assert_eq!(went.remove(0), (500, 8));
            match words {
                "" | ",front_merges=0" => assert_eq!(went, want, "{sectors:?}{words}"),
                _ => assert!(went.iter().all(|(_, len)| *len <= 16), "{sectors:?}{words}: {went:?}"),
            }
            assert_eq!(world.done.len(), 4);
            let content = world.content.lock().unwrap();
            for (n, sector) in sectors.into_iter().enumerate() {
                assert_eq!(content[sector as usize * 512], n as u8 + 1);
            }
        }
    }
}

#[test]
fn some_requests_are_never_merged() {
    let flagged = |flags| {
        let mut bio = write(8, 8, 2);
        bio.flags = flags;
        bio
    };
    let second = [
        ("another operation", read(8, 8)),
        ("FUA", flagged(BioFlags::FUA)),
        ("a flush before it", flagged(BioFlags::PREFLUSH)),
        ("other flags", flagged(BioFlags::META)),
        ("a gap", write(9, 8, 2)),
        ("too long", write(8, 60, 2)),
        ("an overlap", write(7, 8, 2)),
    ];
    for (why, second) in second {
        let mut world = TestCores::new(1, "queue_depth=8");
        world.submit(0, vec![write(0, 8, 1), second]);
        assert_eq!(world.at_disk().len(), 2, "{why}");
        world.end(0, Status::Ok);
        world.end(0, Status::Ok);
    }
}

#[test]
fn nomerges_and_the_number_of_pieces_are_kept_to() {
    for (words, want) in [
        ("nomerges=0", vec![(0, 24)]),
        ("nomerges=2", vec![(0, 8), (8, 8), (16, 8)]),
        ("max_segments=2", vec![(0, 16), (16, 8)]),
        ("max_sectors_kb=8", vec![(0, 16), (16, 8)]),
    ] {
        let mut world = TestCores::new(1, &format!("queue_depth=8,{words}"));
        world.submit(0, vec![read(0, 8), read(8, 8), read(16, 8)]);
        assert_eq!(world.at_disk(), want, "{words}");
        while !world.at_disk().is_empty() {
            world.end(0, Status::Ok);
        }
    }
    // `nomerges` 1: merges only with the latest request.
    let mut world = TestCores::new(1, "queue_depth=1,nomerges=1");
    world.submit(0, vec![read(500, 8)]);
    [0, 100, 8].into_iter().for_each(|sector| world.submit(0, vec![read(sector, 8)]));
    let mut went = 0;
    while !world.at_disk().is_empty() {
        world.end(0, Status::Ok);
        went += 1;
    }
    assert_eq!(went, 4);
}

/// If a merged read fails, only the part with the bad block fails. If a merged write fails, all
/// parts fail, and nothing is sent twice.
#[test]
fn an_error_of_the_whole() {
    let mut world = TestCores::new(1, "queue_depth=8");
    // Disks report a medium error; bad blocks of null devices and of dust report an I/O error.
    for bad in [Status::Medium, Status::IoErr] {
        world.submit(0, vec![read(0, 8), read(8, 8)]);
        world.end(0, bad);
        assert!(world.done.is_empty());
        let mut sectors = world.at_disk();
        sectors.sort();
        assert_eq!(sectors, [(0, 8), (8, 8)]);
        while let Some((sector, _)) = world.at_disk().first().copied() {
            world.end(0, if sector == 0 { bad } else { Status::Ok });
        }
        world.done.sort_by_key(|(_, bio)| bio.sector.0);
        let ends: Vec<_> = world.done.drain(..).map(|(_, bio)| bio.status).collect();
        assert_eq!(ends, [bad, Status::Ok]);
    }

    let whole = [(Op::Write, Status::Medium), (Op::Write, Status::IoErr), (Op::Read, Status::Transport)];
    for (op, status) in whole {
        let of = |sector| if op == Op::Write { write(sector, 8, 1) } else { read(sector, 8) };
        world.submit(0, vec![of(0), of(8)]);
        world.end(0, status);
        let ends: Vec<_> = world.done.drain(..).map(|(_, bio)| bio.status).collect();
        assert_eq!(ends, [status, status]);
        assert!(world.at_disk().is_empty(), "not sent again");
    }
}

/// A part that waits to be read again is handed back unchanged.
#[test]
fn what_is_to_be_read_again_is_handed_back_as_it_was() {
    let mut world = TestCores::new(1, "queue_depth=1");
    world.submit(0, vec![read(0, 8), read(8, 8)]);
    world.end(0, Status::Medium);
    // One part is with the disk, the other waits.
    assert_eq!(world.at_disk().len(), 1);
    let (state, lane) = &mut world.cores[0];
    let mut back = Batch::new();
    lane.drain(DrainMode::NoFlush, &mut back, &mut state.cx(world.now));
    let status: Vec<_> = back.iter().map(|bio| bio.status).collect();
    assert_eq!(status, [Status::Ok; 2]);
    back.iter_mut().for_each(|bio| bio.finish());
}

proptest! {
    /// For random requests, completed in random order: each comes back once and unchanged, reads
    /// return the data written before, and the disk never has more requests than tags.
    #[test]
    fn nothing_is_lost_doubled_or_mixed_up(
        deadline in any::<bool>(),
        depth in 1_u32..6,
        steps in prop::collection::vec((0_u64..40, 1_u64..5, any::<bool>(), 0_usize..6), 1..120),
    ) {
        let scheduler = if deadline { "mq-deadline" } else { "none" };
        let mut world = TestCores::new(1, &format!("queue_depth={depth},scheduler={scheduler},nr_requests=4"));
        let mut content = vec![0_u8; SIZE as usize];
        let mut busy = vec![false; SIZE as usize];
        let (mut sent, mut home) = (0, 0);
        let mut expected = std::collections::HashMap::new();
        for (n, (sector, len, is_write, ends)) in steps.into_iter().enumerate() {
            let range = (sector * 8) as usize..((sector + len) * 8) as usize;
            if !busy[range.clone()].iter().any(|b| *b) {
                let byte = (n % 250) as u8 + 1;
                let mut bio =
                    if is_write { write(sector * 8, len * 8, byte) } else { read(sector * 8, len * 8) };
                bio.cookie = n as u64;
                if is_write {
                    content[range.clone()].fill(byte);
                } else {
                    expected.insert(n as u64, content[range.clone()].to_vec());
                }
                busy[range].fill(true);
                world.submit(0, vec![bio]);
                sent += 1;
            }
            let last = ends;
            for _ in 0..last {
                let at = world.at_disk().len();
                if at > 0 {
                    world.end(n % at, Status::Ok);
                }
            }
            for (_, bio) in world.done.drain(..) {
                home += 1;
                busy[bio.sector.0 as usize..bio.end().0 as usize].fill(false);
                prop_assert_eq!(bio.data.len() as u64, bio.sectors.bytes());
                if let Some(want) = expected.remove(&bio.cookie) {
                    let mut bytes = vec![0; bio.data.len()];
                    bio.data.copy_to(&mut bytes);
                    let seen: Vec<u8> = bytes.chunks(512).map(|sector| sector[0]).collect();
                    prop_assert_eq!(seen, want);
                }
            }
        }
        while !world.at_disk().is_empty() {
            world.end(0, Status::Ok);
        }
        home += world.done.len();
        prop_assert_eq!(sent, home);
        prop_assert!(with_test_disk_state(|state| state.most) <= depth as usize);
    }
}
