//! The commands of I/O queues become bios, and completed bios become answers.
//!
//! Most commands are one bio. These are executed in pieces, one bio at a time: commands longer than
//! the device's limit, zeroes that the device does not support, and the ranges of a discard.

use super::io_plan::{CommandPlan, plan_command};
use super::pending_command::{CommandStage, PendingCommand};
use super::queue::{NvmeQueue, QueuePhase};
use super::transmit::QueuedPdu;
use crate::nbd::return_buffers_to_pool;
use udm_core::{Bio, BioFlags, Op, Sector, Sectors, Segments, Status};
use udm_runtime::FrontCx;
use udm_wire::nvme::{AnaState, DataPdu, DatasetRequest, NvmeCommand, NvmeStatus};

/// Bytes per piece of zeroes written as data.
const ZEROES_PIECE: u32 = 256 << 10;

impl NvmeQueue {
    /// Handles a command, which has perhaps brought data in its capsule.
    pub(super) fn command_arrived(
        &mut self,
        command: &NvmeCommand,
        data: Option<Segments>,
        cx: &mut FrontCx<'_, '_>,
    ) {
        if self.is_for_authentication(command) {
            return self.authentication_command(command, data);
        }
        if self.admin.is_some() {
            data.into_iter().for_each(|data| return_buffers_to_pool(data, &mut self.writes));
            return self.admin_command(command);
        }
        let capsule_data = data.as_ref().map_or(0, Segments::len);
        match self.check_command(command, capsule_data, cx) {
            Ok(plan) => self.start(command, plan, data, cx),
            Err(status) => {
                data.into_iter().for_each(|data| return_buffers_to_pool(data, &mut self.writes));
                self.respond(command.id(), status, 0);
            }
        }
    }

    fn check_command(
        &mut self,
        command: &NvmeCommand,
        capsule_data: usize,
        cx: &mut FrontCx<'_, '_>,
    ) -> Result<CommandPlan, NvmeStatus> {
        if !self.link.association.is_enabled() {
            return Err(NvmeStatus::COMMAND_SEQUENCE_ERROR.permanent());
        }
        if command.opcode() == udm_wire::nvme::OPCODE_FABRICS {
            return Err(NvmeStatus::COMMAND_SEQUENCE_ERROR.permanent());
        }
        self.open_namespace(command.nsid(), cx)?;
        let open = self.namespaces.get_mut(&command.nsid()).expect("it was opened");
        let mut plan = plan_command(command, capsule_data, &open.geometry);
        if plan == Err(NvmeStatus::LBA_OUT_OF_RANGE.permanent()) {
            // The host may have learned the new size of the device before this core.
            open.refresh();
            plan = plan_command(command, capsule_data, &open.geometry);
        }
        let plan = plan?;
        match open.ana_state {
            AnaState::Optimized | AnaState::NonOptimized => Ok(plan),
            AnaState::Inaccessible => Err(NvmeStatus::ANA_INACCESSIBLE),
            AnaState::PersistentLoss => Err(NvmeStatus::ANA_PERSISTENT_LOSS),
            AnaState::Change => Err(NvmeStatus::ANA_TRANSITION),
        }
    }

    /// Starts a command, or parks it until there is memory.
    fn start(
        &mut self,
        command: &NvmeCommand,
        plan: CommandPlan,
        data: Option<Segments>,
        cx: &mut FrontCx<'_, '_>,
    ) {
        let received = data.as_ref().map_or(0, Segments::len) as u32;
        let charge = match plan.op {
            Op::Read => plan.len as usize,
            // The device may not support it: then zeroes are written as data.
            Op::WriteZeroes => plan.len.min(ZEROES_PIECE.into()) as usize,
            _ => plan.from_host as usize,
        };
        let key = self.pending.insert(PendingCommand {
            id: command.id(),
            nsid: command.nsid(),
            command: *command,
            op: plan.op,
            flags: plan.flags,
            stage: CommandStage::Parked,
            block_log2: self.namespaces[&command.nsid()].geometry.block_log2,
            start: plan.start,
            len: plan.len,
            piece: plan.piece,
            flushes: plan.flushes,
            from_host: plan.from_host,
            received,
            charge,
            since: self.now,
            front: Segments::new(),
            rest: data.unwrap_or_default(),
            is_damaged: false,
            is_answered: false,
        });
        let open = self.namespaces.get_mut(&command.nsid()).expect("the command was checked");
        open.in_flight += 1;
        open.io_counters.begin(plan.op);
        let is_failing = open.is_failing;
        let Some(memory) = &mut self.memory else { return };
        if is_failing {
            self.pending[key].charge = 0;
            self.end(key, Status::IoErr, cx);
        } else if received > 0 || charge == 0 {
            memory.take(charge);
            self.proceed(key, cx);
        } else if self.parked.is_empty() && memory.try_take(charge, cx) {
            self.proceed(key, cx);
        } else {
            self.parked.push_back(key);
        }
    }

