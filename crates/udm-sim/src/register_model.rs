//! Model of the content of disks: the values that each sector may have.
//!
//! A sector is a register. Each write that still matters is an entry: its start, its end, and the
//! time since which no read can return it because a later write replaced it. A read may return any
//! entry that was readable at some time during the read. Times are those of
//! [`crate::environment::Env::step`]: an operation that starts in step *n* starts at 2*n*, and one
//! that ends in step *n* ends at 2*n*+1.
//!
//! * A successful write that began after another had ended replaces it.
//! * A write that failed, or whose sector was not certain (its table changed meanwhile), may or may
//!   not have happened: it replaces nothing.
//! * A replaced entry may return after a crash. This ends when its replacement is durable: by FUA,
//!   or by a flush that began after the replacement had ended.

/// A time that is not reached yet.
pub const NEVER: u64 = u64::MAX;

/// A write to one sector.
#[derive(Clone, Copy, Debug)]
struct SectorWriteRecord {
    /// Unique number: the request, and the sector within it.
    id: u64,
    /// The value written; [`ANY`] for a discard.
    stamp: u64,
    start: u64,
    end: u64,
    /// True if the write certainly happened.
    sure: bool,
    durable: bool,
    /// A read that returns this entry must have begun before this time.
    dead: u64,
    /// True if not even a crash can restore the entry.
    gone: bool,
    /// True if the write went to another disk of which this one is a copy. No flush of this disk
    /// makes it durable.
    inherited: bool,
}

impl SectorWriteRecord {
    /// Creates the record of a write that may be neither executed nor durable.
    fn new(id: u64, stamp: u64, start: u64, end: u64) -> SectorWriteRecord {
        SectorWriteRecord {
            id,
            stamp,
            start,
            end,
            sure: false,
            durable: false,
            dead: NEVER,
            gone: false,
            inherited: false,
        }
    }
}

/// Stamp of a discard: any value may be read.
pub const ANY: u64 = u64::MAX;

#[derive(Clone, Debug, Default)]
struct SectorRegister {
    entries: Vec<SectorWriteRecord>,
    /// True if the register is in the list of those that a crash changes.
    dirty: bool,
    /// Index of the disk.
    disk: u8,
    /// Start of the latest flush that was applied to this register.
    synced: u64,
}

impl SectorRegister {
    /// Applies the successful flushes, of which the latest began at `start`. This can be done
    /// later, because a flush covers only writes that ended before its start.
    fn sync(&mut self, start: u64) {
        if std::mem::replace(&mut self.synced, start) == start {
            return;
        }
        let mut latest = None;
        for e in self.entries.iter_mut().filter(|e| e.sure && !e.inherited && e.end < start) {
            e.durable = true;
            latest = latest.max(Some(e.start));
        }
        if let Some(latest) = latest {
            for e in self.entries.iter_mut().filter(|e| e.end < latest) {
                e.gone = true;
            }
        }
    }
}

/// The registers of all sectors of all disks, disk by disk.
pub struct SectorRegisterModel {
    cells: Vec<SectorRegister>,
    /// First register of each disk.
    starts: Vec<u32>,
    /// Registers written since the last crash, by disk.
    dirty: Vec<Vec<u32>>,
    /// Latest start of a successful flush, by disk.
    flushed: Vec<u64>,
    /// Time before which no read in flight began.
    horizon: u64,
}

impl SectorRegisterModel {
    /// Creates registers for disks of these sizes, with the initial content `first(disk, sector)`.
    #[must_use]
    pub fn new(sizes: &[u64], first: impl Fn(usize, u64) -> u64) -> SectorRegisterModel {
        let mut cells = Vec::new();
        let mut starts = Vec::new();
        for (disk, size) in sizes.iter().enumerate() {
            starts.push(cells.len() as u32);
            cells.extend((0..*size).map(|sector| {
                let stamp = first(disk, sector);
                let record = SectorWriteRecord::new(0, stamp, 0, 0);
                let entry = SectorWriteRecord { sure: true, durable: true, ..record };
                SectorRegister { entries: vec![entry], dirty: false, disk: disk as u8, synced: 0 }
            }));
        }
        SectorRegisterModel {
            cells,
            dirty: vec![Vec::new(); starts.len()],
            flushed: vec![0; starts.len()],
            starts,
            horizon: 0,
        }
    }

