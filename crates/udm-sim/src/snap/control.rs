//! What is done to devices: snapshots made, reloaded, merged and removed, suspends, trouble on the
//! paths. One thing after the other, while the cores go on.

use super::world::World;
use crate::control_io::SimIo;
use crate::env::{Mode, lock};
use crate::model::Wrong;
use crate::path::SimPath;
use crate::plan::Class;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use udm_core::errno::{EINTR, ENOENT};
use udm_core::{Busy, DevNo, Nanos};
use udm_dm::{Changes, DeviceRef, LookupError, MappedDevice, Refused, Resolver, Table, TargetError, Wake};

/// The most steps that something may take. A slow path may hold a request for half a second, which
/// is 200,000.
const STEPS_MAX: u64 = 1_000_000;

/// Finds disks by their words, `p` and a number.
struct Names(Vec<Arc<SimPath>>);

impl Resolver for Names {
    fn get(&mut self, word: &str) -> Result<DeviceRef, LookupError> {
        let index = word.strip_prefix('p').and_then(|n| n.parse::<usize>().ok());
        let found = index.and_then(|i| Some((i, self.0.get(i)?)));
        let (i, path) =
            found.ok_or_else(|| LookupError { errno: ENOENT, reason: format!("no device {word}") })?;
        let number = DevNo { major: 8, minor: i as u32 };
        Ok(DeviceRef { number, name: word.into(), device: path.clone(), hold: None })
    }
}

impl World {
    /// Something is done.
    pub(super) fn act(&mut self) -> Result<(), Wrong> {
        let stores = self.origins()..self.sides.len();
        let side = self.control.between(stores.start as u64, stores.end as u64 - 1) as usize;
        let (origin, there) = (self.sides[side].origin, self.sides[side].mapped.is_some());
        let merged_into = self.sides[origin].merging;
        match self.control.below(10) {
            _ if merged_into == Some(side) => self.end_merge(origin),
            // A snapshot of what a merge has changed in part would be of no instant.
            0..7 if !there && merged_into.is_none() => {
                let mut group = vec![side];
                if self.control.one_in(3) {
                    let free = |&other: &usize| other != side && self.sides[other].mapped.is_none();
                    let busy = |other: usize| self.sides[self.sides[other].origin].merging.is_some();
                    group.extend(stores.filter(free).filter(|&other| !busy(other)));
                }
                self.make(&group)
            }
            0..2 if there => self.remove(side),
            2..4 if there => self.reload(side),
            4..6 if merged_into.is_none() => self.merge(side),
            _ => {
                let side = if self.control.one_in(2) { side } else { origin };
                self.pause(side)
            }
        }
    }

    /// A path gets slow, or well again; where requests may fail, worse.
    pub(super) fn disturb(&mut self) {
        let now = lock(&self.env).now;
        let due: Vec<usize> = self.restores.iter().filter(|(at, _)| *at <= now).map(|(_, p)| *p).collect();
        self.restores.retain(|(at, _)| *at > now);
        due.into_iter().for_each(|p| self.restore(p));
        if !self.troubles || self.resting || self.dead || !self.control.one_in(400) {
            return;
        }
        let p = self.control.below(self.paths.len() as u64) as usize;
        let mode = match self.control.below(8) {
            0 if self.fails && !self.plan.without.has(Class::Hang) => Mode::Hung,
            1 if self.fails => Mode::Silent,
            2 if self.fails => Mode::Down,
            _ => Mode::Slow(self.control.between(2, 100)),
        };
        let last = Nanos(self.control.between(1, 100) * 1_000_000);
        if self.restores.iter().all(|(_, other)| *other != p) {
            self.say(format!("p{p} is {mode:?}"));
            lock(&self.env).paths[p].mode = mode;
            self.restores.push((now + last, p));
        }
    }

    /// Path `p` is well again, and lets go of what hung.
    pub(super) fn restore(&mut self, p: usize) {
        let mut env = lock(&self.env);
        env.paths[p].mode = Mode::Up;
        env.paths[p].released += 1;
        let now = env.now;
        self.cores.iter_mut().flat_map(|c| &mut c.open).for_each(|o| o.wake = o.wake.min(now));
        self.cores.iter_mut().flat_map(|c| &mut c.tasks).for_each(|task| task.rouse(now));
    }

    fn wake() -> (Arc<AtomicBool>, Wake) {
        let woken = Arc::new(AtomicBool::new(true));
        let handle = woken.clone();
        (woken, Arc::new(move || handle.store(true, Ordering::Relaxed)))
    }

