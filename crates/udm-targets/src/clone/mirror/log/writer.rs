//! Writes of a log, by a lane or by the task. The user of a writer sends its requests.

use super::MirrorLog;
use std::collections::BTreeSet;
use std::sync::Arc;
use udm_core::{Batch, Bio, BioFlags, BioPool, Buf, Op, Sector, Status};
use udm_wire::mirror_log::{UNIT, UNIT_LEN};

/// The maximum number of regions that become dirty by one write of the log.
const REGIONS_MAX: usize = 4096;

/// The purpose of a write of the log.
enum LogChange {
    /// These regions become dirty. `flushes` while the log is being flushed.
    Dirty { regions: Vec<u64>, flushes: bool },
    /// Regions are clean. Needs no flush: a bit that is lost costs a copy.
    Clean,
}

/// A write of the log in progress.
struct LogWrite {
    change: LogChange,
    in_flight: usize,
    failure: Status,
}

/// The end of a write of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::clone::mirror) enum LogWriteEnd {
    /// It goes on.
    Unfinished,
    /// The log says so. Those who wait for it must be woken.
    Done,
    /// The log failed with this status, for the first time.
    Failed(Status),
}

/// The writer of a lane or of the task.
pub(in crate::clone::mirror) struct LogWriter {
    log: Arc<MirrorLog>,
    write: Option<LogWrite>,
    out: Batch,
    pool: BioPool,
}

impl LogWriter {
    pub(in crate::clone::mirror) fn new(log: &Arc<MirrorLog>) -> LogWriter {
        LogWriter { log: Arc::clone(log), write: None, out: Vec::new(), pool: BioPool::new(usize::MAX) }
    }

    /// True if nothing is in flight.
    pub(in crate::clone::mirror) fn is_idle(&self) -> bool {
        self.write.is_none()
    }

    /// The requests that can be sent now, to the device of the log.
    pub(in crate::clone::mirror) fn take_requests(&mut self) -> std::vec::Drain<'_, Box<Bio>> {
        self.out.drain(..)
    }

    /// Begins to make those of `regions` dirty that are not, if the log works and nobody writes it.
    pub(in crate::clone::mirror) fn begin_dirty(&mut self, regions: impl Iterator<Item = u64>) {
        if self.write.is_some() || !self.log.works() {
            return;
        }
        let regions: BTreeSet<u64> =
            regions.filter(|region| !self.log.is_dirty(*region)).take(REGIONS_MAX).collect();
        if regions.is_empty() || !self.log.begin_write() {
            return;
        }
        regions.iter().for_each(|region| self.log.set_clean(*region, false));
        let regions: Vec<u64> = regions.into_iter().collect();
        let units = self.units_of(&regions);
        self.begin(LogChange::Dirty { regions, flushes: false }, units);
    }

    /// Begins to make those of `regions` clean that are still being cleaned. Returns false if the
    /// log is being written: the caller tries again.
    pub(super) fn begin_clean(&mut self, regions: &[u64]) -> bool {
        if self.write.is_some() || !self.log.begin_write() {
            return false;
        }
        let regions: Vec<u64> =
            regions.iter().copied().filter(|region| self.log.end_cleaning(*region)).collect();
        if regions.is_empty() {
            self.log.end_write();
            return true;
        }
        regions.iter().for_each(|region| self.log.set_clean(*region, true));
        let units = self.units_of(&regions);
        self.begin(LogChange::Clean, units);
        true
    }

    fn units_of(&self, regions: &[u64]) -> BTreeSet<u64> {
        regions.iter().flat_map(|region| self.log.layout.units_of(*region)).collect()
    }

    fn begin(&mut self, change: LogChange, units: BTreeSet<u64>) {
        self.write = Some(LogWrite { change, in_flight: units.len(), failure: Status::Ok });
        for unit in units {
            let mut bytes = Box::new([0; UNIT_LEN]);
            self.log.encode_unit(unit, &mut bytes);
            let mut data = Buf::zeroed(UNIT_LEN);
            data.copy_from_slice(&bytes[..]);
            self.push(Op::Write, unit * UNIT.0, Some(data));
        }
    }

    fn push(&mut self, op: Op, sector: u64, data: Option<Buf>) {
        let mut bio = self.pool.get().expect("the pool has no bound");
        bio.sectors = if data.is_some() { UNIT } else { udm_core::Sectors::ZERO };
        bio.data = data.map(Into::into).unwrap_or_default();
        (bio.op, bio.flags, bio.sector, bio.cookie) = (op, BioFlags::META, Sector(sector), 0);
        self.out.push(bio);
    }

    /// Takes a completed request of the writer, after [`Bio::finish`].
    pub(in crate::clone::mirror) fn complete(&mut self, mut bio: Box<Bio>) -> LogWriteEnd {
        let status = std::mem::replace(&mut bio.status, Status::Ok);
        bio.data = Default::default();
        self.pool.put(bio);
        let Some(write) = &mut self.write else { return LogWriteEnd::Unfinished };
        write.in_flight -= 1;
        if write.failure.is_ok() {
            write.failure = status;
        }
        if write.in_flight > 0 {
            return LogWriteEnd::Unfinished;
        }
        let failure = write.failure;
        match &mut write.change {
            LogChange::Dirty { flushes, .. } if failure.is_ok() && !*flushes => {
                *flushes = true;
                write.in_flight = 1;
                self.push(Op::Flush, 0, None);
                return LogWriteEnd::Unfinished;
            }
            LogChange::Dirty { regions, .. } if failure.is_ok() => {
                regions.iter().for_each(|region| self.log.set_dirty(*region));
                self.log.task_queue.wake_up();
            }
            _ => {}
        }
        self.write = None;
        // Before the right is given back, so that nobody writes once more.
        let is_first = !failure.is_ok() && self.log.fail(failure);
        self.log.end_write();
        if is_first { LogWriteEnd::Failed(failure) } else { LogWriteEnd::Done }
    }
}

/// A writer that is dropped with work in flight must not stop the others.
impl Drop for LogWriter {
    fn drop(&mut self) {
        if self.write.take().is_some() {
            self.log.end_write();
        }
    }
}