    /// Starts commands that wait for memory, in order.
    pub(super) fn start_parked(&mut self, cx: &mut FrontCx<'_, '_>) {
        while self.phase == QueuePhase::Serving
            && let Some(key) = self.parked.front().copied()
        {
            let charge = self.pending[key].charge;
            if !self.memory.as_mut().is_some_and(|memory| memory.try_take(charge, cx)) {
                return;
            }
            self.parked.pop_front();
            self.proceed(key, cx);
        }
    }

    /// Asks for the data of a command, or submits its first bio. Its memory is taken.
    fn proceed(&mut self, key: usize, cx: &mut FrontCx<'_, '_>) {
        let pending = &mut self.pending[key];
        if pending.received < pending.from_host {
            pending.stage = CommandStage::Transfer;
            let (command, len) = (pending.id, pending.from_host);
            self.transfers += 1;
            self.host_at = self.now;
            // A queue has at most 128 commands, so the key is a valid tag.
            let data = DataPdu { command, tag: key as u16, offset: 0, len };
            return self.tx.push(QueuedPdu::ReadyToTransfer(data));
        }
        self.launch(key, cx);
    }

    /// Handles data of the host for a pending command.
    pub(super) fn transfer_arrived(
        &mut self,
        key: usize,
        data: Segments,
        is_right: bool,
        cx: &mut FrontCx<'_, '_>,
    ) {
        let Some(pending) = self.pending.get_mut(key) else {
            return return_buffers_to_pool(data, &mut self.writes);
        };
        pending.received += data.len() as u32;
        pending.rest.append(data);
        pending.is_damaged |= !is_right;
        if pending.received < pending.from_host {
            return;
        }
        self.transfers -= 1;
        pending.since = self.now;
        if pending.is_damaged {
            return self.end(key, Status::Transport, cx);
        }
        if self.namespaces.get(&pending.nsid).is_none_or(|open| open.is_failing) {
            return self.end(key, Status::IoErr, cx);
        }
        self.launch(key, cx);
    }

    /// Submits the first bio of a command.
    fn launch(&mut self, key: usize, cx: &mut FrontCx<'_, '_>) {
        if let Err(status) = self.check_dataset_ranges(key) {
            return self.end(key, status, cx);
        }
        let pending = &mut self.pending[key];
        pending.stage = match pending.op {
            Op::Flush => CommandStage::Flush,
            Op::Discard => CommandStage::Dataset { index: 0, done: 0 },
            // The data before a read with FUA must be durable.
            Op::Read if pending.flushes => CommandStage::Flush,
            _ => CommandStage::Range { done: 0 },
        };
        if pending.op == Op::Read {
            pending.rest = self.reads.get_pieces(pending.len as usize);
        }
        let mut bio = self.bios.get().expect("the pool has a bio for each entry of the queue");
        (bio.op, bio.flags, bio.cookie) = (pending.op, pending.flags, key as u64);
        match self.prepare(&mut bio, key) {
            Ok(true) => self.submit(key, bio, cx),
            Ok(false) => {
                self.bios.put(bio);
                self.end(key, Status::Ok, cx);
            }
            Err(status) => {
                self.bios.put(bio);
                self.end(key, status, cx);
            }
        }
    }

    fn submit(&mut self, key: usize, bio: Box<Bio>, cx: &mut FrontCx<'_, '_>) {
        let lane = self.namespaces[&self.pending[key].nsid].lane;
        cx.submit(lane, bio);
    }

