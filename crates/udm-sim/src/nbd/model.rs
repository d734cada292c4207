//! The permitted replies to clients, and the data that reads may return.
//!
//! A device is a list of registers ([`crate::register_model`]) of `unit` bytes. In the model, a
//! request lasts from its send until its client has the reply. A request without a reply may or may
//! not have happened. It may also happen later, until the server has dropped its connection.

use crate::model::Violation;
use crate::register_model::{ANY, SectorRegisterModel, stamp_text};
use crate::rng::mix_bits_splitmix64;
use udm_core::errno;
use udm_wire::nbd::{
    CommandFlags, EINVAL, ENOSPC, ENOTSUP, EPERM, ESHUTDOWN, ExportFlags, NbdCommand, NbdHeaderStyle,
    NbdRequestHeader, STATE_HOLE, STATE_ZERO,
};

/// A request without a reply.
#[derive(Clone, Debug)]
pub(super) struct UnansweredRequest {
    /// Number of the request, unique in a run.
    pub(super) id: u64,
    pub(super) request: NbdRequestHeader,
    /// Index of the device.
    device: usize,
    /// Twice the step in which the request was sent.
    pub(super) start: u64,
    /// Simulated time at which the request was sent.
    pub(super) at: udm_core::Nanos,
    /// Error that the reply must have.
    must: Option<u32>,
    /// Faults of disks when the request was sent.
    faults: u64,
    /// Received data of a read; `have` is the number of bytes received.
    pub(super) data: Vec<u8>,
    pub(super) have: usize,
    /// Descriptors of a block status: bytes, flags.
    pub(super) status: Option<Vec<(u64, u64)>>,
}

/// A device, as its clients see it.
pub(super) struct ExportedDeviceModel {
    /// Size in bytes.
    pub(super) size: u64,
    /// Offset from which the device is a zero target.
    pub(super) zero_from: u64,
    /// Block size in bytes.
    pub(super) block: u64,
    pub(super) discards: bool,
}

/// Reasons for an error besides the request itself.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ServerErrorReasons {
    /// Requests that disks have failed so far.
    pub(super) faults: u64,
    /// True if the server is shutting down.
    pub(super) ending: bool,
}

/// The model of the exported devices and their requests.
pub(super) struct NbdServerModel {
    pub(super) cells: SectorRegisterModel,
    pub(super) disks: Vec<ExportedDeviceModel>,
    /// Bytes per register.
    pub(super) unit: u64,
    ids: u64,
    /// Writes whose client has disconnected: device, id, first register, and register after the
    /// last.
    lost: Vec<(usize, u64, u32, u32)>,
    /// Checked replies, by command number.
    pub(super) requests: [u64; 8],
    pub(super) errors: u64,
    pub(super) compared: u64,
    pub(super) statuses: u64,
    /// Chunks with extended headers.
    pub(super) extended: u64,
}

impl NbdServerModel {
    pub(super) fn new(disks: Vec<ExportedDeviceModel>, unit: u64) -> NbdServerModel {
        let sizes: Vec<u64> = disks.iter().map(|disk| disk.size / unit).collect();
        NbdServerModel {
            cells: SectorRegisterModel::new(&sizes, |_, _| 0),
            disks,
            unit,
            ids: 0,
            lost: Vec::new(),
            requests: [0; 8],
            errors: 0,
            compared: 0,
            statuses: 0,
            extended: 0,
        }
    }

    /// Bytes that request `id` writes to its register `nth`.
    fn pattern(&self, id: u64, nth: u64) -> [u8; 8] {
        (id << 20 | nth).to_le_bytes()
    }

    /// Returns the stamp of a register with these bytes, or `None` if no request wrote them.
    fn stamp(&self, bytes: &[u8]) -> Option<u64> {
        match self.unit {
            1 => Some(u64::from(bytes[0])),
            _ => {
                let first = u64::from_le_bytes(bytes[..8].try_into().ok()?);
                bytes.chunks_exact(8).all(|word| word == &bytes[..8]).then_some(first)
            }
        }
    }

    fn stamp_of(&self, id: u64, nth: u64) -> u64 {
        match self.unit {
            1 => mix_bits_splitmix64(id << 20 | nth) & 0xff,
            _ => u64::from_le_bytes(self.pattern(id, nth)),
        }
    }

    /// Returns the data of a write.
    pub(super) fn payload(&self, asked: &UnansweredRequest) -> Vec<u8> {
        let mut out = Vec::with_capacity(asked.request.len as usize);
        for nth in 0..asked.request.len / self.unit {
            match self.unit {
                1 => out.push(self.stamp_of(asked.id, nth) as u8),
                unit => (0..unit / 8).for_each(|_| out.extend_from_slice(&self.pattern(asked.id, nth))),
            }
        }
        out.resize(asked.request.len as usize, 0);
        out
    }

