//! The server's end of a connection: the handshake, and requests executed in any order.

use super::counts::NbdClientCounts;
use super::reply::{self, ReplyPieces};
use super::servers::{ExportDescription, ServerBehavior};
use crate::model::Violation;
use crate::nbd::net::SimNetwork;
use crate::remote_disk::disk::ServerDisk;
use crate::remote_disk::shared::FrontEndSharedState;
use crate::rng::SimRng;
use crate::stamp;
use crate::trace::{NO_CORE, TraceEventKind, pack_sector_range};
use std::collections::VecDeque;
use udm_core::Nanos;
use udm_wire::nbd::{
    self, ClientFlags, ClientHandshakeMessage, ClientHandshakeMessageParser, CommandFlags, ExportFlags,
    ExportInfoItem, ExportNameReply, HandshakeFlags, NbdCommand, NbdHeaderStyle, NbdOption, NbdRequestHeader,
};

/// Maximum number of bytes in transit to udm and in queued replies.
const UP_MAX: usize = 256 << 10;
/// Maximum number of requests of a client in flight on one connection.
const REQUESTS_MAX: usize = 1024;

enum ConnStage {
    Shaking { parser: ClientHandshakeMessageParser, no_zeroes: bool },
    Serving,
    Over,
}

/// A received request that is not executed yet.
struct UnexecutedRequest {
    request: NbdRequestHeader,
    /// Stamps of the written data.
    stamps: Vec<u64>,
    /// Number of the request on its connection.
    nth: u64,
    due: Nanos,
}

/// The server's end of a connection.
pub(super) struct ServerConn {
    pub(super) link: usize,
    pub(super) server: usize,
    manner: ServerBehavior,
    /// Description of the export by this server; `other` is true if it is that of another export.
    says: ExportDescription,
    other: bool,
    stage: ConnStage,
    structured: bool,
    input: Vec<u8>,
    /// Header of a write whose data has not arrived, and whether the write was already refused.
    head: Option<(NbdRequestHeader, bool)>,
    jobs: Vec<UnexecutedRequest>,
    /// Replies by cookie; invalid replies have none.
    answers: Vec<(Option<u64>, ReplyPieces)>,
    out: VecDeque<u8>,
    /// True if the client sends nothing more.
    ended: bool,
    /// True if the server closes the connection once the queued bytes are sent.
    closing: bool,
    /// True if the server has announced its shutdown: it executes nothing and waits.
    leaves: bool,
    /// Earliest time of the next turn.
    pub(super) next: Nanos,
    /// Cookie of the last reply.
    before: Option<u64>,
    /// Number of received requests; `answered` counts replies.
    taken: u64,
    pub(super) answered: u64,
    /// True if the server has sent invalid data; `shook_badly`: in the handshake.
    pub(super) has_violated: bool,
    shook_badly: bool,
}

/// The parts of the world that a connection uses.
pub(super) struct ServerConnContext<'a> {
    pub(super) net: &'a mut SimNetwork,
    pub(super) disk: &'a mut ServerDisk,
    pub(super) shared: &'a mut FrontEndSharedState,
    pub(super) chance: &'a mut SimRng,
    pub(super) counts: &'a mut NbdClientCounts,
    /// Index of the export.
    pub(super) export: usize,
    pub(super) now: Nanos,
    /// True if nothing fails any more.
    pub(super) calm: bool,
    /// True if received requests are executed after the client has disconnected.
    pub(super) late: bool,
}

impl ServerConnContext<'_> {
    /// Records an injected fault in the model.
    fn trouble(&mut self) {
        self.shared.model.exports[self.export].trouble(self.now);
    }
}

impl ServerConn {
    pub(super) fn new(
        link: usize,
        server: usize,
        manner: ServerBehavior,
        (says, other): (ExportDescription, bool),
        now: Nanos,
    ) -> ServerConn {
        let stage = ConnStage::Shaking { parser: ClientHandshakeMessageParser::new(), no_zeroes: false };
        let greeting =
            nbd::encode_nbd_server_greeting(HandshakeFlags::FIXED_NEWSTYLE | HandshakeFlags::NO_ZEROES);
        ServerConn {
            link,
            server,
            says,
            other,
            stage,
            structured: false,
            input: Vec::new(),
            head: None,
            jobs: Vec::new(),
            answers: Vec::new(),
            out: if manner.silent { VecDeque::new() } else { greeting.into() },
            manner,
            ended: false,
            closing: false,
            leaves: false,
            next: now,
            before: None,
            taken: 0,
            answered: 0,
            has_violated: false,
            shook_badly: false,
        }
    }

    pub(super) fn is_over(&self) -> bool {
        matches!(self.stage, ConnStage::Over)
    }

