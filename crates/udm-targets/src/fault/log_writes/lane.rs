//! The data path of a log-writes target.
//!
//! Every request that changes the device is sent as a clone with a note of its log entry. A
//! completed write is held, logged, or both.

use super::LogWritesTarget;
use super::shared::{
    LogRecord, LogSuspendAction, PendingLogMarks, PlacedLogRecord, SharedWriteLog, WriteLogState,
    unlogged_mark_error,
};
use super::writer::{LogEntryWaiters, LogWriter, LogWritesUsageDelta, bio_range_in_log_sectors};
use crate::fault::SectorOffsetLane;
use crate::fault::clone_table::InFlightBioClones;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use udm_core::{
    Batch, Bio, BioFlags, BioOwnerId, Buf, Cx, DeviceControlError, DrainMode, Lane, Op, OwnWork, Status,
    WaitQueueSubscription,
};
use udm_wire::log_writes::{EntryFlags, LogWritesEntryHeader};

/// The note of a clone.
struct InFlightLogRecord {
    append: LogRecord,
    /// For a flush: the number of writes completed when it arrived.
    covers: u64,
}

pub(super) struct LogWritesLane {
    under: SectorOffsetLane,
    writer: LogWriter,
    shared: Arc<SharedWriteLog>,
    wait_handle: WaitQueueSubscription,
    discards: bool,
    clones: InFlightBioClones<InFlightLogRecord>,
    /// The owner of the lane's own flush.
    owner: BioOwnerId,
    /// The bio of the lane's own flush while it is not in flight.
    flush: Option<Box<Bio>>,
    /// The number of writes that the own flush in flight covers.
    flush_covers: u64,
    flush_failed: bool,
    /// The own flush in flight is the one before the end mark.
    flushes_end: bool,
    /// The last suspend for which this lane stopped.
    stopped: u64,
    /// Writes and flushes that wait for memory for their copies, or until the log is open.
    held_bios: VecDeque<Box<Bio>>,
    /// Clones that were completed without being sent down.
    ended: Batch,
    scratch: Batch,
    appends: Vec<LogRecord>,
    placed: Vec<PlacedLogRecord>,
}

impl LogWritesLane {
    pub(super) fn open(
        target: &LogWritesTarget,
        cx: &mut Cx<'_>,
    ) -> Result<LogWritesLane, DeviceControlError> {
        let log = target.log.device.open(cx)?;
        Ok(LogWritesLane {
            under: target.under.open(cx)?,
            writer: LogWriter::new(log, &*target.log.device, cx),
            shared: Arc::clone(&target.shared),
            wait_handle: target.shared.wait_queue.subscribe(cx),
            discards: target.discards.load(Ordering::Relaxed),
            clones: InFlightBioClones::new(cx),
            owner: cx.new_owner(),
            flush: Some(Bio::new()),
            flush_covers: 0,
            flush_failed: false,
            flushes_end: false,
            stopped: target.shared.add_lane(),
            held_bios: VecDeque::new(),
            ended: Batch::new(),
            scratch: Batch::new(),
            appends: Vec::new(),
            placed: Vec::new(),
        })
    }

    /// Completes the discards of `batch` if the device supports none. They are offered only for the
    /// log, and logging has ended.
    fn end_discards(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        let mut i = 0;
        while !self.discards && i < batch.len() {
            if batch[i].op == Op::Discard {
                self.ended.push(batch.remove(i));
                cx.wake_now();
            } else {
                i += 1;
            }
        }
    }

    /// The log entry of `bio`.
    fn entry_of(&self, bio: &Bio) -> LogWritesEntryHeader {
        let (sector, sectors) = bio_range_in_log_sectors(bio, self.shared.sector_size());
        let flags = [
            (bio.op == Op::Flush || bio.flags.contains(BioFlags::PREFLUSH), EntryFlags::FLUSH),
            (bio.flags.contains(BioFlags::FUA), EntryFlags::FUA),
            (bio.op == Op::Discard, EntryFlags::DISCARD),
            (bio.flags.contains(BioFlags::META), EntryFlags::METADATA),
        ];
        let flags =
            flags.iter().filter(|(set, _)| *set).fold(EntryFlags::empty(), |all, (_, flag)| all | *flag);
        LogWritesEntryHeader { sector, sectors, flags, data_len: 0 }
    }

