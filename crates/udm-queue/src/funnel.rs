//! One way to a device for all cores: where requests have one order, or a server takes one
//! connection that writes and no more.
//!
//! A task has the device's lane, on one core for good. Lanes leave what they are asked in a queue
//! and ring; the task serves it and leaves the answers in the queue of the lane that asked. A bio
//! stays on its core: only its data goes to the other and comes back. *Price:* two queues, which
//! are shared atomics, a request, and a letter each way a batch. What becomes of them in a suspend
//! is in [`drain`].

mod drain;

use crossbeam_queue::SegQueue;
use drain::{Asker, Drained, Drains};
use slab::Slab;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use udm_core::bugs::{self, Bug};
use udm_core::{
    Batch, Bell, Bio, BioFlags, Busy, Cx, Device, DeviceSlot, Drain, Lane, Listener, Op, Sector, Sectors,
    Segments, Status, Task, TaskCx, TaskHandle, interleave,
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
    /// How many lanes there have been.
    lanes: AtomicU32,
    drains: Arc<Drains>,
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
    lane: u32,
    queue: SegQueue<(usize, Status, Segments)>,
    /// Those that nobody has begun, which a drain gave back.
    handed: SegQueue<(usize, Segments)>,
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
            let (asked, bell, drains) = (SegQueue::new(), Arc::new(Bell::new()), Arc::default());
            let (over, lanes) = (AtomicBool::new(false), AtomicU32::new(0));
            let shared = Arc::new(Shared { asked, bell, over, lanes, drains });
            let device = Arc::new(Drained::new(Arc::clone(device), Arc::clone(&shared.drains)));
            let of_task = Arc::clone(&shared);
            let make = move || Box::new(Serving::new(device, of_task)) as Box<dyn Task>;
            let task = cx.all_cores().start(Box::new(make));
            Arc::new(Running { shared, _task: task })
        });
        *kept = Arc::downgrade(&running);
        let lane = running.shared.lanes.fetch_add(1, Relaxed);
        let (queue, handed, bell) = (SegQueue::new(), SegQueue::new(), Arc::new(Bell::new()));
        let answers = Arc::new(Answers { lane, queue, handed, bell });
        let listener = answers.bell.listen(cx);
        let asker = Asker::new(lane, Arc::clone(&running.shared.drains));
        Box::new(FunnelLane { running, answers, listener, waiting: Slab::new(), asker })
    }
}

struct FunnelLane {
    running: Arc<Running>,
    answers: Arc<Answers>,
    listener: Listener,
    waiting: Slab<Box<Bio>>,
    asker: Asker,
}

impl FunnelLane {
    /// Takes back what a drain has given back, as it was given.
    fn take_handed(&mut self, back: &mut Batch) {
        while let Some((key, data)) = self.answers.handed.pop() {
            let mut bio = self.waiting.remove(key);
            bio.data = data;
            back.push(bio);
        }
    }

    /// A poll behind a drain, for as long as something of that can still be given back.
    #[cold]
    fn poll_drained(&mut self, cx: &mut Cx<'_>) {
        interleave::point();
        match self.asker.take_drained() {
            Some(Drain::NoFlush | Drain::End) => {
                // It came behind the drain: the next one gives it out.
                if !self.answers.handed.is_empty() {
                    cx.wake_now();
                }
                return self.asker.settle(self.waiting.is_empty());
            }
            // One without flush was called off before it: nothing is given back in this one.
            Some(Drain::Flush) => {}
            // There was a resume. Where there was none, the next drain asks anew.
            None => {
                if !bugs::on(Bug::DrainOutlives) && self.asker.ask(None) {
                    cx.wake_now();
                }
            }
        }
        let mut again = Batch::new();
        self.take_handed(&mut again);
        if !again.is_empty() && bugs::on(Bug::LateHandBackLost) {
            return bugs::lose(again);
        }
        if !again.is_empty() {
            cx.wake_now();
            self.submit(&mut again, cx);
        }
        self.asker.settle(self.waiting.is_empty());
    }
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
        if self.asker.has_asked() {
            self.poll_drained(cx);
        }
        if !self.waiting.is_empty() {
            self.listener.wait(seen, cx);
        }
    }

    fn drain(&mut self, how: Drain, back: &mut Batch, cx: &mut Cx<'_>) {
        let from = back.len();
        if how != Drain::Flush {
            self.take_handed(back);
        }
        self.asker.drained(how, back.len() > from, self.waiting.is_empty(), cx);
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
            let of_lane = from.lane;
            bio.cookie = drain::cookie(of_lane, self.under_way.insert((from, key)));
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
            let (at, handed) = drain::read(bio.cookie);
            let ((to, key), data) = (self.under_way.remove(at), std::mem::take(&mut bio.data));
            match handed {
                false => to.queue.push((key, bio.status, data)),
                true => to.handed.push((key, data)),
            }
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
