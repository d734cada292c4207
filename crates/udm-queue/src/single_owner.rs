//! One lane of a device for all cores: for requests with one order, or for a server that allows
//! only one writing connection.
//!
//! A task on one core, the owner, has the device's lane. Other lanes put requests into a queue and
//! wake the owner. The owner serves them and puts each reply into the queue of the requesting lane.
//! A bio stays on its core; only its data goes to the owner and back. *Price:* two shared queues
//! per request, and a message each way per batch. [`drain`] describes a suspend.

mod drain;

use crossbeam_queue::SegQueue;
use drain::{DrainTaskDevice, PendingSuspendDrains, RemoteLaneDrainState};
use slab::Slab;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use udm_core::{
    Batch, Bio, BioFlags, BioTask, BioTaskCx, BioTaskHandle, BioTaskLaneId, Cx, Device, DrainMode, Lane, Op,
    OwnWork, Sector, Sectors, Segments, Status, WaitQueue, WaitQueueSubscription, interleave,
};

/// Forwards the requests of all cores to one lane of a device.
#[derive(Default)]
pub struct SingleOwnerForwarder {
    running: Mutex<Weak<OwnerTaskHandle>>,
}

/// A running owner task. Dropping the last reference stops it.
struct OwnerTaskHandle {
    shared: Arc<OwnerTaskSharedState>,
    _task: BioTaskHandle,
}

/// State shared by the lanes and the owner.
struct OwnerTaskSharedState {
    forwarded: SegQueue<ForwardedRequest>,
    /// Woken when a request is queued.
    wait_queue: Arc<WaitQueue>,
    /// True when the task is over and serves no more requests.
    over: AtomicBool,
    /// Number of lanes opened so far.
    lanes: AtomicU32,
    drains: Arc<PendingSuspendDrains>,
}

/// A request of a lane.
struct ForwardedRequest {
    op: Op,
    flags: BioFlags,
    sector: Sector,
    sectors: Sectors,
    data: Segments,
    /// The lane's reply queue, and the key of the waiting bio.
    from: Arc<ReplyQueue>,
    key: usize,
}

/// Queue of the replies to one lane.
struct ReplyQueue {
    lane: u32,
    queue: SegQueue<(usize, Status, Segments)>,
    /// Requests that were not started and were handed back by a drain.
    handed_back: SegQueue<(usize, Segments)>,
    wait_queue: Arc<WaitQueue>,
}

impl OwnerTaskSharedState {
    /// Fails all queued requests of a task that is over.
    fn refuse(&self) {
        while let Some(forwarded) = self.forwarded.pop() {
            forwarded.from.queue.push((forwarded.key, Status::Transport, forwarded.data));
            forwarded.from.wait_queue.wake_up();
        }
    }
}

impl SingleOwnerForwarder {
    /// Opens a lane on this core that forwards to the only lane of `device`.
    #[must_use]
    pub fn open(&self, device: &Arc<dyn Device>, cx: &mut Cx<'_>) -> Box<dyn Lane> {
        let mut kept = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let running = kept.upgrade().unwrap_or_else(|| {
            let (forwarded, wait_queue, drains) =
                (SegQueue::new(), Arc::new(WaitQueue::new()), Arc::default());
            let (over, lanes) = (AtomicBool::new(false), AtomicU32::new(0));
            let shared = Arc::new(OwnerTaskSharedState { forwarded, wait_queue, over, lanes, drains });
            let device = Arc::new(DrainTaskDevice::new(Arc::clone(device), Arc::clone(&shared.drains)));
            let of_task = Arc::clone(&shared);
            let make = move || Box::new(OwnerTask::new(device, of_task)) as Box<dyn BioTask>;
            let task = cx.all_cores().start(Box::new(make));
            Arc::new(OwnerTaskHandle { shared, _task: task })
        });
        *kept = Arc::downgrade(&running);
        let lane = running.shared.lanes.fetch_add(1, Relaxed);
        let (queue, handed_back, wait_queue) = (SegQueue::new(), SegQueue::new(), Arc::new(WaitQueue::new()));
        let replies = Arc::new(ReplyQueue { lane, queue, handed_back, wait_queue });
        let wait_handle = replies.wait_queue.subscribe(cx);
        let drain_requester = RemoteLaneDrainState::new(lane, Arc::clone(&running.shared.drains));
        Box::new(RemoteLane { running, replies, wait_handle, waiting: Slab::new(), drain_requester })
    }
}

struct RemoteLane {
    running: Arc<OwnerTaskHandle>,
    replies: Arc<ReplyQueue>,
    wait_handle: WaitQueueSubscription,
    waiting: Slab<Box<Bio>>,
    drain_requester: RemoteLaneDrainState,
}

impl RemoteLane {
    /// Collects bios that a drain handed back, unchanged.
    fn take_handed_back(&mut self, back: &mut Batch) {
        while let Some((key, data)) = self.replies.handed_back.pop() {
            let mut bio = self.waiting.remove(key);
            bio.data = data;
            back.push(bio);
        }
    }

    /// The part of a poll for a drained lane, as long as bios may be handed back.
    #[cold]
    fn poll_drained(&mut self, cx: &mut Cx<'_>) {
        interleave::mark_interleave_point();
        match self.drain_requester.take_drained() {
            Some(DrainMode::NoFlush | DrainMode::End) => {
                // These were handed back after the drain: the next drain returns them.
                if !self.replies.handed_back.is_empty() {
                    cx.wake_now();
                }
                return self.drain_requester.clear_if_empty(self.waiting.is_empty());
            }
            // The suspend without flush was cancelled before this drain, and a drain with flush
            // hands back nothing.
            Some(DrainMode::Flush) => {}
            // No drain preceded this poll: perhaps the device has resumed. If not, the next drain
            // asks again.
            None => {
                if self.drain_requester.ask(None) {
                    cx.wake_now();
                }
            }
        }
        let mut again = Batch::new();
        self.take_handed_back(&mut again);
        if !again.is_empty() {
            cx.wake_now();
            self.submit(&mut again, cx);
        }
        self.drain_requester.clear_if_empty(self.waiting.is_empty());
    }
}

