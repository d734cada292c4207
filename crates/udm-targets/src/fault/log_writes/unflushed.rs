//! Completed writes that are not in the log yet.

use super::shared::LogRecord;
use std::collections::VecDeque;
use std::ops::Range;
use udm_wire::log_writes::LogWritesEntryHeader;

/// Completed writes and discards that no flush has covered yet, in the order of their completion.
#[derive(Default)]
pub(super) struct UnflushedWrites {
    /// Each record with its sequence number.
    writes: VecDeque<(u64, LogRecord)>,
    /// Number of writes ever held: the next sequence number.
    count: u64,
}

impl UnflushedWrites {
    /// Number of writes completed so far: a flush that arrives now covers them.
    pub(super) fn completed(&self) -> u64 {
        self.count
    }

    /// Holds a completed write.
    pub(super) fn push(&mut self, append: LogRecord) {
        self.writes.push_back((self.count, append));
        self.count += 1;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.writes.is_empty()
    }

    /// Bytes of copies.
    pub(super) fn bytes(&self) -> usize {
        self.writes.iter().map(|(_, append)| append.held()).sum()
    }

    pub(super) fn clear(&mut self) {
        self.writes.clear();
    }

    /// Takes the writes covered by a flush that arrived when `completed` writes had completed.
    pub(super) fn take_covered(&mut self, completed: u64, into: &mut Vec<LogRecord>) {
        while self.writes.front().is_some_and(|(number, _)| *number < completed) {
            into.extend(self.writes.pop_front().map(|(_, append)| append));
        }
    }

    /// Takes the writes that must be in the log before `entry`: those that `entry` overlaps, and
    /// earlier writes that these overlap in turn. Other writes may still be lost in a power cut,
    /// and stay.
    pub(super) fn take_overlapping(&mut self, entry: &LogWritesEntryHeader, into: &mut Vec<LogRecord>) {
        let range = |entry: &LogWritesEntryHeader| entry.sector..entry.sector.saturating_add(entry.sectors);
        let meet = |a: &Range<u64>, b: &Range<u64>| a.start < b.end && b.start < a.end;
        let mut ranges = vec![range(entry)];
        // The hull of all ranges: most writes are outside, and cost two comparisons.
        let mut hull = range(entry);
        let mut taken = Vec::new();
        for (number, append) in self.writes.iter().rev() {
            let own = range(&append.entry);
            if meet(&own, &hull) && ranges.iter().any(|range| meet(range, &own)) {
                hull = hull.start.min(own.start)..hull.end.max(own.end);
                ranges.push(own);
                taken.push(*number);
            }
        }
        if taken.is_empty() {
            return;
        }
        let mut kept = VecDeque::with_capacity(self.writes.len() - taken.len());
        for (number, append) in self.writes.drain(..) {
            // `taken` has the oldest last.
            if taken.pop_if(|next| *next == number).is_some() {
                into.push(append);
            } else {
                kept.push_back((number, append));
            }
        }
        self.writes = kept;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(sector: u64, sectors: u64) -> LogRecord {
        LogRecord {
            entry: LogWritesEntryHeader { sector, sectors, ..LogWritesEntryHeader::default() },
            data: None,
        }
    }

    fn starts(appends: &[LogRecord]) -> Vec<u64> {
        appends.iter().map(|append| append.entry.sector).collect()
    }

    #[test]
    fn what_overlaps_goes_first_and_takes_along_what_it_overlaps() {
        let mut held = UnflushedWrites::default();
        for (sector, sectors) in [(30, 1), (7, 2), (20, 1), (8, 2), (9, 4), (0, 3)] {
            held.push(write(sector, sectors));
        }
        let mut first = Vec::new();
        held.take_overlapping(&write(12, 1).entry, &mut first);
        assert_eq!(starts(&first), [7, 8, 9], "a chain, in order of completion");
        held.take_overlapping(&write(3, 4).entry, &mut first);
        held.take_overlapping(&LogWritesEntryHeader::default(), &mut first);
        assert_eq!(first.len(), 3, "side by side is no overlap, and a bare flush overlaps nothing");
        let mut rest = Vec::new();
        held.take_covered(5, &mut rest);
        assert_eq!(starts(&rest), [30, 20]);
        assert_eq!(held.completed(), 6);
        held.take_covered(6, &mut rest);
        assert!(held.is_empty());
    }

    /// A later write that no taken entry overlaps stays, even if it overlaps a taken entry itself.
    #[test]
    fn what_completed_later_stays() {
        let mut held = UnflushedWrites::default();
        held.push(write(0, 4));
        held.push(write(2, 4));
        let mut first = Vec::new();
        held.take_overlapping(&write(0, 1).entry, &mut first);
        assert_eq!((starts(&first), held.is_empty()), (vec![0], false));
    }
}
