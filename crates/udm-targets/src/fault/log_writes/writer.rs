//! The part of a log-writes lane that writes to the log device.
//!
//! Entries that got their places together are a group. When they are written, one lane puts their
//! number into the superblock. A log device with a cache is flushed before, so that all counted
//! entries are durable, and the superblock is written with FUA. Then the group is complete: its
//! requests are returned and its marks are answered.

use super::shared::{PlacedLogRecord, SharedWriteLog, WriteLogState, unlogged_mark_error};
use slab::Slab;
use std::ops::Range;
use udm_core::{
    Batch, Bio, BioFlags, BioOwnerId, BioPool, BufPool, Cx, Device, DrainMode, Lane, Op, OwnWork,
    SECTOR_SIZE, Sector, Sectors, Segments,
};
use udm_dm::completion::TargetMessageCompleter;
use udm_wire::log_writes::{EntryFlags, LogWritesSuperblock};

/// Maximum bytes of free copies that a lane keeps.
const FREE_COPY_BYTES: usize = 16 << 20;

/// The cookie of the superblock and of the flushes around it.
const SUPERBLOCK: u64 = u64::MAX;

/// Changes to the shared counts, collected for a batch.
#[derive(Default)]
pub(super) struct LogWritesUsageDelta {
    pub(super) bytes: isize,
    pub(super) requests: isize,
}

/// Entries that got their places together.
struct LogEntryGroup {
    range: Range<u64>,
    /// Number of entries still being written.
    left: usize,
    waits: LogEntryWaiters,
}

/// Requests and marks that wait until their entries are counted.
#[derive(Default)]
pub(super) struct LogEntryWaiters {
    pub(super) acks: Batch,
    pub(super) marks: Vec<TargetMessageCompleter>,
}

/// The stage of a superblock.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SuperblockStage {
    /// The counted entries are being flushed.
    FlushBefore,
    /// The superblock is being written.
    Write,
    /// The superblock is being flushed, because the device has no FUA.
    FlushAfter,
}

pub(super) struct LogWriter {
    log: Box<dyn Lane>,
    owner: BioOwnerId,
    /// The log device has a volatile cache, and it supports FUA.
    cache: bool,
    fua: bool,
    bios: BioPool,
    pub(super) copies: BufPool,
    jobs: Slab<LogEntryGroup>,
    /// Written groups that the superblock does not count yet, by the end of their ranges.
    written: Vec<(u64, LogEntryWaiters)>,
    /// The superblock in flight: its number of entries, and its stage.
    counting: Option<(u64, SuperblockStage)>,
    down: Batch,
    completed: Batch,
}

impl LogWriter {
    pub(super) fn new(log: Box<dyn Lane>, device: &dyn Device, cx: &mut Cx<'_>) -> LogWriter {
        let limits = device.limits();
        // A mapped device may get a cache with its next table, and supports FUA.
        let mapped = device.stacked().is_some();
        LogWriter {
            log,
            owner: cx.new_owner(),
            cache: limits.write_cache || mapped,
            fua: limits.fua || mapped,
            // One bio per entry; the copy memory and the requests in flight limit these.
            bios: BioPool::new(usize::MAX),
            copies: BufPool::new(FREE_COPY_BYTES),
            jobs: Slab::new(),
            written: Vec::new(),
            counting: None,
            down: Batch::new(),
            completed: Batch::new(),
        }
    }

    /// True if a write to the log is in flight, or waits to be counted.
    pub(super) fn is_busy(&self) -> bool {
        !self.jobs.is_empty() || !self.written.is_empty() || self.counting.is_some()
    }

    /// The log device's own work.
    pub(super) fn below(&self) -> OwnWork {
        self.log.own_work()
    }

    fn send(&mut self, op: Op, at: u64, data: Segments, cookie: u64, flags: BioFlags) {
        let mut bio = self.bios.get().expect("the pool has no bound");
        bio.op = op;
        bio.flags = flags;
        bio.owner = self.owner;
        bio.cookie = cookie;
        bio.data = data;
        bio.sector = Sector(at);
        bio.sectors = Sectors::from_bytes(bio.data.len() as u64);
        bio.start();
        self.down.push(bio);
    }

    /// Writes the entries `range`; `poll` then completes `waits`. If there are no entries, for
    /// example because the log is full, `waits` is returned.
    #[must_use]
    pub(super) fn entries(
        &mut self,
        shared: &SharedWriteLog,
        range: Range<u64>,
        placed: &mut Vec<PlacedLogRecord>,
        waits: LogEntryWaiters,
    ) -> LogEntryWaiters {
        if placed.is_empty() {
            return waits;
        }
        let key = self.jobs.insert(LogEntryGroup { range, left: placed.len(), waits }) as u64;
        for PlacedLogRecord { at, append } in placed.drain(..) {
            let mut head = self.copies.get(shared.sector_size() as usize);
            let is_mark = append.entry.flags.contains(EntryFlags::MARK);
            let (text, data) = if is_mark { (append.data, None) } else { (None, append.data) };
            append.entry.encode(text.as_deref().unwrap_or_default(), &mut head);
            let mut entry = Segments::from(head);
            if let Some(data) = data {
                entry.push(data);
            }
            self.send(Op::Write, at, entry, key, BioFlags::empty());
        }
        LogEntryWaiters::default()
    }