    /// Ends the hangs of requests.
    pub(super) fn finish_hung(&mut self, now: Nanos) {
        self.jobs.iter_mut().for_each(|job| job.due = job.due.min(now));
        self.next = self.next.min(now);
    }

    /// Makes the next greeting invalid.
    pub(super) fn greets_badly(&mut self) {
        (self.has_violated, self.shook_badly) = (true, true);
        self.out.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
    }

    /// Time of the next turn.
    pub(super) fn reason(&self, net: &SimNetwork) -> Nanos {
        let link = &net.links[self.link];
        let sends = (!self.out.is_empty() || !self.answers.is_empty()) && link.up.len() < UP_MAX;
        let ends = (link.shut || link.half_shut) && !self.ended;
        match () {
            () if self.is_over() => Nanos::NEVER,
            () if link.broken || !link.down.is_empty() || sends || ends || self.is_through() => self.next,
            () => self.jobs.iter().map(|job| job.due).min().unwrap_or(Nanos::NEVER).max(self.next),
        }
    }

    fn is_through(&self) -> bool {
        let quiet = self.out.is_empty() && self.answers.is_empty();
        quiet && (self.closing || (self.ended && self.jobs.is_empty()))
    }

    /// Ends the connection, because the server was killed or the network broke it. Nothing that
    /// came over it is executed any more.
    pub(super) fn end(&mut self, net: &mut SimNetwork, broken: bool) {
        self.stage = ConnStage::Over;
        self.jobs.clear();
        self.answers.clear();
        self.out.clear();
        net.leave(self.link, true, broken);
    }

    /// Runs one turn.
    ///
    /// # Errors
    /// A request that a client must not send.
    pub(super) fn turn(&mut self, a: &mut ServerConnContext<'_>) -> Result<(), Violation> {
        let (broken, shut) = (a.net.links[self.link].broken, a.net.links[self.link].shut);
        if broken || (shut && !a.late) {
            self.end(a.net, broken);
            return Ok(());
        }
        if shut {
            self.answers.clear();
            self.out.clear();
        }
        self.read(a);
        self.take_in(a)?;
        self.work(a);
        self.write(a);
        if self.is_through() {
            self.end(a.net, false);
        }
        self.next = a.now + Nanos(1 + a.chance.span(self.manner.latency / 4));
        Ok(())
    }

    fn read(&mut self, a: &mut ServerConnContext<'_>) {
        let there = a.net.links[self.link].down.len() as u64;
        if there > 0 {
            let n =
                if a.net.is_cutting() { a.chance.between(1, there.min(self.manner.piece)) } else { there };
            let link = &mut a.net.links[self.link];
            self.input.extend(link.down.drain(..n as usize));
        } else if a.net.links[self.link].shut || a.net.links[self.link].half_shut {
            self.ended = true;
        }
    }

    fn take_in(&mut self, a: &mut ServerConnContext<'_>) -> Result<(), Violation> {
        if self.manner.silent || self.closing {
            self.input.clear();
            return Ok(());
        }
        while matches!(self.stage, ConnStage::Shaking { .. }) {
            let ConnStage::Shaking { parser, no_zeroes } = &mut self.stage else { break };
            let mut input = &self.input[..];
            let message = parser.next(&mut input).map_err(|e| format!("connection {}: {e}", self.link))?;
            match message {
                Some(ClientHandshakeMessage::Flags(flags)) => {
                    *no_zeroes = flags.contains(ClientFlags::NO_ZEROES);
                }
                Some(ClientHandshakeMessage::Option(option)) => {
                    let no_zeroes = *no_zeroes;
                    let left = input.len();
                    self.input.drain(..self.input.len() - left);
                    self.option(&option, no_zeroes, a);
                    continue;
                }
                None => {}
            }
            let left = input.len();
            self.input.drain(..self.input.len() - left);
            if message.is_none() {
                return Ok(());
            }
        }
        while !self.is_over() && !self.ended_asking() && self.request(a)? {}
        Ok(())
    }

    fn ended_asking(&self) -> bool {
        self.closing || (self.ended && self.input.is_empty())
    }

