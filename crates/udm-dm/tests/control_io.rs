//! Control-side I/O: reads and writes of a device, without an own lane.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;
use udm_core::errno::{EINVAL, EIO, ENODATA, ENOMEM, EPERM, ETIMEDOUT};
use udm_core::{Device, DeviceControlError, Limits, Nanos, Op, SECTOR_SIZE, Sector, Sectors, Status};
use udm_dm::control_io::{flush_device, read_sector_ranges, read_sectors, write_sectors};
use udm_dm::testing::{
    LoggedTestDiskRequest, SteppedTestCores, TestControlIo, TestDeviceNameResolver, TestDisk,
    bio_without_data, copy_bio_data,
};
use udm_dm::{ControlIo, DeviceTransition, MappedDevice, Table, TargetError, TransitionWakeFn};

fn pattern(sectors: u64) -> Vec<u8> {
    (0..sectors * SECTOR_SIZE).map(|i| (i / 64 * 7 + i) as u8).collect()
}

fn disk(sectors: u64) -> (Arc<TestDisk>, Arc<dyn Device>) {
    let disk = TestDisk::new(sectors);
    (Arc::clone(&disk), disk)
}

#[test]
fn what_is_written_is_read() {
    let (disk, device) = disk(8192);
    disk.set_limits(|limits| limits.max_sectors = Sectors(31));
    let (io, bytes) = (TestControlIo::new(), pattern(5000));
    write_sectors(&io, &device, Sector(17), &bytes).unwrap();
    flush_device(&io, &device).unwrap();
    assert_eq!(disk.bytes(17, 5000), bytes);
    assert_eq!(read_sectors(&io, &device, Sector(17), Sectors(5000)).unwrap(), bytes);
    let log = disk.take_log();
    assert!(log.iter().all(|seen| seen.sectors <= 31));
    assert_eq!(log.iter().filter(|seen| seen.op == Op::Flush).count(), 1);
    let written = log.iter().position(|seen| seen.op == Op::Flush).unwrap();
    assert!(log[..written].iter().all(|seen| seen.op == Op::Write));
    assert_eq!(disk.opened(), 0, "no lane is left");
}

/// Requests are whole blocks, whatever the limit on their length.
#[test]
fn pieces_are_whole_blocks() {
    let (disk, device) = disk(1024);
    disk.set_limits(|limits| (limits.logical_block, limits.max_sectors) = (4096, Sectors(29)));
    let bytes = pattern(80);
    write_sectors(&TestControlIo::new(), &device, Sector(8), &bytes).unwrap();
    assert_eq!(read_sectors(&TestControlIo::new(), &device, Sector(8), Sectors(80)).unwrap(), bytes);
    assert!(disk.take_log().iter().all(|seen| seen.sector % 8 == 0 && seen.sectors % 8 == 0));
    let error = read_sectors(&TestControlIo::new(), &device, Sector(4), Sectors(8)).unwrap_err();
    assert_eq!((error.errno, &*error.text), (EINVAL, "sector 4 can't be read"));
}

#[test]
fn ranges_come_in_order_and_no_more_than_asked_for() {
    let (disk, device) = disk(1 << 16);
    let ranges: Vec<_> = (0..2000).map(|i| (Sector((i * 7919) % 65_000), Sectors(8))).collect();
    ranges.iter().enumerate().for_each(|(i, at)| disk.put(at.0.0, &[i as u8; 512]));
    disk.reverse(true);
    let mut seen = 0;
    read_sector_ranges(&TestControlIo::new(), &device, &ranges, |i, bytes| {
        assert_eq!((i, bytes.len()), (seen, 4096));
        seen += 1;
        Ok::<_, DeviceControlError>(ControlFlow::Continue(()))
    })
    .unwrap();
    assert_eq!(seen, 2000);
    let starts: BTreeSet<u64> = disk.take_log().iter().map(|seen| seen.sector).collect();
    assert_eq!(starts, ranges.iter().map(|at| at.0.0).collect());
    // The first range is enough; little else is read.
    read_sector_ranges(&TestControlIo::new(), &device, &ranges, |_, _| {
        Ok::<_, DeviceControlError>(ControlFlow::Break(()))
    })
    .unwrap();
    assert!(disk.take_log().len() <= 16);
    let refused = read_sector_ranges(&TestControlIo::new(), &device, &ranges, |i, _| match i {
        300 => Err(DeviceControlError::new(EINVAL, "a bad one")),
        _ => Ok(ControlFlow::Continue(())),
    });
    assert_eq!(refused.unwrap_err().text, "a bad one");
    assert!(disk.take_log().len() <= 300 + 256);
    assert!(
        read_sector_ranges::<DeviceControlError>(&TestControlIo::new(), &device, &[], |_, _| panic!(
            "there is none"
        ))
        .is_ok()
    );
}

/// A range longer than one read arrives as one range.
#[test]
fn a_long_range_is_one() {
    let (disk, device) = disk(10_000);
    let bytes = pattern(9000);
    disk.put(100, &bytes);
    let mut lens = Vec::new();
    read_sector_ranges(
        &TestControlIo::new(),
        &device,
        &[(Sector(0), Sectors(1)), (Sector(100), Sectors(9000))],
        |i, got| {
            assert!(i == 0 || got == bytes);
            lens.push(got.len());
            Ok::<_, DeviceControlError>(ControlFlow::Continue(()))
        },
    )
    .unwrap();
    assert_eq!(lens, [512, bytes.len()]);
}

