//! The state shared by the cores of a log-writes target: the order of the log.

use super::HELD_MAX;
use super::log_space::{LogGeometry, LogSpace};
use super::unflushed::UnflushedWrites;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use udm_core::errno::{EBUSY, EIO};
use udm_core::{Buf, WaitQueue, interleave};
use udm_dm::TargetError;
use udm_dm::completion::{TargetMessageCompleter, TargetMessageWaitHandle, create_message_completion_pair};
use udm_wire::log_writes::{END_MARK, EntryFlags, LogWritesEntryHeader};

/// A record to be put in the log.
pub(super) struct LogRecord {
    pub(super) entry: LogWritesEntryHeader,
    /// A copy of the written data, or the text of a mark.
    pub(super) data: Option<Buf>,
}

impl LogRecord {
    /// A mark with the text `text`. A mark with an empty text cannot be found again.
    pub(super) fn mark(text: &[u8]) -> LogRecord {
        let data = (!text.is_empty()).then(|| {
            let mut buf = Buf::zeroed(text.len());
            buf.copy_from_slice(text);
            buf
        });
        let entry = LogWritesEntryHeader {
            flags: EntryFlags::MARK,
            data_len: text.len() as u64,
            ..LogWritesEntryHeader::default()
        };
        LogRecord { entry, data }
    }

    /// Bytes of copied writes in this record.
    pub(super) fn held(&self) -> usize {
        let is_mark = self.entry.flags.contains(EntryFlags::MARK);
        if is_mark { 0 } else { self.data.as_ref().map_or(0, Buf::len) }
    }
}

/// A record with its place in the log.
pub(super) struct PlacedLogRecord {
    /// First sector, in sectors of 512 bytes.
    pub(super) at: u64,
    pub(super) append: LogRecord,
}

/// Posted marks and the completers of their messages.
#[derive(Default)]
pub(super) struct PendingLogMarks {
    pub(super) appends: Vec<LogRecord>,
    pub(super) completers: Vec<TargetMessageCompleter>,
}

/// The state of the log.
pub(super) struct WriteLogState {
    pub(super) space: LogSpace,
    pub(super) held: UnflushedWrites,
    /// Marks that no lane has taken yet.
    unlogged_marks: PendingLogMarks,
    /// The completion of the last posted mark.
    last_mark: Option<TargetMessageWaitHandle>,
    /// The device is being suspended.
    closing: bool,
    /// Number of suspends, by which lanes distinguish them.
    closings: u64,
    /// Number of open lanes, and number of lanes that have stopped for this suspend.
    lanes: usize,
    stopped: usize,
    /// A lane is flushing the device before the end mark.
    flushing: bool,
    /// The end mark has its place and no entry follows it.
    closed: bool,
    /// The reason why logging ended.
    ended: Option<&'static str>,
}

/// The state shared by the control half and the lanes.
pub(super) struct SharedWriteLog {
    state: Mutex<WriteLogState>,
    /// Bytes in a sector of the log.
    sector_size: AtomicU32,
    /// Writes are logged.
    enabled: AtomicBool,
    /// The log device failed: its pending work will never complete.
    broken: AtomicBool,
    /// Places may be assigned: the superblock counts no later entry.
    open: AtomicBool,
    /// Number of entries in the superblock on the log, for requests that wait for it.
    counted: AtomicU64,
    /// Lanes have work besides requests: marks, a superblock, the end mark.
    pending_work: AtomicBool,
    /// Bytes of copied writes, changed once per batch.
    held: AtomicUsize,
    /// Requests that are held, have a clone in flight or wait for the log; changed once per
    /// batch.
    in_flight: AtomicUsize,
    /// Woken when a condition has changed that a lane may wait for: memory, the counted entries, or
    /// the progress of the end mark.
    pub(super) wait_queue: Arc<WaitQueue>,
}

impl SharedWriteLog {
    pub(super) fn new(geometry: LogGeometry) -> SharedWriteLog {
        let state = WriteLogState {
            space: LogSpace::new(geometry),
            held: UnflushedWrites::default(),
            unlogged_marks: PendingLogMarks::default(),
            last_mark: None,
            closing: false,
            closings: 0,
            lanes: 0,
            stopped: 0,
            flushing: false,
            closed: false,
            ended: None,
        };
        SharedWriteLog {
            state: Mutex::new(state),
            sector_size: AtomicU32::new(geometry.sector_size),
            enabled: AtomicBool::new(true),
            broken: AtomicBool::new(false),
            open: AtomicBool::new(false),
            counted: AtomicU64::new(0),
            pending_work: AtomicBool::new(false),
            held: AtomicUsize::new(0),
            in_flight: AtomicUsize::new(0),
            wait_queue: Arc::new(WaitQueue::new()),
        }
    }

    /// Locks the state. Not recursive.
    pub(super) fn lock(&self) -> MutexGuard<'_, WriteLogState> {
        interleave::mark_interleave_point();
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Bytes in a sector of the log. Relaxed: the value is fixed before the first request, and the
    /// message that resumes the device orders it.
    pub(super) fn sector_size(&self) -> u32 {
        self.sector_size.load(Ordering::Relaxed)
    }

