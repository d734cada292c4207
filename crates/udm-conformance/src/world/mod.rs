//! The ways of using a device: cores stepped by hand, cores on threads with their rings, and
//! clients of an NBD server.
//!
//! Each has a few *handles*: one lane per core, or one connection per client. A handle returns
//! answers in the order of its requests, in any order of execution.

mod client;
mod cores;
mod nbd;
mod stepped;

use crate::{Answer, CheckingLayer, DeviceFacts, InitialContent, Request};
use std::sync::Arc;
use std::time::Duration;
use udm_core::{Device, LaneCommand};
use udm_dm::DeviceTransition;

/// How long anything may take before it counts as hung. No measure.
pub const HANG: Duration = Duration::from_secs(30);

/// Something to do with a world.
pub type WorldAction = Box<dyn FnOnce(&mut dyn DeviceWorld)>;

/// A device in use.
pub trait DeviceWorld {
    /// What is known of it.
    fn facts(&self) -> &DeviceFacts;

    /// How many handles there are. At least 2.
    fn handles(&self) -> usize;

    /// Sends requests on their way and waits for none.
    fn submit(&mut self, handle: usize, requests: Vec<Request>);

    /// Waits for all that the handle was given since the last call; the answers in the order of the
    /// requests.
    fn collect(&mut self, handle: usize) -> Vec<Answer>;

    /// Lets time pass; returns how many requests are not back, over all handles.
    fn settle(&mut self) -> usize;

    /// Steps a change to its end while the handles go on.
    ///
    /// # Errors
    /// The change's own.
    fn change(&mut self, change: DeviceTransition) -> Result<(), udm_dm::TargetError>;

    /// Steps a change as far as it goes by itself; true when it is over.
    fn begin_change(&mut self, change: &mut DeviceTransition) -> bool;

    /// The cores, for those that send them commands.
    fn cores(&self) -> Arc<dyn udm_core::Cores>;

    /// Calls a change off; it still has to be stepped to its end.
    fn call_off(&mut self, change: &mut DeviceTransition);

    /// All clients vanish with what they have in flight, `then` happens, and when all is forgotten
    /// new clients come. Only where handles are clients.
    fn vanish_and(&mut self, then: WorldAction) {
        let _ = then;
        unreachable!("a lane is not dropped with requests in flight");
    }

    /// As [`DeviceWorld::vanish_and`], with nothing in between.
    fn vanish(&mut self) {
        self.vanish_and(Box::new(|_| {}));
    }

    /// Closes all handles and opens them again. Nothing is in flight.
    fn reopen(&mut self);

    /// Checks that nothing is going on: with nothing in flight a poll returns nothing, asks for no
    /// wake-up, and the lane is not busy.
    fn quiet(&mut self);

    /// Closes all handles for good, whatever is in flight where the handle allows that, and ends
    /// all threads.
    fn close(&mut self);
}

/// Which world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorldKind {
    /// Two cores on the calling thread, no ring: what has to be woken is woken when it asked for it
    /// and not otherwise.
    Stepped,
    /// Two cores on threads of their own, each with its ring.
    Cores,
    /// The same, with the data of requests in memory that another process could change: a sealed
    /// memfd.
    SharedRange,
    /// Three clients of an NBD server on two cores.
    Nbd,
    /// The same, with each of them moved to the other core before and behind all that is asked of
    /// it.
    Moved,
}

impl WorldKind {
    /// All of them.
    pub const ALL: [WorldKind; 5] =
        [WorldKind::Stepped, WorldKind::Cores, WorldKind::SharedRange, WorldKind::Nbd, WorldKind::Moved];

    /// Its name in the names of tests.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            WorldKind::Stepped => "stepped",
            WorldKind::Cores => "cores",
            WorldKind::SharedRange => "foreign",
            WorldKind::Nbd => "nbd",
            WorldKind::Moved => "moved",
        }
    }

    /// True where the handles are clients of a server.
    #[must_use]
    pub fn is_served(self) -> bool {
        matches!(self, WorldKind::Nbd | WorldKind::Moved)
    }

    /// Opens `device` in such a world.
    #[must_use]
    pub fn open(self, device: &Arc<dyn Device>, facts: DeviceFacts) -> Box<dyn DeviceWorld> {
        match self {
            WorldKind::Stepped => Box::new(stepped::SteppedWorld::new(device, facts)),
            WorldKind::Cores | WorldKind::SharedRange => {
                Box::new(cores::ThreadedWorld::new(device, facts, self == WorldKind::SharedRange))
            }
            WorldKind::Nbd | WorldKind::Moved => {
                Box::new(nbd::NbdWorld::new(device, facts, self == WorldKind::Moved))
            }
        }
    }
}

/// What is known of `device` when it is used by its lanes.
#[must_use]
pub fn lane_facts(
    device: &dyn Device,
    boundary: CheckingLayer,
    fresh: InitialContent,
    atom: usize,
) -> DeviceFacts {
    DeviceFacts { limits: device.limits(), boundary, fresh, atom, flags: udm_core::BioFlags::all() }
}

/// Cores of which none has opened anything yet: each command is answered at once.
pub struct NoCores;

impl udm_core::Cores for NoCores {
    fn broadcast(&self, _: udm_core::DeviceId, _: LaneCommand) {}
    fn wake_up(&self, _: udm_core::CoreId, _: udm_core::DeviceId) {}
    fn start(&self, _: udm_core::TaskFactory) -> udm_core::TaskHandle {
        udm_core::TaskHandle::new(drop)
    }
}
