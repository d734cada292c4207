//! Cases: opening, idling and closing.

use super::load::{CaseLoad, collect_and_check_load};
use crate::DeviceTestRig;
use std::time::{Duration, Instant};

const LOAD: CaseLoad = CaseLoad { each: 48, blocks: 3, round: 0 };

/// An idle lane returns nothing, asks for no wake-up and is not busy. This holds before the first
/// request and after work.
pub(super) fn idle_lane_requests_no_wakeup(rig: &mut DeviceTestRig) {
    rig.world.quiet();
    for _ in 0..3 {
        let sent = LOAD.submit(rig);
        collect_and_check_load(rig, sent);
        rig.world.quiet();
    }
}

/// Handles are closed and opened again, and the data stays. Other tests count descriptors; lanes
/// and devices are checked after each case.
pub(super) fn data_survives_reopen(rig: &mut DeviceTestRig) {
    for _ in 0..4 {
        let sent = LOAD.submit(rig);
        collect_and_check_load(rig, sent);
        rig.world.reopen();
        rig.verify_all(1);
    }
}

/// A server that stops answers the requests that it has taken, or the client sees the end of the
/// connection. Nothing hangs, and nothing is left open.
pub(super) fn server_stop_answers_requests(rig: &mut DeviceTestRig) {
    LOAD.submit(rig);
    let begin = Instant::now();
    // The end of the case: one client disconnects, one vanishes, one is connected when the server
    // stops.
    rig.world.close();
    assert!(begin.elapsed() < Duration::from_secs(8), "the end took {:?}", begin.elapsed());
}

/// Clients vanish with requests in flight. Other clients see each of their writes completely or not
/// at all.
pub(super) fn disconnects_tear_no_write(rig: &mut DeviceTestRig) {
    for _ in 0..3 {
        let sent = LOAD.submit(rig);
        for request in sent.iter().flatten() {
            rig.model.may_have_written(request);
        }
        rig.world.vanish();
        rig.verify_all(0);
    }
}
