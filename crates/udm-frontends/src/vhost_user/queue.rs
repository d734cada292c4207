//! One ring of a virtual machine: a front end on one core.
//!
//! The life of a queue: it *runs* from its start, *drains* after a stop (nothing more is taken,
//! requests in flight are completed), then is closed. A ring that breaks the rules is not used any
//! more until the machine resets it.
//!
//! While the core is awake it looks at the ring in each turn, and the guest need not notify. Before
//! the core sleeps it asks for a notification ([`FrontEnd::has_input`]). Completions of a turn are
//! published together, with at most one notification.

use super::chain::DescriptorChain;
use super::geometry::DiskGeometry;
use super::memory::GuestMemory;
use super::slot::VirtQueueSlot;
use super::virt_ring::VirtRing;
use crate::nbd::ExportRef;
use crate::nbd::io_counters::CoreDeviceIoCounters;
use crossbeam_utils::CachePadded;
use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use udm_buf::{Buf, SharedRange};
use udm_core::{AckOnLastDrop, Batch, Bio, BioTaskLaneId, DeviceId, Nanos, Segments, Status};
use udm_runtime::{FrontCx, FrontEnd, RingCompletion, RingOp};
use udm_wire::virtio::blk::BLK_ID_SIZE;

const KICK: u64 = 0;
const CALL: u64 = 1;

/// Requests that a queue takes per turn, so that the core also serves its other clients.
const REQUESTS_A_TURN: usize = 256;

/// The longest wait of a stopped queue for its notification: a front end may have passed a
/// descriptor that is full.
const CALL_WAIT: Nanos = Nanos::from_millis(100);

/// What a queue is started with.
pub(super) struct VirtQueueStart<R> {
    /// Number of the queue, for the log.
    pub(super) index: u32,
    /// The topic of its messages.
    pub(super) topic: DeviceId,
    pub(super) export: ExportRef,
    pub(super) memory: Arc<GuestMemory>,
    pub(super) ring: R,
    /// The ID that the guest reads.
    pub(super) disk_id: [u8; BLK_ID_SIZE],
    pub(super) kick: Option<Arc<OwnedFd>>,
    pub(super) call: Option<Arc<OwnedFd>>,
    pub(super) settings: VirtQueueSettings,
}

/// Settings that may change while a queue runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct VirtQueueSettings {
    pub(super) geometry: DiskGeometry,
    /// A write completes only when it is durable.
    pub(super) writes_through: bool,
    /// The guest may use the ring.
    pub(super) is_enabled: bool,
}

/// A message to a queue.
pub(super) enum VirtQueueMessage {
    /// Complete what is in flight, send the base of the ring, and close.
    Stop(SyncSender<u32>),
    /// Use this memory. The acknowledgement is dropped when no request uses the old one.
    Memory(Arc<GuestMemory>, AckOnLastDrop),
    /// Notify by this eventfd.
    Call(Option<Arc<OwnedFd>>),
    /// Use these settings. The acknowledgement is dropped afterwards.
    Settings { settings: VirtQueueSettings, _ack: AckOnLastDrop },
}

/// A queue of a virtual machine.
pub(super) struct VirtQueue<R> {
    index: u32,
    topic: DeviceId,
    pub(super) export: ExportRef,
    pub(super) memory: Arc<GuestMemory>,
    ring: R,
    pub(super) disk_id: [u8; BLK_ID_SIZE],
    kick: Option<Arc<OwnedFd>>,
    call: Option<Arc<OwnedFd>>,
    pub(super) settings: VirtQueueSettings,
    lane: Option<BioTaskLaneId>,
    pub(super) io_counters: Option<Arc<CachePadded<CoreDeviceIoCounters>>>,
    /// The requests of the ring.
    pub(super) slots: Vec<VirtQueueSlot>,
    pub(super) chain: DescriptorChain,
    /// Ranges for reuse, by region of the memory.
    pub(super) spare: Vec<Vec<SharedRange>>,
    pub(super) taken_back: Vec<SharedRange>,
    pub(super) bios: Batch,
    /// Requests in flight.
    in_flight: usize,
    /// Number of the memory, and the requests in flight that use an older one.
    pub(super) generation: u32,
    old_in_flight: usize,
    old_memory: Vec<AckOnLastDrop>,
    is_reading_kick: bool,
    is_calling: bool,
    /// When a stopped queue gives up the notification in flight.
    call_deadline: Option<Nanos>,
    /// A notification is due after the one in flight.
    calls_again: bool,
    /// The 8 bytes of a notification.
    call_bytes: Segments,
    begun: bool,
    /// New requests fail, as of the last batch.
    pub(super) is_failing: bool,
    is_broken: bool,
    stop: Option<SyncSender<u32>>,
    is_draining: bool,
    is_closed: bool,
    ops: Vec<RingCompletion>,
}

