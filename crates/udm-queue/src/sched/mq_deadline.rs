//! The scheduler `mq-deadline`: by sector, in batches of one direction, with deadlines (kernel
//! `block/mq-deadline.c`).
//!
//! Reads are one direction; all other requests with a sector are the other. A batch is up to
//! `fifo_batch` requests in sector order. After a batch the scheduler chooses the direction of the
//! next one. It prefers reads, but after `writes_starved` batches of reads, waiting writes get one.
//! A batch begins after the last request of its direction, or with the oldest request if that is
//! due.
//!
//! The kernel's red-black trees are sorted vectors here: they have a few hundred entries and keep
//! their capacity.

use crate::merge::{Merger, Request};
use slab::Slab;
use std::collections::VecDeque;
use udm_core::{Batch, Bio, Cx, Nanos, Op, Sector};
use udm_wire::uri::QueueParams;

/// Waiting requests of one direction.
#[derive(Default)]
struct WaitingRequestsOfDirection {
    /// Keys of requests by sector, then by age.
    sorted: Vec<(Sector, usize)>,
    /// Keys of requests by age.
    oldest: VecDeque<usize>,
    expire: Nanos,
    /// First sector of the last request that was sent.
    latest: Sector,
}

struct RequestWithDeadline {
    request: Request,
    due: Nanos,
}

const READ: usize = 0;
const WRITE: usize = 1;

/// The scheduler `mq-deadline`.
pub(crate) struct DeadlineScheduler {
    all: Slab<RequestWithDeadline>,
    directions: [WaitingRequestsOfDirection; 2],
    /// Flushes, which have no sector and go first.
    first: VecDeque<Box<Bio>>,
    /// Requests beyond the limit of sorted requests.
    outside: VecDeque<Box<Bio>>,
    sorted_max: usize,
    fifo_batch: u32,
    writes_starved: u32,
    /// Direction of the batch, number of its requests sent so far, and number of read batches sent
    /// while writes waited.
    direction: usize,
    batching: u32,
    starved: u32,
    /// The last request added or merged with. `nomerges` 1 tries only this one.
    last: Option<usize>,
}

fn direction_of(op: Op) -> usize {
    if op == Op::Read { READ } else { WRITE }
}

impl DeadlineScheduler {
    pub fn new(params: &QueueParams) -> DeadlineScheduler {
        let expires = |millis| Nanos(u64::from(millis) * 1_000_000);
        let direction = |millis| WaitingRequestsOfDirection {
            expire: expires(millis),
            ..WaitingRequestsOfDirection::default()
        };
        DeadlineScheduler {
            all: Slab::new(),
            directions: [direction(params.read_expire), direction(params.write_expire)],
            first: VecDeque::new(),
            outside: VecDeque::new(),
            sorted_max: params.requests() as usize,
            fifo_batch: params.fifo_batch,
            writes_starved: params.writes_starved,
            direction: READ,
            batching: 0,
            starved: 0,
            last: None,
        }
    }

    pub fn len(&self) -> usize {
        self.all.len() + self.first.len() + self.outside.len()
    }

    pub fn add(&mut self, bio: Box<Bio>, merger: &mut Merger, cx: &Cx<'_>) {
        if bio.op == Op::Flush {
            self.first.push_back(bio);
        } else if let Some((key, in_front)) = self.neighbour(&bio, merger) {
            if in_front {
                self.move_to(key, bio.sector);
            }
            merger.merge(&mut self.all[key].request, bio);
            self.last = Some(key);
            self.join(key, in_front, merger);
        } else if self.all.len() >= self.sorted_max {
            self.outside.push_back(bio);
        } else {
            self.insert(bio, cx);
        }
    }

    fn insert(&mut self, bio: Box<Bio>, cx: &Cx<'_>) {
        let direction = &mut self.directions[direction_of(bio.op)];
        let (sector, due) = (bio.sector, cx.now() + direction.expire);
        let key = self.all.insert(RequestWithDeadline { request: Merger::single(bio), due });
        // After older requests of the same sector.
        let at = direction.sorted.partition_point(|(other, _)| *other <= sector);
        direction.sorted.insert(at, (sector, key));
        direction.oldest.push_back(key);
        self.last = Some(key);
    }

    /// Finds a request that `bio` can be merged with. The flag is true if `bio` goes in front of
    /// the request.
    fn neighbour(&self, bio: &Bio, merger: &Merger) -> Option<(usize, bool)> {
        let sorted = &self.directions[direction_of(bio.op)].sorted;
        let at = sorted.partition_point(|(sector, _)| *sector < bio.sector);
        let before =
            at.checked_sub(1).map(|at| sorted[at].1).filter(|&key| self.request(key).end() == bio.sector);
        let behind = || {
            let at = sorted.partition_point(|(sector, _)| *sector < bio.end());
            sorted.get(at).filter(|(sector, _)| merger.front && *sector == bio.end()).map(|(_, key)| *key)
        };
        let may = |key: &usize| match merger.lookback() {
            0 => false,
            1 => self.last == Some(*key),
            _ => true,
        };
        let may = |key: &usize| may(key) && merger.can_merge(&self.request(*key).bio, bio);
        let before = before.filter(may).map(|key| (key, false));
        before.or_else(|| behind().filter(may).map(|key| (key, true)))
    }

