//! The records of a persistent store, written in the order in which chunks were allocated.
//!
//! A lane that has copied chunks calls [`ExceptionRecordWriter::copied`]. One lane at a time has
//! the right to write records ([`ExceptionRecordWriter::begin`]). This lane takes all copied runs
//! of all cores, as far as their sequence numbers are consecutive. It writes their records at once,
//! after a flush that makes their data durable. Records are written in the order in which chunks
//! were allocated, so a crash leaves no holes among them.
//!
//! Written records are durable after the next flush ([`ExceptionRecordWriter::durable`]). If more
//! chunks were copied in the meantime, the flush for their data does this too, so a group costs one
//! flush.
//!
//! Only the lane that has the right uses the state behind the lock, so the lock is never contended.

use crossbeam_queue::SegQueue;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};
use udm_core::{SECTOR_SIZE, interleave};
use udm_wire::cow::{ExceptionStoreLayout, RECORD_LEN, SnapshotException};

/// A run of chunks in the store, consecutive there and in the origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExceptionRun {
    /// Sequence number of the first chunk.
    pub seq: u64,
    /// The first chunk of the origin.
    pub old: u64,
    /// The first chunk of the store.
    pub new: u64,
    /// Number of chunks.
    pub len: u64,
    /// The data is in the store. If false, the chunks were allocated but not used, and their
    /// sequence numbers are skipped.
    pub is_valid: bool,
}

/// Maximum number of records written at once.
const RECORDS_MAX: u64 = 1 << 14;

/// A write of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExceptionRecordWrite {
    /// An area that must be cleared first: its sector and its length in bytes.
    pub clear: Option<(u64, usize)>,
    /// First sector of the write.
    pub sector: u64,
    /// Length of the write in bytes.
    pub len: usize,
    /// Number of records in the write.
    pub records: u64,
}

/// The record writer of one store.
pub(super) struct ExceptionRecordWriter {
    layout: ExceptionStoreLayout,
    /// Bytes of a unit, the smallest write of records.
    unit: usize,
    copied: SegQueue<ExceptionRun>,
    /// A lane has the right to write.
    writing: AtomicBool,
    /// Number of records in the store.
    records: AtomicU64,
    tail: Mutex<ExceptionRecordQueue>,
}

struct ExceptionRecordQueue {
    /// The next sequence number.
    seq: u64,
    /// Runs copied out of order, indexed by sequence number minus `seq`; a run is at the index of
    /// its first chunk.
    early: VecDeque<Option<ExceptionRun>>,
    /// The last unit of records, including records in flight.
    unit: Vec<u8>,
    /// Runs whose records are in flight.
    on_its_way: Vec<ExceptionRun>,
    /// Runs whose records are written but may be in a cache.
    written: Vec<ExceptionRun>,
}

impl ExceptionRecordQueue {
    fn put(&mut self, copied: ExceptionRun) {
        let place = (copied.seq - self.seq) as usize;
        if self.early.len() <= place {
            self.early.resize(place + 1, None);
        }
        self.early[place] = Some(copied);
    }

    /// Advances the sequence number by `turns`.
    fn pass(&mut self, turns: u64) {
        self.seq += turns;
        let known = self.early.len().min(turns as usize);
        self.early.drain(..known);
    }
}

impl ExceptionRecordWriter {
    /// A store with `records` records. `unit` is the content of the unit that the next record is
    /// written to; its length is the unit size.
    pub(super) fn new(layout: ExceptionStoreLayout, records: u64, unit: Vec<u8>) -> ExceptionRecordWriter {
        let len = unit.len();
        let (on_its_way, written) = (Vec::new(), Vec::new());
        let tail = ExceptionRecordQueue { seq: 0, early: VecDeque::new(), unit, on_its_way, written };
        ExceptionRecordWriter {
            layout,
            unit: len,
            copied: SegQueue::new(),
            writing: AtomicBool::new(false),
            records: AtomicU64::new(records),
            tail: Mutex::new(tail),
        }
    }

    /// Number of records in the store. Relaxed: an informational number.
    pub(super) fn records(&self) -> u64 {
        self.records.load(Ordering::Relaxed)
    }

    /// Removes the last `count` records. For a merge: no lane writes records then.
    pub(super) fn take_back(&self, count: u64) {
        self.records.fetch_sub(count, Ordering::Relaxed);
    }

