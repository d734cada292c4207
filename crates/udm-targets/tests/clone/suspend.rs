//! Suspends, reloads, and the end of a clone.

use crate::rig::filled_write;
use crate::{REGIONS, SIZE, STILL, TABLE, bytes, host_with, pass, progress, source};
use udm_core::Status;
use udm_core::errno::{EBUSY, EINVAL};

#[test]
fn a_suspend_waits_for_copies_of_the_background_and_commits() {
    let mut host = host_with(2, STILL);
    host.get_disk("S").hold(true);
    host.message("c", "enable_hydration").unwrap();
    host.settle();
    assert_eq!(progress(&host), (0, 1, "rw".into()));
    let _ = host.get_disk("M").take_log();
    let mut polls = 0;
    assert!(host.suspend_asleep("c", |host, _| {
        host.world.run_tasks();
        polls += 1;
        // The copy is still in flight.
        assert!(polls > 60 || progress(host) == (0, 1, "rw".into()));
        host.get_disk("S").hold(polls <= 60);
        true
    }));
    assert!(polls > 60, "it has waited");
    assert_eq!(progress(&host), (1, 0, "rw".into()));
    assert_eq!(host.get_disk("M").take_log().len(), 3, "a commit: two copies, one flush");
    pass(&mut host, 2);
    assert_eq!(progress(&host), (1, 0, "rw".into()), "nothing happens while it is suspended");
    host.resume(&["c"]).unwrap();
    pass(&mut host, 2);
    assert_eq!(progress(&host), (REGIONS, 0, "rw".into()));
}

#[test]
fn writes_that_wait_survive_a_suspend_without_flush() {
    let mut host = host_with(2, STILL);
    host.get_disk("D").hold(true);
    let one = host.send("c", 0, filled_write(8, 1, 0xaa));
    let other = host.send("c", 1, filled_write(9, 1, 0xbb));
    host.settle();
    host.get_disk("D").hold(false);
    assert!(host.suspend_asleep("c", |host, _| {
        host.world.run_tasks();
        true
    }));
    host.resume(&["c"]).unwrap();
    assert_eq!([host.wait(one).status, host.wait(other).status], [Status::Ok; 2]);
    assert_eq!(bytes(&mut host, 7, 4), [8, 0xaa, 0xbb, 11]);
}

/// The new table has what the old one hydrated after the load.
#[test]
fn a_reload_takes_the_live_clone_over() {
    let mut host = host_with(2, STILL);
    host.load("c", "0 125 clone M D S 8 2 no_hydration no_discard_passdown").unwrap();
    assert_eq!(host.write("c", 8, 8, 0xaa), Status::Ok);
    let mut expected = source(0, SIZE);
    expected[8..16].fill(0xaa);
    host.suspend(&["c"]).unwrap();
    host.resume(&["c"]).unwrap();
    assert!(host.status("c").contains(" 1/16 0 2 no_hydration no_discard_passdown "), "{}", host.status("c"));
    assert_eq!(bytes(&mut host, 0, SIZE), expected);
    host.load("c", TABLE).unwrap();
    host.resume(&["c"]).unwrap();
    pass(&mut host, 2);
    assert_eq!(bytes(&mut host, 0, SIZE), expected);
    assert_eq!(host.get_disk("D").bytes(8, 1), [0xaa; 512]);
}

#[test]
fn tables_that_cannot_take_it_over() {
    let mut host = host_with(1, STILL);
    host.disk("D2", SIZE);
    host.disk("S2", SIZE);
    for (table, errno, why) in [
        ("0 125 clone M D S 16", EINVAL, "has another size or region size"),
        ("0 120 clone M D S 8", EINVAL, "has another size or region size"),
        ("0 125 clone M D2 S 8", EBUSY, "the live clone on it has the destination D"),
        ("0 125 clone M D S2 8", EINVAL, "S2 is not the source with which this clone began"),
    ] {
        let error = host.load("c", table).unwrap_err();
        assert_eq!((error.text.as_str(), error.errno), ("clone: Failed to load metadata", errno), "{error}");
        assert!(error.reason.contains(why), "{error}");
    }
    // Another device cannot have the metadata or the destination.
    host.make("other");
    host.disk("M2", 2048);
    assert_eq!(host.load("other", STILL).unwrap_err().errno, EBUSY);
    assert_eq!(host.load("other", "0 125 clone M2 D S 8").unwrap_err().errno, EBUSY);
}

#[test]
fn the_end_is_a_linear_table() {
    let mut host = host_with(2, TABLE);
    host.write("c", 60, 3, 0xaa);
    pass(&mut host, 2);
    assert_eq!(progress(&host).0, REGIONS);
    host.load("c", "0 125 linear D 0").unwrap();
    host.resume(&["c"]).unwrap();
    let mut expected = source(0, SIZE);
    expected[60..63].fill(0xaa);
    assert_eq!(bytes(&mut host, 0, SIZE), expected);
    // The metadata can be used for another clone, if it is zeroed.
    host.get_disk("M").put(0, &vec![0; 2048 * 512]);
    host.disk("D2", SIZE);
    host.create("again", "0 125 clone M D2 S 8 1 no_hydration").unwrap();
    assert!(host.status("again").contains(" 0/16 "), "{}", host.status("again"));
}

/// A table that is loaded after the clone ended reads the metadata, not the memory of the old one.
#[test]
fn a_new_table_after_the_end_reads_the_metadata() {
    let mut host = host_with(1, TABLE);
    pass(&mut host, 2);
    let old = host.device("c").live();
    host.load("c", "0 125 linear D 0").unwrap();
    host.resume(&["c"]).unwrap();
    host.get_disk("M").put(0, &vec![0; 2048 * 512]);
    host.load("c", STILL).unwrap();
    host.resume(&["c"]).unwrap();
    assert!(host.status("c").contains(" 0/16 "), "{}", host.status("c"));
    drop(old);
}
