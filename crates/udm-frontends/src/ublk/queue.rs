//! One queue of a ublk device: a front end on one core.
//!
//! Each tag has one command in the kernel, which completes with a request, or one request here. The
//! answer to a request fetches the next one. A queue *runs* until the kernel ends the commands,
//! because the device is stopped, or until it is *detached*: then it completes what is in flight,
//! keeps what it still fetches unanswered, and closes; the kernel gives that to the next server.
//! While another process prepares to take over, the queue is *paused*: it completes what is in
//! flight, closes its lane, and holds new requests until it is resumed or detached.

use super::geometry::UblkGeometry;
use super::io_flusher::set_io_flusher;
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
    /// Nothing of the queue is in flight, and it does not use its device.
    Paused,
    /// Nothing of the queue is in flight, and it is closed.
    Closed,
}

/// Number of events that nobody has received, at most.
pub(super) const EVENTS_MAX: usize = 4;

/// A message to a queue.
#[derive(Clone)]
pub(super) enum UblkQueueMessage {
    /// The device has another size or other limits.
    Geometry(UblkGeometry),
    /// Complete what is in flight, hold new requests, and do not use the device.
    Pause,
    /// Go on, with the export as it is now.
    Resume(ExportRef, UblkGeometry),
    /// Complete what is in flight, answer nothing new, and close.
    Detach,
}

/// A queue of a ublk device.
pub(super) struct UblkQueue {
    index: u16,
    topic: DeviceId,
    /// `None` while the queue is paused.
    export: Option<ExportRef>,
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
    /// Requests that were fetched while the queue is paused: their tags and buffers.
    held: Vec<(u16, Buf)>,
    is_paused: bool,
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
            export: Some(start.export),
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
            held: Vec::new(),
            is_paused: false,
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
        // The core may have started when there was no disk.
        set_io_flusher();
        cx.subscribe(self.topic);
        if let Err(why) = self.open(cx) {
            return self.report(UblkQueueEvent::Failed(why));
        }
        for tag in 0..self.device.depth() {
            let buffer = Buf::zeroed(self.device.io_bytes_max());
            self.send(tag, None, buffer, cx);
        }
        self.report(UblkQueueEvent::Started);
    }

    fn open(&mut self, cx: &mut FrontCx<'_, '_>) -> Result<(), String> {
        let Some(export) = &self.export else { return Ok(()) };
        self.lane = Some(cx.open(export.device()).map_err(|error| error.to_string())?);
        Ok(())
    }

    /// Goes on after a pause. Without a lane the held requests fail.
    fn resume(&mut self, export: &ExportRef, geometry: UblkGeometry, cx: &mut FrontCx<'_, '_>) {
        (self.is_paused, self.geometry) = (false, geometry);
        if self.export.is_none() {
            self.io_counters = export.io_counters_on(cx.core());
            self.export = Some(export.clone());
            if let Err(why) = self.open(cx) {
                tracing::warn!("ublk {}: queue {}: {why}", export.name(), self.index);
            }
        }
        for (tag, buffer) in std::mem::take(&mut self.held) {
            self.start_request(tag, buffer, cx);
        }
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
            Ok(_) if self.is_paused => self.held.push((done.tag as u16, buffer)),
            Ok(_) => self.start_request(done.tag as u16, buffer, cx),
            Err(RESULT_ABORT) => {}
            Err(_) if self.is_detached => {}
            Err(errno) => {
                if !std::mem::replace(&mut self.is_broken, true) {
                    let error = std::io::Error::from_raw_os_error(errno);
                    let name = self.export.as_ref().map(|export| export.name().to_string());
                    tracing::warn!(
                        "ublk {}: queue {}: the kernel refuses a command: {error}",
                        name.unwrap_or_default(),
                        self.index
                    );
                }
            }
        }
    }

    /// Closes the queue, or its lane during a pause, if nothing is left to do. Commands in the
    /// kernel are left there after a detach: the ring holds their buffers.
    fn close_if_done(&mut self, cx: &mut FrontCx<'_, '_>) {
        if self.is_paused && self.in_flight == 0 && self.export.take().is_some() {
            if let Some(lane) = self.lane.take() {
                cx.close(lane);
            }
            self.report(UblkQueueEvent::Paused);
        }
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
        self.is_failing = self.export.as_ref().is_some_and(|export| export.is_failing());
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
            Some(UblkQueueMessage::Pause) => {
                self.is_paused = true;
                self.close_if_done(cx);
            }
            Some(UblkQueueMessage::Resume(export, geometry)) => self.resume(export, *geometry, cx),
            Some(UblkQueueMessage::Detach) => self.stop(cx),
            None => {}
        }
    }

    fn stop(&mut self, cx: &mut FrontCx<'_, '_>) {
        self.is_detached = true;
        self.unanswered.extend(self.held.drain(..).map(|(_, buffer)| buffer));
        self.close_if_done(cx);
    }

    fn is_closed(&self) -> bool {
        self.is_closed
    }
}
