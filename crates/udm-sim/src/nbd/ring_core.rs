//! The cores of the worlds of the NBD server and client, the names of their paths, and changes of
//! their devices.

use super::clock;
use super::kernel::{SimKernel, SimRingState};
use super::net::SimNetwork;
use crate::rng::{RngStream, SimRng};
use crate::wakeable::create_transition_wake_flag;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use udm_core::errno::ENOENT;
use udm_core::{CoreId, DevNo, Device, Nanos};
use udm_dm::mapped::DeviceTransition;
use udm_dm::{DeviceLookupError, DeviceNameResolver, ResolvedDevice, TargetError, TransitionWakeFn};
use udm_runtime::{CoreStateAfterStep, ProcessCores, SteppedCore};

/// A core over a simulated ring.
pub(crate) struct SteppedRingCore {
    /// The core in library mode.
    pub(crate) core: SteppedCore,
    pub(crate) outside: Rc<RefCell<SimRingState>>,
    /// Time of the next turn.
    pub(crate) wake: Nanos,
    /// CPU time used.
    pub(crate) spent: Nanos,
    pub(crate) over: bool,
}

impl SteppedRingCore {
    pub(crate) fn new(
        core_set: &Arc<ProcessCores>,
        id: usize,
        net: &Rc<RefCell<SimNetwork>>,
        latency: u64,
        schedule: &mut SimRng,
    ) -> SteppedRingCore {
        let chance = SimRng::new(schedule.any(), RngStream::SimNetwork);
        let outside = SimRingState::new(net, chance, latency);
        let kernel = Box::new(SimKernel(outside.clone()));
        let room = schedule.pick(&[1, 4, 64, 512]);
        let core = SteppedCore::new(core_set, CoreId(id as u16), kernel, room, clock::TIME);
        SteppedRingCore { core, outside, wake: clock::now(), spent: Nanos(0), over: false }
    }

    /// Time of the next turn.
    pub(crate) fn reason(&self) -> Nanos {
        match (self.over, self.outside.borrow().has_ended()) {
            (true, _) => Nanos::NEVER,
            (false, true) => Nanos(0),
            (false, false) => self.wake,
        }
    }

    /// Ends a turn at `now`, in which the core returned `rest`. Returns the CPU time of the turn.
    pub(crate) fn end_turn(&mut self, rest: CoreStateAfterStep, now: Nanos, schedule: &mut SimRng) -> Nanos {
        self.wake = match rest {
            CoreStateAfterStep::None => now,
            CoreStateAfterStep::SleepUntil(at) => at,
            CoreStateAfterStep::Exited => {
                self.over = true;
                Nanos::NEVER
            }
        };
        let took = Nanos(1 + schedule.span(2_000));
        self.spent = self.spent + took;
        took
    }
}

/// Number of operations in progress in the rings of `cores`.
pub(crate) fn count_ring_operations(cores: &[SteppedRingCore]) -> usize {
    cores.iter().map(|core| core.outside.borrow().in_flight()).sum()
}

/// A suspend or resume in progress.
pub(crate) struct RunningDeviceChange {
    transition: DeviceTransition,
    woken: Arc<AtomicBool>,
}

impl RunningDeviceChange {
    /// Starts the change that `begin` returns.
    pub(crate) fn start(
        begin: impl FnOnce(TransitionWakeFn) -> Result<DeviceTransition, TargetError>,
    ) -> Result<RunningDeviceChange, TargetError> {
        let (woken, wake) = create_transition_wake_flag();
        Ok(RunningDeviceChange { transition: begin(wake)?, woken })
    }

    /// True if the change can continue.
    pub(crate) fn is_woken(&self) -> bool {
        self.woken.load(Ordering::Relaxed)
    }

    /// Continues the change. Returns its result once it has completed.
    pub(crate) fn step(&mut self, core_set: &ProcessCores) -> Option<Result<(), TargetError>> {
        self.woken.store(false, Ordering::Relaxed);
        self.transition.step(core_set)
    }
}

/// Resolves a letter and a number to a path.
pub(crate) struct NumberedPathResolver {
    pub(crate) letter: char,
    pub(crate) paths: Vec<Arc<dyn Device>>,
}

impl DeviceNameResolver for NumberedPathResolver {
    fn get(&mut self, word: &str) -> Result<ResolvedDevice, DeviceLookupError> {
        let index = word.strip_prefix(self.letter).and_then(|n| n.parse::<usize>().ok());
        let found = index.and_then(|i| Some((i, self.paths.get(i)?)));
        let (i, path) =
            found.ok_or_else(|| DeviceLookupError { errno: ENOENT, reason: format!("no device {word}") })?;
        let number = DevNo { major: 8, minor: i as u32 };
        Ok(ResolvedDevice { number, name: word.into(), device: path.clone(), hold: None })
    }
}
