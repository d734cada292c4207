//! What the cores of a log-writes target share: the order of the log.

use super::HELD_MAX;
use super::log_space::{LogGeometry, LogSpace};
use super::unflushed::UnflushedWrites;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use udm_core::bugs::{self, Bug};
use udm_core::errno::{EBUSY, EIO};
use udm_core::{Buf, WaitQueue, interleave};
use udm_dm::TargetError;
use udm_dm::completion::{Completer, CompletionHandle, pending};
use udm_wire::log_writes::{END_MARK, EntryFlags, LogEntry};

/// Something that is to be put in the log.
pub(super) struct LogRecord {
    pub(super) entry: LogEntry,
    /// A copy of what was written, or the text of a mark.
    pub(super) data: Option<Buf>,
}

impl LogRecord {
    /// A mark of `text`, which must not be empty for it to be found again.
    pub(super) fn mark(text: &[u8]) -> LogRecord {
        let data = (!text.is_empty()).then(|| {
            let mut buf = Buf::zeroed(text.len());
            buf.copy_from_slice(text);
            buf
        });
        let entry = LogEntry { flags: EntryFlags::MARK, data_len: text.len() as u64, ..LogEntry::default() };
        LogRecord { entry, data }
    }

    /// Bytes of copied writes that it holds.
    pub(super) fn held(&self) -> usize {
        let is_mark = self.entry.flags.contains(EntryFlags::MARK);
        if is_mark { 0 } else { self.data.as_ref().map_or(0, Buf::len) }
    }
}

/// An entry with its place in the log.
pub(super) struct PlacedRecord {
    /// Where it starts, in sectors of 512 bytes.
    pub(super) at: u64,
    pub(super) append: LogRecord,
}

/// Marks that were given, and those who wait for them.
#[derive(Default)]
pub(super) struct PendingMarks {
    pub(super) appends: Vec<LogRecord>,
    pub(super) promises: Vec<Completer>,
}

/// The state of the log.
pub(super) struct LogState {
    pub(super) space: LogSpace,
    pub(super) held: UnflushedWrites,
    /// Marks that no lane has taken yet.
    unlogged_marks: PendingMarks,
    /// The end of the last mark that was given.
    last_mark: Option<CompletionHandle>,
    /// The device is being suspended.
    closing: bool,
    /// How often it was: lanes tell one suspend from another by it.
    closings: u64,
    /// Lanes that are open, and those of them that take no more requests because of this suspend.
    lanes: usize,
    stopped: usize,
    /// A lane makes durable what is held, for the end.
    flushing: bool,
    /// The end has its place, and nothing came behind it.
    closed: bool,
    /// Why logging ended.
    ended: Option<&'static str>,
}

/// What the halves and the cores share.
pub(super) struct SharedLog {
    state: Mutex<LogState>,
    /// Bytes in a sector of the log.
    sector_size: AtomicU32,
    /// Writes are logged.
    enabled: AtomicBool,
    /// The log device failed: what waits for it waits in vain.
    broken: AtomicBool,
    /// Entries may be given places: the superblock counts none behind them.
    open: AtomicBool,
    /// Entries that the superblock on the log counts, for those who wait for theirs.
    counted: AtomicU64,
    /// Lanes have something to do besides their requests: marks, a superblock, the end.
    pending_work: AtomicBool,
    /// Bytes of copied writes, changed once a batch.
    held: AtomicUsize,
    /// Requests that are parked, have a clone below or wait for the log, changed once a batch.
    in_flight: AtomicUsize,
    /// Rung when something has changed that a lane may wait for: room, what is counted, how far the
    /// end has come.
    pub(super) bell: Arc<WaitQueue>,
}

impl SharedLog {
    pub(super) fn new(geometry: LogGeometry) -> SharedLog {
        let state = LogState {
            space: LogSpace::new(geometry),
            held: UnflushedWrites::default(),
            unlogged_marks: PendingMarks::default(),
            last_mark: None,
            closing: false,
            closings: 0,
            lanes: 0,
            stopped: 0,
            flushing: false,
            closed: false,
            ended: None,
        };
        SharedLog {
            state: Mutex::new(state),
            sector_size: AtomicU32::new(geometry.sector_size),
            enabled: AtomicBool::new(true),
            broken: AtomicBool::new(false),
            open: AtomicBool::new(false),
            counted: AtomicU64::new(0),
            pending_work: AtomicBool::new(false),
            held: AtomicUsize::new(0),
            in_flight: AtomicUsize::new(0),
            bell: Arc::new(WaitQueue::new()),
        }
    }

