//! The permitted results of requests, and the data that reads may return.
//!
//! A remote disk (an export, a namespace) is a list of registers ([`crate::register_model`]), one
//! per sector. A request lasts from its submit until its completion. A failed request may or may
//! not have happened, but it does not happen later, because its connection is dead by then.

use crate::disk::OWN;
use crate::model::Violation;
use crate::register_model::{ANY, SectorRegisterModel};
use crate::stamp;
use std::collections::BTreeMap;
use udm_core::{Bio, BioFlags, Limits, Nanos, Op, Status};

/// Time after a fault during which a lane may still fail requests. It backs off for up to 5 s,
/// allows 10 s for a handshake, and waits up to 30 s if a connection cannot be proved dead.
const EXCUSE: Nanos = Nanos(60_000_000_000);

/// Sectors per read while all data is read back.
const CHECK: u64 = 64;

/// A request in flight.
#[derive(Clone, Debug)]
struct OutstandingRequest {
    device: usize,
    op: Op,
    flags: BioFlags,
    sector: u64,
    sectors: u64,
    /// Twice the step in which the request was submitted.
    start: u64,
    /// Simulated time of the submit.
    at: Nanos,
    /// True for an invalid request, which must fail.
    wild: bool,
    /// Number of faults of the export at the submit; `said_no` is the number of error replies.
    faults: u64,
    said_no: u64,
}

/// The model of an export or namespace, and of the device that uses it.
pub(crate) struct ExportModel {
    pub(crate) cells: SectorRegisterModel,
    pub(crate) limits: Limits,
    /// True if the device queues requests while there is no path, so path errors must not reach the
    /// front end.
    pub(crate) holds: bool,
    /// True if there is a deadline, so a path may fail for being slow while the world is busy.
    pub(crate) late: bool,
    /// Number of faults so far.
    pub(crate) faults: u64,
    /// Number of requests that servers have answered with an error.
    pub(crate) said_no: u64,
    /// Time until which past faults may cause errors.
    excused: Nanos,
    /// Time of the last power cut: twice the step plus one.
    crashed: u64,
    /// Next sector to read back.
    pub(crate) check: u64,
    pub(crate) in_flight: usize,
}

impl ExportModel {
    pub(crate) fn new(index: usize, limits: Limits, holds: bool) -> ExportModel {
        ExportModel {
            cells: SectorRegisterModel::new(&[limits.size.0], |_, sector| {
                make_initial_sector_stamp(index, sector)
            }),
            limits,
            holds,
            late: false,
            faults: 0,
            said_no: 0,
            excused: Nanos(0),
            crashed: 0,
            check: limits.size.0,
            in_flight: 0,
        }
    }

    /// Records a fault at `now`.
    pub(crate) fn trouble(&mut self, now: Nanos) {
        self.faults += 1;
        self.excused = self.excused.max(now + EXCUSE);
    }

    /// Records a power cut.
    pub(crate) fn crash(&mut self, step: u64) {
        self.crashed = 2 * step + 1;
        self.cells.crash_below(self.crashed);
    }
}

/// Initial stamp of a sector.
pub(crate) fn make_initial_sector_stamp(export: usize, sector: u64) -> u64 {
    OWN | (export as u64) << 40 | sector
}

/// The model of all exports and requests.
#[derive(Default)]
pub(crate) struct RemoteDiskModel {
    pub(crate) exports: Vec<ExportModel>,
    asked: BTreeMap<u64, OutstandingRequest>,
    ids: u64,
    /// Completed requests, by operation; `errors` counts failures, `compared` compared sectors.
    pub(crate) requests: [u64; 5],
    pub(crate) errors: u64,
    pub(crate) compared: u64,
}

