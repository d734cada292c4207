//! The controller's end of a connection: bytes and PDUs in both directions. Each PDU of the host is
//! checked.

use super::counts::NvmeClientCounts;
use super::description::NamespaceDescription;
use super::pdus::PduSequence;
use super::sent_writes::SentWrites;
use super::target::{ConnBehavior, SimController, SimTarget, TargetAvailability};
use crate::model::Violation;
use crate::nbd::net::SimNetwork;
use crate::remote_disk::shared::FrontEndSharedState;
use crate::rng::SimRng;
use std::collections::{BTreeMap, VecDeque};
use udm_core::{Nanos, Op};
use udm_wire::nvme::host::HostOptions;
use udm_wire::nvme::{
    DataPdu, InitializeRequest, InitializeResponse, NvmeCommand, PduHeader, PduLimits, PduType, data_digest,
    verify_header_digest,
};

/// Maximum number of bytes in transit to udm and in queued PDUs.
const UP_MAX: usize = 256 << 10;

/// Stage of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnStage {
    /// Before ICReq.
    Initializing,
    /// Before Connect.
    Connecting,
    /// The admin queue of this controller.
    Admin(usize),
    /// An I/O queue of this controller.
    Io(usize),
    Over,
}

/// An I/O command at the disk of a target.
pub(super) struct DiskCommand {
    pub(super) link: usize,
    pub(super) controller: usize,
    pub(super) id: u16,
    pub(super) op: Op,
    /// Sectors.
    pub(super) range: (u64, u64),
    pub(super) is_durable: bool,
    /// Stamps of the written data.
    pub(super) stamps: Vec<u64>,
    pub(super) due: Nanos,
    /// Latest time of the execution. It is known if the target is stopped.
    pub(super) limit: Nanos,
}

/// A write whose data the controller asks for.
pub(super) struct PendingWrite {
    pub(super) command: NvmeCommand,
    pub(super) len: u32,
    pub(super) data: Vec<u8>,
    /// The last R2T, and the bytes of it that have come.
    pub(super) transfer: Option<(DataPdu, u32)>,
}

/// The controller's end of a connection.
pub(super) struct ControllerConn {
    pub(super) link: usize,
    pub(super) target: usize,
    pub(super) behavior: ConnBehavior,
    pub(super) stage: ConnStage,
    pub(super) limits: PduLimits,
    pub(super) h2c_max: u32,
    /// Number of the queue, and its entries.
    pub(super) queue: u16,
    pub(super) entries: u16,
    input: Vec<u8>,
    /// Identifiers of commands in flight.
    pub(super) in_flight: Vec<u16>,
    pub(super) writes: BTreeMap<u16, PendingWrite>,
    /// PDUs by command; those of one command are sent in order.
    pub(super) answers: Vec<PduSequence>,
    pub(super) out: VecDeque<u8>,
    /// The target closes the connection once the queued bytes are sent.
    pub(super) closing: bool,
    /// Earliest time of the next turn.
    pub(super) next: Nanos,
    /// The target has sent something for which a host must end the association.
    pub(super) has_violated: bool,
    /// Time at which the host has received it.
    pub(super) violation_received: Option<Nanos>,
}

/// The parts of the world that a connection uses.
pub(super) struct ConnContext<'a> {
    pub(super) net: &'a mut SimNetwork,
    pub(super) target: &'a mut SimTarget,
    pub(super) namespace: &'a NamespaceDescription,
    pub(super) controllers: &'a mut Vec<SimController>,
    pub(super) writes: &'a mut SentWrites,
    pub(super) shared: &'a mut FrontEndSharedState,
    pub(super) chance: &'a mut SimRng,
    pub(super) counts: &'a mut NvmeClientCounts,
    pub(super) options: &'a HostOptions,
    pub(super) now: Nanos,
    /// Nothing fails any more.
    pub(super) calm: bool,
}

impl ConnContext<'_> {
    /// Records an injected fault in the model.
    pub(super) fn trouble(&mut self) {
        self.shared.model.exports[self.target.namespace].trouble(self.now);
    }

    /// Ends a controller.
    pub(super) fn end_controller(&mut self, controller: usize, why: &str) {
        if !std::mem::replace(&mut self.controllers[controller].is_over, true) {
            self.trouble();
            self.shared.say(format!("controller {controller} ends: {why}"));
            self.target.end_commands(controller, self.now, self.chance);
        }
    }
}

