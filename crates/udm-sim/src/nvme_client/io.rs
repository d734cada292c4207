//! The commands of an I/O queue: their checks, the data of writes, and their execution at the disk.

use super::conn::{ConnContext, ControllerConn, DiskCommand, PendingWrite};
use super::controllers::NOTICE_TIME;
use super::pdus::{ForgedSubject, PduSequence, bytes_of, data_answer, forge, ready_to_transfer, response};
use super::target::{AnaReport, TargetAvailability};
use crate::model::Violation;
use crate::remote_disk::disk::ServerDisk;
use crate::stamp;
use crate::trace::{NO_CORE, TraceEventKind, pack_op_and_flags, pack_sector_range};
use udm_core::{Nanos, Op};
use udm_wire::nvme::host::is_usable;
use udm_wire::nvme::{
    AnaState, DataPdu, DataPointer, DatasetRange, DatasetRequest, NvmOpcode, NvmeCommand, NvmeStatus,
    PduHeader, RwFlags, RwRequest, WriteZeroesFlags,
};

/// The status of a command in an ANA state in which none is executed.
fn ana_status(state: AnaState) -> NvmeStatus {
    match state {
        AnaState::Inaccessible => NvmeStatus::ANA_INACCESSIBLE,
        AnaState::PersistentLoss => NvmeStatus::ANA_PERSISTENT_LOSS,
        _ => NvmeStatus::ANA_TRANSITION,
    }
}

impl ControllerConn {
    pub(super) fn io_command(
        &mut self,
        controller: usize,
        command: &NvmeCommand,
        data: &[u8],
        a: &mut ConnContext<'_>,
    ) -> Result<(), Violation> {
        let wrong = |why: &str| Err(format!("connection {}: {command:?}: {why}", self.link));
        if command.nsid() != 1 || command.is_fused() {
            return wrong("a wrong namespace");
        }
        let is_sent = matches!(
            NvmOpcode::from_number(command.opcode()),
            NvmOpcode::Write | NvmOpcode::DatasetManagement
        );
        match command.data_pointer() {
            // Data that the controller asks for.
            DataPointer::Transport { len } if is_sent && data.is_empty() && len > 0 => {
                if !self.has_violated && self.is_drawn(self.behavior.early, a) {
                    a.counts.early += 1;
                    self.refuse(command.id(), a);
                    return Ok(());
                }
                let write = PendingWrite { command: *command, len, data: Vec::new(), transfer: None };
                self.writes.insert(command.id(), write);
                self.ask_for_data(command.id(), a);
                Ok(())
            }
            DataPointer::InCapsule { offset: 0, len } if is_sent && data.len() == len as usize => {
                self.store(controller, command, data, a)
            }
            DataPointer::Transport { .. } if !is_sent && data.is_empty() => {
                self.store(controller, command, data, a)
            }
            _ => wrong("a wrong place of its data"),
        }
    }

    fn stamps(&self, data: &[u8]) -> Result<Vec<u64>, Violation> {
        let stamps: Option<Vec<u64>> = data.chunks(512).map(stamp::read_sector_stamp).collect();
        stamps.ok_or_else(|| format!("connection {}: data that was never written", self.link))
    }

    /// Checks that a new write does not come although the host has read that this path is not
    /// accessible.
    fn check_ana(&self, controller: usize, stamps: &[u64], a: &ConnContext<'_>) -> Result<(), Violation> {
        let (Some((state, AnaReport::Received(at))), Some(stamp)) =
            (a.controllers[controller].ana_report, stamps.first())
        else {
            return Ok(());
        };
        let submitted = a.shared.model.submitted_at(stamp >> 10);
        match submitted.is_some_and(|submitted| submitted > at + NOTICE_TIME) && !is_usable(state) {
            true => Err(format!("connection {}: a write in ANA state {state:?}", self.link)),
            false => Ok(()),
        }
    }

    /// Asks for the next part of the data of a write.
    fn ask_for_data(&mut self, id: u16, a: &mut ConnContext<'_>) {
        let Some(write) = self.writes.get_mut(&id) else { return };
        let offset = write.data.len() as u32;
        let left = write.len - offset;
        let len = if left > 4 && a.chance.one_in(3) {
            a.chance.between(1, u64::from(left) / 4) as u32 * 4
        } else {
            left
        };
        let data = DataPdu { command: id, tag: a.chance.any() as u16, offset, len };
        write.transfer = Some((data, 0));
        a.counts.transfers += 1;
        self.answers.push(PduSequence::from([ready_to_transfer(&data, &self.limits)]));
    }

