//! Rules for the log of a log-writes target, derived only from the requests of the front ends.
//!
//! Each written sector names its request, so the log shows the position of each write. The rules
//! hold at any time, for a killed server (the current content of the log disk) and for a power cut
//! (its durable content):
//!
//! * The entries that the superblock counts can be read, and each write in them was requested.
//! * **Order.** Of two writes to one sector, a write that ended before the other began comes first.
//!   So a replay never replaces new data with old data.
//! * **Promises.** An acknowledged FUA write is in the log. All writes that had ended before an
//!   acknowledged flush began are in it, with a flush after them. Answered marks are in it.
//! * **No prefix breaks a promise.** If a write became durable before another one began, its entry
//!   comes first. So each prefix of the log is a state that a power cut could have left.
//!
//! Times are those of [`crate::environment::Env::step`], as in [`crate::register_model`].

use crate::environment::lock_environment;
use crate::model::Violation;
use crate::register_model::NEVER;
use crate::stamp;
use crate::tables::{PassThroughTarget, TableLineTarget, TableSpec};
use crate::world::MappedDeviceStackWorld;
use std::collections::HashMap;
use udm_core::errno::EBUSY;
use udm_core::{Bio, BioFlags, Op, SECTOR_SIZE};
use udm_dm::TargetMessageWaitHandle;
use udm_wire::log_writes::{EntryFlags, LogWritesCursor, LogWritesEntry, LogWritesEntryHeader};

/// Bytes in a sector.
const SECTOR: usize = SECTOR_SIZE as usize;

/// A request of the logging device.
#[derive(Clone)]
struct LoggedRequest {
    id: u64,
    op: Op,
    flags: BioFlags,
    /// First sector on the device.
    first: u64,
    len: u64,
    start: u64,
    end: u64,
    /// True if the request succeeded while the target was logging, and used only this table.
    promised: bool,
    /// True if the request may have gone through another table.
    unsure: bool,
}

/// The model of a log: the live target and its requests.
#[derive(Default)]
pub struct WriteLogModel {
    /// Range of the target on the device: first sector and length.
    line: Option<(u64, u64)>,
    requests: Vec<LoggedRequest>,
    by_id: HashMap<u64, usize>,
    /// Marks that were acknowledged.
    marks: Vec<String>,
    /// Marks that are not acknowledged yet.
    pub(crate) waiting: Vec<(String, TargetMessageWaitHandle)>,
    /// True after the first promise, which shows that this log has replaced the one before.
    begun: bool,
    /// Earlier logs that may still be on the disk while this one has not begun.
    before: Vec<WriteLogModel>,
    marks_given: u64,
    /// Number of checks.
    pub looks: u64,
}

/// The entries of a log, prepared for the checks.
struct WriteLogIndex {
    /// First position of each written sector, by its stamp.
    written: HashMap<u64, usize>,
    /// Position of the last flush.
    last_flush: Option<usize>,
    /// Latest start time of a write up to each position.
    begun: Vec<u64>,
    marks: Vec<Vec<u8>>,
}

impl WriteLogModel {
    /// Starts a new log, if `spec` has one. Requests in flight go through this table, or ended in
    /// the one before.
    pub fn restart(&mut self, spec: &TableSpec) {
        let flying: Vec<LoggedRequest> = self.requests.iter().filter(|r| r.end == NEVER).cloned().collect();
        self.clear();
        let mut start = 0;
        for (len, kind) in &spec.lines {
            if matches!(kind, TableLineTarget::PassThrough(PassThroughTarget::LogWrites(_), ..)) {
                self.line = Some((start, *len));
            }
            start += len;
        }
        self.requests.extend(flying.into_iter().map(|r| LoggedRequest { unsure: true, ..r }));
        self.by_id = self.requests.iter().enumerate().map(|(i, r)| (r.id, i)).collect();
    }

    /// Records that no table is live. The log on the disk remains.
    pub fn clear(&mut self) {
        let WriteLogModel { looks, marks_given, .. } = *self;
        let mut old = std::mem::take(self);
        old.waiting.clear();
        let mut before = std::mem::take(&mut old.before);
        before.extend(old.line.is_some().then_some(old));
        *self = WriteLogModel { looks, marks_given, before, ..WriteLogModel::default() };
    }