    fn option(&mut self, option: &NbdOption, no_zeroes: bool, a: &mut ServerConnContext<'_>) {
        let (says, number) = (&self.says, option.number());
        let ExportDescription { size, flags, .. } = *says;
        let mut out = Vec::new();
        let begins = match option {
            NbdOption::StructuredReply if says.structured => {
                self.structured = true;
                nbd::put_option_ack_reply(&mut out, number);
                false
            }
            NbdOption::Go(_) if !says.old => {
                nbd::put_export_info_reply(&mut out, number, &ExportInfoItem::Export { size, flags });
                if let Some(blocks) = says.blocks {
                    nbd::put_export_info_reply(&mut out, number, &ExportInfoItem::BlockSize(blocks));
                }
                nbd::put_option_ack_reply(&mut out, number);
                true
            }
            NbdOption::ExportName(_) => {
                nbd::put_export_name_reply(&mut out, ExportNameReply { size, flags }, no_zeroes);
                true
            }
            _ => {
                nbd::put_option_error_reply(&mut out, number, nbd::REP_ERR_UNSUP, "");
                false
            }
        };
        // A changed reply to `EXPORT_NAME` could not be detected.
        let shown = option.number() != nbd::OPT_EXPORT_NAME;
        if shown && !a.calm && a.chance.one_in(4 * self.manner.violations) {
            // Changes the option number of the reply.
            if let Some(byte) = out.get_mut(11) {
                *byte ^= 0x40;
            }
            self.shook_badly = true;
            self.violations(a);
        }
        self.out.extend(out);
        if begins {
            a.counts.handshakes += 1;
            self.stage = ConnStage::Serving;
        }
    }

    fn violations(&mut self, a: &mut ServerConnContext<'_>) {
        self.has_violated = true;
        a.counts.violations += 1;
        a.trouble();
        a.shared.say(format!("connection {}: a lie", self.link));
    }

    /// Receives a request, if it is complete.
    fn request(&mut self, a: &mut ServerConnContext<'_>) -> Result<bool, Violation> {
        if self.head.is_none() {
            let Some(header) = self.input.first_chunk::<{ NbdRequestHeader::SIZE }>() else {
                return Ok(false);
            };
            let request =
                NbdRequestHeader::decode(header).map_err(|e| format!("connection {}: {e}", self.link))?;
            self.input.drain(..NbdRequestHeader::SIZE);
            self.check(&request)?;
            let op = u64::from(request.command.number()) << 16 | u64::from(request.flags.bits());
            let args = [request.cookie, self.link as u64, op, pack_sector_range(request.offset, request.len)];
            a.shared.trace.add(a.now, NO_CORE, TraceEventKind::Asks, args);
            // A server may refuse a write before it has the data.
            let early = request.command == NbdCommand::Write
                && !self.has_violated
                && !a.calm
                && a.chance.one_in(self.manner.early);
            if early {
                self.refuse(&request, a);
            }
            self.head = Some((request, early));
        }
        let Some((request, refused)) = self.head else { return Ok(false) };
        let len = request.payload_len(NbdHeaderStyle::Structured) as usize;
        if self.input.len() < len {
            return Ok(false);
        }
        self.head = None;
        let data: Vec<u8> = self.input.drain(..len).collect();
        match request.command {
            NbdCommand::Disconnect => {
                self.ended = true;
                self.input.clear();
                return Ok(false);
            }
            _ if refused => return Ok(true),
            _ => {}
        }
        let stamps: Option<Vec<u64>> = data.chunks(512).map(stamp::read_sector_stamp).collect();
        let stamps =
            stamps.ok_or_else(|| format!("connection {}: data that was never written", self.link))?;
        let hangs = !a.calm && a.chance.one_in(self.manner.hangs);
        // The hang ends before the time of `fence=wait`.
        let most = a.chance.pick(&[5, 20, 200]);
        let due = Nanos(if hangs { a.chance.between(1, most) * 100_000_000 } else { 0 });
        a.counts.hangs += u64::from(hangs);
        if hangs {
            a.trouble();
        }
        let due = a.now + due + Nanos(a.chance.span(self.manner.latency));
        self.taken += 1;
        self.jobs.push(UnexecutedRequest { request, stamps, nth: self.taken, due });
        Ok(true)
    }

