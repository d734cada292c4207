//! Stacks of mapped devices: their depth and width, and which limits hold at which time.

mod mapped_fixture;

use mapped_fixture::Fixture;
use std::sync::Arc;
use udm_core::errno::{EINVAL, ELOOP, EMLINK};
use udm_core::{Batch, BioFlags, Device, Op, Sectors, Status};
use udm_dm::mapped::{DEPTH_MAX, LANES_MAX};
use udm_dm::testing::{TestDisk, bio_without_data, make_test_write_bio};

/// A stack that grows from the top: each device is loaded over a device without a table, so nothing
/// below it is deep.
#[test]
fn a_stack_that_grows_at_its_bottom_has_an_end() {
    let mut rig = Fixture::new();
    rig.disk("/d", 64);
    let devices: Vec<_> = (0..1800).map(|i| rig.make(&format!("s{i}"))).collect();
    let refused = (1..1800).find_map(|i| {
        let error = rig.load(&devices[i - 1], &format!("0 8 linear @s{i} 0")).err()?;
        Some((i, error.errno, error.reason))
    });
    let reason = "the stack would be 33 mapped devices deep, the maximum is 32".to_owned();
    assert_eq!(refused, Some((DEPTH_MAX, 40, reason)));
    // The same from the middle: two stacks that fit are joined.
    rig.load(&devices[DEPTH_MAX - 1], "0 8 linear /d 0").unwrap();
    for i in (1000..1010).rev() {
        rig.load(&devices[i], &format!("0 8 linear @s{} 0", i + 1)).unwrap();
    }
    assert_eq!(rig.load(&devices[DEPTH_MAX - 1], "0 8 linear @s1000 0").unwrap_err().errno, ELOOP);
    for i in (0..DEPTH_MAX).rev() {
        rig.resume(&devices[i], &mut []).unwrap();
    }
    let mut lane = rig.open(&devices[0]);
    assert_eq!(rig.world.run(0, &mut *lane, bio_without_data(Op::Read, 0, 8)).status, Status::Ok);
}

/// Tables that name the device below twice: the number of lanes doubles with each level, from the
/// top and from the bottom. An inactive table counts.
#[test]
fn lanes_cannot_double_without_end() {
    let twice = |i: usize| format!("0 4 linear @s{i} 0\n4 4 linear @s{i} 4");
    let mut rig = Fixture::new();
    rig.disk("/d", 64);
    let devices: Vec<_> = (0..40).map(|i| rig.make(&format!("s{i}"))).collect();
    let from_the_top = (1..40).find_map(|i| Some((i, rig.load(&devices[i - 1], &twice(i)).err()?)));
    let (level, error) = from_the_top.unwrap();
    assert_eq!((level, error.errno), (14, 31), "{error}");
    let words = format!("the stack would have 32767 open lanes on a core, the maximum is {LANES_MAX}");
    assert!(error.reason.starts_with(&words), "{error}");

    let mut rig = Fixture::new();
    rig.disk("/d", 64);
    let devices: Vec<_> = (0..40).map(|i| rig.make(&format!("s{i}"))).collect();
    rig.load(&devices[0], "0 8 linear /d 0").unwrap();
    rig.resume(&devices[0], &mut []).unwrap();
    let from_the_bottom = (1..40).find_map(|i| {
        let error = rig.load(&devices[i], &twice(i - 1)).err();
        rig.resume(&devices[i], &mut []).unwrap();
        Some((i, error?.errno))
    });
    assert_eq!(from_the_bottom, Some((13, 31)));
    // The accepted stack opens at once and works.
    let mut lane = rig.open(&devices[12]);
    assert_eq!(rig.world.run(0, &mut *lane, bio_without_data(Op::Read, 0, 8)).status, Status::Ok);
    // The lowest device counts 4096 times, so a second table of the same width is too much.
    assert_eq!(rig.load(&devices[0], "0 4 linear /d 0\n4 4 linear /d 4").unwrap_err().errno, EMLINK);
    assert_eq!(rig.load(&devices[5], &twice(4)).unwrap_err().errno, EMLINK);
    rig.load(&devices[12], &twice(11)).unwrap_err();
}

