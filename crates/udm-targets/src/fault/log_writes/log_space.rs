//! Places in the log, and the number of entries that the superblock counts.
//!
//! Two rules keep the log readable after a power cut or a kill of the server at any time:
//!
//! * The superblock counts an entry only if that entry and all before it are on the log.
//! * No entry is written to a place that the superblock counts. So the first entries wait until an
//!   empty superblock has replaced that of an old log. Entries after a resume replace the end mark,
//!   so they wait until the superblock no longer counts the mark.

use std::ops::Range;
use udm_core::{SECTOR_SIZE, Sectors};
use udm_wire::log_writes::LogWritesEntryHeader;

/// The block size and the size of a log.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct LogGeometry {
    /// Bytes in a sector of the log: the larger logical block of the two devices.
    pub(super) sector_size: u32,
    /// Size of the log device.
    pub(super) size: Sectors,
}

/// The allocation state of a log.
pub(super) struct LogSpace {
    geometry: LogGeometry,
    /// The table is in use, so its geometry is fixed.
    started: bool,
    /// The next free place in the log, in sectors of 512 bytes.
    next: u64,
    /// Number of entries that have a place.
    entries: u64,
    /// Number of entries before the first that is still being written.
    written: u64,
    /// Ranges of entries that were written before preceding entries.
    early: Vec<Range<u64>>,
    /// The number of entries in the superblock on the log; `None` before the first superblock.
    counted: Option<u64>,
    /// The number of entries in the superblock that a lane is writing.
    counting: Option<u64>,
    /// The place of the end mark, while it is the last entry.
    end: Option<u64>,
    /// The place after the end mark, while the mark is being replaced and the superblock may still
    /// count it.
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

    /// Sectors of 512 bytes per sector of the log.
    fn unit(&self) -> u64 {
        u64::from(self.geometry.sector_size) / SECTOR_SIZE
    }

    /// Sets the geometry if the log is not in use. Returns the valid geometry.
    pub(super) fn measure(&mut self, now: LogGeometry) -> LogGeometry {
        if !self.started {
            self.geometry = now;
            self.next = self.unit();
        }
        self.geometry
    }

    /// Called by a resume: the log begins, or the next entry replaces the end mark. An end mark
    /// that is still being written stays.
    pub(super) fn start(&mut self) {
        self.started = true;
        if let Some(end) = self.end.take().filter(|_| self.written == self.entries) {
            self.after_end = Some(std::mem::replace(&mut self.next, end));
            self.entries -= 1;
            self.written = self.entries;
        }
    }

    /// Number of entries that have a place.
    pub(super) fn entries(&self) -> u64 {
        self.entries
    }

    /// The first free sector of 512 bytes.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Assigns a place to `entry`, in sectors of 512 bytes; `None` if there is no room. If the log
    /// is not open (the entry was in flight when a suspend was cancelled), the end mark stays,
    /// because the superblock may count it.
    pub(super) fn take(&mut self, entry: &LogWritesEntryHeader) -> Option<u64> {
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

    /// Records that the last entry, at `at`, is the end mark.
    pub(super) fn end_with(&mut self, at: u64) {
        self.end = Some(at);
    }

    /// Records that the entries `done` are on the log.
    pub(super) fn mark_written(&mut self, done: Range<u64>) {
        self.early.push(done);
        while let Some(at) = self.early.iter().position(|range| range.start <= self.written) {
            self.written = self.written.max(self.early.swap_remove(at).end);
        }
    }

    /// True if places may be assigned: the superblock counts no future entry.
    pub(super) fn is_open(&self) -> bool {
        let fits = |entries: u64| entries <= self.entries;
        self.started && self.counted.is_some_and(fits) && self.counting.is_none_or(fits)
    }

    /// True if the superblock counts all entries that have a place.
    pub(super) fn is_counted(&self) -> bool {
        self.counted == Some(self.entries)
    }

    /// True if no lane must write a superblock: all entries are counted, or the lane that writes
    /// one checks again.
    pub(super) fn needs_no_count(&self) -> bool {
        self.counting.is_some() || self.counted == Some(self.written)
    }

    /// Returns the number of entries for a superblock that the caller must write now.
    pub(super) fn begin_count(&mut self) -> Option<u64> {
        if !self.started || self.counting.is_some() || self.counted == Some(self.written) {
            return None;
        }
        self.counting = Some(self.written);
        self.counting
    }

    /// Called when the superblock of [`LogSpace::begin_count`] is on the log.
    pub(super) fn end_count(&mut self, entries: u64) {
        self.counting = None;
        self.counted = Some(entries);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use udm_wire::log_writes::EntryFlags;

    /// A log with one entry and the end mark, both counted. Returns the place of the mark.
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

    fn entry() -> LogWritesEntryHeader {
        LogWritesEntryHeader { sector: 0, sectors: 1, flags: EntryFlags::empty(), data_len: 0 }
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

    /// A suspend is cancelled while a request is in flight. The request is logged before the
    /// superblock stops counting the mark.
    #[test]
    fn what_comes_before_the_log_is_open_leaves_the_mark() {
        for counting in [false, true] {
            let (mut space, mark) = ended();
            space.start();
            if counting {
                assert_eq!(space.begin_count(), Some(1));
            }
            let at = space.take(&entry()).unwrap();
            assert!(at > mark, "the superblock counts the entry at {mark}");
            assert_eq!(space.entries(), 3);
            space.mark_written(2..3);
            if counting {
                space.end_count(1);
            }
            assert_eq!(space.begin_count(), Some(3), "the mark is an entry again, and is in the log");
        }
    }
}
