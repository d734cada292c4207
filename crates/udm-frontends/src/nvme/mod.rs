//! The NVMe/TCP target.
//!
//! [`NvmeServer`] listens for hosts. All exports of a server are the namespaces of one subsystem;
//! the discovery subsystem is on the same ports. A host connects an admin queue, which creates a
//! controller, and one I/O queue per core at most. Each queue is a TCP connection.
//!
//! The parts, in the order in which a connection meets them:
//!
//! * `listener`: accepts connections, within limits (those of NBD's `admission`).
//! * `handshake`: `ICReq` and the Connect command. Then the connection continues on the core of its
//!   queue: I/O queue `q` is on core `(q - 1) mod cores`.
//! * `subsystem`: namespaces and controllers. `association`: one controller with its queues.
//!   `identity`: identifiers that survive a restart.
//! * `queue`: a front end, the connection of one queue. `receive`: PDUs become commands and data;
//!   `transmit`: all PDUs of a turn leave in one send.
//! * `io`: commands become bios. `pending_command`: a command and its stages. `io_plan`: checks
//!   each command against its namespace, before any part reaches the device. `namespaces`: those
//!   that a queue has opened.
//! * `admin`: the commands of the admin queue. `events`: asynchronous events. `controller_state`:
//!   the properties by which a host enables and shuts down a controller.
//!   `cross_controller_reset`: a host fences the requests of a controller that it has lost.
//! * `peers`: other servers of the same subsystem, which a reset may concern.
//! * `authentication`: a host proves that it knows its secret, on each queue.
//! * `ana`: how good each port is for each device. `timers`: when a host is given up.
//! * `description`: what users see of all this.
//! * `host_counters`: I/O counters of hosts.
//! * `memory`: limits the data that the queues of a core hold.
//!
//! **Writes** of up to 16 KiB come with their command. For longer ones the controller sends one R2T
//! for all of the data, once it has memory, and receives them into the buffers of the bio.
//! **Reads** leave from the buffers of the bio.
//!
//! **The end of an association.** If its admin queue is lost or the keep-alive timer expires, all
//! its queues receive nothing more and wait for their requests at the devices. Only then the
//! controller is forgotten, and its number may be used again. A Cross-Controller Reset ends an
//! association in the same way, and is complete when it is forgotten. If an I/O queue is lost, only
//! that queue ends: Linux disconnects I/O queues before it shuts a controller down.
//!
//! **Not supported**: fused commands, reservations, TLS with pre-shared keys.

mod admin;
mod ana;
mod association;
mod authentication;
mod controller_state;
mod cross_controller_reset;
mod description;
mod events;
mod handshake;
mod host_counters;
mod identity;
mod io;
mod io_plan;
mod listener;
mod memory;
mod namespaces;
mod peers;
mod pending_command;
mod queue;
mod receive;
mod subsystem;
mod timers;
mod transmit;

pub use authentication::{NvmeHostSecrets, NvmeSecrets, random_instance_key};
pub use description::{NvmeControllerDescription, NvmeNamespaceDescription, NvmeSubsystemDescription};
pub use host_counters::NvmeHostIoReport;
pub use listener::{NvmePortError, NvmeServer, NvmeServerStats};
pub use peers::{NvmePeerReset, NvmePeers, NvmeResetOutcome, NvmeResetReply, OwnNvmeReset, instance_tag};

use crate::nbd::{NbdServerLimits, file_descriptor_limit};
use ipnet::IpNet;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;
use udm_wire::nvme::CONTROLLER_MAX;

/// The longest data in the capsule of a command, in bytes.
pub(crate) const CAPSULE_DATA_MAX: u32 = 16 << 10;

/// The longest data of a command, in bytes: 2 to the power of [`TRANSFER_MAX_LOG2`] pages of 4 KiB.
pub(crate) const TRANSFER_MAX: u32 = 1 << 20;
pub(crate) const TRANSFER_MAX_LOG2: u8 = 8;

/// Limit of entries in a queue.
pub(crate) const QUEUE_ENTRIES_MAX: u16 = 128;

/// Limit of data bytes in the unanswered commands of a queue.
pub(crate) const QUEUE_BYTES_MAX: usize = 16 << 20;

/// Limit of asynchronous event requests of a host.
pub(crate) const EVENT_REQUESTS_MAX: u8 = 4;

/// Version of the specification that controllers report: 1.4.
pub(crate) const VERSION: u32 = 0x0001_0400;

