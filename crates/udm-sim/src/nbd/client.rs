//! A simulated client: it performs the handshake, sends requests and reads replies in parts, at its
//! own rate, and checks each reply.

use super::handshake::{ClientHandshake, HandshakeStepResult};
use super::model::{NbdServerModel, ServerErrorReasons, UnansweredRequest};
use super::net::SimNetwork;
use super::reply_chunk::handle_reply_chunk;
use crate::model::Violation;
use crate::rng::SimRng;
use crate::trace::{TraceEventKind, pack_sector_range};
use std::collections::BTreeMap;
use udm_core::Nanos;
use udm_wire::nbd::{
    BlockStatusPayload, CommandFlags, ExportFlags, ExtendedChunkHeader, NbdCommand, NbdHeaderStyle,
    NbdRequestHeader, ReplyChunk, ReplyHeader, SimpleReply,
};

/// Maximum number of bytes of a client in the network before the server receives them.
const UP_MAX: usize = 256 << 10;

/// How a client ends its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DisconnectMode {
    /// The client sends a disconnect request and waits for its replies.
    Disconnect,
    /// The client sends nothing more and waits for its replies.
    HalfClose,
    /// The client closes the connection at once.
    Cut,
    /// The client sent invalid data.
    Nonsense,
}

/// Behaviour of a client.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClientBehavior {
    /// Maximum number of requests in flight.
    pub(super) depth: usize,
    /// Time between two turns, in ns.
    pub(super) pause: u64,
    /// Maximum number of bytes per send.
    pub(super) piece: u64,
    /// Maximum number of bytes per receive.
    pub(super) sip: u64,
    /// The client stalls in one of this many turns; 0 for never.
    pub(super) stalls: u64,
    /// Longest request in bytes.
    pub(super) longest: u64,
    /// Percentage of reads among reads and writes.
    pub(super) reads: u64,
}

/// Result of the handshake with the server.
pub(super) struct NegotiatedExport {
    pub(super) device: usize,
    pub(super) flags: ExportFlags,
    pub(super) style: NbdHeaderStyle,
    /// Context id of `base:allocation`, if it was chosen.
    pub(super) context: Option<u32>,
}

pub(super) enum ClientState {
    ClientHandshake(Box<ClientHandshake>),
    Served(NegotiatedExport),
    /// The connection has ended.
    Over,
}

/// A simulated client of the NBD server.
pub(super) struct SimNbdClient {
    pub(super) link: usize,
    pub(super) state: ClientState,
    pub(super) manner: ClientBehavior,
    /// Bytes to send, and bytes received.
    pub(super) out: Vec<u8>,
    pub(super) input: Vec<u8>,
    pub(super) asked: BTreeMap<u64, UnansweredRequest>,
    cookies: u64,
    pub(super) farewell: Option<DisconnectMode>,
    /// Time of the next turn.
    pub(super) next: Nanos,
    /// True if the client kept the server waiting, which may then close the connection.
    pub(super) stalled: bool,
    /// Offset of the next read, while all data is read back.
    pub(super) check: Option<u64>,
}

/// The parts of the world that a client uses.
pub(super) struct ClientContext<'a> {
    pub(super) net: &'a mut SimNetwork,
    pub(super) model: &'a mut NbdServerModel,
    pub(super) chance: &'a mut SimRng,
    pub(super) step: u64,
    pub(super) now: Nanos,
    pub(super) excuses: ServerErrorReasons,
    /// Events for the trace.
    pub(super) events: Vec<(TraceEventKind, [u64; 4])>,
    /// Device and read-only flag of each export.
    pub(super) exports: &'a [(usize, bool)],
}

impl SimNbdClient {
    pub(super) fn new(
        link: usize,
        manner: ClientBehavior,
        shaking: ClientHandshake,
        now: Nanos,
    ) -> SimNbdClient {
        SimNbdClient {
            link,
            state: ClientState::ClientHandshake(Box::new(shaking)),
            manner,
            out: Vec::new(),
            input: Vec::new(),
            asked: BTreeMap::new(),
            cookies: 0,
            farewell: None,
            next: now,
            stalled: false,
            check: None,
        }
    }

    /// True if the client has no request in flight and nothing to send.
    pub(super) fn is_through(&self) -> bool {
        self.asked.is_empty() && self.out.is_empty() && self.check.is_none()
    }

    pub(super) fn is_over(&self) -> bool {
        matches!(self.state, ClientState::Over)
    }

    /// True if the client stops in the middle of its handshake.
    pub(super) fn is_silent(&self) -> bool {
        matches!(&self.state, ClientState::ClientHandshake(shaking) if shaking.falls_silent)
    }

