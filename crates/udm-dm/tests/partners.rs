//! Devices that are renewed because a partner becomes live or is retired: see `Target::partners`.

mod partners_fixture;

use partners_fixture::{Fixture, LanePairs, LayerLog, no_wake, to_vec_of_devices};
use std::sync::atomic::Ordering::Relaxed;
use udm_dm::DeviceSetTransition;
use udm_dm::testing::make_test_write_bio;

const TOP: &str = "0 64 top /d";
const SIDE: &str = "0 64 side /d";

/// The sides that a request through lane `lane` meets on both cores, and the number of its pieces.
fn sides_seen(rig: &mut Fixture, shared: &LayerLog, lane: usize, lanes: &mut LanePairs) -> (String, usize) {
    for core in 0..2 {
        rig.submit(core, lane, make_test_write_bio(8 * core as u64, 2, 1), lanes);
    }
    for _ in 0..10 {
        rig.turn(lanes);
    }
    let met = std::mem::take(&mut *shared.met.lock().unwrap());
    assert!(met.iter().all(|(_, sides)| *sides == met[0].1), "{met:?}");
    (met[0].1.clone(), met.len() / 2)
}

/// The hooks run in order, including the renewal of the partner. The new table and the retired one
/// have nothing in flight. The lanes of the partner know of both changes.
#[test]
fn a_partner_is_renewed_when_a_table_comes_and_when_it_goes() {
    let (mut rig, mut lanes) = (Fixture::new(), LanePairs::default());
    let (_disk, shared) = rig.disk("/d");
    let top = rig.live("t", TOP, &mut lanes);
    let lane = rig.open(&top, &mut lanes);
    assert_eq!(shared.take_log(), ["preresume t", "resume t"]);
    assert_eq!(sides_seen(&mut rig, &shared, lane, &mut lanes), (String::new(), 1));

    let side = rig.live("s", SIDE, &mut lanes);
    let come = ["preresume s", "presuspend t", "postsuspend t", "resume s", "resume t"];
    assert_eq!(shared.take_log(), come);
    assert_eq!(sides_seen(&mut rig, &shared, lane, &mut lanes), ("s".into(), 2));
    assert!(!top.is_suspended() && top.inactive().is_none());

    // Replaced by a table of the same type: the old one is retired before the new one resumes.
    rig.load(&side, SIDE);
    rig.resume(&[&side], &mut lanes).unwrap();
    let log = shared.take_log();
    let at = |what: &str| log.iter().position(|entry| entry == what).unwrap();
    assert!(at("retired s") < at("resume s") && at("postsuspend t") < at("retired s"), "{log:?}");
    assert!(at("postsuspend s") < at("retired s") && at("resume s") < at("resume t"), "{log:?}");
    assert_eq!(sides_seen(&mut rig, &shared, lane, &mut lanes), ("s".into(), 2));

    // A suspend and a resume change nothing for others.
    rig.suspend(&[&side], &mut lanes).unwrap();
    rig.resume(&[&side], &mut lanes).unwrap();
    assert_eq!(shared.take_log(), ["presuspend s", "postsuspend s", "preresume s", "resume s"]);

    // The partner keeps its inactive table.
    rig.load(&top, "0 64 error");
    rig.remove(&side, &mut lanes).unwrap();
    let log = shared.take_log();
    assert!(log.ends_with(&["retired s".into(), "resume t".into()]) && log.len() == 5 + 1, "{log:?}");
    assert_eq!(sides_seen(&mut rig, &shared, lane, &mut lanes), (String::new(), 1));
    assert!(side.is_suspended() && top.table_text(true).contains("error"));
}

