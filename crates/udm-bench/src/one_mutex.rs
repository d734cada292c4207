//! The baseline of comparisons: what udm would be if its paths' loads stood behind one lock.
//!
//! A device over several paths that picks, for each request, the path with the fewest requests in
//! flight, and counts it there: under one mutex that all cores share, at submission and again at
//! completion, as a multipath driver with one lock a device does. It has no failover, no table and
//! no suspend, so what it costs more than the real one it costs for its lock.

use std::sync::{Arc, Mutex, PoisonError};
use udm_core::{Batch, Cx, Device, DeviceId, Lane, Limits, OpenError};

/// The device.
pub struct OneMutex {
    id: DeviceId,
    below: Vec<Arc<dyn Device>>,
    /// Requests in flight on each path.
    loads: Arc<Mutex<Vec<usize>>>,
}

impl OneMutex {
    /// A device over `below`, of which there is at least one; its limits are those of the first.
    pub fn new(below: Vec<Arc<dyn Device>>) -> OneMutex {
        let loads = Arc::new(Mutex::new(vec![0; below.len()]));
        OneMutex { id: DeviceId::new(), below, loads }
    }
}

impl Device for OneMutex {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        let path = |d: &Arc<dyn Device>| Ok(Path { lane: d.open(cx)?, batch: Batch::new() });
        let paths = self.below.iter().map(path).collect::<Result<_, OpenError>>()?;
        Ok(Box::new(OneMutexLane { paths, loads: Arc::clone(&self.loads) }))
    }

    fn limits(&self) -> Limits {
        self.below[0].limits()
    }
}

struct Path {
    lane: Box<dyn Lane>,
    batch: Batch,
}

struct OneMutexLane {
    paths: Vec<Path>,
    loads: Arc<Mutex<Vec<usize>>>,
}

impl Lane for OneMutexLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        for bio in batch.drain(..) {
            let mut loads = self.loads.lock().unwrap_or_else(PoisonError::into_inner);
            let least = (0..loads.len()).min_by_key(|&path| loads[path]).expect("there is a path");
            loads[least] += 1;
            drop(loads);
            self.paths[least].batch.push(bio);
        }
        for path in &mut self.paths {
            if !path.batch.is_empty() {
                path.lane.submit(&mut path.batch, cx);
            }
        }
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        for (i, path) in self.paths.iter_mut().enumerate() {
            let before = done.len();
            path.lane.poll(done, cx);
            for _ in before..done.len() {
                self.loads.lock().unwrap_or_else(PoisonError::into_inner)[i] -= 1;
            }
        }
    }
}