impl RemoteDiskModel {
    /// Number of requests in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.asked.len()
    }

    /// Time at which the oldest request in flight was submitted.
    pub(crate) fn oldest_at(&self) -> Option<Nanos> {
        self.asked.values().map(|asked| asked.at).min()
    }

    /// Time at which request `id`, which is in flight, was submitted.
    pub(crate) fn submitted_at(&self, id: u64) -> Option<Nanos> {
        self.asked.get(&id).map(|asked| asked.at)
    }

    /// Describes the oldest request in flight, for a person.
    pub(crate) fn oldest(&self) -> String {
        self.asked.iter().next().map_or_else(String::new, |(id, asked)| {
            let OutstandingRequest { device, op, sector, sectors, at, .. } = asked;
            format!("request {id}, a {op:?} of d{device} {sector}+{sectors} since {} us", at.0 / 1000)
        })
    }

    /// Advances the horizon of the register models to the oldest request in flight.
    pub(crate) fn forget(&mut self, step: u64) {
        let oldest = self.asked.values().map(|asked| asked.start).min().unwrap_or(2 * step);
        self.exports.iter_mut().for_each(|export| export.cells.set_horizon(oldest));
    }

    /// Returns the next range of `device` to read back.
    pub(crate) fn next_readback(&mut self, device: usize) -> Option<(u64, u64)> {
        let export = &mut self.exports[device];
        let most = CHECK.min(export.limits.max_sectors.0);
        let len = (export.limits.size.0 - export.check).min(most);
        export.check += len;
        (len > 0).then_some((export.check - len, len))
    }

    /// Records the submit of `bio` to `device`. Sets its cookie and the data of a write, and
    /// returns its number.
    pub(crate) fn begin(&mut self, device: usize, bio: &mut Bio, step: u64, now: Nanos) -> u64 {
        self.ids += 1;
        let (id, start) = (self.ids, 2 * step);
        let export = &mut self.exports[device];
        let wild = export.limits.check(bio.op, bio.sector, bio.sectors).is_err();
        let (sector, sectors) = (bio.sector.0, bio.sectors.0);
        bio.cookie = id;
        if bio.op == Op::Write {
            stamp::fill_sectors_with_stamps(&mut bio.data, 0..sectors, |i| id << 10 | i);
        }
        if bio.op.is_write() && !wild {
            for i in 0..sectors {
                let cell = export.cells.index(0, sector + i);
                export.cells.begin(cell, id, make_written_sector_stamp(bio.op, id, i), start);
            }
        }
        let (faults, said_no) = (export.faults, export.said_no);
        let (op, flags) = (bio.op, bio.flags);
        export.in_flight += 1;
        let asked =
            OutstandingRequest { device, op, flags, sector, sectors, start, at: now, wild, faults, said_no };
        self.asked.insert(id, asked);
        id
    }

    /// Checks the completed `bio`, and returns its device. `quiet` is true if nothing fails any
    /// more.
    ///
    /// # Errors
    /// If the result is not permitted.
    pub(crate) fn end(&mut self, bio: &Bio, step: u64, quiet: bool) -> Result<usize, Violation> {
        let id = bio.cookie;
        let Some(asked) = self.asked.remove(&id) else { return Err(format!("request {id} is back twice")) };
        let OutstandingRequest { device, op, flags, sector, sectors, start, .. } = asked;
        let what = || format!("request {id}, a {op:?} of d{device} {sector}+{sectors},");
        if (bio.op, bio.flags, bio.sector.0, bio.sectors.0) != (op, flags, sector, sectors) {
            return Err(format!("{} is back as {:?} {}+{}", what(), bio.op, bio.sector, bio.sectors));
        }
        let (now, ok) = (2 * step + 1, bio.status.is_ok());
        let export = &mut self.exports[device];
        export.in_flight -= 1;
        self.requests[op as usize] += 1;
        self.errors += u64::from(!ok);
        let excused = asked.at <= export.excused || export.faults > asked.faults || (export.late && !quiet);
        let may = match bio.status {
            Status::Ok => !asked.wild,
            _ if asked.wild => true,
            // A server that refused a request may also refuse another request for the same range.
            status if status.is_path_error() => (excused || export.said_no > asked.said_no) && !export.holds,
            _ => export.said_no > asked.said_no,
        };
        if !may {
            return Err(format!("{} ended with {:?}, for no reason", what(), bio.status));
        }
        if asked.wild {
            return Ok(device);
        }
        // A write that was executed before the power cut and acknowledged after it may be lost.
        let sure = ok && start > export.crashed;
        if op.is_write() {
            for i in 0..sectors {
                let cell = export.cells.index(0, sector + i);
                export.cells.end(cell, id, now, sure, flags.contains(BioFlags::FUA));
            }
        }
        let flushes = op == Op::Flush || flags.contains(BioFlags::PREFLUSH);
        if sure && flushes {
            export.cells.flushed(0, start);
        }
        match op {
            Op::Read if ok => self.compare(&asked, bio, now).map_err(|e| format!("{} {e}", what()))?,
            Op::Write => {
                let mut changed = None;
                stamp::for_each_sector_stamp(&bio.data, |i, found| {
                    changed = changed.or((found != Some(id << 10 | i)).then_some(i));
                });
                if let Some(i) = changed {
                    return Err(format!("{} came back with sector {i} of its data changed", what()));
                }
            }
            _ => {}
        }
        Ok(device)
    }

    fn compare(&mut self, asked: &OutstandingRequest, bio: &Bio, now: u64) -> Result<(), Violation> {
        let export = &mut self.exports[asked.device];
        // Data that the read saw before the power cut may be lost by now.
        let (cells, start, lasts) = (&mut export.cells, asked.start, asked.start > export.crashed);
        let (mut wrong, mut n) = (None, 0);
        stamp::for_each_sector_stamp(&bio.data, |i, found| {
            let cell = cells.index(0, asked.sector + i);
            n += 1;
            match found {
                Some(found) if cells.allows(cell, found, start) => {
                    if lasts {
                        cells.seen(cell, found, start, now);
                    }
                }
                _ if wrong.is_some() => {}
                _ => {
                    let found = found.map_or_else(|| "a mixture".into(), crate::register_model::stamp_text);
                    let may = cells.describe(cell);
                    wrong =
                        Some(format!("brought {found} at sector {}, which may hold{may}", asked.sector + i));
                }
            }
        });
        self.compared += n;
        match (wrong, n == asked.sectors) {
            (Some(wrong), _) => Err(wrong),
            (None, true) => Ok(()),
            (None, false) => Err(format!("brought {n} sectors")),
        }
    }
}

/// Stamp that a request writes to its sector `nth`.
fn make_written_sector_stamp(op: Op, id: u64, nth: u64) -> u64 {
    match op {
        Op::Write => id << 10 | nth,
        Op::Discard => ANY,
        _ => 0,
    }
}