impl<R: VirtRing> VirtQueue<R> {
    pub(super) fn new(start: VirtQueueStart<R>) -> VirtQueue<R> {
        let slots = start.ring.slots();
        VirtQueue {
            index: start.index,
            topic: start.topic,
            export: start.export,
            spare: (0..start.memory.len()).map(|_| Vec::new()).collect(),
            memory: start.memory,
            ring: start.ring,
            disk_id: start.disk_id,
            kick: start.kick,
            call: start.call,
            settings: start.settings,
            lane: None,
            io_counters: None,
            slots: (0..slots).map(|_| VirtQueueSlot::default()).collect(),
            chain: DescriptorChain::default(),
            taken_back: Vec::new(),
            bios: Batch::new(),
            in_flight: 0,
            generation: 0,
            old_in_flight: 0,
            old_memory: Vec::new(),
            is_reading_kick: false,
            is_calling: false,
            call_deadline: None,
            calls_again: false,
            call_bytes: Segments::new(),
            begun: false,
            is_failing: false,
            is_broken: false,
            stop: None,
            is_draining: false,
            is_closed: false,
            ops: Vec::new(),
        }
    }

    fn begin(&mut self, cx: &mut FrontCx<'_, '_>) {
        self.begun = true;
        cx.subscribe(self.topic);
        self.io_counters = Some(self.export.io_counters_on(cx.core()));
        match cx.open(self.export.device()) {
            Ok(lane) => self.lane = Some(lane),
            Err(error) => self.give_up(&format!("its device cannot be opened: {error}")),
        }
        while let Some(slot) = self.ring.resubmit() {
            self.start(slot, cx);
        }
        // A guest may wait for a notification that the last back end did not send.
        self.notify(cx);
    }

    fn give_up(&mut self, why: &str) {
        if !std::mem::replace(&mut self.is_broken, true) {
            tracing::warn!("vhost-user {}: queue {} stops: {why}", self.export.name(), self.index);
        }
    }

    fn may_take(&self) -> bool {
        self.settings.is_enabled && !self.is_broken && !self.is_draining && self.lane.is_some()
    }

    /// Takes what is available, publishes what is completed, and goes on with a stop.
    fn run(&mut self, cx: &mut FrontCx<'_, '_>) {
        if self.may_take() {
            // Also after a completion that woke the core: the guest was told not to notify.
            cx.poll_input();
            self.take_available(cx);
        }
        self.publish(cx);
        if self.is_draining && self.in_flight == 0 {
            self.close(cx);
        }
    }

    fn take_available(&mut self, cx: &mut FrontCx<'_, '_>) {
        self.ring.suppress_notifications();
        self.is_failing = self.export.is_failing();
        let available = match self.ring.available() {
            Ok(count) => count,
            Err(broken) => return self.give_up(&broken.to_string()),
        };
        for _ in 0..available.min(REQUESTS_A_TURN) {
            match self.ring.take() {
                Ok(None) => return,
                Ok(Some(slot)) if !self.slots[usize::from(slot)].is_busy() => {
                    self.ring.begin(slot);
                    self.start(slot, cx);
                }
                Ok(Some(slot)) => {
                    return self.give_up(&format!("descriptor {slot} is in use and was added again"));
                }
                Err(broken) => return self.give_up(&broken.to_string()),
            }
        }
        if available > REQUESTS_A_TURN {
            cx.schedule(cx.me());
        }
    }

    /// Starts the request that the ring has just taken.
    fn start(&mut self, head: u16, cx: &mut FrontCx<'_, '_>) {
        self.in_flight += 1;
        self.slots[usize::from(head)].begin(self.generation, cx.now());
        if let Err(broken) = self.ring.read_chain(head, &self.memory, &mut self.chain) {
            tracing::debug!("vhost-user {}: queue {}: {broken}", self.export.name(), self.index);
            return self.complete_slot(head);
        }
        match self.lane {
            Some(lane) => self.start_request(head, lane, cx),
            None => self.complete_slot(head),
        }
    }

    /// Queues the used entry of a request that is completed.
    pub(super) fn complete_slot(&mut self, head: u16) {
        let slot = &mut self.slots[usize::from(head)];
        let written = slot.finish();
        if slot.generation != self.generation && self.old_in_flight > 0 {
            self.old_in_flight -= 1;
        }
        self.in_flight -= 1;
        self.ring.push_used(head, written);
    }

    fn publish(&mut self, cx: &mut FrontCx<'_, '_>) {
        let Some(is_wanted) = self.ring.publish() else { return };
        if self.old_in_flight == 0 {
            self.old_memory.clear();
        }
        if self.memory.is_lost() {
            self.give_up("the file of the guest's memory was cut");
        }
        if is_wanted {
            self.notify(cx);
        }
    }

    fn notify(&mut self, cx: &mut FrontCx<'_, '_>) {
        let Some(fd) = &self.call else { return };
        if self.is_calling {
            self.calls_again = true;
            return;
        }
        let mut data = std::mem::take(&mut self.call_bytes);
        if data.is_empty() {
            data = Buf::zeroed(8).into();
            data.copy_from(&1u64.to_ne_bytes());
        }
        self.is_calling = true;
        cx.push(CALL, RingOp::Write { fd: Arc::clone(fd), offset: 0, data, dsync: false });
    }

