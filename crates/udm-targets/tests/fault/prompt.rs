//! Devices below that complete requests during the submit and request no poll.

use crate::{build, disks, message, open};
use udm_core::{Batch, BioFlags, Lane, Nanos};
use udm_dm::testing::{SteppedTestCores, make_test_write_bio};

/// Polls after a submit or for a message, and then as often as the lane requests.
fn poll_as_asked(world: &mut SteppedTestCores, lane: &mut dyn Lane) -> Batch {
    let mut done = Batch::new();
    for _ in 0..16 {
        world.wake = Nanos::NEVER;
        done.append(&mut world.poll(0, lane));
        if world.wake > world.now && !world.has_messages(0) {
            return done;
        }
    }
    panic!("it asks for polls for ever");
}

/// The writes to the log depend on each other: an entry, a flush, the superblock, a flush. All but
/// the first are sent after the poll of the log device.
#[test]
fn what_ends_as_it_goes_down_is_polled_for() {
    for (cache, fua_known) in [(false, false), (true, true), (true, false)] {
        let (disk, log, mut resolver) = disks(64, 4096);
        log.set_limits(|limits| (limits.write_cache, limits.fua) = (cache, fua_known));
        let target = build("log-writes a b", 64, &mut resolver).unwrap();
        let mut world = SteppedTestCores::new(1);
        let mut lane = open(&mut world, 0, &target);
        target.resume();
        assert!(poll_as_asked(&mut world, &mut *lane).is_empty());
        let _begun = log.take_log();
        let mut bio = make_test_write_bio(1, 1, 1);
        bio.flags = BioFlags::FUA;
        world.submit(0, &mut *lane, [bio]);
        assert_eq!(poll_as_asked(&mut world, &mut *lane).len(), 1, "{cache} {fua_known}");
        assert_eq!((disk.waiting(), log.waiting()), (0, 0));
        assert_eq!(log.take_log().len(), 2 + usize::from(cache) + usize::from(cache && !fua_known));
        message(&*target, "mark m").unwrap();
        assert!(poll_as_asked(&mut world, &mut *lane).is_empty());
        assert_eq!(log.waiting(), 0, "{cache} {fua_known}");
        assert_eq!(target.status(), "2 3");
    }
}
