//! The model of the devices: which requests are in flight, and what each may return.

use crate::cells::{ANY, Cells};
use crate::env::Env;
use crate::stamp;
use crate::tables::{ERROR, Map, ZERO};
use crate::trace::op_name;
use std::sync::Arc;
use udm_core::{Bio, BioFlags, Nanos, Op, OwnerId, Status};

/// A request in flight.
struct Request {
    busy: bool,
    id: u64,
    device: usize,
    op: Op,
    flags: BioFlags,
    sector: u64,
    len: u64,
    owner: OwnerId,
    /// Address of the data: the bytes must come back, not a copy.
    addr: usize,
    /// Step that it began in, doubled.
    start: u64,
    at: Nanos,
    map: Option<Arc<Map>>,
    /// Other tables that it may have gone through.
    more: Vec<Arc<Map>>,
}

/// What is wrong, for a person.
pub type Wrong = String;

/// See the module.
pub struct Model {
    /// What the disks may hold.
    pub cells: Cells,
    requests: Vec<Request>,
    free: Vec<u64>,
    ids: u64,
    /// Sectors compared.
    pub compared: u64,
}

impl Model {
    /// A model over `cells`.
    #[must_use]
    pub fn new(cells: Cells) -> Model {
        Model { cells, requests: Vec::new(), free: Vec::new(), ids: 0, compared: 0 }
    }

