//! The parts common to all worlds: cores with their inboxes, front ends, the environment, and the
//! random schedule.
//!
//! A step is one turn of one core. A core gets a turn if it has a reason: a message has arrived, a
//! lane asked to be woken, or its front end is due. If no core has a reason, the clock jumps to the
//! next one. No lane is polled without a reason, so a lost wake-up is found.

use crate::cores::SimCoreInboxes;
use crate::environment::{Env, PathMode, SharedEnv, lock_environment};
use crate::faulty_path::FaultInjectingPath;
use crate::front_end::WorkloadGenerator;
use crate::model::{DeviceModel, Violation};
use crate::path::SimPath;
use crate::plan::{DisturbanceClass, RunPlan};
use crate::queues::QueueUnderTest;
use crate::register_model::SectorRegisterModel;
use crate::rng::{RngStream, SimRng};
use crate::tasks::RunningTask;
use crate::timers::TimerQueue;
use crate::totals::RunTotals;
use crate::trace::{NO_CORE, TraceEventKind};
use std::sync::{Arc, Mutex};
use udm_core::{
    Batch, BioOwnerId, CoreId, CoreLaneState, Cx, Device, DeviceControlError, Lane, Nanos, OwnWork,
    PolledUnitId,
};
use udm_wire::uri::NullFaults;

/// Maximum number of turns that a lane may ask for when nothing is left to do.
const TURNS_AT_REST: usize = 8;

/// A lane that is open on a core.
pub struct OpenLane {
    /// Index of the device.
    pub device: usize,
    /// The lane.
    pub lane: Box<dyn Lane>,
    /// Requests of this core in flight on the lane.
    pub in_flight: usize,
    /// Bios that completed during another core's turn.
    pub completed: Batch,
    /// Time of the next poll that the lane asked for.
    pub wake: Nanos,
    /// True if a message has arrived.
    pub has_messages: bool,
    /// Owner of the front end's bios on this core.
    pub owner: BioOwnerId,
}

impl OpenLane {
    /// Wake target of the lane on its core.
    #[must_use]
    pub fn wake_target(&self) -> PolledUnitId {
        PolledUnitId(self.owner.0)
    }
}

/// A simulated core.
pub struct SimCore {
    /// Core state that the lanes see.
    pub state: CoreLaneState,
    /// Open lanes.
    pub open: Vec<OpenLane>,
    /// Running tasks.
    pub tasks: Vec<RunningTask>,
    /// Time at which the front end submits its next batch.
    pub next_work: Nanos,
}

/// The machine of a world: cores, environment, model and schedule.
pub struct Machine {
    /// The plan of this run.
    pub plan: RunPlan,
    /// The environment.
    pub env: SharedEnv,
    /// The inboxes.
    pub inboxes: Arc<SimCoreInboxes>,
    /// The cores.
    pub cores: Vec<SimCore>,
    /// The paths.
    pub paths: Vec<Arc<SimPath>>,
    /// Per path, the device that tables use: the path itself, or the queue in front of it.
    pub(crate) fronts: Vec<Arc<dyn Device>>,
    /// The queues in front of paths.
    pub(crate) queues: Vec<QueueUnderTest>,
    /// The model that checks results.
    pub model: DeviceModel,
    /// Generator of the front ends' requests.
    pub front: WorkloadGenerator,
    /// Random choice of the next core.
    pub schedule: SimRng,
    /// Random choice of the core that preempts another, if preemption is on.
    pub(crate) between: Option<SimRng>,
    /// Number of polls that could be preempted.
    pub(crate) polls: u64,
    /// Random choices of the control side.
    pub control: SimRng,
    /// Timed events.
    pub timers: TimerQueue,
    /// Counters of this run.
    pub totals: RunTotals,
    /// Steps taken.
    pub step: u64,
    /// True while a table is loaded. The control side does nothing else meanwhile.
    pub(crate) loading: bool,
    /// True if there are no new requests, because the world is being quiesced.
    pub resting: bool,
    /// True if the only requests are those that read data back.
    pub(crate) reading: bool,
    /// Step since which the load is heavy: nothing fails, and each completed request is replaced at
    /// once.
    pub(crate) crowded: Option<u64>,
    /// If set, the only requests are many reads of this device at a steady rate, and nothing fails.
    pub(crate) reads_of: Option<usize>,
    /// Scratch batch: bios that a lane completed.
    pub(crate) done: Batch,
    /// Scratch batch: bios to submit.
    pub(crate) batch: Batch,
}