    /// True if the live table has a log.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.line.is_some()
    }

    /// Records a request that begins in `step`. `sure` is true if it can go through one table only.
    pub fn begin(&mut self, id: u64, bio: &Bio, step: u64, sure: bool) {
        self.by_id.insert(id, self.requests.len());
        self.requests.push(LoggedRequest {
            id,
            op: bio.op,
            flags: bio.flags,
            first: bio.sector.0,
            len: bio.sectors.0,
            start: 2 * step,
            end: NEVER,
            promised: false,
            unsure: !sure,
        });
    }

    /// Records a completed request. `logging` is true if the target reports that it logs. Returns
    /// true if the completion is a promise to check.
    pub fn end(&mut self, id: u64, bio: &Bio, now: u64, logging: bool) -> bool {
        let Some(r) = self.by_id.get(&id).map(|i| &mut self.requests[*i]) else { return false };
        r.end = now;
        r.promised = bio.status.is_ok() && logging && !r.unsure;
        let promised = self.line.is_some_and(|line| r.is_promise(line));
        if promised {
            self.begin_log();
        }
        promised
    }

    fn begin_log(&mut self) {
        self.begun = true;
        self.before.clear();
    }

    /// Records that a mark was acknowledged, so it must be in the log.
    pub fn marked(&mut self, text: String) {
        self.marks.push(text);
        self.begin_log();
    }

    /// Checks a log of `len` sectors, which `sector` returns.
    ///
    /// # Errors
    /// The rule that the log violates.
    pub fn check(&self, len: u64, sector: impl Fn(u64) -> Vec<u8>) -> Result<(), Violation> {
        let own = self.check_own(len, &sector);
        match self.before.iter().any(|old| old.check_own(len, &sector).is_ok()) {
            true => Ok(()),
            false => own,
        }
    }

    fn check_own(&self, len: u64, sector: &impl Fn(u64) -> Vec<u8>) -> Result<(), Violation> {
        let Some(line) = self.line else { return Ok(()) };
        let first = sector(0);
        let Ok(mut cursor) = LogWritesCursor::new(&first, len * SECTOR_SIZE) else {
            // Before the first superblock the log is empty, so there can be no promise.
            let mark = self.requests.iter().find(|r| r.is_promise(line));
            return mark
                .map_or(Ok(()), |r| Err(format!("there is none, and request {} was acknowledged", r.id)));
        };
        let mut entries =
            WriteLogIndex { written: HashMap::new(), last_flush: None, begun: Vec::new(), marks: Vec::new() };
        // Latest start time of the entries of each sector of the target.
        let mut tops = vec![0; line.1 as usize];
        while let Some(at) = cursor.offset().map_err(|e| e.to_string())? {
            let record = cursor.step(&sector(at / SECTOR_SIZE)).map_err(|e| e.to_string())?;
            self.entry(&record, line, sector, &mut entries, &mut tops)?;
        }
        self.kept(line, &entries)?;
        self.no_beginning_breaks(line, &entries)
    }

    /// Checks one entry: its content and its position.
    fn entry(
        &self,
        record: &LogWritesEntry,
        line: (u64, u64),
        sector: &impl Fn(u64) -> Vec<u8>,
        entries: &mut WriteLogIndex,
        tops: &mut [u64],
    ) -> Result<(), Violation> {
        let position = entries.begun.len();
        let mut begun = entries.begun.last().copied().unwrap_or(0);
        let entry = &record.entry;
        if entry.sector + entry.sectors > line.1 {
            return Err(format!("entry {position} reaches beyond the device: {entry:?}"));
        }
        if entry.flags.contains(EntryFlags::DISCARD) {
            self.discard(position, line.0 + entry.sector, &mut tops[log_entry_sector_range(entry)])?;
        }
        for i in 0..entry.data_sectors() {
            let (s, bytes) = (entry.sector + i, sector(record.data.start / SECTOR_SIZE + i));
            let request = stamp::read_sector_stamp(&bytes[..SECTOR])
                .and_then(|stamp| self.writer_of(stamp, line.0 + s));
            let Some((stamp, r)) = request else {
                return Err(format!("entry {position} holds data that was never written to sector {s}"));
            };
            let top = &mut tops[s as usize];
            if r.end < *top {
                return Err(format!(
                    "entry {position} restores data of request {}, which ended its write of sector {s} at {}; an earlier entry began at {top}",
                    r.id, r.end
                ));
            }
            *top = (*top).max(r.start);
            begun = begun.max(r.start);
            // A write that a suspend handed back half done is logged again as a whole.
            entries.written.entry(stamp).or_insert(position);
        }
        if entry.flags.contains(EntryFlags::FLUSH) {
            entries.last_flush = Some(position);
        }
        entries.marks.extend(record.mark.clone());
        entries.begun.push(begun);
        Ok(())
    }

    /// Returns the request that wrote `stamp` to `sector` of the device.
    fn writer_of(&self, stamp: u64, sector: u64) -> Option<(u64, &LoggedRequest)> {
        let r = &self.requests[*self.by_id.get(&(stamp >> 10))?];
        let right = r.op == Op::Write && r.first + (stamp & 1023) == sector && stamp & 1023 < r.len;
        right.then_some((stamp, r))
    }

    /// Checks a discard, which has no stamp. For each sector, the model needs a discard that may be
    /// at this position. `at` is the start of the range on the device.
    fn discard(&self, position: usize, at: u64, tops: &mut [u64]) -> Result<(), Violation> {
        let end = at + tops.len() as u64;
        let meets = |r: &&LoggedRequest| r.op == Op::Discard && r.first < end && at < r.first + r.len;
        let discards: Vec<&LoggedRequest> = self.requests.iter().filter(meets).collect();
        for (s, top) in (at..end).zip(tops) {
            let fits = |r: &&&LoggedRequest| (r.first..r.first + r.len).contains(&s) && r.end >= *top;
            let Some(begun) = discards.iter().filter(fits).map(|r| r.start).min() else {
                return Err(format!("entry {position} discards sector {s}, and no discard can stand there"));
            };
            *top = (*top).max(begun);
        }
        Ok(())
    }

    /// Stamps of the sectors of `r` that lie on the target.
    fn stamps(r: &LoggedRequest, line: (u64, u64)) -> impl Iterator<Item = u64> + '_ {
        let inside = move |i: &u64| (line.0..line.0 + line.1).contains(&(r.first + i));
        (0..r.len).filter(inside).map(|i| r.id << 10 | i)
    }

    fn kept(&self, line: (u64, u64), entries: &WriteLogIndex) -> Result<(), Violation> {
        let flushes = self.requests.iter().filter(|r| r.promised && r.is_flush());
        let flushed = flushes.map(|r| r.start).max().unwrap_or(0);
        for r in self.requests.iter().filter(|r| r.promised && r.op == Op::Write) {
            let covered = r.end < flushed;
            if !covered && !r.flags.contains(BioFlags::FUA) {
                continue;
            }
            for stamp in WriteLogModel::stamps(r, line) {
                let there = entries.written.get(&stamp);
                let missing =
                    |what: &str| Err(format!("sector {} of request {} is {what}", stamp & 1023, r.id));
                match there {
                    None => return missing("not in the log, and was acknowledged"),
                    Some(at) if covered && entries.last_flush.is_none_or(|flush| flush < *at) => {
                        return missing("in the log after the flush that covered it");
                    }
                    Some(_) => {}
                }
            }
        }
        match self.marks.iter().find(|mark| !entries.marks.iter().any(|m| m == mark.as_bytes())) {
            Some(mark) => Err(format!("the mark {mark} was answered and is not in the log")),
            None => Ok(()),
        }
    }

    fn no_beginning_breaks(&self, line: (u64, u64), entries: &WriteLogIndex) -> Result<(), Violation> {
        // Start and end of acknowledged flushes, by start. The end is the earliest end of all
        // flushes with the same or a later start.
        let mut flushes: Vec<(u64, u64)> =
            self.requests.iter().filter(|r| r.promised && r.is_flush()).map(|r| (r.start, r.end)).collect();
        flushes.sort_unstable();
        for i in (1..flushes.len()).rev() {
            flushes[i - 1].1 = flushes[i - 1].1.min(flushes[i].1);
        }
        for r in self.requests.iter().filter(|r| r.promised && r.op == Op::Write) {
            let flush =
                flushes.get(flushes.partition_point(|(start, _)| *start < r.end)).map(|(_, end)| *end);
            let fua = r.flags.contains(BioFlags::FUA).then_some(r.end);
            let Some(durable) = flush.into_iter().chain(fua).min() else { continue };
            let first_later = entries.begun.partition_point(|begun| *begun <= durable);
            for stamp in WriteLogModel::stamps(r, line) {
                if entries.written.get(&stamp).is_some_and(|at| *at >= first_later) {
                    return Err(format!(
                        "request {} was durable at {durable}, and entry {first_later}, which began later, stands before it",
                        r.id
                    ));
                }
            }
        }
        Ok(())
    }
}

