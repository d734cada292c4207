//! The records of a persistent store: what was copied, on its way to the disk, in turn.
//!
//! Whoever has copied a chunk says so ([`RecordCommits::copied`]). One lane at a time has the right to
//! write records ([`RecordCommits::begin`]): it takes all that have been copied since, from all cores, as
//! far as they follow each other, and writes them at once, behind a flush that makes their data
//! durable. Records go into the store in the order in which its chunks were given out, so a crash
//! leaves no holes among them.
//!
//! What was written is durable behind the next flush ([`RecordCommits::durable`]). Where more has been
//! copied meanwhile that is the flush for the data of those, so that a group costs one.
//!
//! A lane that has the right holds what is behind the lock; the others never try it.

use crossbeam_queue::SegQueue;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};
use udm_core::{SECTOR_SIZE, interleave};
use udm_wire::cow::{Exception, RECORD_LEN, StoreLayout};

/// Chunks that are in the store, behind each other there as in the origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CopiedRun {
    /// The turn of the first.
    pub seq: u64,
    /// The first chunk of the origin.
    pub old: u64,
    /// The first chunk of the store.
    pub new: u64,
    /// How many.
    pub len: u64,
    /// They are there. False for chunks that were given out in vain: their turn passes.
    pub kept: bool,
}

/// The most records that go to the store at once.
const RECORDS_MAX: u64 = 1 << 14;

/// What is to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RecordWrite {
    /// An area that has to be zero before: its sector and its length in bytes.
    pub clear: Option<(u64, usize)>,
    /// Where the records go.
    pub sector: u64,
    /// How many bytes.
    pub len: usize,
    /// How many records there are among them.
    pub records: u64,
}

/// See the module's documentation.
pub(super) struct RecordCommits {
    layout: StoreLayout,
    /// Bytes that are written at once.
    unit: usize,
    copied: SegQueue<CopiedRun>,
    /// A lane has the right.
    writing: AtomicBool,
    /// Records in the store.
    records: AtomicU64,
    tail: Mutex<RecordTail>,
}

struct RecordTail {
    /// Whose turn it is.
    seq: u64,
    /// What was copied before its turn: a place a turn, from `seq` on; a run is in the place of
    /// its first.
    early: VecDeque<Option<CopiedRun>>,
    /// The last unit of records: what is in the store, and what is on its way there.
    unit: Vec<u8>,
    /// What is on its way there.
    on_its_way: Vec<CopiedRun>,
    /// What is there, and may be in a cache.
    written: Vec<CopiedRun>,
}

impl RecordTail {
    fn put(&mut self, copied: CopiedRun) {
        let place = (copied.seq - self.seq) as usize;
        if self.early.len() <= place {
            self.early.resize(place + 1, None);
        }
        self.early[place] = Some(copied);
    }

    /// So many turns are over.
    fn pass(&mut self, turns: u64) {
        self.seq += turns;
        let known = self.early.len().min(turns as usize);
        self.early.drain(..known);
    }
}

impl RecordCommits {
    /// A store with `records` records, the last of them in `unit`: the unit of the area that the
    /// next record goes to, of as many bytes as are written at once.
    pub(super) fn new(layout: StoreLayout, records: u64, unit: Vec<u8>) -> RecordCommits {
        let len = unit.len();
        let (on_its_way, written) = (Vec::new(), Vec::new());
        let tail = RecordTail { seq: 0, early: VecDeque::new(), unit, on_its_way, written };
        RecordCommits {
            layout,
            unit: len,
            copied: SegQueue::new(),
            writing: AtomicBool::new(false),
            records: AtomicU64::new(records),
            tail: Mutex::new(tail),
        }
    }

    /// Records in the store. Relaxed: a number to look at.
    pub(super) fn records(&self) -> u64 {
        self.records.load(Ordering::Relaxed)
    }

    /// The last `count` records are not there any more. For a merge: nobody commits meanwhile.
    pub(super) fn take_back(&self, count: u64) {
        self.records.fetch_sub(count, Ordering::Relaxed);
    }

    /// These are in the store, and their records may go there.
    pub(super) fn copied(&self, copied: CopiedRun) {
        interleave::point();
        self.copied.push(copied);
    }

    /// Takes the right to write, when there is something to write and nobody has it. Who is told
    /// false has nothing to do: whoever has the right looks again before it gives it up.
    pub(super) fn begin(&self) -> bool {
        // Pairs with the fence in `end`: either this lane sees that the right is free, or the one
        // that gives it up sees what this one has left.
        fence(Ordering::SeqCst);
        !self.copied.is_empty() && !self.writing.swap(true, Ordering::Acquire)
    }

    /// Gives it up; true when it should be taken again.
    pub(super) fn end(&self) -> bool {
        interleave::point();
        self.writing.store(false, Ordering::Release);
        self.begin()
    }

    /// True when more has been copied than was collected.
    pub(super) fn has_more(&self) -> bool {
        !self.copied.is_empty()
    }

