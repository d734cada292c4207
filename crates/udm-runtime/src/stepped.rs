//! A core of the simulator: it runs the same turns as a core thread, one per step.

use crate::ProcessCores;
use crate::local::{CoreClockFunctions, LocalCore};
use crate::reactor::{Reactor, ReactorTurnOutcome};
use crate::ring::SimulatedKernel;
use std::sync::Arc;
use udm_core::{CoreId, Nanos};

/// State of a core after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CoreStateAfterStep {
    /// The core is ready for the next step.
    None,
    /// The core sleeps. Step it when its kernel has completed an operation, or at this time.
    SleepUntil(Nanos),
    /// The core has exited.
    Exited,
}

/// A core that serves front ends over a [`SimulatedKernel`] and is stepped by hand.
pub struct SteppedCore {
    /// `None` after the core has exited.
    reactor: Option<Reactor>,
    asleep: bool,
}

impl SteppedCore {
    /// Creates core `id` of `core_set`. `kernel` executes its ring operations; the submission queue
    /// has `room` entries.
    #[must_use]
    pub fn new(
        core_set: &Arc<ProcessCores>,
        id: CoreId,
        kernel: Box<dyn SimulatedKernel>,
        room: usize,
        time: CoreClockFunctions,
    ) -> SteppedCore {
        let core = LocalCore::simulated(core_set, id, kernel, room, time);
        SteppedCore { reactor: Some(Reactor::new(core)), asleep: false }
    }

    /// Runs one turn and returns the state after it. A sleeping core wakes up first.
    pub fn step(&mut self) -> CoreStateAfterStep {
        let Some(reactor) = &mut self.reactor else { return CoreStateAfterStep::Exited };
        if std::mem::take(&mut self.asleep) {
            let core = reactor.core();
            if let Some(ring) = core.ring() {
                ring.wait(None);
            }
            core.finish_sleep();
        }
        match reactor.step() {
            ReactorTurnOutcome::RunAgain => CoreStateAfterStep::None,
            ReactorTurnOutcome::Sleep => {
                self.asleep = reactor.prepare_sleep();
                if !self.asleep {
                    return CoreStateAfterStep::None;
                }
                let core = reactor.core();
                if let Some(ring) = core.ring() {
                    ring.submit();
                }
                CoreStateAfterStep::SleepUntil(core.wake())
            }
            ReactorTurnOutcome::Exited => {
                if let Some(reactor) = self.reactor.take() {
                    reactor.stop_receiving();
                }
                CoreStateAfterStep::Exited
            }
        }
    }
}