    fn copy_of(&mut self, bio: &Bio) -> Option<Buf> {
        if bio.op != Op::Write {
            return None;
        }
        let mut copy = self.writer.copies.get(bio.sectors.bytes() as usize);
        let copied = bio.data.copy_to(&mut copy);
        // For a device that stores no data, a write may have none.
        copy[copied..].fill(0);
        Some(copy)
    }

    /// Sends `bio` down as a clone.
    fn begin(
        &mut self,
        bio: Box<Bio>,
        covers: &mut Option<u64>,
        down: &mut Batch,
        tally: &mut LogWritesUsageDelta,
    ) {
        let flush = bio.op == Op::Flush || bio.flags.contains(BioFlags::PREFLUSH);
        let covers =
            if flush { *covers.get_or_insert_with(|| self.shared.lock().held.completed()) } else { 0 };
        let append = LogRecord { entry: self.entry_of(&bio), data: self.copy_of(&bio) };
        tally.bytes += append.held() as isize;
        tally.requests += 1;
        let ends_here = bio.op == Op::Discard && !self.discards;
        let clone = self.clones.begin(bio, InFlightLogRecord { append, covers });
        if ends_here { self.ended.push(clone) } else { down.push(clone) }
    }

    /// Sends held requests down, as far as there is memory for their copies and the log is open.
    fn unpark(&mut self, tally: &mut LogWritesUsageDelta, cx: &mut Cx<'_>) {
        if self.held_bios.is_empty() {
            return;
        }
        let logging = self.shared.is_enabled();
        if logging && !self.shared.is_open() {
            return;
        }
        let mut room = self.shared.room();
        let (mut down, mut covers) = (Batch::new(), None);
        while let Some(bio) = self.held_bios.front() {
            let bytes = bio_copy_bytes(bio);
            if logging && bytes > room && room < usize::MAX {
                break;
            }
            let Some(bio) = self.held_bios.pop_front() else { break };
            tally.requests -= 1;
            if logging {
                room = room.min(super::HELD_MAX).saturating_sub(bytes);
                self.begin(bio, &mut covers, &mut down, tally);
            } else {
                down.push(bio);
            }
        }
        if !logging {
            self.end_discards(&mut down, cx);
        }
        self.under.submit(&mut down, cx);
    }

    /// Logs `append`, after the held entries that it overlaps. Overlapping entries must be in the
    /// log in the order of their completion. Otherwise a replay would write an older held write
    /// over `append`, a state that no power cut can leave.
    fn log(appends: &mut Vec<LogRecord>, state: &mut WriteLogState, append: LogRecord) {
        state.held.take_overlapping(&append.entry, appends);
        appends.push(append);
    }