    /// Merges the request `key`, which has grown in front or at its end, with a neighbour that it
    /// now touches, if possible. The merged request gets the deadline of the older one (kernel
    /// `attempt_merge`).
    #[inline(never)]
    fn join(&mut self, key: usize, in_front: bool, merger: &mut Merger) {
        let direction = &mut self.directions[direction_of(self.all[key].request.bio.op)];
        let at = direction.place(self.all[key].request.sector(), key);
        let Some(at) = at.checked_sub(usize::from(in_front)) else { return };
        let pair = direction.sorted.get(at..at + 2);
        let Some(&[(_, first), (sector, second)]) = pair else { return };
        let (before, behind) = (&self.all[first].request, &self.all[second].request);
        if before.end() != sector || merger.lookback() < 2 || !merger.can_merge(&before.bio, &behind.bio) {
            return;
        }
        direction.sorted.remove(at + 1);
        let oldest = direction.oldest.iter().position(|key| [first, second].contains(key));
        direction.oldest.retain(|key| ![first, second].contains(key));
        direction.oldest.insert(oldest.expect("both wait"), first);
        let RequestWithDeadline { request, due } = self.all.remove(second);
        let grown = &mut self.all[first];
        grown.due = grown.due.min(due);
        merger.join(&mut grown.request, request);
        self.last = Some(first);
    }

    fn request(&self, key: usize) -> &Request {
        &self.all[key].request
    }

    /// Moves the request to a new first sector.
    fn move_to(&mut self, key: usize, sector: Sector) {
        let request = &self.all[key].request;
        let direction = &mut self.directions[direction_of(request.bio.op)];
        let from = direction.place(request.sector(), key);
        let sorted = &mut direction.sorted;
        sorted.remove(from);
        let at = sorted.partition_point(|(other, _)| *other <= sector);
        sorted.insert(at, (sector, key));
    }

    pub fn next(&mut self, merger: &mut Merger, cx: &Cx<'_>) -> Option<Request> {
        if let Some(bio) = self.first.pop_front() {
            return Some(Merger::single(bio));
        }
        let key = self.choose(cx)?;
        let request = self.take(key);
        self.batching += 1;
        while self.all.len() < self.sorted_max
            && let Some(bio) = self.outside.pop_front()
        {
            self.add(bio, merger, cx);
        }
        Some(request)
    }

    /// Chooses the key of the next request.
    fn choose(&mut self, cx: &Cx<'_>) -> Option<usize> {
        if self.batching < self.fifo_batch
            && let Some(key) = self.directions[self.direction].following()
        {
            return Some(key);
        }
        let waits = |direction: usize| !self.directions[direction].sorted.is_empty();
        self.direction = match (waits(READ), waits(WRITE)) {
            (false, false) => return None,
            (true, false) => READ,
            (false, true) => WRITE,
            (true, true) => {
                self.starved += 1;
                if self.starved > self.writes_starved { WRITE } else { READ }
            }
        };
        if self.direction == WRITE {
            self.starved = 0;
        }
        self.batching = 0;
        let direction = &self.directions[self.direction];
        let oldest = *direction.oldest.front()?;
        let due = self.all[oldest].due <= cx.now();
        direction.following().filter(|_| !due).or(Some(oldest))
    }

    fn take(&mut self, key: usize) -> Request {
        let RequestWithDeadline { request, .. } = self.all.remove(key);
        let direction = &mut self.directions[direction_of(request.bio.op)];
        direction.latest = request.sector();
        let at = direction.place(request.sector(), key);
        direction.sorted.remove(at);
        let at = direction.oldest.iter().position(|other| *other == key).expect("it waits");
        direction.oldest.remove(at);
        self.last = self.last.filter(|last| *last != key);
        request
    }

    pub fn hand_back(&mut self, merger: &mut Merger, back: &mut Batch) {
        back.extend(self.first.drain(..));
        self.all.drain().for_each(|waiting| merger.split(waiting.request, back));
        back.extend(self.outside.drain(..));
        for direction in &mut self.directions {
            direction.sorted.clear();
            direction.oldest.clear();
        }
        self.last = None;
    }
}

impl WaitingRequestsOfDirection {
    /// Index of the request `key`, which begins at `sector`.
    fn place(&self, sector: Sector, key: usize) -> usize {
        let from = self.sorted.partition_point(|(other, _)| *other < sector);
        from + self.sorted[from..].iter().position(|(_, other)| *other == key).expect("it waits")
    }

    /// The first request at or after the start of the last one sent.
    fn following(&self) -> Option<usize> {
        let at = self.sorted.partition_point(|(sector, _)| *sector < self.latest);
        self.sorted.get(at).map(|(_, key)| *key)
    }
}
