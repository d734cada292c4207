//! Several devices change together: all of them or none.

mod mapped_fixture;

use mapped_fixture::Fixture;
use std::sync::Arc;
use udm_core::{Device, Lane, Limits, Op, Sectors, Status};
use udm_dm::testing::{TestDisk, bio_without_data, make_test_write_bio};
use udm_dm::{DeviceSetTransition, IndexedDeviceError, MappedDevice, TransitionWakeFn};

fn no_wake() -> TransitionWakeFn {
    Arc::new(|| {})
}

fn suspend(devices: &[&Arc<MappedDevice>]) -> Result<DeviceSetTransition, IndexedDeviceError> {
    DeviceSetTransition::suspend(
        &devices.iter().map(|&d| Arc::clone(d)).collect::<Vec<_>>(),
        false,
        &no_wake(),
    )
}

fn resume(devices: &[&Arc<MappedDevice>]) -> Result<DeviceSetTransition, IndexedDeviceError> {
    DeviceSetTransition::resume(&devices.iter().map(|&d| Arc::clone(d)).collect::<Vec<_>>(), true, &no_wake())
}

impl Fixture {
    /// Steps `changes` to their end.
    fn all(
        &mut self,
        mut changes: DeviceSetTransition,
        lanes: &mut [&mut Box<dyn Lane>],
    ) -> Result<(), IndexedDeviceError> {
        let cores = self.world.cores();
        for _ in 0..100 {
            if let Some(result) = changes.step(&*cores) {
                return result;
            }
            self.turn(lanes);
        }
        panic!("the changes do not end");
    }

    /// One turn of the core. Returns how many requests came back.
    fn turn(&mut self, lanes: &mut [&mut Box<dyn Lane>]) -> usize {
        self.world.deliver(0);
        lanes.iter_mut().map(|lane| self.world.poll(0, &mut ***lane).len()).sum()
    }
}

/// In any order of the list, a device stops only after all devices above it have stopped, because
/// their bios in flight need it. Unrelated devices do not wait for each other.
#[test]
fn devices_come_to_rest_from_the_top() {
    let mut rig = Fixture::new();
    let (under_low, under_side) = (rig.disk("/d", 64), rig.disk("/e", 64));
    let low = rig.live("low", "0 64 linear /d 0");
    // Not in the set, and between two devices that are.
    rig.live("between", "0 64 linear @low 0");
    let up = rig.live("up", "0 32 linear @between 0\n32 32 zero");
    let side = rig.live("side", "0 64 linear /e 0");
    let (mut a, mut b) = (rig.open(&up), rig.open(&side));
    under_low.hold(true);
    under_side.hold(true);
    rig.world.submit(0, &mut *a, [make_test_write_bio(0, 8, 1)]);
    rig.world.submit(0, &mut *b, [make_test_write_bio(0, 8, 1)]);

    let mut changes = suspend(&[&low, &side, &up, &side]).unwrap();
    let cores = rig.world.cores();
    for _ in 0..5 {
        assert_eq!(changes.step(&*cores), None);
        assert_eq!(rig.turn(&mut [&mut a, &mut b]), 0);
    }
    assert_eq!([&up, &side, &low].map(|d| d.is_suspended()), [true, true, false]);
    under_low.hold(false);
    assert_eq!(rig.turn(&mut [&mut a, &mut b]), 1);
    for _ in 0..5 {
        assert_eq!(changes.step(&*cores), None, "one of them is not at rest");
        rig.turn(&mut [&mut a, &mut b]);
    }
    under_side.hold(false);
    assert_eq!(rig.turn(&mut [&mut a, &mut b]), 1);
    assert_eq!(rig.all(changes, &mut [&mut a, &mut b]), Ok(()));
    assert!([&up, &side, &low].iter().all(|d| d.is_suspended()));

    let changes = resume(&[&side, &up, &low]).unwrap();
    assert_eq!(rig.all(changes, &mut [&mut a, &mut b]), Ok(()));
    assert_eq!(rig.world.run(0, &mut *a, bio_without_data(Op::Read, 0, 8)).status, Status::Ok);
}