    /// Takes completions from the device. Entries that are logged now go to the writer; other
    /// requests go to `done`.
    fn reap_device(&mut self, done: &mut Batch, tally: &mut LogWritesUsageDelta, cx: &mut Cx<'_>) {
        let mut home = std::mem::take(&mut self.scratch);
        self.under.poll(&mut home, cx);
        home.append(&mut self.ended);
        let shared = &*self.shared;
        let mut state = None;
        let mut acks = Batch::new();
        for bio in home.drain(..) {
            if bio.owner == self.owner {
                self.flush_failed = !bio.status.is_ok();
                let state = state.get_or_insert_with(|| shared.lock());
                if bio.status.is_ok() {
                    state.held.take_covered(self.flush_covers, &mut self.appends);
                }
                if std::mem::take(&mut self.flushes_end) {
                    shared.end_flush(state);
                }
                self.flush.insert(bio).finish();
                continue;
            }
            if !self.clones.is_mine(&bio) {
                done.push(bio);
                continue;
            }
            let (bio, InFlightLogRecord { append, covers }) = self.clones.end(bio);
            if !bio.status.is_ok() || !shared.is_enabled() {
                tally.bytes -= append.held() as isize;
                tally.requests -= 1;
                done.push(bio);
                continue;
            }
            let state = state.get_or_insert_with(|| shared.lock());
            let flags = append.entry.flags;
            if flags.contains(EntryFlags::FLUSH) {
                state.held.take_covered(covers, &mut self.appends);
            }
            if flags.intersects(EntryFlags::FLUSH | EntryFlags::FUA) {
                Self::log(&mut self.appends, state, append);
                acks.push(bio);
            } else {
                state.hold(append);
                tally.requests -= 1;
                done.push(bio);
            }
        }
        self.scratch = home;
        if let Some(mut state) = state {
            let range = shared.place(&mut state, &mut self.appends, &mut self.placed);
            drop(state);
            let waits = LogEntryWaiters { acks, ..LogEntryWaiters::default() };
            let mut waits = self.writer.entries(shared, range, &mut self.placed, waits);
            tally.requests -= waits.acks.len() as isize;
            done.append(&mut waits.acks);
        }
    }

    /// Flushes the device on behalf of the target, to make completed writes durable.
    fn flush(&mut self, covers: u64, cx: &mut Cx<'_>) {
        let Some(mut bio) = self.flush.take() else { return };
        bio.op = Op::Flush;
        bio.owner = self.owner;
        bio.start();
        self.flush_covers = covers;
        let mut down = std::mem::take(&mut self.scratch);
        down.push(bio);
        self.under.submit(&mut down, cx);
        self.scratch = down;
    }

    /// Does the pending work besides requests: marks, memory for copies, the end of the log, the
    /// superblock. Returns true if the lane must wait for other lanes.
    fn do_pending_work(&mut self, cx: &mut Cx<'_>) -> bool {
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock();
        self.log_marks(&mut state);
        let mut covers = None;
        if !self.held_bios.is_empty() {
            if self.flush_failed {
                shared.disable(&mut state, "The device can't be flushed, and too much is held");
            } else if !state.held.is_empty() && shared.is_open() {
                covers = Some(state.held.completed());
            }
        }
        let mut waits = !self.held_bios.is_empty();
        match shared.closing(&state) {
            LogSuspendAction::No => self.flush_failed &= !self.held_bios.is_empty(),
            LogSuspendAction::Wait => waits = true,
            LogSuspendAction::End if !state.held.is_empty() && !self.flush_failed => {
                covers = Some(state.held.completed());
                if self.flush.is_some() {
                    self.flushes_end = true;
                    shared.begin_flush(&mut state);
                }
            }
            LogSuspendAction::End => {
                let range = shared.place_end(&mut state, &mut self.placed);
                let _nobody_waits =
                    self.writer.entries(&shared, range, &mut self.placed, LogEntryWaiters::default());
            }
        }
        if let Some(entries) = state.space.begin_count() {
            self.writer.superblock(&shared, entries);
        }
        shared.clear_pending_work(&state);
        drop(state);
        if let Some(covers) = covers {
            self.flush(covers, cx);
            // The device below may be suspended and hand the flush back in a drain; this happens in
            // the next turn.
            cx.wake_now();
        }
        waits
    }

    /// Assigns places to the posted marks.
    fn log_marks(&mut self, state: &mut WriteLogState) {
        let PendingLogMarks { appends, completers } = state.take_unlogged_marks();
        for (mark, completer) in appends.into_iter().zip(completers) {
            let range = self.shared.place(state, &mut vec![mark], &mut self.placed);
            let waits = LogEntryWaiters { marks: vec![completer], ..LogEntryWaiters::default() };
            let waits = self.writer.entries(&self.shared, range, &mut self.placed, waits);
            // There was no room for the mark.
            for completer in waits.marks {
                completer.end(unlogged_mark_error(state.ended()));
            }
        }
    }
}