    /// Adds a copied run, whose records may now be written.
    pub(super) fn copied(&self, copied: ExceptionRun) {
        interleave::mark_interleave_point();
        self.copied.push(copied);
    }

    /// Takes the right to write, if there is something to write and no lane has it. If it returns
    /// false, the caller has nothing to do: the lane with the right checks again before it gives
    /// the right up.
    pub(super) fn begin(&self) -> bool {
        // Pairs with the fence in `end`. Either this lane sees that the right is free, or the lane
        // that gives it up sees the run that this lane added.
        fence(Ordering::SeqCst);
        !self.copied.is_empty() && !self.writing.swap(true, Ordering::Acquire)
    }

    /// Gives up the right to write. Returns true if it was taken again.
    pub(super) fn end(&self) -> bool {
        interleave::mark_interleave_point();
        self.writing.store(false, Ordering::Release);
        self.begin()
    }

    /// True if more runs were copied since the last `collect`.
    pub(super) fn has_more(&self) -> bool {
        !self.copied.is_empty()
    }

    fn tail(&self) -> MutexGuard<'_, ExceptionRecordQueue> {
        self.tail.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the next write, from copied runs with consecutive sequence numbers. Only for the
    /// lane with the right.
    pub(super) fn collect(&self) -> Option<ExceptionRecordWrite> {
        let mut tail = self.tail();
        while let Some(copied) = self.copied.pop() {
            tail.put(copied);
        }
        let start = self.records();
        let per_area = self.layout.records();
        let room = (per_area - start % per_area).min(RECORDS_MAX);
        let mut taken = 0;
        while taken < room {
            let Some(mut next) = tail.early.front_mut().and_then(Option::take) else { break };
            if next.is_valid && next.len > room - taken {
                let fits = room - taken;
                let rest = ExceptionRun {
                    seq: next.seq + fits,
                    old: next.old + fits,
                    new: next.new + fits,
                    len: next.len - fits,
                    is_valid: true,
                };
                tail.put(rest);
                next.len = fits;
            }
            tail.pass(next.len);
            if next.is_valid {
                taken += next.len;
                tail.on_its_way.push(next);
            }
        }
        (taken > 0).then(|| self.plan(start, taken))
    }

    fn plan(&self, start: u64, records: u64) -> ExceptionRecordWrite {
        let (area, place) = (start / self.layout.records(), start % self.layout.records());
        let from = place as usize * RECORD_LEN;
        let begin = from - from % self.unit;
        let end = (from + records as usize * RECORD_LEN).next_multiple_of(self.unit);
        let chunk = self.layout.chunk();
        let sector_of = |area| self.layout.area(area) * u64::from(chunk.sectors());
        let fills = place + records == self.layout.records();
        ExceptionRecordWrite {
            clear: fills.then(|| (sector_of(area + 1), chunk.bytes() as usize)),
            sector: sector_of(area) + begin as u64 / SECTOR_SIZE,
            len: end - begin,
            records,
        }
    }

    /// Fills `bytes` with the records of `commit`.
    pub(super) fn fill(&self, commit: &ExceptionRecordWrite, bytes: &mut [u8]) {
        let tail = &mut *self.tail();
        let per_unit = self.unit / RECORD_LEN;
        let place = (self.records() % self.layout.records()) as usize;
        let mut exceptions = tail.on_its_way.iter().flat_map(iter_run_exceptions);
        // Unit by unit: usually there is one, which already has the older records.
        for (unit, at) in bytes.chunks_mut(self.unit).zip(0..) {
            let first = if at == 0 { place % per_unit } else { 0 };
            if first == 0 {
                tail.unit.fill(0);
            }
            for (place, exception) in (first..per_unit).zip(&mut exceptions) {
                exception.encode(&mut tail.unit, place);
            }
            unit.copy_from_slice(&tail.unit);
        }
        debug_assert!(exceptions.next().is_none() && bytes.len() == commit.len);
    }

    /// Drops all copied runs, because the store is invalid. Only for the lane with the right.
    pub(super) fn discard(&self) {
        while self.copied.pop().is_some() {}
        let mut tail = self.tail();
        tail.early.clear();
        tail.on_its_way.clear();
        tail.written.clear();
    }

    /// Called when `commit` was written; it may be in a cache.
    pub(super) fn written(&self, commit: &ExceptionRecordWrite) {
        let tail = &mut *self.tail();
        self.records.store(self.records() + commit.records, Ordering::Relaxed);
        tail.written.append(&mut tail.on_its_way);
    }