fn log_entry_sector_range(entry: &LogWritesEntryHeader) -> std::ops::Range<usize> {
    entry.sector as usize..(entry.sector + entry.sectors) as usize
}

impl LoggedRequest {
    fn is_flush(&self) -> bool {
        self.op == Op::Flush || self.flags.contains(BioFlags::PREFLUSH)
    }

    /// True if the log must have an entry because the request succeeded.
    fn is_promise(&self, line: (u64, u64)) -> bool {
        let fua = self.flags.contains(BioFlags::FUA) && WriteLogModel::stamps(self, line).next().is_some();
        self.promised && (self.is_flush() || fua)
    }
}

impl MappedDeviceStackWorld {
    /// True if the logging device reports that it logs.
    pub(crate) fn is_logging(&self, device: usize) -> bool {
        !self.devices[device].mapped().status_text().contains("logging_disabled")
    }

    /// Checks the log as a killed server and as a power cut would leave it.
    pub(crate) fn look_at_log(&mut self) -> Result<(), Violation> {
        let (Some(path), true) = (self.blueprint.log, self.log.is_kept()) else { return Ok(()) };
        self.log.looks += 1;
        let env = lock_environment(&self.machine.env);
        let disk = &env.disks[self.blueprint.paths[path]];
        for (durable, when) in [(false, "the server is killed"), (true, "the power is cut")] {
            let looked = self.log.check(disk.sectors(), |sector| disk.bytes(sector, durable));
            looked.map_err(|e| format!("the log, when {when}: {e}"))?;
        }
        Ok(())
    }

