//! Request-based dm on blk-mq as it was in 4.5: a request goes through two queues, and from the
//! upper to the lower one by a thread of its own.
//!
//! A lane puts its requests into the upper queue and wakes the thread of the hardware queue, which
//! makes the clones, has the device below do them and completes them: only then does the submitter
//! hear of it. So each request passes from one thread to another twice.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use udm_core::{
    Batch, Bio, Cx, Device, DeviceId, Lane, Limits, OpenError, Status, WaitHandle, WaitQueue, WakeEpoch,
};

/// The device.
pub(crate) struct TwoQueueDevice {
    id: DeviceId,
    limits: Limits,
    queues: Vec<Arc<HwQueue>>,
    threads: Vec<JoinHandle<()>>,
    /// Lanes so far: each has the next hardware queue.
    lanes: AtomicUsize,
}

/// A hardware queue of the upper device.
#[derive(Default)]
struct HwQueue {
    state: Mutex<HwQueueState>,
    work: Condvar,
}

#[derive(Default)]
struct HwQueueState {
    /// What is to be done, each with who asked.
    requests: VecDeque<(Arc<Completions>, Box<Bio>)>,
    ended: bool,
}

/// What has been done for a lane.
struct Completions {
    done: Mutex<Batch>,
    bell: Arc<WaitQueue>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl HwQueue {
    /// Does what comes until the end. What is below does nothing, so that it takes no time.
    fn serve(&self) {
        loop {
            let mut state = lock(&self.state);
            while state.requests.is_empty() && !state.ended {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            let Some((asked, mut bio)) = state.requests.pop_front() else { return };
            drop(state);
            bio.end_with(Status::Ok);
            lock(&asked.done).push(bio);
            asked.bell.wake_up();
        }
    }
}

impl TwoQueueDevice {
    /// A device of these limits with so many hardware queues, each with its thread.
    pub(crate) fn new(queues: usize, limits: Limits) -> TwoQueueDevice {
        let queues: Vec<Arc<HwQueue>> = (0..queues).map(|_| Arc::default()).collect();
        let serve = |queue: &Arc<HwQueue>| {
            let queue = Arc::clone(queue);
            thread::spawn(move || queue.serve())
        };
        let threads = queues.iter().map(serve).collect();
        TwoQueueDevice { id: DeviceId::new(), limits, queues, threads, lanes: AtomicUsize::new(0) }
    }
}

impl Drop for TwoQueueDevice {
    fn drop(&mut self) {
        for queue in &self.queues {
            lock(&queue.state).ended = true;
            queue.work.notify_one();
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Device for TwoQueueDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, OpenError> {
        let number = self.lanes.fetch_add(1, Relaxed);
        let bell = Arc::new(WaitQueue::new());
        let listener = bell.subscribe(cx);
        Ok(Box::new(TwoQueueLane {
            queue: Arc::clone(&self.queues[number % self.queues.len()]),
            done: Arc::new(Completions { done: Mutex::default(), bell }),
            seen: listener.epoch(),
            listener,
            in_flight: 0,
        }))
    }

    fn limits(&self) -> Limits {
        self.limits
    }
}

struct TwoQueueLane {
    queue: Arc<HwQueue>,
    done: Arc<Completions>,
    listener: WaitHandle,
    seen: WakeEpoch,
    in_flight: usize,
}

impl TwoQueueLane {
    fn wait(&self, cx: &mut Cx<'_>) {
        if self.in_flight > 0 {
            self.listener.wait(self.seen, cx);
        }
    }
}

impl Lane for TwoQueueLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        for bio in batch.drain(..) {
            self.in_flight += 1;
            lock(&self.queue.state).requests.push_back((Arc::clone(&self.done), bio));
            self.queue.work.notify_one();
        }
        self.wait(cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let now = self.listener.epoch();
        if std::mem::replace(&mut self.seen, now) != now {
            let from = done.len();
            done.append(&mut lock(&self.done.done));
            self.in_flight -= done.len() - from;
        }
        self.wait(cx);
    }
}
