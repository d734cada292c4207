//! What `BLOCK_STATUS` asks of a device, asked on threads of their own.
//!
//! A device may have to ask a file system, which may take its time or hang; no core does that. A
//! connection passes a [`BlockStatusQuery`] to the [`BlockStatusWorker`] and goes on; the answer comes back as a
//! letter. Each device has one thread while it is asked, so one that hangs holds up nobody else.
//! All queues are bounded: what finds no place, and whatever goes wrong, is answered with what is
//! always true enough: data, and changed. Every survey is answered once, because dropping it
//! answers it.

use super::contexts::{FlaggedRun, MetaContext};
use std::collections::HashMap;
use std::io;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use udm_core::{CoreId, Device, DeviceId, Sector, Sectors};
use udm_runtime::CoreSet;

/// Surveys that wait to be dealt out, and for one device.
const QUEUE_MAX: usize = 256;
/// Devices that are asked at a time. Threads that hang count too.
const DEVICES_MAX: usize = 64;
/// How long a device's thread waits for more.
const LINGER: Duration = Duration::from_secs(2);

/// A question about a device, on its way.
pub(super) struct BlockStatusQuery {
    pub(super) device: Arc<dyn Device>,
    pub(super) from: Sector,
    pub(super) len: Sectors,
    /// What is asked: at least one.
    pub(super) contexts: Arc<[MetaContext]>,
    /// Runs of sectors in the answer of each at the most.
    pub(super) max: usize,
    pub(super) cluster: Arc<CoreSet>,
    pub(super) core: CoreId,
    /// Who asked: a connection, and its request.
    pub(super) connection: u64,
    pub(super) key: usize,
    /// Of each context, once the device has answered.
    pub(super) found: Vec<Vec<FlaggedRun>>,
}

/// The letter with the answer.
pub(super) struct BlockStatusAnswer {
    pub(super) connection: u64,
    pub(super) key: usize,
    /// Of each context, from the begin of the range on, at least one.
    pub(super) found: Vec<Vec<FlaggedRun>>,
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
        let message = BlockStatusAnswer { connection: self.connection, key: self.key, found };
        self.cluster.send_message(self.core, self.device.id(), Box::new(message));
    }
}

/// Takes surveys in. It never blocks, and ends with its last clone.
#[derive(Clone)]
pub(super) enum BlockStatusWorker {
    /// A thread deals them out.
    Thread(SyncSender<BlockStatusQuery>),
    /// They wait until somebody has one done, in a world that is made up.
    ByHand(Arc<Mutex<Vec<BlockStatusQuery>>>),
}

impl BlockStatusWorker {
    /// Starts the thread that deals surveys out.
    pub(super) fn start() -> io::Result<BlockStatusWorker> {
        let (sender, surveys) = sync_channel(QUEUE_MAX);
        std::thread::Builder::new()
            .name("udm-nbd-survey".to_owned())
            .spawn(move || dispatch_queries(&surveys))?;
        Ok(BlockStatusWorker::Thread(sender))
    }

    /// Has a device asked.
    pub(super) fn ask(&self, survey: BlockStatusQuery) {
        match self {
            // What is handed back is dropped, and so answered.
            BlockStatusWorker::Thread(surveys) => drop(surveys.try_send(survey)),
            BlockStatusWorker::ByHand(surveys) => lock(surveys).push(survey),
        }
    }

    /// How many wait to be done by hand.
    pub(super) fn waiting(&self) -> usize {
        match self {
            BlockStatusWorker::Thread(_) => 0,
            BlockStatusWorker::ByHand(surveys) => lock(surveys).len(),
        }
    }

    /// Does the survey that is `nth` in the order of those that wait; or drops it, as one that
    /// found no place.
    pub(super) fn do_one(&self, nth: usize, asks: bool) {
        let BlockStatusWorker::ByHand(surveys) = self else { return };
        let mut surveys = lock(surveys);
        let survey = (nth < surveys.len()).then(|| surveys.remove(nth));
        drop(surveys);
        if let Some(survey) = survey.filter(|_| asks) {
            survey.ask();
        }
    }
}

fn lock(surveys: &Mutex<Vec<BlockStatusQuery>>) -> MutexGuard<'_, Vec<BlockStatusQuery>> {
    surveys.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A device's thread, as the dealer sees it.
struct DeviceThread {
    queue: SyncSender<BlockStatusQuery>,
    alive: Weak<()>,
}

fn dispatch_queries(surveys: &Receiver<BlockStatusQuery>) {
    let mut device_threads: HashMap<DeviceId, DeviceThread> = HashMap::new();
    while let Ok(survey) = surveys.recv() {
        let device = survey.device.id();
        let mut survey = Some(survey);
        if let Some(asker) = device_threads.get(&device)
            && let Some(now) = survey.take()
            && let Err(TrySendError::Disconnected(back)) = asker.queue.try_send(now)
        {
            // Its thread has just ended.
            survey = Some(back);
        }
        let Some(survey) = survey else { continue };
        begin(device, survey, &mut device_threads);
    }
}

fn begin(device: DeviceId, survey: BlockStatusQuery, device_threads: &mut HashMap<DeviceId, DeviceThread>) {
    device_threads.retain(|_, asker| asker.alive.strong_count() > 0);
    if device_threads.len() >= DEVICES_MAX {
        return;
    }
    let (queue, surveys) = sync_channel(QUEUE_MAX);
    let life = Arc::new(());
    let alive = Arc::downgrade(&life);
    // Cannot be full; if the thread can't be had, it is dropped with its queue.
    let _ = queue.try_send(survey);
    let thread = std::thread::Builder::new().name("udm-nbd-extents".to_owned());
    if thread.spawn(move || serve_device(&surveys, life)).is_ok() {
        device_threads.insert(device, DeviceThread { queue, alive });
    }
}

fn serve_device(surveys: &Receiver<BlockStatusQuery>, life: Arc<()>) {
    while let Ok(survey) = surveys.recv_timeout(LINGER) {
        survey.ask();
    }
    drop(life);
}
