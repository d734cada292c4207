//! A model of request-based dm on blk-mq in Linux 4.5. Each request goes through two queues, and a
//! separate thread moves it from the upper to the lower one.
//!
//! A lane puts its requests into the upper queue and wakes the thread of the hardware queue. The
//! thread completes each request, because the device below does nothing. Only then is the submitter
//! notified. So each request passes from one thread to another twice.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use udm_core::{
    Batch, Bio, Cx, Device, DeviceControlError, DeviceId, Lane, Limits, Status, WaitQueue,
    WaitQueueSubscription, WakeEpoch,
};

/// The device with two queues.
pub(crate) struct RequestBasedDmModel {
    id: DeviceId,
    limits: Limits,
    queues: Vec<Arc<RequestBasedDmHwQueue>>,
    threads: Vec<JoinHandle<()>>,
    /// Number of lanes so far. Each lane gets the next hardware queue.
    lanes: AtomicUsize,
}

/// A hardware queue of the upper device.
#[derive(Default)]
struct RequestBasedDmHwQueue {
    state: Mutex<RequestBasedDmHwQueueState>,
    work: Condvar,
}

#[derive(Default)]
struct RequestBasedDmHwQueueState {
    /// Requests to serve, each with the completions of its lane.
    requests: VecDeque<(Arc<LaneCompletionQueue>, Box<Bio>)>,
    ended: bool,
}

/// Completed requests of a lane.
struct LaneCompletionQueue {
    done: Mutex<Batch>,
    wait_queue: Arc<WaitQueue>,
}

fn lock_mutex_ignoring_poison<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RequestBasedDmHwQueue {
    /// Serves requests until the end. The device below does nothing, so it takes no time.
    fn serve(&self) {
        loop {
            let mut state = lock_mutex_ignoring_poison(&self.state);
            while state.requests.is_empty() && !state.ended {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            let Some((asked, mut bio)) = state.requests.pop_front() else { return };
            drop(state);
            bio.end_with(Status::Ok);
            lock_mutex_ignoring_poison(&asked.done).push(bio);
            asked.wait_queue.wake_up();
        }
    }
}

impl RequestBasedDmModel {
    /// Creates a device with these limits and hardware queues, each with its thread.
    pub(crate) fn new(queues: usize, limits: Limits) -> RequestBasedDmModel {
        let queues: Vec<Arc<RequestBasedDmHwQueue>> = (0..queues).map(|_| Arc::default()).collect();
        let serve = |queue: &Arc<RequestBasedDmHwQueue>| {
            let queue = Arc::clone(queue);
            thread::spawn(move || queue.serve())
        };
        let threads = queues.iter().map(serve).collect();
        RequestBasedDmModel { id: DeviceId::new(), limits, queues, threads, lanes: AtomicUsize::new(0) }
    }
}

impl Drop for RequestBasedDmModel {
    fn drop(&mut self) {
        for queue in &self.queues {
            lock_mutex_ignoring_poison(&queue.state).ended = true;
            queue.work.notify_one();
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Device for RequestBasedDmModel {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        let number = self.lanes.fetch_add(1, Relaxed);
        let wait_queue = Arc::new(WaitQueue::new());
        let wait_handle = wait_queue.subscribe(cx);
        Ok(Box::new(RequestBasedDmModelLane {
            queue: Arc::clone(&self.queues[number % self.queues.len()]),
            done: Arc::new(LaneCompletionQueue { done: Mutex::default(), wait_queue }),
            seen: wait_handle.epoch(),
            wait_handle,
            in_flight: 0,
        }))
    }

    fn limits(&self) -> Limits {
        self.limits
    }
}

struct RequestBasedDmModelLane {
    queue: Arc<RequestBasedDmHwQueue>,
    done: Arc<LaneCompletionQueue>,
    wait_handle: WaitQueueSubscription,
    seen: WakeEpoch,
    in_flight: usize,
}

impl RequestBasedDmModelLane {
    fn wait(&self, cx: &mut Cx<'_>) {
        if self.in_flight > 0 {
            self.wait_handle.wait(self.seen, cx);
        }
    }
}

impl Lane for RequestBasedDmModelLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        for bio in batch.drain(..) {
            self.in_flight += 1;
            lock_mutex_ignoring_poison(&self.queue.state).requests.push_back((Arc::clone(&self.done), bio));
            self.queue.work.notify_one();
        }
        self.wait(cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let now = self.wait_handle.epoch();
        if std::mem::replace(&mut self.seen, now) != now {
            let from = done.len();
            done.append(&mut lock_mutex_ignoring_poison(&self.done.done));
            self.in_flight -= done.len() - from;
        }
        self.wait(cx);
    }
}
