//! What origins and snapshots may hold, and the requests under way.

use crate::cells::{Cells, stamp_text};
use crate::disk::Disk;
use crate::env::Env;
use crate::model::Wrong;
use crate::stamp;
use udm_core::{Bio, BioFlags, Op, Status};

/// What a read finds in its memory before it is filled.
const POISON: u64 = u64::MAX - 1;

/// A request under way.
struct Request {
    side: usize,
    /// When it began: twice the step.
    start: u64,
    id: u64,
}

/// How far errors of a side have a cause.
pub(super) struct Causes {
    /// The disks that it needs.
    pub disks: Vec<usize>,
    /// It can't be had any more, or no longer be written, for a reason that is known.
    pub lost: bool,
}

impl Causes {
    /// Something failed there at `since` or later.
    pub(super) fn since(&self, since: u64, env: &Env) -> bool {
        self.disks.iter().any(|disk| env.disks[*disk].blamed.iter().flatten().any(|at| *at >= since))
    }
}

/// See the module's documentation. A *side* is an origin or a snapshot: a disk of its own in
/// [`Cells`].
pub(super) struct Model {
    pub cells: Cells,
    requests: Vec<Option<Request>>,
    ids: u64,
    /// Sectors that were read and compared.
    pub compared: u64,
    /// Requests that came back, and those with an error.
    pub requests_done: u64,
    pub errors: u64,
}

impl Model {
    pub(super) fn new(sizes: &[u64]) -> Model {
        Model {
            cells: Cells::new(sizes, Disk::first_stamp),
            requests: Vec::new(),
            ids: 0,
            compared: 0,
            requests_done: 0,
            errors: 0,
        }
    }

    /// Requests in flight on `side`, or on all.
    pub(super) fn in_flight(&self, side: Option<usize>) -> usize {
        self.requests.iter().flatten().filter(|r| side.is_none_or(|side| r.side == side)).count()
    }

    /// The oldest request, for a person.
    pub(super) fn oldest(&self) -> String {
        let oldest = self.requests.iter().flatten().min_by_key(|r| r.start);
        oldest.map_or_else(
            || "nobody".into(),
            |r| format!("request {} of side {}, since step {}", r.id, r.side, r.start / 2),
        )
    }

    pub(super) fn advance(&mut self, step: u64) {
        let oldest = self.requests.iter().flatten().map(|r| r.start).min();
        self.cells.set_horizon(oldest.unwrap_or(2 * step));
    }

    /// A request begins: its number.
    pub(super) fn begin(&mut self, bio: &mut Bio, side: usize, step: u64) -> u64 {
        self.ids += 1;
        let (id, start) = (self.ids, 2 * step);
        let free = self.requests.iter().position(Option::is_none);
        let slot = free.unwrap_or_else(|| {
            self.requests.push(None);
            self.requests.len() - 1
        });
        bio.cookie = slot as u64;
        self.requests[slot] = Some(Request { side, start, id });
        match bio.op {
            Op::Write => {
                stamp::write(&mut bio.data, 0..bio.sectors.0, |i| id << 10 | i);
                for i in 0..bio.sectors.0 {
                    let cell = self.cells.index(side, bio.sector.0 + i);
                    self.cells.begin(cell, id << 10 | i, id << 10 | i, start);
                }
            }
            Op::Read => stamp::write(&mut bio.data, 0..bio.sectors.0, |_| POISON),
            _ => {}
        }
        id
    }

    /// The number of the request that `bio` is, for the trace.
    pub(super) fn id(&self, bio: &Bio) -> u64 {
        self.requests.get(bio.cookie as usize).and_then(Option::as_ref).map_or(0, |r| r.id)
    }

    /// A request came back after the power had gone.
    pub(super) fn abandon(&mut self, bio: &Bio) {
        self.requests[bio.cookie as usize] = None;
    }

    /// A request came back.
    pub(super) fn finish(&mut self, bio: &Bio, causes: &Causes, env: &Env) -> Result<(), Wrong> {
        let Some(Request { side, start, id }) = self.requests[bio.cookie as usize].take() else {
            return Err("a request came back that nobody sent".into());
        };
        self.requests_done += 1;
        let now = env.ending();
        if bio.op == Op::Write {
            let durable = bio.flags.contains(BioFlags::FUA);
            for i in 0..bio.sectors.0 {
                let cell = self.cells.index(side, bio.sector.0 + i);
                self.cells.end(cell, id << 10 | i, now, bio.status.is_ok(), durable);
            }
        }
        if bio.status != Status::Ok {
            self.errors += 1;
            return match causes.lost || causes.since(start, env) {
                true => Ok(()),
                false => Err(format!("request {id} of side {side} failed without a reason: {}", bio.status)),
            };
        }
        match bio.op {
            Op::Read => self.compare(bio, (side, start, id), now),
            Op::Flush => {
                self.cells.flushed(side, start);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn compare(&mut self, bio: &Bio, (side, start, id): (usize, u64, u64), now: u64) -> Result<(), Wrong> {
        let mut wrong = None;
        let cells = &mut self.cells;
        stamp::read(&bio.data, |i, found| {
            let sector = bio.sector.0 + i;
            let cell = cells.index(side, sector);
            match found {
                Some(found) if cells.allows(cell, found, start) => cells.seen(cell, found, start, now),
                _ => {
                    wrong.get_or_insert_with(|| {
                        let what = found.map_or_else(|| "mixed content".into(), stamp_text);
                        format!(
                            "request {id}, begun {start}, read {what} in sector {sector} of side {side}; it may hold{}",
                            cells.describe(cell)
                        )
                    });
                }
            }
        });
        self.compared += bio.sectors.0;
        wrong.map_or(Ok(()), Err)
    }
}
