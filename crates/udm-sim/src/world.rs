//! A world: cores, devices and disks, stepped on one thread in an order drawn from a seed.
//!
//! A step is one turn of one core, with now and then an act of the control side before it. A core
//! has a turn when it has a reason: a command has arrived, a lane asked to be woken, or its front
//! end has something to ask for. Where none has, the clock jumps to the next reason. Nobody polls
//! for luck, so a wake-up that is lost stays lost, and shows.

use crate::blueprint::Blueprint;
use crate::cells::Cells;
use crate::chance::{Chance, Stream};
use crate::cores::SimCores;
use crate::device::Device;
use crate::disk::Disk;
use crate::env::{Env, Mode, PathState, Served, SharedEnv, lock};
use crate::front::Front;
use crate::log::Log;
use crate::model::{Model, Wrong};
use crate::path::{NO_LANE, SimPath};
use crate::plan::{Class, Plan};
use crate::tables::TableSpec;
use crate::tasks::Running;
use crate::timers::Timers;
use crate::totals::Totals;
use crate::trace::{Kind, NO_CORE};
use std::sync::{Arc, Mutex, Weak};
use udm_core::{Batch, Busy, CoreId, CoreState, Lane, Nanos, OwnerId, Visit};
use udm_dm::table::Table;

/// A lane that a core has open.
pub struct Open {
    /// Which device.
    pub device: usize,
    /// Its data-path half.
    pub lane: Box<dyn Lane>,
    /// Requests of this core on it.
    pub in_flight: usize,
    /// What came back in the middle of another core's turn.
    pub home: Batch,
    /// When it wants to be polled.
    pub wake: Nanos,
    /// It has mail.
    pub mail: bool,
    /// The front end's name on this core.
    pub owner: OwnerId,
}

impl Open {
    /// Its number among what its core visits.
    #[must_use]
    pub fn visit(&self) -> Visit {
        Visit(self.owner.0)
    }
}

/// A core.
pub struct Core {
    /// What its lanes see of it.
    pub state: CoreState,
    /// Its lanes.
    pub open: Vec<Open>,
    /// Its tasks.
    pub tasks: Vec<Running>,
    /// When its front end next asks for something.
    pub next_work: Nanos,
}

/// What a world may like to do: nothing more than else, messages, losing paths, suspends, resumes,
/// calling off, closing and opening lanes, other limits.
const FAVOURITES: [Option<u64>; 10] =
    [None, None, None, Some(0), Some(50), Some(90), Some(120), Some(155), Some(160), Some(172)];

/// See the module.
pub struct World {
    /// What is being run.
    pub plan: Plan,
    /// What it was built from.
    pub blueprint: Blueprint,
    /// The outside.
    pub env: SharedEnv,
    /// The inboxes.
    pub post: Arc<SimCores>,
    /// The cores.
    pub cores: Vec<Core>,
    /// The mapped devices, lower ones first.
    pub devices: Vec<Device>,
    /// The paths.
    pub paths: Vec<Arc<SimPath>>,
    /// What must be true.
    pub model: Model,
    /// What must be true of the log of writes.
    pub log: Log,
    /// The front ends.
    pub front: Front,
    /// Who runs next.
    pub schedule: Chance,
    /// Who acts in the middle of another's turn, where there is any of that.
    pub(crate) between: Option<Chance>,
    /// How often they might have.
    pub(crate) visits: u64,
    /// What the control side does.
    pub control: Chance,
    /// What is to happen at a time.
    pub timers: Timers,
    /// What was done.
    pub totals: Totals,
    /// Every table that was built and may still be there.
    pub tables: Vec<Weak<Table>>,
    /// Steps taken.
    pub step: u64,
    /// A table is being loaded: nothing else is done on the control side.
    pub(crate) loading: bool,
    /// That load is a part of what else is done there: no device is resumed meanwhile.
    pub(crate) acting: bool,
    /// No new requests: the world is coming to rest.
    pub resting: bool,
    /// By disk, while the world comes to rest: it hangs, and what needs it may wait. Empty when
    /// none does.
    pub(crate) hung: Vec<bool>,
    /// When it rests next.
    pub rest_at: u64,
    /// An act that it draws more often than others, as a number of [`World::act`]'s dice.
    pub(crate) favourite: Option<u64>,
    /// The world is crowded since this step: nothing fails, and requests come in as fast as others
    /// end.
    pub(crate) crowded: Option<u64>,
    /// Scratch: what a lane returned.
    pub(crate) done: Batch,
    /// Scratch: what a lane is given.
    pub(crate) batch: Batch,
}

