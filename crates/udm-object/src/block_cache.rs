//! The task of an object: joins reads to ranges, reads ahead, and keeps blocks.
//!
//! The object is read in blocks of [`BLOCK`] bytes. A block that several reads need is requested
//! once. Adjacent blocks that wait are requested as one range. A read that continues an earlier one
//! makes the task request the following blocks too; their number doubles with each such read. Reads
//! go before blocks read ahead.

use crate::client::RuntimeThread;
use crate::failure::ReadFailure;
use crate::source::{FETCHES_MAX, ObjectSource};
use bytes::Bytes;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use udm_core::{ReplySender, Status};

/// Bytes in a block.
pub(crate) const BLOCK: u64 = 64 << 10;

/// Blocks in one request (4 MiB).
const JOINED_MAX: u64 = 64;

/// Blocks that are kept (32 MiB).
const KEPT_MAX: usize = 512;

/// Blocks that are read ahead: at the second read of a stream, and at most (4 MiB).
const AHEAD_FIRST: u64 = 4;
const AHEAD_MAX: u64 = 64;

/// Streams that are recognized at a time.
const STREAMS_MAX: usize = 8;

/// A read of a lane. Sends its reply when it is dropped, so each read is answered once.
pub(crate) struct ReadJob {
    /// First byte, and bytes.
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// Private to the lane.
    pub(crate) slot: usize,
    pub(crate) to: ReplySender<ReadReply>,
    pub(crate) result: Result<Vec<Bytes>, Status>,
}

/// The reply to a [`ReadJob`].
pub(crate) struct ReadReply {
    pub(crate) slot: usize,
    /// The data in pieces.
    pub(crate) result: Result<Vec<Bytes>, Status>,
}

impl Drop for ReadJob {
    fn drop(&mut self) {
        let result = std::mem::replace(&mut self.result, Err(Status::IoErr));
        self.to.send(ReadReply { slot: self.slot, result });
    }
}

/// Sends jobs of a lane to the task, and keeps its thread running.
#[derive(Clone)]
pub(crate) struct JobSender {
    jobs: UnboundedSender<Vec<ReadJob>>,
    _thread: Arc<RuntimeThread>,
}

impl JobSender {
    /// Sends a batch. If the task has ended, the drop of the jobs answers them.
    pub(crate) fn send(&self, batch: Vec<ReadJob>) {
        let _ = self.jobs.send(batch);
    }
}

/// A read that waits for blocks.
struct WaitingRead {
    job: ReadJob,
    /// Its deadline counts from here.
    since: Instant,
    parts: Vec<Option<Bytes>>,
    missing: usize,
}

/// A block that is kept or expected.
enum CachedBlock {
    /// Kept, with the time of its last use.
    Kept(Bytes, u64),
    /// Requested, or waits for that. The reads that need it, by number.
    Expected { readers: Vec<u64>, since: Instant },
}

/// A stream of reads: the block at which it would continue, and how many to read ahead.
struct ReadStream {
    next: u64,
    ahead: u64,
}

/// The state of the task of an object.
pub(crate) struct BlockCacheTask {
    source: Arc<ObjectSource>,
    blocks: HashMap<u64, CachedBlock>,
    kept: usize,
    /// Counts uses, for the age of blocks.
    clock: u64,
    reads: HashMap<u64, WaitingRead>,
    next_read: u64,
    /// Blocks to request, for reads and ahead of them. `waiting` has both.
    wanted: VecDeque<u64>,
    ahead: VecDeque<u64>,
    waiting: BTreeSet<u64>,
    fetching: usize,
    streams: VecDeque<ReadStream>,
    fetched: UnboundedSender<FetchedRange>,
}

/// A range of blocks that was requested, and the result.
struct FetchedRange {
    blocks: Range<u64>,
    /// The deadline counted from here.
    since: Instant,
    result: Result<Bytes, ReadFailure>,
}

impl BlockCacheTask {
    /// Starts the task. It ends when all senders are dropped.
    pub(crate) fn spawn(thread: Arc<RuntimeThread>, source: Arc<ObjectSource>) -> JobSender {
        let (jobs, inbox) = unbounded_channel();
        let (fetched, results) = unbounded_channel();
        let task = BlockCacheTask {
            source,
            blocks: HashMap::new(),
            kept: 0,
            clock: 0,
            reads: HashMap::new(),
            next_read: 0,
            wanted: VecDeque::new(),
            ahead: VecDeque::new(),
            waiting: BTreeSet::new(),
            fetching: 0,
            streams: VecDeque::new(),
            fetched,
        };
        thread.handle.spawn(task.run(inbox, results));
        JobSender { jobs, _thread: thread }
    }

