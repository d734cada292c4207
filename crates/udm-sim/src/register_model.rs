//! What each sector of each disk may hold.
//!
//! A sector is a register. Every write to it that still matters is an entry: when it began, when it
//! ended, and since when it can no longer be read because a later write has taken its place. A read
//! may return any entry that was alive at some time while the read was under way. Times are those
//! of [`crate::environment::Env::step`]: what begins in step *n* begins at 2*n*, what ends in it at 2*n*+1.
//!
//! * A write that began after another had ended, and succeeded, replaces it.
//! * A write that failed, or whose place was not certain (its table changed meanwhile), may or may
//!   not have happened: it replaces nothing.
//! * What was replaced may come back after a crash, unless what replaced it was made durable by a
//!   flush that began after the write had ended, or by FUA.

/// Not yet.
pub const NEVER: u64 = u64::MAX;

/// A write to one sector.
#[derive(Clone, Copy, Debug)]
struct WriteRecord {
    /// Request and sector of it; unique.
    id: u64,
    /// What it puts there; [`ANY`] for a discard.
    stamp: u64,
    start: u64,
    end: u64,
    /// It happened, for certain.
    sure: bool,
    durable: bool,
    /// When the last read that may return it must have begun before.
    dead: u64,
    /// Not even a crash can bring it back.
    gone: bool,
    /// It was written to another disk, which this one is a copy of: no flush of this one makes it
    /// durable.
    inherited: bool,
}

/// The stamp of a discard: whatever.
pub const ANY: u64 = u64::MAX;

#[derive(Clone, Debug, Default)]
struct Register {
    entries: Vec<WriteRecord>,
    /// Is on the list of cells that a crash would change.
    dirty: bool,
    /// The disk that it is of.
    disk: u8,
    /// The beginning of the latest flush that it has taken notice of.
    synced: u64,
}

impl Register {
    /// Takes notice of the flushes that have succeeded, the latest of which began at `start`. Later
    /// is as good as at once: what one covers is fixed when it begins.
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

/// The sectors of all disks, one after the other.
pub struct RegisterModel {
    cells: Vec<Register>,
    /// First cell of each disk.
    starts: Vec<u32>,
    /// Cells that were written since the last crash, by disk.
    dirty: Vec<Vec<u32>>,
    /// The latest beginning of a flush that succeeded, by disk.
    flushed: Vec<u64>,
    /// No read in flight began before this.
    horizon: u64,
}

impl RegisterModel {
    /// Cells for disks of these sizes, whose first content is `first(disk, sector)`.
    #[must_use]
    pub fn new(sizes: &[u64], first: impl Fn(usize, u64) -> u64) -> RegisterModel {
        let mut cells = Vec::new();
        let mut starts = Vec::new();
        for (disk, size) in sizes.iter().enumerate() {
            starts.push(cells.len() as u32);
            cells.extend((0..*size).map(|sector| {
                let stamp = first(disk, sector);
                let entry = WriteRecord {
                    id: 0,
                    stamp,
                    start: 0,
                    end: 0,
                    sure: true,
                    durable: true,
                    dead: NEVER,
                    gone: false,
                    inherited: false,
                };
                Register { entries: vec![entry], dirty: false, disk: disk as u8, synced: 0 }
            }));
        }
        RegisterModel {
            cells,
            dirty: vec![Vec::new(); starts.len()],
            flushed: vec![0; starts.len()],
            starts,
            horizon: 0,
        }
    }

    /// The cell of a sector.
    #[must_use]
    pub fn index(&self, disk: usize, sector: u64) -> u32 {
        self.starts[disk] + sector as u32
    }

    /// The disk and sector of a cell.
    #[must_use]
    pub fn place(&self, cell: u32) -> (usize, u64) {
        let disk = self.starts.partition_point(|s| *s <= cell) - 1;
        (disk, u64::from(cell - self.starts[disk]))
    }

    /// No read that began before `start` is in flight any more.
    pub fn set_horizon(&mut self, start: u64) {
        self.horizon = start;
    }

    /// A write begins. Told twice of the same, it hears once; says whether it was news.
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
        slot.entries.push(WriteRecord {
            id,
            stamp,
            start,
            end: NEVER,
            sure: false,
            durable: false,
            dead: NEVER,
            gone: false,
            inherited: false,
        });
        if !slot.dirty {
            slot.dirty = true;
            self.dirty[usize::from(slot.disk)].push(cell);
        }
        true
    }

    /// A write is over: it happened for certain (`sure`), and is on the medium (`durable`).
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

