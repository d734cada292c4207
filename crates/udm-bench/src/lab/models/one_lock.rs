//! dm-multipath as it was before its locks went: one lock a device, which all cores share.
//!
//! For each request the lock is taken twice, as `multipath_map` and the end of a request did: to
//! look whether there is a path and let the selector choose one, and to count the request off when
//! it is back. It is a lane like udm's, in batches, and has no table, no failover and no suspend:
//! what it costs more than udm's multipath it costs for its lock.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use udm_core::{Batch, Bio, Cx, Device, DeviceId, Lane, Limits, OpenError};

/// The selectors that the kernel had then, by their rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SelectorRule {
    /// By turns.
    RoundRobin,
    /// The fewest requests in flight.
    QueueLength,
    /// The fewest bytes in flight.
    ServiceTime,
}

/// The device.
pub(crate) struct OneLockMultipath {
    id: DeviceId,
    below: Vec<Arc<dyn Device>>,
    state: Arc<Mutex<OneLockState>>,
}

/// What the lock is for.
struct OneLockState {
    rule: SelectorRule,
    /// What is in flight on each path, by the rule.
    loads: Vec<u64>,
    /// The paths, from the one that was not chosen for longest.
    order: Vec<usize>,
}

impl OneLockMultipath {
    /// A device over `below`, of which there is at least one; its limits are those of the first.
    pub(crate) fn new(rule: SelectorRule, below: Vec<Arc<dyn Device>>) -> OneLockMultipath {
        let paths = below.len();
        let state = OneLockState { rule, loads: vec![0; paths], order: (0..paths).collect() };
        OneLockMultipath { id: DeviceId::new(), below, state: Arc::new(Mutex::new(state)) }
    }
}

impl OneLockState {
    fn weight(&self, bio: &Bio) -> u64 {
        match self.rule {
            SelectorRule::RoundRobin => 0,
            SelectorRule::QueueLength => 1,
            SelectorRule::ServiceTime => bio.sectors.bytes(),
        }
    }

    /// The path for `bio`.
    fn choose(&mut self, bio: &Bio) -> usize {
        let places = 0..self.order.len();
        let place = places.min_by_key(|&place| self.loads[self.order[place]]).expect("there is a path");
        let path = self.order.remove(place);
        self.order.push(path);
        self.loads[path] += self.weight(bio);
        path
    }

    fn ended(&mut self, path: usize, bio: &Bio) {
        self.loads[path] -= self.weight(bio);
    }
}

impl Device for OneLockMultipath {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        let path = |device: &Arc<dyn Device>| Ok(OneLockPath { lane: device.open(cx)?, batch: Batch::new() });
        let paths = self.below.iter().map(path).collect::<Result<_, OpenError>>()?;
        Ok(Box::new(OneLockLane { paths, state: Arc::clone(&self.state) }))
    }

    fn limits(&self) -> Limits {
        self.below[0].limits()
    }
}

struct OneLockPath {
    lane: Box<dyn Lane>,
    batch: Batch,
}

struct OneLockLane {
    paths: Vec<OneLockPath>,
    state: Arc<Mutex<OneLockState>>,
}

impl OneLockLane {
    fn state(&self) -> MutexGuard<'_, OneLockState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lane for OneLockLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        for bio in batch.drain(..) {
            let path = self.state().choose(&bio);
            self.paths[path].batch.push(bio);
        }
        for path in &mut self.paths {
            if !path.batch.is_empty() {
                path.lane.submit(&mut path.batch, cx);
            }
        }
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        for path in 0..self.paths.len() {
            let from = done.len();
            self.paths[path].lane.poll(done, cx);
            for bio in &done[from..] {
                self.state().ended(path, bio);
            }
        }
    }
}