impl ControllerConn {
    pub(super) fn new(link: usize, target: usize, behavior: ConnBehavior, now: Nanos) -> ControllerConn {
        let limits = PduLimits {
            header_digest: false,
            data_digest: false,
            // Of Connect.
            capsule_data_max: 8192,
            data_max: 0,
        };
        ControllerConn {
            link,
            target,
            behavior,
            stage: ConnStage::Initializing,
            limits,
            h2c_max: 0,
            queue: 0,
            entries: 0,
            input: Vec::new(),
            in_flight: Vec::new(),
            writes: BTreeMap::new(),
            answers: Vec::new(),
            out: VecDeque::new(),
            closing: false,
            next: now,
            has_violated: false,
            violation_received: None,
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.stage == ConnStage::Over
    }

    /// The controller of the connection.
    pub(super) fn controller(&self) -> Option<usize> {
        match self.stage {
            ConnStage::Admin(controller) | ConnStage::Io(controller) => Some(controller),
            _ => None,
        }
    }

    /// Time of the next turn.
    pub(super) fn reason(
        &self,
        net: &SimNetwork,
        target: &SimTarget,
        controllers: &[SimController],
    ) -> Nanos {
        let link = &net.links[self.link];
        let has_output = !self.out.is_empty() || !self.answers.is_empty();
        let sends = has_output && link.up.len() < UP_MAX && target.mode != TargetAvailability::OneWay;
        let notices = (link.shut || link.half_shut) && self.behavior.notices_close;
        let is_ended = self.controller().is_some_and(|controller| controllers[controller].is_over);
        match () {
            () if self.is_over() => Nanos::NEVER,
            () if link.broken || notices || is_ended || sends || !link.down.is_empty() => self.next,
            () if self.is_through() || self.is_unknown(net) => self.next,
            () => Nanos::NEVER,
        }
    }

    fn is_through(&self) -> bool {
        self.closing && self.out.is_empty() && self.answers.is_empty()
    }

    /// True if the host is gone and no controller would end the connection.
    fn is_unknown(&self, net: &SimNetwork) -> bool {
        let link = &net.links[self.link];
        (link.shut || link.half_shut) && self.controller().is_none()
    }

    /// True if all that the target has sent is with the host.
    pub(super) fn has_delivered(&self, net: &SimNetwork) -> bool {
        self.out.is_empty() && self.answers.is_empty() && net.links[self.link].up.is_empty()
    }

    /// Ends the connection; the host does not learn of it.
    fn vanish(&mut self) {
        self.stage = ConnStage::Over;
        self.answers.clear();
        self.out.clear();
    }

    /// Ends the connection. Nothing more is read from it.
    pub(super) fn end(&mut self, net: &mut SimNetwork, is_broken: bool) {
        self.stage = ConnStage::Over;
        self.answers.clear();
        self.out.clear();
        net.leave(self.link, true, is_broken);
    }

    /// Runs one turn.
    ///
    /// # Errors
    /// A PDU that a host must not send.
    pub(super) fn turn(&mut self, a: &mut ConnContext<'_>) -> Result<(), Violation> {
        self.next = a.now + Nanos(1 + a.chance.span(self.behavior.latency / 4));
        let link = &a.net.links[self.link];
        let (broken, shut) = (link.broken, link.shut || link.half_shut);
        if let Some(controller) = self.controller() {
            let is_closed = broken || (shut && self.behavior.notices_close);
            let is_admin = matches!(self.stage, ConnStage::Admin(_));
            if is_closed && (is_admin || (broken && a.chance.one_in(2))) {
                a.end_controller(controller, "a connection is closed");
            }
            if !is_closed && a.controllers[controller].vanished_at.is_some() {
                self.vanish();
                return Ok(());
            }
            if is_closed || a.controllers[controller].is_over {
                // The queue of a lane that was closed is free.
                a.controllers[controller].queues.retain(|queue| *queue != self.queue);
                let reset = a.chance.one_in(2);
                self.end(a.net, broken || reset);
                return Ok(());
            }
        } else if broken || shut {
            self.end(a.net, broken);
            return Ok(());
        }
        if shut {
            self.answers.clear();
            self.out.clear();
        }
        self.read(a);
        self.take_in(a)?;
        self.write(a);
        if self.is_through() {
            match self.controller() {
                Some(controller) => a.end_controller(controller, "the target closes a connection"),
                None => self.end(a.net, false),
            }
        }
        Ok(())
    }

    fn read(&mut self, a: &mut ConnContext<'_>) {
        let there = a.net.links[self.link].down.len() as u64;
        if there > 0 {
            let is_cutting = a.net.is_cutting();
            let n = if is_cutting { a.chance.between(1, there.min(self.behavior.piece)) } else { there };
            self.input.extend(a.net.links[self.link].down.drain(..n as usize));
        }
    }

    fn take_in(&mut self, a: &mut ConnContext<'_>) -> Result<(), Violation> {
        if self.behavior.silent || self.closing {
            self.input.clear();
            return Ok(());
        }
        if self.stage == ConnStage::Initializing {
            let Some(bytes) = self.input.first_chunk::<{ InitializeRequest::SIZE }>() else { return Ok(()) };
            let wrong = |e: &dyn std::fmt::Display| format!("connection {}: {e}", self.link);
            let request = InitializeRequest::decode(bytes).map_err(|e| wrong(&e))?;
            if (request.header_digest, request.data_digest)
                != (a.options.digests.header, a.options.digests.data)
                || request.max_r2t != 0
            {
                return Err(format!("connection {}: {request:?}", self.link));
            }
            self.input.drain(..InitializeRequest::SIZE);
            self.initialize(&request, a);
        }
        while !self.is_over() && !self.closing {
            // Nothing is executed after the end of the timer.
            if let Some(controller) = self.controller()
                && (a.controllers[controller].is_over || a.controllers[controller].look_at_timer(a.now))
            {
                if !a.controllers[controller].is_over {
                    a.counts.expired += 1;
                    a.end_controller(controller, "its keep-alive timer has expired");
                    a.controllers[controller].lose_close(a.target.mode, a.now);
                }
                return Ok(());
            }
            let Some((header, pdu)) = self.next_pdu()? else { break };
            match header.kind {
                PduType::NvmeCommand => {
                    let bytes = pdu[8..].first_chunk().ok_or("a short capsule")?;
                    let data = &pdu[header.header_len..header.header_len + header.data_len as usize];
                    self.command(&NvmeCommand::from_bytes(*bytes), data, a)?;
                }
                PduType::HostData => self.host_data(&header, &pdu, a)?,
                kind => return Err(format!("connection {}: a {kind:?}", self.link)),
            }
        }
        Ok(())
    }

    fn initialize(&mut self, request: &InitializeRequest, a: &mut ConnContext<'_>) {
        self.limits.header_digest = request.header_digest;
        self.limits.data_digest = request.data_digest;
        self.h2c_max = a.target.description.h2c_max;
        self.limits.data_max = self.h2c_max;
        let violations = self.is_drawn(self.behavior.violations * 4, a);
        let response = InitializeResponse {
            controller_alignment: 0,
            header_digest: request.header_digest,
            data_digest: request.data_digest != violations,
            max_h2c_data: self.h2c_max,
        };
        if violations {
            self.note_violation(a);
        }
        self.out.extend(response.encode());
        self.stage = ConnStage::Connecting;
    }

    /// The next PDU, if it has come whole. Its digests are right.
    fn next_pdu(&mut self) -> Result<Option<(PduHeader, Vec<u8>)>, Violation> {
        let Some(common) = self.input.first_chunk::<{ PduHeader::SIZE }>() else { return Ok(None) };
        let header = PduHeader::decode(common, &self.limits);
        let header = header.map_err(|e| format!("connection {}: {e}", self.link))?;
        let digest = if header.has_data_digest { 4 } else { 0 };
        let len = header.header_len + header.data_len as usize;
        if self.input.len() < len + digest {
            return Ok(None);
        }
        let pdu: Vec<u8> = self.input.drain(..len + digest).collect();
        let size = if header.kind == PduType::NvmeCommand { 72 } else { 24 };
        if self.limits.header_digest && !verify_header_digest(&pdu[..size + 4]) {
            return Err(format!("connection {}: a wrong header digest of the host", self.link));
        }
        if header.has_data_digest && pdu[len..] != data_digest([&pdu[header.header_len..len]]) {
            return Err(format!("connection {}: a wrong data digest of the host", self.link));
        }
        Ok(Some((header, pdu)))
    }

    /// Draws an event of which one in `n` happens; none while the world is calm.
    pub(super) fn is_drawn(&self, n: u64, a: &mut ConnContext<'_>) -> bool {
        !a.calm && a.chance.one_in(n)
    }

    /// Records that the target violates the protocol.
    pub(super) fn note_violation(&mut self, a: &mut ConnContext<'_>) {
        self.has_violated = true;
        a.counts.violations += 1;
        a.trouble();
        a.shared.say(format!("connection {}: a violation of the protocol", self.link));
    }

    fn write(&mut self, a: &mut ConnContext<'_>) {
        if a.target.mode == TargetAvailability::OneWay {
            return;
        }
        while self.out.len() < UP_MAX && !self.answers.is_empty() {
            let i = a.chance.below(self.answers.len() as u64) as usize;
            self.out.extend(self.answers[i].pop_front().unwrap_or_default());
            if self.answers[i].is_empty() {
                self.answers.swap_remove(i);
            }
        }
        let room = UP_MAX.saturating_sub(a.net.links[self.link].up.len());
        let most = self.out.len().min(room) as u64;
        if most > 0 {
            let is_cutting = a.net.is_cutting();
            let n = if is_cutting { a.chance.between(1, most.min(self.behavior.piece)) } else { most };
            a.net.links[self.link].up.extend(self.out.drain(..n as usize));
        }
    }
}
