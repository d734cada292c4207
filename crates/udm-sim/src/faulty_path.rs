//! Faults of null devices in front of paths that no multipath target uses.
//!
//! The faults are those of the program ([`udm_backends::InjectedFaults`]). Checks surround them.
//! Above, a request that touches a bad block must fail, and a timeout is an allowed error. Below,
//! no request may touch a bad block, and the bandwidth must not be exceeded.

use crate::blueprint::WorldBlueprint;
use crate::environment::{Env, SharedEnv, lock_environment};
use crate::path::SimPath;
use crate::rng::SimRng;
use crate::tables::TableLineDevice;
use std::sync::{Arc, Mutex, PoisonError};
use udm_backends::InjectedFaults;
use udm_core::{
    Batch, Bio, Cx, Device, DeviceControlError, DeviceId, DrainMode, GrowResultCallback, GrowthPolicy, Lane,
    Limits, Nanos, Op, OwnWork, Sectors, SharedDiskState, Status,
};
use udm_wire::uri::{FaultAttr, NullFaults};

/// Bytes that null_blk moves in 20 ms per MiB/s of bandwidth.
const TICK_BYTES: u64 = 20_971;
const TICK: u64 = 20_000_000;

/// A path with faults.
pub(crate) struct FaultInjectingPath {
    id: DeviceId,
    path: Arc<SimPath>,
    faults: InjectedFaults,
    depth: usize,
    delay: Nanos,
    rules: Arc<FaultyPathRules>,
}

/// The rules that a path with faults must keep.
struct FaultyPathRules {
    disk: usize,
    path: usize,
    env: SharedEnv,
    params: NullFaults,
    /// Tick of the last request, and bytes that the bandwidth of the ticks up to it does not cover.
    owed: Mutex<(u64, u64)>,
}

/// Draws faults for the paths that no multipath target uses.
pub(crate) fn draw_path_faults(blueprint: &WorldBlueprint, chance: &mut SimRng) -> Vec<(usize, NullFaults)> {
    let bare = blueprint.blocks.iter().filter_map(|(below, _)| match below {
        TableLineDevice::Path(path) => Some(*path),
        TableLineDevice::Device(_) => None,
    });
    let mut injection = |of: u64| FaultAttr {
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

impl FaultInjectingPath {
    pub(crate) fn new(
        path: &Arc<SimPath>,
        index: usize,
        env: &SharedEnv,
        params: NullFaults,
        chance: &mut SimRng,
    ) -> Option<FaultInjectingPath> {
        let disk = lock_environment(env).paths[index].disk;
        let faults = InjectedFaults::new(&params)?;
        let (depth, delay) = (chance.pick(&[1, 4, 64]), Nanos(chance.pick(&[0, 10_000])));
        let (env, owed) = (env.clone(), Mutex::default());
        let rules = Arc::new(FaultyPathRules { disk, path: index, env, params, owed });
        Some(FaultInjectingPath { id: DeviceId::new(), path: Arc::clone(path), faults, depth, delay, rules })
    }
}

impl Device for FaultInjectingPath {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        let rules = || Arc::clone(&self.rules);
        let below = |cx: &mut Cx<'_>| -> Result<Box<dyn Lane>, DeviceControlError> {
            Ok(Box::new(CheckLaneBelowFaults { path: self.path.open(cx)?, rules: rules() }))
        };
        let faulty = self.faults.open(self.depth, self.delay, cx, below)?;
        Ok(Box::new(CheckLaneAboveFaults { faulty, rules: rules() }))
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

    fn grow(&self, size: Sectors, then: GrowResultCallback) {
        self.path.grow(size, then);
    }
}

impl FaultyPathRules {
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

struct CheckLaneAboveFaults {
    faulty: Box<dyn Lane>,
    rules: Arc<FaultyPathRules>,
}

impl Lane for CheckLaneAboveFaults {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        self.faulty.submit(batch, cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let from = done.len();
        self.faulty.poll(done, cx);
        let mut env = lock_environment(&self.rules.env);
        done[from..].iter().for_each(|bio| self.rules.ends(bio, &mut env));
    }

    fn drain(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        self.faulty.drain(how, back, cx);
    }

    fn own_work(&self) -> OwnWork {
        self.faulty.own_work()
    }
}

struct CheckLaneBelowFaults {
    path: Box<dyn Lane>,
    rules: Arc<FaultyPathRules>,
}

impl Lane for CheckLaneBelowFaults {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let mut env = lock_environment(&self.rules.env);
        batch.iter().for_each(|bio| self.rules.goes(bio, &mut env));
        drop(env);
        self.path.submit(batch, cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        self.path.poll(done, cx);
    }

    fn drain(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        self.path.drain(how, back, cx);
    }

    fn own_work(&self) -> OwnWork {
        self.path.own_work()
    }
}
