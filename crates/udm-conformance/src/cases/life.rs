//! Opening, resting, closing.

use super::load::{CaseLoad, collect};
use crate::TestRig;
use std::time::{Duration, Instant};

const LOAD: CaseLoad = CaseLoad { each: 48, blocks: 3, round: 0 };

/// With nothing to do a lane returns nothing, asks for no wake-up and is not busy; before the first
/// request, and after work.
pub(super) fn at_rest(rig: &mut TestRig) {
    rig.world.quiet();
    for _ in 0..3 {
        let sent = LOAD.submit(rig);
        collect(rig, sent);
        rig.world.quiet();
    }
}

/// Handles come and go; the data stays, and nothing else does: descriptors are counted by another
/// test, lanes and devices behind each case.
pub(super) fn closed_and_opened(rig: &mut TestRig) {
    for _ in 0..4 {
        let sent = LOAD.submit(rig);
        collect(rig, sent);
        rig.world.reopen();
        rig.verify_all(1);
    }
}

/// A server that is told to stop answers what it has taken, or the client sees the connection end;
/// nothing hangs and nothing is left.
pub(super) fn ends_under_load(rig: &mut TestRig) {
    LOAD.submit(rig);
    let begin = Instant::now();
    // The end of the case: one client leaves, one vanishes, one is there when the server stops.
    rig.world.close();
    assert!(begin.elapsed() < Duration::from_secs(8), "the end took {:?}", begin.elapsed());
}

/// Clients that vanish with requests in flight take nothing with them: others see each of their
/// writes whole or not at all.
pub(super) fn clients_vanish(rig: &mut TestRig) {
    for _ in 0..3 {
        let sent = LOAD.submit(rig);
        for request in sent.iter().flatten() {
            rig.model.may_have_written(request);
        }
        rig.world.vanish();
        rig.verify_all(0);
    }
}
