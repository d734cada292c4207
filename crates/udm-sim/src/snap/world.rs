//! Cores, disks and devices, stepped on one thread in an order drawn from a seed.

use super::model::Model;
use crate::chance::{Chance, Stream};
use crate::control_io::GoesOn;
use crate::cores::SimCores;
use crate::disk::Disk;
use crate::env::{Env, Mode, PathState, Served, SharedEnv, lock};
use crate::model::Wrong;
use crate::path::SimPath;
use crate::plan::{Class, Plan};
use crate::tasks::Running;
use crate::trace::{Kind, NO_CORE};
use crate::world::{Core, Open};
use std::sync::{Arc, Mutex};
use udm_core::{Batch, Busy, CoreId, CoreState, Device as _, Nanos, Visit};
use udm_dm::{MappedDevice, Table};

/// An origin or a snapshot: a device over the disk of the same number, when it is there.
pub(super) struct Side {
    /// The side that it is a snapshot of; itself for an origin.
    pub origin: usize,
    /// Sectors that its device shows.
    pub sectors: u64,
    pub mapped: Option<Arc<MappedDevice>>,
    /// What stands behind the type in its table's line.
    pub words: String,
    /// A table that takes the instant when it becomes live, and from which side.
    pub coming: Option<(std::sync::Weak<Table>, usize)>,
    /// Its instant is taken.
    pub live: bool,
    /// When it became so: twice the step.
    pub since: u64,
    /// Its store may become full.
    pub small: bool,
    /// Requests are sent to it.
    pub open: bool,
    /// The sector to be read back next.
    pub check: u64,
    /// Its store said that it is invalid, at this time: it stays so.
    pub invalid: Option<u64>,
    /// On an origin: the snapshot that is brought back into it.
    pub merging: Option<usize>,
}

/// What a run was worth.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Requests that came back with the power on, and those with an error.
    pub requests: u64,
    /// Of those.
    pub errors: u64,
    /// Sectors read and compared.
    pub sectors: u64,
    /// Snapshots that became live.
    pub made: u64,
    /// In changes of several.
    pub grouped: u64,
    /// Snapshots that took over from a table before.
    pub reloaded: u64,
    /// Snapshots removed while they were live.
    pub removed: u64,
    /// Merges begun, and ended.
    pub merges: u64,
    /// Of those.
    pub merged: u64,
    /// Snapshots that became invalid.
    pub invalid: u64,
    /// Stores that said that they are full.
    pub overflowed: u64,
    /// Power cuts.
    pub cuts: u64,
    /// Snapshots that a power cut left, valid.
    pub survived: u64,
    /// Rests.
    pub rests: u64,
    /// Turns inside of turns.
    pub between: u64,
    /// The hash of all events.
    pub hash: u64,
}

impl Counts {
    /// Adds what another run was worth.
    pub fn add(&mut self, c: &Counts) {
        self.requests += c.requests;
        self.errors += c.errors;
        self.sectors += c.sectors;
        self.made += c.made;
        self.grouped += c.grouped;
        self.reloaded += c.reloaded;
        self.removed += c.removed;
        self.merges += c.merges;
        self.merged += c.merged;
        self.invalid += c.invalid;
        self.overflowed += c.overflowed;
        self.cuts += c.cuts;
        self.survived += c.survived;
        self.rests += c.rests;
        self.between += c.between;
        self.hash = self.hash.rotate_left(1) ^ c.hash;
    }
}

/// See the module's documentation.
pub struct World {
    pub(super) plan: Plan,
    /// The power is to be cut behind this step, or the next that is not of a rest.
    pub(super) cut: Option<u64>,
    pub(super) env: SharedEnv,
    pub(super) post: Arc<SimCores>,
    pub(super) cores: Vec<Core>,
    pub(super) paths: Vec<Arc<SimPath>>,
    pub(super) sides: Vec<Side>,
    pub(super) model: Model,
    pub(super) schedule: Chance,
    pub(super) work: Chance,
    pub(super) control: Chance,
    pub(super) between: Option<Chance>,
    pub(super) visits: u64,
    pub(super) step: u64,
    pub(super) count: usize,
    pub(super) depth: usize,
    pub(super) reads: u64,
    pub(super) pause: u64,
    /// The power is off.
    pub(super) dead: bool,
    pub(super) loading: bool,
    /// No new requests but those that read back.
    pub(super) resting: bool,
    /// Paths that are to be well again, and when.
    pub(super) restores: Vec<(Nanos, usize)>,
    /// The paths may get into trouble; requests may fail.
    pub(super) troubles: bool,
    pub(super) fails: bool,
    pub(super) rest_at: u64,
    pub(super) counts: Counts,
    pub(super) batch: Batch,
    pub(super) done: Batch,
}

