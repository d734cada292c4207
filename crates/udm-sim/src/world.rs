//! A world: cores, devices and disks, which run on one thread in an order drawn from a seed.
//!
//! A step is one turn of one core ([`crate::machine`]), sometimes after a random action of the
//! control side.

use crate::blueprint::WorldBlueprint;
use crate::device::MappedDeviceWithModel;
use crate::disk::SimDisk;
use crate::environment::{Env, SimPathState, lock_environment};
use crate::faulty_path;
use crate::machine::Machine;
use crate::model::Violation;
use crate::path::NO_LANE;
use crate::plan::{DisturbanceClass, RunPlan};
use crate::register_model::SectorRegisterModel;
use crate::rng::{RngStream, SimRng};
use crate::tables::TableSpec;
use crate::throttles::draw_throttles;
use crate::turn::MachineWorld as _;
use crate::write_log_model::WriteLogModel;
use std::sync::Weak;
use udm_core::{Cx, DeviceControlError, Nanos};
use udm_dm::table::Table;
use udm_targets::multipath::PathWatchOptions;

/// Draws the options of the path watch, which is on in one of four worlds.
fn draw_path_watch_options(plan: &RunPlan) -> PathWatchOptions {
    let mut draw = SimRng::new(plan.seed, RngStream::Watch);
    if plan.bench.is_some() || plan.without.has(DisturbanceClass::Watch) || !draw.one_in(4) {
        return PathWatchOptions::default();
    }
    let deadline = draw.pick(&[None, Some(200), Some(1000), Some(1000)]).map(Nanos::from_millis);
    PathWatchOptions { deadline, hedge_reads: draw.one_in(2), eject_slow: !draw.one_in(3) }
}

/// Actions that a world may prefer: none, messages, path trouble, suspends, resumes, cancels,
/// reopened lanes, or changed limits.
const FAVOURITES: [Option<u64>; 10] =
    [None, None, None, Some(0), Some(50), Some(90), Some(120), Some(155), Some(160), Some(172)];

/// A simulated world of mapped devices, tables and paths.
pub struct MappedDeviceStackWorld {
    /// The machine of the world.
    pub machine: Machine,
    /// The blueprint of the world.
    pub blueprint: WorldBlueprint,
    /// The mapped devices, lower ones first.
    pub devices: Vec<MappedDeviceWithModel>,
    /// The model of the write log.
    pub log: WriteLogModel,
    /// All tables that were built and may still exist.
    pub tables: Vec<Weak<Table>>,
    /// Path watch options of its multipath targets.
    pub(crate) watch: PathWatchOptions,
    /// Random choice of slow paths.
    pub(crate) slow: SimRng,
    /// Random choice of limits of devices; `None` in worlds without any.
    pub(crate) throttles: Option<SimRng>,
    /// True while a load runs inside another action, so that no device is resumed.
    pub(crate) acting: bool,
    /// Disks that hang while the world quiesces, by disk. Work that needs one may wait. Empty if
    /// none hangs.
    pub(crate) hung: Vec<bool>,
    /// Number of queue setting changes left to make while the world quiesces.
    pub(crate) late_changes: u64,
    /// Step of the next quiescence.
    pub rest_at: u64,
    /// An action that this world prefers, as a number of the dice in
    /// [`MappedDeviceStackWorld::act`].
    pub(crate) favourite: Option<u64>,
}

impl MappedDeviceStackWorld {
    /// Builds the world of `plan`.
    ///
    /// # Errors
    /// If a valid table is refused.
    pub fn new(plan: &RunPlan) -> Result<MappedDeviceStackWorld, Violation> {
        let mut build = SimRng::new(plan.seed, RngStream::Build);
        let drawn = build.pick(&[1, 1, 2, 2, 3, 4]);
        let cores = plan.cores.unwrap_or(drawn);
        let watch = draw_path_watch_options(plan);
        // The delay of a path must be below its deadline.
        let delay_max = if watch.deadline.is_some() { 20 } else { 300 };
        let mut blueprint = match plan.bench {
            Some(paths) => WorldBlueprint::bench(paths, cores),
            None => WorldBlueprint::draw(&mut build, cores, plan.without, delay_max),
        };
        if plan.bench.is_none() && !plan.without.has(DisturbanceClass::Queues) {
            let mut chance = SimRng::new(plan.seed, RngStream::OwnQueues);
            blueprint.draw_own_queues(&mut chance, watch.eject_slow);
        }
        if plan.bench.is_none() && !plan.without.has(DisturbanceClass::Stacks) {
            blueprint.draw_over_log(&mut SimRng::new(plan.seed, RngStream::OverLog));
        }
        let mut env = Env::new(plan.seed, plan.keep_events);
        env.lags = !plan.without.has(DisturbanceClass::Late);
        env.check_timeout = Nanos::from_millis(build.pick(&[2_000, 5_000, 30_000]));
        for (i, d) in blueprint.disks.iter().enumerate() {
            let mut disk = SimDisk::new(i, d.sectors);
            disk.log = d.log;
            (disk.volatile, disk.fua, disk.max) = (d.volatile, d.fua, d.max);
            (disk.size, disk.block, disk.read_only) = (d.shown, d.block, d.read_only);
            disk.start();
            disk.error_one_in = match plan.without.has(DisturbanceClass::Errors) {
                true => 0,
                false => build.pick(&[0, 0, 300, 2000]),
            };
            env.disks.push(disk);
        }
        env.paths =
            blueprint.paths.iter().map(|disk| SimPathState::draw(*disk, &mut build, plan.without)).collect();
        let sizes: Vec<u64> = blueprint.disks.iter().map(|d| if d.log { 0 } else { d.sectors }).collect();
        let cells = SectorRegisterModel::new(&sizes, SimDisk::first_stamp);
        let mut world = MappedDeviceStackWorld {
            machine: Machine::new(plan, &mut build, cores, env, cells),
            log: WriteLogModel::default(),
            tables: Vec::new(),
            watch,
            slow: SimRng::new(plan.seed, RngStream::Slow),
            throttles: draw_throttles(plan),
            acting: false,
            hung: Vec::new(),
            late_changes: 0,
            rest_at: build.span(600),
            favourite: FAVOURITES[build.below(FAVOURITES.len() as u64) as usize],
            devices: Vec::new(),
            blueprint,
        };
        if plan.bench.is_some() {
            world.rest_at = u64::MAX;
            let mut env = lock_environment(&world.machine.env);
            env.paths.iter_mut().for_each(|p| (p.latency, p.room, p.prompt) = (5_000, usize::MAX, false));
            env.disks.iter_mut().for_each(|d| d.error_one_in = 0);
        }
        if plan.faulty {
            let mut chance = SimRng::new(plan.seed, RngStream::Faults);
            let faults = faulty_path::draw_path_faults(&world.blueprint, &mut chance);
            world.machine.make_faults(faults, &mut chance);
            world.machine.make_null_caches(&mut chance);
        }
        let queues = world.blueprint.queues.clone();
        world.machine.make_queues(&queues, cores);
        let tables: Vec<TableSpec> = world.blueprint.devices.iter().map(|d| d.table.clone()).collect();
        world.start(&tables)?;
        Ok(world)
    }