    /// Makes a device for `side`, without a table.
    pub(super) fn device(&mut self, side: usize) -> Result<Arc<MappedDevice>, Wrong> {
        let number = DevNo { major: 253, minor: side as u32 };
        let mapped = MappedDevice::new(&format!("s{side}"), None, number).map_err(|e| e.to_string())?;
        self.sides[side].mapped = Some(mapped.clone());
        Ok(mapped)
    }

    /// Loads a table of `kind` into the device of `side`; `instant` says of which side it is to be
    /// a copy when it becomes live. False where storage failed.
    pub(super) fn load(&mut self, side: usize, kind: &str, instant: Option<usize>) -> Result<bool, Wrong> {
        let Some(mapped) = self.sides[side].mapped.clone() else { return Ok(false) };
        let words = format!("0 {} {kind} {}", self.sides[side].sectors, self.sides[side].words);
        self.say(format!("s{side} load: {words}"));
        let lines = udm_wire::table::parse(&words).map_err(|e| format!("{words}: {e}"))?;
        let (mut names, cores) = (Names(self.paths.clone()), self.count);
        let io = SimIo::new(self);
        let built = Table::build(udm_targets::TARGETS, &lines, &mut names, &io, cores);
        io.verdict()?;
        let failed = io.has_failed();
        let table = match built {
            Ok(table) => table,
            Err(_) if failed || self.dead => return Ok(false),
            Err(error) => return Err(format!("{words}: {error}")),
        };
        self.sides[side].coming = instant.map(|from| (Arc::downgrade(&table), from));
        mapped.load(table).map_err(|e| format!("{words}: {e}"))?;
        Ok(true)
    }

    /// Goes on until `changes` is over.
    fn finish(&mut self, changes: Result<Changes, Refused>, woken: &AtomicBool) -> Result<Outcome, Wrong> {
        let mut changes = changes.map_err(|(_, e)| e.to_string())?;
        let from = self.step;
        let cancels = !self.plan.without.has(Class::Cancel) && self.control.one_in(12);
        let cancel_at = from + if cancels { self.control.below(60) } else { STEPS_MAX };
        loop {
            if woken.swap(false, Ordering::Relaxed) {
                self.set_turn(None);
                let over = changes.step(&*self.post);
                self.look_at_tables();
                if let Some(result) = over {
                    return Ok(result.map_err(|(_, e)| e));
                }
            }
            if self.step - from > STEPS_MAX {
                return Err(format!("a change does not end, and {} waits", self.waiting()));
            }
            if self.step == cancel_at {
                self.set_turn(None);
                if changes.cancel(&*self.post) {
                    self.say("that is called off");
                    woken.store(true, Ordering::Relaxed);
                }
            }
            self.one_step()?;
        }
    }

    /// Tables that are live now take their instants.
    fn look_at_tables(&mut self) {
        for side in 0..self.sides.len() {
            let live = self.sides[side].mapped.as_ref().and_then(|mapped| mapped.live());
            let Some((table, from)) = &self.sides[side].coming else { continue };
            if live.is_none_or(|live| Arc::as_ptr(&live) != table.as_ptr()) {
                continue;
            }
            let from = *from;
            self.sides[side].coming = None;
            if self.dead {
                continue;
            }
            if from != self.sides[side].origin && self.status(side) == "Invalid" {
                // It became so before it was merged: the origin is what it was.
                self.say(format!("s{from} is invalid, and nothing of it comes to s{side}"));
                self.sides[from].live = false;
                self.sides[side].merging = Some(from);
                continue;
            }
            self.say(format!("s{side} is what s{from} is"));
            let sectors = self.sides[side].sectors;
            let env = lock(&self.env);
            // Where a store has it nobody knows here.
            let is_origin = from == self.sides[side].origin;
            let reached = |sector, stamp| !is_origin || env.disks[from].has(sector, stamp);
            self.model.cells.copy(from, side, sectors, 2 * self.step, reached);
            drop(env);
            if from == self.sides[side].origin {
                (self.sides[side].live, self.sides[side].since) = (true, 2 * self.step);
                self.sides[side].invalid = None;
                self.counts.made += 1;
            } else {
                self.sides[from].live = false;
                self.sides[side].merging = Some(from);
                self.counts.merges += 1;
            }
        }
    }

    fn resume(&mut self, sides: &[usize]) -> Result<Outcome, Wrong> {
        let (woken, wake) = World::wake();
        self.say(format!("resume of {sides:?}"));
        let devices = self.devices(sides);
        let noflush = self.control.one_in(2);
        self.set_turn(None);
        self.finish(Changes::resume(&devices, noflush, &wake), &woken)
    }

