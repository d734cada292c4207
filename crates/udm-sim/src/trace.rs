//! The history of a run as small numbers. Events are hashed at once, and formatted only for a
//! report.

use std::collections::VecDeque;
use udm_core::{Bio, Nanos, Op, Status};

/// Kind of a [`TraceEvent`]. [`TraceEvent::line`] shows the meaning of its four numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum TraceEventKind {
    /// A request is submitted to a device: id, device, op and flags, range.
    Submit,
    /// A request has completed: id, status.
    Done,
    /// A request reaches a path: path, op and flags, range, due time.
    PathIn,
    /// A path completes a request: path, op, range, status.
    PathOut,
    /// A core takes messages out of its inbox: count.
    CoreMessage,
    /// The clock jumps: new time.
    Jump,
    /// An action of the control side, as text.
    Control,
    /// A core of the server has had a turn: time of the next one.
    Turn,
    /// Bytes of a connection: connection, received, sent.
    Bytes,
    /// A client sends a request: request, connection, command and flags, range in bytes.
    Asks,
    /// A client gets a reply: request, connection, error.
    Answered,
}

/// An event of the trace.
#[derive(Clone, Debug)]
pub struct TraceEvent {
    /// Simulated time.
    pub at: Nanos,
    /// Core, or [`NO_CORE`].
    pub core: u16,
    /// Kind of the event.
    pub kind: TraceEventKind,
    /// Numbers, depending on the kind.
    pub args: [u64; 4],
    /// Text of an [`TraceEventKind::Control`].
    pub text: Option<Box<str>>,
}

/// The core number of events of the control side.
pub const NO_CORE: u16 = u16::MAX;

/// Packs a range into one number.
#[must_use]
pub fn pack_sector_range(sector: u64, sectors: u64) -> u64 {
    sector << 24 | sectors
}

/// Packs an operation and its flags into one number.
#[must_use]
pub fn pack_op_and_flags(op: Op, flags: u16) -> u64 {
    (op as u64) << 16 | u64::from(flags)
}

impl TraceEvent {
    /// Formats the event as a line for a person.
    #[must_use]
    pub fn line(&self) -> String {
        let [a, b, c, d] = self.args;
        let who = match self.core {
            NO_CORE => "control".to_string(),
            n => format!("core {n}"),
        };
        let span = |r: u64| format!("{}+{}", r >> 24, r & 0xff_ffff);
        let op = |x: u64| {
            let op = Op::ALL.iter().find(|o| **o as u64 == x >> 16).map_or("?", |o| op_name(*o));
            let flags = udm_core::BioFlags::from_bits_truncate((x & 0xffff) as u16);
            let names: Vec<_> = flags.iter_names().map(|(n, _)| n).collect();
            if names.is_empty() { op.to_string() } else { format!("{op}|{}", names.join("|")) }
        };
        let status = |x: u64| Status::ALL.get(x as usize).map_or("?", |s| s.text());
        let what = match self.kind {
            TraceEventKind::Submit => format!("request {a:<6} d{b} {} {}", op(c), span(d)),
            TraceEventKind::Done => format!("request {a:<6} done: {}", status(b)),
            TraceEventKind::PathIn => {
                format!("    p{a} <- {} {} until {}", op(b), span(c), format_microseconds(d))
            }
            TraceEventKind::PathOut => format!("    p{a} -> {} {}: {}", op(b), span(c), status(d)),
            TraceEventKind::CoreMessage => format!("takes {a} commands"),
            TraceEventKind::Jump => format!("idle until {}", format_microseconds(a)),
            TraceEventKind::Turn if a == u64::MAX => "turn, then it sleeps".to_string(),
            TraceEventKind::Turn => format!("turn, the next at {}", format_microseconds(a)),
            TraceEventKind::Bytes => format!("    connection {a}: {b} bytes received, {c} sent"),
            TraceEventKind::Asks => {
                let (number, flags) = (c >> 16, c & 0xffff);
                let command = udm_wire::nbd::NbdCommand::from_number(number as u16);
                format!("connection {b} asks {a}: {command:?} {} with flags {flags:#x}", span(d))
            }
            TraceEventKind::Answered => format!("connection {b} is answered {a}: {c}"),
            TraceEventKind::Control => self.text.as_deref().unwrap_or_default().to_string(),
        };
        format!("{:>14} {who:<8} {what}", format_microseconds(self.at.0))
    }
}

fn format_microseconds(ns: u64) -> String {
    format!("{}.{:03}us", ns / 1000, ns % 1000)
}

/// Name of an operation.
#[must_use]
pub fn op_name(op: Op) -> &'static str {
    match op {
        Op::Read => "read",
        Op::Write => "write",
        Op::Flush => "flush",
        Op::Discard => "discard",
        Op::WriteZeroes => "write-zeroes",
    }
}

/// The last events, and the hash of all events.
pub struct Trace {
    last: VecDeque<TraceEvent>,
    room: usize,
    hash: u64,
    count: u64,
}

impl Trace {
    /// Creates a trace that keeps the last `room` events.
    #[must_use]
    pub fn new(room: usize) -> Trace {
        Trace { last: VecDeque::with_capacity(room), room, hash: 0xcbf2_9ce4_8422_2325, count: 0 }
    }

    /// Adds an event with numbers.
    pub fn add(&mut self, at: Nanos, core: u16, kind: TraceEventKind, args: [u64; 4]) {
        self.eat(at.0 ^ (kind as u64) << 56 ^ u64::from(core) << 40);
        for n in args {
            self.eat(n);
        }
        self.keep(TraceEvent { at, core, kind, args, text: None });
    }

    /// Adds request `id`, the submission of `bio` to `device`.
    pub(crate) fn add_submit(&mut self, at: Nanos, core: u16, id: u64, device: usize, bio: &Bio) {
        let op = pack_op_and_flags(bio.op, bio.flags.bits());
        let span = pack_sector_range(bio.sector.0, bio.sectors.0);
        self.add(at, core, TraceEventKind::Submit, [id, device as u64, op, span]);
    }

    /// Adds a text of the control side.
    pub fn say(&mut self, at: Nanos, text: String) {
        self.eat(at.0);
        for chunk in text.as_bytes().chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.eat(u64::from_le_bytes(word));
        }
        self.keep(TraceEvent {
            at,
            core: NO_CORE,
            kind: TraceEventKind::Control,
            args: [0; 4],
            text: Some(text.into()),
        });
    }

    fn eat(&mut self, n: u64) {
        self.hash = (self.hash ^ n).wrapping_mul(0x2545_F491_4F6C_DD1D).rotate_left(29);
    }

    fn keep(&mut self, event: TraceEvent) {
        self.count += 1;
        if self.room == 0 {
            return;
        }
        if self.last.len() == self.room {
            self.last.pop_front();
        }
        self.last.push_back(event);
    }

    /// Hash of all events so far.
    #[must_use]
    pub fn hash(&self) -> u64 {
        crate::rng::mix_bits_splitmix64(self.hash ^ self.count)
    }

    /// The kept events as lines, oldest first.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        self.last.iter().map(TraceEvent::line).collect()
    }
}
