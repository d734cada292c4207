//! Cases: path failures. A device with several paths to one disk serves while one path works
//! (kernel `dm-mpath`).

use super::load::{CaseLoad, collect_and_check_load};
use crate::DeviceTestRig;
use udm_core::Status;
use udm_core::errno::EIO;

const LOAD: CaseLoad = CaseLoad { each: 30, blocks: 8, round: 0 };

/// A path fails under load, with each error that blames the path, and no request fails. The path is
/// reinstated, and the next one fails.
pub(super) fn path_failures_fail_no_request(rig: &mut DeviceTestRig) {
    let paths = rig.ground.paths();
    let statuses = Status::ALL.iter().filter(|status| status.fails_path());
    for (round, &status) in statuses.enumerate() {
        let path = &paths[round % paths.len()];
        let sent = LOAD.submit(rig);
        rig.ground.fail_path(path, status);
        collect_and_check_load(rig, sent);
        let sent = LOAD.submit(rig);
        collect_and_check_load(rig, sent);
        rig.verify_all(round % 2);
        rig.ground.heal();
        rig.message(&format!("reinstate_path {path}"));
    }
}

/// If no path is left and requests do not queue, each request fails once and none hangs. When a
/// path is reinstated, all requests are served again. A failed write may have taken effect.
pub(super) fn requests_fail_without_paths(rig: &mut DeviceTestRig) {
    let paths = rig.ground.paths();
    rig.message("fail_if_no_path");
    for _ in 0..2 {
        paths.iter().for_each(|path| rig.ground.fail_path(path, Status::Transport));
        let sent = LOAD.submit(rig);
        for (handle, requests) in sent.into_iter().enumerate() {
            for (request, answer) in requests.iter().zip(rig.world.collect(handle)) {
                let lane = !rig.kind.is_served();
                assert!(
                    answer.errno == EIO || lane && answer.errno == Status::Transport.errno(),
                    "{request:?} {answer:?}"
                );
                rig.model.may_have_written(request);
            }
        }
        rig.ground.heal();
        paths.iter().for_each(|path| rig.message(&format!("reinstate_path {path}")));
        rig.verify_all(0);
        let sent = LOAD.submit(rig);
        collect_and_check_load(rig, sent);
    }
}

/// With `queue_if_no_path` requests wait, also over a suspend, and are served when a path is
/// reinstated.
pub(super) fn requests_wait_for_path(rig: &mut DeviceTestRig) {
    let paths = rig.ground.paths();
    let device = rig.mapped.clone().expect("paths belong to a mapped device");
    for round in 0..3 {
        rig.message("queue_if_no_path");
        paths.iter().for_each(|path| rig.ground.fail_path(path, Status::Offline));
        let sent = LOAD.submit(rig);
        let waiting: usize = sent.iter().map(Vec::len).sum();
        assert_eq!(rig.world.settle(), waiting, "a request without a path was answered");
        if round > 0 {
            let change = device.suspend(true, std::sync::Arc::new(|| {})).expect("nothing else changes it");
            rig.world.change(change).expect("what waits stops no suspend");
            let change = device.resume(std::sync::Arc::new(|| {})).expect("nothing else changes it");
            rig.world.change(change).expect("a resume");
            assert_eq!(rig.world.settle(), waiting, "a request without a path was answered");
        }
        rig.ground.heal();
        rig.message(&format!("reinstate_path {}", paths[round % paths.len()]));
        collect_and_check_load(rig, sent);
        paths.iter().for_each(|path| rig.message(&format!("reinstate_path {path}")));
        rig.verify_all(1);
    }
}
