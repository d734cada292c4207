//! A core that serves front ends in a world that is made up: the same turns, taken one by one when
//! the world says so.

use crate::CoreSet;
use crate::local::{CoreClock, LocalCore};
use crate::reactor::{NextStep, Reactor};
use crate::ring::SimulatedKernel;
use std::sync::Arc;
use udm_core::{CoreId, Nanos};

/// What a core does behind a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// It goes on at once.
    None,
    /// It sleeps: it is to be stepped when its kernel has finished something, or at this time.
    Until(Nanos),
    /// It has left.
    Exited,
}

/// See the module's documentation.
pub struct SteppedCore {
    /// `None` when it has left.
    reactor: Option<Reactor>,
    asleep: bool,
}

impl SteppedCore {
    /// Core `id` of `core_set`. What its ring is asked for `kernel` does; the submission queue has
    /// `room` entries.
    #[must_use]
    pub fn new(
        cluster: &Arc<CoreSet>,
        id: CoreId,
        kernel: Box<dyn SimulatedKernel>,
        room: usize,
        time: CoreClock,
    ) -> SteppedCore {
        let core = LocalCore::simulated(cluster, id, kernel, room, time);
        SteppedCore { reactor: Some(Reactor::new(core)), asleep: false }
    }

    /// One turn, and what the core does behind it. A core that sleeps wakes up first.
    pub fn step(&mut self) -> Rest {
        let Some(reactor) = &mut self.reactor else { return Rest::Exited };
        if std::mem::take(&mut self.asleep) {
            let core = reactor.core();
            if let Some(ring) = core.ring() {
                ring.wait(None);
            }
            core.finish_sleep();
        }
        match reactor.step() {
            NextStep::RunAgain => Rest::None,
            NextStep::Rest => {
                let core = reactor.core();
                self.asleep = core.prepare_sleep();
                if !self.asleep {
                    return Rest::None;
                }
                if let Some(ring) = core.ring() {
                    ring.submit();
                }
                Rest::Until(core.wake())
            }
            NextStep::Exited => {
                if let Some(reactor) = self.reactor.take() {
                    reactor.stop_receiving();
                }
                Rest::Exited
            }
        }
    }
}
