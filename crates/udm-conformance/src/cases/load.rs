//! Load of all kinds at once, for cases that do something meanwhile.

use crate::{Request, TestRig};
use udm_core::Op;

/// What each handle is given.
#[derive(Clone, Copy)]
pub(super) struct CaseLoad {
    /// How many requests.
    pub each: u64,
    /// Blocks of the place that each request has to itself.
    pub blocks: u64,
    /// Which kind of request comes first: another number gives each place another kind.
    pub round: u64,
}

impl CaseLoad {
    /// Puts the requests in flight on each handle.
    pub fn submit(self, rig: &mut TestRig) -> Vec<Vec<Request>> {
        let (block, blocks) = (rig.facts.block(), self.blocks);
        let mut sent = Vec::new();
        for handle in 0..rig.world.handles() {
            let mut requests = Vec::new();
            for i in 0..self.each {
                let at = (handle as u64 * self.each + i) * blocks * block;
                requests.push(match (i + self.round) % 6 {
                    0 => Request::flush(),
                    1..4 if rig.facts.can(Op::Write) => rig.write(at, blocks * block),
                    4 if rig.facts.can(Op::WriteZeroes) => {
                        Request::new(Op::WriteZeroes, at, (blocks - 1) * block)
                    }
                    _ => Request::read(at, blocks * block),
                });
            }
            rig.world.submit(handle, requests.clone());
            sent.push(requests);
        }
        sent
    }
}

/// Waits for what [`CaseLoad::submit`] sent, and judges each answer.
pub(super) fn collect(rig: &mut TestRig, sent: Vec<Vec<Request>>) {
    for (handle, requests) in sent.into_iter().enumerate() {
        for (request, answer) in requests.iter().zip(rig.world.collect(handle)) {
            rig.judge(request, &answer);
        }
    }
}