    /// Returns the register of a sector.
    #[must_use]
    pub fn index(&self, disk: usize, sector: u64) -> u32 {
        self.starts[disk] + sector as u32
    }

    /// Returns the disk and sector of a register.
    #[must_use]
    pub fn place(&self, cell: u32) -> (usize, u64) {
        let disk = self.starts.partition_point(|s| *s <= cell) - 1;
        (disk, u64::from(cell - self.starts[disk]))
    }

    /// Sets the time before which no read in flight began.
    pub fn set_horizon(&mut self, start: u64) {
        self.horizon = start;
    }

    /// Records the start of a write. Returns false if the write was recorded before.
    pub fn begin(&mut self, cell: u32, id: u64, stamp: u64, start: u64) -> bool {
        let horizon = self.horizon;
        let slot = &mut self.cells[cell as usize];
        if slot.entries.len() > 1 {
            if slot.entries.iter().any(|e| e.id == id) {
                return false;
            }
            slot.sync(self.flushed[usize::from(slot.disk)]);
            slot.entries.retain(|e| !(e.gone && e.dead < horizon));
        }
        slot.entries.push(SectorWriteRecord::new(id, stamp, start, NEVER));
        if !slot.dirty {
            slot.dirty = true;
            self.dirty[usize::from(slot.disk)].push(cell);
        }
        true
    }

    /// Records the end of a write: it certainly happened if `sure`, and is on the medium if
    /// `durable`.
    pub fn end(&mut self, cell: u32, id: u64, now: u64, sure: bool, durable: bool) {
        let slot = &mut self.cells[cell as usize];
        let Some(own) = slot.entries.iter_mut().find(|e| e.id == id) else { return };
        own.end = now;
        own.sure = sure;
        own.durable = sure && durable;
        if !sure {
            return;
        }
        let (start, durable) = (own.start, own.durable);
        for e in &mut slot.entries {
            if e.end < start {
                e.dead = e.dead.min(now);
                e.gone |= durable;
            }
        }
    }

    /// True if a read that began at `start` may return `stamp`.
    #[must_use]
    pub fn allows(&self, cell: u32, stamp: u64, start: u64) -> bool {
        self.cells[cell as usize]
            .entries
            .iter()
            .any(|e| (e.stamp == stamp || e.stamp == ANY) && e.dead > start)
    }

    /// True if reads of both registers that begin at `now` may return the same value.
    #[must_use]
    pub fn may_be_equal(&self, one: u32, other: u32, now: u64) -> bool {
        let alive = |cell: u32| self.cells[cell as usize].entries.iter().filter(move |e| e.dead > now);
        let same = |e: &SectorWriteRecord| {
            alive(other).any(|o| o.stamp == e.stamp || o.stamp == ANY || e.stamp == ANY)
        };
        alive(one).any(same)
    }

    /// Records that a read from `start` to `now` returned `stamp`. Values older than the write of
    /// `stamp` are not readable any more. If no write was in progress meanwhile, no other value is.
    pub fn seen(&mut self, cell: u32, stamp: u64, start: u64, now: u64) {
        let slot = &mut self.cells[cell as usize];
        if slot.entries.len() < 2 {
            return;
        }
        let quiet = !slot.entries.iter().any(|e| e.end >= start || e.stamp == ANY);
        // A stamp identifies its write. Zeroes may come from several writes, and a discard leaves
        // any value.
        let begun = match (quiet, slot.entries.iter().find(|e| e.stamp == stamp && stamp != 0)) {
            (true, _) => NEVER,
            (false, Some(own)) => own.start,
            (false, None) => return,
        };
        for e in &mut slot.entries {
            if e.stamp != stamp && e.end < begun {
                e.dead = e.dead.min(now);
            }
        }
    }