    /// Never called with the lock held.
    pub(super) fn lock(&self) -> MutexGuard<'_, LogState> {
        interleave::point();
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Bytes in a sector of the log. Relaxed: it is fixed before the first request comes, and the
    /// message that lets requests come orders it.
    pub(super) fn sector_size(&self) -> u32 {
        self.sector_size.load(Ordering::Relaxed)
    }

    /// Takes the blocks and the size that the devices below have now, as long as the table is not
    /// in use; says what holds.
    pub(super) fn measure(&self, now: LogGeometry) -> LogGeometry {
        let mut state = self.lock();
        let holds = state.space.measure(now);
        self.sector_size.store(holds.sector_size, Ordering::Relaxed);
        holds
    }

    pub(super) fn is_enabled(&self) -> bool {
        // Relaxed: a lane that sees it late copies a write in vain.
        self.enabled.load(Ordering::Relaxed)
    }

    pub(super) fn is_broken(&self) -> bool {
        // Relaxed: whoever sees it late waits a little longer.
        self.broken.load(Ordering::Relaxed)
    }

    /// True when entries may be given places. Relaxed: it is closed only while nothing is in
    /// flight, and one that sees it open late waits.
    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    /// Entries that the superblock counts. Acquire pairs with the release in [`SharedLog::end_count`]:
    /// whoever sees the number sees that it is written.
    pub(super) fn counted(&self) -> u64 {
        self.counted.load(Ordering::Acquire)
    }

    /// True when lanes should look for errands. Relaxed: what they find is behind the mutex.
    pub(super) fn has_pending_work(&self) -> bool {
        self.pending_work.load(Ordering::Relaxed)
    }