    /// Calls `publish` for all written runs, which are durable now.
    pub(super) fn durable(&self, mut publish: impl FnMut(&ExceptionRun)) {
        self.tail().written.drain(..).for_each(|copied| publish(&copied));
    }
}

/// The exceptions of a run.
fn iter_run_exceptions(copied: &ExceptionRun) -> impl Iterator<Item = SnapshotException> {
    let ExceptionRun { old, new, len, .. } = *copied;
    (0..len).map(move |at| SnapshotException { old: old + at, new: new + at })
}

#[cfg(test)]
mod tests {
    use super::*;
    use udm_wire::cow::ChunkSize;

    fn copied(seq: u64, len: u64) -> ExceptionRun {
        ExceptionRun { seq, old: 100 + seq, new: 2 + seq, len, is_valid: true }
    }

    /// Writes all records that can be written. Returns the published runs.
    fn write(commits: &ExceptionRecordWriter, image: &mut [u8]) -> Vec<ExceptionRun> {
        let mut published = Vec::new();
        let mut right = commits.begin();
        while right {
            while let Some(commit) = commits.collect() {
                if let Some((sector, len)) = commit.clear {
                    image[sector as usize * 512..][..len].fill(0);
                }
                let mut bytes = vec![0xee; commit.len];
                commits.fill(&commit, &mut bytes);
                image[commit.sector as usize * 512..][..commit.len].copy_from_slice(&bytes);
                commits.written(&commit);
                if !commits.has_more() {
                    commits.durable(|copied| published.push(*copied));
                }
            }
            right = commits.end();
        }
        published
    }

    #[test]
    fn records_follow_each_other_whatever_was_copied_first() {
        let layout = ExceptionStoreLayout::new(ChunkSize::new(2).unwrap());
        let commits = ExceptionRecordWriter::new(layout, 0, vec![0; 512]);
        let mut image = vec![0xff; 200 * 1024];
        image[1024..2048].fill(0);
        commits.copied(copied(2, 3));
        assert!(write(&commits, &mut image).is_empty(), "0 and 1 come first");
        commits.copied(ExceptionRun { is_valid: false, ..copied(0, 2) });
        assert_eq!(write(&commits, &mut image), [copied(2, 3)]);
        let record = |n: usize| SnapshotException::decode(&image[1024..2048], n);
        assert_eq!(record(0), Some(SnapshotException { old: 102, new: 4 }));
        assert_eq!((record(2), record(3)), (Some(SnapshotException { old: 104, new: 6 }), None));
        // An area has 64 records: 61 more fill it, and the rest goes to the next area.
        commits.copied(copied(5, 70));
        let published = write(&commits, &mut image);
        assert_eq!(published.iter().map(|one| one.len).collect::<Vec<_>>(), [61, 9]);
        let area = |a: u64| &image[layout.area(a) as usize * 1024..][..1024];
        assert_eq!(SnapshotException::decode(area(0), 63), Some(SnapshotException { old: 165, new: 67 }));
        assert_eq!(SnapshotException::decode(area(1), 8), Some(SnapshotException { old: 174, new: 76 }));
        assert_eq!((SnapshotException::decode(area(1), 9), commits.records()), (None, 73));
        // One record at a time, across the end of a unit.
        for seq in 75..120 {
            commits.copied(copied(seq, 1));
            assert_eq!(write(&commits, &mut image), [copied(seq, 1)]);
        }
        let area = &image[layout.area(1) as usize * 1024..][..1024];
        for (n, old) in (166..220).enumerate() {
            assert_eq!(SnapshotException::decode(area, n).unwrap().old, old);
        }
        assert_eq!(SnapshotException::decode(area, 54), None);
    }

    #[test]
    fn one_at_a_time_has_the_right() {
        let layout = ExceptionStoreLayout::new(ChunkSize::new(8).unwrap());
        let commits = ExceptionRecordWriter::new(layout, 0, vec![0; 4096]);
        assert!(!commits.begin(), "nothing to write");
        commits.copied(copied(0, 1));
        assert!(commits.begin() && !commits.begin());
        assert!(commits.collect().is_some());
        assert!(!commits.end(), "what was collected is not there any more");
        commits.copied(copied(1, 1));
        assert!(commits.begin());
        commits.copied(copied(2, 1));
        assert!(commits.end(), "somebody left something");
    }
}
