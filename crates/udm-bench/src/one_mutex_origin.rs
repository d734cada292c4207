//! The baseline for first writes: an origin with one mutex around its exceptions and one thread
//! that copies.
//!
//! The device is a model of the kernel's dm-snapshot before its exception table had finer locks.
//! Each write takes the lock to look up its chunk. A chunk without an exception is queued for the
//! copying thread. The write waits until the thread has read the origin, written the store and
//! added the exception.
//!
//! The model does less than the kernel did. Exceptions are kept only in memory. Chunks are taken
//! from the queue and copied many at a time, and writers are woken once for all of them. There is
//! no table, no suspend and no reader of the snapshot to wait for.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use udm_buf::Buf;
use udm_core::{
    Batch, Bio, Cx, Device, DeviceControlError, DeviceId, Lane, Limits, Op, Sector, Sectors, WaitQueue,
    WaitQueueSubscription, WakeEpoch,
};
use udm_runtime::LocalCore;

/// Sectors per chunk.
pub const CHUNK: u64 = 8;

/// Chunks that are copied at a time.
const COPIES: usize = 32;

/// The state that all lanes and the copying thread share.
pub struct OneMutexExceptionTable {
    state: Mutex<ExceptionMapAndCopyQueue>,
    work: Condvar,
    copied: Arc<WaitQueue>,
}

#[derive(Default)]
struct ExceptionMapAndCopyQueue {
    /// Index of a chunk in the store; `None` while the chunk is copied.
    of: HashMap<u64, Option<u64>>,
    queue: Vec<u64>,
    ended: bool,
}

impl OneMutexExceptionTable {
    /// Creates an empty table.
    pub fn new() -> OneMutexExceptionTable {
        OneMutexExceptionTable {
            state: Mutex::default(),
            work: Condvar::new(),
            copied: Arc::new(WaitQueue::new()),
        }
    }

    fn state(&self) -> MutexGuard<'_, ExceptionMapAndCopyQueue> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if `chunk` may be written. Queues a chunk that has no exception.
    fn may_write(&self, chunk: u64) -> bool {
        let mut state = self.state();
        let known = state.of.get(&chunk).copied();
        if known.is_none() {
            state.of.insert(chunk, None);
            state.queue.push(chunk);
            drop(state);
            self.work.notify_one();
        }
        known.flatten().is_some()
    }

    /// Makes [`OneMutexExceptionTable::copy`] return once it has nothing to do.
    pub fn end(&self) {
        self.state().ended = true;
        self.work.notify_one();
    }

    /// The loop of the copying thread.
    pub fn copy(&self, core: &mut LocalCore, origin: &mut dyn Lane, store: &mut dyn Lane) {
        let (mut batch, mut done, mut queue, mut next) = (Batch::new(), Batch::new(), Vec::new(), 0);
        while self.take(&mut queue) {
            for chunks in queue.chunks(COPIES) {
                batch.resize_with(chunks.len(), || {
                    Bio::read(Sector(0), Sectors(CHUNK), Buf::zeroed(CHUNK as usize * 512).into())
                });
                for (bio, chunk) in batch.iter_mut().zip(chunks) {
                    (bio.op, bio.sector) = (Op::Read, Sector(chunk * CHUNK));
                }
                run_batch_to_completion(core, origin, &mut batch, &mut done);
                // The reads may complete in any order.
                let order: Vec<u64> = batch.iter().map(|bio| bio.sector.0 / CHUNK).collect();
                for (bio, new) in batch.iter_mut().zip(next..) {
                    (bio.op, bio.sector) = (Op::Write, Sector(new * CHUNK));
                }
                run_batch_to_completion(core, store, &mut batch, &mut done);
                for (chunk, new) in order.into_iter().zip(next..) {
                    self.state().of.insert(chunk, Some(new));
                }
                next += chunks.len() as u64;
                self.copied.wake_up();
            }
        }
    }

    /// Waits for chunks to copy. Returns false at the end.
    fn take(&self, queue: &mut Vec<u64>) -> bool {
        let mut state = self.state();
        while state.queue.is_empty() && !state.ended {
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        queue.clear();
        std::mem::swap(queue, &mut state.queue);
        !queue.is_empty()
    }
}

/// Submits all of `batch` to `lane` and waits until it completes.
fn run_batch_to_completion(core: &mut LocalCore, lane: &mut dyn Lane, batch: &mut Batch, done: &mut Batch) {
    let count = batch.len();
    batch.iter_mut().for_each(|bio| bio.start());
    core.turn(|cx| lane.submit(batch, cx));
    while done.len() < count {
        core.turn(|cx| lane.poll(done, cx));
    }
    done.iter_mut().for_each(|bio| bio.finish());
    std::mem::swap(batch, done);
}

/// The origin device of the baseline.
pub struct OneMutexOrigin {
    id: DeviceId,
    origin: Arc<dyn Device>,
    exceptions: Arc<OneMutexExceptionTable>,
}

impl OneMutexOrigin {
    /// Creates the device over `origin`.
    pub fn new(origin: Arc<dyn Device>, exceptions: &Arc<OneMutexExceptionTable>) -> OneMutexOrigin {
        OneMutexOrigin { id: DeviceId::new(), origin, exceptions: Arc::clone(exceptions) }
    }
}

impl Device for OneMutexOrigin {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        let wait_handle = self.exceptions.copied.subscribe(cx);
        Ok(Box::new(OneMutexLane {
            below: self.origin.open(cx)?,
            exceptions: Arc::clone(&self.exceptions),
            seen: wait_handle.epoch(),
            wait_handle,
            down: Batch::new(),
            waiting: VecDeque::new(),
        }))
    }

    fn limits(&self) -> Limits {
        self.origin.limits()
    }
}

struct OneMutexLane {
    below: Box<dyn Lane>,
    exceptions: Arc<OneMutexExceptionTable>,
    wait_handle: WaitQueueSubscription,
    seen: WakeEpoch,
    down: Batch,
    waiting: VecDeque<Box<Bio>>,
}

impl OneMutexLane {
    fn finish_turn(&mut self, cx: &mut Cx<'_>) {
        if !self.down.is_empty() {
            self.below.submit(&mut self.down, cx);
            cx.wake_now();
        }
        if !self.waiting.is_empty() {
            self.wait_handle.wait(self.seen, cx);
        }
    }
}

impl Lane for OneMutexLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        for bio in batch.drain(..) {
            if bio.op != Op::Write || self.exceptions.may_write(bio.sector.0 / CHUNK) {
                self.down.push(bio);
            } else {
                self.waiting.push_back(bio);
            }
        }
        self.finish_turn(cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        self.below.poll(done, cx);
        let now = self.wait_handle.epoch();
        if std::mem::replace(&mut self.seen, now) != now {
            let state = self.exceptions.state();
            for _ in 0..self.waiting.len() {
                let Some(bio) = self.waiting.pop_front() else { break };
                match state.of.get(&(bio.sector.0 / CHUNK)) {
                    Some(Some(_)) => self.down.push(bio),
                    _ => self.waiting.push_back(bio),
                }
            }
        }
        self.finish_turn(cx);
    }
}