    pub(super) fn is_served(&self) -> bool {
        matches!(self.state, ClientState::Served(_))
    }

    /// True if the client can act without a new request.
    pub(super) fn has_to_do(&self, net: &SimNetwork) -> bool {
        let link = &net.links[self.link];
        let closed = link.is_gone() || self.farewell == Some(DisconnectMode::Cut);
        let writes = !self.out.is_empty() && link.up.len() < UP_MAX;
        !self.is_over() && (writes || !link.down.is_empty() || closed)
    }

    /// Sends a part of the queued bytes.
    pub(super) fn write(&mut self, around: &mut ClientContext<'_>) {
        let room = UP_MAX.saturating_sub(around.net.links[self.link].up.len());
        let most = self.out.len().min(room) as u64;
        if most == 0 {
            return;
        }
        let n = if around.net.is_cutting() {
            around.chance.between(1, most.min(self.manner.piece))
        } else {
            most
        };
        let link = &mut around.net.links[self.link];
        link.up.extend(self.out.drain(..n as usize));
    }

    /// Receives a part of the available bytes, and handles complete messages.
    pub(super) fn read(&mut self, around: &mut ClientContext<'_>) -> Result<(), Violation> {
        let there = around.net.links[self.link].down.len() as u64;
        if there > 0 {
            let n = if around.net.is_cutting() {
                around.chance.between(1, there.min(self.manner.sip))
            } else {
                there
            };
            self.input.extend(around.net.links[self.link].down.drain(..n as usize));
        }
        loop {
            let before = self.input.len();
            match &mut self.state {
                ClientState::ClientHandshake(shaking) => {
                    let shaken = shaking.step(&mut self.input, &mut self.out, around)?;
                    match shaken {
                        HandshakeStepResult::Waits => {}
                        HandshakeStepResult::Begins(agreed) => self.state = ClientState::Served(agreed),
                        HandshakeStepResult::Over => {
                            self.state = ClientState::Over;
                            around.net.leave(self.link, false, false);
                        }
                    }
                }
                ClientState::Served(_) => self.reply(around)?,
                ClientState::Over => return Ok(()),
            }
            if self.input.len() == before {
                break;
            }
        }
        let link = &around.net.links[self.link];
        if link.is_gone() && link.down.is_empty() && !self.is_over() {
            return self.closed(around);
        }
        Ok(())
    }

    /// Handles a connection that the server closed.
    ///
    /// # Errors
    /// If the server had no reason.
    fn closed(&mut self, around: &mut ClientContext<'_>) -> Result<(), Violation> {
        let who = self.link;
        let faulty = around.net.links[who].faulty || self.stalled || around.excuses.ending;
        let polite = matches!(self.farewell, Some(DisconnectMode::Disconnect | DisconnectMode::HalfClose));
        let nonsense = self.farewell == Some(DisconnectMode::Nonsense);
        let agreed = nonsense || (polite && self.out.is_empty());
        if !faulty && !agreed {
            return Err(format!("the server closed connection {who}, and nothing was wrong with it"));
        }
        if !faulty && polite && (!self.asked.is_empty() || !self.input.is_empty()) {
            let (n, rest) = (self.asked.len(), self.input.len());
            return Err(format!(
                "the server closed connection {who} with {n} requests unanswered and {rest} bytes of an answer"
            ));
        }
        self.end(around, false, false);
        Ok(())
    }

    /// Ends the connection, and forgets its requests.
    pub(super) fn end(&mut self, around: &mut ClientContext<'_>, quietly: bool, broken: bool) {
        for (_, asked) in std::mem::take(&mut self.asked) {
            around.model.lose(&asked);
        }
        self.out.clear();
        self.input.clear();
        self.check = None;
        self.state = ClientState::Over;
        around.net.leave(self.link, quietly, broken);
    }