    async fn run(
        mut self,
        mut jobs: UnboundedReceiver<Vec<ReadJob>>,
        mut results: UnboundedReceiver<FetchedRange>,
    ) {
        loop {
            tokio::select! {
                batch = jobs.recv() => match batch {
                    Some(batch) => batch.into_iter().for_each(|job| self.start(job)),
                    None => return,
                },
                // `self` has a sender, so there is always a result.
                Some(result) = results.recv() => self.end_fetch(result),
            }
            self.fetch();
        }
    }

    /// Starts a read. If all blocks are kept, it ends at once.
    fn start(&mut self, job: ReadJob) {
        let blocks = job.offset / BLOCK..(job.offset + job.len).div_ceil(BLOCK);
        let number = self.next_read;
        self.next_read += 1;
        let mut read = WaitingRead { job, since: Instant::now(), parts: Vec::new(), missing: 0 };
        self.clock += 1;
        for block in blocks.clone() {
            match self.blocks.get_mut(&block) {
                Some(CachedBlock::Kept(bytes, used)) => {
                    *used = self.clock;
                    read.parts.push(Some(bytes.clone()));
                    continue;
                }
                Some(CachedBlock::Expected { readers, since }) => {
                    // It may wait behind others, because it was only read ahead.
                    if self.waiting.contains(&block) {
                        if readers.is_empty() {
                            *since = read.since;
                        }
                        self.wanted.push_back(block);
                    }
                    readers.push(number);
                }
                None => self.expect(block, Some(number)),
            }
            read.parts.push(None);
            read.missing += 1;
        }
        if read.missing == 0 {
            end_read(read);
        } else {
            self.reads.insert(number, read);
        }
        self.read_ahead(blocks);
    }

    /// Adds a block to request, for a read or ahead.
    fn expect(&mut self, block: u64, reader: Option<u64>) {
        let readers = reader.into_iter().collect();
        self.blocks.insert(block, CachedBlock::Expected { readers, since: Instant::now() });
        self.waiting.insert(block);
        if reader.is_some() { &mut self.wanted } else { &mut self.ahead }.push_back(block);
    }

    /// Requests blocks after a read that continues a stream.
    fn read_ahead(&mut self, read: Range<u64>) {
        // A read may begin in the block in which the last one ended.
        let known = self.streams.iter().position(|stream| {
            stream.next == read.start || stream.next == read.start + 1 && read.end >= stream.next
        });
        let ahead = match known.and_then(|at| self.streams.remove(at)) {
            // Still in the same block.
            Some(stream) if stream.next == read.end => stream.ahead,
            Some(stream) if stream.ahead == 0 => AHEAD_FIRST,
            Some(stream) => (stream.ahead * 2).min(AHEAD_MAX),
            None => 0,
        };
        self.streams.truncate(STREAMS_MAX - 1);
        self.streams.push_front(ReadStream { next: read.end, ahead });
        let end = (read.end + ahead).min(self.source.len().div_ceil(BLOCK));
        for block in read.end..end {
            if !self.blocks.contains_key(&block) {
                self.expect(block, None);
            }
        }
    }

    /// Requests ranges of waiting blocks, as far as the bound allows.
    fn fetch(&mut self) {
        while self.fetching < FETCHES_MAX {
            let next = self.wanted.pop_front().or_else(|| self.ahead.pop_front());
            let Some(block) = next else { return };
            // A neighbour may have taken it along.
            if !self.waiting.contains(&block) {
                continue;
            }
            let blocks = self.take_joined(block);
            let since = blocks.clone().filter_map(|block| match self.blocks.get(&block) {
                Some(CachedBlock::Expected { since, .. }) => Some(*since),
                _ => None,
            });
            let since = since.min().unwrap_or_else(Instant::now);
            self.fetching += 1;
            let (source, fetched) = (Arc::clone(&self.source), self.fetched.clone());
            tokio::spawn(async move {
                let end = (blocks.end * BLOCK).min(source.len());
                let result = source.read(blocks.start * BLOCK..end, since).await;
                // The task has ended if there is no receiver.
                let _ = fetched.send(FetchedRange { blocks, since, result });
            });
        }
    }