impl Machine {
    /// Creates the machine of `plan` over the disks and paths of `env`, without cores.
    pub(crate) fn new(
        plan: &RunPlan,
        build: &mut SimRng,
        cores: usize,
        mut env: Env,
        cells: SectorRegisterModel,
    ) -> Machine {
        env.torn = !plan.without.has(DisturbanceClass::Torn);
        let delay = match plan.without.has(DisturbanceClass::Delay) {
            true => 100,
            false => build.pick(&[1_000, 50_000, 2_000_000]),
        };
        let paths = env.paths.len();
        let env = Arc::new(Mutex::new(env));
        let paths: Vec<_> = (0..paths).map(|i| Arc::new(SimPath::new(&env, i))).collect();
        Machine {
            fronts: paths.iter().map(|path| Arc::clone(path) as Arc<dyn Device>).collect(),
            paths,
            queues: Vec::new(),
            inboxes: SimCoreInboxes::new(plan.seed, cores, delay),
            model: DeviceModel::new(cells),
            front: WorkloadGenerator::new(plan, build),
            schedule: SimRng::new(plan.seed, RngStream::Schedule),
            between: (cfg!(feature = "interleave")
                && cores > 1
                && !plan.without.has(DisturbanceClass::Between))
            .then(|| SimRng::new(plan.seed, RngStream::Between)),
            polls: 0,
            control: SimRng::new(plan.seed, RngStream::Control),
            timers: TimerQueue::default(),
            totals: RunTotals::default(),
            step: 0,
            loading: false,
            resting: false,
            reading: false,
            crowded: None,
            reads_of: None,
            done: Batch::new(),
            batch: Batch::new(),
            cores: Vec::new(),
            plan: plan.clone(),
            env,
        }
    }

    /// Puts faults in front of paths.
    pub(crate) fn make_faults(&mut self, faults: Vec<(usize, NullFaults)>, chance: &mut SimRng) {
        for (path, params) in faults {
            lock_environment(&self.env).say(format!("p{path}: {params:?}"));
            let faulty = FaultInjectingPath::new(&self.paths[path], path, &self.env, params, chance);
            self.fronts[path] = faulty.map_or(Arc::clone(&self.fronts[path]), |faulty| Arc::new(faulty));
        }
    }

    /// Moves half of the disks with a cache into the memory of null devices.
    pub(crate) fn make_null_caches(&mut self, chance: &mut SimRng) {
        let mut env = lock_environment(&self.env);
        for disk in env.disks.iter_mut().filter(|disk| disk.volatile && !disk.log) {
            if chance.one_in(2) {
                disk.behind_null(chance.pick(&[1, 2, 8, 64]));
                self.totals.null_caches += 1;
            }
        }
    }

    /// Creates `count` cores.
    pub(crate) fn make_cores(&mut self, count: usize) {
        let now = lock_environment(&self.env).now;
        for id in 0..count {
            let seed = self.schedule.any();
            let state =
                CoreLaneState::new(CoreId(id as u16), count, seed, None).with_cores(self.inboxes.clone());
            self.cores.push(SimCore { state, open: Vec::new(), tasks: Vec::new(), next_work: now });
        }
    }