    /// Turns `bio` into the next one of command `key`, whose stage is set. Returns false if the
    /// command is complete.
    fn prepare(&mut self, bio: &mut Bio, key: usize) -> Result<bool, Status> {
        let pending = &mut self.pending[key];
        let data = std::mem::take(&mut bio.data);
        match pending.op {
            Op::Read => pending.front.append(data),
            _ => return_buffers_to_pool(data, &mut self.writes),
        }
        let (done, piece) = match pending.stage {
            CommandStage::Range { done } => (done, pending.piece),
            CommandStage::Zeroes { done } => (done, ZEROES_PIECE),
            CommandStage::Dataset { .. } => return self.prepare_discard(bio, key),
            CommandStage::Flush | CommandStage::Parked | CommandStage::Transfer => {
                (bio.op, bio.flags) = (Op::Flush, BioFlags::empty());
                (bio.sector, bio.sectors) = (Sector(0), Sectors::ZERO);
                return Ok(true);
            }
        };
        let len = u64::from(piece).min(pending.len - done);
        (bio.op, bio.flags) = (pending.op, pending.flags);
        bio.sector = Sector((pending.start + done) / udm_core::SECTOR_SIZE);
        bio.sectors = Sectors::from_bytes(len);
        match (pending.op, pending.stage) {
            (Op::Read | Op::Write, _) => bio.data = pending.rest.split_to(len as usize),
            (_, CommandStage::Zeroes { .. }) => {
                (bio.op, bio.flags) = (Op::Write, BioFlags::empty());
                let mut zeroes = self.writes.get(len as usize);
                zeroes.fill(0);
                bio.data = zeroes.into();
            }
            _ => {}
        }
        Ok(true)
    }

    /// Checks each range of a Dataset Management command, before any of them reaches the device.
    fn check_dataset_ranges(&self, key: usize) -> Result<(), Status> {
        let pending = &self.pending[key];
        if pending.op != Op::Discard {
            return Ok(());
        }
        let geometry = &self.namespaces[&pending.nsid].geometry;
        let size = geometry.blocks << geometry.block_log2;
        let mut index = 0;
        while pending.dataset_range(index, size)?.is_some() {
            index += 1;
        }
        Ok(())
    }

    /// As [`NvmeQueue::prepare`], for the next part of a discard.
    fn prepare_discard(&mut self, bio: &mut Bio, key: usize) -> Result<bool, Status> {
        let pending = &mut self.pending[key];
        let geometry = &self.namespaces[&pending.nsid].geometry;
        let CommandStage::Dataset { mut index, mut done } = pending.stage else { return Ok(false) };
        if !DatasetRequest::decode(&pending.command).deallocates || !geometry.can_discard {
            return Ok(false);
        }
        let (start, len) = loop {
            let range = pending.dataset_range(index, geometry.blocks << geometry.block_log2)?;
            let Some((start, len)) = range else { return Ok(false) };
            if done < len {
                break (start + done, len - done);
            }
            (index, done) = (index + 1, 0);
        };
        let len = len.min(u64::from(pending.piece));
        pending.stage = CommandStage::Dataset { index, done: done + len };
        (bio.op, bio.flags) = (Op::Discard, BioFlags::empty());
        bio.sector = Sector(start / udm_core::SECTOR_SIZE);
        bio.sectors = Sectors::from_bytes(len);
        Ok(true)
    }

    /// Handles a completed bio: submits the next one of its command, or queues the answer.
    pub(super) fn finished(&mut self, mut bio: Box<Bio>, cx: &mut FrontCx<'_, '_>) {
        let key = bio.cookie as usize;
        let is_over = self.phase == QueuePhase::Dead || self.pending[key].is_answered;
        let next = if is_over { None } else { self.pending[key].after(&bio) };
        let mut status = bio.status;
        if let Some(stage) = next {
            self.pending[key].stage = stage;
            match self.prepare(&mut bio, key) {
                Ok(true) => return self.submit(key, bio, cx),
                Ok(false) => status = Status::Ok,
                Err(error) => status = error,
            }
        }
        let data = std::mem::take(&mut bio.data);
        match self.pending[key].op {
            Op::Read => self.pending[key].front.append(data),
            _ => return_buffers_to_pool(data, &mut self.writes),
        }
        self.bios.put(bio);
        self.end(key, status, cx);
    }