    /// Takes data of a write.
    pub(super) fn host_data(
        &mut self,
        header: &PduHeader,
        pdu: &[u8],
        a: &mut ConnContext<'_>,
    ) -> Result<(), Violation> {
        let head = DataPdu::decode(pdu);
        let wrong = |why: &str| Err(format!("connection {}: {head:?}: {why}", self.link));
        let Some(write) = self.writes.get_mut(&head.command) else {
            // The host follows an R2T that violates the protocol.
            return if self.has_violated { Ok(()) } else { wrong("data of no write") };
        };
        let Some((asked, have)) = &mut write.transfer else { return wrong("data that was not asked for") };
        if head.tag != asked.tag || head.offset != asked.offset + *have || head.len != header.data_len {
            return wrong("not the data that was asked for");
        }
        *have += head.len;
        if *have > asked.len || header.is_last != (*have == asked.len) {
            return wrong("too much data, or the last PDU is not marked");
        }
        write.data.extend_from_slice(&pdu[header.header_len..header.header_len + head.len as usize]);
        if *have < asked.len {
            return Ok(());
        }
        write.transfer = None;
        if (write.data.len() as u32) < write.len {
            self.ask_for_data(head.command, a);
            return Ok(());
        }
        let Some(PendingWrite { command, data, .. }) = self.writes.remove(&head.command) else {
            return Ok(());
        };
        let Some(controller) = self.controller() else { return Ok(()) };
        self.store(controller, &command, &data, a)
    }

    /// Checks a command with all its data, and gives it to the disk.
    fn store(
        &mut self,
        controller: usize,
        command: &NvmeCommand,
        data: &[u8],
        a: &mut ConnContext<'_>,
    ) -> Result<(), Violation> {
        let wrong = |why: &str| Err(format!("connection {}: {command:?}: {why}", self.link));
        let (op, range, is_durable) = match decode(command, data, a.namespace.block) {
            Ok(decoded) => decoded,
            Err(why) => return wrong(why),
        };
        let (id, sectors) = (command.id(), range.1 - range.0);
        let op_and_flags = pack_op_and_flags(op, is_durable.into());
        let args = [id.into(), self.link as u64, op_and_flags, pack_sector_range(range.0, sectors)];
        a.shared.trace.add(a.now, NO_CORE, TraceEventKind::PathIn, args);
        let has = match op {
            Op::Discard => a.namespace.discard,
            Op::WriteZeroes => a.namespace.write_zeroes,
            Op::Flush => a.namespace.write_cache,
            Op::Read | Op::Write => true,
        };
        let len = match op {
            Op::Read | Op::Write => sectors * 512,
            Op::Discard => 16,
            Op::Flush | Op::WriteZeroes => 0,
        };
        let (DataPointer::InCapsule { len: sent, .. } | DataPointer::Transport { len: sent }) =
            command.data_pointer()
        else {
            return wrong("a wrong place of its data");
        };
        if !has || range.1 > a.namespace.sectors || u64::from(sent) != len {
            return wrong("the namespace does not have that");
        }
        let stamps = if op == Op::Write { self.stamps(data)? } else { Vec::new() };
        self.check_ana(controller, &stamps, a)?;
        a.writes.note(controller, &stamps);
        let hangs = self.is_drawn(self.behavior.hangs, a);
        let most = a.chance.pick(&[5, 20, 200]);
        let hang = Nanos(if hangs { a.chance.between(1, most) * 100_000_000 } else { 0 });
        if hangs {
            a.counts.hangs += 1;
            a.trouble();
        }
        // Without an answer, nobody sees how long it takes: up to the end of the controller.
        let is_held = a.target.mode == TargetAvailability::OneWay && a.chance.one_in(2);
        let hang = if is_held { Nanos::NEVER } else { hang };
        let due = a.now + hang + Nanos(a.chance.span(self.behavior.latency));
        let is_durable = is_durable || !a.namespace.write_cache;
        a.target.jobs.push(DiskCommand {
            link: self.link,
            controller,
            id,
            op,
            range,
            is_durable,
            stamps,
            due,
            limit: Nanos::NEVER,
        });
        Ok(())
    }

