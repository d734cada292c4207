//! Faults of null devices in front of paths that no multipath target uses.
//!
//! The faults are those of the program ([`udm_backends::Faults`]). Checks surround them. Above, a
//! request that touches a bad block must fail, and a timeout is an allowed error. Below, no request
//! may touch a bad block, and the bandwidth must not be exceeded.

use crate::blueprint::Blueprint;
use crate::environment::{Env, SharedEnv, lock};
use crate::path::SimPath;
use crate::rng::SimRng;
use crate::tables::LowerDevice;
use std::sync::{Arc, Mutex, PoisonError};
use udm_backends::Faults;
use udm_core::{
    Batch, Bio, Cx, Device, DeviceId, Drain, GrowCallback, GrowthPolicy, Lane, Limits, Nanos, Op, OpenError,
    OwnWork, Sectors, SharedDiskState, Status,
};
use udm_wire::uri::{FaultInjection, NullFaults};

/// Bytes that null_blk moves in 20 ms per MiB/s of bandwidth.
const TICK_BYTES: u64 = 20_971;
const TICK: u64 = 20_000_000;

/// A path with faults.
pub(crate) struct FaultyPath {
    id: DeviceId,
    path: Arc<SimPath>,
    faults: Faults,
    depth: usize,
    delay: Nanos,
    rules: Arc<FaultChecker>,
}

/// The rules that a path with faults must keep.
struct FaultChecker {
    disk: usize,
    path: usize,
    env: SharedEnv,
    params: NullFaults,
    /// Tick of the last request, and bytes that the bandwidth of the ticks up to it does not cover.
    owed: Mutex<(u64, u64)>,
}

/// Draws faults for the paths that no multipath target uses.
pub(crate) fn draw(blueprint: &Blueprint, chance: &mut SimRng) -> Vec<(usize, NullFaults)> {
    let bare = blueprint.blocks.iter().filter_map(|(below, _)| match below {
        LowerDevice::Path(path) => Some(*path),
        LowerDevice::Device(_) => None,
    });
    let mut injection = |of: u64| FaultInjection {
        interval: chance.pick(&[1, 1, 3]),
        probability: if chance.below(of) == 0 { chance.pick(&[2, 10, 50]) } else { 0 },
        space: chance.pick(&[0, 20]),
        times: chance.pick(&[3, 20]),
    };
    let mut all = Vec::new();
    for path in bare {
        let (timeout, requeue) = (injection(2), injection(2));
        all.push((path, NullFaults { timeout, requeue, ..NullFaults::default() }));
    }
    for (_, faults) in &mut all {
        faults.requeue.times = chance.pick(&[20, -1]);
        faults.mbps = chance.pick(&[0, 10, 50, 1000]);
        if chance.one_in(2) {
            let first = chance.below(200);
            faults.badblocks = vec![(first, first + chance.below(9)), (first + 16, first + 16)];
        }
    }
    all.retain(|(_, faults)| !faults.is_none());
    all
}

impl FaultyPath {
    pub(crate) fn new(
        path: &Arc<SimPath>,
        index: usize,
        env: &SharedEnv,
        params: NullFaults,
        chance: &mut SimRng,
    ) -> Option<FaultyPath> {
        let disk = lock(env).paths[index].disk;
        let faults = Faults::new(&params)?;
        let (depth, delay) = (chance.pick(&[1, 4, 64]), Nanos(chance.pick(&[0, 10_000])));
        let (env, owed) = (env.clone(), Mutex::default());
        let rules = Arc::new(FaultChecker { disk, path: index, env, params, owed });
        Some(FaultyPath { id: DeviceId::new(), path: Arc::clone(path), faults, depth, delay, rules })
    }
}

impl Device for FaultyPath {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        let rules = || Arc::clone(&self.rules);
        let below = |cx: &mut Cx<'_>| -> Result<Box<dyn Lane>, OpenError> {
            Ok(Box::new(FaultLowerLane { path: self.path.open(cx)?, rules: rules() }))
        };
        let faulty = self.faults.open(self.depth, self.delay, cx, below)?;
        Ok(Box::new(FaultUpperLane { faulty, rules: rules() }))
    }

    fn limits(&self) -> Limits {
        self.path.limits()
    }

    fn shared_disk_state(&self) -> Option<&SharedDiskState> {
        self.path.shared_disk_state()
    }

    fn may_shrink(&self) -> bool {
        self.path.may_shrink()
    }

    fn growth(&self) -> Option<GrowthPolicy> {
        self.path.growth()
    }

    fn grow(&self, size: Sectors, then: GrowCallback) {
        self.path.grow(size, then);
    }
}

impl FaultChecker {
    fn is_bad(&self, bio: &Bio) -> bool {
        let (first, end) = (bio.sector.0, bio.sector.0 + bio.sectors.0);
        bio.op != Op::Flush && self.params.badblocks.iter().any(|(bad, last)| *bad < end && first <= *last)
    }

    /// Checks `bio`, which the faults have completed.
    fn ends(&self, bio: &Bio, env: &mut Env) {
        let bad = self.is_bad(bio);
        if bad && !matches!(bio.status, Status::IoErr | Status::Timeout) {
            env.violate(|| format!("p{}: {bio:?} touches a bad block, and ends so", self.path));
        }
        if bad || bio.status == Status::Timeout {
            env.excuse(self.disk, bio.status);
            env.seen.injected += 1;
        }
    }

    /// Checks `bio`, which the faults pass to the path.
    fn goes(&self, bio: &Bio, env: &mut Env) {
        if self.is_bad(bio) {
            env.violate(|| format!("p{}: {bio:?} is asked for a bad block", self.path));
        }
        let (a_tick, bytes) = (u64::from(self.params.mbps) * TICK_BYTES, bio.sectors.bytes());
        let now = env.now.0 / TICK;
        let mut owed = self.owed.lock().unwrap_or_else(PoisonError::into_inner);
        let paid = a_tick.saturating_mul(now - owed.0);
        *owed = (now, owed.1.saturating_sub(paid));
        let is_over = if bytes > a_tick { owed.1 >= a_tick } else { owed.1 + bytes > a_tick };
        if a_tick > 0 && is_over {
            env.violate(|| format!("p{} moves more than its bandwidth: {} and {bytes}", self.path, owed.1));
        }
        owed.1 += bytes;
    }
}

struct FaultUpperLane {
    faulty: Box<dyn Lane>,
    rules: Arc<FaultChecker>,
}

impl Lane for FaultUpperLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.faulty.submit(batch, cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let from = done.len();
        self.faulty.poll(done, cx);
        let mut env = lock(&self.rules.env);
        done[from..].iter().for_each(|bio| self.rules.ends(bio, &mut env));
    }

    fn drain(&mut self, how: Drain, back: &mut Batch, cx: &mut Cx<'_>) {
        self.faulty.drain(how, back, cx);
    }

    fn own_work(&self) -> OwnWork {
        self.faulty.own_work()
    }
}

struct FaultLowerLane {
    path: Box<dyn Lane>,
    rules: Arc<FaultChecker>,
}

impl Lane for FaultLowerLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let mut env = lock(&self.rules.env);
        batch.iter().for_each(|bio| self.rules.goes(bio, &mut env));
        drop(env);
        self.path.submit(batch, cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        self.path.poll(done, cx);
    }

    fn drain(&mut self, how: Drain, back: &mut Batch, cx: &mut Cx<'_>) {
        self.path.drain(how, back, cx);
    }

    fn own_work(&self) -> OwnWork {
        self.path.own_work()
    }
}
