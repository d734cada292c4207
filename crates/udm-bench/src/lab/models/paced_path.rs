//! A path with a service time: it serves the requests of all cores one after another.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use udm_core::{Batch, Bio, Cx, Device, DeviceControlError, DeviceId, Lane, Limits, Nanos, Sectors, Status};

/// The service time of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) enum PathServiceTime {
    /// A constant time.
    Every(Nanos),
    /// The first time, and from the second time on the third one.
    Turns(Nanos, Nanos, Nanos),
    /// The first time. From the second time on every request fails, because the path is gone.
    Dies(Nanos, Nanos),
}

/// The device. Times are on the clock of the cores and count from the first request.
pub(crate) struct PacedPath {
    id: DeviceId,
    size: Sectors,
    shared: Arc<PathServiceState>,
}

struct PathServiceState {
    service_time: PathServiceTime,
    /// When the first request came; 0 before.
    begin: AtomicU64,
    /// When the last request in the path completes.
    free: AtomicU64,
}

impl PacedPath {
    pub(crate) fn new(service_time: PathServiceTime, size: Sectors) -> PacedPath {
        let shared = PathServiceState { service_time, begin: AtomicU64::new(0), free: AtomicU64::new(0) };
        PacedPath { id: DeviceId::new(), size, shared: Arc::new(shared) }
    }
}

impl PathServiceState {
    /// The service time of a request that arrives at `now`; `None` if it fails.
    fn service(&self, now: Nanos) -> Option<Nanos> {
        let begin = match self.begin.compare_exchange(0, now.0, Relaxed, Relaxed) {
            Ok(_) => now,
            Err(begin) => Nanos(begin),
        };
        let age = now.since(begin);
        match self.service_time {
            PathServiceTime::Every(time) => Some(time),
            PathServiceTime::Turns(time, from, other) => Some(if age < from { time } else { other }),
            PathServiceTime::Dies(time, from) => (age < from).then_some(time),
        }
    }

    /// The completion time of a request that arrives at `now`.
    fn end(&self, now: Nanos, service: Nanos) -> Nanos {
        let end = |free: u64| free.max(now.0) + service.0;
        let before = self.free.fetch_update(Relaxed, Relaxed, |free| Some(end(free)));
        Nanos(end(before.unwrap_or_else(|free| free)))
    }
}

impl Device for PacedPath {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, _: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        Ok(Box::new(PacedPathLane { shared: Arc::clone(&self.shared), running: VecDeque::new() }))
    }

    fn limits(&self) -> Limits {
        Limits::new(self.size)
    }
}

struct PacedPathLane {
    shared: Arc<PathServiceState>,
    /// Requests with their completion times, in rising order.
    running: VecDeque<(Nanos, Box<Bio>)>,
}

impl PacedPathLane {
    fn wake(&self, cx: &mut Cx<'_>) {
        if let Some((end, _)) = self.running.front() {
            cx.wake_at(*end);
        }
    }
}

impl Lane for PacedPathLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let now = cx.now();
        for mut bio in batch.drain(..) {
            let end = match self.shared.service(now) {
                Some(service) => {
                    bio.end_with(Status::Ok);
                    self.shared.end(now, service)
                }
                None => {
                    bio.end_with(Status::Transport);
                    self.running.back().map_or(now, |(end, _)| *end)
                }
            };
            self.running.push_back((end, bio));
        }
        self.wake(cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        while let Some((end, _)) = self.running.front()
            && *end <= cx.now()
        {
            done.extend(self.running.pop_front().map(|(_, bio)| bio));
        }
        self.wake(cx);
    }
}
