//! Places in the log, and how many entries the superblock counts.
//!
//! Two rules keep the log readable whenever the power fails or the server is killed:
//!
//! * The superblock counts an entry only when that and all before it are on the log.
//! * No entry is written where the superblock counts one. So the first entries wait until an empty
//!   superblock has taken the place of that of an old log, and those behind a resume until the
//!   superblock no longer counts the mark at the end, whose place they take.

use std::ops::Range;
use udm_core::bugs::{self, Bug};
use udm_core::{SECTOR_SIZE, Sectors};
use udm_wire::log_writes::LogEntry;

/// The blocks and the size of a log.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct LogGeometry {
    /// Bytes in a sector of the log: the larger of the logical blocks of the two devices.
    pub(super) sector_size: u32,
    /// Of the log device.
    pub(super) size: Sectors,
}

/// See the module's documentation.
pub(super) struct LogSpace {
    geometry: LogGeometry,
    /// The table is in use: its geometry is fixed.
    started: bool,
    /// The next free place in the log, in sectors of 512 bytes.
    next: u64,
    /// Entries that have a place.
    entries: u64,
    /// Entries before the first that is still being written.
    written: u64,
    /// Ranges of entries that were written before some that precede them.
    early: Vec<Range<u64>>,
    /// The superblock on the log counts this many entries; `None` before the first.
    counted: Option<u64>,
    /// Some lane is writing a superblock with this many.
    counting: Option<u64>,
    /// Where the mark at the end stands, while it is the last entry.
    end: Option<u64>,
    /// Where the place behind that mark is, while the mark is taken back and the superblock may
    /// still count it.
    after_end: Option<u64>,
}

impl LogSpace {
    pub(super) fn new(geometry: LogGeometry) -> LogSpace {
        let mut space = LogSpace {
            geometry,
            started: false,
            next: 0,
            entries: 0,
            written: 0,
            early: Vec::new(),
            counted: None,
            counting: None,
            end: None,
            after_end: None,
        };
        space.next = space.unit();
        space
    }

    /// Sectors of 512 bytes in one of the log.
    fn unit(&self) -> u64 {
        u64::from(self.geometry.sector_size) / SECTOR_SIZE
    }

    /// Takes another geometry, as long as the log is not in use; says which holds.
    pub(super) fn measure(&mut self, now: LogGeometry) -> LogGeometry {
        if !self.started {
            self.geometry = now;
            self.next = self.unit();
        }
        self.geometry
    }

    /// The device goes on: the log begins, or the next entry takes the place of the mark at its
    /// end. One that is still being written stays.
    pub(super) fn start(&mut self) {
        self.started = true;
        if let Some(end) = self.end.take().filter(|_| self.written == self.entries) {
            self.after_end = Some(std::mem::replace(&mut self.next, end));
            self.entries -= 1;
            self.written = self.entries;
        }
    }

    /// How many entries have a place.
    pub(super) fn entries(&self) -> u64 {
        self.entries
    }

    /// The first free sector of 512 bytes.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// A place for `entry`, in sectors of 512 bytes; `None` when there is no room. One that comes
    /// before the log is open (it was in flight when a suspend was called off) leaves the mark at
    /// the end where it is: the superblock may count it.
    pub(super) fn take(&mut self, entry: &LogEntry) -> Option<u64> {
        let open = self.is_open();
        if let Some(next) = self.after_end.take().filter(|_| !open) {
            self.next = next;
            self.entries += 1;
            self.written = self.entries;
        }
        let next = self.next + (1 + entry.data_sectors()) * self.unit();
        if next >= self.geometry.size.0 {
            return None;
        }
        self.entries += 1;
        self.end = None;
        Some(std::mem::replace(&mut self.next, next))
    }

    /// The last entry, which stands at `at`, is the mark at the end.
    pub(super) fn end_with(&mut self, at: u64) {
        self.end = Some(at);
    }

    /// Entries `done` are on the log.
    pub(super) fn mark_written(&mut self, done: Range<u64>) {
        self.early.push(done);
        while let Some(at) = self.early.iter().position(|range| range.start <= self.written) {
            self.written = self.written.max(self.early.swap_remove(at).end);
        }
    }

    /// True when entries may be given places: the superblock counts none that is to come.
    pub(super) fn is_open(&self) -> bool {
        let fits = |entries: u64| entries <= self.entries;
        self.started
            && (self.counted.is_some_and(fits) && self.counting.is_none_or(fits)
                || bugs::on(Bug::CountedEntryOverwritten))
    }

    /// True when the superblock counts all that has a place.
    pub(super) fn is_counted(&self) -> bool {
        self.counted == Some(self.entries)
    }

    /// True when no lane has to begin a count: all is counted, or who is at it looks again.
    pub(super) fn needs_no_count(&self) -> bool {
        self.counting.is_some() || self.counted == Some(self.written)
    }

    /// The number of entries that a superblock should be written with now, by the caller.
    pub(super) fn begin_count(&mut self) -> Option<u64> {
        if !self.started || self.counting.is_some() || self.counted == Some(self.written) {
            return None;
        }
        self.counting = Some(self.written);
        self.counting
    }

    /// The superblock that [`LogSpace::begin_count`] asked for is on the log.
    pub(super) fn end_count(&mut self, entries: u64) {
        self.counting = None;
        self.counted = Some(entries);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use udm_wire::log_writes::EntryFlags;

    /// A log with one entry and the mark at its end, both counted; where the mark stands.
    fn ended() -> (LogSpace, u64) {
        let mut space = LogSpace::new(LogGeometry { sector_size: 512, size: Sectors(64) });
        space.start();
        let count = |space: &mut LogSpace| {
            let entries = space.begin_count().unwrap();
            space.end_count(entries);
        };
        count(&mut space);
        space.take(&entry()).unwrap();
        let mark = space.take(&entry()).unwrap();
        space.end_with(mark);
        space.mark_written(0..2);
        count(&mut space);
        assert!(space.is_counted());
        (space, mark)
    }

    fn entry() -> LogEntry {
        LogEntry { sector: 0, sectors: 1, flags: EntryFlags::empty(), data_len: 0 }
    }

    #[test]
    fn the_first_entry_behind_a_resume_takes_the_place_of_the_mark() {
        let (mut space, mark) = ended();
        space.start();
        assert!(!space.is_open(), "the superblock counts the mark");
        assert_eq!(space.begin_count(), Some(1));
        space.end_count(1);
        assert!(space.is_open());
        assert_eq!((space.take(&entry()), space.entries()), (Some(mark), 2));
    }

    /// A suspend was called off with a request in flight that comes to the log before the
    /// superblock has let go of the mark.
    #[test]
    fn what_comes_before_the_log_is_open_leaves_the_mark() {
        for counting in [false, true] {
            let (mut space, mark) = ended();
            space.start();
            if counting {
                assert_eq!(space.begin_count(), Some(1));
            }
            let at = space.take(&entry()).unwrap();
            assert!(at > mark, "the superblock counts what is at {mark}");
            assert_eq!(space.entries(), 3);
            space.mark_written(2..3);
            if counting {
                space.end_count(1);
            }
            assert_eq!(space.begin_count(), Some(3), "the mark is an entry again, and on the log");
        }
    }
}