/// If a lane cannot be opened on one core, or a target refuses, the change is cancelled and nothing
/// changes.
#[test]
fn what_fails_changes_nothing() {
    let (mut rig, mut lanes) = (Fixture::new(), LanePairs::default());
    let (_disk, shared) = rig.disk("/d");
    let top = rig.live("t", TOP, &mut lanes);
    let lane = rig.open(&top, &mut lanes);
    let before = rig.live("before", SIDE, &mut lanes);
    let side = rig.make("s");
    rig.load(&side, SIDE);

    *shared.no_lane.lock().unwrap() = Some(1);
    let (place, error) = rig.resume(&[&side], &mut lanes).unwrap_err();
    assert_eq!((place, error.errno), (0, 24));
    assert_eq!(error.reason, "t has to be renewed with it: no lane of a top");
    let (_, error) = rig.remove(&before, &mut lanes).unwrap_err();
    assert_eq!(error.errno, 24);
    assert!(side.live().is_none() && side.inactive().is_some() && !before.is_suspended());
    *shared.no_lane.lock().unwrap() = None;
    assert_eq!(sides_seen(&mut rig, &shared, lane, &mut lanes), ("before".into(), 2));

    shared.refuse.store(true, Relaxed);
    shared.take_log();
    let (_, error) = rig.resume(&[&side], &mut lanes).unwrap_err();
    assert_eq!((error.text.as_str(), error.line), ("side: not now", Some(0)));
    assert_eq!(shared.take_log(), ["preresume s"]);
    // A table that continues after a suspend is asked too; if it refuses, the device stays
    // suspended.
    rig.suspend(&[&before], &mut lanes).unwrap();
    rig.resume(&[&before], &mut lanes).unwrap_err();
    assert!(before.is_suspended());
    shared.refuse.store(false, Relaxed);
    rig.resume(&[&before, &side], &mut lanes).unwrap();
    assert_eq!(sides_seen(&mut rig, &shared, lane, &mut lanes), ("before s".into(), 2));
}

/// A change of a side does not resume a suspended partner. The partner is renewed at its own
/// resume. If this fails, it does not continue with its old lanes.
#[test]
fn a_suspended_partner_is_renewed_later() {
    let (mut rig, mut lanes) = (Fixture::new(), LanePairs::default());
    let (_disk, shared) = rig.disk("/d");
    let top = rig.live("t", TOP, &mut lanes);
    let lane = rig.open(&top, &mut lanes);
    rig.suspend(&[&top], &mut lanes).unwrap();
    rig.submit(0, lane, make_test_write_bio(0, 2, 1), &mut lanes);
    shared.take_log();
    let side = rig.live("s", SIDE, &mut lanes);
    assert_eq!(shared.take_log(), ["preresume s", "resume s"]);
    assert!(top.is_suspended());

    *shared.no_lane.lock().unwrap() = Some(1);
    assert_eq!(rig.resume(&[&top], &mut lanes).unwrap_err().1.errno, 24);
    assert!(top.is_suspended(), "its lanes don't know of the side");
    // The partner also stays suspended if its new table is refused, or the change is cancelled.
    rig.load(&top, TOP);
    assert_eq!(rig.resume(&[&top], &mut lanes).unwrap_err().1.errno, 24);
    assert!(top.is_suspended());
    *shared.no_lane.lock().unwrap() = None;
    let mut changes = DeviceSetTransition::resume(&to_vec_of_devices(&[&top]), true, &no_wake()).unwrap();
    assert!(changes.step(&*rig.cores()).is_none());
    assert!(changes.cancel(&*rig.cores()));
    rig.all(changes, &mut lanes).unwrap_err();
    assert!(top.is_suspended() && shared.met.lock().unwrap().is_empty());
    top.clear();

    rig.resume(&[&top], &mut lanes).unwrap();
    rig.turn(&mut lanes);
    let met = std::mem::take(&mut *shared.met.lock().unwrap());
    assert!(met.iter().all(|(_, sides)| sides == "s") && met.len() == 2, "{met:?}");
    // It is renewed once: the next resume is an ordinary one.
    rig.suspend(&[&top], &mut lanes).unwrap();
    shared.take_log();
    *shared.no_lane.lock().unwrap() = Some(1);
    rig.resume(&[&top], &mut lanes).unwrap();
    assert_eq!(shared.take_log(), ["preresume t", "resume t"]);
    *shared.no_lane.lock().unwrap() = None;

    // The partner is suspended again when the side is removed. It resumes with a new table, so the
    // old one is not renewed.
    rig.suspend(&[&top], &mut lanes).unwrap();
    rig.remove(&side, &mut lanes).unwrap();
    rig.load(&top, TOP);
    rig.resume(&[&top], &mut lanes).unwrap();
    assert_eq!(sides_seen(&mut rig, &shared, lane, &mut lanes), (String::new(), 1));
}