impl Lane for RemoteLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let shared = &self.running.shared;
        let seen = self.wait_handle.epoch();
        for mut bio in batch.drain(..) {
            let Bio { op, flags, sector, sectors, .. } = *bio;
            let (data, from) = (std::mem::take(&mut bio.data), Arc::clone(&self.replies));
            let key = self.waiting.insert(bio);
            shared.forwarded.push(ForwardedRequest { op, flags, sector, sectors, data, from, key });
        }
        // Either the task sees the requests before it is over, or this lane sees that it is over.
        if shared.over.load(SeqCst) {
            shared.refuse();
        }
        shared.wait_queue.wake_up();
        // The lane above may submit in its `poll`, after it has polled this lane.
        self.wait_handle.wait(seen, cx);
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let seen = self.wait_handle.epoch();
        while let Some((key, status, data)) = self.replies.queue.pop() {
            let mut bio = self.waiting.remove(key);
            bio.data = data;
            bio.end_with(status);
            done.push(bio);
        }
        if self.drain_requester.has_asked() {
            self.poll_drained(cx);
        }
        if !self.waiting.is_empty() {
            self.wait_handle.wait(seen, cx);
        }
    }

    fn drain(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        let from = back.len();
        if how != DrainMode::Flush {
            self.take_handed_back(back);
        }
        self.drain_requester.drained(how, back.len() > from, self.waiting.is_empty(), cx);
    }
}

/// The task that owns the device's lane.
struct OwnerTask {
    device: Arc<dyn Device>,
    shared: Arc<OwnerTaskSharedState>,
    lane: Option<BioTaskLaneId>,
    wait_handle: Option<WaitQueueSubscription>,
    in_flight: Slab<(Arc<ReplyQueue>, usize)>,
    /// Completed bios, for reuse.
    free_bios: Batch,
    stopping: bool,
}

impl OwnerTask {
    fn new(device: Arc<dyn Device>, shared: Arc<OwnerTaskSharedState>) -> OwnerTask {
        let (in_flight, free_bios) = (Slab::new(), Batch::new());
        OwnerTask { device, shared, lane: None, wait_handle: None, in_flight, free_bios, stopping: false }
    }

    fn take_requests(&mut self, cx: &mut dyn BioTaskCx) {
        if self.shared.forwarded.is_empty() {
            return;
        }
        if self.lane.is_none() {
            self.lane = cx.open(&self.device).ok();
        }
        let Some(lane) = self.lane else { return self.shared.refuse() };
        while let Some(ForwardedRequest { op, flags, sector, sectors, data, from, key }) =
            self.shared.forwarded.pop()
        {
            let mut bio = self.free_bios.pop().unwrap_or_default();
            (bio.op, bio.flags, bio.sector, bio.sectors, bio.data) = (op, flags, sector, sectors, data);
            let of_lane = from.lane;
            bio.cookie = drain::make_owner_bio_cookie(of_lane, self.in_flight.insert((from, key)));
            cx.submit(lane, bio);
        }
    }
}

impl BioTask for OwnerTask {
    fn turn(&mut self, cx: &mut dyn BioTaskCx) {
        let wait_handle = self.wait_handle.take().unwrap_or_else(|| cx.subscribe(&self.shared.wait_queue));
        loop {
            let seen = wait_handle.epoch();
            self.take_requests(cx);
            if self.stopping || wait_handle.register_wait(seen) {
                break;
            }
        }
        self.wait_handle = Some(wait_handle);
    }

    fn complete(&mut self, done: &mut Batch, cx: &mut dyn BioTaskCx) {
        let mut last: Option<Arc<ReplyQueue>> = None;
        for mut bio in done.drain(..) {
            let (at, handed_back) = drain::parse_owner_bio_cookie(bio.cookie);
            let ((to, key), data) = (self.in_flight.remove(at), std::mem::take(&mut bio.data));
            match handed_back {
                false => to.queue.push((key, bio.status, data)),
                true => to.handed_back.push((key, data)),
            }
            self.free_bios.push(bio);
            // One wake for consecutive replies to the same lane.
            if let Some(before) = last.replace(Arc::clone(&to)).filter(|before| !Arc::ptr_eq(before, &to)) {
                before.wait_queue.wake_up();
            }
        }
        if let Some(last) = last {
            last.wait_queue.wake_up();
        }
        match self.stopping {
            true => self.stop(cx),
            false => self.turn(cx),
        }
    }

    fn stop(&mut self, cx: &mut dyn BioTaskCx) {
        self.stopping = true;
        self.wait_handle = None;
        self.shared.over.store(true, SeqCst);
        self.shared.refuse();
        if self.in_flight.is_empty()
            && let Some(lane) = self.lane.take()
        {
            cx.close(lane);
        }
    }

    fn is_over(&self) -> bool {
        self.stopping && self.in_flight.is_empty()
    }

    /// The end of a core waits for what a stopped task has in flight: lanes of other cores wait for
    /// the replies.
    fn own_work(&self) -> OwnWork {
        let is_needed = self.stopping && !self.in_flight.is_empty();
        if is_needed { OwnWork::Required } else { OwnWork::Background }
    }
}