    /// Handles one reply, if it has arrived completely.
    fn reply(&mut self, around: &mut ClientContext<'_>) -> Result<(), Violation> {
        let ClientState::Served(NegotiatedExport { style, context, .. }) = &self.state else {
            return Ok(());
        };
        let (style, context, who) = (*style, *context, self.link);
        if style.is_extended() {
            return self.extended_reply(context, around);
        }
        let structured = style.has_chunks();
        let mut input = &self.input[..];
        let header = ReplyHeader::decode(&mut input).map_err(|e| format!("connection {who}: {e}"))?;
        let Some(header) = header else { return Ok(()) };
        let cookie = match header {
            ReplyHeader::Simple(simple) => simple.cookie,
            ReplyHeader::Chunk(chunk) => chunk.cookie,
        };
        let Some(asked) = self.asked.get_mut(&cookie) else {
            return Err(format!("connection {who}: a reply to {cookie}, which is not in flight"));
        };
        let command = asked.request.command;
        let ended = match header {
            ReplyHeader::Simple(SimpleReply { error, .. }) => {
                if structured && (command == NbdCommand::Read || command == NbdCommand::BlockStatus) {
                    return Err(format!("connection {who}: a simple reply to a {command:?}"));
                }
                let len =
                    if command == NbdCommand::Read && error == 0 { asked.request.len as usize } else { 0 };
                let Some(data) = input.get(..len) else { return Ok(()) };
                asked.data.resize(len.max(asked.data.len()), 0);
                asked.data[..len].copy_from_slice(data);
                asked.have = len;
                input = &input[len..];
                Some(error)
            }
            ReplyHeader::Chunk(chunk) => {
                let Some(payload) = input.get(..chunk.len as usize) else { return Ok(()) };
                if !structured {
                    return Err(format!(
                        "connection {who}: a chunk, and structured replies were not agreed on"
                    ));
                }
                let decoded = ReplyChunk::decode(chunk, payload).map_err(|e| e.to_string());
                let error = decoded.and_then(|decoded| handle_reply_chunk(asked, &decoded, context));
                let error = error.map_err(|e| format!("connection {who}: {e}"))?;
                let ended = chunk.is_done().then_some(error);
                input = &input[payload.len()..];
                ended
            }
        };
        let taken = self.input.len() - input.len();
        self.replied(taken, cookie, ended, around)
    }

    /// Handles one chunk of an extended reply, if it has arrived completely.
    fn extended_reply(
        &mut self,
        context: Option<u32>,
        around: &mut ClientContext<'_>,
    ) -> Result<(), Violation> {
        let who = self.link;
        let Some((header, input)) = self.input.split_first_chunk() else { return Ok(()) };
        let header = ExtendedChunkHeader::decode(header).map_err(|e| format!("connection {who}: {e}"))?;
        let Some(payload) = input.get(..header.len as usize) else { return Ok(()) };
        let Some(asked) = self.asked.get_mut(&header.cookie) else {
            return Err(format!("connection {who}: a reply to {}, which is not in flight", header.cookie));
        };
        if header.offset != asked.request.offset {
            return Err(format!("connection {who}: a reply with the offset of another request"));
        }
        let decoded = ReplyChunk::decode_extended(header, payload).map_err(|e| e.to_string());
        let error = decoded.and_then(|decoded| handle_reply_chunk(asked, &decoded, context));
        let error = error.map_err(|e| format!("connection {who}: {e}"))?;
        around.model.extended += 1;
        let taken = ExtendedChunkHeader::SIZE + payload.len();
        self.replied(taken, header.cookie, header.is_done().then_some(error), around)
    }

    /// Takes `taken` received bytes. If the reply to `cookie` has `ended` with them, checks it.
    fn replied(
        &mut self,
        taken: usize,
        cookie: u64,
        ended: Option<u32>,
        around: &mut ClientContext<'_>,
    ) -> Result<(), Violation> {
        self.input.drain(..taken);
        if let Some(error) = ended
            && let Some(asked) = self.asked.remove(&cookie)
        {
            around.events.push((TraceEventKind::Answered, [asked.id, self.link as u64, error.into(), 0]));
            around
                .model
                .end(&asked, error, around.step, around.excuses)
                .map_err(|e| format!("connection {}: {e}", self.link))?;
        }
        Ok(())
    }

    /// Sends `request` with a new cookie. If it is a `BLOCK_STATUS` with a payload, its length is
    /// that of its range.
    pub(super) fn ask(&mut self, mut request: NbdRequestHeader, around: &mut ClientContext<'_>) {
        let ClientState::Served(agreed) = &self.state else { return };
        self.cookies += 1 + around.chance.below(3);
        request.cookie = self.cookies;
        let (step, now, faults) = (around.step, around.now, around.excuses.faults);
        let (style, mut wire, mut query) = (agreed.style, request, None);
        let mut contexts = agreed.context.is_some();
        let has_payload = request.flags.contains(CommandFlags::PAYLOAD_LEN);
        if style.is_extended() && request.command == NbdCommand::BlockStatus && has_payload {
            let id = agreed.context.unwrap_or(1);
            let ids = match around.chance.below(8) {
                0 => vec![id + 1],
                1 => vec![id, id],
                2 => vec![],
                _ => vec![id],
            };
            contexts &= ids == [id];
            let payload = BlockStatusPayload { len: request.len, contexts: ids }.encode();
            wire.len = payload.len() as u64;
            request.flags -= CommandFlags::PAYLOAD_LEN;
            query = Some(payload);
        }
        let (device, flags) = (agreed.device, agreed.flags);
        let asked = around.model.begin(device, request, flags, style, contexts, step, now, faults);
        self.put_header(&wire);
        match query {
            Some(payload) => self.out.extend_from_slice(&payload),
            None if wire.payload_len(style) > 0 => {
                self.out.extend_from_slice(&around.model.payload(&asked));
            }
            None => {}
        }
        let op = u64::from(request.command.number()) << 16 | u64::from(request.flags.bits());
        let args = [asked.id, self.link as u64, op, pack_sector_range(request.offset, request.len)];
        around.events.push((TraceEventKind::Asks, args));
        self.asked.insert(request.cookie, asked);
    }

