//! What the cores of a log-writes target share: the order of the log.

use super::HELD_MAX;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use udm_core::{Buf, SECTOR_SIZE, Sectors};
use udm_wire::log_writes::{END_MARK, Entry, EntryFlags};

/// Something that is to be put in the log.
pub(super) struct Append {
    pub(super) entry: Entry,
    /// A copy of what was written, or the text of a mark.
    pub(super) data: Option<Buf>,
}

impl Append {
    /// A mark of `text`, which must not be empty for it to be found again.
    pub(super) fn mark(text: &[u8]) -> Append {
        let data = (!text.is_empty()).then(|| {
            let mut buf = Buf::zeroed(text.len());
            buf.copy_from_slice(text);
            buf
        });
        let entry = Entry { flags: EntryFlags::MARK, data_len: text.len() as u64, ..Entry::default() };
        Append { entry, data }
    }

    /// Bytes of copied writes that it holds.
    pub(super) fn held(&self) -> usize {
        let is_mark = self.entry.flags.contains(EntryFlags::MARK);
        if is_mark { 0 } else { self.data.as_ref().map_or(0, Buf::len) }
    }
}

/// An entry with its place in the log.
pub(super) struct Placed {
    /// Where it starts, in sectors of 512 bytes.
    pub(super) at: u64,
    pub(super) append: Append,
}

/// The mark at the end, and what it would be to take it back.
struct End {
    next: u64,
    entries: u64,
}

/// The state of the log.
pub(super) struct State {
    /// The next free place in the log, in sectors of 512 bytes.
    pub(super) next: u64,
    /// Entries that have a place.
    pub(super) entries: u64,
    /// Entries before the first that is still being written.
    written: u64,
    /// Ranges of entries that were written before some that precede them.
    early: Vec<Range<u64>>,
    /// The superblock on the log counts this many entries; `None` before the first.
    counted: Option<u64>,
    /// Some lane is writing the superblock.
    counting: bool,
    /// Completed writes that no flush has covered yet, in order of their completion.
    held: VecDeque<Append>,
    /// How many writes were ever held before the front of `held`.
    passed: u64,
    /// Marks that no lane has taken yet.
    posted: Vec<Append>,
    /// The device is being suspended.
    closing: bool,
    /// The mark at the end, when it is the last entry.
    end: Option<End>,
    /// Nothing was held since the end was put in its place.
    closed: bool,
}

/// What the halves and the cores share.
pub(super) struct Shared {
    /// Bytes in a sector of the log.
    pub(super) sector_size: u32,
    size: Sectors,
    state: Mutex<State>,
    /// Writes are logged.
    enabled: AtomicBool,
    /// Lanes have something to do besides their requests: marks, a superblock, the end.
    errand: AtomicBool,
    /// Bytes of copied writes, changed once a batch.
    held: AtomicUsize,
    /// Requests that have a clone below or wait for the log, changed once a batch.
    in_flight: AtomicUsize,
}