#[test]
fn each_bio_has_its_own_status_and_place() {
    let (disk, device) = disk(64);
    disk.set_verdict(|bio| if bio.sector.0 == 8 { Status::Medium } else { Status::Ok });
    disk.put(16, &[3; 512]);
    disk.reverse(true);
    let mut long = udm_dm::testing::make_test_read_bio(0, 8);
    long.sectors = Sectors(9);
    let bios = vec![
        udm_dm::testing::make_test_read_bio(16, 1),
        udm_dm::testing::make_test_read_bio(8, 1),
        udm_dm::testing::make_test_read_bio(64, 1),
        bio_without_data(Op::Flush, 0, 0),
        long,
        udm_dm::testing::make_test_write_bio(24, 2, 9),
    ];
    let back = TestControlIo::new().run(&device, bios).unwrap();
    let status: Vec<_> = back.iter().map(|bio| bio.status).collect();
    assert_eq!(status, [Status::Ok, Status::Medium, Status::IoErr, Status::Ok, Status::Inval, Status::Ok]);
    assert_eq!(copy_bio_data(&back[0]), [3; 512]);
    assert_eq!(back.iter().map(|bio| bio.sector.0).collect::<Vec<_>>(), [16, 8, 64, 0, 0, 24]);
    assert_eq!(disk.bytes(25, 1), [10; 512]);
    let sent: Vec<LoggedTestDiskRequest> = disk.take_log();
    assert!(sent.iter().all(|seen| seen.sector < 64), "what is out of range is not sent: {sent:?}");
}

#[test]
fn errors_say_what_failed() {
    let (disk, device) = disk(64);
    let io = TestControlIo::new();
    disk.fail(Status::Medium);
    let error = read_sectors(&io, &device, Sector(3), Sectors(2)).unwrap_err();
    assert_eq!((error.errno, &*error.text), (ENODATA, "sector 3 can't be read"));
    let error = write_sectors(&io, &device, Sector(5), &[0; 512]).unwrap_err();
    assert_eq!((error.errno, &*error.text), (ENODATA, "sector 5 can't be written"));
    assert_eq!(flush_device(&io, &device).unwrap_err().text, "it can't be flushed");
    disk.fail(Status::Ok);
    disk.set_limits(|limits| limits.read_only = true);
    assert_eq!(write_sectors(&io, &device, Sector(5), &[0; 512]).unwrap_err().errno, EPERM);
    assert_eq!(read_sectors(&io, &device, Sector(64), Sectors(1)).unwrap_err().errno, EIO);
    assert_eq!(read_sectors(&io, &device, Sector(u64::MAX), Sectors(9)).unwrap_err().errno, EIO);
    disk.refuse(Some(DeviceControlError::new(ENOMEM, "no lane")));
    assert_eq!(
        read_sectors(&io, &device, Sector(0), Sectors(1)).unwrap_err(),
        DeviceControlError::new(ENOMEM, "no lane")
    );
}

/// I/O through a mapped device; a suspended one does not answer.
#[test]
fn mapped_devices_below() {
    let mut resolver = TestDeviceNameResolver::new();
    let (below, device) = disk(4096);
    below.set_limits(|limits| limits.max_sectors = Sectors(16));
    resolver.add("/a", "253:0".parse().unwrap(), device);
    let lines = udm_wire::table::parse_table("0 1000 linear /a 8\n1000 1000 linear /a 2000").unwrap();
    let mapped = MappedDevice::new("m", None, "254:0".parse().unwrap()).unwrap();
    let io = TestControlIo::new();
    mapped.load(Table::build(udm_targets::TARGETS, &lines, &mut resolver, &io, 1).unwrap()).unwrap();
    let device: Arc<dyn Device> = Arc::<MappedDevice>::clone(&mapped);
    finish_transition(&mut |wake| mapped.resume(wake));
    let bytes = pattern(600);
    write_sectors(&io, &device, Sector(700), &bytes).unwrap();
    assert_eq!(read_sectors(&io, &device, Sector(700), Sectors(600)).unwrap(), bytes);
    assert_eq!(below.bytes(2000, 300), bytes[300 * 512..]);
    finish_transition(&mut |wake| mapped.suspend(false, wake));
    assert_eq!(
        flush_device(&io, &device),
        Err(DeviceControlError::new(ETIMEDOUT, "the store does not answer"))
    );
}

/// Steps a change to its end, on cores without lanes.
fn finish_transition(change: &mut dyn FnMut(TransitionWakeFn) -> Result<DeviceTransition, TargetError>) {
    let mut world = SteppedTestCores::new(1);
    let mut change = change(Arc::new(|| {})).unwrap();
    for _ in 0..100 {
        world.deliver(0);
        if let Some(done) = change.step(&*world.cores()) {
            return done.unwrap();
        }
    }
    panic!("a change without lanes has nobody to wait for");
}

#[test]
fn a_device_that_keeps_what_it_is_given_does_not_answer() {
    let (disk, device) = disk(64);
    disk.hold(true);
    let error = read_sectors(&TestControlIo::new(), &device, Sector(3), Sectors(2)).unwrap_err();
    assert_eq!((error.errno, &*error.text), (ETIMEDOUT, "the store does not answer"));
}

/// If a lane waits for a time, the clock advances.
#[test]
fn delays_are_waited_for() {
    let mut resolver = TestDeviceNameResolver::new();
    resolver.add("/a", "253:0".parse().unwrap(), TestDisk::null(Limits::new(Sectors(64))));
    let lines = udm_wire::table::parse_table("0 64 delay /a 0 250").unwrap();
    let io = TestControlIo::new();
    let table: Arc<dyn Device> = Table::build(udm_targets::TARGETS, &lines, &mut resolver, &io, 1).unwrap();
    read_sectors(&io, &table, Sector(0), Sectors(64)).unwrap();
    assert!(io.now() >= Nanos::from_millis(250), "{:?}", io.now());
}