    /// Sets the geometry if the table is not in use. Returns the valid geometry.
    pub(super) fn measure(&self, now: LogGeometry) -> LogGeometry {
        let mut state = self.lock();
        let holds = state.space.measure(now);
        self.sector_size.store(holds.sector_size, Ordering::Relaxed);
        holds
    }

    pub(super) fn is_enabled(&self) -> bool {
        // Relaxed: a lane that reads an old value only makes a needless copy.
        self.enabled.load(Ordering::Relaxed)
    }

    pub(super) fn is_broken(&self) -> bool {
        // Relaxed: a lane that sees it late waits a little longer.
        self.broken.load(Ordering::Relaxed)
    }

    /// True if places may be assigned. Relaxed: the log is closed only while nothing is in flight,
    /// and a lane that sees it open late waits.
    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    /// Number of entries in the superblock. Acquire pairs with the release in
    /// [`SharedWriteLog::end_count`]: a core that sees the number knows that the superblock is
    /// written.
    pub(super) fn counted(&self) -> u64 {
        self.counted.load(Ordering::Acquire)
    }

    /// True if lanes must check for pending work. Relaxed: the work itself is under the mutex.
    pub(super) fn has_pending_work(&self) -> bool {
        self.pending_work.load(Ordering::Relaxed)
    }