    fn refuse(&mut self, id: u16, a: &mut ConnContext<'_>) {
        let not_ready = NvmeStatus::NAMESPACE_NOT_READY;
        let status = a.chance.pick(&[
            not_ready,
            // After the first and the second delay.
            NvmeStatus(not_ready.0 | 1 << 11),
            NvmeStatus(not_ready.0 | 2 << 11),
            not_ready.permanent(),
            NvmeStatus::INTERNAL_ERROR,
            NvmeStatus::ABORT_REQUESTED,
            NvmeStatus::WRITE_FAULT.permanent(),
            NvmeStatus::UNRECOVERED_READ_ERROR.permanent(),
            NvmeStatus::CAPACITY_EXCEEDED.permanent(),
            NvmeStatus::INTERNAL_PATH_ERROR,
            NvmeStatus::ANA_TRANSITION,
            NvmeStatus::TRANSIENT_TRANSPORT_ERROR,
        ]);
        self.refuse_with(id, status, a);
    }

    fn refuse_with(&mut self, id: u16, status: NvmeStatus, a: &mut ConnContext<'_>) {
        a.counts.refused += 1;
        a.shared.model.exports[a.target.namespace].said_no += 1;
        a.trouble();
        self.complete(id, 0, status);
    }

    /// Executes a command at the disk, and answers it. Its connection is this one.
    pub(super) fn carry_out(&mut self, job: &DiskCommand, disk: &mut ServerDisk, a: &mut ConnContext<'_>) {
        let args = [u64::from(job.id), self.link as u64, 0, 0];
        a.shared.trace.add(a.now, NO_CORE, TraceEventKind::Answered, args);
        if !is_usable(a.target.ana) {
            a.counts.inaccessible += 1;
            return self.refuse_with(job.id, ana_status(a.target.ana), a);
        }
        if self.is_drawn(self.behavior.closes, a) {
            a.counts.closed += 1;
            a.trouble();
            a.shared.say(format!("connection {} is closed by its target", self.link));
            // Within some answer.
            let answers = std::mem::take(&mut self.answers);
            self.out.extend(answers.into_iter().flatten().take(1).flatten());
            self.out.truncate(a.chance.below(self.out.len() as u64 + 1) as usize);
            self.closing = true;
            return;
        }
        let fails = self.is_drawn(self.behavior.errors, a);
        if fails && a.chance.one_in(2) {
            return self.refuse(job.id, a);
        }
        let stamps = disk.carry_out(job.op, job.range, &job.stamps, job.is_durable, a.chance);
        if fails {
            return self.refuse(job.id, a);
        }
        if self.is_drawn(self.behavior.violations, a) {
            self.note_violation(a);
            let reads = bytes_of(&stamps);
            let subject = ForgedSubject { id: job.id, reads: &reads };
            let lie = forge(&subject, &self.limits, a.chance);
            self.answers.push(lie);
            return;
        }
        let pdus = match job.op {
            Op::Read => data_answer(job.id, &bytes_of(&stamps), true, &self.limits, a.chance),
            _ => PduSequence::from([response(job.id, 0, NvmeStatus::SUCCESS, &self.limits)]),
        };
        self.answer(job.id, pdus);
    }
}

/// The operation of a command, its sectors, and FUA. A block has `block` sectors.
fn decode(command: &NvmeCommand, data: &[u8], block: u64) -> Result<(Op, (u64, u64), bool), &'static str> {
    let request = RwRequest::decode(command);
    let sectors = |start: u64, blocks: u64| {
        let end = start.checked_add(blocks).and_then(|end| end.checked_mul(block));
        end.map(|end| (start * block, end)).ok_or("a range beyond all numbers")
    };
    let range = || sectors(request.start, request.blocks.into());
    match NvmOpcode::from_number(command.opcode()) {
        NvmOpcode::Flush => Ok((Op::Flush, (0, 0), false)),
        NvmOpcode::Read => Ok((Op::Read, range()?, false)),
        NvmOpcode::Write => Ok((Op::Write, range()?, request.flags().contains(RwFlags::FUA))),
        NvmOpcode::WriteZeroes => {
            let is_durable = request.zeroes_flags().contains(WriteZeroesFlags::FUA);
            Ok((Op::WriteZeroes, range()?, is_durable))
        }
        NvmOpcode::DatasetManagement => {
            let DatasetRequest { ranges, deallocates } = DatasetRequest::decode(command);
            let bytes = data.first_chunk().filter(|_| ranges == 1 && deallocates && data.len() == 16);
            let DatasetRange { start, blocks } = DatasetRange::decode(bytes.ok_or("not one range")?);
            Ok((Op::Discard, sectors(start, blocks.into())?, false))
        }
        NvmOpcode::Fabrics | NvmOpcode::Other(_) => Err("an unknown command"),
    }
}