/// A former parent does not count any more, and creates no cycle.
#[test]
fn who_has_gone_is_not_above() {
    let mut rig = Fixture::new();
    rig.disk("/d", 64);
    let low = rig.live("low", "0 8 linear /d 0");
    let up = rig.live("up", "0 8 linear @low 0");
    assert_eq!(rig.load(&low, "0 8 linear @up 0").unwrap_err().text, "linear: Device lookup failed");
    rig.load(&up, "0 8 linear /d 0").unwrap();
    rig.resume(&up, &mut []).unwrap();
    rig.load(&low, "0 8 linear @up 0").unwrap();
    assert_eq!(rig.load(&up, "0 8 linear @low 0").unwrap_err().errno, EINVAL);
}

/// A disk with large blocks and a cache that takes no writes and no discards.
fn restricted_disk(rig: &mut Fixture, name: &str) -> Arc<TestDisk> {
    let disk = rig.disk(name, 64);
    disk.set_limits(|limits| {
        (limits.logical_block, limits.physical_block) = (4096, 4096);
        (limits.read_only, limits.write_cache, limits.fua) = (true, true, false);
        limits.max_discard = Sectors::ZERO;
    });
    disk
}

/// A table is loaded over a device without one; its limits are known when it becomes live.
#[test]
fn limits_are_those_of_the_resume() {
    let mut rig = Fixture::new();
    restricted_disk(&mut rig, "/stiff");
    let low = rig.make("low");
    let up = rig.make("up");
    rig.load(&up, "0 64 linear @low 0").unwrap();
    rig.load(&low, "0 64 linear /stiff 0").unwrap();
    rig.resume(&low, &mut []).unwrap();
    rig.resume(&up, &mut []).unwrap();
    let limits = up.limits();
    assert!(limits.read_only && limits.write_cache && up.info().read_only);
    assert_eq!((limits.logical_block, limits.max_discard), (4096, Sectors::ZERO));
    let mut lane = rig.open(&up);
    assert_eq!(rig.world.run(0, &mut *lane, make_test_write_bio(0, 8, 1)).status, Status::ReadOnly);

    // A table that no longer fits is refused at the resume, and the device stays unchanged.
    let odd = rig.make("odd");
    let late = rig.make("late");
    rig.load(&odd, "0 60 linear @late 4").unwrap();
    rig.load(&late, "0 64 linear /stiff 0").unwrap();
    rig.resume(&late, &mut []).unwrap();
    let error = rig.resume(&odd, &mut []).unwrap_err();
    assert_eq!(error.text, "start=4 not aligned to h/w logical block size 4096 of @late");
    assert!(!odd.is_suspended() && odd.live().is_none());
}