    /// Records a successful flush of `disk` that began at `start`.
    pub fn flushed(&mut self, disk: usize, start: u64) {
        self.flushed[disk] = self.flushed[disk].max(start);
    }

    /// Makes disk `to` a copy of disk `from` at time `now`. With several sources, each sector may
    /// come from any of them. A write in progress on `from` is included if `reached` is true for
    /// its sector and stamp. A request that was handed back may have taken partial effect. Writes
    /// in progress on `to` remain.
    pub fn copy(
        &mut self,
        from: &[usize],
        to: usize,
        sectors: u64,
        now: u64,
        reached: impl Fn(u64, u64) -> bool,
    ) {
        self.flushed[to] = 0;
        for sector in 0..sectors {
            let target = self.index(to, sector);
            let mut entries: Vec<SectorWriteRecord> = Vec::new();
            for from in from {
                let (source, flushed) = (self.index(*from, sector) as usize, self.flushed[*from]);
                self.cells[source].sync(flushed);
                let there =
                    |e: &&SectorWriteRecord| e.end != NEVER || e.stamp == ANY || reached(sector, e.stamp);
                let there = self.cells[source].entries.iter().filter(there);
                entries.extend(there.map(|e| SectorWriteRecord {
                    inherited: true,
                    end: e.end.min(now),
                    ..*e
                }));
            }
            let slot = &mut self.cells[target as usize];
            entries.extend(slot.entries.iter().filter(|e| e.end == NEVER));
            (slot.entries, slot.synced) = (entries, 0);
            if slot.entries.len() > 1 && !std::mem::replace(&mut slot.dirty, true) {
                self.dirty[to].push(target);
            }
        }
    }

    /// Records that a sector may hold `stamp` since before `now`, although its own writes do not
    /// show it.
    pub fn may_hold(&mut self, cell: u32, stamp: u64, now: u64) {
        let slot = &mut self.cells[cell as usize];
        // A replaced value may have been written again from another place.
        if slot.entries.iter().any(|e| (e.stamp == stamp || e.stamp == ANY) && e.dead > now) {
            return;
        }
        let record = SectorWriteRecord::new(0, stamp, 0, now);
        slot.entries.push(SectorWriteRecord { inherited: true, ..record });
        if !std::mem::replace(&mut slot.dirty, true) {
            self.dirty[usize::from(slot.disk)].push(cell);
        }
    }

    /// Models a power cut of all disks: no write remains in progress, and each sector holds its
    /// last durable value or any later one.
    pub fn crash(&mut self, now: u64) {
        self.horizon = now;
        self.cut_power(now, false);
    }

    /// Models a power cut below lanes that continue: writes in progress remain.
    pub fn crash_below(&mut self, now: u64) {
        self.cut_power(now, true);
    }

    fn cut_power(&mut self, now: u64, goes_on: bool) {
        let horizon = self.horizon;
        for (list, flushed) in self.dirty.iter_mut().zip(&self.flushed) {
            list.retain(|cell| {
                let slot = &mut self.cells[*cell as usize];
                slot.sync(*flushed);
                // A read in progress may have returned an entry that was lost since.
                slot.entries.retain(|e| !e.gone || (goes_on && e.dead > horizon));
                let alone = slot.entries.iter().filter(|e| !e.gone).count() == 1;
                for e in slot.entries.iter_mut().filter(|e| !e.gone) {
                    e.dead = NEVER;
                    if !(goes_on && e.end == NEVER) {
                        e.end = e.end.min(now);
                    }
                    e.sure = alone;
                    e.durable = alone;
                }
                slot.dirty = !alone;
                slot.dirty
            });
        }
    }

    /// Describes the values that a register may have, for a person.
    #[must_use]
    pub fn describe(&self, cell: u32) -> String {
        let mut text = String::new();
        for e in &self.cells[cell as usize].entries {
            let span = |t: u64| if t == NEVER { "...".to_string() } else { t.to_string() };
            let (value, s, end, dead) = (stamp_text(e.stamp), e.start, span(e.end), span(e.dead));
            let sure = if e.sure { "" } else { " unsure" };
            let durable = if e.durable { " durable" } else { "" };
            text += &format!("\n    {value} written {s}..{end}{sure}{durable}, readable until {dead}");
        }
        text
    }

