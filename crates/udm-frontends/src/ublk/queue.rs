//! One queue of a ublk device: a front end on one core.
//!
//! Each tag has one command in the kernel, which completes with a request, or one request here. The
//! answer to a request fetches the next one. A queue *runs* until the kernel ends the commands,
//! because the device is stopped, or until it is *detached*: then it completes what is in flight,
//! keeps what it still fetches unanswered, and closes; the kernel gives that to the next server.

use super::geometry::UblkGeometry;
use super::tag::UblkTag;
use crate::nbd::ExportRef;
use crate::nbd::io_counters::CoreDeviceIoCounters;
use crossbeam_utils::CachePadded;
use std::any::Any;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use udm_core::{Batch, BioTaskLaneId, Buf, DeviceId, Segments};
use udm_runtime::{FrontCx, FrontEnd, RingCompletion, RingOp, UblkDeviceQueue};
use udm_wire::ublk::{RESULT_ABORT, UblkIoCommand};

/// What a queue is started with.
pub(super) struct UblkQueueStart {
    /// Number of the queue.
    pub(super) index: u16,
    /// The topic of its messages.
    pub(super) topic: DeviceId,
    pub(super) export: ExportRef,
    pub(super) device: Arc<UblkDeviceQueue>,
    pub(super) geometry: UblkGeometry,
    /// Gets the life of the queue.
    pub(super) events: SyncSender<UblkQueueEvent>,
}

/// What a queue reports.
#[derive(Debug)]
pub(super) enum UblkQueueEvent {
    /// All tags are being fetched.
    Started,
    /// The queue cannot start: why.
    Failed(String),
    /// Nothing of the queue is in flight, and it is closed.
    Closed,
}

/// Number of events of a queue's life.
pub(super) const EVENTS_MAX: usize = 3;

/// A message to a queue.
#[derive(Clone)]
pub(super) enum UblkQueueMessage {
    /// The device has another size or other limits.
    Geometry(UblkGeometry),
    /// Complete what is in flight, answer nothing new, and close.
    Detach,
}

/// A queue of a ublk device.
pub(super) struct UblkQueue {
    index: u16,
    topic: DeviceId,
    export: ExportRef,
    pub(super) device: Arc<UblkDeviceQueue>,
    pub(super) geometry: UblkGeometry,
    events: SyncSender<UblkQueueEvent>,
    pub(super) lane: Option<BioTaskLaneId>,
    pub(super) io_counters: Arc<CachePadded<CoreDeviceIoCounters>>,
    pub(super) tags: Vec<UblkTag>,
    pub(super) bios: Batch,
    /// Requests in flight.
    pub(super) in_flight: usize,
    /// Commands in the kernel.
    fetching: usize,
    /// Requests that are left to the next server, with their buffers.
    pub(super) unanswered: Vec<Buf>,
    begun: bool,
    /// New requests fail, as of the last batch.
    pub(super) is_failing: bool,
    pub(super) is_detached: bool,
    is_broken: bool,
    is_closed: bool,
    ops: Vec<RingCompletion>,
}

impl UblkQueue {
    pub(super) fn new(
        start: UblkQueueStart,
        io_counters: Arc<CachePadded<CoreDeviceIoCounters>>,
    ) -> UblkQueue {
        let depth = start.device.depth();
        UblkQueue {
            index: start.index,
            topic: start.topic,
            export: start.export,
            device: start.device,
            geometry: start.geometry,
            events: start.events,
            lane: None,
            io_counters,
            tags: (0..depth).map(|_| UblkTag::default()).collect(),
            bios: Batch::new(),
            in_flight: 0,
            fetching: 0,
            unanswered: Vec::new(),
            begun: false,
            is_failing: false,
            is_detached: false,
            is_broken: false,
            is_closed: false,
            ops: Vec::new(),
        }
    }

