//! The ways of using a device: cores stepped by hand, cores on threads with rings, clients of an
//! NBD server, a virtual machine, and hosts of an NVMe/TCP target.
//!
//! Each world has a few *handles*: one lane per core, one connection per client, or one ring. A
//! handle returns answers in the order of its requests, whatever the order of execution.

mod client;
mod cores;
mod machine;
mod nbd;
mod nvme;
mod nvme_host;
mod stepped;
mod vhost_user;

use crate::{DeviceFacts, InitialContent, RequestCheckingLayer, TestRequest, TestRequestResult};
use std::sync::Arc;
use std::time::Duration;
use udm_core::{Device, LaneCommand};
use udm_dm::DeviceTransition;

/// The time after which an operation counts as hung. It measures nothing.
pub const HANG: Duration = Duration::from_secs(30);

/// An action on a world.
pub type WorldAction = Box<dyn FnOnce(&mut dyn DeviceWorld)>;

/// A device in use.
pub trait DeviceWorld {
    /// The properties of the device.
    fn facts(&self) -> &DeviceFacts;

    /// Number of handles, at least 2.
    fn handles(&self) -> usize;

    /// Submits requests without waiting.
    fn submit(&mut self, handle: usize, requests: Vec<TestRequest>);

    /// Waits for all requests of the handle since the last call. Returns the answers in the order
    /// of the requests.
    fn collect(&mut self, handle: usize) -> Vec<TestRequestResult>;

    /// Lets time pass. Returns the number of requests in flight on all handles.
    fn settle(&mut self) -> usize;

    /// Steps a change to its end while the handles continue.
    ///
    /// # Errors
    /// The error of the change.
    fn change(&mut self, change: DeviceTransition) -> Result<(), udm_dm::TargetError>;

    /// Steps a change for a limited time. Returns true if it has ended.
    fn begin_change(&mut self, change: &mut DeviceTransition) -> bool;

    /// The cores, for commands.
    fn cores(&self) -> Arc<dyn udm_core::CoreCommandSender>;

    /// Cancels a change. It must still be stepped to its end.
    fn call_off(&mut self, change: &mut DeviceTransition);

    /// Disconnects all clients with their requests in flight, runs `then`, waits until the server
    /// has removed them, and connects new clients. Only for worlds whose handles are clients.
    fn vanish_and(&mut self, then: WorldAction) {
        let _ = then;
        unreachable!("a lane is not dropped with requests in flight");
    }

    /// As [`DeviceWorld::vanish_and`], without an action.
    fn vanish(&mut self) {
        self.vanish_and(Box::new(|_| {}));
    }

    /// Closes all handles and opens them again. Nothing may be in flight.
    fn reopen(&mut self);

    /// Checks that all is idle, with nothing in flight: a poll returns nothing and asks for no
    /// wake-up, and the lane is not busy.
    fn quiet(&mut self);

    /// Closes all handles for good and ends all threads. If the handles allow it, requests may be
    /// in flight.
    fn close(&mut self);
}

/// The kind of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorldKind {
    /// Two cores on the calling thread, without a ring. A lane runs only if it asked for a wake-up.
    Stepped,
    /// Two cores on threads of their own, each with its ring.
    Cores,
    /// As `Cores`, with the data of requests in memory that another process could change: a sealed
    /// memfd.
    SharedRange,
    /// Three clients of an NBD server on two cores.
    Nbd,
    /// As `Nbd`, with all clients moved to the other core before and after each operation.
    Moved,
    /// Three rings of a virtual machine at a vhost-user server on two cores, for some devices.
    VhostUser,
    /// Three queues of two hosts of an NVMe/TCP target on two cores, for the same devices.
    Nvme,
}

impl WorldKind {
    /// All kinds.
    pub const ALL: [WorldKind; 7] = [
        WorldKind::Stepped,
        WorldKind::Cores,
        WorldKind::SharedRange,
        WorldKind::Nbd,
        WorldKind::Moved,
        WorldKind::VhostUser,
        WorldKind::Nvme,
    ];

    /// The name, used in the names of tests.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            WorldKind::Stepped => "stepped",
            WorldKind::Cores => "cores",
            WorldKind::SharedRange => "foreign",
            WorldKind::Nbd => "nbd",
            WorldKind::Moved => "moved",
            WorldKind::VhostUser => "vhost_user",
            WorldKind::Nvme => "nvme",
        }
    }

    /// Whether the handles are clients of a server.
    #[must_use]
    pub fn is_served(self) -> bool {
        matches!(self, WorldKind::Nbd | WorldKind::Moved | WorldKind::VhostUser | WorldKind::Nvme)
    }

    /// Opens `device` in a world of this kind.
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
            WorldKind::Nvme => Box::new(nvme::NvmeWorld::new(device, facts)),
            WorldKind::VhostUser => Box::new(vhost_user::VhostUserWorld::new(device, facts)),
        }
    }
}

/// The properties of `device` if it is used by its lanes.
#[must_use]
pub fn device_facts_over_lanes(
    device: &dyn Device,
    boundary: RequestCheckingLayer,
    fresh: InitialContent,
    atom: usize,
) -> DeviceFacts {
    DeviceFacts { limits: device.limits(), boundary, fresh, atom, flags: udm_core::BioFlags::all() }
}

/// Cores that have opened no device, so each command is acknowledged at once.
pub struct CoresWithoutDevices;

impl udm_core::CoreCommandSender for CoresWithoutDevices {
    fn broadcast(&self, _: udm_core::DeviceId, _: LaneCommand) {}
    fn wake_up(&self, _: udm_core::CoreId, _: udm_core::DeviceId) {}
    fn start(&self, _: udm_core::BioTaskFactory) -> udm_core::BioTaskHandle {
        udm_core::BioTaskHandle::new(drop)
    }
}
