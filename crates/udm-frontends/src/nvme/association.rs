//! An association: a controller that exists for one host, and the connections of its queues.

use crate::nbd::Peer;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use udm_core::{CoreId, DeviceId, Nanos};
use udm_runtime::ProcessCores;
use udm_wire::nvme::{ControllerInstance, ControllerKind};

/// Where an admin queue comes from and arrives.
#[derive(Clone, Copy)]
pub(super) struct AssociationOrigin {
    /// The other end.
    pub(super) peer: Peer,
    /// Index of the port.
    pub(super) port: usize,
}

/// A controller with its queues. It ends with its admin queue, and then all queues end.
pub(super) struct Association {
    /// Number of the controller.
    pub(super) id: u16,
    pub(super) kind: ControllerKind,
    /// Name of the host.
    pub(super) host: String,
    pub(super) host_id: [u8; 16],
    /// Where the admin queue comes from and arrives.
    pub(super) origin: AssociationOrigin,
    /// Topic of [`AssociationEnded`].
    pub(super) topic: DeviceId,
    core_set: Arc<ProcessCores>,
    is_enabled: AtomicBool,
    is_ended: AtomicBool,
    is_forgotten: AtomicBool,
    /// Time in ns at which the keep-alive timer expires.
    alive_until: AtomicU64,
    queues: Mutex<AssociationQueues>,
}

struct AssociationQueues {
    connected: BTreeSet<u16>,
    /// Number of I/O queues that the host may connect.
    granted: u16,
    /// `None` before the controller was enabled first.
    instance: Option<ControllerInstance>,
}

/// Message to the queues of an association: it has ended.
pub(super) struct AssociationEnded;

/// Message to the I/O queues of an association: its controller is reset or shut down.
pub(super) struct ControllerDisabled;

impl Association {
    pub(super) fn new(
        id: u16,
        kind: ControllerKind,
        host: String,
        host_id: [u8; 16],
        origin: AssociationOrigin,
        core_set: &Arc<ProcessCores>,
    ) -> Association {
        let queues = AssociationQueues {
            connected: BTreeSet::from([0]),
            granted: core_set.len() as u16,
            instance: None,
        };
        Association {
            id,
            kind,
            host,
            host_id,
            origin,
            topic: DeviceId::new(),
            core_set: Arc::clone(core_set),
            is_enabled: AtomicBool::new(false),
            is_ended: AtomicBool::new(false),
            is_forgotten: AtomicBool::new(false),
            alive_until: AtomicU64::new(u64::MAX),
            queues: Mutex::new(queues),
        }
    }

    fn queues(&self) -> MutexGuard<'_, AssociationQueues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True while the host has enabled the controller.
    pub(super) fn is_enabled(&self) -> bool {
        self.is_enabled.load(Ordering::Acquire)
    }

    /// The controller is enabled, as a new instance with this random number.
    pub(super) fn enable(&self, random: u64) {
        let mut queues = self.queues();
        let last = queues.instance.map_or(0, |instance| instance.uniquifier);
        // 0 means that there is no uniquifier.
        let uniquifier = last.wrapping_add(1).max(1);
        queues.instance = Some(ControllerInstance { id: self.id, uniquifier, random });
        self.is_enabled.store(true, Ordering::Release);
    }

    /// The controller is disabled: its I/O queues receive nothing more.
    pub(super) fn disable(&self) {
        if self.is_enabled.swap(false, Ordering::AcqRel) {
            self.send_to_queues(|| Box::new(ControllerDisabled));
        }
    }

    /// The instance of the controller; `None` before it was enabled first.
    pub(super) fn instance(&self) -> Option<ControllerInstance> {
        self.queues().instance
    }

    /// True if no queue is left, so that nothing of the controller is at a device.
    pub(super) fn is_forgotten(&self) -> bool {
        self.is_forgotten.load(Ordering::Acquire)
    }

    pub(super) fn set_forgotten(&self) {
        self.is_forgotten.store(true, Ordering::Release);
    }

