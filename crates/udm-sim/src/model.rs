//! The model of the devices: which requests are in flight, and what each may return.

use crate::allowed_errors;
use crate::environment::Env;
use crate::read_check;
use crate::register_model::{ANY, RegisterModel};
use crate::stamp;
use crate::table_map::{ERROR, TableMap};
use crate::trace::op_name;
use std::sync::Arc;
use udm_core::{Bio, BioFlags, Nanos, Op, OwnerId};

/// A request in flight.
pub(crate) struct TrackedRequest {
    pub(crate) busy: bool,
    pub(crate) id: u64,
    pub(crate) device: usize,
    pub(crate) op: Op,
    pub(crate) flags: BioFlags,
    pub(crate) sector: u64,
    pub(crate) len: u64,
    pub(crate) owner: OwnerId,
    /// Address of the data: the bytes must come back, not a copy.
    pub(crate) addr: usize,
    /// Step that it began in, doubled.
    pub(crate) start: u64,
    pub(crate) at: Nanos,
    pub(crate) map: Option<Arc<TableMap>>,
    /// Other tables that it may have gone through.
    pub(crate) more: Vec<Arc<TableMap>>,
    /// What its device refused when it began.
    pub(crate) rules: RefusalRules,
}

/// What a device must refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefusalRules {
    /// What is not whole blocks of this many sectors.
    pub block: u64,
    /// Whatever would change it.
    pub read_only: bool,
}

/// What is wrong, for a person.
pub type Violation = String;

/// See the module.
pub struct DeviceModel {
    /// What the disks may hold.
    pub cells: RegisterModel,
    requests: Vec<TrackedRequest>,
    free: Vec<u64>,
    ids: u64,
    /// Sectors compared.
    pub compared: u64,
}

impl DeviceModel {
    /// A model over `register_model`.
    #[must_use]
    pub fn new(cells: RegisterModel) -> DeviceModel {
        DeviceModel { cells, requests: Vec::new(), free: Vec::new(), ids: 0, compared: 0 }
    }