    /// May a read that began at `start` return `stamp`?
    #[must_use]
    pub fn allows(&self, cell: u32, stamp: u64, start: u64) -> bool {
        self.cells[cell as usize]
            .entries
            .iter()
            .any(|e| (e.stamp == stamp || e.stamp == ANY) && e.dead > start)
    }

    /// May a read of each, both begun at `now`, return the same?
    #[must_use]
    pub fn may_be_equal(&self, one: u32, other: u32, now: u64) -> bool {
        let alive = |cell: u32| self.cells[cell as usize].entries.iter().filter(move |e| e.dead > now);
        let same =
            |e: &WriteRecord| alive(other).any(|o| o.stamp == e.stamp || o.stamp == ANY || e.stamp == ANY);
        alive(one).any(same)
    }

    /// A read from `start` to `now` returned `stamp`: what was written before the write of it began
    /// is not read again. Where no write was under way meanwhile, nothing else is.
    pub fn seen(&mut self, cell: u32, stamp: u64, start: u64, now: u64) {
        let slot = &mut self.cells[cell as usize];
        if slot.entries.len() < 2 {
            return;
        }
        let quiet = !slot.entries.iter().any(|e| e.end >= start || e.stamp == ANY);
        // A stamp names its write; zeroes may be of several, and a discard leaves what it likes.
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

    /// A flush of `disk` that began at `start` has succeeded.
    pub fn flushed(&mut self, disk: usize, start: u64) {
        self.flushed[disk] = self.flushed[disk].max(start);
    }

    /// Disk `to` becomes what disk `from` is at this instant, `now`; where there are several, each
    /// sector is that of any of them. Of what is under way to `from` it has that which `reached`
    /// says to be there, by its sector and stamp: a request that was handed back may have been done
    /// in part. What is under way to `to` will reach it.
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
            let mut entries: Vec<WriteRecord> = Vec::new();
            for from in from {
                let (source, flushed) = (self.index(*from, sector) as usize, self.flushed[*from]);
                self.cells[source].sync(flushed);
                let there = |e: &&WriteRecord| e.end != NEVER || e.stamp == ANY || reached(sector, e.stamp);
                let there = self.cells[source].entries.iter().filter(there);
                entries.extend(there.map(|e| WriteRecord { inherited: true, end: e.end.min(now), ..*e }));
            }
            let slot = &mut self.cells[target as usize];
            entries.extend(slot.entries.iter().filter(|e| e.end == NEVER));
            (slot.entries, slot.synced) = (entries, 0);
            if slot.entries.len() > 1 && !std::mem::replace(&mut slot.dirty, true) {
                self.dirty[to].push(target);
            }
        }
    }

    /// A sector of which this is not known from its writes may hold `stamp`, since before `now`.
    pub fn may_hold(&mut self, cell: u32, stamp: u64, now: u64) {
        let slot = &mut self.cells[cell as usize];
        // One that was replaced may have been written once more, from elsewhere.
        if slot.entries.iter().any(|e| (e.stamp == stamp || e.stamp == ANY) && e.dead > now) {
            return;
        }
        slot.entries.push(WriteRecord {
            id: 0,
            stamp,
            start: 0,
            end: now,
            sure: false,
            durable: false,
            dead: NEVER,
            gone: false,
            inherited: true,
        });
        if !std::mem::replace(&mut slot.dirty, true) {
            self.dirty[usize::from(slot.disk)].push(cell);
        }
    }

    /// The power failed: nothing is under way, and each sector of a disk holds its last durable
    /// content or anything later.
    pub fn crash(&mut self, now: u64) {
        self.horizon = now;
        self.cut_power(now, false);
    }

    /// The power of a disk failed that others go on asking: what is under way goes on.
    pub fn crash_below(&mut self, now: u64) {
        self.cut_power(now, true);
    }

    fn cut_power(&mut self, now: u64, goes_on: bool) {
        let horizon = self.horizon;
        for (list, flushed) in self.dirty.iter_mut().zip(&self.flushed) {
            list.retain(|cell| {
                let slot = &mut self.cells[*cell as usize];
                slot.sync(*flushed);
                // A read that is under way may have found what is gone since.
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

    /// What a sector may hold, for a person.
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

    /// The longest list of entries: what the model costs.
    #[must_use]
    pub fn longest(&self) -> usize {
        self.cells.iter().map(|c| c.entries.len()).max().unwrap_or(0)
    }
}

/// A stamp for a person.
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

    fn one() -> RegisterModel {
        RegisterModel::new(&[1], |_, _| 7)
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
        assert!(!c.allows(0, 7, 6) && c.allows(0, 7, 4), "only who began before may see the old");
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
