//! What requests may be answered, and what they may read.
//!
//! An export is a list of registers ([`crate::register_model`]), a sector each. A request lasts from when it
//! goes down until it is back. One that has failed may have happened or not, but not later: what it
//! was sent over is dead by then.

use crate::disk::OWN;
use crate::model::Violation;
use crate::register_model::{ANY, RegisterModel};
use crate::stamp;
use std::collections::BTreeMap;
use udm_core::{Bio, BioFlags, Limits, Nanos, Op, Status};

/// For so long behind the end of trouble a lane may fail requests: it backs off five seconds at the
/// most, gives a handshake ten, and waits half a minute for what can't be proved.
const EXCUSE: Nanos = Nanos(60_000_000_000);

/// Sectors of a read, while all is read back.
const CHECK: u64 = 64;

/// A request on its way.
#[derive(Clone, Debug)]
struct OutstandingRequest {
    device: usize,
    op: Op,
    flags: BioFlags,
    sector: u64,
    sectors: u64,
    /// When it went down, twice the step.
    start: u64,
    /// The simulated time then.
    at: Nanos,
    /// Nobody should ask for that: it must fail.
    wild: bool,
    /// Faults and refusals of its export then.
    faults: u64,
    said_no: u64,
}

/// An export, and the one device that uses it.
pub(super) struct ExportModel {
    pub(super) cells: RegisterModel,
    pub(super) limits: Limits,
    /// Its device holds requests while there is no path: errors of paths do not come up.
    pub(super) holds: bool,
    /// There is a deadline: paths fail for being slow, while anything is going on.
    pub(super) late: bool,
    /// What went wrong with it so far.
    pub(super) faults: u64,
    /// Requests that servers have answered with an error.
    pub(super) said_no: u64,
    /// Until then requests may fail because of what was.
    excused: Nanos,
    /// When its power was last cut, twice the step.
    crashed: u64,
    /// Where the read of all stands, and the next read of it.
    pub(super) check: u64,
    pub(super) in_flight: usize,
}

impl ExportModel {
    pub(super) fn new(index: usize, limits: Limits, holds: bool) -> ExportModel {
        ExportModel {
            cells: RegisterModel::new(&[limits.size.0], |_, sector| first(index, sector)),
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

    /// Something is wrong with it at `now`.
    pub(super) fn trouble(&mut self, now: Nanos) {
        self.faults += 1;
        self.excused = self.excused.max(now + EXCUSE);
    }

    /// Its power is cut.
    pub(super) fn crash(&mut self, step: u64) {
        self.crashed = 2 * step + 1;
        self.cells.crash_below(self.crashed);
    }
}

/// The first content of a sector.
pub(super) fn first(export: usize, sector: u64) -> u64 {
    OWN | (export as u64) << 40 | sector
}

/// See the module's documentation.
#[derive(Default)]
pub(super) struct NbdClientModel {
    pub(super) exports: Vec<ExportModel>,
    asked: BTreeMap<u64, OutstandingRequest>,
    ids: u64,
    /// Requests back, by operation; those with an error; sectors compared.
    pub(super) requests: [u64; 5],
    pub(super) errors: u64,
    pub(super) compared: u64,
}

impl NbdClientModel {
    /// Requests on their way.
    pub(super) fn in_flight(&self) -> usize {
        self.asked.len()
    }

    /// The oldest of them, for a person.
    pub(super) fn oldest(&self) -> String {
        self.asked.iter().next().map_or_else(String::new, |(id, asked)| {
            let OutstandingRequest { device, op, sector, sectors, at, .. } = asked;
            format!("request {id}, a {op:?} of d{device} {sector}+{sectors} since {} us", at.0 / 1000)
        })
    }

    /// No read that began before any of those on their way is still to be compared.
    pub(super) fn forget(&mut self, step: u64) {
        let oldest = self.asked.values().map(|asked| asked.start).min().unwrap_or(2 * step);
        self.exports.iter_mut().for_each(|export| export.cells.set_horizon(oldest));
    }

    /// The next range to read back of `device`.
    pub(super) fn next_readback(&mut self, device: usize) -> Option<(u64, u64)> {
        let export = &mut self.exports[device];
        let most = CHECK.min(export.limits.max_sectors.0);
        let len = (export.limits.size.0 - export.check).min(most);
        export.check += len;
        (len > 0).then_some((export.check - len, len))
    }

    /// `bio` goes down to `device`: its number and, of a write, its data are put in here.
    pub(super) fn begin(&mut self, device: usize, bio: &mut Bio, step: u64, now: Nanos) -> u64 {
        self.ids += 1;
        let (id, start) = (self.ids, 2 * step);
        let export = &mut self.exports[device];
        let wild = export.limits.check(bio.op, bio.sector, bio.sectors).is_err();
        let (sector, sectors) = (bio.sector.0, bio.sectors.0);
        bio.cookie = id;
        if bio.op == Op::Write {
            stamp::write(&mut bio.data, 0..sectors, |i| id << 10 | i);
        }
        if bio.op.is_write() && !wild {
            for i in 0..sectors {
                let cell = export.cells.index(0, sector + i);
                export.cells.begin(cell, id, write_stamp(bio.op, id, i), start);
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

    /// `bio` is back: its device. `quiet` while nothing goes wrong any more.
    ///
    /// # Errors
    /// An answer that can't be.
    pub(super) fn end(&mut self, bio: &Bio, step: u64, quiet: bool) -> Result<usize, Violation> {
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
            // A server that says no and is asked for another block may say no again.
            status if status.is_path_error() => (excused || export.said_no > asked.said_no) && !export.holds,
            _ => export.said_no > asked.said_no,
        };
        if !may {
            return Err(format!("{} ended with {:?}, for no reason", what(), bio.status));
        }
        if asked.wild {
            return Ok(device);
        }
        // What was done before the power was cut, and told behind that, may be lost.
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
                stamp::read(&bio.data, |i, found| {
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
        // What it saw before the power was cut may be lost by now.
        let (cells, start, lasts) = (&mut export.cells, asked.start, asked.start > export.crashed);
        let (mut wrong, mut n) = (None, 0);
        stamp::read(&bio.data, |i, found| {
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

/// What a request puts into its sector `nth`.
fn write_stamp(op: Op, id: u64, nth: u64) -> u64 {
    match op {
        Op::Write => id << 10 | nth,
        Op::Discard => ANY,
        _ => 0,
    }
}