    pub(super) fn must_resume(&mut self, sides: &[usize]) -> Result<(), Wrong> {
        for _ in 0..1000 {
            match self.resume(sides)? {
                Ok(()) => return Ok(()),
                Err(error) if error.errno == EINTR => {}
                Err(error) => return Err(format!("resume of {sides:?}: {error}")),
            }
        }
        Err(format!("resume of {sides:?} is called off all the time"))
    }

    fn suspend(&mut self, sides: &[usize]) -> Result<Outcome, Wrong> {
        let (woken, wake) = World::wake();
        self.say(format!("suspend of {sides:?}"));
        let devices = self.devices(sides);
        let noflush = self.control.one_in(2);
        self.set_turn(None);
        self.finish(Changes::suspend(&devices, noflush, &wake), &woken)
    }

    fn devices(&self, sides: &[usize]) -> Vec<Arc<MappedDevice>> {
        sides.iter().filter_map(|&side| self.sides[side].mapped.clone()).collect()
    }

    /// The store of `side` is a blank one.
    pub(super) fn wipe(&mut self, side: usize) {
        lock(&self.env).disks[side].blank(0);
    }

    /// Makes snapshots, all of one instant.
    fn make(&mut self, group: &[usize]) -> Result<(), Wrong> {
        let mut loaded = Vec::new();
        for &side in group {
            let chunk = self.control.pick(&[1, 1, 2, 4, 8]);
            let kind = self.control.pick(&["P", "P", "PO", "N"]);
            self.wipe(side);
            self.sides[side].words = format!("p{} p{side} {kind} {chunk}", self.sides[side].origin);
            self.device(side)?;
            match self.load(side, "snapshot", Some(self.sides[side].origin)) {
                Ok(true) => loaded.push(side),
                // A store of three chunks or less is none.
                Err(wrong) if self.sides[side].small && wrong.contains("at least two chunks") => {
                    self.sides[side].mapped = None;
                }
                Ok(false) => self.sides[side].mapped = None,
                Err(wrong) => return Err(wrong),
            }
        }
        if loaded.is_empty() {
            return Ok(());
        }
        let outcome = self.resume(&loaded)?;
        self.counts.grouped += if outcome.is_ok() && loaded.len() > 1 { loaded.len() as u64 } else { 0 };
        for side in loaded {
            match &outcome {
                Ok(()) if self.sides[side].live || self.dead => self.open(side)?,
                Ok(()) => return Err(format!("s{side} was resumed and has no table")),
                Err(error) if error.errno == EINTR || self.dead => {
                    (self.sides[side].mapped, self.sides[side].coming) = (None, None);
                }
                Err(error) => return Err(format!("resume of s{side}: {error}")),
            }
        }
        Ok(())
    }

    /// Sends nothing more to `side`, waits for what is under way, and closes its lanes.
    fn close(&mut self, side: usize) -> Result<(), Wrong> {
        self.sides[side].open = false;
        let from = self.step;
        let busy = |world: &World| {
            let mut lanes = world.cores.iter().flat_map(|c| &c.open).filter(|o| o.device == side);
            lanes.any(|o| o.in_flight > 0 || o.lane.busy() == Busy::Owed)
        };
        while busy(self) {
            if self.step - from > STEPS_MAX {
                return Err(format!("s{side} does not come to rest, and {} waits", self.waiting()));
            }
            self.one_step()?;
        }
        for core in 0..self.cores.len() {
            self.set_turn(Some(core));
            self.cores[core].open.retain(|open| open.device != side);
        }
        self.set_turn(None);
        Ok(())
    }

    fn remove(&mut self, side: usize) -> Result<(), Wrong> {
        self.say(format!("s{side} is removed"));
        self.close(side)?;
        self.leave(side)?;
        // Where the power went meanwhile, it may have gone before.
        self.sides[side].live = false;
        if !self.dead {
            self.counts.removed += 1;
            self.is_linear(self.sides[side].origin)?;
        }
        Ok(())
    }

    /// Takes the device of `side` away, which nobody has open.
    fn leave(&mut self, side: usize) -> Result<(), Wrong> {
        loop {
            let (woken, wake) = World::wake();
            let devices = self.devices(&[side]);
            self.set_turn(None);
            match self.finish(Changes::leave(&devices, &wake), &woken)? {
                Ok(()) => break,
                Err(error) if error.errno == EINTR => {}
                Err(error) => return Err(format!("s{side} can't be removed: {error}")),
            }
        }
        let side = &mut self.sides[side];
        (side.mapped, side.coming) = (None, None);
        Ok(())
    }