    /// Creates the cores and the devices, as after power-on, and opens every device on every core.
    ///
    /// # Errors
    /// If a valid table is refused.
    pub fn start(&mut self, tables: &[TableSpec]) -> Result<(), Violation> {
        self.machine.make_cores(self.blueprint.cores);
        self.make_devices(tables)?;
        for core in 0..self.machine.cores.len() {
            for device in 0..self.devices.len() {
                self.open(core, device)?;
            }
        }
        Ok(())
    }

    /// Opens a device on a core. If the environment failed the first attempt, tries again.
    ///
    /// # Errors
    /// If the device cannot be opened.
    pub fn open(&mut self, core: usize, device: usize) -> Result<(), Violation> {
        let opened = &self.devices[device];
        let again = |e: DeviceControlError, cx: &mut Cx<'_>| {
            if e.errno == NO_LANE { opened.open(cx) } else { Err(e) }
        };
        let open = |cx: &mut Cx<'_>| opened.open(cx).or_else(|e| again(e, cx));
        self.machine.open(core, device, open).map_err(|e| format!("d{device} can't be opened: {e}"))
    }

    /// Runs all steps of the plan, and then quiesces the world.
    ///
    /// # Errors
    /// The first violation.
    pub fn run(&mut self) -> Result<(), Violation> {
        while self.machine.step < self.machine.plan.steps {
            self.step()?;
            if self.machine.step >= self.rest_at {
                self.rest()?;
                // Often enough to find a request that hangs before another one wakes it.
                self.rest_at = self.machine.step + 20 + self.machine.control.span(600);
            }
        }
        self.rest()
    }

    /// Runs one step.
    ///
    /// # Errors
    /// The first violation.
    pub fn step(&mut self) -> Result<(), Violation> {
        self.machine.step += 1;
        self.machine.totals.steps += 1;
        if self.machine.step.is_multiple_of(32) {
            self.machine.model.advance(self.machine.step);
        }
        self.machine.set_turn(None);
        self.run_timers()?;
        self.land(None);
        let trouble = !self.machine.resting
            && !self.machine.loading
            && self.machine.crowded.is_none()
            && self.machine.reads_of.is_none()
            && self.machine.plan.bench.is_none();
        if trouble && self.machine.control.one_in(24) {
            self.act()?;
        }
        self.step_changes()?;
        match self.machine.choose() {
            Some(core) => self.turn(core)?,
            None => self.jump()?,
        }
        self.take_marks()?;
        lock_environment(&self.machine.env).verdict()
    }

    /// Advances the clock to the next event.
    fn jump(&mut self) -> Result<(), Violation> {
        if self.machine.jump() || !self.is_stuck() || self.cancel_deadlocked_change() {
            return Ok(());
        }
        Err(format!("nothing moves any more, and {} waits", self.waiting()))
    }

    /// Describes the work that waits, for a person.
    pub fn waiting(&self) -> String {
        let change = self.devices.iter().enumerate().find(|(_, d)| d.is_changing());
        match (self.machine.model.oldest(), change) {
            (Some(request), _) => request,
            (None, Some((i, d))) => format!("d{i}, {}", d.doing()),
            (None, None) => {
                self.failed_path().or_else(|| self.machine.describe_own_work()).unwrap_or("nobody".into())
            }
        }
    }

    /// Describes a failed path that is not reinstated.
    fn failed_path(&self) -> Option<String> {
        let failed = |(i, d): (usize, &MappedDeviceWithModel)| {
            let p = self.failed_paths(i, d.access?).into_iter().next()?;
            Some(format!("d{i}, whose path p{p} is failed and answers,"))
        };
        self.devices.iter().enumerate().find_map(failed)
    }
}