    /// Checks that the export accepts the request.
    fn check(&self, request: &NbdRequestHeader) -> Result<(), Violation> {
        let wrong = |why: &str| Err(format!("connection {}: {request:?}: {why}", self.link));
        let NbdRequestHeader { command, flags, cookie, offset, len, .. } = *request;
        let has = |flag| self.says.flags.contains(flag);
        if command == NbdCommand::Disconnect {
            return Ok(());
        }
        if self.other || self.shook_badly {
            return wrong("asked of a server that is another");
        }
        if self.jobs.len() >= REQUESTS_MAX {
            return wrong("too many are under way");
        }
        if self.jobs.iter().any(|job| job.request.cookie == cookie) {
            return wrong("another one with this cookie is under way");
        }
        let fits = match command {
            NbdCommand::Flush => has(ExportFlags::SEND_FLUSH) && (offset, len) == (0, 0),
            NbdCommand::Trim => has(ExportFlags::SEND_TRIM),
            NbdCommand::WriteZeroes => has(ExportFlags::SEND_WRITE_ZEROES),
            NbdCommand::Read | NbdCommand::Write => true,
            _ => false,
        };
        let flags_fit = request.flags_fit(NbdHeaderStyle::Structured);
        if !fits || !flags_fit || (flags.contains(CommandFlags::FUA) && !has(ExportFlags::SEND_FUA)) {
            return wrong("the server does not have that");
        }
        let blocks = self.says.export().blocks;
        let unit = u64::from(blocks.minimum.max(512));
        let data = matches!(command, NbdCommand::Read | NbdCommand::Write);
        let whole = offset.is_multiple_of(unit) && len.is_multiple_of(unit);
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.says.size);
        let short = !data || len <= blocks.maximum.into();
        if command != NbdCommand::Flush && (len == 0 || !whole || !inside || !short) {
            return wrong("a range that it does not take");
        }
        Ok(())
    }

    /// Replies to `request` with an error.
    fn refuse(&mut self, request: &NbdRequestHeader, a: &mut ServerConnContext<'_>) {
        let error = a.chance.pick(&[
            nbd::EPERM,
            nbd::EIO,
            nbd::EIO,
            nbd::ENOMEM,
            nbd::EINVAL,
            nbd::ENOSPC,
            nbd::EOVERFLOW,
            nbd::ENOTSUP,
            nbd::ESHUTDOWN,
            77,
        ]);
        a.counts.refused += 1;
        a.shared.model.exports[a.export].said_no += 1;
        a.trouble();
        self.leaves |= error == nbd::ESHUTDOWN;
        self.give(request, error, &[], a);
    }

    fn give(
        &mut self,
        request: &NbdRequestHeader,
        error: u32,
        stamps: &[u64],
        a: &mut ServerConnContext<'_>,
    ) {
        let args = [request.cookie, self.link as u64, error.into(), 0];
        a.shared.trace.add(a.now, NO_CORE, TraceEventKind::Answered, args);
        let answer = reply::build_reply_pieces(request, error, stamps, self.structured, a.chance);
        self.answers.push((Some(request.cookie), answer));
        self.answered += 1;
    }

    /// Executes the requests that are due, in any order.
    fn work(&mut self, a: &mut ServerConnContext<'_>) {
        loop {
            let due: Vec<usize> = (0..self.jobs.len()).filter(|&i| self.jobs[i].due <= a.now).collect();
            if due.is_empty() || self.closing {
                return;
            }
            let job = self.jobs.swap_remove(a.chance.pick(&due));
            self.one(&job, a);
        }
    }

    fn one(&mut self, job: &UnexecutedRequest, a: &mut ServerConnContext<'_>) {
        if self.leaves && !a.net.links[self.link].shut {
            return self.give(&job.request, nbd::ESHUTDOWN, &[], a);
        }
        let well = a.calm || self.ended;
        if !well && a.chance.one_in(self.manner.closes) {
            // The connection closes in the middle of any reply.
            a.counts.closed += 1;
            a.trouble();
            a.shared.say(format!("connection {} is closed by its server", self.link));
            let answers = std::mem::take(&mut self.answers);
            self.out.extend(answers.into_iter().flat_map(|(_, answer)| answer).take(1).flatten());
            self.out.truncate(a.chance.below(self.out.len() as u64 + 1) as usize);
            self.jobs.clear();
            self.closing = true;
            return;
        }
        let fails = !well && a.chance.one_in(self.manner.errors);
        let lands = !fails || a.chance.one_in(2);
        a.counts.landed += u64::from(a.net.links[self.link].shut && lands);
        let stamps = if lands {
            let (op, range, durable) = reply::op_of(&job.request, self.says.flags);
            a.disk.carry_out(op, range, &job.stamps, durable, a.chance)
        } else {
            Vec::new()
        };
        if !well && a.chance.one_in(self.manner.violations) {
            self.violations(a);
            let (lie, twice) = reply::forged_reply(&job.request, self.before, self.structured, a.chance);
            a.counts.twice += u64::from(twice);
            self.answers.push((None, ReplyPieces::from([lie])));
        } else if fails {
            self.refuse(&job.request, a);
        } else if !a.net.links[self.link].shut {
            a.counts.reordered += u64::from(self.jobs.iter().any(|other| other.nth < job.nth));
            self.give(&job.request, 0, &stamps, a);
        }
    }

    fn write(&mut self, a: &mut ServerConnContext<'_>) {
        while self.out.len() < UP_MAX && !self.answers.is_empty() {
            let i = a.chance.below(self.answers.len() as u64) as usize;
            self.out.extend(self.answers[i].1.pop_front().unwrap_or_default());
            if self.answers[i].1.is_empty() {
                let (cookie, _) = self.answers.swap_remove(i);
                self.before = cookie.or(self.before);
            }
        }
        let room = UP_MAX.saturating_sub(a.net.links[self.link].up.len());
        let most = self.out.len().min(room) as u64;
        if most > 0 {
            let n = if a.net.is_cutting() { a.chance.between(1, most.min(self.manner.piece)) } else { most };
            a.net.links[self.link].up.extend(self.out.drain(..n as usize));
        }
    }
}
