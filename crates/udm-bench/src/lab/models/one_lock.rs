//! A model of dm-multipath before its locks were removed: one lock per device, shared by all cores.
//!
//! Each request takes the lock twice, as in the kernel. `multipath_map` took it to check for a path
//! and to run the selector. The completion took it to subtract the request from the load.
//!
//! The lane works in batches, like udm's, and has no table, no failover and no suspend. So the lock
//! accounts for its additional cost over udm's multipath.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use udm_core::{Batch, Bio, Cx, Device, DeviceControlError, DeviceId, Lane, Limits};

/// The selectors of the kernel at that time, by their rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SelectorRule {
    /// Paths in rotation.
    RoundRobin,
    /// The path with the fewest requests in flight.
    QueueLength,
    /// The path with the fewest bytes in flight.
    ServiceTime,
}

/// The multipath device with one lock.
pub(crate) struct OneLockMultipath {
    id: DeviceId,
    below: Vec<Arc<dyn Device>>,
    state: Arc<Mutex<OneLockState>>,
}

/// The state under the lock.
struct OneLockState {
    rule: SelectorRule,
    /// The load in flight on each path, in the unit of the rule.
    loads: Vec<u64>,
    /// The paths, least recently chosen first.
    order: Vec<usize>,
}

impl OneLockMultipath {
    /// Creates a device over `below`, which has at least one device. The limits are those of the
    /// first.
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

    /// Chooses the path for `bio`.
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

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        let path = |device: &Arc<dyn Device>| Ok(OneLockPath { lane: device.open(cx)?, batch: Batch::new() });
        let paths = self.below.iter().map(path).collect::<Result<_, DeviceControlError>>()?;
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