    /// Posts a mark for the lanes to log.
    pub(super) fn post(&self, mark: LogRecord) -> Result<(), TargetError> {
        let mut state = self.lock();
        if let Some(why) = state.ended {
            return Err(TargetError::errno(EIO).because(format!("logging has ended: {why}")));
        }
        if state.closing {
            return Err(TargetError::errno(EBUSY).because("the device is suspended, and its log closed"));
        }
        let (completer, pending) = create_message_completion_pair();
        state.unlogged_marks.appends.push(mark);
        state.unlogged_marks.completers.push(completer);
        state.last_mark = Some(pending);
        self.pending_work.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// The completion of the marks posted so far.
    pub(super) fn marks_pending(&self) -> Option<TargetMessageWaitHandle> {
        self.lock().last_mark.clone()
    }

    /// Called when the device is being suspended, or resumed.
    pub(super) fn set_closing(&self, closing: bool) {
        let mut state = self.lock();
        (state.closing, state.closed) = (closing, false);
        (state.closings, state.stopped) = (state.closings + u64::from(closing), 0);
        if !closing {
            state.space.start();
            self.set_open(&state);
        }
        self.pending_work.store(true, Ordering::Relaxed);
    }

    /// Registers an open lane. Returns the suspend for which it counts as stopped.
    pub(super) fn add_lane(&self) -> u64 {
        let mut state = self.lock();
        state.lanes += 1;
        // A lane that is opened while the device is suspended gets no requests before the resume.
        state.stopped += usize::from(state.closing);
        if state.closing { state.closings } else { 0 }
    }

    /// Removes a lane that stopped for suspend `stopped`. `flushes` is true if the lane had begun
    /// the flush before the end mark.
    pub(super) fn remove_lane(&self, stopped: u64, flushes: bool) {
        let mut state = self.lock();
        state.lanes -= 1;
        state.flushing &= !flushes;
        state.stopped -= usize::from(state.closing && stopped == state.closings);
        self.wait_queue.wake_up();
    }

    /// Records that a lane has stopped. Returns the suspend for which it has; `stopped` is the last
    /// one before.
    pub(super) fn stop_lane(&self, stopped: u64) -> u64 {
        let mut state = self.lock();
        if !state.closing || stopped == state.closings {
            return stopped;
        }
        state.stopped += 1;
        self.wait_queue.wake_up();
        state.closings
    }

    fn set_open(&self, state: &WriteLogState) {
        self.open.store(state.space.is_open(), Ordering::Relaxed);
    }

    /// Bytes of memory left for copies. Relaxed: an approximate limit.
    pub(super) fn room(&self) -> usize {
        match self.held.load(Ordering::Relaxed) {
            0 => usize::MAX,
            held => HELD_MAX.saturating_sub(held),
        }
    }

    /// Adds `bytes` to the held bytes and `requests` to the requests; both may be negative.
    pub(super) fn count(&self, bytes: isize, requests: isize) {
        // Relaxed: counters; wrapping adds of negative numbers are subtractions.
        if bytes != 0 {
            self.held.fetch_add(bytes as usize, Ordering::Relaxed);
        }
        if requests != 0 {
            self.in_flight.fetch_add(requests as usize, Ordering::Relaxed);
        }
        if bytes < 0 || requests < 0 {
            self.wait_queue.wake_up();
        }
    }

    /// Ends logging, with `why` in the kernel's words. Entries that have a place are still written
    /// and counted.
    pub(super) fn disable(&self, state: &mut WriteLogState, why: &'static str) {
        if self.enabled.swap(false, Ordering::Relaxed) {
            tracing::error!("log-writes: {why}");
            state.ended = Some(why);
        }
        self.count(-(state.held.bytes() as isize), 0);
        state.held.clear();
        for completer in std::mem::take(&mut state.unlogged_marks).completers {
            completer.end(unlogged_mark_error(why));
        }
        self.wait_queue.wake_up();
    }

    /// Ends logging after a failure of the log device. Requests that wait for the log complete
    /// without it.
    pub(super) fn fail_log(&self, state: &mut WriteLogState, why: &'static str) {
        self.disable(state, why);
        self.broken.store(true, Ordering::Relaxed);
        self.wait_queue.wake_up();
    }

    /// Assigns places to `appends`, in order. If an entry does not fit, it is dropped and logging
    /// ends.
    pub(super) fn place(
        &self,
        state: &mut WriteLogState,
        appends: &mut Vec<LogRecord>,
        placed: &mut Vec<PlacedLogRecord>,
    ) -> Range<u64> {
        let first = state.space.entries();
        state.closed &= appends.is_empty();
        let mut dropped = 0;
        for append in appends.drain(..) {
            let at = self.is_enabled().then(|| state.space.take(&append.entry)).flatten();
            match at {
                Some(at) => placed.push(PlacedLogRecord { at, append }),
                None => {
                    dropped += append.held();
                    self.disable(state, "Ran out of space on the logdev");
                }
            }
        }
        self.count(-(dropped as isize), 0);
        first..state.space.entries()
    }

    /// Called when the superblock counts `entries`.
    pub(super) fn end_count(&self, state: &mut WriteLogState, entries: u64) {
        state.space.end_count(entries);
        self.counted.store(entries, Ordering::Release);
        self.set_open(state);
        self.wait_queue.wake_up();
    }

    /// The next action for the end of the log.
    pub(super) fn closing(&self, state: &WriteLogState) -> LogSuspendAction {
        if !state.closing {
            return LogSuspendAction::No;
        }
        // This holds even if logging has ended since: a device must not be suspended while its
        // flush is in flight below. The lane that began the flush may have acknowledged the suspend
        // already.
        if state.flushing {
            return LogSuspendAction::Wait;
        }
        if !self.is_enabled() {
            return LogSuspendAction::No;
        }
        match (state.closed, state.space.is_counted()) {
            (true, true) => LogSuspendAction::No,
            (true, false) => LogSuspendAction::Wait,
            // Until all lanes have stopped, more entries may come.
            (false, _) if state.stopped < state.lanes || !self.is_open() => LogSuspendAction::Wait,
            (false, _) if self.in_flight.load(Ordering::Relaxed) > 0 => LogSuspendAction::Wait,
            (false, _) => LogSuspendAction::End,
        }
    }

    /// Records that the caller flushes the device before the end mark; other lanes wait for it.
    pub(super) fn begin_flush(&self, state: &mut WriteLogState) {
        state.flushing = true;
    }

    /// Records that this flush completed, with or without error.
    pub(super) fn end_flush(&self, state: &mut WriteLogState) {
        state.flushing = false;
        self.wait_queue.wake_up();
    }

    /// Assigns a place to the end mark.
    pub(super) fn place_end(
        &self,
        state: &mut WriteLogState,
        placed: &mut Vec<PlacedLogRecord>,
    ) -> Range<u64> {
        let mut mark = vec![LogRecord::mark(END_MARK.as_bytes())];
        let range = self.place(state, &mut mark, placed);
        if !range.is_empty() {
            state.space.end_with(placed.last().map_or(0, |mark| mark.at));
            state.closed = true;
        }
        range
    }

    /// Clears the flag for pending work if there is none.
    pub(super) fn clear_pending_work(&self, state: &WriteLogState) {
        if state.unlogged_marks.appends.is_empty() && !state.closing && state.space.needs_no_count() {
            self.pending_work.store(false, Ordering::Relaxed);
        }
    }
}

/// The error for a mark that will not be in the log.
pub(super) fn unlogged_mark_error(why: &str) -> Result<(), TargetError> {
    Err(TargetError::errno(EIO).because(format!("the mark is not in the log: {why}")))
}

impl WriteLogState {
    /// Holds a completed write.
    pub(super) fn hold(&mut self, append: LogRecord) {
        self.held.push(append);
        self.closed = false;
    }

    /// The reason why logging ended.
    pub(super) fn ended(&self) -> &'static str {
        self.ended.unwrap_or("it ended")
    }

    /// Takes the posted marks, if places may be assigned.
    pub(super) fn take_unlogged_marks(&mut self) -> PendingLogMarks {
        match self.space.is_open() {
            true => std::mem::take(&mut self.unlogged_marks),
            false => PendingLogMarks::default(),
        }
    }
}

/// A lane's action for the end of the log.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum LogSuspendAction {
    /// Nothing: the device is not being suspended, or the end mark is on the log.
    No,
    /// Wait: requests are in flight, or the end mark is being written.
    Wait,
    /// Flush the device and log the held writes, then write the end mark.
    End,
}