    /// Opens a lane of `device` on a core by calling `open`.
    pub(crate) fn open(
        &mut self,
        core: usize,
        device: usize,
        open: impl FnOnce(&mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError>,
    ) -> Result<(), DeviceControlError> {
        let now = self.set_turn(Some(core));
        let slot = &mut self.cores[core];
        let mut cx = slot.state.cx(now);
        let owner = cx.new_owner();
        cx.set_current_target(Some(PolledUnitId(owner.0)));
        let opened = open(&mut cx);
        let wake = cx.wake();
        let opened = opened.map(|lane| {
            slot.open.push(OpenLane {
                device,
                lane,
                in_flight: 0,
                completed: Batch::new(),
                wake,
                has_messages: false,
                owner,
            });
        });
        // Also after a failure, because the next message is sent by the control side.
        self.set_turn(None);
        opened
    }

    /// Closes the lane of `device` on a core. Returns false if the lane has work to do.
    pub(crate) fn close(&mut self, core: usize, device: usize) -> bool {
        let lanes = &mut self.cores[core].open;
        let Some(at) = lanes.iter().position(|open| open.device == device) else { return true };
        if lanes[at].in_flight > 0 || lanes[at].lane.own_work() == OwnWork::Required {
            return false;
        }
        self.set_turn(Some(core));
        drop(self.cores[core].open.remove(at));
        self.set_turn(None);
        true
    }

    /// Sets the core that has the turn. Returns the time.
    pub fn set_turn(&mut self, core: Option<usize>) -> Nanos {
        let mut env = lock_environment(&self.env);
        env.step = self.step;
        env.core = core.map_or(NO_CORE, |c| c as u16);
        self.inboxes.set_turn(env.now, core);
        env.now
    }

    /// The present step, and the last events as lines.
    pub(crate) fn last_events(&self) -> (u64, Vec<String>) {
        (self.step, lock_environment(&self.env).trace.lines())
    }

    /// Adds the start of the turn of control job `id` to the trace.
    pub(crate) fn note_control_job(&self, id: u64) {
        let mut env = lock_environment(&self.env);
        let now = env.now;
        env.trace.add(now, NO_CORE, TraceEventKind::CoreMessage, [id, 0, 0, 0]);
    }

    /// Adds a line to the trace.
    pub(crate) fn say(&self, text: impl Into<String>) {
        lock_environment(&self.env).say(text);
    }

    /// Chooses a core that has a reason for a turn.
    pub(crate) fn choose(&mut self) -> Option<usize> {
        let now = lock_environment(&self.env).now;
        let ready = |c: usize| self.reason(c) <= now;
        let count = (0..self.cores.len()).filter(|c| ready(*c)).count() as u64;
        if count == 0 {
            return None;
        }
        let nth = self.schedule.below(count) as usize;
        (0..self.cores.len()).filter(|c| self.reason(*c) <= now).nth(nth)
    }

    /// True if the front end of core `c` submits requests. During a load before any device is open
    /// there is no device to submit to.
    pub(crate) fn works(&self, c: usize) -> bool {
        !(self.resting && !self.reading || self.cores[c].open.is_empty() && (self.loading || self.reading))
    }

    /// Time at which core `c` has a reason for a turn.
    fn reason(&self, c: usize) -> Nanos {
        let core = &self.cores[c];
        let work = if self.works(c) { core.next_work } else { Nanos::NEVER };
        let lanes = core.open.iter().map(|o| o.wake).min().unwrap_or(Nanos::NEVER);
        let tasks = core.tasks.iter().map(RunningTask::reason).min().unwrap_or(Nanos::NEVER);
        work.min(lanes).min(tasks).min(self.inboxes.next(c))
    }

    /// Advances the clock to the next event. Returns false if no core and no helper thread will
    /// have one.
    pub(crate) fn jump(&mut self) -> bool {
        let cores = (0..self.cores.len()).map(|c| self.reason(c)).min().unwrap_or(Nanos::NEVER);
        let mut env = lock_environment(&self.env);
        let beside = env.asked.iter().map(|asked| asked.at).min().unwrap_or(Nanos::NEVER);
        let next = cores.min(beside).min(self.timers.next());
        if next > env.now && next != Nanos::NEVER {
            self.totals.simulated += next.since(env.now).0;
            env.now = next;
            let (at, core) = (env.now, NO_CORE);
            env.trace.add(at, core, TraceEventKind::Jump, [next.0, 0, 0, 0]);
        }
        cores.min(beside) != Nanos::NEVER
    }

    /// True if no core has or will have a reason for a turn.
    pub(crate) fn is_still(&self) -> bool {
        (0..self.cores.len()).all(|c| self.reason(c) == Nanos::NEVER)
    }

    /// Describes the required own work of some lane, for a person.
    pub(crate) fn describe_own_work(&self) -> Option<String> {
        let busy = |c: &SimCore| {
            c.open.iter().find(|o| o.lane.own_work() == OwnWork::Required).map(|o| (c.state.id().0, o.device))
        };
        if let Some((core, device)) = self.cores.iter().find_map(busy) {
            return Some(format!("core {core} with its lane of d{device}, which has work of its own"));
        }
        let busy = |c: &SimCore| {
            c.tasks.iter().find(|t| !t.is_idle()).map(|t| (c.state.id().0, t.purpose, t.waits()))
        };
        let (core, purpose, waits) = self.cores.iter().find_map(busy)?;
        Some(format!("core {core} with a task of {purpose:?}, {waits},"))
    }

    /// Delivers all messages that have arrived.
    pub fn deliver_all(&mut self) {
        self.set_turn(None);
        for (c, core) in self.cores.iter_mut().enumerate() {
            core.deliver(&self.inboxes, c, u64::MAX);
        }
    }

    /// Releases the requests that hang in path `p`, and wakes the lanes of all cores.
    pub(crate) fn release(&mut self, p: usize) {
        let mut env = lock_environment(&self.env);
        env.paths[p].released += 1;
        let now = env.now;
        self.cores.iter_mut().flat_map(|c| &mut c.open).for_each(|o| o.wake = o.wake.min(now));
        self.cores.iter_mut().flat_map(|c| &mut c.tasks).for_each(|task| task.wake_lanes(now));
    }

    /// Restores path `p` and releases its hung requests.
    pub(crate) fn restore_path(&mut self, p: usize) {
        lock_environment(&self.env).paths[p].mode = PathMode::Up;
        self.release(p);
    }

    /// True if no message is in transit.
    pub(crate) fn is_inbox_empty(&self) -> bool {
        (0..self.cores.len()).all(|c| self.inboxes.next(c) == Nanos::NEVER)
    }

    /// Checks that no lane asks for turns once nothing is left to do. A few more turns are allowed.
    pub(crate) fn check_goes_idle(&mut self) -> Result<(), Violation> {
        for c in 0..self.cores.len() {
            self.set_turn(Some(c));
            let core = &mut self.cores[c];
            for open in &mut core.open {
                for turn in 0.. {
                    if open.wake == Nanos::NEVER {
                        break;
                    }
                    if turn == TURNS_AT_REST {
                        let device = open.device;
                        return Err(format!(
                            "at rest, the lane of d{device} on core {c} still asks for turns"
                        ));
                    }
                    let now = {
                        let mut env = lock_environment(&self.env);
                        env.now = env.now.max(open.wake);
                        env.now
                    };
                    let mut cx = core.state.cx(now);
                    cx.set_current_target(Some(open.wake_target()));
                    open.lane.poll(&mut self.done, &mut cx);
                    open.wake = cx.wake();
                    if !self.done.is_empty() {
                        return Err(format!("at rest, d{} returned a request", open.device));
                    }
                }
            }
        }
        self.set_turn(None);
        Ok(())
    }

    /// Checks that no path has requests in flight.
    pub(crate) fn paths_are_empty(&self) -> Result<(), Violation> {
        let env = lock_environment(&self.env);
        match env.paths.iter().enumerate().find(|(_, path)| path.in_flight > 0) {
            Some((p, path)) => Err(format!("at rest, and p{p} has {} requests", path.in_flight)),
            None => Ok(()),
        }
    }

    /// Checks that no lane of a path is open after all devices were removed.
    pub(crate) fn paths_are_closed(&self) -> Result<(), Violation> {
        let env = lock_environment(&self.env);
        match env.paths.iter().position(|p| p.lanes > 0) {
            Some(p) => {
                Err(format!("all devices are gone, and {} lanes of p{p} are open", env.paths[p].lanes))
            }
            None => Ok(()),
        }
    }

    /// Cuts the power, unless it was already cut in this turn.
    pub(crate) fn cut_power(&mut self) {
        let mut env = lock_environment(&self.env);
        if !env.dead {
            env.cut_power();
        }
        drop(env);
        self.model.crash(self.step);
    }
}
