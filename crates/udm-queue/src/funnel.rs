//! One way to a device for all cores: where requests have one order, or a server takes one
//! connection that writes and no more.
//!
//! A task has the device's lane, on one core for good. Lanes leave what they are asked in a queue
//! and ring; the task serves it and leaves the answers in the queue of the lane that asked. A bio
//! stays on its core: only its data goes to the other and comes back. *Price:* two queues, which
//! are shared atomics, a request, and a letter each way a batch.

use crossbeam_queue::SegQueue;
use slab::Slab;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use udm_core::bugs::{self, Bug};
use udm_core::{
    Batch, Bell, Bio, BioFlags, Busy, Cx, Device, DeviceSlot, Lane, Listener, Op, Sector, Sectors, Segments,
    Status, Task, TaskCx, TaskHandle,
};

/// The way of all cores to one device.
#[derive(Default)]
pub struct Funnel {
    running: Mutex<Weak<Running>>,
}

/// A task that serves, for as long as a lane needs it.
struct Running {
    shared: Arc<Shared>,
    _task: TaskHandle,
}

/// What lanes and the task share.
struct Shared {
    asked: SegQueue<Asked>,
    /// Rung when something was asked.
    bell: Arc<Bell>,
    /// The task is over, and serves no more.
    over: AtomicBool,
}

/// A request.
struct Asked {
    op: Op,
    flags: BioFlags,
    sector: Sector,
    sectors: Sectors,
    data: Segments,
    /// Where it waits.
    from: Arc<Answers>,
    key: usize,
}

/// The answers to one lane.
struct Answers {
    queue: SegQueue<(usize, Status, Segments)>,
    bell: Arc<Bell>,
}

impl Shared {
    /// Answers all that is asked of a task that is over.
    fn refuse(&self) {
        while let Some(asked) = self.asked.pop() {
            asked.from.queue.push((asked.key, Status::Transport, asked.data));
            asked.from.bell.ring();
        }
    }
}

impl Funnel {
    /// A lane on this core, to the one lane of `device`.
    #[must_use]
    pub fn open(&self, device: &Arc<dyn Device>, cx: &mut Cx<'_>) -> Box<dyn Lane> {
        let mut kept = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let running = kept.upgrade().unwrap_or_else(|| {
            let (asked, bell) = (SegQueue::new(), Arc::new(Bell::new()));
            let shared = Arc::new(Shared { asked, bell, over: AtomicBool::new(false) });
            let (device, of_task) = (Arc::clone(device), Arc::clone(&shared));
            let make = move || Box::new(Serving::new(device, of_task)) as Box<dyn Task>;
            let task = cx.all_cores().start(Box::new(make));
            Arc::new(Running { shared, _task: task })
        });
        *kept = Arc::downgrade(&running);
        let answers = Arc::new(Answers { queue: SegQueue::new(), bell: Arc::new(Bell::new()) });
        let listener = answers.bell.listen(cx);
        Box::new(FunnelLane { running, answers, listener, waiting: Slab::new() })
    }
}

struct FunnelLane {
    running: Arc<Running>,
    answers: Arc<Answers>,
    listener: Listener,
    waiting: Slab<Box<Bio>>,
}

impl Lane for FunnelLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let shared = &self.running.shared;
        let seen = self.listener.epoch();
        for mut bio in batch.drain(..) {
            let Bio { op, flags, sector, sectors, .. } = *bio;
            let (data, from) = (std::mem::take(&mut bio.data), Arc::clone(&self.answers));
            let key = self.waiting.insert(bio);
            shared.asked.push(Asked { op, flags, sector, sectors, data, from, key });
        }
        // Either the task sees what was asked before it is over, or this sees that it is.
        if shared.over.load(SeqCst) {
            shared.refuse();
        }
        shared.bell.ring();
        // The lane above may ask in its poll, behind that of this one.
        if !bugs::on(Bug::WayNotAwaited) {
            self.listener.wait(seen, cx);
        }
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let seen = self.listener.epoch();
        while let Some((key, status, data)) = self.answers.queue.pop() {
            let mut bio = self.waiting.remove(key);
            bio.data = data;
            bio.end_with(status);
            done.push(bio);
        }
        if !self.waiting.is_empty() {
            self.listener.wait(seen, cx);
        }
    }
}

/// The task.
struct Serving {
    device: Arc<dyn Device>,
    shared: Arc<Shared>,
    lane: Option<DeviceSlot>,
    bell: Option<Listener>,
    under_way: Slab<(Arc<Answers>, usize)>,
    /// Bios that have been home, for the next requests.
    spare: Batch,
    stopping: bool,
}

impl Serving {
    fn new(device: Arc<dyn Device>, shared: Arc<Shared>) -> Serving {
        let (under_way, spare) = (Slab::new(), Batch::new());
        Serving { device, shared, lane: None, bell: None, under_way, spare, stopping: false }
    }

    fn take_in(&mut self, cx: &mut dyn TaskCx) {
        if self.shared.asked.is_empty() {
            return;
        }
        if self.lane.is_none() {
            self.lane = cx.open(&self.device).ok();
        }
        let Some(lane) = self.lane else { return self.shared.refuse() };
        while let Some(Asked { op, flags, sector, sectors, data, from, key }) = self.shared.asked.pop() {
            let mut bio = self.spare.pop().unwrap_or_default();
            (bio.op, bio.flags, bio.sector, bio.sectors, bio.data) = (op, flags, sector, sectors, data);
            bio.cookie = self.under_way.insert((from, key)) as u64;
            cx.submit(lane, bio);
        }
    }
}

impl Task for Serving {
    fn turn(&mut self, cx: &mut dyn TaskCx) {
        let bell = self.bell.take().unwrap_or_else(|| cx.listen(&self.shared.bell));
        loop {
            let seen = bell.epoch();
            self.take_in(cx);
            if self.stopping || bell.is_quiet(seen) {
                break;
            }
        }
        self.bell = Some(bell);
    }

    fn complete(&mut self, done: &mut Batch, cx: &mut dyn TaskCx) {
        let mut last: Option<Arc<Answers>> = None;
        for mut bio in done.drain(..) {
            let (to, key) = self.under_way.remove(bio.cookie as usize);
            to.queue.push((key, bio.status, std::mem::take(&mut bio.data)));
            self.spare.push(bio);
            // Once for those that follow each other.
            if let Some(before) = last.replace(Arc::clone(&to)).filter(|before| !Arc::ptr_eq(before, &to)) {
                before.bell.ring();
            }
        }
        if let Some(last) = last {
            last.bell.ring();
        }
        match self.stopping {
            true => self.stop(cx),
            false => self.turn(cx),
        }
    }

    fn stop(&mut self, cx: &mut dyn TaskCx) {
        self.stopping = true;
        self.bell = None;
        self.shared.over.store(true, SeqCst);
        self.shared.refuse();
        if self.under_way.is_empty()
            && let Some(lane) = self.lane.take()
        {
            cx.close(lane);
        }
    }

    fn is_over(&self) -> bool {
        self.stopping && self.under_way.is_empty()
    }

    fn busy(&self) -> Busy {
        Busy::Background
    }
}