/// One resume names both devices: there is one change, whether the partner runs or is suspended.
#[test]
fn a_partner_of_the_set_is_renewed_in_it() {
    for rests in [false, true] {
        let (mut rig, mut lanes) = (Fixture::new(), LanePairs::default());
        let (_disk, shared) = rig.disk("/d");
        let top = rig.live("t", TOP, &mut lanes);
        let lane = rig.open(&top, &mut lanes);
        if rests {
            rig.suspend(&[&top], &mut lanes).unwrap();
        }
        let side = rig.make("s");
        rig.load(&side, SIDE);
        rig.resume(&[&top, &side], &mut lanes).unwrap();
        assert!(!top.is_suspended());
        assert_eq!(sides_seen(&mut rig, &shared, lane, &mut lanes), ("s".into(), 2));
        // Both devices are removed together.
        let changes = DeviceSetTransition::remove(&to_vec_of_devices(&[&side, &top]), &no_wake()).unwrap();
        rig.all(changes, &mut lanes).unwrap();
        assert!(top.is_suspended() && side.is_suspended());
    }
}

/// Requests in flight complete first; new requests wait, in order. None is lost, whether or not the
/// change is cancelled at some step.
#[test]
fn requests_wait_for_a_renewal_in_order() {
    let mut ends = [0, 0];
    for cancel_at in 0..14 {
        for leaves in [false, true] {
            let (mut rig, mut lanes) = (Fixture::new(), LanePairs::default());
            let (disk, shared) = rig.disk("/d");
            let top = rig.live("t", TOP, &mut lanes);
            let lane = rig.open(&top, &mut lanes);
            let side = rig.make("s");
            rig.load(&side, SIDE);
            if leaves {
                rig.resume(&[&side], &mut lanes).unwrap();
            }
            let _ = disk.take_log();
            disk.hold(true);
            rig.submit(0, lane, make_test_write_bio(0, 1, 1), &mut lanes);
            rig.submit(1, lane, make_test_write_bio(1, 1, 1), &mut lanes);
            let devices = to_vec_of_devices(&[&side]);
            let mut changes = match leaves {
                true => DeviceSetTransition::remove(&devices, &no_wake()),
                false => DeviceSetTransition::resume(&devices, true, &no_wake()),
            }
            .unwrap();
            let (mut home, mut sent, mut result) = (0, 2, None);
            for step in 0..60 {
                if step == cancel_at {
                    changes.cancel(&*rig.cores());
                }
                if step == 6 {
                    disk.hold(false);
                }
                result = changes.step(&*rig.cores());
                if sent < 20 {
                    rig.submit(step % 2, lane, make_test_write_bio(sent, 1, 1), &mut lanes);
                    sent += 1;
                }
                home += rig.turn(&mut lanes).len();
                if result.is_some() && home == 20 {
                    break;
                }
            }
            let result = result.expect("the change ends");
            assert_eq!(home, 20, "all completed");
            let per_core = |core: u64| {
                let log = disk.take_log().into_iter().map(|seen| seen.sector);
                log.filter(move |sector| sector % 2 == core).collect::<Vec<_>>()
            };
            let seen = per_core(0);
            assert!(seen.is_sorted(), "{seen:?}");
            let is_live = result.is_ok() != leaves;
            let expected = if is_live { ("s".to_owned(), 2) } else { (String::new(), 1) };
            shared.met.lock().unwrap().clear();
            assert_eq!(sides_seen(&mut rig, &shared, lane, &mut lanes), expected);
            assert_eq!((top.is_suspended(), side.is_suspended()), (false, leaves && result.is_ok()));
            ends[usize::from(result.is_ok())] += 1;
        }
    }
    assert!(ends[0] > 4 && ends[1] > 4, "both ends were seen: {ends:?}");
}

/// A partner that becomes live after the set was created is found. Its lanes may have opened before
/// the side was asked, or begun before the side is live. The change is cancelled and can be
/// retried.
#[test]
fn a_partner_that_comes_between_is_found() {
    for (steps, leaves) in [(0, false), (1, false), (2, false), (0, true), (1, true)] {
        let (mut rig, mut lanes) = (Fixture::new(), LanePairs::default());
        let (_disk, shared) = rig.disk("/d");
        let side = rig.make("s");
        rig.load(&side, SIDE);
        if leaves {
            rig.resume(&[&side], &mut lanes).unwrap();
        }
        let set = to_vec_of_devices(&[&side]);
        let begin = || match leaves {
            true => DeviceSetTransition::remove(&set, &no_wake()).unwrap(),
            false => DeviceSetTransition::resume(&set, true, &no_wake()).unwrap(),
        };
        let mut changes = begin();
        assert!(DeviceSetTransition::partners_of_resume(&set).is_empty());
        for _ in 0..steps {
            assert!(changes.step(&*rig.cores()).is_none());
            rig.turn(&mut lanes);
        }
        let top = rig.live("t", TOP, &mut lanes);
        let lane = rig.open(&top, &mut lanes);
        let renewed = if leaves {
            DeviceSetTransition::partners_of_removal(&set)
        } else {
            DeviceSetTransition::partners_of_resume(&set)
        };
        assert_eq!(renewed[0].name(), "t");
        let result = loop {
            if let Some(result) = changes.step(&*rig.cores()) {
                break result;
            }
            rig.turn(&mut lanes);
        };
        assert_eq!(result.unwrap_err().1.errno, 16);
        assert!(changes.must_retry() && side.live().is_some() == leaves && !side.is_suspended());
        let (with, without) = (("s".to_owned(), 2), (String::new(), 1));
        let (before, behind) = if leaves { (with, without) } else { (without, with) };
        assert_eq!(sides_seen(&mut rig, &shared, lane, &mut lanes), before);
        let changes = begin();
        rig.all(changes, &mut lanes).unwrap();
        assert_eq!(sides_seen(&mut rig, &shared, lane, &mut lanes), behind);
    }
}

