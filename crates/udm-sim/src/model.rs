//! The model of the devices: the requests in flight, and the results that each may have.

use crate::allowed_errors;
use crate::environment::Env;
use crate::read_check;
use crate::register_model::{ANY, SectorRegisterModel};
use crate::stamp;
use crate::table_map::{ERROR, ModelTableMap};
use crate::trace::op_name;
use std::sync::Arc;
use udm_core::{Bio, BioFlags, BioOwnerId, Nanos, Op};

/// A request in flight.
pub(crate) struct TrackedRequest {
    pub(crate) busy: bool,
    pub(crate) id: u64,
    pub(crate) device: usize,
    pub(crate) op: Op,
    pub(crate) flags: BioFlags,
    pub(crate) sector: u64,
    pub(crate) len: u64,
    pub(crate) owner: BioOwnerId,
    /// Address of the data. The same memory must return, not a copy.
    pub(crate) addr: usize,
    /// Twice the step in which the request began.
    pub(crate) start: u64,
    pub(crate) at: Nanos,
    pub(crate) map: Option<Arc<ModelTableMap>>,
    /// Further tables through which the request may have gone.
    pub(crate) more: Vec<Arc<ModelTableMap>>,
    /// The rules of the device when the request began.
    pub(crate) rules: RequestRefusalRules,
}

/// Rules for requests that a device must refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestRefusalRules {
    /// Requests must be made of whole blocks of this many sectors.
    pub block: u64,
    /// True if requests that change data must be refused.
    pub read_only: bool,
}

/// Description of a violated rule, for a person.
pub type Violation = String;

/// The model of the devices and their requests in flight.
pub struct DeviceModel {
    /// The content that sectors of the disks may have.
    pub cells: SectorRegisterModel,
    requests: Vec<TrackedRequest>,
    free: Vec<u64>,
    ids: u64,
    /// Number of sectors compared.
    pub compared: u64,
}

impl DeviceModel {
    /// Creates a model over `cells`.
    #[must_use]
    pub fn new(cells: SectorRegisterModel) -> DeviceModel {
        DeviceModel { cells, requests: Vec::new(), free: Vec::new(), ids: 0, compared: 0 }
    }