    /// Sends a mark. Several marks may be pending.
    pub(crate) fn mark(&mut self, device: usize) -> Result<(), Violation> {
        self.log.marks_given += 1;
        let text = format!("m{}", self.log.marks_given);
        lock_environment(&self.machine.env).say(format!("d{device} message: mark {text}"));
        let at = self.log.line.map_or(0, |(start, _)| start);
        let pending = match self.send(device, at, &format!("mark {text}")) {
            Ok((_, Some(pending))) => pending,
            Ok((_, None)) => {
                return Err(format!("the mark {text} was answered before it could be in the log"));
            }
            // A suspended device, or one that no longer logs, may refuse a mark.
            Err(e) if e.errno == EBUSY && !self.devices[device].is_live() => return Ok(()),
            Err(_) if !self.is_logging(device) => return Ok(()),
            Err(e) => return Err(format!("the mark {text} was refused: {e}")),
        };
        self.machine.totals.messages += 1;
        self.log.waiting.push((text, pending));
        Ok(())
    }

    /// Checks which marks were acknowledged.
    pub(crate) fn take_marks(&mut self) -> Result<(), Violation> {
        let Some(device) = self.blueprint.logger.filter(|_| !self.log.waiting.is_empty()) else {
            return Ok(());
        };
        let dead = lock_environment(&self.machine.env).dead;
        let mut answered = false;
        for (text, pending) in std::mem::take(&mut self.log.waiting) {
            match pending.outcome() {
                None => self.log.waiting.push((text, pending)),
                Some(_) if dead || !self.log.is_kept() => {}
                Some(Ok(())) => {
                    self.log.marked(text);
                    answered = true;
                }
                Some(Err(_)) if !self.is_logging(device) => {}
                Some(Err(e)) => return Err(format!("the mark {text} was taken and then refused: {e}")),
            }
        }
        if answered { self.look_at_log() } else { Ok(()) }
    }
}