/// Partners that must not be changed stay unchanged: the change must be retried.
#[test]
fn partners_that_may_not_be_changed_are_left_alone() {
    let (mut rig, mut lanes) = (Fixture::new(), LanePairs::default());
    let (_disk, shared) = rig.disk("/d");
    let top = rig.live("t", TOP, &mut lanes);
    let side = rig.make("s");
    rig.load(&side, SIDE);
    let suspending = top.suspend(true, no_wake()).unwrap();
    let mut changes =
        DeviceSetTransition::resume_filtered(&to_vec_of_devices(&[&side]), true, &no_wake(), |_| false)
            .unwrap();
    shared.take_log();
    let _ = changes.step(&*rig.cores());
    assert!(changes.must_retry());
    rig.all(changes, &mut lanes).unwrap_err();
    assert_eq!(shared.take_log(), ["preresume s"]);
    drop(suspending);
    rig.resume(&[&side, &top], &mut lanes).unwrap();
}

/// Partners also allow only one change at a time, whichever device begins first.
#[test]
fn a_partner_under_change_is_busy() {
    let (mut rig, mut lanes) = (Fixture::new(), LanePairs::default());
    let (_disk, _shared) = rig.disk("/d");
    let top = rig.live("t", TOP, &mut lanes);
    let side = rig.make("s");
    rig.load(&side, SIDE);
    let busy = top.suspend(true, no_wake()).unwrap();
    let (place, error) =
        DeviceSetTransition::resume(&to_vec_of_devices(&[&side]), true, &no_wake()).err().unwrap();
    assert_eq!((place, error.errno), (0, 16));
    assert!(error.reason.starts_with("t has to be renewed with it"), "{error}");
    drop(busy);
    rig.resume(&[&top], &mut lanes).unwrap();
    let changes = DeviceSetTransition::resume(&to_vec_of_devices(&[&side]), true, &no_wake()).unwrap();
    assert_eq!(top.suspend(true, no_wake()).err().unwrap().errno, 16);
    rig.all(changes, &mut lanes).unwrap();
    rig.suspend(&[&top], &mut lanes).unwrap();
}

/// Lanes that open at any moment of a change know the live tables, and so do existing lanes.
#[test]
fn a_lane_that_is_opened_meanwhile_knows_too() {
    for steps in 0..8 {
        let (mut rig, mut lanes) = (Fixture::new(), LanePairs::default());
        let (_disk, shared) = rig.disk("/d");
        let top = rig.live("t", TOP, &mut lanes);
        rig.open(&top, &mut lanes);
        let side = rig.make("s");
        rig.load(&side, SIDE);
        let mut changes =
            DeviceSetTransition::resume(&to_vec_of_devices(&[&side]), true, &no_wake()).unwrap();
        for _ in 0..steps {
            let _ = changes.step(&*rig.cores());
            rig.turn(&mut lanes);
        }
        let late = rig.open(&top, &mut lanes);
        // Through lanes opened before and after the change: each asserts that it knows the live
        // tables.
        rig.submit(0, late, make_test_write_bio(0, 2, 1), &mut lanes);
        rig.all(changes, &mut lanes).unwrap();
        rig.turn(&mut lanes);
        shared.met.lock().unwrap().clear();
        assert_eq!(sides_seen(&mut rig, &shared, late, &mut lanes), ("s".into(), 2));
        rig.remove(&side, &mut lanes).unwrap();
        assert_eq!(sides_seen(&mut rig, &shared, late, &mut lanes), (String::new(), 1));
    }
}