impl World {
    pub(super) fn new(plan: &Plan, cut: Option<u64>) -> Result<World, Wrong> {
        let mut build = Chance::new(plan.seed, Stream::Build);
        let count = plan.cores.unwrap_or(build.pick(&[1, 1, 2, 2, 3]));
        let origins = build.pick(&[1, 1, 2]);
        let stores = build.between(1, 3) as usize;
        let fails = build.one_in(3) && !plan.without.has(Class::Errors);
        let mut env = Env::new(plan.seed, plan.keep_events);
        (env.torn, env.lags) = (!plan.without.has(Class::Torn), false);
        let mut sides = Vec::new();
        for side in 0..origins + stores {
            let is_origin = side < origins;
            let sectors = build.between(24, 200);
            let origin = if is_origin { side } else { build.below(origins as u64) as usize };
            let small = !is_origin && build.one_in(4);
            // Twice what a store with the smallest chunks needs, or less than half of it.
            let shown = |origins: &[Side]| match small {
                true => origins[origin].sectors / 2,
                false => 2 * origins[origin].sectors + 400,
            };
            let size = if is_origin { sectors } else { shown(&sides) };
            let sectors = if is_origin { sectors } else { sides[origin].sectors };
            let mut disk = Disk::new(side, size);
            disk.log = !is_origin;
            disk.volatile = build.below(4) > 0;
            disk.fua = build.one_in(2);
            let most = if is_origin { u64::from(u32::MAX) } else { build.pick(&[8, 64, 4096]) };
            disk.max = [most, 0, 0];
            disk.start();
            disk.error_one_in = if fails { build.pick(&[0, 200, 1000, 4000]) } else { 0 };
            env.disks.push(disk);
            env.paths.push(PathState {
                disk: side,
                mode: Mode::Up,
                latency: build.pick(&[2_000, 20_000, 100_000, 1_000_000]),
                patience: build.between(50, 3000) * 1_000_000,
                room: if plan.without.has(Class::Full) {
                    usize::MAX
                } else {
                    build.pick(&[usize::MAX, usize::MAX, 2, 16])
                },
                prompt: !plan.without.has(Class::Prompt) && build.one_in(3),
                released: 0,
                lanes: 0,
                served: Served::default(),
                retried: false,
                in_flight: 0,
                barred: 0,
                access: None,
                failed: false,
                fails: 0,
                failed_in: 0,
                answered: false,
            });
            sides.push(Side {
                origin,
                sectors,
                mapped: None,
                words: String::new(),
                coming: None,
                live: false,
                since: 0,
                small,
                open: false,
                check: u64::MAX,
                invalid: None,
                merging: None,
            });
        }
        let sizes: Vec<u64> = sides.iter().map(|side| side.sectors).collect();
        let delay =
            if plan.without.has(Class::Delay) { 100 } else { build.pick(&[1_000, 50_000, 2_000_000]) };
        let env = Arc::new(Mutex::new(env));
        let mut world = World {
            paths: (0..sides.len()).map(|p| Arc::new(SimPath::new(&env, p))).collect(),
            post: SimCores::new(plan.seed, count, delay),
            model: Model::new(&sizes),
            schedule: Chance::new(plan.seed, Stream::Schedule),
            work: Chance::new(plan.seed, Stream::Work),
            control: Chance::new(plan.seed, Stream::Control),
            between: (cfg!(feature = "interleave") && count > 1 && !plan.without.has(Class::Between))
                .then(|| Chance::new(plan.seed, Stream::Between)),
            visits: 0,
            step: 0,
            count,
            depth: plan.depth.unwrap_or(build.pick(&[1, 2, 4, 8, 16])),
            reads: build.pick(&[20, 50, 70]),
            pause: build.pick(&[1_000, 20_000, 300_000]),
            dead: false,
            loading: false,
            resting: false,
            restores: Vec::new(),
            troubles: !plan.without.has(Class::Paths) && build.one_in(2),
            fails,
            rest_at: 500 + build.span(1500),
            counts: Counts::default(),
            batch: Batch::new(),
            done: Batch::new(),
            cores: Vec::new(),
            sides,
            plan: plan.clone(),
            cut,
            env,
        };
        world.boot()?;
        Ok(world)
    }

    /// The number of origins: they are the first sides.
    pub(super) fn origins(&self) -> usize {
        (0..self.sides.len()).take_while(|&side| self.sides[side].origin == side).count()
    }

    pub(super) fn counts(&self) -> Counts {
        Counts {
            requests: self.model.requests_done,
            errors: self.model.errors,
            sectors: self.model.compared,
            hash: lock(&self.env).trace.hash(),
            ..self.counts
        }
    }

    pub(super) fn say(&self, text: impl Into<String>) {
        lock(&self.env).say(text);
    }