    /// Leaves a mark for the lanes to log.
    pub(super) fn post(&self, mark: LogRecord) -> Result<(), TargetError> {
        let mut state = self.lock();
        if let Some(why) = state.ended {
            return Err(TargetError::errno(EIO).because(format!("logging has ended: {why}")));
        }
        if state.closing {
            return Err(TargetError::errno(EBUSY).because("the device is suspended, and its log closed"));
        }
        let (promise, pending) = pending();
        state.unlogged_marks.appends.push(mark);
        state.unlogged_marks.promises.push(promise);
        state.last_mark = Some(pending);
        self.pending_work.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Tells when the marks that were given so far are in the log.
    pub(super) fn marks_pending(&self) -> Option<CompletionHandle> {
        self.lock().last_mark.clone()
    }

    /// The device is being suspended, or goes on.
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

    /// A lane is open. Says of which suspend it is known that it takes no requests.
    pub(super) fn add_lane(&self) -> u64 {
        let mut state = self.lock();
        state.lanes += 1;
        // One that is opened while the device is suspended is given nothing before the resume.
        state.stopped += usize::from(state.closing);
        if state.closing { state.closings } else { 0 }
    }

    /// A lane that stopped for suspend `stopped` is being closed; `flushes` when it had begun the
    /// flush for the end.
    pub(super) fn remove_lane(&self, stopped: u64, flushes: bool) {
        let mut state = self.lock();
        state.lanes -= 1;
        state.flushing &= !flushes;
        state.stopped -= usize::from(state.closing && stopped == state.closings);
        self.bell.wake_up();
    }

    /// A lane takes no more requests. Says for which suspend; `stopped` is the one that it stopped
    /// for before.
    pub(super) fn stop_lane(&self, stopped: u64) -> u64 {
        let mut state = self.lock();
        if !state.closing || stopped == state.closings {
            return stopped;
        }
        state.stopped += 1;
        self.bell.wake_up();
        state.closings
    }

    fn set_open(&self, state: &LogState) {
        self.open.store(state.space.is_open(), Ordering::Relaxed);
    }

    /// Room for copies of so many bytes. Relaxed: a bound, not an exact one.
    pub(super) fn room(&self) -> usize {
        match self.held.load(Ordering::Relaxed) {
            0 => usize::MAX,
            held => HELD_MAX.saturating_sub(held),
        }
    }

    /// Counts `bytes` more held bytes and `requests` more requests; negative for fewer.
    pub(super) fn count(&self, bytes: isize, requests: isize) {
        // Relaxed: counters; wrapping adds of negative numbers are subtractions.
        if bytes != 0 {
            self.held.fetch_add(bytes as usize, Ordering::Relaxed);
        }
        if requests != 0 {
            self.in_flight.fetch_add(requests as usize, Ordering::Relaxed);
        }
        if bytes < 0 || requests < 0 {
            self.bell.wake_up();
        }
    }

    /// Ends logging: `why` in the kernel's words. What has its place is still written and counted.
    pub(super) fn disable(&self, state: &mut LogState, why: &'static str) {
        if self.enabled.swap(false, Ordering::Relaxed) {
            tracing::error!("log-writes: {why}");
            state.ended = Some(why);
        }
        self.count(-(state.held.bytes() as isize), 0);
        state.held.clear();
        for promise in std::mem::take(&mut state.unlogged_marks).promises {
            promise.end(mark_refused(why));
        }
        self.bell.wake_up();
    }

    /// Ends logging, and what waits for the log goes on without: the log device failed.
    pub(super) fn fail_log(&self, state: &mut LogState, why: &'static str) {
        self.disable(state, why);
        self.broken.store(true, Ordering::Relaxed);
        self.bell.wake_up();
    }

    /// Gives `appends` their places, in order. What no longer fits is dropped and logging ends.
    pub(super) fn place(
        &self,
        state: &mut LogState,
        appends: &mut Vec<LogRecord>,
        placed: &mut Vec<PlacedRecord>,
    ) -> Range<u64> {
        let first = state.space.entries();
        state.closed &= appends.is_empty();
        let mut dropped = 0;
        for append in appends.drain(..) {
            let at = self.is_enabled().then(|| state.space.take(&append.entry)).flatten();
            match at {
                Some(at) => placed.push(PlacedRecord { at, append }),
                None => {
                    dropped += append.held();
                    self.disable(state, "Ran out of space on the logdev");
                }
            }
        }
        self.count(-(dropped as isize), 0);
        first..state.space.entries()
    }

    /// The superblock counts `entries` now.
    pub(super) fn end_count(&self, state: &mut LogState, entries: u64) {
        state.space.end_count(entries);
        self.counted.store(entries, Ordering::Release);
        self.set_open(state);
        if !bugs::on(Bug::CountNotRung) {
            self.bell.wake_up();
        }
    }

    /// What is to be done about the end of the log.
    pub(super) fn closing(&self, state: &LogState) -> LogEndAction {
        if !state.closing {
            return LogEndAction::No;
        }
        // Also when logging has ended since: a device is not suspended while a flush is below it.
        // The lane that began it may have answered the suspend before.
        if state.flushing {
            return LogEndAction::Wait;
        }
        if !self.is_enabled() {
            return LogEndAction::No;
        }
        match (state.closed, state.space.is_counted()) {
            (true, true) => LogEndAction::No,
            (true, false) => LogEndAction::Wait,
            // Until all lanes have stopped there may be more to come.
            (false, _) if state.stopped < state.lanes || !self.is_open() => LogEndAction::Wait,
            (false, _) if self.in_flight.load(Ordering::Relaxed) > 0 => LogEndAction::Wait,
            (false, _) => LogEndAction::End,
        }
    }

    /// The caller makes durable what is held, for the end; the others wait for it.
    pub(super) fn begin_flush(&self, state: &mut LogState) {
        state.flushing = true;
    }

    /// That flush came back, with or without success.
    pub(super) fn end_flush(&self, state: &mut LogState) {
        state.flushing = false;
        self.bell.wake_up();
    }

    /// Gives the mark at the end its place.
    pub(super) fn place_end(&self, state: &mut LogState, placed: &mut Vec<PlacedRecord>) -> Range<u64> {
        let mut mark = vec![LogRecord::mark(END_MARK.as_bytes())];
        let range = self.place(state, &mut mark, placed);
        if !range.is_empty() {
            state.space.end_with(placed.last().map_or(0, |mark| mark.at));
            state.closed = true;
        }
        range
    }

    /// Nothing is left to be done besides requests: the next look for errands finds nothing, until
    /// someone leaves one.
    pub(super) fn clear_pending_work(&self, state: &LogState) {
        if state.unlogged_marks.appends.is_empty() && !state.closing && state.space.needs_no_count() {
            self.pending_work.store(false, Ordering::Relaxed);
        }
    }
}

/// What those are told whose mark will not be in the log.
pub(super) fn mark_refused(why: &str) -> Result<(), TargetError> {
    Err(TargetError::errno(EIO).because(format!("the mark is not in the log: {why}")))
}

impl LogState {
    /// Holds a write that has completed.
    pub(super) fn hold(&mut self, append: LogRecord) {
        self.held.push(append);
        self.closed = false;
    }

    /// Why logging ended.
    pub(super) fn ended(&self) -> &'static str {
        self.ended.unwrap_or("it ended")
    }

    /// Takes the marks that were posted, when they may be given places.
    pub(super) fn take_unlogged_marks(&mut self) -> PendingMarks {
        match self.space.is_open() {
            true => std::mem::take(&mut self.unlogged_marks),
            false => PendingMarks::default(),
        }
    }
}

/// What a lane should do about the end of the log.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum LogEndAction {
    /// Nothing: the device is not being suspended, or the end is on the log.
    No,
    /// Wait: requests are in flight, or the end is on its way.
    Wait,
    /// Make durable what is held, then put the mark at the end.
    End,
}