/// Model and firmware revision of controllers.
pub(crate) const MODEL: &str = "udm";
pub(crate) const FIRMWARE: &str = "1";

/// Limits of a target.
#[derive(Clone, Debug)]
pub struct NvmeServerLimits {
    /// Limit of connected queues. At least 1. Queues whose host is gone do not count, although the
    /// device may still have requests of theirs.
    pub connections_max: usize,
    /// Limit of these per address. At least 1. An address also has at most three quarters of
    /// `connections_max` together with its queues that wait for the device.
    pub peer_connections_max: usize,
    /// Limit of controllers. At least 1. An address has at most three quarters of them.
    pub controllers_max: usize,
    /// Limit of connections that are not connected to a queue yet. If one more connects, the oldest
    /// that has sent nothing is closed. At least 1.
    pub handshakes_max: usize,
    /// Time limit from the connection of a host to its Connect command.
    pub handshake_max: Duration,
    /// Limit of data bytes that the queues of one core share. Each queue may use 128 KiB and one
    /// command per core may use 1 MiB besides.
    pub core_bytes_max: usize,
    /// Time without a byte after which a host that does not take its data, or does not send the
    /// data of a write, is disconnected.
    pub stall_max: Duration,
    /// Time limit for a connection to deliver its last answers when the server stops.
    pub stop_max: Duration,
    /// The networks from which hosts may come; `None` for all.
    pub networks: Option<Arc<[IpNet]>>,
}

impl Default for NvmeServerLimits {
    fn default() -> NvmeServerLimits {
        NvmeServerLimits {
            connections_max: 4096,
            peer_connections_max: 3072,
            controllers_max: 1024,
            handshakes_max: 256,
            handshake_max: Duration::from_secs(30),
            core_bytes_max: 256 << 20,
            stall_max: Duration::from_secs(30),
            stop_max: Duration::from_secs(5),
            networks: None,
        }
    }
}

impl NvmeServerLimits {
    /// The limits by which connections are admitted: those of NBD clients, but of one "device".
    fn admission(&self) -> NbdServerLimits {
        let limits = NbdServerLimits {
            connections_max: self.connections_max,
            peer_connections_max: self.peer_connections_max,
            device_connections_max: self.connections_max,
            handshakes_max: self.handshakes_max,
            networks: self.networks.clone(),
            ..NbdServerLimits::default()
        };
        limits.within(file_descriptor_limit())
    }
}

/// Options of a target.
#[derive(Clone, Debug)]
pub struct NvmeServerOptions {
    /// Name of the subsystem ([`default_subsystem_nqn`]).
    pub subsystem: String,
    /// Names of the hosts that may connect; `None` for all.
    pub allowed_hosts: Option<Vec<String>>,
    /// Numbers of controllers begin after this. Two servers of one subsystem need different ones,
    /// because a host refuses two controllers of one subsystem with the same number.
    pub last_controller: u16,
    /// Numbers that controllers may have. There must be more than controllers at a time.
    pub controllers: RangeInclusive<u16>,
    /// Other servers of the same subsystem, if they are known.
    pub peers: Option<Arc<dyn NvmePeers>>,
    /// Time in milliseconds that the devices need at most to complete the requests of a host that
    /// is gone. Controllers report it as CQT: a host that cannot fence its writes by
    /// Cross-Controller Reset waits for it, besides its keep-alive timeout, before it repeats them.
    pub quiesce_time_ms: u16,
    /// Any random bytes that nobody else knows: those of controllers are made of them.
    pub instance_key: [u8; 32],
    /// Secrets of hosts. If there are some, each host needs one.
    pub secrets: NvmeSecrets,
    /// Limits.
    pub limits: NvmeServerLimits,
}

impl Default for NvmeServerOptions {
    /// No name of a subsystem, which is needed, and a key that everybody knows.
    fn default() -> NvmeServerOptions {
        NvmeServerOptions {
            subsystem: String::new(),
            allowed_hosts: None,
            last_controller: 0,
            controllers: 1..=CONTROLLER_MAX,
            peers: None,
            quiesce_time_ms: 30_000,
            instance_key: [0; 32],
            secrets: NvmeSecrets::new(),
            limits: NvmeServerLimits::default(),
        }
    }
}

/// The default name of a subsystem: always the same for the same `parts`, such as the name of the
/// machine and the first address.
#[must_use]
pub fn default_subsystem_nqn(parts: &[&str]) -> String {
    identity::subsystem_nqn(parts)
}