    /// Makes the cores.
    pub(super) fn make_cores(&mut self) {
        let now = lock(&self.env).now;
        for id in 0..self.count {
            let seed = self.schedule.any();
            let state = CoreState::new(CoreId(id as u16), self.count, seed, None).among(self.post.clone());
            self.cores.push(Core { state, open: Vec::new(), tasks: Vec::new(), next_work: now });
        }
    }

    /// Opens the device of `side` on every core, and has requests sent to it.
    pub(super) fn open(&mut self, side: usize) -> Result<(), Wrong> {
        let Some(mapped) = self.sides[side].mapped.clone() else { return Ok(()) };
        for core in 0..self.cores.len() {
            let now = self.set_turn(Some(core));
            let slot = &mut self.cores[core];
            let mut cx = slot.state.cx(now);
            let owner = cx.new_owner();
            cx.visit(Some(Visit(owner.0)));
            let lane = mapped.open(&mut cx).map_err(|e| format!("side {side} can't be opened: {e}"))?;
            let wake = cx.wake();
            let open =
                Open { device: side, lane, in_flight: 0, home: Batch::new(), wake, mail: false, owner };
            slot.open.push(open);
        }
        self.set_turn(None);
        self.sides[side].open = true;
        Ok(())
    }

    pub(super) fn set_turn(&mut self, core: Option<usize>) -> Nanos {
        let mut env = lock(&self.env);
        env.step = self.step;
        env.core = core.map_or(NO_CORE, |c| c as u16);
        self.post.set_turn(env.now, core);
        env.now
    }

    /// One step: a turn of one core.
    pub(super) fn one_step(&mut self) -> Result<(), Wrong> {
        self.step += 1;
        if self.step.is_multiple_of(32) {
            self.model.advance(self.step);
        }
        self.set_turn(None);
        self.disturb();
        match self.choose() {
            Some(core) => self.turn(core)?,
            None => self.jump()?,
        }
        if let Some(wrong) = lock(&self.env).violation.take() {
            return Err(wrong);
        }
        if !self.resting && !self.dead {
            let drawn = !self.plan.without.has(Class::Crash) && self.control.one_in(6000);
            if drawn || self.cut.take_if(|cut| *cut <= self.step).is_some() {
                self.power_off();
            }
        }
        Ok(())
    }

    fn choose(&mut self) -> Option<usize> {
        let now = lock(&self.env).now;
        let ready: Vec<usize> = (0..self.cores.len()).filter(|&c| self.reason(c) <= now).collect();
        (!ready.is_empty()).then(|| self.schedule.pick(&ready))
    }

    /// Somebody has something to ask for.
    pub(super) fn works(&self, c: usize) -> bool {
        let checks = |o: &Open| self.sides[o.device].check < self.sides[o.device].sectors;
        !self.dead && (!self.resting || self.cores[c].open.iter().any(checks))
    }

    fn reason(&self, c: usize) -> Nanos {
        let core = &self.cores[c];
        let work = if self.works(c) { core.next_work } else { Nanos::NEVER };
        let lanes = core.open.iter().map(|o| o.wake).min().unwrap_or(Nanos::NEVER);
        let tasks = core.tasks.iter().map(Running::reason).min().unwrap_or(Nanos::NEVER);
        work.min(lanes).min(tasks).min(self.post.next(c))
    }

    fn jump(&mut self) -> Result<(), Wrong> {
        let cores = (0..self.cores.len()).map(|c| self.reason(c)).min().unwrap_or(Nanos::NEVER);
        let next = self.restores.iter().map(|(at, _)| *at).fold(cores, Nanos::min);
        if next == Nanos::NEVER {
            return Err(format!("nothing moves any more, and {} waits", self.waiting()));
        }
        let mut env = lock(&self.env);
        if next > env.now {
            env.now = next;
            let (at, core) = (env.now, NO_CORE);
            env.trace.add(at, core, Kind::Jump, [next.0, 0, 0, 0]);
        }
        Ok(())
    }

    /// Who waits, for a person.
    pub(super) fn waiting(&self) -> String {
        let mut text = self.model.oldest();
        for (c, core) in self.cores.iter().enumerate() {
            for open in core.open.iter().filter(|open| open.in_flight > 0 || open.lane.busy() == Busy::Owed) {
                let (side, n, busy) = (open.device, open.in_flight, open.lane.busy());
                text += &format!("; core {c} with {n} requests of side {side}, {busy:?}");
            }
        }
        text
    }
}

impl GoesOn for World {
    fn env(&self) -> &SharedEnv {
        &self.env
    }

    fn post(&self) -> &Arc<SimCores> {
        &self.post
    }

    fn steps(&self) -> u64 {
        self.step
    }

    fn step(&mut self) -> Result<(), Wrong> {
        self.one_step()
    }

    fn set_loading(&mut self, loading: bool) -> bool {
        std::mem::replace(&mut self.loading, loading)
    }

    fn back(&mut self) {
        self.set_turn(None);
    }
}