    /// Takes the waiting blocks around `block`.
    fn take_joined(&mut self, block: u64) -> Range<u64> {
        let (mut start, mut end) = (block, block + 1);
        while end - start < JOINED_MAX && self.waiting.contains(&end) {
            end += 1;
        }
        while end - start < JOINED_MAX && start > 0 && self.waiting.contains(&(start - 1)) {
            start -= 1;
        }
        (start..end).for_each(|block| {
            self.waiting.remove(&block);
        });
        start..end
    }

    /// Passes the blocks of a range to the reads that wait for them.
    fn end_fetch(&mut self, FetchedRange { blocks, since, result }: FetchedRange) {
        self.fetching -= 1;
        self.clock += 1;
        for (index, block) in blocks.enumerate() {
            let Some(CachedBlock::Expected { readers, .. }) = self.blocks.remove(&block) else { continue };
            match &result {
                Ok(bytes) => {
                    let from = index * BLOCK as usize;
                    let end = (from + BLOCK as usize).min(bytes.len());
                    // A copy, because a slice would keep the whole range in memory.
                    let bytes = Bytes::copy_from_slice(&bytes[from..end]);
                    readers.into_iter().for_each(|reader| self.deliver(reader, block, &bytes));
                    self.blocks.insert(block, CachedBlock::Kept(bytes, self.clock));
                    self.kept += 1;
                }
                Err(failure) => self.fail_block(block, readers, since, failure),
            }
        }
        self.evict();
    }

    /// Fails the reads of a block. If only the deadline has passed, reads that came later than
    /// `since` get another request.
    fn fail_block(&mut self, block: u64, readers: Vec<u64>, since: Instant, failure: &ReadFailure) {
        let may_wait = matches!(failure, ReadFailure::Unavailable(_));
        let mut later = Vec::new();
        for reader in readers {
            match self.reads.get(&reader) {
                Some(read) if may_wait && read.since > since => later.push((reader, read.since)),
                _ => {
                    if let Some(mut read) = self.reads.remove(&reader) {
                        read.job.result = Err(failure.status());
                    }
                }
            }
        }
        if let Some(since) = later.iter().map(|(_, since)| *since).min() {
            let readers = later.into_iter().map(|(reader, _)| reader).collect();
            self.blocks.insert(block, CachedBlock::Expected { readers, since });
            self.waiting.insert(block);
            self.wanted.push_back(block);
        }
    }

    fn deliver(&mut self, reader: u64, block: u64, bytes: &Bytes) {
        // A read that has failed is gone.
        let Some(read) = self.reads.get_mut(&reader) else { return };
        let index = (block - read.job.offset / BLOCK) as usize;
        if read.parts[index].replace(bytes.clone()).is_none() {
            read.missing -= 1;
        }
        if read.missing == 0
            && let Some(read) = self.reads.remove(&reader)
        {
            end_read(read);
        }
    }

    /// Drops the oldest quarter of the blocks if there are too many.
    fn evict(&mut self) {
        if self.kept <= KEPT_MAX {
            return;
        }
        let mut ages: Vec<u64> = self.blocks.values().filter_map(CachedBlock::last_use).collect();
        let (_, oldest, _) = ages.select_nth_unstable(KEPT_MAX / 4);
        let oldest = *oldest;
        self.blocks.retain(|_, block| block.last_use().is_none_or(|used| used > oldest));
        self.kept = self.blocks.values().filter(|block| block.last_use().is_some()).count();
    }
}

impl CachedBlock {
    fn last_use(&self) -> Option<u64> {
        match self {
            CachedBlock::Kept(_, used) => Some(*used),
            CachedBlock::Expected { .. } => None,
        }
    }
}

/// Cuts the data of a read out of its blocks, and answers it.
fn end_read(WaitingRead { mut job, parts, .. }: WaitingRead) {
    let mut skip = (job.offset % BLOCK) as usize;
    let mut left = job.len as usize;
    let mut data = Vec::with_capacity(parts.len());
    for part in parts.into_iter().flatten() {
        let len = (part.len() - skip).min(left);
        data.push(part.slice(skip..skip + len));
        (skip, left) = (0, left - len);
    }
    job.result = Ok(data);
}