/// The lower device changes under a live upper one. The upper device keeps its limits on every lane
/// until it is reloaded. The lower device checks each request itself, so no invalid request gets
/// through.
#[test]
fn a_live_table_keeps_its_limits_and_the_one_below_checks() {
    let mut rig = Fixture::new();
    let soft = rig.disk("/soft", 64);
    let hard = restricted_disk(&mut rig, "/hard");
    let low = rig.live("low", "0 64 linear /soft 0");
    let up = rig.live("up", "0 64 linear @low 0");
    let mut early = rig.open(&up);
    let before = up.limits();
    rig.load(&low, "0 64 linear /hard 0").unwrap();
    rig.resume(&low, &mut [&mut early]).unwrap();
    let mut late = rig.open(&up);
    assert_eq!((up.limits(), low.limits().logical_block), (before, 4096));
    for lane in [&mut early, &mut late] {
        let mut end = |bio| rig.world.run(0, &mut **lane, bio).status;
        assert_eq!(end(bio_without_data(Op::Read, 0, 8)), Status::Ok);
        assert_eq!(end(bio_without_data(Op::Read, 1, 8)), Status::Inval, "not a block of the lower one");
        assert_eq!(end(bio_without_data(Op::Write, 0, 8)), Status::ReadOnly);
        assert_eq!(end(bio_without_data(Op::Discard, 0, 8)), Status::ReadOnly);
    }
    hard.set_limits(|limits| limits.read_only = false);
    let reloaded = "0 64 linear /hard 0";
    rig.load(&low, reloaded).unwrap();
    rig.resume(&low, &mut [&mut early, &mut late]).unwrap();
    drop(hard.take_log());
    // The write is durable, because the lower device knows of the cache.
    let mut bio = bio_without_data(Op::Write, 0, 8);
    bio.flags = BioFlags::FUA;
    assert_eq!(rig.world.run(0, &mut *early, bio).status, Status::Ok);
    let ops: Vec<Op> = hard.take_log().iter().map(|seen| seen.op).collect();
    assert_eq!(ops, [Op::Write, Op::Flush]);
    assert_eq!(rig.world.run(0, &mut *early, bio_without_data(Op::Discard, 0, 8)).status, Status::NotSupp);

    rig.load(&up, "0 64 linear @low 0").unwrap();
    assert_eq!(up.limits(), before, "a table that waits changes nothing");
    rig.resume(&up, &mut [&mut early, &mut late]).unwrap();
    assert_eq!(up.limits().logical_block, 4096);
    assert!(soft.take_log().is_empty());
}

/// When the upper table became live, there was no cache and no FUA; a cache below is added later.
#[test]
fn fua_is_kept_when_a_cache_comes_later() {
    let mut rig = Fixture::new();
    let plain = rig.disk("/plain", 64);
    plain.set_limits(|limits| limits.fua = false);
    let cached = rig.disk("/cached", 64);
    cached.set_limits(|limits| (limits.fua, limits.write_cache) = (false, true));
    let low = rig.live("low", "0 64 linear /plain 0");
    let up = rig.live("up", "0 64 linear @low 0");
    let mut lane = rig.open(&up);
    rig.load(&low, "0 64 linear /cached 0").unwrap();
    rig.resume(&low, &mut [&mut lane]).unwrap();
    let mut bio = bio_without_data(Op::Write, 0, 8);
    bio.flags = BioFlags::FUA;
    assert_eq!(rig.world.run(0, &mut *lane, bio).status, Status::Ok);
    let ops: Vec<Op> = cached.take_log().iter().map(|seen| seen.op).collect();
    assert_eq!(ops, [Op::Write, Op::Flush]);
}

/// Every way to release a table: a reload, and a resume that fails or is cancelled, also after a
/// clear of the inactive table. The file below is closed where the change is dropped, never by a
/// core.
#[test]
fn no_core_closes_what_a_table_had_open() {
    let mut rig = Fixture::new();
    let [first, second] = [rig.closable("/first"), rig.closable("/second")];
    let device = rig.live("d", "0 8 linear /first 0");
    let mut lane = rig.open(&device);
    rig.load(&device, "0 8 linear /second 0").unwrap();
    rig.resolver = Default::default();

    for how in ["fails", "is called off"] {
        let mut change = device.resume(Arc::new(|| {})).unwrap();
        let cores = rig.world.cores();
        if how == "fails" {
            second.refuse(true);
        }
        assert!(change.step(&*cores).is_none());
        if how == "is called off" {
            rig.world.poll(0, &mut *lane);
            let kept = device.inactive();
            device.clear();
            drop(kept);
            change.cancel(&*cores);
        }
        assert!(rig.finish(change, &mut [&mut lane], &mut Batch::new()).is_err(), "{how}");
        second.refuse(false);
        assert_eq!(first.closed_by(), None, "{how}");
    }
    assert_eq!(second.closed_by(), Some("the control side"));

    let third = rig.closable("/third");
    rig.load(&device, "0 8 linear /third 0").unwrap();
    rig.resolver = Default::default();
    rig.resume(&device, &mut [&mut lane]).unwrap();
    assert_eq!((first.closed_by(), third.closed_by()), (Some("the control side"), None));
}