    /// Length of the longest list of entries, which determines the cost of the model.
    #[must_use]
    pub fn longest(&self) -> usize {
        self.cells.iter().map(|c| c.entries.len()).max().unwrap_or(0)
    }
}

/// Describes a stamp, for a person.
#[must_use]
pub fn stamp_text(stamp: u64) -> String {
    match stamp {
        ANY => "anything (discarded)".into(),
        0 => "zeroes".into(),
        s if s & crate::disk::OWN == 0 => format!("request {} sector {}", s >> 10, s & 1023),
        s if s & 1 << 62 != 0 => "leftovers of a discard".into(),
        s => format!("the first content of disk {} sector {}", s >> 40 & 0xff, s & 0xff_ffff),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one() -> SectorRegisterModel {
        SectorRegisterModel::new(&[1], |_, _| 7)
    }

    #[test]
    fn a_read_returns_the_old_or_the_new_while_a_write_is_under_way() {
        let mut c = one();
        c.begin(0, 1, 1, 2);
        assert!(c.allows(0, 7, 4) && c.allows(0, 1, 4));
        c.end(0, 1, 5, true, false);
        assert!(c.allows(0, 7, 4), "the read began before the write ended");
        assert!(!c.allows(0, 7, 6) && c.allows(0, 1, 6));
    }

    #[test]
    fn concurrent_writes_end_in_either_order() {
        let mut c = one();
        c.begin(0, 1, 1, 2);
        c.begin(0, 2, 2, 4);
        c.end(0, 2, 5, true, false);
        c.end(0, 1, 7, true, false);
        assert!(c.allows(0, 1, 8) && c.allows(0, 2, 8) && !c.allows(0, 7, 8));
        c.seen(0, 2, 8, 9);
        assert!(!c.allows(0, 1, 10), "once seen, it stays");
    }

    #[test]
    fn who_saw_new_data_never_sees_old_data_later() {
        let mut c = one();
        c.begin(0, 1, 1, 2);
        c.seen(0, 1, 4, 5);
        assert!(
            !c.allows(0, 7, 6) && c.allows(0, 7, 4),
            "only a read that began before may return the old value"
        );
        c.begin(0, 2, 2, 6);
        c.seen(0, 2, 6, 7);
        assert!(c.allows(0, 1, 8), "of two writes under way either may come last");
        c.end(0, 1, 9, false, false);
        c.crash(11);
        assert!(c.allows(0, 7, 12), "a crash may bring anything back that is not durable");
    }

    #[test]
    fn a_failed_write_replaces_nothing() {
        let mut c = one();
        c.begin(0, 1, 1, 2);
        c.end(0, 1, 3, false, false);
        assert!(c.allows(0, 1, 4) && c.allows(0, 7, 4));
    }

    #[test]
    fn a_crash_brings_back_what_was_not_flushed() {
        let mut c = one();
        for (id, start) in [(1, 2), (2, 4), (3, 6)] {
            c.begin(0, id, id, start);
            c.end(0, id, start + 1, true, false);
        }
        c.flushed(0, 6);
        assert!(!c.allows(0, 2, 8));
        c.crash(9);
        assert!(!c.allows(0, 1, 10) && c.allows(0, 2, 10) && c.allows(0, 3, 10));
    }

    #[test]
    fn a_flush_after_a_crash_saves_nothing_that_was_lost() {
        let mut c = one();
        c.begin(0, 1, 1, 2);
        c.end(0, 1, 3, true, false);
        c.crash(5);
        c.flushed(0, 6);
        c.crash(9);
        assert!(c.allows(0, 7, 10) && c.allows(0, 1, 10));
    }

    #[test]
    fn fua_is_durable_at_once() {
        let mut c = one();
        c.begin(0, 1, 1, 2);
        c.end(0, 1, 3, true, true);
        c.crash(5);
        assert!(c.allows(0, 1, 6) && !c.allows(0, 7, 6));
    }
}
