//! Cases: errors are reported unchanged, on exactly the affected requests. All other data stays
//! intact.

use crate::{DeviceTestRig, TestRequest};
use udm_core::errno::EIO;
use udm_core::{BioFlags, Op, Status};

/// A read-only device refuses operations that would change it, and serves the others.
pub(super) fn read_only_device_refuses_writes(rig: &mut DeviceTestRig) {
    let block = rig.facts.block();
    for handle in 0..rig.world.handles() {
        for flags in [BioFlags::empty(), BioFlags::FUA] {
            for op in [Op::Write, Op::Discard, Op::WriteZeroes] {
                let request = rig.request(op, 8 * block, 8 * block).with(flags);
                let errno = rig.one(handle, request);
                assert_ne!(errno, 0);
                rig.verify(0, 8 * block, 8 * block);
            }
            rig.one(handle, TestRequest::flush());
            rig.one(handle, TestRequest::read(0, 16 * block));
        }
    }
}

/// A bad sector fails exactly the requests that touch it. After it is repaired, it serves again,
/// and the data of the other requests is there.
pub(super) fn bad_sector_fails_its_requests(rig: &mut DeviceTestRig) {
    let block = rig.facts.block();
    let n = 8 * block;
    let writes: Vec<TestRequest> = (0..32).map(|i| rig.write(i * n, n)).collect();
    rig.run(0, writes.clone());
    let bad = [3, 4, 17];
    for i in bad {
        rig.inject_error(&writes[i], i as u64 * n + 5 * block, Status::Medium);
    }
    let hit = |request: &TestRequest| {
        let touches = |i: &usize| {
            let sector = *i as u64 * n + 5 * block;
            (request.sector..request.sector + request.sectors).contains(&sector)
        };
        bad.iter().any(touches)
    };
    for round in 0..3 {
        let reads =
            |length: u64| (0..32 * n / length).map(|i| TestRequest::read(i * length, length)).collect();
        let requests: Vec<TestRequest> = match round {
            0 => reads(block),
            1 => reads(n),
            _ => (0..32).map(|i| rig.write(i * n, n)).collect(),
        };
        let errno = if rig.kind.is_served() { EIO } else { Status::Medium.errno() };
        rig.run_with_failures(1, &requests, errno, hit);
    }
    rig.ground.heal();
    rig.verify(0, 0, 32 * n);
}

/// An error that does not blame the path is passed up unchanged, for each kind of request. The bio
/// has its submitted state, which is checked for each bio.
pub(super) fn non_path_errors_pass_unchanged(rig: &mut DeviceTestRig) {
    let block = rig.facts.block();
    let statuses = Status::ALL.iter().filter(|s| !s.is_ok() && !s.is_path_error());
    for &status in statuses {
        let write = rig.write(40 * block, 8 * block);
        rig.one(0, write.clone());
        rig.inject_error(&write, 43 * block, status);
        for op in [Op::Read, Op::Write, Op::WriteZeroes, Op::Discard] {
            if !rig.facts.can(op) {
                continue;
            }
            for flags in [BioFlags::empty(), BioFlags::PREFLUSH | BioFlags::FUA] {
                let request = rig.request(op, 40 * block, 8 * block).with(flags).in_pieces(&[700, 3]);
                rig.world.submit(1, vec![request.clone()]);
                let errno = rig.world.collect(1)[0].errno;
                assert_eq!(errno, status.errno(), "{request:?} over {status}");
                rig.model.may_have_written(&request);
            }
        }
        rig.ground.heal();
        rig.verify(0, 40 * block, 8 * block);
    }
}

/// An error that blames the path is passed up unchanged if there is no other path.
pub(super) fn path_errors_pass_unchanged(rig: &mut DeviceTestRig) {
    let block = rig.facts.block();
    let statuses = Status::ALL.iter().filter(|s| s.is_path_error());
    for &status in statuses {
        let write = rig.write(8 * block, 8 * block);
        rig.one(0, write.clone());
        rig.inject_error(&write, 9 * block, status);
        for (at, n, expected) in [(8, 8, status), (9, 1, status), (8, 1, Status::Ok), (10, 6, Status::Ok)] {
            rig.world.submit(1, vec![TestRequest::read(at * block, n * block)]);
            assert_eq!(rig.world.collect(1)[0].errno, expected.errno(), "{status} at {at} +{n}");
        }
        rig.ground.heal();
    }
}
