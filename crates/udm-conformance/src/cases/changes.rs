//! Cases: suspend, resume and reload of a mapped device in use.

use super::load::{CaseLoad, collect_and_check_load};
use crate::{DeviceTestRig, HANG, TestRequest};
use std::sync::Arc;
use std::time::Instant;
use udm_core::errno::{EAGAIN, EINTR, EIO};
use udm_core::{BioFlags, Op};
use udm_dm::{DeviceTransition, MappedDevice, TransitionWakeFn};

const fn make_case_load(round: u64) -> CaseLoad {
    CaseLoad { each: 24, blocks: 6, round }
}

fn make_no_op_wake_fn() -> TransitionWakeFn {
    Arc::new(|| {})
}

fn expect_mapped_device(rig: &DeviceTestRig) -> Arc<MappedDevice> {
    rig.mapped.clone().expect("the case needs a mapped device")
}

fn suspend_mapped_device(rig: &mut DeviceTestRig, noflush: bool) {
    let change =
        expect_mapped_device(rig).suspend(noflush, make_no_op_wake_fn()).expect("nothing else changes it");
    rig.world.change(change).expect("a suspend");
}

fn resume_mapped_device(rig: &mut DeviceTestRig) {
    let change = expect_mapped_device(rig).resume(make_no_op_wake_fn()).expect("nothing else changes it");
    rig.world.change(change).expect("a resume");
}

/// Requests in flight at a suspend, and requests sent during the suspend, are served. None fails
/// and none is lost.
pub(super) fn suspend_under_load(rig: &mut DeviceTestRig) {
    for round in 0..4 {
        let sent = make_case_load(round).submit(rig);
        suspend_mapped_device(rig, round % 2 == 1);
        assert!(expect_mapped_device(rig).is_suspended());
        // Nothing is in flight, so a second suspend succeeds and does nothing.
        suspend_mapped_device(rig, true);
        resume_mapped_device(rig);
        collect_and_check_load(rig, sent);
        rig.verify_all(0);
    }
}

/// A new table with the same mapping replaces the old one under load. The content stays, and no
/// request fails.
pub(super) fn reload_under_load(rig: &mut DeviceTestRig) {
    let mapped = expect_mapped_device(rig);
    for round in 0..4 {
        let sent = make_case_load(round).submit(rig);
        let table = rig.ground.table(&mapped.table_text(false));
        mapped.load(table).expect("the same table again");
        if round == 2 {
            suspend_mapped_device(rig, true);
        }
        resume_mapped_device(rig);
        assert!(mapped.inactive().is_none() && !mapped.is_suspended());
        collect_and_check_load(rig, sent);
        rig.verify_all(1);
    }
}

/// With another table the device changes between two requests. With `error`, which can replace any
/// target, all I/O fails. With the old table the content is back.
pub(super) fn loaded_table_takes_effect(rig: &mut DeviceTestRig) {
    let mapped = expect_mapped_device(rig);
    let sent = make_case_load(0).submit(rig);
    collect_and_check_load(rig, sent);
    let (lines, size, block) = (mapped.table_text(false), rig.facts.size(), rig.facts.block());
    let other = rig.ground.table(&format!("0 {size} error"));
    for _ in 0..2 {
        mapped.load(other.clone()).expect("error fits everywhere");
        resume_mapped_device(rig);
        for handle in 0..rig.world.handles() {
            for request in [TestRequest::read(0, block), TestRequest::new(Op::Flush, 0, 0)] {
                rig.world.submit(handle, vec![request.clone()]);
                let errno = rig.world.collect(handle)[0].errno;
                assert_eq!(errno, if request.op == Op::Flush { 0 } else { EIO }, "{request:?}");
            }
        }
        let table = rig.ground.table(&lines);
        mapped.load(table).expect("the table as it was");
        resume_mapped_device(rig);
        rig.verify_all(1);
    }
}

/// While the device is suspended, requests wait. Requests that must not wait fail: NOWAIT with
/// EAGAIN, read-ahead with EIO (kernel).
pub(super) fn suspended_requests_wait(rig: &mut DeviceTestRig) {
    suspend_mapped_device(rig, false);
    let sent = make_case_load(1).submit(rig);
    let waiting: usize = sent.iter().map(Vec::len).sum();
    assert_eq!(rig.world.settle(), waiting, "a suspended device has answered");
    resume_mapped_device(rig);
    collect_and_check_load(rig, sent);
    if !rig.kind.is_served() {
        suspend_mapped_device(rig, true);
        for (flags, errno) in [(BioFlags::NOWAIT, EAGAIN), (BioFlags::RAHEAD, EIO)] {
            let request = TestRequest::read(0, rig.facts.block()).with(flags);
            assert_eq!(rig.one(0, request), errno);
        }
        resume_mapped_device(rig);
    }
    rig.verify_all(0);
}

/// A suspend waits until the requests on the disks below complete. Then the disks are idle.
pub(super) fn suspend_waits(rig: &mut DeviceTestRig) {
    rig.ground.hold(true);
    let sent = make_case_load(2).submit(rig);
    rig.world.settle();
    let mut change =
        expect_mapped_device(rig).suspend(true, make_no_op_wake_fn()).expect("nothing else changes it");
    assert!(!rig.world.begin_change(&mut change), "suspended with requests in flight");
    rig.ground.hold(false);
    rig.world.change(change).expect("a suspend");
    resume_mapped_device(rig);
    collect_and_check_load(rig, sent);
    rig.verify_all(1);
}

/// A suspend that waits can be cancelled. The device continues and can be suspended again later.
pub(super) fn suspend_can_be_cancelled(rig: &mut DeviceTestRig) {
    for _ in 0..2 {
        rig.ground.hold(true);
        let sent = make_case_load(3).submit(rig);
        rig.world.settle();
        let mut change: DeviceTransition =
            expect_mapped_device(rig).suspend(true, make_no_op_wake_fn()).expect("nothing else changes it");
        assert!(!rig.world.begin_change(&mut change), "suspended with requests in flight");
        rig.world.call_off(&mut change);
        assert!(rig.world.change(change).is_err_and(|e| e.errno == EINTR), "called off is EINTR");
        assert!(!expect_mapped_device(rig).is_suspended());
        rig.ground.hold(false);
        collect_and_check_load(rig, sent);
        suspend_mapped_device(rig, false);
        resume_mapped_device(rig);
    }
    rig.verify_all(0);
}

/// A client disconnects while its requests wait in a suspended device. After the resume, the client
/// and its requests are removed.
pub(super) fn closed_while_suspended(rig: &mut DeviceTestRig) {
    suspend_mapped_device(rig, true);
    for request in make_case_load(1).submit(rig).iter().flatten() {
        rig.model.may_have_written(request);
    }
    rig.world.settle();
    let begin = Instant::now();
    let change = expect_mapped_device(rig).resume(make_no_op_wake_fn()).expect("nothing else changes it");
    rig.world.vanish_and(Box::new(move |world| world.change(change).expect("a resume")));
    assert!(begin.elapsed() < HANG);
    rig.verify_all(1);
}