impl Drop for LogWritesLane {
    fn drop(&mut self) {
        self.shared.remove_lane(self.stopped, self.flushes_end);
    }
}

/// Bytes that a copy of `bio` needs.
fn bio_copy_bytes(bio: &Bio) -> usize {
    if bio.op == Op::Write { bio.sectors.bytes() as usize } else { 0 }
}

impl Lane for LogWritesLane {
    fn submit(&mut self, batch: &mut Batch, cx: &mut Cx<'_>) {
        if !self.shared.is_enabled() {
            self.end_discards(batch, cx);
            self.under.submit(batch, cx);
            return;
        }
        let mut tally = LogWritesUsageDelta::default();
        let mut down = std::mem::take(&mut self.scratch);
        let mut covers = None;
        let (open, mut room) = (self.shared.is_open(), self.shared.room());
        for mut bio in batch.drain(..) {
            match bio.op {
                Op::Read => down.push(bio),
                Op::WriteZeroes => {
                    bio.end_with(Status::NotSupp);
                    self.ended.push(bio);
                }
                _ if !open || !self.held_bios.is_empty() || bio_copy_bytes(&bio) > room => {
                    tally.requests += 1;
                    self.held_bios.push_back(bio);
                    cx.wake_now();
                }
                _ => {
                    room = room.min(super::HELD_MAX).saturating_sub(bio_copy_bytes(&bio));
                    self.begin(bio, &mut covers, &mut down, &mut tally);
                }
            }
        }
        self.shared.count(tally.bytes, tally.requests);
        self.under.submit(&mut down, cx);
        self.scratch = down;
        if !self.ended.is_empty() {
            // The ended bios need a poll, and no external event will cause one.
            cx.wake_now();
        }
    }

    fn poll(&mut self, done: &mut Batch, cx: &mut Cx<'_>) {
        let seen = self.wait_handle.epoch();
        let mut tally = LogWritesUsageDelta::default();
        self.unpark(&mut tally, cx);
        self.reap_device(done, &mut tally, cx);
        self.writer.submit(cx);
        let mut waits = self.writer.poll(&self.shared, done, &mut tally, cx);
        self.shared.count(tally.bytes, tally.requests);
        if self.shared.has_pending_work() || !self.held_bios.is_empty() {
            waits |= self.do_pending_work(cx);
        }
        if waits {
            self.wait_handle.wait(seen, cx);
        }
        // A superblock after the entries just written, or pending work: no other call would send
        // it.
        if self.writer.submit(cx) {
            // It may have completed during the submit.
            cx.wake_now();
        }
    }

    fn drain(&mut self, how: DrainMode, back: &mut Batch, cx: &mut Cx<'_>) {
        let mut tally = LogWritesUsageDelta::default();
        let mut home = std::mem::take(&mut self.scratch);
        self.under.drain(how, &mut home, cx);
        for bio in home.drain(..) {
            if bio.owner == self.owner {
                self.flush_failed = true;
                if std::mem::take(&mut self.flushes_end) {
                    self.shared.end_flush(&mut self.shared.lock());
                }
                self.flush.insert(bio).finish();
            } else if self.clones.is_mine(&bio) {
                let (bio, note) = self.clones.end(bio);
                tally.bytes -= note.append.held() as isize;
                tally.requests -= 1;
                back.push(bio);
            } else {
                back.push(bio);
            }
        }
        self.scratch = home;
        if how == DrainMode::NoFlush {
            tally.requests -= self.held_bios.len() as isize;
            back.extend(self.held_bios.drain(..));
        }
        self.shared.count(tally.bytes, tally.requests);
        self.stopped = self.shared.stop_lane(self.stopped);
        self.writer.drain(cx);
    }

    fn own_work(&self) -> OwnWork {
        let pending_work = || {
            self.shared.has_pending_work() && self.shared.closing(&self.shared.lock()) != LogSuspendAction::No
        };
        let below = self.under.own_work().max(self.writer.below());
        if self.flush.is_none() || self.writer.is_busy() || pending_work() {
            OwnWork::Required
        } else {
            below
        }
    }
}
