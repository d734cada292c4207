//! A mixed load for cases that change the device meanwhile.

use crate::{DeviceTestRig, TestRequest};
use udm_core::Op;

/// The requests for each handle.
#[derive(Clone, Copy)]
pub(super) struct CaseLoad {
    /// Number of requests.
    pub each: u64,
    /// Blocks of the range of each request.
    pub blocks: u64,
    /// Rotates the kinds of requests: another number gives each range another kind.
    pub round: u64,
}

impl CaseLoad {
    /// Submits the requests on each handle, without waiting.
    pub fn submit(self, rig: &mut DeviceTestRig) -> Vec<Vec<TestRequest>> {
        let (block, blocks) = (rig.facts.block(), self.blocks);
        let mut sent = Vec::new();
        for handle in 0..rig.world.handles() {
            let mut requests = Vec::new();
            for i in 0..self.each {
                let at = (handle as u64 * self.each + i) * blocks * block;
                requests.push(match (i + self.round) % 6 {
                    0 => TestRequest::flush(),
                    1..4 if rig.facts.can(Op::Write) => rig.write(at, blocks * block),
                    4 if rig.facts.can(Op::WriteZeroes) => {
                        TestRequest::new(Op::WriteZeroes, at, (blocks - 1) * block)
                    }
                    _ => TestRequest::read(at, blocks * block),
                });
            }
            rig.world.submit(handle, requests.clone());
            sent.push(requests);
        }
        sent
    }
}

/// Waits for the requests of [`CaseLoad::submit`] and checks each answer.
pub(super) fn collect_and_check_load(rig: &mut DeviceTestRig, sent: Vec<Vec<TestRequest>>) {
    for (handle, requests) in sent.into_iter().enumerate() {
        for (request, answer) in requests.iter().zip(rig.world.collect(handle)) {
            rig.set_verdict(request, &answer);
        }
    }
}
