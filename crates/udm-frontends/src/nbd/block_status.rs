//! `BLOCK_STATUS` queries to devices, on separate threads.
//!
//! A device may have to query a file system, which may be slow or hang, so no core does that. A
//! connection passes a [`BlockStatusQuery`] to the [`BlockStatusWorkerHandle`] and continues. The
//! answer comes back as a message. Each device has its own thread while it is queried, so a device
//! that hangs delays no other. All queues are bounded. If a queue is full or an error occurs, the
//! answer is one that is always valid: all is data, and all has changed. Every query is answered
//! exactly once, because dropping it answers it.

use super::contexts::{BlockStatusExtent, MetaContext};
use std::collections::HashMap;
use std::io;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use udm_core::{CoreId, Device, DeviceId, Sector, Sectors};
use udm_runtime::ProcessCores;

/// Limit of queries that wait for dispatch, and of those that wait for one device.
const QUEUE_MAX: usize = 256;
/// Limit of devices queried at a time. Threads that hang count.
const DEVICES_MAX: usize = 64;
/// Time that a device's thread waits for more queries.
const IDLE_TIME: Duration = Duration::from_secs(2);

/// A query of a device, answered when it is dropped.
pub(super) struct BlockStatusQuery {
    pub(super) device: Arc<dyn Device>,
    pub(super) from: Sector,
    pub(super) len: Sectors,
    /// Contexts to query, at least one.
    pub(super) contexts: Arc<[MetaContext]>,
    /// Limit of runs of sectors in the answer of each context.
    pub(super) max: usize,
    pub(super) core_set: Arc<ProcessCores>,
    pub(super) core: CoreId,
    /// The topic to which the connection has subscribed: the answer costs other connections
    /// nothing.
    pub(super) topic: DeviceId,
    /// Connection and request that are answered.
    pub(super) connection: u64,
    pub(super) key: usize,
    /// Runs of each context that the device has answered.
    pub(super) found: Vec<Vec<BlockStatusExtent>>,
}

/// Message with the answer to a query.
pub(super) struct BlockStatusAnswer {
    pub(super) connection: u64,
    pub(super) key: usize,
    /// The contexts that were queried.
    pub(super) contexts: Arc<[MetaContext]>,
    /// Runs of each context from the start of the range, at least one.
    pub(super) found: Vec<Vec<BlockStatusExtent>>,
}

impl BlockStatusQuery {
    fn ask(mut self) {
        for context in &*self.contexts {
            self.found.push(context.ask(&*self.device, self.from, self.len, self.max));
        }
    }
}

impl Drop for BlockStatusQuery {
    fn drop(&mut self) {
        let mut found = std::mem::take(&mut self.found);
        for context in &self.contexts[found.len()..] {
            found.push(vec![(self.len, context.unknown())]);
        }
        let contexts = Arc::clone(&self.contexts);
        let message = BlockStatusAnswer { connection: self.connection, key: self.key, contexts, found };
        self.core_set.send_message(self.core, self.topic, Box::new(message));
    }
}

/// Accepts queries without blocking. It ends with its last clone.
#[derive(Clone)]
pub(super) enum BlockStatusWorkerHandle {
    /// A thread dispatches the queries.
    Thread(SyncSender<BlockStatusQuery>),
    /// Queries wait until the simulation executes them.
    ByHand(Arc<Mutex<Vec<BlockStatusQuery>>>),
}

impl BlockStatusWorkerHandle {
    /// Starts the thread that dispatches queries.
    pub(super) fn start() -> io::Result<BlockStatusWorkerHandle> {
        let (sender, queries) = sync_channel(QUEUE_MAX);
        std::thread::Builder::new()
            .name("udm-nbd-status".to_owned())
            .spawn(move || dispatch_block_status_queries(&queries))?;
        Ok(BlockStatusWorkerHandle::Thread(sender))
    }

    /// Queues a query.
    pub(super) fn ask(&self, query: BlockStatusQuery) {
        match self {
            // A query that does not fit is returned and dropped, which answers it.
            BlockStatusWorkerHandle::Thread(queries) => drop(queries.try_send(query)),
            BlockStatusWorkerHandle::ByHand(queries) => lock_block_status_queries(queries).push(query),
        }
    }

    /// Number of queries that wait for the simulation.
    pub(super) fn waiting(&self) -> usize {
        match self {
            BlockStatusWorkerHandle::Thread(_) => 0,
            BlockStatusWorkerHandle::ByHand(queries) => lock_block_status_queries(queries).len(),
        }
    }

    /// Executes the `nth` waiting query. If `asks` is false, drops it, as if the queue were full.
    pub(super) fn do_one(&self, nth: usize, asks: bool) {
        let BlockStatusWorkerHandle::ByHand(queries) = self else { return };
        let mut queries = lock_block_status_queries(queries);
        let query = (nth < queries.len()).then(|| queries.remove(nth));
        drop(queries);
        if let Some(query) = query.filter(|_| asks) {
            query.ask();
        }
    }
}

fn lock_block_status_queries(
    queries: &Mutex<Vec<BlockStatusQuery>>,
) -> MutexGuard<'_, Vec<BlockStatusQuery>> {
    queries.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The dispatcher's handle to a device's thread.
struct DeviceBlockStatusThread {
    queue: SyncSender<BlockStatusQuery>,
    alive: Weak<()>,
}

fn dispatch_block_status_queries(queries: &Receiver<BlockStatusQuery>) {
    let mut device_threads: HashMap<DeviceId, DeviceBlockStatusThread> = HashMap::new();
    while let Ok(query) = queries.recv() {
        let device = query.device.id();
        let mut query = Some(query);
        if let Some(device_thread) = device_threads.get(&device)
            && let Some(now) = query.take()
            && let Err(TrySendError::Disconnected(back)) = device_thread.queue.try_send(now)
        {
            // The device's thread has just ended.
            query = Some(back);
        }
        let Some(query) = query else { continue };
        start_block_status_thread(device, query, &mut device_threads);
    }
}

fn start_block_status_thread(
    device: DeviceId,
    query: BlockStatusQuery,
    device_threads: &mut HashMap<DeviceId, DeviceBlockStatusThread>,
) {
    device_threads.retain(|_, device_thread| device_thread.alive.strong_count() > 0);
    if device_threads.len() >= DEVICES_MAX {
        return;
    }
    let (queue, queries) = sync_channel(QUEUE_MAX);
    let life = Arc::new(());
    let alive = Arc::downgrade(&life);
    // The new queue is not full. If no thread can be started, the query is dropped with the queue.
    let _ = queue.try_send(query);
    let thread = std::thread::Builder::new().name("udm-nbd-extents".to_owned());
    if thread.spawn(move || run_block_status_thread(&queries, life)).is_ok() {
        device_threads.insert(device, DeviceBlockStatusThread { queue, alive });
    }
}

fn run_block_status_thread(queries: &Receiver<BlockStatusQuery>, life: Arc<()>) {
    while let Ok(query) = queries.recv_timeout(IDLE_TIME) {
        query.ask();
    }
    drop(life);
}