    fn read_kick(&mut self, data: Segments, cx: &mut FrontCx<'_, '_>) {
        let Some(fd) = self.kick.clone().filter(|_| !self.is_draining) else { return };
        let data = if data.is_empty() { Buf::zeroed(8).into() } else { data };
        self.is_reading_kick = true;
        cx.push(KICK, RingOp::Read { fd, offset: 0, data, cached: false });
    }

    fn on_ring_completion(&mut self, done: RingCompletion, cx: &mut FrontCx<'_, '_>) {
        if done.tag == CALL {
            self.is_calling = false;
            self.call_bytes = done.data;
            if std::mem::take(&mut self.calls_again) {
                self.notify(cx);
            }
            return;
        }
        self.is_reading_kick = false;
        match done.result {
            Ok(8) => self.read_kick(done.data, cx),
            _ if self.is_draining => {}
            other => self.give_up(&format!("its kick descriptor cannot be read: {other:?}")),
        }
    }

    /// Stops taking requests.
    fn drain(&mut self, cx: &mut FrontCx<'_, '_>) {
        self.is_draining = true;
        if self.is_reading_kick {
            cx.cancel(KICK);
        }
    }

    /// Closes the queue, once its read of the kick descriptor has ended: a later back end may use
    /// the descriptor.
    fn close(&mut self, cx: &mut FrontCx<'_, '_>) {
        if self.is_closed || self.is_reading_kick {
            return;
        }
        if self.is_calling {
            // A guest that misses it gets another one from the next back end.
            let at = *self.call_deadline.get_or_insert(cx.now() + CALL_WAIT);
            match cx.now() < at {
                true => cx.wake_at(at),
                false => cx.cancel(CALL),
            }
            return;
        }
        self.is_closed = true;
        if let Some(lane) = self.lane.take() {
            cx.close(lane);
        }
        if let Some(reply) = self.stop.take() {
            let _ = reply.try_send(self.ring.base());
        }
    }

    fn set_memory(&mut self, memory: &Arc<GuestMemory>, ack: &AckOnLastDrop) {
        self.memory = Arc::clone(memory);
        self.spare = (0..memory.len()).map(|_| Vec::new()).collect();
        self.generation = self.generation.wrapping_add(1);
        self.old_in_flight = self.in_flight;
        if self.in_flight > 0 {
            self.old_memory.push(ack.clone());
        }
    }
}

impl<R: VirtRing> FrontEnd for VirtQueue<R> {
    fn gather(&mut self, cx: &mut FrontCx<'_, '_>) {
        if !self.begun {
            self.begin(cx);
            self.read_kick(Segments::new(), cx);
        }
        let mut ops = std::mem::take(&mut self.ops);
        cx.take(&mut ops);
        for done in ops.drain(..) {
            self.on_ring_completion(done, cx);
        }
        self.ops = ops;
        self.run(cx);
    }

    fn complete(&mut self, done: &mut Batch, cx: &mut FrontCx<'_, '_>) {
        for bio in done.drain(..) {
            self.finish_bio(bio, cx);
        }
        self.run(cx);
    }

    fn message(&mut self, message: &(dyn Any + Send), cx: &mut FrontCx<'_, '_>) {
        let Some(message) = message.downcast_ref::<VirtQueueMessage>() else { return };
        match message {
            VirtQueueMessage::Stop(reply) => {
                self.stop = Some(reply.clone());
                self.drain(cx);
            }
            VirtQueueMessage::Memory(memory, ack) => self.set_memory(memory, ack),
            VirtQueueMessage::Call(call) => {
                self.call.clone_from(call);
                self.notify(cx);
            }
            VirtQueueMessage::Settings { settings, .. } => self.settings = *settings,
        }
        self.run(cx);
    }

    fn stop(&mut self, cx: &mut FrontCx<'_, '_>) {
        self.drain(cx);
        self.run(cx);
    }

    fn has_input(&mut self, sleeps: bool) -> bool {
        if !self.may_take() {
            return false;
        }
        if sleeps { self.ring.request_notification() } else { self.ring.has_available() }
    }

    fn is_closed(&self) -> bool {
        self.is_closed
    }
}

impl<R: VirtRing> VirtQueue<R> {
    /// Takes a bio for a request, with the fields of its last use.
    pub(super) fn bio(&mut self) -> Box<Bio> {
        self.bios.pop().unwrap_or_default()
    }

    fn finish_bio(&mut self, mut bio: Box<Bio>, cx: &mut FrontCx<'_, '_>) {
        let head = bio.cookie as u16;
        let data = std::mem::take(&mut bio.data);
        let status = bio.status;
        if self.bios.len() < self.slots.len() {
            self.bios.push(bio);
        }
        self.take_back(head, data);
        let slot = &mut self.slots[usize::from(head)];
        slot.left -= 1;
        if status != Status::Ok {
            slot.status = status;
        }
        if slot.left > 0 {
            return;
        }
        if slot.flushes_after && slot.status == Status::Ok {
            slot.flushes_after = false;
            if let Some(lane) = self.lane {
                return self.submit_flush(head, lane, cx);
            }
        }
        self.answer(head, cx.now());
    }
}