    /// How many requests are in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.requests.len() - self.free.len()
    }

    /// How many requests are in flight on devices other than those that `hangs` names.
    pub(crate) fn in_flight_but(&self, hangs: &dyn Fn(usize) -> bool) -> usize {
        self.requests.iter().filter(|r| r.busy && !hangs(r.device)).count()
    }

    /// Requests in flight on `device`.
    #[must_use]
    pub fn in_flight_on(&self, device: usize) -> usize {
        self.requests.iter().filter(|r| r.busy && r.device == device).count()
    }

    /// Something that changes `device` is in flight on it.
    #[must_use]
    pub fn is_writing(&self, device: usize) -> bool {
        self.requests.iter().any(|r| r.busy && r.device == device && r.op.is_write())
    }

    /// A request begins in `step`: gives it its cookie, puts its stamps into the data of a write,
    /// and returns its number. `changed_maps` are the tables that it may go through, the current one first.
    pub fn begin(
        &mut self,
        bio: &mut Bio,
        device: usize,
        (maps, rules): (&[Arc<TableMap>], RefusalRules),
        step: u64,
        now: Nanos,
    ) -> u64 {
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
        let request = TrackedRequest {
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
            rules,
        };
        bio.cookie = self.free.pop().unwrap_or(self.requests.len() as u64);
        for map in maps {
            begin_writes(&mut self.cells, &request, map);
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

    /// When (twice the step) the request that `bio` is began.
    #[must_use]
    pub fn start(&self, bio: &Bio) -> u64 {
        self.requests.get(bio.cookie as usize).map_or(0, |r| r.start)
    }

    /// A write took effect after it had failed.
    pub fn landed(&mut self, disk: usize, sector: u64, stamp: u64, now: u64) {
        let cell = self.cells.index(disk, sector);
        self.cells.end(cell, stamp, now, false, false);
    }

    /// From now on requests in flight on `device` may also go through `table_map`.
    pub fn remap(&mut self, device: usize, map: &Arc<TableMap>) {
        for r in self.requests.iter_mut().filter(|r| r.busy && r.device == device) {
            let known = r.map.iter().chain(&r.more).any(|m| Arc::ptr_eq(m, map) || m == map);
            if !known {
                begin_writes(&mut self.cells, r, map);
                r.more.push(map.clone());
            }
        }
    }

    /// Forgets when old requests began, so that cells can be cleaned. Costs a look at each request
    /// in flight.
    pub fn advance(&mut self, step: u64) {
        let oldest = self.requests.iter().filter(|r| r.busy).map(|r| r.start).min();
        self.cells.set_horizon(oldest.unwrap_or(2 * step));
    }

    /// The number of the last request that began.
    #[must_use]
    pub fn last(&self) -> u64 {
        self.ids
    }

    /// A request up to number `id` is in flight.
    #[must_use]
    pub fn has_older(&self, id: u64) -> bool {
        self.requests.iter().any(|r| r.busy && r.id <= id)
    }

    /// The length of the longest request in flight, in sectors.
    #[must_use]
    pub fn longest(&self) -> u64 {
        self.requests.iter().filter(|r| r.busy).map(|r| r.len).max().unwrap_or_default()
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
    pub fn abandon(&mut self, bio: &Bio) -> Result<(), Violation> {
        self.find_slot(bio)?;
        self.free.push(bio.cookie);
        Ok(())
    }

    fn find_slot(&mut self, bio: &Bio) -> Result<usize, Violation> {
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

    /// A request is back in `env.step`: checks it against all that is known. One that may fail
    /// whatever it is has a `pardon`.
    ///
    /// # Errors
    /// What is wrong.
    pub fn finish(
        &mut self,
        bio: &Bio,
        rules: RefusalRules,
        pardon: bool,
        env: &Env,
    ) -> Result<(), Violation> {
        let slot = self.find_slot(bio)?;
        let now = env.ending();
        let DeviceModel { cells, requests, free, compared, .. } = self;
        let r = &mut requests[slot];
        let ok = bio.status.is_ok();
        let result = match (ok, r.op) {
            (false, _) if pardon => Ok(()),
            (false, _) => allowed_errors::check(r, bio.status, env),
            (true, _) if rules == r.rules && r.breaks(rules) => {
                Err(format!("{} succeeded against the limits of its device", describe(r)))
            }
            (true, Op::Read) => read_check::check(cells, r, bio, env, compared),
            // A discard is a hint: a target above may end it.
            (true, Op::Discard) => Ok(()),
            (true, Op::Write) => check_not_error_range(r).and_then(|()| check_write_data(r, bio)),
            (true, _) => check_not_error_range(r),
        };
        let sure = ok && r.more.is_empty();
        let Some(map) = r.map.take() else { return Ok(()) };
        let flushed = sure && !map.drops_flushes();
        match r.op {
            Op::Write | Op::Discard | Op::WriteZeroes => {
                let durable = r.flags.contains(BioFlags::FUA);
                for map in r.more.iter().chain([&map]) {
                    for i in 0..r.len {
                        let (cell, id) = (map.cell(r.sector + i), r.id << 10 | i);
                        if cell < ERROR && !(r.op == Op::Write && !ok && env.is_late(id)) {
                            let sure = sure && map.drops(r.sector + i).is_none();
                            let sure = sure && !(map.clears && r.op == Op::Discard);
                            cells.end(cell, id, now, sure, durable);
                        }
                    }
                }
            }
            Op::Flush if flushed => map.disks.iter().for_each(|d| cells.flushed(*d, r.start)),
            Op::Flush | Op::Read => {}
        }
        if flushed && r.op == Op::Write && r.flags.contains(BioFlags::PREFLUSH) {
            map.disks.iter().for_each(|d| cells.flushed(*d, r.start));
        }
        r.more.clear();
        free.push(slot as u64);
        result
    }
}

impl TrackedRequest {
    pub(crate) fn breaks(&self, rules: RefusalRules) -> bool {
        let uneven = self.op != Op::Flush && !(self.sector | self.len).is_multiple_of(rules.block);
        uneven || (rules.read_only && self.op.is_write())
    }
}

/// Tells the cells behind `table_map` that a write begins.
fn begin_writes(cells: &mut RegisterModel, r: &TrackedRequest, map: &TableMap) {
    if !r.op.is_write() {
        return;
    }
    for i in 0..r.len {
        let cell = map.cell(r.sector + i);
        if cell < ERROR && map.drops(r.sector + i) != Some(true) {
            let id = r.id << 10 | i;
            let stamp = match r.op {
                Op::Write => id,
                Op::WriteZeroes => 0,
                _ if map.clears => 0,
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
fn check_not_error_range(r: &TrackedRequest) -> Result<(), Violation> {
    let fails_at = |m: &TableMap, s: u64| m.cell(s) == ERROR && (m.drops(s).is_none() || s >= m.sectors());
    let fails = |m: &Arc<TableMap>| (0..r.len).any(|i| fails_at(m, r.sector + i));
    if r.map.iter().chain(&r.more).all(fails) {
        return Err(format!("{} succeeded on a range that can only fail", describe(r)));
    }
    Ok(())
}

/// What was written is still what was to be written: a target may change a copy.
fn check_write_data(r: &TrackedRequest, bio: &Bio) -> Result<(), Violation> {
    let mut same = true;
    stamp::read(&bio.data, |i, got| same &= got == Some(r.id << 10 | i));
    if same { Ok(()) } else { Err(format!("{} came back with its data changed", describe(r))) }
}

pub(crate) fn describe(r: &TrackedRequest) -> String {
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