    fn send_to_queues(&self, message: impl Fn() -> Box<dyn std::any::Any + Send>) {
        for core in 0..self.core_set.len() {
            self.core_set.send_message(CoreId(core as u16), self.topic, message());
        }
    }

    pub(super) fn is_ended(&self) -> bool {
        self.is_ended.load(Ordering::Acquire)
    }

    /// Time at which the keep-alive timer expires. I/O queues look at it before they take commands:
    /// a process that was stopped finds commands in its sockets that its host has sent elsewhere
    /// since.
    pub(super) fn alive_until(&self) -> Nanos {
        Nanos(self.alive_until.load(Ordering::Relaxed))
    }

    pub(super) fn set_alive_until(&self, until: Nanos) {
        self.alive_until.store(until.0, Ordering::Relaxed);
    }

    /// Ends the association, for the reason `why`. Its queues receive nothing more.
    pub(super) fn end(&self, why: &str) {
        if self.is_ended.swap(true, Ordering::AcqRel) {
            return;
        }
        tracing::info!("nvme: controller {} of {} ends: {why}", self.id, self.host);
        self.send_to_queues(|| Box::new(AssociationEnded));
    }

    /// Sets the number of I/O queues to at most `asked`, and two per core and two more; returns it.
    /// One per core would not do: a host with as many cores may want a queue for each, one that
    /// they share, and both again while it replaces its table, as udm does. Once I/O queues are
    /// connected, the number stays.
    pub(super) fn grant_queues(&self, asked: u32) -> u16 {
        let mut queues = self.queues();
        if queues.connected.len() <= 1 {
            queues.granted = (2 * self.core_set.len() as u32 + 2).min(asked).max(1) as u16;
        }
        queues.granted
    }

    /// Number of I/O queues that the host may connect.
    pub(super) fn granted_queues(&self) -> u16 {
        self.queues().granted
    }

    /// Connects I/O queue `queue`. Returns false if it is connected already, or not granted, or if
    /// the admin queue is gone: then the association may be forgotten at any time.
    pub(super) fn connect_queue(&self, queue: u16) -> bool {
        let mut queues = self.queues();
        queues.connected.contains(&0) && queue <= queues.granted && queues.connected.insert(queue)
    }

    /// Disconnects a queue, of which nothing is in flight. Returns true if it was the last one.
    pub(super) fn disconnect_queue(&self, queue: u16) -> bool {
        let mut queues = self.queues();
        queues.connected.remove(&queue);
        queues.connected.is_empty()
    }

    /// Number of connected I/O queues, also of those that wait for their requests.
    pub(super) fn connected_io_queues(&self) -> usize {
        self.queues().connected.iter().filter(|queue| **queue > 0).count()
    }

    /// True if no I/O queue is connected.
    pub(super) fn is_alone(&self) -> bool {
        self.queues().connected.iter().all(|queue| *queue == 0)
    }

    /// The core of a queue: I/O queues are distributed over all cores.
    pub(super) fn core_of(&self, queue: u16) -> CoreId {
        let number = if queue == 0 { self.id } else { queue - 1 };
        CoreId(number % self.core_set.len() as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use udm_runtime::{Runtime, RuntimeOptions};

    /// An I/O queue whose Connect command is late does not keep an association that may be
    /// forgotten already.
    #[test]
    fn no_queue_connects_after_the_admin_queue_is_gone() {
        let spin_max = std::time::Duration::ZERO;
        let runtime = Runtime::start(&RuntimeOptions { cpus: vec![None; 2], poll: false, spin_max }).unwrap();
        let (kind, cores) = (ControllerKind::Io, runtime.core_set());
        let association = Association::new(
            1,
            kind,
            "host".into(),
            [0; 16],
            AssociationOrigin { peer: Peer::Unknown, port: 0 },
            cores,
        );
        assert!(association.connect_queue(1) && !association.connect_queue(1));
        assert!(!association.connect_queue(3), "more than granted");
        assert!(!association.disconnect_queue(0));
        assert!(!association.connect_queue(2));
        assert!(association.disconnect_queue(1), "it was the last one");
        assert!(!association.connect_queue(1));
        runtime.stop();
    }
}