    fn report(&self, event: UblkQueueEvent) {
        // There is room for all events of a life; the receiver may be gone.
        let _ = self.events.try_send(event);
    }

    fn begin(&mut self, cx: &mut FrontCx<'_, '_>) {
        self.begun = true;
        cx.subscribe(self.topic);
        match cx.open(self.export.device()) {
            Ok(lane) => self.lane = Some(lane),
            Err(error) => return self.report(UblkQueueEvent::Failed(error.to_string())),
        }
        for tag in 0..self.device.depth() {
            let buffer = Buf::zeroed(self.device.io_bytes_max());
            self.send(tag, None, buffer, cx);
        }
        self.report(UblkQueueEvent::Started);
    }

    /// Sends the result of the last request with `tag`, if there is one, and fetches the next.
    pub(super) fn send(&mut self, tag: u16, result: Option<i32>, buffer: Buf, cx: &mut FrontCx<'_, '_>) {
        let command = UblkIoCommand { queue: self.index, tag, result };
        self.fetching += 1;
        let op = RingOp::Ublk {
            queue: Arc::clone(&self.device),
            code: command.code(),
            command: command.encode(),
            data: buffer.into(),
        };
        cx.push(tag.into(), op);
    }

    fn on_ring_completion(&mut self, done: RingCompletion, cx: &mut FrontCx<'_, '_>) {
        self.fetching -= 1;
        let Some(buffer) = take_buffer(done.data) else { return };
        match done.result {
            Ok(_) if self.is_detached => self.unanswered.push(buffer),
            Ok(_) => self.start_request(done.tag as u16, buffer, cx),
            Err(RESULT_ABORT) => {}
            Err(_) if self.is_detached => {}
            Err(errno) => {
                if !std::mem::replace(&mut self.is_broken, true) {
                    let (name, error) = (self.export.name(), std::io::Error::from_raw_os_error(errno));
                    tracing::warn!(
                        "ublk {name}: queue {}: the kernel refuses a command: {error}",
                        self.index
                    );
                }
            }
        }
    }

    /// Closes the queue if nothing is left to do. Commands in the kernel are left there after a
    /// detach: the ring holds their buffers.
    fn close_if_done(&mut self, cx: &mut FrontCx<'_, '_>) {
        let is_done = self.in_flight == 0 && (self.is_detached || self.fetching == 0);
        if !is_done || self.is_closed {
            return;
        }
        self.is_closed = true;
        if let Some(lane) = self.lane.take() {
            cx.close(lane);
        }
        self.report(UblkQueueEvent::Closed);
    }
}

/// The buffer of a command.
fn take_buffer(mut data: Segments) -> Option<Buf> {
    data.pop()
}

impl FrontEnd for UblkQueue {
    fn gather(&mut self, cx: &mut FrontCx<'_, '_>) {
        if !self.begun {
            self.begin(cx);
        }
        self.is_failing = self.export.is_failing();
        let mut ops = std::mem::take(&mut self.ops);
        cx.take(&mut ops);
        for done in ops.drain(..) {
            self.on_ring_completion(done, cx);
        }
        self.ops = ops;
        self.close_if_done(cx);
    }

    fn complete(&mut self, done: &mut Batch, cx: &mut FrontCx<'_, '_>) {
        for bio in done.drain(..) {
            self.finish_bio(bio, cx);
        }
        self.close_if_done(cx);
    }

    fn message(&mut self, message: &(dyn Any + Send), cx: &mut FrontCx<'_, '_>) {
        match message.downcast_ref::<UblkQueueMessage>() {
            Some(UblkQueueMessage::Geometry(geometry)) => self.geometry = *geometry,
            Some(UblkQueueMessage::Detach) => self.stop(cx),
            None => {}
        }
    }

    fn stop(&mut self, cx: &mut FrontCx<'_, '_>) {
        self.is_detached = true;
        self.close_if_done(cx);
    }

    fn is_closed(&self) -> bool {
        self.is_closed
    }
}