    /// Starts a superblock that counts `entries`.
    pub(super) fn superblock(&mut self, shared: &SharedWriteLog, entries: u64) {
        if self.cache {
            self.counting = Some((entries, SuperblockStage::FlushBefore));
            self.send(Op::Flush, 0, Segments::new(), SUPERBLOCK, BioFlags::empty());
        } else {
            self.write_superblock(shared, entries);
        }
    }

    fn write_superblock(&mut self, shared: &SharedWriteLog, entries: u64) {
        let sector_size = shared.sector_size();
        let mut head = self.copies.get(sector_size as usize);
        LogWritesSuperblock { entries, sector_size }.encode(&mut head);
        self.counting = Some((entries, SuperblockStage::Write));
        self.send(Op::Write, 0, Segments::from(head), SUPERBLOCK, BioFlags::FUA);
    }

    /// Advances the superblock after one of its requests has completed.
    fn step_superblock(&mut self, shared: &SharedWriteLog, state: &mut WriteLogState) {
        match self.counting {
            Some((entries, SuperblockStage::FlushBefore)) => self.write_superblock(shared, entries),
            Some((entries, SuperblockStage::Write)) if self.cache && !self.fua => {
                self.counting = Some((entries, SuperblockStage::FlushAfter));
                self.send(Op::Flush, 0, Segments::new(), SUPERBLOCK, BioFlags::empty());
            }
            Some((entries, SuperblockStage::Write | SuperblockStage::FlushAfter)) => {
                self.counting = None;
                shared.end_count(state, entries);
            }
            None => {}
        }
    }

    /// Sends the queued writes. Returns true if there were any.
    pub(super) fn submit(&mut self, cx: &mut Cx<'_>) -> bool {
        let any = !self.down.is_empty();
        if any {
            self.log.submit(&mut self.down, cx);
        }
        any
    }

    /// Processes written entries and counts them in the superblock. Appends to `done` the requests
    /// whose entries are counted. Returns true if some wait for another core, which must count them
    /// or write the entries before them.
    pub(super) fn poll(
        &mut self,
        shared: &SharedWriteLog,
        done: &mut Batch,
        tally: &mut LogWritesUsageDelta,
        cx: &mut Cx<'_>,
    ) -> bool {
        self.log.poll(&mut self.completed, cx);
        if !self.completed.is_empty() {
            let mut state = shared.lock();
            let mut completed = std::mem::take(&mut self.completed);
            for bio in completed.drain(..) {
                self.complete_own(bio, shared, &mut state, tally);
            }
            self.completed = completed;
            if let Some(entries) = state.space.begin_count() {
                self.superblock(shared, entries);
            }
        }
        if !self.written.is_empty() {
            self.complete_waiters(shared, done, tally);
        }
        !self.written.is_empty() && self.counting.is_none()
    }

    fn complete_own(
        &mut self,
        mut bio: Box<Bio>,
        shared: &SharedWriteLog,
        state: &mut WriteLogState,
        tally: &mut LogWritesUsageDelta,
    ) {
        bio.finish();
        let ok = bio.status.is_ok();
        if !ok {
            shared.fail_log(state, "Error writing log block");
        }
        if bio.cookie == SUPERBLOCK {
            match ok {
                true => self.step_superblock(shared, state),
                // The log device failed; no superblock is written any more.
                false => self.counting = None,
            }
        } else {
            tally.bytes -= (bio.data.len() - shared.sector_size() as usize) as isize;
            let job = &mut self.jobs[bio.cookie as usize];
            job.left -= 1;
            if job.left == 0 {
                let LogEntryGroup { range, waits, .. } = self.jobs.remove(bio.cookie as usize);
                let end = range.end;
                if !shared.is_broken() {
                    state.space.mark_written(range);
                }
                // A group without waiters is dropped. A resume may replace the end mark, which is
                // then never counted.
                let waited = !waits.acks.is_empty() || !waits.marks.is_empty();
                if waited {
                    self.written.push((end, waits));
                }
            }
        }
        for buf in std::mem::take(&mut bio.data) {
            self.copies.put(buf);
        }
        self.bios.put(bio);
    }

    /// Completes the waiters whose entries the superblock counts; all waiters if the log is broken.
    fn complete_waiters(
        &mut self,
        shared: &SharedWriteLog,
        done: &mut Batch,
        tally: &mut LogWritesUsageDelta,
    ) {
        let (counted, broken) = (shared.counted(), shared.is_broken());
        for (end, mut waits) in self.written.extract_if(.., |(end, _)| *end <= counted || broken) {
            tally.requests -= waits.acks.len() as isize;
            done.append(&mut waits.acks);
            for completer in waits.marks {
                completer.end(if end <= counted {
                    Ok(())
                } else {
                    unlogged_mark_error("the log device failed")
                });
            }
        }
    }

    /// Drains the log device, so that it completes what it holds back.
    pub(super) fn drain(&mut self, cx: &mut Cx<'_>) {
        self.log.drain(DrainMode::Flush, &mut self.completed, cx);
    }
}

/// The position and length of `bio` in sectors of `sector_size` bytes.
pub(super) fn bio_range_in_log_sectors(bio: &Bio, sector_size: u32) -> (u64, u64) {
    let unit = u64::from(sector_size) / SECTOR_SIZE;
    (bio.sector.0 / unit, bio.sectors.0 / unit)
}
