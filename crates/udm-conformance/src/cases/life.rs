//! Opening, resting, closing.

use crate::{Request, Rig};
use std::time::{Duration, Instant};
use udm_core::Op;

/// Something of each kind in flight on each handle, answered or not.
fn load(rig: &mut Rig) -> Vec<Vec<Request>> {
    let block = rig.facts.block();
    let mut sent = Vec::new();
    for handle in 0..rig.world.handles() {
        let mut requests = Vec::new();
        for i in 0..48 {
            let at = (handle as u64 * 48 + i) * 3 * block;
            requests.push(match i % 6 {
                0 => Request::flush(),
                1..4 if rig.facts.can(Op::Write) => rig.write(at, 3 * block),
                4 if rig.facts.can(Op::WriteZeroes) => Request::new(Op::WriteZeroes, at, 2 * block),
                _ => Request::read(at, 3 * block),
            });
        }
        rig.world.submit(handle, requests.clone());
        sent.push(requests);
    }
    sent
}

fn collect(rig: &mut Rig, sent: Vec<Vec<Request>>) {
    for (handle, requests) in sent.into_iter().enumerate() {
        for (request, answer) in requests.iter().zip(rig.world.collect(handle)) {
            rig.judge(request, &answer);
        }
    }
}

/// With nothing to do a lane returns nothing, asks for no wake-up and is not busy; before the first request, and after work.
pub(super) fn at_rest(rig: &mut Rig) {
    rig.world.quiet();
    for _ in 0..3 {
        let sent = load(rig);
        collect(rig, sent);
        rig.world.quiet();
    }
}

/// Handles come and go; the data stays, and nothing else does: descriptors are counted by another test, lanes and devices behind each case.
pub(super) fn closed_and_opened(rig: &mut Rig) {
    for _ in 0..4 {
        let sent = load(rig);
        collect(rig, sent);
        rig.world.reopen();
        rig.verify_all(1);
    }
}

/// A server that is told to stop answers what it has taken, or the client sees the connection end; nothing hangs and nothing is left.
pub(super) fn ends_under_load(rig: &mut Rig) {
    load(rig);
    let begin = Instant::now();
    // The end of the case: one client leaves, one vanishes, one is there when the server stops.
    rig.world.close();
    assert!(begin.elapsed() < Duration::from_secs(8), "the end took {:?}", begin.elapsed());
}

/// Clients that vanish with requests in flight take nothing with them: others see each of their writes whole or not at all.
pub(super) fn clients_vanish(rig: &mut Rig) {
    for _ in 0..3 {
        let sent = load(rig);
        for request in sent.iter().flatten() {
            rig.model.perhaps(request);
        }
        rig.world.vanish();
        rig.verify_all(0);
    }
}