    /// How many requests are in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.requests.len() - self.free.len()
    }

    /// A request begins in `step`: gives it its cookie, puts its stamps into the data of a write, and returns its number. `maps` are the
    /// tables that it may go through, the current one first.
    pub fn begin(&mut self, bio: &mut Bio, device: usize, maps: &[Arc<Map>], step: u64, now: Nanos) -> u64 {
        self.ids += 1;
        let id = self.ids;
        let (sector, len) = (bio.sector.0, bio.sectors.0);
        let (map, more) = (Some(maps[0].clone()), maps[1..].to_vec());
        match bio.op {
            Op::Write => stamp::write(&mut bio.data, 0..len, |i| id << 10 | i),
            Op::Read => poison(bio),
            _ => {}
        }
        let addr = bio.data.iter().next().map_or(0, |b| b.addr());
        let request = Request {
            busy: true,
            id,
            device,
            op: bio.op,
            flags: bio.flags,
            sector,
            len,
            owner: bio.owner,
            addr,
            start: 2 * step,
            at: now,
            map,
            more,
        };
        bio.cookie = self.free.pop().unwrap_or(self.requests.len() as u64);
        for map in maps {
            mark(&mut self.cells, &request, map);
        }
        match self.requests.get_mut(bio.cookie as usize) {
            Some(slot) => *slot = request,
            None => self.requests.push(request),
        }
        id
    }

    /// The number of the request that `bio` is, for the trace.
    #[must_use]
    pub fn id(&self, bio: &Bio) -> u64 {
        self.requests.get(bio.cookie as usize).map_or(0, |r| r.id)
    }

    /// From now on requests in flight on `device` may also go through `map`.
    pub fn remap(&mut self, device: usize, map: &Arc<Map>) {
        for r in self.requests.iter_mut().filter(|r| r.busy && r.device == device) {
            let known = r.map.iter().chain(&r.more).any(|m| Arc::ptr_eq(m, map) || m == map);
            if !known {
                mark(&mut self.cells, r, map);
                r.more.push(map.clone());
            }
        }
    }

    /// Forgets when old requests began, so that cells can be cleaned. Costs a look at each request in flight.
    pub fn advance(&mut self, step: u64) {
        let oldest = self.requests.iter().filter(|r| r.busy).map(|r| r.start).min();
        self.cells.set_horizon(oldest.unwrap_or(2 * step));
    }

    /// The oldest request in flight, for a person.
    #[must_use]
    pub fn oldest(&self) -> Option<String> {
        let r = self.requests.iter().filter(|r| r.busy).min_by_key(|r| r.id)?;
        Some(format!(
            "request {}, a {} of d{} {}+{} since {} us",
            r.id,
            op_name(r.op),
            r.device,
            r.sector,
            r.len,
            r.at.0 / 1000
        ))
    }

    /// Forgets all requests without looking at what they returned: the power failed in `step`.
    pub fn crash(&mut self, step: u64) {
        self.cells.crash(2 * step + 1);
    }

    /// Takes a request back without a look at what it returned.
    ///
    /// # Errors
    /// When it is not one that is in flight.
    pub fn abandon(&mut self, bio: &Bio) -> Result<(), Wrong> {
        self.home(bio)?;
        self.free.push(bio.cookie);
        Ok(())
    }

    fn home(&mut self, bio: &Bio) -> Result<usize, Wrong> {
        let slot = bio.cookie as usize;
        let Some(r) = self.requests.get_mut(slot).filter(|r| r.busy) else {
            return Err(format!("a request with cookie {slot} came back that is not in flight"));
        };
        r.busy = false;
        let same = r.op == bio.op
            && r.flags == bio.flags
            && r.sector == bio.sector.0
            && r.len == bio.sectors.0
            && r.owner == bio.owner;
        if !same {
            return Err(format!(
                "request {} went down as {} {}+{} {:?} and came back as {} {}+{} {:?}",
                r.id,
                op_name(r.op),
                r.sector,
                r.len,
                r.flags,
                op_name(bio.op),
                bio.sector,
                bio.sectors,
                bio.flags
            ));
        }
        let addr = bio.data.iter().next().map_or(0, |b| b.addr());
        let want = if r.op.has_data() { r.len * udm_core::SECTOR_SIZE } else { 0 };
        if addr != r.addr || bio.data.len() as u64 != want {
            return Err(format!("request {} came back with other memory than it went down with", r.id));
        }
        Ok(slot)
    }

    /// A request is back in `env.step`: checks it against all that is known.
    ///
    /// # Errors
    /// What is wrong.
    pub fn finish(&mut self, bio: &Bio, env: &Env) -> Result<(), Wrong> {
        let slot = self.home(bio)?;
        let now = env.ending();
        let Model { cells, requests, free, compared, .. } = self;
        let r = &mut requests[slot];
        let ok = bio.status.is_ok();
        let result = match (ok, r.op) {
            (false, _) => excuse(r, bio.status, env),
            (true, Op::Read) => check_read(cells, r, bio, now, compared),
            // A discard is a hint: a target above may end it.
            (true, Op::Discard) => Ok(()),
            (true, _) => check_reach(r),
        };
        let sure = ok && r.more.is_empty();
        let Some(map) = r.map.take() else { return Ok(()) };
        match r.op {
            Op::Write | Op::Discard | Op::WriteZeroes => {
                let durable = r.flags.contains(BioFlags::FUA);
                for map in r.more.iter().chain([&map]) {
                    for i in 0..r.len {
                        let cell = map.cell(r.sector + i);
                        if cell < ERROR {
                            cells.end(cell, r.id << 10 | i, now, sure, durable);
                        }
                    }
                }
            }
            Op::Flush if sure => map.disks.iter().for_each(|d| cells.flushed(*d, r.start)),
            Op::Flush | Op::Read => {}
        }
        if sure && r.op == Op::Write && r.flags.contains(BioFlags::PREFLUSH) {
            map.disks.iter().for_each(|d| cells.flushed(*d, r.start));
        }
        r.more.clear();
        free.push(slot as u64);
        result
    }
}

/// Tells the cells behind `map` that a write begins.
fn mark(cells: &mut Cells, r: &Request, map: &Map) {
    if !r.op.is_write() {
        return;
    }
    for i in 0..r.len {
        let cell = map.cell(r.sector + i);
        if cell < ERROR {
            let id = r.id << 10 | i;
            let stamp = match r.op {
                Op::Write => id,
                Op::WriteZeroes => 0,
                _ => ANY,
            };
            cells.begin(cell, id, stamp, r.start);
        }
    }
}