    /// Sends the header of a request.
    pub(super) fn put_header(&mut self, request: &NbdRequestHeader) {
        match &self.state {
            ClientState::Served(agreed) if agreed.style.is_extended() => {
                self.out.extend_from_slice(&request.encode_extended());
            }
            _ => self.out.extend_from_slice(&request.encode()),
        }
    }

    /// Draws a request.
    pub(super) fn draw(
        &mut self,
        around: &mut ClientContext<'_>,
        trims: bool,
        flushes: bool,
        wild: bool,
    ) -> NbdRequestHeader {
        let ClientState::Served(agreed) = &self.state else {
            unreachable!("only a served client sends requests")
        };
        let (unit, disk) = (around.model.unit, &around.model.disks[agreed.device]);
        let c = &mut *around.chance;
        let read = c.below(100) < self.manner.reads;
        let command = match c.below(100) {
            0..6 if flushes => NbdCommand::Flush,
            6..9 if trims && disk.discards => NbdCommand::Trim,
            9..14 if trims => NbdCommand::WriteZeroes,
            14..16 => NbdCommand::Cache,
            16..20 if agreed.context.is_some() => NbdCommand::BlockStatus,
            20 if wild => c.pick(&[NbdCommand::Other(9), NbdCommand::BlockStatus, NbdCommand::Trim]),
            _ if read => NbdCommand::Read,
            _ => NbdCommand::Write,
        };
        let writes = matches!(command, NbdCommand::Write | NbdCommand::WriteZeroes | NbdCommand::Trim);
        let command = if writes && agreed.flags.contains(ExportFlags::READ_ONLY) && !wild {
            NbdCommand::Read
        } else {
            command
        };
        let most = match c.below(16) {
            0 => self.manner.longest,
            1..5 => self.manner.longest / 16,
            _ => 4 * unit,
        };
        let units = disk.size / unit;
        let len = c.between(1, (most / unit).clamp(1, units));
        let room = units - len;
        let at = if c.one_in(3) { c.below(room + 1) } else { c.below(room.min(64) + 1) };
        let mut request = NbdRequestHeader {
            flags: CommandFlags::empty(),
            command,
            cookie: 0,
            offset: at * unit,
            len: len * unit,
        };
        let extended = agreed.style.is_extended();
        if command == NbdCommand::Flush {
            (request.offset, request.len) = (0, 0);
        }
        let flag = match command {
            NbdCommand::Write | NbdCommand::WriteZeroes | NbdCommand::Trim if flushes && c.one_in(8) => {
                CommandFlags::FUA
            }
            NbdCommand::WriteZeroes if c.one_in(3) => CommandFlags::NO_HOLE,
            NbdCommand::WriteZeroes if c.one_in(3) => CommandFlags::FAST_ZERO,
            NbdCommand::Read if agreed.style.has_chunks() && c.one_in(4) => CommandFlags::DF,
            NbdCommand::BlockStatus if c.one_in(4) => CommandFlags::REQ_ONE,
            _ => CommandFlags::empty(),
        };
        request.flags |= flag;
        if extended && (command == NbdCommand::Write || command == NbdCommand::BlockStatus && c.one_in(2)) {
            request.flags |= CommandFlags::PAYLOAD_LEN;
        }
        if wild && c.one_in(20) {
            match c.below(if extended { 5 } else { 4 }) {
                0 => request.offset = disk.size - unit * c.below(2),
                1 => request.offset = u64::MAX - c.below(1000),
                2 => request.flags ^= CommandFlags::PAYLOAD_LEN,
                4 if !request.flags.contains(CommandFlags::PAYLOAD_LEN) => {
                    request.len = c.pick(&[1 << 32, 1 << 40, u64::MAX]);
                }
                _ if command != NbdCommand::Write => request.len = 0,
                _ => {}
            }
        }
        request
    }
}