    /// Ends a command: nothing of it is at the device.
    fn end(&mut self, key: usize, status: Status, cx: &mut FrontCx<'_, '_>) {
        let pending = self.pending.remove(key);
        let took = pending.is_at_device().then(|| self.now.since(pending.since));
        let PendingCommand { id, nsid, op, charge, mut front, rest, is_answered, len, is_damaged, .. } =
            pending;
        front.append(rest);
        let open = self.namespaces.get_mut(&nsid).expect("the namespace is open while it has commands");
        open.in_flight -= 1;
        open.io_counters.end(op);
        if !is_answered {
            open.io_counters.answer(op, len, status.is_ok(), took);
        }
        let is_over = self.phase == QueuePhase::Dead || is_answered;
        if op == Op::Read && status.is_ok() && !is_over {
            return self.respond_with_data(id, front, charge);
        }
        let pool = if op == Op::Read { &mut self.reads } else { &mut self.writes };
        return_buffers_to_pool(front, pool);
        self.give_back(charge, cx);
        if !is_over {
            let is_write = op.is_write();
            let status = match status {
                _ if is_damaged => NvmeStatus::TRANSIENT_TRANSPORT_ERROR,
                // What fails now may have waited for an event that will not occur.
                Status::IoErr if self.ending => NvmeStatus::INTERNAL_PATH_ERROR,
                status => to_nvme(status, is_write),
            };
            self.respond(id, status, 0);
        }
        self.close_gone_namespaces(cx);
    }

    /// Fails the commands of namespaces whose requests must fail.
    pub(super) fn fail_commands(&mut self, cx: &mut FrontCx<'_, '_>) {
        let failing = |queue: &NvmeQueue, nsid| queue.namespaces[&nsid].is_failing;
        let keys: Vec<usize> = self.pending.iter().map(|(key, _)| key).collect();
        for key in keys {
            if !failing(self, self.pending[key].nsid) || self.pending[key].is_answered {
                continue;
            }
            match self.pending[key].stage {
                CommandStage::Parked => {
                    self.parked.retain(|parked| *parked != key);
                    self.pending[key].charge = 0;
                    self.end(key, Status::IoErr, cx);
                }
                // The answer follows the data, which the host is sending.
                CommandStage::Transfer => {}
                _ => {
                    self.pending[key].is_answered = true;
                    let (id, is_write) = (self.pending[key].id, self.pending[key].op.is_write());
                    self.respond(id, to_nvme(Status::IoErr, is_write), 0);
                }
            }
        }
    }

    /// Drops commands that wait for memory or data: the host sends nothing more.
    pub(super) fn abandon_waiting(&mut self, cx: &mut FrontCx<'_, '_>) {
        self.parked.clear();
        self.transfers = 0;
        let waiting = self.pending.iter().filter(|(_, pending)| !pending.is_at_device());
        let keys: Vec<usize> = waiting.map(|(key, _)| key).collect();
        for key in keys {
            let PendingCommand { nsid, op, charge, stage, mut front, rest, .. } = self.pending.remove(key);
            if stage == CommandStage::Transfer {
                self.give_back(charge, cx);
            }
            front.append(rest);
            return_buffers_to_pool(front, &mut self.writes);
            if let Some(open) = self.namespaces.get_mut(&nsid) {
                open.in_flight -= 1;
                open.io_counters.end(op);
            }
        }
    }
}

/// The status of a command whose bio had this status. Errors of the path make the host use another
/// one; other errors are those of the disk on every path.
fn to_nvme(status: Status, is_write: bool) -> NvmeStatus {
    match status {
        Status::Ok => NvmeStatus::SUCCESS,
        Status::NotSupp => NvmeStatus::INVALID_OPCODE.permanent(),
        Status::NoSpace => NvmeStatus::CAPACITY_EXCEEDED.permanent(),
        Status::Timeout | Status::Transport | Status::Requeue | Status::Offline => {
            NvmeStatus::INTERNAL_PATH_ERROR
        }
        Status::ResvConflict => NvmeStatus::RESERVATION_CONFLICT.permanent(),
        Status::Medium if is_write => NvmeStatus::WRITE_FAULT.permanent(),
        Status::Medium => NvmeStatus::UNRECOVERED_READ_ERROR.permanent(),
        Status::Protection => NvmeStatus::GUARD_CHECK_ERROR.permanent(),
        Status::Target => NvmeStatus::INTERNAL_ERROR.permanent(),
        Status::Resource | Status::DevResource | Status::Again => NvmeStatus::NAMESPACE_NOT_READY,
        Status::IoErr => NvmeStatus::INTERNAL_ERROR,
        Status::Inval => NvmeStatus::LBA_OUT_OF_RANGE.permanent(),
        Status::ReadOnly => NvmeStatus::WRITE_PROTECTED.permanent(),
    }
}