/// If one device fails, none changes: the live tables stay live and running.
#[test]
fn one_that_cannot_keeps_the_others_as_they_were() {
    let mut rig = Fixture::new();
    rig.disk("/d", 64);
    let new = rig.closable("/new");
    let devices = ["a", "b", "c"].map(|name| rig.live(name, "0 8 linear /d 0"));
    let mut lanes: Vec<_> = devices.iter().map(|device| rig.open(device)).collect();
    let mut lanes: Vec<_> = lanes.iter_mut().collect();
    rig.load(&devices[0], "0 8 zero").unwrap();
    rig.load(&devices[1], "0 8 linear /new 0").unwrap();
    let all: Vec<_> = devices.iter().collect();

    new.refuse(true);
    let changes = resume(&all).unwrap();
    let (place, error) = rig.all(changes, &mut lanes).unwrap_err();
    assert_eq!((place, error.errno), (1, 24), "{error}");
    for (device, lane) in devices.iter().zip(&mut lanes) {
        assert_eq!((device.is_suspended(), device.table_text(false)), (false, "0 8 linear 7:1 0".into()));
        assert_eq!(rig.world.run(0, &mut ***lane, bio_without_data(Op::Read, 0, 8)).status, Status::Ok);
    }
    new.refuse(false);
    let changes = resume(&all).unwrap();
    assert_eq!(rig.all(changes, &mut lanes), Ok(()));
    assert_eq!(devices[0].table_text(false), "0 8 zero ");
    assert_eq!(devices[1].table_text(false), "0 8 linear 7:2 0");

    // If one device is already changing, no change begins.
    let busy = devices[2].suspend(false, no_wake()).unwrap();
    assert_eq!(suspend(&all).err().map(|(place, error)| (place, error.errno)), Some((2, 16)));
    drop(busy);
    let changes = suspend(&all).unwrap();
    assert_eq!(rig.all(changes, &mut lanes), Ok(()));
}

/// If a change is cancelled or a table fails at any step, the change has happened to all devices or
/// to none. If a suspend is cancelled, a device that was suspended before stays suspended. If a
/// resume is cancelled, it runs.
#[test]
fn called_off_anywhere_it_is_all_or_none() {
    for resumes in [false, true] {
        let mut ends = [0, 0];
        for steps in 0..12 {
            let mut rig = Fixture::new();
            rig.disk("/d", 64);
            let low = rig.live("low", "0 64 linear /d 0");
            let up = rig.live("up", "0 64 linear @low 0");
            let before = rig.live("before", "0 64 linear /d 0");
            let mut lanes = [&up, &low, &before].map(|device| rig.open(device));
            let mut lanes: Vec<_> = lanes.iter_mut().collect();
            let first = suspend(&[&before]).unwrap();
            assert_eq!(rig.all(first, &mut lanes), Ok(()));
            let devices = [&low, &up, &before];
            if resumes {
                rig.load(&low, "0 64 zero").unwrap();
                rig.load(&up, "0 32 linear @low 0\n32 32 error").unwrap();
            }
            let mut changes = if resumes { resume(&devices) } else { suspend(&devices) }.unwrap();
            let cores = rig.world.cores();
            for _ in 0..steps {
                let _ = changes.step(&*cores);
                rig.turn(&mut lanes);
            }
            changes.cancel(&*cores);
            let done = rig.all(changes, &mut lanes);
            assert!(done.is_ok() || done.as_ref().is_err_and(|(_, e)| e.errno == 4), "{done:?}");
            let suspended = devices.map(|device| device.is_suspended());
            let new = [&low, &up].map(|device| !device.table_text(false).contains("0 64 linear"));
            let expected = match (resumes, done.is_ok()) {
                (false, true) => ([true; 3], [false; 2]),
                (false, false) => ([false, false, true], [false; 2]),
                (true, ok) => ([false; 3], [ok; 2]),
            };
            assert_eq!((suspended, new), expected, "after {steps} steps");
            if resumes || done.is_err() {
                assert_eq!(
                    rig.world.run(0, &mut **lanes[0], bio_without_data(Op::Read, 0, 8)).status,
                    Status::Ok
                );
            }
            ends[usize::from(done.is_ok())] += 1;
        }
        assert!(ends[0] > 0 && ends[1] > 0, "both ends were seen: {ends:?}");
    }
}