/// Spoils each sector, so that one which is not read shows.
fn poison(bio: &mut Bio) {
    for piece in bio.data.iter_mut() {
        for sector in piece.chunks_mut(udm_core::SECTOR_SIZE as usize) {
            if let Some(b) = sector.first_mut() {
                *b = !*b;
            }
        }
    }
}

/// A request that succeeded must not have touched sectors that can only fail.
fn check_reach(r: &Request) -> Result<(), Wrong> {
    let fails = |m: &Arc<Map>| (0..r.len).any(|i| m.cell(r.sector + i) == ERROR);
    if r.map.iter().chain(&r.more).all(fails) {
        return Err(format!("{} succeeded on a range that can only fail", describe(r)));
    }
    Ok(())
}

fn check_read(cells: &mut Cells, r: &Request, bio: &Bio, now: u64, compared: &mut u64) -> Result<(), Wrong> {
    let mut wrong = None;
    let maps = || r.map.iter().chain(&r.more);
    for (nr, map) in maps().enumerate() {
        wrong = None;
        stamp::read(&bio.data, |i, got| {
            if wrong.is_some() {
                return;
            }
            *compared += 1;
            let cell = map.cell(r.sector + i);
            let fine = match (cell, got) {
                (_, None) | (ERROR, _) => false,
                (ZERO, Some(s)) => s == 0,
                (cell, Some(s)) => {
                    let fine = cells.allows(cell, s, r.start);
                    if fine && nr == 0 && r.more.is_empty() {
                        cells.seen(cell, s, r.start, now);
                    }
                    fine
                }
            };
            if !fine {
                wrong = Some((i, cell, got));
            }
        });
        if wrong.is_none() {
            return Ok(());
        }
    }
    let Some((i, cell, got)) = wrong else { return Ok(()) };
    let place = match cell {
        ZERO => "must read as zeroes".to_string(),
        ERROR => "can only fail".to_string(),
        cell => {
            let (disk, sector) = cells.place(cell);
            format!("is sector {sector} of disk {disk}, which may hold{}", cells.describe(cell))
        }
    };
    let got = got.map_or_else(|| "mixed content".to_string(), crate::cells::stamp_text);
    Err(format!("{} returned {got} for its sector {i}, which {place}", describe(r)))
}

fn describe(r: &Request) -> String {
    format!(
        "request {} ({} of d{} {}+{}, since step {})",
        r.id,
        op_name(r.op),
        r.device,
        r.sector,
        r.len,
        r.start / 2
    )
}

/// Is there a reason for a request to fail with `status`?
fn excuse(r: &Request, status: Status, env: &Env) -> Result<(), Wrong> {
    let maps = || r.map.iter().chain(&r.more);
    let bare = maps().any(|m| m.bare);
    let disks = || maps().flat_map(|m| &m.disks).map(|d| &env.disks[*d]);
    let since = |t: Option<u64>| t.is_some_and(|t| t >= r.start);
    let error = maps().any(|m| (0..r.len).any(|i| m.cell(r.sector + i) == ERROR));
    let trims = matches!(r.op, Op::Discard | Op::WriteZeroes);
    let reason = r.flags.contains(BioFlags::RAHEAD)
        || (status == Status::IoErr && disks().any(|d| since(d.flaky)))
        || (status == Status::Again && r.flags.contains(BioFlags::NOWAIT))
        || (error && (status == Status::IoErr || (trims && status == Status::NotSupp)))
        || (status == Status::NotSupp && trims && (bare || disks().any(|d| d.max[1] == 0 || d.max[2] == 0)))
        || disks().any(|d| since(d.blamed[status as usize]))
        || (status == Status::IoErr && disks().any(|d| since(d.no_path)));
    if reason { Ok(()) } else { Err(format!("{} failed without a reason: {status}", describe(r))) }
}
