//! `nvme+tcp://HOST[:PORT]/SUBNQN/NSID`: a namespace of an NVMe/TCP controller, through the core's
//! io_uring.
//!
//! The protocol is a state machine without I/O (`udm_wire::nvme::host`) that accepts bytes cut
//! anywhere and trusts none of them.
//!
//! * **Association.** A namespace in use has one controller, whatever the number of its names and
//!   lanes, from the first lane on until the device is closed. A task on one core has the admin
//!   queue ([`admin_lane`]): it connects, checks the controller, keeps it alive and hears its
//!   events. After a loss it connects again, with a back-off that doubles up to five seconds.
//! * **Queues.** Each lane has an I/O queue, which is a connection. It connects when a request
//!   comes and the association lives. If the controller grants fewer queues than there are lanes,
//!   the others send their requests to a lane that a task owns
//!   ([`SingleOwnerForwarder`](udm_queue::SingleOwnerForwarder)).
//! * **End of an association.** It ends as a whole, as in Linux, if any of its connections is
//!   closed or violates the protocol, if the controller leaves a Keep Alive unanswered for `kato`,
//!   or if a request waits for the deadline while nothing arrives. All its connections are reset.
//! * **Unanswered writes.** All other requests fail at once, with a path error. A write that was
//!   sent is *held* until the controller must have ended it
//!   ([`WriteFence`](udm_wire::nvme::host::WriteFence)): otherwise multipath could write elsewhere,
//!   and this write could undo it later. `Device::stall_reason` reports writes that wait.
//! * **Cross-Controller Reset.** Meanwhile the other controllers of the subsystem that the process
//!   reaches are asked to reset the lost one ([`controller_resets`]), which ends the wait early.
//! * **Another namespace.** A controller that returns with a namespace of another identity, of a
//!   smaller size or with fewer abilities is refused ([`RemoteNamespace::accept`]).
//! * **ANA.** In a state other than optimized and non-optimized, requests fail with a path error.
//! * **Errors** become those of Linux ([`udm_wire::nvme::host::decide`]). A command may be repeated
//!   five times, after the delay that the controller asks for.
//! * **Memory.** As for NBD: data is copied between requests and the buffers of the connection.

mod admin_lane;
mod client;
mod command_send_queue;
mod connection;
mod controller_resets;
mod held_writes;
mod host_identity;
mod lane;
mod path_report;
mod remote_namespace;
mod remote_namespaces;
mod request;

pub use crate::stream::{ServerAddress, SocketOps};
pub use controller_resets::ControllerResets;
pub use path_report::NvmePathReport;
pub use remote_namespaces::KnownNamespace;
pub(crate) use remote_namespaces::RemoteNamespaceRegistry;

use admin_lane::AdminTaskHandle;
use lane::NvmeLane;
use remote_namespace::QueueNumber;
pub(crate) use remote_namespace::RemoteNamespace;
use std::sync::{Arc, OnceLock};
use udm_core::errno::EOPNOTSUPP;
use udm_core::{Cx, Device, DeviceControlError, DeviceId, Lane, Limits, SharedDiskState};
use udm_runtime::Ring;
use udm_wire::nvme::host::{HostOptions, ana_priority};
use udm_wire::uri::NvmeUri;

/// A namespace as a device.
pub(crate) struct NvmeDevice {
    id: DeviceId,
    namespace: Arc<RemoteNamespace>,
    /// Keeps the association from the first lane on, also while no lane is open.
    task: OnceLock<Arc<AdminTaskHandle>>,
}

impl NvmeDevice {
    pub(crate) fn new(namespace: Arc<RemoteNamespace>) -> NvmeDevice {
        NvmeDevice { id: DeviceId::new(), namespace, task: OnceLock::new() }
    }
}

/// Creates the namespace `uri` for a simulated world. The caller has read `known` from the
/// controller at `address`, and lanes get their sockets from `sockets`.
#[must_use]
pub fn create_simulated_nvme_device(
    uri: NvmeUri,
    address: ServerAddress,
    options: HostOptions,
    known: KnownNamespace,
    sockets: Box<dyn SocketOps>,
) -> Arc<dyn Device> {
    create_simulated_nvme_path(&Arc::default(), uri, address, options, known, sockets)
}

/// As [`create_simulated_nvme_device`], for a world with several paths: the controllers of devices
/// with the same `resets` reset each other.
#[must_use]
pub fn create_simulated_nvme_path(
    resets: &Arc<ControllerResets>,
    uri: NvmeUri,
    address: ServerAddress,
    options: HostOptions,
    known: KnownNamespace,
    sockets: Box<dyn SocketOps>,
) -> Arc<dyn Device> {
    let (shared, resets) = (Arc::default(), Arc::clone(resets));
    let namespace = RemoteNamespace::new(uri, vec![address], options, known, sockets, shared, resets);
    Arc::new(NvmeDevice::new(Arc::new(namespace)))
}

/// The lane that a task owns, for lanes without a queue.
struct SharedQueueDevice {
    id: DeviceId,
    namespace: Arc<RemoteNamespace>,
}

fn open_lane(
    namespace: &Arc<RemoteNamespace>,
    number: QueueNumber,
    task: Arc<AdminTaskHandle>,
    cx: &mut Cx<'_>,
) -> Result<Box<dyn Lane>, DeviceControlError> {
    let ring = Ring::of(cx).ok_or_else(|| {
        DeviceControlError::new(EOPNOTSUPP, "an NVMe controller needs a core with an io_uring")
    })?;
    Ok(Box::new(NvmeLane::new(ring, namespace, number, task, cx)))
}

impl Device for SharedQueueDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        let task = AdminTaskHandle::get_or_start(&self.namespace, cx);
        open_lane(&self.namespace, QueueNumber::shared(), task, cx)
    }

    fn limits(&self) -> Limits {
        self.namespace.limits()
    }
}

impl Device for NvmeDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn open(&self, cx: &mut Cx<'_>) -> Result<Box<dyn Lane>, DeviceControlError> {
        let task = AdminTaskHandle::get_or_start(&self.namespace, cx);
        let _ = self.task.set(Arc::clone(&task));
        if let Some(number) = RemoteNamespace::take_queue_number(&self.namespace) {
            return open_lane(&self.namespace, number, task, cx);
        }
        let namespace = Arc::clone(&self.namespace);
        let shared: Arc<dyn Device> = Arc::new(SharedQueueDevice { id: DeviceId::new(), namespace });
        Ok(self.namespace.forwarder.open(&shared, cx))
    }

    fn limits(&self) -> Limits {
        self.namespace.limits()
    }

    fn retry_now(&self) {
        self.namespace.retry_now();
    }

    fn shared_disk_state(&self) -> Option<&SharedDiskState> {
        Some(&self.namespace.shared_disk_state)
    }

    fn rejection_reason(&self) -> Option<String> {
        self.namespace.rejection_reason()
    }

    fn wwid(&self) -> Option<String> {
        self.namespace.facts().id.wwid()
    }

    fn path_priority(&self) -> Option<u32> {
        Some(ana_priority(self.namespace.ana()))
    }

    fn stall_reason(&self) -> Option<String> {
        self.namespace.stall_reason()
    }
}