    /// An origin without snapshots is one range of its disk, and no lane of a store is open.
    pub(super) fn is_linear(&self, origin: usize) -> Result<(), Wrong> {
        let of = |side: &usize| self.sides[*side].origin == origin && self.sides[*side].mapped.is_some();
        if (self.origins()..self.sides.len()).any(|side| of(&side)) || self.sides[origin].merging.is_some() {
            return Ok(());
        }
        let table = self.sides[origin].mapped.as_ref().and_then(|mapped| mapped.live());
        match table.is_some_and(|table| table.targets()[0].target.as_linear().is_some()) {
            true => Ok(()),
            false => Err(format!("s{origin} has no snapshots any more, and is not linear")),
        }
    }

    /// A new table takes over from the one before.
    fn reload(&mut self, side: usize) -> Result<(), Wrong> {
        if !self.load(side, "snapshot", None)? {
            return Ok(());
        }
        match self.resume(&[side])? {
            Ok(()) => self.counts.reloaded += 1,
            // A table that waits to take the snapshot over keeps others from it.
            Err(error) if error.errno == EINTR => {
                self.sides[side].mapped.iter().for_each(|mapped| mapped.clear());
            }
            Err(error) => return Err(format!("reload of s{side}: {error}")),
        }
        Ok(())
    }

    /// Suspends, and goes on some time later.
    fn pause(&mut self, side: usize) -> Result<(), Wrong> {
        if self.suspend(&[side])?.is_err() {
            return Ok(());
        }
        for _ in 0..self.control.below(60) {
            // With the power off nothing moves that is suspended.
            if !self.dead {
                self.one_step()?;
            }
        }
        self.must_resume(&[side])
    }

    /// Brings what the snapshot `side` holds back into its origin.
    fn merge(&mut self, side: usize) -> Result<(), Wrong> {
        let origin = self.sides[side].origin;
        if self.sides[side].mapped.is_none() || self.sides[side].words.contains(" N ") {
            return Ok(());
        }
        self.close(side)?;
        let usable = |world: &World| !["Invalid", "Overflow"].contains(&&*world.status(side));
        if self.suspend(&[side])?.is_err() || self.dead || !usable(self) {
            if self.sides[side].mapped.as_ref().is_some_and(|mapped| mapped.is_suspended()) {
                self.must_resume(&[side])?;
            }
            return self.open(side);
        }
        let merged = self.sides[side].words.clone();
        let words = std::mem::replace(&mut self.sides[origin].words, merged);
        let loaded = self.load(origin, "snapshot-merge", Some(side))?;
        let done = loaded && self.resume(&[origin])?.is_ok();
        if !done || self.sides[origin].merging.is_none() {
            (self.sides[origin].words, self.sides[origin].coming) = (words, None);
            self.sides[origin].mapped.iter().for_each(|mapped| mapped.clear());
            self.must_resume(&[side])?;
            return self.open(side);
        }
        self.leave(side)
    }

    /// Ends the merge into `origin`, where nothing is left to be merged.
    fn end_merge(&mut self, origin: usize) -> Result<(), Wrong> {
        let Some(store) = self.sides[origin].merging else { return Ok(()) };
        let status = self.status(origin);
        let is_over = |(used, _, metadata)| used == metadata;
        if status != "Invalid" && !numbers(&status).is_some_and(is_over) {
            return Ok(());
        }
        let words = std::mem::replace(&mut self.sides[origin].words, format!("p{origin}"));
        let loaded = self.load(origin, "snapshot-origin", None)?;
        let done = loaded && self.resume(&[origin])?.is_ok();
        if !done || self.dead {
            self.sides[origin].words = words;
            self.sides[origin].mapped.iter().for_each(|mapped| mapped.clear());
            return Ok(());
        }
        self.counts.merged += 1;
        self.sides[origin].merging = None;
        self.wipe(store);
        self.is_linear(origin)
    }

    /// What stands behind the type in the status of `side`.
    pub(super) fn status(&self, side: usize) -> String {
        let text = self.sides[side].mapped.as_ref().map(|mapped| mapped.status_text()).unwrap_or_default();
        text.splitn(4, ' ').nth(3).unwrap_or_default().trim().to_owned()
    }
}

type Outcome = Result<(), TargetError>;

/// The numbers of a status: in use, of how many, of them metadata.
pub(super) fn numbers(status: &str) -> Option<(u64, u64, u64)> {
    let (use_, metadata) = status.split_once(' ')?;
    let (used, total) = use_.split_once('/')?;
    Some((used.parse().ok()?, total.parse().ok()?, metadata.parse().ok()?))
}