    /// Number of requests in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.requests.len() - self.free.len()
    }

    /// Number of requests in flight on devices for which `hangs` is false.
    pub(crate) fn in_flight_but(&self, hangs: &dyn Fn(usize) -> bool) -> usize {
        self.requests.iter().filter(|r| r.busy && !hangs(r.device)).count()
    }

    /// Number of requests in flight on `device`.
    #[must_use]
    pub fn in_flight_on(&self, device: usize) -> usize {
        self.requests.iter().filter(|r| r.busy && r.device == device).count()
    }

    /// True if a request in flight changes `device`.
    #[must_use]
    pub fn is_writing(&self, device: usize) -> bool {
        self.requests.iter().any(|r| r.busy && r.device == device && r.op.is_write())
    }

    /// Records a request that begins in `step`: sets its cookie, writes its stamps into the data of
    /// a write, and returns its number. `maps` are the tables through which it may go, the current
    /// one first.
    pub fn begin(
        &mut self,
        bio: &mut Bio,
        device: usize,
        (maps, rules): (&[Arc<ModelTableMap>], RequestRefusalRules),
        step: u64,
        now: Nanos,
    ) -> u64 {
        self.ids += 1;
        let id = self.ids;
        let (sector, len) = (bio.sector.0, bio.sectors.0);
        let (map, more) = (Some(maps[0].clone()), maps[1..].to_vec());
        match bio.op {
            Op::Write => stamp::fill_sectors_with_stamps(&mut bio.data, 0..len, |i| id << 10 | i),
            Op::Read => poison_read_buffer(bio),
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
            record_write_start(&mut self.cells, &request, map);
        }
        match self.requests.get_mut(bio.cookie as usize) {
            Some(slot) => *slot = request,
            None => self.requests.push(request),
        }
        id
    }

    /// Number of the request of `bio`, for the trace.
    #[must_use]
    pub fn id(&self, bio: &Bio) -> u64 {
        self.requests.get(bio.cookie as usize).map_or(0, |r| r.id)
    }

    /// Twice the step in which the request of `bio` began.
    #[must_use]
    pub fn start(&self, bio: &Bio) -> u64 {
        self.requests.get(bio.cookie as usize).map_or(0, |r| r.start)
    }

    /// Records that a failed write took effect.
    pub fn landed(&mut self, disk: usize, sector: u64, stamp: u64, now: u64) {
        let cell = self.cells.index(disk, sector);
        self.cells.end(cell, stamp, now, false, false);
    }

    /// Records that requests in flight on `device` may also go through `map`.
    pub fn remap(&mut self, device: usize, map: &Arc<ModelTableMap>) {
        for r in self.requests.iter_mut().filter(|r| r.busy && r.device == device) {
            let known = r.map.iter().chain(&r.more).any(|m| Arc::ptr_eq(m, map) || m == map);
            if !known {
                record_write_start(&mut self.cells, r, map);
                r.more.push(map.clone());
            }
        }
    }

    /// Advances the horizon of the register model to the oldest request in flight. The cost is one
    /// check per request in flight.
    pub fn advance(&mut self, step: u64) {
        let oldest = self.requests.iter().filter(|r| r.busy).map(|r| r.start).min();
        self.cells.set_horizon(oldest.unwrap_or(2 * step));
    }

    /// Number of the last request that began.
    #[must_use]
    pub fn last(&self) -> u64 {
        self.ids
    }

    /// True if a request with a number up to `id` is in flight.
    #[must_use]
    pub fn has_older(&self, id: u64) -> bool {
        self.requests.iter().any(|r| r.busy && r.id <= id)
    }

    /// Length of the longest request in flight, in sectors.
    #[must_use]
    pub fn longest(&self) -> u64 {
        self.requests.iter().filter(|r| r.busy).map(|r| r.len).max().unwrap_or_default()
    }

    /// Describes the oldest request in flight, for a person.
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

    /// Forgets all requests without checking their results, because the power was cut in `step`.
    pub fn crash(&mut self, step: u64) {
        self.cells.crash(2 * step + 1);
    }

    /// Removes a request without checking its result.
    ///
    /// # Errors
    /// If the request is not in flight.
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

    /// Checks the result of a request that completed in `env.step`. With a `pardon`, any error is
    /// allowed.
    ///
    /// # Errors
    /// The rule that the result violates.
    pub fn finish(
        &mut self,
        bio: &Bio,
        rules: RequestRefusalRules,
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
            (false, _) => allowed_errors::check_error_is_allowed(r, bio.status, env),
            (true, _) if rules == r.rules && r.breaks(rules) => {
                Err(format!("{} succeeded against the limits of its device", describe_tracked_request(r)))
            }
            (true, Op::Read) => read_check::check_read_data(cells, r, bio, env, compared),
            // A discard is a hint: a target may complete it without passing it on.
            (true, Op::Discard) => Ok(()),
            (true, Op::Write) => check_not_error_range(r).and_then(|()| check_write_data_unchanged(r, bio)),
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
    pub(crate) fn breaks(&self, rules: RequestRefusalRules) -> bool {
        let uneven = self.op != Op::Flush && !(self.sector | self.len).is_multiple_of(rules.block);
        uneven || (rules.read_only && self.op.is_write())
    }
}

/// Records in the registers below `map` that a write begins.
fn record_write_start(cells: &mut SectorRegisterModel, r: &TrackedRequest, map: &ModelTableMap) {
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

/// Changes a byte of each sector, so that a sector that is not read is noticed.
fn poison_read_buffer(bio: &mut Bio) {
    for piece in bio.data.iter_mut() {
        for sector in piece.chunks_mut(udm_core::SECTOR_SIZE as usize) {
            if let Some(b) = sector.first_mut() {
                *b = !*b;
            }
        }
    }
}

/// Checks that a successful request did not touch sectors that can only fail.
fn check_not_error_range(r: &TrackedRequest) -> Result<(), Violation> {
    let fails_at =
        |m: &ModelTableMap, s: u64| m.cell(s) == ERROR && (m.drops(s).is_none() || s >= m.sectors());
    let fails = |m: &Arc<ModelTableMap>| (0..r.len).any(|i| fails_at(m, r.sector + i));
    if r.map.iter().chain(&r.more).all(fails) {
        return Err(format!("{} succeeded on a range that can only fail", describe_tracked_request(r)));
    }
    Ok(())
}

/// Checks that the data of a write is unchanged. A target may change only a copy.
fn check_write_data_unchanged(r: &TrackedRequest, bio: &Bio) -> Result<(), Violation> {
    let mut same = true;
    stamp::for_each_sector_stamp(&bio.data, |i, got| same &= got == Some(r.id << 10 | i));
    if same {
        Ok(())
    } else {
        Err(format!("{} came back with its data changed", describe_tracked_request(r)))
    }
}

pub(crate) fn describe_tracked_request(r: &TrackedRequest) -> String {
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