/// A suspended device holds bios of a device above. Both can be resumed, even if held bios should
/// fail.
#[test]
fn devices_do_not_wait_for_what_one_of_them_holds() {
    let mut rig = Fixture::new();
    let disk = rig.disk("/d", 64);
    let low = rig.live("low", "0 64 linear /d 0");
    let up = rig.live("up", "0 64 linear @low 0");
    let mut lane = rig.open(&up);
    let first = suspend(&[&low]).unwrap();
    assert_eq!(rig.all(first, &mut [&mut lane]), Ok(()));
    rig.world.submit(0, &mut *lane, [make_test_write_bio(0, 8, 1)]);
    rig.load(&up, "0 32 linear @low 0\n32 32 zero").unwrap();
    let changes =
        DeviceSetTransition::resume(&[Arc::clone(&low), Arc::clone(&up)], false, &no_wake()).unwrap();
    assert_eq!(rig.all(changes, &mut [&mut lane]), Ok(()));
    rig.turn(&mut [&mut lane]);
    assert_eq!((disk.take_log().len(), up.info().targets), (1, 2));
}

/// Devices get their first tables together: the upper table sees the coming limits of the lower
/// one.
#[test]
fn a_table_goes_by_the_limits_that_come_below_it() {
    let mut rig = Fixture::new();
    let mut limits = Limits::new(Sectors(64));
    limits.max_sectors = Sectors(4);
    let small = TestDisk::null(limits);
    rig.resolver.add("/small", udm_core::DevNo { major: 8, minor: 1 }, small);
    rig.disk("/d", 128);
    let (low, up) = (rig.make("low"), rig.make("up"));
    rig.load(&low, "0 64 linear /small 0").unwrap();
    rig.load(&up, "0 64 linear @low 0").unwrap();
    let changes = resume(&[&up, &low]).unwrap();
    assert_eq!(rig.all(changes, &mut []), Ok(()));
    assert_eq!((up.limits().size, up.limits().max_sectors), (Sectors(64), Sectors(4)));
    let mut lane = rig.open(&up);
    assert_eq!(rig.world.run(0, &mut *lane, bio_without_data(Op::Read, 0, 8)).status, Status::Ok);

    // A table that would not fit is refused, and both devices stay unchanged.
    rig.load(&low, "0 32 linear /d 0").unwrap();
    rig.load(&up, "0 64 linear @low 0").unwrap();
    let changes = resume(&[&up, &low]).unwrap();
    let (place, error) = rig.all(changes, &mut [&mut lane]).unwrap_err();
    assert_eq!((place, error.to_string().contains("low too small for target")), (0, true), "{error}");
    assert_eq!((low.limits().size, up.is_suspended()), (Sectors(64), false));
}

/// Coming limits of a device count only for devices in the same change. For others they may never
/// become true.
#[test]
fn limits_that_never_come_are_nobodys() {
    let mut rig = Fixture::new();
    let mut limits = Limits::new(Sectors(64));
    limits.max_sectors = Sectors(4);
    let small = TestDisk::null(limits);
    rig.resolver.add("/small", udm_core::DevNo { major: 8, minor: 1 }, small);
    rig.disk("/d", 64);
    let low = rig.live("low", "0 64 linear /small 0");
    let up = rig.make("up");
    rig.load(&up, "0 64 linear @low 0").unwrap();
    rig.load(&low, "0 64 linear /d 0").unwrap();
    let mut lane = rig.open(&low);
    let cores = rig.world.cores();
    let mut lower = resume(&[&low]).unwrap();
    assert_eq!(lower.step(&*cores), None, "it is being prepared");
    let upper = resume(&[&up]).unwrap();
    assert_eq!(rig.all(upper, &mut []), Ok(()));
    lower.cancel(&*cores);
    assert_eq!(rig.all(lower, &mut [&mut lane]).unwrap_err().1.errno, 4);
    assert_eq!((low.limits().max_sectors, up.limits().max_sectors), (Sectors(4), Sectors(4)));
}