impl World {
    /// Builds the world of `plan`.
    ///
    /// # Errors
    /// When a table that must be valid is refused.
    pub fn new(plan: &Plan) -> Result<World, Wrong> {
        let mut build = Chance::new(plan.seed, Stream::Build);
        let drawn = build.pick(&[1, 1, 2, 2, 3, 4]);
        let cores = plan.cores.unwrap_or(drawn);
        let blueprint = match plan.bench {
            Some(paths) => Blueprint::bench(paths, cores),
            None => Blueprint::draw(&mut build, cores, plan.without),
        };
        let mut env = Env::new(plan.seed, plan.keep_events);
        (env.torn, env.lags) = (!plan.without.has(Class::Torn), !plan.without.has(Class::Late));
        for (i, d) in blueprint.disks.iter().enumerate() {
            let mut disk = Disk::new(i, d.sectors);
            disk.log = d.log;
            (disk.volatile, disk.fua, disk.max) = (d.volatile, d.fua, d.max);
            (disk.size, disk.block, disk.read_only) = (d.shown, d.block, d.read_only);
            disk.start();
            disk.error_one_in = match plan.without.has(Class::Errors) {
                true => 0,
                false => build.pick(&[0, 0, 300, 2000]),
            };
            env.disks.push(disk);
        }
        for disk in &blueprint.paths {
            env.paths.push(PathState {
                disk: *disk,
                mode: Mode::Up,
                latency: build.pick(&[2_000, 20_000, 100_000, 1_000_000]),
                patience: build.between(50, 3000) * 1_000_000,
                room: match plan.without.has(Class::Full) {
                    true => usize::MAX,
                    false => build.pick(&[usize::MAX, usize::MAX, usize::MAX, 1, 2, 16]),
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
        }
        let sizes: Vec<u64> = blueprint.disks.iter().map(|d| if d.log { 0 } else { d.sectors }).collect();
        let delay = match plan.without.has(Class::Delay) {
            true => 100,
            false => build.pick(&[1_000, 50_000, 2_000_000]),
        };
        let env = Arc::new(Mutex::new(env));
        let mut world = World {
            paths: (0..blueprint.paths.len()).map(|i| Arc::new(SimPath::new(&env, i))).collect(),
            post: SimCores::new(plan.seed, cores, delay),
            model: Model::new(Cells::new(&sizes, Disk::first_stamp)),
            log: Log::default(),
            front: Front::new(plan, &mut build),
            schedule: Chance::new(plan.seed, Stream::Schedule),
            between: (cfg!(feature = "interleave") && cores > 1 && !plan.without.has(Class::Between))
                .then(|| Chance::new(plan.seed, Stream::Between)),
            visits: 0,
            control: Chance::new(plan.seed, Stream::Control),
            timers: Timers::default(),
            totals: Totals::default(),
            tables: Vec::new(),
            step: 0,
            loading: false,
            acting: false,
            resting: false,
            hung: Vec::new(),
            rest_at: build.span(600),
            favourite: FAVOURITES[build.below(FAVOURITES.len() as u64) as usize],
            crowded: None,
            done: Batch::new(),
            batch: Batch::new(),
            cores: Vec::new(),
            devices: Vec::new(),
            plan: plan.clone(),
            blueprint,
            env,
        };
        if plan.bench.is_some() {
            world.rest_at = u64::MAX;
            let mut env = lock(&world.env);
            env.paths.iter_mut().for_each(|p| (p.latency, p.room, p.prompt) = (5_000, usize::MAX, false));
            env.disks.iter_mut().for_each(|d| d.error_one_in = 0);
        }
        let tables: Vec<TableSpec> = world.blueprint.devices.iter().map(|d| d.table.clone()).collect();
        world.start(&tables)?;
        Ok(world)
    }

    /// Makes the cores and the devices, as after power-on, and opens every device on every core.
    ///
    /// # Errors
    /// When a table that must be valid is refused.
    pub fn start(&mut self, tables: &[TableSpec]) -> Result<(), Wrong> {
        let now = lock(&self.env).now;
        for id in 0..self.blueprint.cores {
            let seed = self.schedule.any();
            let state =
                CoreState::new(CoreId(id as u16), self.blueprint.cores, seed, None).among(self.post.clone());
            self.cores.push(Core { state, open: Vec::new(), tasks: Vec::new(), next_work: now });
        }
        self.make_devices(tables)?;
        for core in 0..self.cores.len() {
            for device in 0..self.devices.len() {
                self.open(core, device)?;
            }
        }
        Ok(())
    }

    /// Opens a device on a core; a second time where the world had the first fail.
    ///
    /// # Errors
    /// When it can't be.
    pub fn open(&mut self, core: usize, device: usize) -> Result<(), Wrong> {
        let now = self.set_turn(Some(core));
        let slot = &mut self.cores[core];
        let mut cx = slot.state.cx(now);
        let owner = cx.new_owner();
        cx.visit(Some(Visit(owner.0)));
        let mut opened = self.devices[device].open(&mut cx);
        if opened.as_ref().is_err_and(|e| e.errno == NO_LANE) {
            opened = self.devices[device].open(&mut cx);
        }
        let lane = opened.map_err(|e| format!("d{device} can't be opened: {e}"))?;
        let wake = cx.wake();
        slot.open.push(Open { device, lane, in_flight: 0, home: Batch::new(), wake, mail: false, owner });
        self.set_turn(None);
        Ok(())
    }

    /// Says whose turn it is; returns the time.
    pub fn set_turn(&mut self, core: Option<usize>) -> Nanos {
        let mut env = lock(&self.env);
        env.step = self.step;
        env.core = core.map_or(NO_CORE, |c| c as u16);
        self.post.set_turn(env.now, core);
        env.now
    }

    /// Takes all the steps of the plan, and then brings the world to rest.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn run(&mut self) -> Result<(), Wrong> {
        while self.step < self.plan.steps {
            self.step()?;
            if self.step >= self.rest_at {
                self.rest()?;
                // Often enough that what hangs is seen before something else sets it going again.
                self.rest_at = self.step + 20 + self.control.span(600);
            }
        }
        self.rest()
    }

    /// One step.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn step(&mut self) -> Result<(), Wrong> {
        self.step += 1;
        self.totals.steps += 1;
        if self.step.is_multiple_of(32) {
            self.model.advance(self.step);
        }
        self.set_turn(None);
        self.run_timers()?;
        self.land(None);
        let trouble = !self.resting && !self.loading && self.crowded.is_none() && self.plan.bench.is_none();
        if trouble && self.control.one_in(24) {
            self.act()?;
        }
        self.step_changes()?;
        match self.choose() {
            Some(core) => self.turn(core)?,
            None => self.jump()?,
        }
        self.take_marks()?;
        match lock(&self.env).violation.take() {
            Some(wrong) => Err(wrong),
            None => Ok(()),
        }
    }

    /// A core that has a reason for a turn.
    fn choose(&mut self) -> Option<usize> {
        let now = lock(&self.env).now;
        let ready = |c: usize| self.reason(c) <= now;
        let count = (0..self.cores.len()).filter(|c| ready(*c)).count() as u64;
        if count == 0 {
            return None;
        }
        let nth = self.schedule.below(count) as usize;
        (0..self.cores.len()).filter(|c| self.reason(*c) <= now).nth(nth)
    }

    /// The front end of core `c` asks for something now and then. Where tables are loaded before
    /// any device is open it has nobody to ask.
    pub(crate) fn works(&self, c: usize) -> bool {
        !(self.resting || self.loading && self.cores[c].open.is_empty())
    }

    /// When core `c` has a reason for a turn.
    fn reason(&self, c: usize) -> Nanos {
        let core = &self.cores[c];
        let work = if self.works(c) { core.next_work } else { Nanos::NEVER };
        let lanes = core.open.iter().map(|o| o.wake).min().unwrap_or(Nanos::NEVER);
        let tasks = core.tasks.iter().map(Running::reason).min().unwrap_or(Nanos::NEVER);
        work.min(lanes).min(tasks).min(self.post.next(c))
    }

    /// Nobody has a reason: on to the next one.
    fn jump(&mut self) -> Result<(), Wrong> {
        let cores = (0..self.cores.len()).map(|c| self.reason(c)).min().unwrap_or(Nanos::NEVER);
        let timer = self.timers.next();
        if cores == Nanos::NEVER && self.is_stuck() {
            return Err(format!("nothing moves any more, and {} waits", self.waiting()));
        }
        let next = cores.min(timer);
        let mut env = lock(&self.env);
        if next > env.now && next != Nanos::NEVER {
            self.totals.simulated += next.since(env.now).0;
            env.now = next;
            let (at, core) = (env.now, NO_CORE);
            env.trace.add(at, core, Kind::Jump, [next.0, 0, 0, 0]);
        }
        Ok(())
    }

    /// What is waited for, for a person.
    pub fn waiting(&self) -> String {
        let change = self.devices.iter().enumerate().find(|(_, d)| d.is_changing());
        match (self.model.oldest(), change) {
            (Some(request), _) => request,
            (None, Some((i, d))) => format!("d{i}, {}", d.doing()),
            (None, None) => {
                let busy = |c: &Core| {
                    c.open.iter().find(|o| o.lane.busy() == Busy::Owed).map(|o| (c.state.id().0, o.device))
                };
                match self.cores.iter().find_map(busy) {
                    Some((core, device)) => {
                        format!("core {core} with its lane of d{device}, which has work of its own")
                    }
                    None => "nobody".into(),
                }
            }
        }
    }
}