    /// Returns the registers that a request changes: the first, and the one after the last.
    fn changes(&self, device: usize, request: &NbdRequestHeader) -> (u32, u32) {
        let disk = &self.disks[device];
        let end = (request.offset + request.len).min(disk.zero_from);
        let (from, end) = match request.command {
            NbdCommand::Write | NbdCommand::WriteZeroes => (request.offset, end),
            // A trim does not change partial blocks.
            NbdCommand::Trim => (request.offset.next_multiple_of(disk.block), end - end % disk.block),
            _ => (0, 0),
        };
        let first = self.cells.index(device, (from / self.unit).min(disk.size / self.unit - 1));
        (first, first + (end.saturating_sub(from) / self.unit) as u32)
    }

    /// Records that a client sends `request` to an export of `device` with these `flags`.
    #[expect(clippy::too_many_arguments, reason = "the parts of a request and its position")]
    pub(super) fn begin(
        &mut self,
        device: usize,
        request: NbdRequestHeader,
        flags: ExportFlags,
        style: NbdHeaderStyle,
        contexts: bool,
        step: u64,
        at: udm_core::Nanos,
        faults: u64,
    ) -> UnansweredRequest {
        self.ids += 1;
        let (id, start) = (self.ids, 2 * step);
        let must = self.must(device, &request, flags, style, contexts);
        let reads = request.command == NbdCommand::Read && must.is_none();
        let data = vec![0; if reads { request.len as usize } else { 0 }];
        let asked =
            UnansweredRequest { id, request, device, start, at, must, faults, data, have: 0, status: None };
        if must.is_none() {
            let (first, end) = self.changes(device, &request);
            for cell in first..end {
                let nth = u64::from(cell - first);
                let stamp = match request.command {
                    NbdCommand::Write => self.stamp_of(id, nth),
                    NbdCommand::Trim => ANY,
                    _ => 0,
                };
                self.cells.begin(cell, id, stamp, start);
            }
        }
        asked
    }

    /// Returns the error that the reply must have, according to the protocol and the negotiated
    /// export.
    fn must(
        &self,
        device: usize,
        request: &NbdRequestHeader,
        flags: ExportFlags,
        style: NbdHeaderStyle,
        contexts: bool,
    ) -> Option<u32> {
        let size = self.disks[device].size;
        let outside = request.offset.checked_add(request.len).is_none_or(|end| end > size);
        let writes =
            matches!(request.command, NbdCommand::Write | NbdCommand::WriteZeroes | NbdCommand::Trim);
        let unfragmented = request.flags.contains(CommandFlags::DF) && !style.has_chunks();
        let wrong_flags = !request.flags_fit(style) || unfragmented;
        match request.command {
            NbdCommand::Other(_) => Some(EINVAL),
            NbdCommand::BlockStatus if !contexts => Some(EINVAL),
            _ if wrong_flags => Some(EINVAL),
            NbdCommand::Flush => (request.offset != 0 || request.len != 0).then_some(EINVAL),
            _ if request.len == 0 => Some(EINVAL),
            _ if writes && flags.contains(ExportFlags::READ_ONLY) => Some(EPERM),
            NbdCommand::Trim if !flags.contains(ExportFlags::SEND_TRIM) => Some(EINVAL),
            NbdCommand::Write | NbdCommand::WriteZeroes if outside => Some(ENOSPC),
            _ if outside => Some(EINVAL),
            _ => None,
        }
    }

    /// Checks the complete reply to `asked`: `error`, or 0.
    ///
    /// # Errors
    /// If the reply is not permitted.
    pub(super) fn end(
        &mut self,
        asked: &UnansweredRequest,
        error: u32,
        step: u64,
        excuses: ServerErrorReasons,
    ) -> Result<(), Violation> {
        let NbdRequestHeader { command, flags, offset, len, .. } = asked.request;
        let what = || format!("{command:?} {offset}+{len} of d{}", asked.device);
        let now = 2 * step + 1;
        self.requests[usize::from(command.number()).min(7)] += 1;
        self.errors += u64::from(error != 0);
        if let Some(must) = asked.must {
            return if error == must || (excuses.ending && error == ESHUTDOWN) {
                Ok(())
            } else {
                Err(format!("a {} must fail with {must}, and was answered with {error}", what()))
            };
        }
        let fast = flags.contains(CommandFlags::FAST_ZERO) && error == ENOTSUP;
        let faulty = excuses.faults > asked.faults && error != EINVAL && error != ENOTSUP;
        let may = fast || faulty || (excuses.ending && error == ESHUTDOWN);
        if error != 0 && !may {
            let name = errno::to_nbd(error as i32);
            return Err(format!("a {} failed with {error} ({name}), and nothing was wrong", what()));
        }
        let (first, end) = self.changes(asked.device, &asked.request);
        let durable = flags.contains(CommandFlags::FUA);
        for cell in first..end {
            self.cells.end(cell, asked.id, now, error == 0, durable);
        }
        match command {
            _ if error != 0 => Ok(()),
            NbdCommand::Flush => {
                self.cells.flushed(asked.device, asked.start);
                Ok(())
            }
            NbdCommand::Read => self.compare(asked, now),
            NbdCommand::BlockStatus => self.look_at_status(asked),
            _ => Ok(()),
        }
    }

