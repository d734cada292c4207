//! Requests in several pieces: when they are handed back whole, and in which order they complete.

mod mapped_fixture;

use mapped_fixture::Fixture;
use std::sync::Arc;
use udm_core::{Batch, Lane, Op, Status};
use udm_dm::testing::{TestDeviceNameResolver, bio_without_data};

/// A lane stops retrying a request if each time one path fails it, the other path returns. In a
/// no-flush suspend, the request waits for the resume. If it is a piece, the whole request waits,
/// and the last error of the piece is not an error of the whole.
#[test]
fn a_piece_that_was_to_be_tried_again_is_handed_back() {
    let mut rig = Fixture::new();
    let disks = [rig.disk("/d0", 64), rig.disk("/d1", 64)];
    // The other piece has a disk of its own. On a path, its disk failure would hit both pieces in
    // one poll, and no piece might be left.
    rig.disk("/d2", 64);
    let low =
        rig.live("low", "0 64 multipath 3 queue_if_no_path queue_mode bio 0 1 1 round-robin 0 2 0 /d0 /d1");
    let up = rig.live("up", "0 32 linear @low 0\n32 32 linear /d2 32");
    let mut lane = rig.open(&up);
    for (i, disk) in disks.iter().enumerate() {
        let low = Arc::clone(&low);
        disk.set_verdict(move |_| {
            let target = Arc::clone(&low.live().unwrap().targets()[0].target);
            let words = ["reinstate_path".to_owned(), format!("7:{}", 2 - i)];
            target.message(&words, &mut TestDeviceNameResolver::new()).unwrap();
            Status::IoErr
        });
    }
    rig.world.submit(0, &mut *lane, [bio_without_data(Op::Read, 28, 8)]);
    assert!(rig.world.poll(0, &mut *lane).is_empty(), "every path fails it, and none stays failed");

    let mut home = Batch::new();
    let change = up.suspend(true, Arc::new(|| {})).unwrap();
    rig.finish(change, &mut [&mut lane], &mut home).unwrap();
    assert!(home.is_empty(), "it waits: {:?}", home[0].status);
    disks.iter().for_each(|disk| disk.fail(Status::Ok));
    let change = up.resume(Arc::new(|| {})).unwrap();
    rig.finish(change, &mut [&mut lane], &mut home).unwrap();
    home.extend(rig.world.poll(0, &mut *lane));
    assert_eq!(home.iter().map(|bio| bio.status).collect::<Vec<_>>(), [Status::Ok]);
}

/// Sectors of a request of 32 MiB: 8192 pieces of one chunk each.
const LONG: u64 = 65536;

/// How many pieces a holding disk must complete before `late` completes, if `late` follows `long`
/// reads of 32 MiB.
fn pieces_before(long: usize, late: Box<udm_core::Bio>) -> usize {
    let mut rig = Fixture::new();
    let disk = rig.disk("/disk", LONG * 16);
    let device = rig.live("d", &format!("0 {} striped 1 8 /disk 0", LONG * 16));
    let mut lane = rig.open(&device);
    disk.hold(true);
    rig.world.submit(0, &mut *lane, (0..long as u64).map(|i| bio_without_data(Op::Read, i * LONG, LONG)));
    // Far into the first read, not at its beginning.
    for _ in 0..2000 {
        disk.release(1);
        assert!(rig.world.poll(0, &mut *lane).is_empty());
    }
    rig.world.submit(0, &mut *lane, [late]);
    for finished in 1..=long * 8192 {
        disk.release(1);
        let home = rig.world.poll(0, &mut *lane);
        if let Some(bio) = home.first() {
            assert!(bio.sectors.0 < LONG, "a long one was first");
            disk.hold(false);
            drain(&mut rig, &mut lane, long);
            return finished;
        }
    }
    panic!("it does not come back");
}

fn drain(rig: &mut Fixture, lane: &mut Box<dyn Lane>, mut left: usize) {
    for _ in 0..10_000 {
        left -= rig.world.poll(0, &mut **lane).len();
        if left == 0 {
            return;
        }
    }
    panic!("{left} do not come back");
}

/// A short read or a flush after a long read waits only for pieces in flight, not for all 8192.
#[test]
fn a_short_request_does_not_wait_for_a_long_one() {
    for late in [
        bio_without_data(Op::Read, 4, 8),
        bio_without_data(Op::Flush, 0, 0),
        bio_without_data(Op::Discard, 0, 64),
    ] {
        let op = late.op;
        let pieces = pieces_before(1, late);
        assert!(pieces <= 72, "{op:?} behind {pieces} pieces");
    }
}

/// After many long requests, a short one waits for the requests on the disk and for one turn of
/// each long one. A flush waits for none of these turns.
#[test]
fn short_requests_take_turns_with_many_long_ones() {
    let pieces = pieces_before(12, bio_without_data(Op::Read, 4, 8));
    assert!(pieces <= 2 * 256 + 12 * 8, "{pieces} pieces");
    let pieces = pieces_before(12, bio_without_data(Op::Flush, 0, 0));
    assert!(pieces <= 256 + 8, "{pieces} pieces");
}