impl Shared {
    pub(super) fn new(sector_size: u32, size: Sectors) -> Shared {
        let state = State {
            next: u64::from(sector_size) / SECTOR_SIZE,
            entries: 0,
            written: 0,
            early: Vec::new(),
            counted: None,
            counting: false,
            held: VecDeque::new(),
            passed: 0,
            posted: Vec::new(),
            closing: false,
            end: None,
            closed: false,
        };
        Shared {
            sector_size,
            size,
            state: Mutex::new(state),
            enabled: AtomicBool::new(true),
            errand: AtomicBool::new(false),
            held: AtomicUsize::new(0),
            in_flight: AtomicUsize::new(0),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub(super) fn is_enabled(&self) -> bool {
        // Relaxed: a lane that sees it late copies a write in vain.
        self.enabled.load(Ordering::Relaxed)
    }

    /// True when lanes should look for errands. Relaxed: what they find is behind the mutex.
    pub(super) fn has_errand(&self) -> bool {
        self.errand.load(Ordering::Relaxed)
    }

    /// Leaves a mark for the lanes to log.
    pub(super) fn post(&self, mark: Append) {
        if self.is_enabled() {
            let mut state = self.lock();
            state.posted.push(mark);
            self.errand.store(true, Ordering::Relaxed);
        }
    }

    pub(super) fn set_closing(&self, closing: bool) {
        let mut state = self.lock();
        (state.closing, state.closed) = (closing, false);
        self.errand.store(true, Ordering::Relaxed);
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
    }

    /// Ends logging: `why` in the kernel's words.
    pub(super) fn disable(&self, state: &mut State, why: &str) {
        if self.enabled.swap(false, Ordering::Relaxed) {
            tracing::error!("log-writes: {why}");
        }
        let held: usize = state.held.iter().map(Append::held).sum();
        state.passed += state.held.len() as u64;
        state.held.clear();
        state.posted.clear();
        self.count(-(held as isize), 0);
    }

    /// Gives `appends` their places, in order. What no longer fits is dropped and logging ends.
    pub(super) fn place(
        &self,
        state: &mut State,
        appends: &mut Vec<Append>,
        placed: &mut Vec<Placed>,
    ) -> Range<u64> {
        // The mark at the end gives way, unless it is still on its way to the log.
        let end = state.end.take_if(|_| !appends.is_empty());
        if let Some(end) = end.filter(|_| state.written == state.entries) {
            (state.next, state.entries, state.written) = (end.next, end.entries, end.entries);
        }
        let first = state.entries;
        let unit = u64::from(self.sector_size) / SECTOR_SIZE;
        let mut dropped = 0;
        for append in appends.drain(..) {
            let next = state.next + (1 + append.entry.data_sectors()) * unit;
            if !self.is_enabled() || next >= self.size.0 {
                dropped += append.held();
                self.disable(state, "Ran out of space on the logdev");
                continue;
            }
            placed.push(Placed { at: state.next, append });
            state.next = next;
            state.entries += 1;
        }
        self.count(-(dropped as isize), 0);
        first..state.entries
    }
}

impl State {
    /// How many writes have completed so far: what a flush that comes in now covers.
    pub(super) fn completed(&self) -> u64 {
        self.passed + self.held.len() as u64
    }

    /// Holds a completed write.
    pub(super) fn hold(&mut self, append: Append) {
        self.held.push_back(append);
        self.closed = false;
    }

    /// Takes out the writes that a flush covered which came in when `completed` had completed.
    pub(super) fn covered(&mut self, completed: u64) -> impl Iterator<Item = Append> + '_ {
        let count = completed.saturating_sub(self.passed).min(self.held.len() as u64);
        self.passed += count;
        self.held.drain(..count as usize)
    }

    /// True when writes are held.
    pub(super) fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    /// Takes the marks that were posted.
    pub(super) fn take_posted(&mut self, into: &mut Vec<Append>) {
        into.append(&mut self.posted);
    }

    /// Entries `done` are on the log.
    pub(super) fn wrote(&mut self, done: Range<u64>) {
        self.early.push(done);
        while let Some(at) = self.early.iter().position(|range| range.start <= self.written) {
            self.written = self.written.max(self.early.swap_remove(at).end);
        }
    }

    /// The number of entries that a superblock should be written with now, by the caller.
    pub(super) fn begin_count(&mut self) -> Option<u64> {
        let due = !self.counting && self.counted != Some(self.written);
        self.counting |= due;
        due.then_some(self.written)
    }

    /// The superblock that [`State::begin_count`] asked for is on the log.
    pub(super) fn end_count(&mut self, entries: u64) {
        self.counting = false;
        self.counted = Some(entries);
    }
}

/// What a lane should do about the end of the log.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Closing {
    /// Nothing: the device is not being suspended, or the end is on the log.
    No,
    /// Wait: requests are in flight, or the end is on its way.
    Wait,
    /// Make durable what is held, then put the mark at the end.
    End,
}

impl Shared {
    /// What is to be done about the end of the log.
    pub(super) fn closing(&self, state: &State) -> Closing {
        if !state.closing || !self.is_enabled() {
            return Closing::No;
        }
        match (state.closed, state.counted == Some(state.entries)) {
            (true, true) => Closing::No,
            (true, false) => Closing::Wait,
            (false, _) if self.in_flight.load(Ordering::Relaxed) > 0 => Closing::Wait,
            (false, _) => Closing::End,
        }
    }

    /// Gives the mark at the end its place.
    pub(super) fn place_end(&self, state: &mut State, placed: &mut Vec<Placed>) -> Range<u64> {
        let mut mark = vec![Append::mark(END_MARK.as_bytes())];
        let range = self.place(state, &mut mark, placed);
        let end = End { next: placed.last().map_or(state.next, |mark| mark.at), entries: range.start };
        if !range.is_empty() {
            (state.end, state.closed) = (Some(end), true);
        }
        range
    }

    /// Nothing is left to be done besides requests: the next look for errands finds nothing, until someone leaves one.
    pub(super) fn rest(&self, state: &State) {
        if state.posted.is_empty() && state.counted == Some(state.written) && !state.closing {
            self.errand.store(false, Ordering::Relaxed);
        }
    }
}