    fn tail(&self) -> MutexGuard<'_, RecordTail> {
        self.tail.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is to be written now: takes what has been copied, as far as its turn has come. By who
    /// has the right.
    pub(super) fn collect(&self) -> Option<RecordWrite> {
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
            if next.kept && next.len > room - taken {
                let fits = room - taken;
                let rest = CopiedRun {
                    seq: next.seq + fits,
                    old: next.old + fits,
                    new: next.new + fits,
                    len: next.len - fits,
                    kept: true,
                };
                tail.put(rest);
                next.len = fits;
            }
            tail.pass(next.len);
            if next.kept {
                taken += next.len;
                tail.on_its_way.push(next);
            }
        }
        (taken > 0).then(|| self.plan(start, taken))
    }

    fn plan(&self, start: u64, records: u64) -> RecordWrite {
        let (area, place) = (start / self.layout.records(), start % self.layout.records());
        let from = place as usize * RECORD_LEN;
        let begin = from - from % self.unit;
        let end = (from + records as usize * RECORD_LEN).next_multiple_of(self.unit);
        let chunk = self.layout.chunk();
        let sector_of = |area| self.layout.area(area) * u64::from(chunk.sectors());
        let fills = place + records == self.layout.records();
        RecordWrite {
            clear: fills.then(|| (sector_of(area + 1), chunk.bytes() as usize)),
            sector: sector_of(area) + begin as u64 / SECTOR_SIZE,
            len: end - begin,
            records,
        }
    }

    /// Writes the records of `commit` into `bytes`, which is as long.
    pub(super) fn fill(&self, commit: &RecordWrite, bytes: &mut [u8]) {
        let tail = &mut *self.tail();
        let per_unit = self.unit / RECORD_LEN;
        let place = (self.records() % self.layout.records()) as usize;
        let mut exceptions = tail.on_its_way.iter().flat_map(exceptions);
        // Unit by unit: mostly it is one, and all before the new ones is there already.
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

    /// Lets go of all that was copied: the store is invalid. By who has the right.
    pub(super) fn discard(&self) {
        while self.copied.pop().is_some() {}
        let mut tail = self.tail();
        tail.early.clear();
        tail.on_its_way.clear();
        tail.written.clear();
    }

    /// `commit` was written; it may be in a cache.
    pub(super) fn written(&self, commit: &RecordWrite) {
        let tail = &mut *self.tail();
        self.records.store(self.records() + commit.records, Ordering::Relaxed);
        tail.written.append(&mut tail.on_its_way);
    }

    /// All that was written is durable: calls `publish` for it.
    pub(super) fn durable(&self, mut publish: impl FnMut(&CopiedRun)) {
        self.tail().written.drain(..).for_each(|copied| publish(&copied));
    }
}

/// The exceptions of a run.
fn exceptions(copied: &CopiedRun) -> impl Iterator<Item = Exception> {
    let CopiedRun { old, new, len, .. } = *copied;
    (0..len).map(move |at| Exception { old: old + at, new: new + at })
}

#[cfg(test)]
mod tests {
    use super::*;
    use udm_wire::cow::ChunkSize;

    fn copied(seq: u64, len: u64) -> CopiedRun {
        CopiedRun { seq, old: 100 + seq, new: 2 + seq, len, kept: true }
    }

    /// Writes all that can be; what was published.
    fn write(commits: &RecordCommits, image: &mut [u8]) -> Vec<CopiedRun> {
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
        let layout = StoreLayout::new(ChunkSize::new(2).unwrap());
        let commits = RecordCommits::new(layout, 0, vec![0; 512]);
        let mut image = vec![0xff; 200 * 1024];
        image[1024..2048].fill(0);
        commits.copied(copied(2, 3));
        assert!(write(&commits, &mut image).is_empty(), "0 and 1 come first");
        commits.copied(CopiedRun { kept: false, ..copied(0, 2) });
        assert_eq!(write(&commits, &mut image), [copied(2, 3)]);
        let record = |n: usize| Exception::decode(&image[1024..2048], n);
        assert_eq!(record(0), Some(Exception { old: 102, new: 4 }));
        assert_eq!((record(2), record(3)), (Some(Exception { old: 104, new: 6 }), None));
        // 64 records an area: 61 more fill it, and go on in the next.
        commits.copied(copied(5, 70));
        let published = write(&commits, &mut image);
        assert_eq!(published.iter().map(|one| one.len).collect::<Vec<_>>(), [61, 9]);
        let area = |a: u64| &image[layout.area(a) as usize * 1024..][..1024];
        assert_eq!(Exception::decode(area(0), 63), Some(Exception { old: 165, new: 67 }));
        assert_eq!(Exception::decode(area(1), 8), Some(Exception { old: 174, new: 76 }));
        assert_eq!((Exception::decode(area(1), 9), commits.records()), (None, 73));
        // One at a time, over the end of a unit.
        for seq in 75..120 {
            commits.copied(copied(seq, 1));
            assert_eq!(write(&commits, &mut image), [copied(seq, 1)]);
        }
        let area = &image[layout.area(1) as usize * 1024..][..1024];
        for (n, old) in (166..220).enumerate() {
            assert_eq!(Exception::decode(area, n).unwrap().old, old);
        }
        assert_eq!(Exception::decode(area, 54), None);
    }

    #[test]
    fn one_at_a_time_has_the_right() {
        let layout = StoreLayout::new(ChunkSize::new(8).unwrap());
        let commits = RecordCommits::new(layout, 0, vec![0; 4096]);
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