    fn compare(&mut self, asked: &UnansweredRequest, now: u64) -> Result<(), Violation> {
        if asked.have != asked.data.len() {
            return Err(format!("a read of {} bytes brought {}", asked.data.len(), asked.have));
        }
        let disk = &self.disks[asked.device];
        let (zero_from, unit) = (disk.zero_from, self.unit);
        for (nth, bytes) in asked.data.chunks_exact(unit as usize).enumerate() {
            let at = asked.request.offset + nth as u64 * unit;
            let stamp = self.stamp(bytes);
            let cell = self.cells.index(asked.device, at / unit);
            let fine = match stamp {
                Some(stamp) if at >= zero_from => stamp == 0,
                Some(stamp) => self.cells.allows(cell, stamp, asked.start),
                None => false,
            };
            self.compared += 1;
            match stamp {
                Some(stamp) if fine => {
                    if unit > 1 && at < zero_from {
                        self.cells.seen(cell, stamp, asked.start, now);
                    }
                }
                _ if at < zero_from && self.leftover(cell, asked.start) => {}
                _ => return Err(self.wrong_data(asked, at, cell, stamp, bytes)),
            }
        }
        Ok(())
    }

    /// True if register `cell` may hold any value after a discard.
    fn leftover(&self, cell: u32, start: u64) -> bool {
        self.cells.allows(cell, ANY, start)
    }

    fn wrong_data(
        &self,
        asked: &UnansweredRequest,
        at: u64,
        cell: u32,
        stamp: Option<u64>,
        bytes: &[u8],
    ) -> Violation {
        let text = |stamp: u64| match (self.unit, stamp) {
            (_, 0) => stamp_text(0),
            (1, byte) => format!("the byte {byte:#x}"),
            (_, stamp) => format!("request {} unit {}", stamp >> 20, stamp & 0xf_ffff),
        };
        let got = stamp.map_or_else(|| format!("{:x?}", &bytes[..16.min(bytes.len())]), text);
        format!(
            "request {}, a read of d{} {}+{}, brought {got} at byte {at}, which may hold{}",
            asked.id,
            asked.device,
            asked.request.offset,
            asked.request.len,
            self.cells.describe(cell)
        )
    }

    /// Checks a block status: it must start at the requested offset, must not exceed the requested
    /// range, and must not call data zero.
    fn look_at_status(&mut self, asked: &UnansweredRequest) -> Result<(), Violation> {
        let Some(status) = &asked.status else { return Err("a block status without descriptors".into()) };
        self.statuses += 1;
        let one = asked.request.flags.contains(CommandFlags::REQ_ONE);
        let mut at = asked.request.offset;
        let end = at + asked.request.len;
        if one && status.len() > 1 {
            return Err(format!("{} descriptors where one was asked for", status.len()));
        }
        for (len, flags) in status {
            if *len == 0 || flags & !u64::from(STATE_HOLE | STATE_ZERO) != 0 {
                return Err(format!("a descriptor of {len} bytes with flags {flags:#x}"));
            }
            let next = at + *len;
            if next > end {
                return Err(format!("a block status beyond the requested range: {next} of {end}"));
            }
            if flags & u64::from(STATE_ZERO) != 0 {
                for unit in at.div_ceil(self.unit)..next.min(self.disks[asked.device].zero_from) / self.unit {
                    let cell = self.cells.index(asked.device, unit);
                    if !self.cells.allows(cell, 0, asked.start) {
                        let place = unit * self.unit;
                        return Err(format!("byte {place} of d{} is called zero, and is not", asked.device));
                    }
                }
            }
            at = next;
        }
        Ok(())
    }

    /// Records that the client of `asked` has disconnected.
    pub(super) fn lose(&mut self, asked: &UnansweredRequest) {
        if asked.must.is_none() {
            let (first, end) = self.changes(asked.device, &asked.request);
            if first < end {
                self.lost.push((asked.device, asked.id, first, end));
            }
        }
    }

    /// Ends all requests whose clients have disconnected.
    pub(super) fn forget_lost_requests(&mut self, step: u64) {
        for (_, id, first, end) in std::mem::take(&mut self.lost) {
            for cell in first..end {
                self.cells.end(cell, id, 2 * step + 1, false, false);
            }
        }
    }

    /// True if requests of disconnected clients may still happen.
    pub(super) fn has_lost(&self) -> bool {
        !self.lost.is_empty()
    }

    /// Records a power cut.
    pub(super) fn crash(&mut self, step: u64) {
        self.lost.clear();
        self.cells.crash(2 * step + 1);
    }
}
